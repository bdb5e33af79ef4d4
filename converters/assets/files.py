"""The files of a model besides its weights: config, generation config, tokenizer, chat template, licence.

They are carried inside a Megatron folder (in `huggingface/`) and back out of it, byte for byte unless a setting
changed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from converters.assets.custom_code import missing_code, own_models
from converters.assets.replaceable import is_of_training
from converters.assets.token_files import WRITTEN
from converters.assets.trusted import (  # fmt: skip
    TOO_LARGE,
    UNKNOWN,
    refusal_reason,
    require_inside,
    require_there,
)
from converters.common.atomic import named
from formats.checkpoint import ASSETS, Checkpoint
from formats.disk.json_file import read_json
from formats.disk.safetensors import FLOATS
from formats.errors import SourceError, some
from formats.families import FAMILIES, family_named
from formats.families.family import FAMILY_FILE
from formats.huggingface import mtp
from formats.huggingface.config import dropouts, to_huggingface
from formats.huggingface.folder import CONFIG, INDEX, NAME, SINGLE, read_weight_map
from formats.huggingface.lora_config import CONFIG as ADAPTER
from formats.huggingface.nulls import tokens_beyond
from formats.huggingface.quantized import method_of, without_quantization
from formats.model.spec import ModelSpec, Spec, Verbatim

OWN = ("*.safetensors", INDEX, "vitruvian.json")
"""Patterns of files that each output writes anew."""
RECORDS = {"evaluation_results.json": ".", "train_params.yaml": "..", "benchmark_results.json": ".."}
"""Records that a training writes beside (.) or above (..) a checkpoint, and that are carried with the model."""
PROCESSOR = re.compile(r"(?:(?:video_|image_)?(?:pre)?processor)_config\.json")
"""Configs of processors, which make tensors from images and sound."""
LAST = 1 << 10
"""Bytes at the end of a tokenizer.json that are checked."""
PAD = "pad_token_id"
"""The token for which an embedding of transformers has to have a row."""
QUANTIZATION = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Settings of a quantization beside config.json: of ModelOpt, AutoGPTQ and AutoAWQ."""
FOLDERS = ("additional_chat_templates", "custom_generate")
"""Folders whose files are carried: chat templates, code of `generate` (transformers 5.23.0, generation/utils.py)."""
SUBFOLDERS = "subfolders, of which only those for chat templates and `generate` are"
LEFT_OUT = {UNKNOWN: "not names of model files", TOO_LARGE: TOO_LARGE, SUBFOLDERS: SUBFOLDERS}
"""Reason why what might be taken for an asset is not carried, as a note gives it."""
DTYPE = ("dtype", "torch_dtype")
"""The config keys for the element type of the weights, in transformers 5 and 4."""
TORCH_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(relative name, path) of every asset in a folder: each file without weights that has a known name.

    Raises:
        SourceError: a file is a link that leads out of the folder or nowhere, or is no regular file.
    """
    for path in sorted(folder.iterdir()):
        require_there(path, folder)
        if path.is_file() and not refusal_reason(path) and not any(fnmatchcase(path.name, own) for own in OWN):
            yield path.name, require_inside(path, folder)
        if path.is_dir() and path.name in FOLDERS:
            for inner in sorted(path.iterdir()):
                if inner.is_file() and not refusal_reason(inner):
                    yield f"{path.name}/{inner.name}", require_inside(inner, folder)


def carried_assets(source: Checkpoint) -> dict[str, Path]:
    """The assets that are carried with the weights of a model, by relative name; no processor with --only text.

    Settings of an adapter are not among them: transformers would look for the adapter in the output. Neither are those
    of a quantization of other weights: servers would take these for quantized ones.
    """
    by_name = {} if source.assets is None else dict(files(source.assets))
    of_others = {ADAPTER, *(QUANTIZATION if _is_of_other_weights(source) else ())}
    by_name = {name: path for name, path in by_name.items() if name not in of_others}
    return {name: path for name, path in by_name.items() if not (source.settings.only and PROCESSOR.fullmatch(name))}


def _is_of_other_weights(source: Checkpoint) -> bool:
    """Whether a quantization that config.json and the files beside it describe is not that of a checkpoint's weights.

    So it is where all tensors are floats, but for a Hugging Face folder that is carried as it is: a quantization of the
    KV cache is described in the same place.
    """
    origin = source.original or source
    carried = origin.format == NAME and not (isinstance(origin.spec, ModelSpec) and method_of(origin.config or {}))
    return not carried and has_floats_alone(origin)


def has_floats_alone(source: Checkpoint) -> bool:
    """Whether no tensor of a checkpoint has a type of quantized weights: all are floats, or positions and masks."""
    return set(source.dtypes().values()) <= {*FLOATS, "I64", "BOOL"}


def quantization_notes(source: Checkpoint) -> Iterator[str]:
    """A note on what describes a quantization of weights, which are not quantized: carried or not.

    The key of a Hugging Face folder whose weights are dequantized is not named: a note says that they are.
    """
    keys = without_quantization(source.config or {})[1]
    names = [f"{key} (config.json)" for key in keys if source.format != NAME]
    names += [name for name in QUANTIZATION if source.assets and (source.assets / name).is_file()]
    if names and _is_of_other_weights(source):
        yield (
            f"{some(names, 4)} of {source.assets} {'is' if len(names) == 1 else 'are'} not carried: the weights that "
            "are written are not quantized"
        )
    elif keys and isinstance(source.spec, Verbatim) and has_floats_alone(source):
        yield f"{some(keys, 4)} in the config.json of {source.assets} stays, and no weight is quantized"


def not_carried(folder: Path, weights: Collection[Path]) -> dict[str, list[str]]:
    """What is beside the assets of a folder and might be taken for one, by the reason why it is not carried.

    Args:
        folder: the folder of the assets.
        weights: the files of weights that are read, whose subfolders are not named.
    """
    by_reason: dict[str, list[str]] = {}
    for place in (folder, *(folder / name for name in FOLDERS if (folder / name).is_dir())):
        for path in sorted(place.iterdir()):
            name, reason = path.relative_to(folder).as_posix(), refusal_reason(path)
            if path.is_dir():
                known = name in (*FOLDERS, ASSETS) or any(file.is_relative_to(path) for file in weights)
                name, reason = f"{name}/", reason or ("" if known or is_of_training(path) else SUBFOLDERS)
            elif not path.is_file():
                reason = reason or UNKNOWN
            elif reason == TOO_LARGE:
                name += f" ({path.stat().st_size:,} bytes)"
            if reason in LEFT_OUT:
                by_reason.setdefault(LEFT_OUT[reason], []).append(name)
    return by_reason


def records(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of the records of a training beside or above a checkpoint (`RECORDS`)."""
    for name, where in RECORDS.items():
        if (folder / where / name).is_file():
            yield name, require_inside(folder / where / name, folder / where)


