"""What belongs to a model besides its weights: config, generation config, tokenizer, chat template, licence.

They travel inside a Megatron folder (in `huggingface/`) and come back out of it, byte for byte unless a setting
changed on the way.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from converters.assets.custom_code import missing_code
from converters.assets.trusted import UNKNOWN, require_inside, require_there, why_not
from converters.common.atomic import named, synced
from formats.checkpoint import Checkpoint
from formats.disk.json_file import read_json
from formats.errors import SourceError
from formats.families import FAMILIES
from formats.families.family import FAMILY_FILE
from formats.huggingface import mtp
from formats.huggingface.config import dropouts, to_huggingface
from formats.huggingface.folder import INDEX, NAME, SINGLE, read_weight_map
from formats.huggingface.nulls import tokens_beyond
from formats.huggingface.quantized import stale
from formats.model.spec import ModelSpec, Spec

OWN = ("*.safetensors", INDEX, "vitruvian.json")
"""What each output writes anew."""
RECORDS = {"evaluation_results.json": ".", "train_params.yaml": "..", "benchmark_results.json": ".."}
"""What a training leaves beside (.) or above (..) a checkpoint, and its model keeps."""
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")
"""What says which tokens there are, and how a dialogue is written with them."""
PROCESSOR = re.compile(r"(?:(?:video_|image_)?(?:pre)?processor)_config\.json")
"""What makes tensors of images and sound."""
MOST = 1 << 30
"""Bytes of a file that is compared."""
LAST = 1 << 10
"""Bytes at the end of a tokenizer.json that are looked at."""
PAD = "pad_token_id"
"""The token for which an embedding of transformers has to have a row."""
FOLDERS = ("additional_chat_templates",)
DTYPE = ("dtype", "torch_dtype")
"""What transformers 5 and 4 call the element type of the weights in a config."""
TORCH_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(relative name, path) of every asset in a folder: each file that holds no weights, and has a name that we know.

    Raises:
        SourceError: one is a link that leads out of the folder or nowhere, or no regular file.
    """
    for path in sorted(folder.iterdir()):
        require_there(path, folder)
        if path.is_file() and not why_not(path) and not any(fnmatchcase(path.name, own) for own in OWN):
            yield path.name, require_inside(path, folder)
        if path.is_dir() and path.name in FOLDERS:
            for inner in sorted(path.iterdir()):
                if inner.is_file() and not why_not(inner):
                    yield f"{path.name}/{inner.name}", require_inside(inner, folder)


def carried(source: Checkpoint) -> dict[str, Path]:
    """The assets that travel with the weights of a checkpoint, by relative name: of text alone none of images."""
    by_name = {} if source.assets is None else dict(files(source.assets))
    return {name: path for name, path in by_name.items() if not (source.settings.only and PROCESSOR.fullmatch(name))}


def left_behind(source: Checkpoint) -> list[str]:
    """Tokenizer and template that a checkpoint has itself, where others travel instead: those of another folder."""
    if source.assets is None or source.assets.resolve() == source.root.resolve():
        return []
    own = [name for name in TOKENIZER if (source.root / name).is_file() and (source.root / name).stat().st_size < MOST]
    return [
        name for name in own
        if not (source.assets / name).is_file()
        or (source.assets / name).read_bytes() != require_inside(source.root / name, source.root).read_bytes()
    ]  # fmt: skip


def not_carried(folder: Path) -> list[str]:
    """The files of a folder that do not travel since nobody knows their names, or since they are no regular files."""
    return [
        path.name
        for path in sorted(folder.iterdir())
        if not path.is_dir() and (why_not(path) or ("" if path.is_file() else UNKNOWN)) == UNKNOWN
    ]


