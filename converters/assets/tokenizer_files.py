"""The tokenizer of a training without a Hugging Face folder: a SentencePiece model, or a tokenizer.json alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from converters.assets.token_files import (
    ADDED,
    CONFIG,
    GENERATION,
    KINDS,
    NAMED_TEMPLATES,
    SPECIAL,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    held_template,
    named_tokens,
    object_of,
)
from converters.assets.trusted import is_of_tokenizer, require_inside
from formats.checkpoint import Checkpoint
from formats.deepspeed import NEOX
from formats.errors import RefusedError, SourceError, VerificationError, short
from formats.huggingface.folder import INDEX

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NAMES = {"eos": ("<|endoftext|>",), "pad": ("<|padding|>", "<|pad|>")}
"""Tokens that end a document and fill a batch, the first that a tokenizer has: GPT-NeoX's (megatron/tokenizer/
tokenizer.py at ea7aefd8), and `<|pad|>`, that of SentencePiece models for it (`train tokenize` too)."""
NEAR = (TOKENIZER_CONFIG, SPECIAL, ADDED, "merges.txt", "vocab.json", TEMPLATE)
"""Files that travel with a tokenizer.json beside them, and so do those in `NAMED_TEMPLATES`."""
BEGINS = {"HFTokenizer": b"{", "SPMTokenizer": b"\n"}
"""The `tokenizer_type` whose `vocab_file` GPT-NeoX reads as a tokenizer.json, and as a SentencePiece model: the first
byte of such a file (megatron/tokenizer/tokenizer.py at ea7aefd8)."""
DEFAULT_TYPE = "GPT2BPETokenizer"
"""That of a yml without `tokenizer_type` (megatron/neox_arguments/neox_args.py at ea7aefd8)."""
CHECKED = 3000
"""How many texts a converted tokenizer is compared with SentencePiece on."""


class Tokenizer(NamedTuple):
    """A tokenizer in the form that Hugging Face reads.

    Attributes:
        path: the file that it was read from.
        files: contents of the files by name.
        size: how many tokens the tokenizer has.
        special: the ids of bos, eos, pad and unk, as far as there are any.
        notes: messages for the user.
    """

    path: Path
    files: Mapping[str, bytes]
    size: int
    special: Mapping[str, int]
    notes: tuple[str, ...]


def load(path: Path) -> Tokenizer:
    """Read a SentencePiece model, a tokenizer.json, or a folder that holds one.

    Raises:
        SourceError: the path is none of these.
        VerificationError: the fast tokenizer that was made from the model gives other ids.
    """
    if (path / TOKENIZER).is_file():
        return _fast(path / TOKENIZER)
    if path.suffix == ".json" and path.is_file():
        return _fast(path)
    if not path.is_file():
        raise SourceError(f"{path} is no tokenizer", "name a .model of SentencePiece, a tokenizer.json, or its folder")
    return _sentencepiece(path)


def named_in_yml(source: Checkpoint, option: str) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """The tokenizer that the yml of a GPT-NeoX checkpoint names, if the yml names one that exists.

    None beside a config, which has a vocabulary of its own and belongs to a tokenizer; and, with a note that says so,
    where the `tokenizer_type` of the yml is none of which `vocab_file` is read here, or the file is of another type.

    Args:
        source: the checkpoint.
        option: the option by which the user names a tokenizer, and its value.

    Raises:
        SourceError: what the yml names is damaged.
        RefusedError: it has more tokens than the config of the run, or of the user.
        VerificationError: as of `load`.
    """
    named = source.run_config.get("vocab_file") if source.format == NEOX.name else None
    if not isinstance(named, str) or not Path(named).exists():
        return None, ()
    path, kind = Path(named).absolute(), str(source.run_config.get("tokenizer_type", DEFAULT_TYPE))
    of_type = _is_of_type(path, kind)
    if source.config is not None:
        size, vocab = _size_of(path, kind) if of_type else None, source.spec.vocab
        decided = source.settings.vocab_size or "vocab" in source.settings.values
        if not decided and size is not None and vocab is not None and size > vocab:
            raise RefusedError(
                f"{path}, the vocab_file of the yml of {source.root}, has {size} tokens, the config in {source.assets} "
                f"{vocab}: they contradict each other",
                f"--tokenizer {quote(str(path))} --vocab-size {size}, or --vocab-size {vocab} for those of the config",
            )
        return None, ()
    if not of_type:
        default = "" if "tokenizer_type" in source.run_config else ", the default"
        return None, (
            f"{path}, the vocab_file of the yml of {source.root}, is not taken: it is not read as a tokenizer of "
            f"tokenizer_type {kind}{default}; `{option}` gives one",
        )
    try:
        tokenizer = _fast(path) if kind == "HFTokenizer" else _sentencepiece(path)
    except SourceError as error:
        raise SourceError(
            f"vocab_file of the yml of {source.root}: {error}",
            f"name another tokenizer of the run: {option}",
        ) from None
    note = f"the tokenizer is {path}, which the yml of {source.root} names (vocab_file)"
    return tokenizer._replace(notes=(note, *tokenizer.notes)), ()


def attached(source: Checkpoint, tokenizer: Tokenizer, folder: Path) -> Checkpoint:
    """A checkpoint with the files of a tokenizer in place of its own, and its special tokens in the configs.

    All other small files are those of the checkpoint, and so are ids of special tokens that the tokenizer does not
    name.

    Args:
        source: the checkpoint, opened with a vocabulary: its own, or else the size of the tokenizer.
        tokenizer: the tokenizer.
        folder: the folder that the files are written to, kept until the checkpoint is converted.

    Raises:
        RefusedError: the tokenizer has more tokens than the vocabulary.
    """
    from converters.assets.files import carried_assets, config_text, write

    notes, own = [*_size_notes(source, tokenizer)], carried_assets(source)
    config = json.loads(config_text(source, None))
    configs = {CONFIG: config, GENERATION: object_of(own, GENERATION)}
    if source.config is not None and GENERATION not in own:
        del configs[GENERATION]  # transformers takes its settings from the config
    ids = {f"{kind}_token_id": tokenizer.special.get(kind) for kind in KINDS}
    told = {key: number for key, number in ids.items() if number is not None}
    notes += _id_notes(configs, ids, tokenizer.path)
    configs = {name: content | told for name, content in configs.items()}
    config = configs[CONFIG] = configs[CONFIG] | {key: None for key in ids if key not in configs[CONFIG]}
    texts = {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in configs.items()}
    kept = {name: path for name, path in own.items() if name not in texts and not is_of_tokenizer(Path(name).name)}
    if source.assets is not None and (source.assets / INDEX).is_file():
        kept[INDEX] = require_inside(source.assets / INDEX, source.assets)
    write(folder, {**texts, **tokenizer.files}, kept)
    template = held_template(own)
    if template is not None and template != held_template({name: folder / name for name in tokenizer.files}):
        notes.append(f"the chat template of {source.assets} is not carried: it belongs to the tokenizer there")
    notes = [*source.notes, *tokenizer.notes, *notes]
    return replace(source, assets=folder, config=config, notes=tuple(notes), tokenizer_given=True)


def _size_notes(source: Checkpoint, tokenizer: Tokenizer) -> Iterator[str]:
    """A note on a tokenizer that has fewer tokens than the vocabulary.

    Raises:
        RefusedError: the tokenizer has more.
    """
    vocab, size = source.spec.vocab, tokenizer.size
    if vocab is not None and size > vocab:
        raise RefusedError(
            f"{tokenizer.path} has {size} tokens, the vocabulary of {source.root} {vocab}: they contradict each other",
            f"give the tokenizer of this model; or, if the training added tokens, --vocab-size {size}",
        )
    if vocab is not None and size < vocab:
        yield (
            f"{tokenizer.path} has {size} tokens, the vocabulary of {source.root} {vocab}: the other {vocab - size} "
            "rows are carried too"
        )


def _id_notes(configs: Mapping[str, Mapping[str, Any]], ids: Mapping[str, int | None], path: Path) -> Iterator[str]:
    """Notes on the ids of special tokens in the configs of a run that are not those of a tokenizer.

    Args:
        configs: the configs of the run, by name.
        ids: the ids of the tokenizer, None for those that it does not name, by their keys in the configs.
        path: what to call the tokenizer.
    """
    said = {(name, key): number for name, content in configs.items() for key, number in content.items() if key in ids}
    others = {place: number for place, number in said.items() if number not in (None, ids[place[1]])}
    texts = {place: f"{place[1]} {short(number)} of {place[0]}" for place, number in others.items()}
    if kept := [text for place, text in texts.items() if ids[place[1]] is None]:
        yield f"{path} does not name these tokens, whose ids are the run's: {', '.join(kept)}"
    if replaced := [f"{text} is now {ids[place[1]]}" for place, text in texts.items() if ids[place[1]] is not None]:
        yield f"ids of special tokens are those of {path}: {', '.join(replaced)}"
    if ids["eos_token_id"] is None and not any(key == "eos_token_id" for _, key in others):
        yield f"{path} names no token that ends a text, so that nothing stops generation: eos_token_id is null"


def _sentencepiece(path: Path) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor

    from converters.assets.chat_template import MARKER
    from converters.assets.sentencepiece import convert_tokenizer
    from converters.assets.tokenizer_proof import check

    converted = convert_tokenizer(path)
    tokens = [piece for piece in converted.pieces if MARKER.fullmatch(piece)]
    model = SentencePieceProcessor()
    model.LoadFromSerializedProto(converted.reference)
    control = [token for token in tokens if token in converted.control or not model.is_unused(model.piece_to_id(token))]
    names = _usual_names(tokens.__contains__)
    converted = convert_tokenizer(path, control=control, names=names)
    wrong = [check_result for check_result in check(converted, CHECKED) if check_result.different]
    if wrong:
        raise VerificationError(
            f"{wrong[0].different} of {wrong[0].compared} {wrong[0].what} get other ids from the tokenizer made "
            f"of {path}",
            f"look with `convert tokenizer {path} FOLDER --allow-mismatches 0.01`, then --tokenizer FOLDER",
        )
    return Tokenizer(path, converted.files, converted.size, converted.special, converted.notes)


def _usual_names(has: Callable[[str], bool]) -> dict[str, str]:
    """The tokens of `NAMES` that a tokenizer has, by role."""
    found = {role: next(filter(has, tokens), None) for role, tokens in NAMES.items()}
    return {role: token for role, token in found.items() if token is not None}


def _is_of_type(path: Path, kind: str) -> bool:
    """Whether a `vocab_file` is read as a tokenizer of its type: no folder, and not begun as a file of another type."""
    if kind not in BEGINS or not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.read(1)
    return first == BEGINS[kind] or first not in BEGINS.values()


def _size_of(path: Path, kind: str) -> int | None:
    """The number of tokens of a `vocab_file` of that type, None if the file is damaged."""
    from sentencepiece import SentencePieceProcessor

    try:
        if kind == "HFTokenizer":
            return _backend(path).get_vocab_size(with_added_tokens=True)
        return SentencePieceProcessor(model_file=str(path)).get_piece_size()
    except (SourceError, OSError, RuntimeError):
        return None


def _backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the library raises nothing narrower
        raise SourceError(f"{path} is no tokenizer.json: {error}") from None


def _fast(path: Path) -> Tokenizer:
    backend = _backend(path)
    near = [path.parent / name for name in NEAR] + sorted((path.parent / NAMED_TEMPLATES).glob("*.jinja"))
    files = {file.relative_to(path.parent).as_posix(): file.read_bytes() for file in near if file.is_file()}
    names = _usual_names(lambda token: backend.token_to_id(token) is not None)
    names |= named_tokens({name: path.parent / name for name in files})
    ids = {role: backend.token_to_id(token) for role, token in names.items()}
    special = {role: number for role, number in ids.items() if number is not None}
    if TOKENIZER_CONFIG not in files:
        named = {f"{role}_token": names[role] for role in special}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        files[TOKENIZER_CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    files[TOKENIZER] = path.read_bytes()
    return Tokenizer(path, files, backend.get_vocab_size(with_added_tokens=True), special, ())
