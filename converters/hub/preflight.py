"""Check that a Hugging Face folder can be served: config, tokenizer, chat template and special ids fit each other.

Weights are not read here. Each finding is one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from converters.assets.chat_template import probe
from converters.assets.custom_code import missing_code
from converters.assets.token_files import (
    CONFIG,
    GENERATION,
    SLOW,
    SPLIT,
    TOKENIZER_CONFIG,
    WRITTEN,
    Assets,
    content,
    eos_ids,
    held_template,
    named_tokens,
    object_of,
    split_tokens,
    token_entries,
    token_ids,
    tokens_outside,
)
from converters.assets.tokenizer_json import NAME, Vocabulary, read_vocabulary, with_flags
from formats.checkpoint import ASSETS
from formats.disk.json_file import read_json
from formats.disk.safetensors import read_safetensors
from formats.errors import RefusedError, SourceError, UsageError, short
from formats.huggingface.folder import INDEX, SINGLE, read_weight_map
from formats.model.vocab_rows import EMBEDDING


class Finding(NamedTuple):
    """A fault in the files of a model.

    Attributes:
        sentence: the fault.
        blocks: whether the model cannot be served because of the fault; else only training with the template suffers.
    """

    sentence: str
    blocks: bool = True


def embedding_rows(folder: Path) -> int:
    """How many rows a model's embedding has: in its weights, or without weights the vocab_size in config.json.

    Raises:
        UsageError: the folder is no Hugging Face model.
        SourceError: a header is broken.
    """
    in_run = folder.name == ASSETS and not any(folder.glob("*.safetensors"))  # of its source it has the index alone
    if not in_run and ((folder / INDEX).is_file() or (folder / SINGLE).is_file()):
        placed = read_weight_map(folder)
        embeddings = {SINGLE} if placed is None else {name for key, name in placed.items() if EMBEDDING.fullmatch(key)}
        for name in sorted(embeddings):
            for key, tensor in read_safetensors(folder / name)[0].items():
                if EMBEDDING.fullmatch(key) and tensor.shape:
                    return tensor.shape[0]
    vocab = read_json(folder / CONFIG).get("vocab_size") if (folder / CONFIG).is_file() else None
    if type(vocab) is not int:
        raise UsageError(f"{folder} is no Hugging Face model: neither an embedding nor a vocab_size in its config.json")
    return vocab


def findings(assets: Assets, rows: int | None, need_template: bool = False) -> list[Finding]:
    """The faults in files that are to be published, which need not be in one folder.

    Args:
        assets: relative name to path.
        rows: how many rows the embedding has, None if unknown.
        need_template: whether the model is to be served with its chat template, so that faults of the template block.
    """
    problems = [*_findings_of(lambda: _config(assets)), *map(Finding, missing_code(assets))]
    vocabulary = None
    if NAME in assets:
        try:
            vocabulary = read_vocabulary(content(assets, NAME))
        except SourceError as error:
            problems.append(Finding(str(error)))
    problems += _findings_of(lambda: _tokenizer(assets, vocabulary, rows, need_template))
    problems += _findings_of(lambda: _special(assets, vocabulary, rows))
    problems += _findings_of(lambda: _template(assets, vocabulary, need_template))
    return list(dict.fromkeys(problems))


def _findings_of(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; an error on reading a file is a finding too."""
    try:
        yield from check()
    except SourceError as error:
        yield Finding(str(error))


def _config(assets: Assets) -> Iterator[Finding]:
    """Findings on config.json. Merges of a wrapped model may name FSDPLlamaForCausalLM, which nothing can load."""
    if CONFIG not in assets:
        yield Finding(f"there is no {CONFIG}")
        return
    named = object_of(assets, CONFIG).get("architectures")
    if not (isinstance(named, list) and named and all(isinstance(name, str) for name in named)):
        yield Finding(f"{CONFIG} names no architectures")
    elif wrapped := [name for name in named if name.startswith("FSDP")]:
        yield Finding(f"{CONFIG} names the architecture {short(wrapped[0])}, a wrapper of the training framework")