def records(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of what is on record about a checkpoint."""
    for name, where in RECORDS.items():
        if (folder / where / name).is_file():
            yield name, require_inside(folder / where / name, folder / where)


def own_family(spec: Spec, folder: str = "") -> dict[str, Path]:
    """The file of a family of the user's own, by which the output can be opened again."""
    file = FAMILIES[spec.family].file if isinstance(spec, ModelSpec) else None
    return {} if file is None else {f"{folder}{FAMILY_FILE}": file}


def config_text(source: Checkpoint, dtype: str | None, spec: Spec | None = None) -> bytes:
    """The config.json that belongs to a checkpoint's weights.

    Args:
        source: the opened checkpoint.
        dtype: the element type that a cast gave the weights, None without one.
        spec: that of the output, when its vocabulary has grown.
    """
    spec = spec or source.spec
    counted = list(source.dtypes().values())
    usual = max(counted, key=counted.count)
    if source.assets is None or source.config is None:
        alone = mtp.counted(to_huggingface(spec, {}), spec, source.dropped)
        return _dump(alone | {"torch_dtype": TORCH_NAMES.get(dtype or usual, "float32")})
    path, base = require_inside(source.assets / "config.json", source.assets), source.config
    config = mtp.counted(to_huggingface(spec, base), spec, source.dropped)
    plain = stale(config, counted) and (source.format != NAME or isinstance(spec, ModelSpec))
    if plain:
        del config["quantization_config"]
    named = "dtype" if "dtype" in config else "torch_dtype"
    dtypes = {config[key] for key in DTYPE if isinstance(config.get(key), str)}
    if dtype is None and (((source.format != NAME or plain) and named in config) or len(dtypes) > 1):
        dtype = usual  # a training rarely keeps its weights in the type of the model that it began with
    if dtype in TORCH_NAMES:
        config |= dict.fromkeys([named, *(key for key in DTYPE if key in config)], TORCH_NAMES[dtype])
    return path.read_bytes() if config == base and not source.settings.only else _dump(config)


def dropouts_of(source: Checkpoint) -> dict[str, float]:
    """What a training of a checkpoint drops out, in Megatron's terms, as far as its yml or its config says."""
    return dropouts(source.run_config or source.config or {})


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def shard_map(source: Checkpoint) -> bytes:
    """An index that remembers which file held which tensor, also when it was a single one."""
    if (source.root / INDEX).is_file() and not source.settings.only:
        return require_inside(source.root / INDEX, source.root).read_bytes()
    return _dump({"metadata": {}, "weight_map": {placed.key: SINGLE for placed in source.tensors}})


def remembered_index(folder: Path | None) -> dict[str, Any] | None:
    """The index that travels with a checkpoint, None without one."""
    if folder is None or not (folder / INDEX).is_file():
        return None
    return read_json(require_inside(folder / INDEX, folder)) | {"weight_map": read_weight_map(folder)}


def _ended(path: Path) -> bool:
    """Whether a JSON object ends where the file does. To parse it whole takes ten times its size of memory."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST))
        return file.read().rstrip().endswith(b"}")


def checks(folder: Path, config: Mapping[str, Any] | None, spec: Spec) -> list[str]:
    """Where config, generation config, tokenizer and code of the model's own do not fit each other, or are damaged.

    Args:
        folder: where they are.
        config: the config.json in it, None where it was not parsed yet.
        spec: the model's settings.
    """
    notes = []
    named = {"config.json": "", "generation_config.json": "", "tokenizer_config.json": "added_tokens_decoder"}
    for name, key in named.items():
        parsed = config if name == "config.json" else None
        if parsed is None and not (folder / name).is_file():
            continue
        try:
            document = read_json(folder / name) if parsed is None else parsed
        except SourceError as error:
            notes.append(str(error))
            continue
        if key:
            inner = document.get(key)
            ids = list(_ids(inner if isinstance(inner, dict) else ()))
        else:
            ids = list(_ids(document.get(f"{kind}_token_id") for kind in ("bos", "eos", "pad")))
        beyond = sorted(token for token in ids if spec.vocab is not None and token >= spec.vocab)
        if beyond:
            notes.append(f"{name} names token {beyond[-1]}, the vocabulary has {spec.vocab}")
        family = FAMILIES.get(spec.family)
        if name == "config.json" and family and PAD not in document and PAD in tokens_beyond({}, family, spec.vocab):
            notes.append(
                f"{folder / name} does not say {PAD}, for which transformers takes {family.tokens[PAD]}, the "
                f"vocabulary has {spec.vocab}: it builds no such model; give the key there, or null"
            )
    by_name = dict(files(folder))
    notes += missing_code(by_name)
    if (path := by_name.get(TOKENIZER[0])) and not _ended(path):
        notes.append(f"{path} is cut off: it does not end as a JSON object does")
    if not has_tokenizer(folder):
        notes.append(f"no tokenizer is in {folder}")
    return notes


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    return any((folder / name).is_file() for name in names)


def _ids(values: Any) -> Iterator[int]:
    for value in values:
        for number in value if isinstance(value, list) else [value]:
            if type(number) is int or (isinstance(number, str) and re.fullmatch("[0-9]{1,18}", number)):
                yield int(number)


def write(root: Path, texts: Mapping[str, bytes], copies: Mapping[str, Path]) -> None:
    """Write small files below a folder, and force them to disk.

    Raises:
        SourceError: one that is to be copied cannot be read.
    """
    for name, content in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with synced(path) as handle:
            handle.write(content)
    for name, source in copies.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            left, reader = source.stat().st_size, source.open("rb")
        except OSError as error:
            raise SourceError(f"{source}: {error.strerror}") from None
        with named(path), reader, synced(path) as writer:
            if not _copied(reader, writer, left):
                raise SourceError(
                    f"{source} changes while it is copied", "the same command again, once nothing writes it"
                )


def _copied(reader: BinaryIO, writer: BinaryIO, left: int) -> bool:
    """Copy a file that has so many bytes; whether it still has them afterwards, as one that grows may never end."""
    while left and (piece := reader.read(min(left, 1 << 20))):
        writer.write(piece)
        left -= len(piece)
    return not left and not reader.read(1)