def own_family(spec: Spec, folder: str = "") -> dict[str, Path]:
    """The file of a family of the user's own, with which the output can be opened again; empty for other families."""
    file = FAMILIES[spec.family].file if isinstance(spec, ModelSpec) else None
    return {} if file is None else {f"{folder}{FAMILY_FILE}": file}


def config_text(source: Checkpoint, dtype: str | None, spec: Spec | None = None) -> bytes:
    """The config.json that belongs to a checkpoint's weights.

    Args:
        source: the opened checkpoint.
        dtype: the element type of a cast, None without a cast.
        spec: the spec of the output, when its vocabulary has grown.

    Raises:
        SourceError: the file has changed since the checkpoint was opened.
    """
    spec = spec or source.spec
    counted = list(source.dtypes().values())
    usual = max(counted, key=counted.count)
    if source.config is None or (source.assets is None and isinstance(spec, ModelSpec)):
        alone = mtp.with_layer_count(to_huggingface(spec, {}), spec, source.dropped)
        return _dump({**alone, **source.token_ids, "torch_dtype": TORCH_NAMES.get(dtype or usual, "float32")})
    base = source.config
    config = mtp.with_layer_count(to_huggingface(spec, base), spec, source.dropped)
    if isinstance(spec, Verbatim) and "tied" in source.settings.values:
        config["tie_word_embeddings"] = spec.tied  # which a class may assume otherwise where nothing is said
    config, stale = without_quantization(config) if _is_of_other_weights(source) else (config, [])
    named = "dtype" if "dtype" in config else "torch_dtype"
    dtypes = {config[key] for key in DTYPE if isinstance(config.get(key), str)}
    if dtype is None and (((source.format != NAME or stale) and named in config) or len(dtypes) > 1):
        dtype = usual  # a training rarely keeps its weights in the type of the model that it began with
    if dtype in TORCH_NAMES:
        config |= dict.fromkeys([named, *(key for key in DTYPE if key in config)], TORCH_NAMES[dtype])
    if source.assets is None or config != base or source.settings.only:
        return _dump(config)
    path = require_inside(source.assets / "config.json", source.assets)
    if json.dumps(read_json(path)) != json.dumps(base):
        raise SourceError(f"{path} has changed since the checkpoint was opened", "run it again")
    return path.read_bytes()