def _tokenizer(assets: Assets, known: Vocabulary | None, rows: int | None, need_template: bool) -> Iterator[Finding]:
    if known is not None and rows is not None:
        outside = tokens_outside(assets, known)
        whole = known.extended({token: special for token, (_, special) in outside.items()})
        for text in whole.excess(rows):
            used = f"{held_template(assets)} {[*named_tokens(assets).values()]}"
            yield Finding(text, blocks=whole.lacks(rows, used))
    if NAME in assets:
        return
    slow = next((name for name in SLOW if name in assets), None)
    if slow is None:
        yield Finding(f"there is no tokenizer: no {NAME}")
    else:
        yield Finding(f"{slow} has no {NAME} beside it, so that its tokens cannot be checked", need_template)


def _special(assets: Assets, known: Vocabulary | None, rows: int | None) -> Iterator[Finding]:
    """Findings on the names of bos, eos and pad, and on the ids of special tokens."""
    named = named_tokens(assets)
    for kind, token in named.items():
        if known is not None and token not in known.ids:
            yield Finding(f"the tokenizer has no token {short(token)}, which is its {kind}_token")
    known_ids = set(known.ids.values()) if known is not None else None
    for name in (GENERATION, CONFIG):
        values: dict[str, Any] = object_of(assets, name)
        for key in WRITTEN:
            for number in token_ids(values.get(key), f"{key} of {name}"):
                if key == "pad_token_id" and number == -1:
                    continue  # how the first Llama configs spell "none"
                if number < 0 or (rows is not None and number >= rows):
                    yield Finding(f"{key} of {name} is {number}, the embedding has {rows or 'no such'} rows")
                elif known_ids is not None and number not in known_ids:
                    yield Finding(f"{key} of {name} is {number}, an id that the tokenizer does not have")
    eos = known.ids.get(named.get("eos", "")) if known is not None else None
    if eos is not None and eos_ids(assets) and eos not in eos_ids(assets):
        yield Finding(f"generation stops at {sorted(eos_ids(assets))}, the tokenizer's {named['eos']} has id {eos}")
    if eos is not None and not eos_ids(assets):
        text = f"{GENERATION} names no eos_token_id, so that no text ends; the tokenizer's {named['eos']} has id {eos}"
        yield Finding(text, blocks=False)
    if not eos_ids(assets) and "eos" not in named:
        yield Finding(f"nothing says where a text ends: {GENERATION} and {TOKENIZER_CONFIG} name no eos")


def _template(assets: Assets, known: Vocabulary | None, need: bool) -> Iterator[Finding]:
    template = held_template(assets)
    if template is None:
        if need:
            yield Finding("there is no chat template")
        return
    named = named_tokens(assets)
    try:
        seen = probe(template, bos_token=named.get("bos"), eos_token=named.get("eos"))
        added = known.added if known is not None else {}
        ending = seen.terminator({*added, *seen.markers(), *named.values()})
        faults = seen.faults(ending)
    except (SourceError, RefusedError) as error:
        yield Finding(str(error), need)
        return
    yield from (Finding(fault, False) for fault in faults)
    for kind in ("bos", "eos"):
        if f"{kind}_token" in seen.names and kind not in named:
            yield Finding(f"the chat template uses {kind}_token, and {TOKENIZER_CONFIG} names none", need)
    if ending is None:
        yield Finding("the chat template ends a reply with no special token, so that a model would never stop", need)
    elif name := split_tokens(assets):
        yield Finding(f"{name} says {SPLIT}: transformers encodes {ending}, which ends a reply, as plain text", need)
    elif known is not None and not _matched(assets, known, ending):
        yield Finding(f"{ending}, which ends a reply, is not a single special token of the tokenizer", need)
    elif known is not None and known.ids[ending] not in eos_ids(assets):
        yield Finding(
            f"{ending}, which ends a reply, has id {known.ids[ending]}, at which generation does not stop", need
        )


def _matched(assets: Assets, known: Vocabulary, token: str) -> bool:
    """Whether a token is found in a text, by tokenizer.json and with the flags that other files give it."""
    entries = token_entries(assets)
    flagged = with_flags(content(assets, NAME), entries[token].token) if token in entries else known
    return known.single(token) and flagged.single(token)