def near_folders(source: Checkpoint) -> dict[Path, Path]:
    """The folders in which small files of a checkpoint's own may be beside its weights, by their real paths."""
    homes = [source.home, source.root]
    if not (source.home / CONFIG).is_file() and (source.home.parent / CONFIG).is_file():
        homes.append(source.home.parent)  # readers look there too
    return {place.resolve(): place for home in homes for place in (home / ASSETS, home)}


def dropouts_of(source: Checkpoint) -> dict[str, float]:
    """The dropout probabilities of a training, under the names of Megatron's arguments.

    They are those of its yml; without one those of the config.json beside the weights, and then of the one that is
    carried.
    """
    if source.run_config:
        return dropouts(source.run_config)
    own = (dropouts(_config_in(place)) for place in near_folders(source).values()) if source.settings.config else ()
    return dropouts(source.config or {}) | next(filter(None, own), {})


def _config_in(folder: Path) -> dict[str, Any]:
    """The config.json of a model in a folder; empty where there is none that can be read."""
    try:
        config = read_json(folder / CONFIG)
    except SourceError:
        return {}
    return config if isinstance(config.get("model_type"), str) else {}


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def shard_map(source: Checkpoint) -> bytes:
    """The index that records which file held which tensor, also for a single file."""
    if (source.root / INDEX).is_file() and not source.settings.only:
        return require_inside(source.root / INDEX, source.root).read_bytes()
    return _dump({"metadata": {}, "weight_map": {placed.key: SINGLE for placed in source.tensors}})


def remembered_index(folder: Path | None) -> dict[str, Any] | None:
    """The index that is carried with a checkpoint, None without one."""
    if folder is None or not (folder / INDEX).is_file():
        return None
    return read_json(require_inside(folder / INDEX, folder)) | {"weight_map": read_weight_map(folder)}


def _ended(path: Path) -> bool:
    """Whether a file ends as a JSON object does. To parse all of it would take ten times its size of memory."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST))
        return file.read().rstrip().endswith(b"}")


def checks(folder: Path, config: Mapping[str, Any] | None, spec: Spec) -> list[str]:
    """Notes on config, generation config, tokenizer and custom code that do not fit each other, or are damaged.

    Args:
        folder: the folder of these files.
        config: the config.json in the folder, None if it was not parsed yet.
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
            ids = list(_ids(map(document.get, WRITTEN)))
        beyond = sorted(token for token in ids if spec.vocab is not None and token >= spec.vocab)
        if beyond:
            notes.append(f"{name} names token {beyond[-1]}, the vocabulary has {spec.vocab}")
        family = FAMILIES.get(spec.family)
        if name == "config.json" and family and PAD not in document and PAD in tokens_beyond({}, family, spec.vocab):
            notes.append(
                f"{folder / name} does not say {PAD}, for which transformers takes {family.tokens[PAD]}, the "
                f"vocabulary has {spec.vocab}: it builds no such model; give the key there, or null"
            )
        if name == "config.json" and isinstance(spec, ModelSpec) and (own := own_models(document)):
            notes.append(
                f"auto_map of {folder / name} names {some(own, 2)}, which trust_remote_code runs: that code is not "
                f"read, the weights are taken for those of transformers' {family_named(spec.family).architecture}"
            )
    by_name = dict(files(folder))
    notes += missing_code(by_name)
    if (path := by_name.get("tokenizer.json")) and not _ended(path):
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


def write(root: Path, texts: Mapping[str, bytes], copies: Mapping[str, Path]) -> list[Path]:
    """Write small files below a folder. Returns their paths; they are not forced to disk yet.

    Raises:
        SourceError: a file that is to be copied cannot be read, or changes during the copy.
    """
    for name, content in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name, source in copies.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            remaining, reader = source.stat().st_size, source.open("rb")
        except OSError as error:
            raise SourceError(f"{source}: {error.strerror}") from None
        with named(path), reader, path.open("wb") as writer:
            if not _copied(reader, writer, remaining):
                raise SourceError(
                    f"{source} changes while it is copied", "the same command again, once nothing writes it"
                )
    return [root / name for name in (*texts, *copies)]


def _copied(reader: BinaryIO, writer: BinaryIO, remaining: int) -> bool:
    """Copy a file of `remaining` bytes. Returns whether it still has that size; a growing file might have no end."""
    while remaining and (piece := reader.read(min(remaining, 1 << 20))):
        writer.write(piece)
        remaining -= len(piece)
    return not remaining and not reader.read(1)
