"""Read and write Hugging Face folders: safetensors files, with an index when there are several.

Facts: transformers 5.23.0 modeling_utils.py `save_pretrained`, huggingface_hub 2.4.0 serialization/_base.py (greedy
sharding in state-dict order, units of 10^9), and the index as both write it. Pickled files, as transformers 4 and
DeepSpeed's zero_to_fp32.py write them, are read and not written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, OutputFile, Settings, Target, slot_dtype
from formats.disk.handle import prefetch
from formats.disk.json_file import read_json
from formats.disk.safetensors import DTYPES, Entry, Fragment, read_safetensors, row_major, safetensors_header
from formats.errors import SourceError, UnsupportedError, short, some
from formats.families import FAMILIES, family_named
from formats.families.family import Family
from formats.huggingface import HUGGINGFACE, language_model, mtp, own_config
from formats.huggingface.config import from_huggingface
from formats.huggingface.quantized import dequantized
from formats.huggingface.require import require_biases, require_class, require_lengths
from formats.huggingface.settings_table import keys_of
from formats.layout.placed import Placed, content_of, is_tied, match
from formats.layout.slots import ALONE, Slot
from formats.layout.table import Rule
from formats.layout.tensors import BUFFERS
from formats.model import lora, untabled
from formats.model.adapters import require_plain
from formats.model.lora import LoraSpec
from formats.model.spec import ModelSpec, Spec, Verbatim
from formats.torch_files.archive import read_torch
from formats.torch_files.pickle_values import TensorRef

NAME = HUGGINGFACE.name
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
KINDS = {"safetensors": (SINGLE, INDEX), "pickled": PICKLED}
"""Kind of weight files: the single file and the index. transformers loads the first kind where a folder has both."""
OTHER_FORMS = (".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite")
"""Endings of files with a model in a form that transformers does not load of itself, beside one that it does."""
ELSEWHERE = {"configuration_files": "settings", "transformers_weights": "weights"}
"""Config key by which transformers reads another file than the usual one: what is in it (transformers 5.23.0,
configuration_utils.py `get_configuration_file`, modeling_utils.py `_get_resolved_checkpoint_files`)."""
NOTHING_SAID = Settings()
FILE_NAME = re.compile(r"\w[\w.-]{0,200}(\.safetensors|\.bin)", re.ASCII)


def detect(path: Path) -> bool:
    """Whether a folder looks like this format."""
    return (path / "config.json").is_file() and has_weights(path)


def has_weights(path: Path) -> bool:
    """Whether a folder holds files of weights, safetensors or pickled."""
    return any((path / name).is_file() for name in (SINGLE, INDEX, *PICKLED))


def has_only_pickles(path: Path) -> bool:
    """Whether the weights of a folder are only pickled; transformers loads safetensors files where both kinds exist.

    Source: transformers 5.23.0, modeling_utils.py `_get_resolved_checkpoint_files`.
    """
    return has_weights(path) and not any((path / name).is_file() for name in (SINGLE, INDEX))


def unread_pickles_note(path: Path) -> str:
    """A note on pickled weights that are not read, since safetensors files exist; empty if there are none."""
    existing = {kind: [name for name in names if (path / name).is_file()] for kind, names in KINDS.items()}
    if not all(existing.values()):
        return ""
    safe, other = (names[0] for names in existing.values())
    return f"{path} holds {safe} and {other}: the first is read, as transformers does; they are not compared"


def unindexed_files(path: Path) -> list[str]:
    """The safetensors files of a folder that are not read: the index lacks them, or `model.safetensors` holds all."""
    if not any((path / name).is_file() for name in (SINGLE, INDEX)):
        return []
    weight_map = read_weight_map(path, SINGLE, INDEX)
    read = {SINGLE} if weight_map is None else {*weight_map.values()}
    return sorted({file.name for file in path.glob("*.safetensors")} - read)


def tables() -> dict[str, tuple[Rule, ...]]:
    """The layout of each family in Hugging Face files, by the name that `explain` shows."""
    return {f"{NAME} {name}": family.tensors for name, family in FAMILIES.items()}


def holders(_: Family) -> dict[str, bool]:
    """Every family fits a Hugging Face folder."""
    return {NAME: True}


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder.

    Raises:
        SourceError: there is none, its `quantization_config` is empty, or a list has another length than its layers.
        UnsupportedError: with it transformers reads other files than those of usual names.
    """
    config = read_json(folder / "config.json")
    for key, content in ELSEWHERE.items():
        if config.get(key) not in (None, [], [CONFIG], SINGLE):
            raise UnsupportedError(
                f"{folder / 'config.json'} says {key} = {short(config[key])}: transformers reads its {content} there",
                f"give the file with its {content} the usual name, and remove the key",
            )
    if config.get("quantization_config") == {}:
        raise SourceError(
            f"{folder / 'config.json'} says quantization_config = {{}}, with which transformers loads no model",
            "remove the key if the weights are not quantized",
        )
    require_lengths(config, str(folder / CONFIG))
    return config


def read_spec(config: Mapping[str, Any], folder: Path, settings: Settings) -> ModelSpec:
    """The spec of a config.json that was read from a folder."""
    return spec_at(config, str(folder / CONFIG), settings)


def spec_at(config: Mapping[str, Any], where: str, settings: Settings) -> ModelSpec:
    """The spec of a config that errors call `where`."""
    return from_huggingface(config, _user_settings(settings), where)


def _user_settings(settings: Settings) -> dict[str, Any]:
    """The user's settings of the model, with the vocabulary size."""
    return {**settings.values, **({} if settings.vocab_size is None else {"vocab": settings.vocab_size})}


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a Hugging Face folder: its config and the headers of its files."""
    if (path / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"{path} holds a PEFT adapter, which transformers would add to the weights",
            "move the adapter out, and merge it: convert merge BASE ADAPTER OUT",
        )
    fragments, note = read_files(path), ""
    require_plain(fragments, path)
    files = tuple(sorted({fragment.path for fragment in fragments.values()}))
    config, folder = read_config(path), settings.config or path
    named = config if folder == path else read_config(folder)
    part, names = language_model.select(named, fragments, settings, str(folder / "config.json")), [*fragments]
    fragments = part.of(language_model.with_transposed_experts(named, fragments, settings))
    spec = spec_of({key: fragment.shape for key, fragment in fragments.items()}, part.config, folder, settings)
    own = own_config.require_same(path, named, names, settings, spec)
    if isinstance(spec, ModelSpec):
        spec = replace(spec, own=dict(own))
        if folder != path and "max_positions" not in settings.values:  # a limit, in which the two may differ
            key = keys_of(family_named(spec.family), config).get("max_positions", "")
            positions = untabled.language(config).get(key)
            spec = replace(spec, max_positions=positions) if type(positions) is int else spec
        fragments, note = dequantized(fragments, config)
    placed, dropped = match(model_slots(spec, fragments), {ALONE: fragments}, drops(spec, fragments, settings), path)
    other = [*unindexed_files(path), *sorted(file.name for file in path.iterdir() if file.suffix in OTHER_FORMS)]
    unread_files = f"{some(other, 4)} in {path} are not read, nor does transformers: the model is in other files"
    notes = tuple(filter(None, [note, unread_pickles_note(path), unread_files if other else "", *part.notes]))
    carried = config if settings.only is None else part.config
    return Checkpoint(
        path,
        path,
        NAME,
        spec,
        tuple(placed),
        tuple(dropped),
        files,
        {},
        path,
        notes=notes,
        config=carried,
        left=part.left,
    )


def read_files(path: Path) -> dict[str, Fragment]:
    """The tensors of a folder's files, in the order of its index.

    Raises:
        SourceError: a file is missing or damaged, or its tensors are not those that the index names.
        UnsupportedError: a pickled file holds more than tensors.
    """
    read_file, (single, index) = (_read_pickled, PICKLED) if has_only_pickles(path) else (_read_safe, (SINGLE, INDEX))
    weight_map = read_weight_map(path, single, index)
    names = [single] if weight_map is None else sorted(set(weight_map.values()))
    prefetch(path / name for name in names)
    by_file = {name: read_file(path / name) for name in names}
    fragments: dict[str, Fragment] = {}
    for name, tensors in by_file.items():
        for key, fragment in tensors.items():
            if weight_map is not None and weight_map.get(key) != name:
                placed = f"places in {weight_map[key]}" if key in weight_map else "does not list"
                raise SourceError(f"{path / name} holds {key}, which {index} {placed}")
            fragments[key] = fragment
    missing = [key for key in weight_map or {} if key not in fragments]
    if weight_map and missing:
        raise SourceError(
            f"{path / weight_map[missing[0]]} lacks {missing[0]}, which {index} places there ({len(missing)} in all)"
        )
    return {key: fragments[key] for key in weight_map or fragments}


def _read_pickled(path: Path) -> dict[str, Fragment]:
    """The tensors of a state dict that torch.save wrote (UnsupportedError: the file holds something else)."""
    file = read_torch(path)
    if not isinstance(file.value, Mapping):
        raise UnsupportedError(f"{path} holds no state dict")
    fragments = {}
    for key, value in file.value.items():
        if not isinstance(value, TensorRef):
            raise UnsupportedError(f"{path} holds {short(key)}, which is not a tensor")
        fragments[str(key)] = file.fragment(value, str(key))
    return fragments


def _read_safe(path: Path) -> dict[str, Fragment]:
    return read_safetensors(path)[0]


def spec_of(shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], folder: Path, settings: Settings) -> Spec:
    """The spec of a model with given tensors: from its family's table, or `Verbatim` when no table describes it.

    Args:
        shapes: the shapes by Hugging Face keys, in the order of the model.
        config: the parsed config.json.
        folder: the folder of config.json.
        settings: the user's settings.
    """
    stated, file = _user_settings(settings), str(folder / "config.json")
    every, dropped = list(shapes), {*mtp.dropped_keys(shapes, settings)}
    shapes = {key: shape for key, shape in shapes.items() if key not in dropped}
    if settings.verbatim:
        if settings.only and config.get("quantization_config"):
            raise UnsupportedError(
                f"the quantization_config of {file} names modules of the whole, and those of the text have other names",
                "without --verbatim, --only text makes BF16 of quantized weights",
            )
        return untabled.describe(config, shapes, stated, "--verbatim")
    try:
        require_class(config, file)
        spec = read_spec(config, folder, settings)
        mtp.require_uncounted(spec, every, file)
        require_biases(config, shapes, file)
        spec = replace(spec, mtp_layers=mtp.count(spec, shapes))
        mtp.require_all(spec, config, file)
        return spec
    except UnsupportedError as error:
        if settings.only and config.get("quantization_config"):
            raise UnsupportedError(
                f"{file}: --only text of quantized weights is for language models with a table: {error}"
            ) from None
        require_biases(config, shapes, file)
        return untabled.describe(config, shapes, stated, str(error))


def model_slots(spec: Spec, keys: Iterable[str] = (), *, memory: bool = False) -> list[Slot]:
    """The physical tensors of a model under their Hugging Face keys, in its order.

    Args:
        spec: the model.
        keys: the keys in the files, which tell whether experts have the Hub's names, or transformers 5's in memory.
        memory: whether to use the names in memory, whatever the keys.
    """
    if isinstance(spec, LoraSpec):
        return lora.slots(spec)
    if isinstance(spec, Verbatim):
        return list(untabled.slots(spec))
    in_memory = memory or (family_named(spec.family).in_memory and not keys)
    fused = in_memory or any(map(_names_in_memory(spec.family).fullmatch, keys))
    return spec.slots_in(family_named(spec.family).tensors, spec.sizes(), ["fused" if fused else "separate"])


def outer_prefix(keys: Collection[str], spec: Spec) -> str:
    """The prefix that a module around the model adds to all keys, such as `model.` of a LightningModule; or ""."""
    names = model_slots(spec)[0].keys if isinstance(spec, ModelSpec) else ()
    prefixes = [key.removesuffix(name) for key in keys for name in names if key.endswith(f".{name}")]
    outer = min(prefixes, key=len, default="")
    return outer if {*keys}.isdisjoint(names) and all(key.startswith(outer) for key in keys) else ""


def _names_in_memory(family: str) -> re.Pattern[str]:
    """A regular expression for the keys of fused experts, which transformers has in memory alone."""
    names = [rule.spellings for rule in family_named(family).tensors if "fused" in rule.conditions]
    return re.compile("|".join(re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(name)) for each in names for name in each))


def drops(spec: Spec, keys: Iterable[str] = (), settings: Settings = NOTHING_SAID) -> tuple[str, ...]:
    """Regular expressions of the keys that carry no weights, or belong to layers that the user drops."""
    family = () if isinstance(spec, Verbatim) else family_named(spec.family).drops
    return (*family, *map(re.escape, mtp.dropped_keys(keys, settings)))


def read_weight_map(path: Path, single: str = SINGLE, index: str = INDEX) -> dict[str, str] | None:
    """The `weight_map` of a folder's index, key to file name; None when there is only the single file.

    Raises:
        SourceError: there are no weights, the index names files outside the folder or of another kind, or the single
            file exists and the index names others.
    """
    if not (path / index).is_file():
        if (path / single).is_file():
            return None
        raise SourceError(f"{path} has neither {single} nor {index}")
    weight_map = read_json(path / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path / index} has no weight_map")
    for key, name in weight_map.items():
        named = FILE_NAME.fullmatch(name) if isinstance(name, str) else None
        if not named or not single.endswith(named[1]):
            raise SourceError(
                f"{path / index} places {short(key)} in {short(name)}, which is not a file name in the folder"
            )
    if (path / single).is_file() and set(weight_map.values()) != {single}:
        raise SourceError(
            f"{path} holds both {single}, which transformers would load, and {index}, which names other files",
            "remove the one that is out of date",
        )
    return weight_map


def write(
    root: Path,
    spec: Spec,
    dtypes: Mapping[tuple[str, int | None], str],
    shard_size: int,
    index: Mapping[str, Any] | None = None,
    copies: Collection[str] = (),
) -> Target:
    """Lay out the files of a Hugging Face folder.

    Args:
        root: the folder that the files are written to.
        spec: the model.
        dtypes: the element type of each logical tensor.
        shard_size: the most bytes of tensors in a file; a larger tensor has a file of its own.
        index: the index of a folder to be reproduced, used in place of the shard size. An index is ignored when it
            names other tensors than the model has.
        copies: keys of further copies of a tensor that are written; other copies are not.
    """
    slots = model_slots(spec)
    own = {key for slot in slots for key in slot.keys}  # `drops` may match a layer that is a weight of a deeper model
    weight_map: dict[str, str] = {
        key: name
        for key, name in (index["weight_map"] if index else {}).items()
        if key in own or not any(re.fullmatch(drop, key) for drop in drops(spec))
    }
    by_key = {next((key for key in slot.keys if key in weight_map), slot.keys[0]): slot for slot in slots}
    by_key = {key: slot for key, slot in by_key.items() if not slot.replica or key in weight_map or key in copies}
    entries = {key: Entry(key, slot_dtype(slot, dtypes), slot.shape) for key, slot in by_key.items()}
    groups: dict[str, list[Entry]] = {}
    if set(weight_map) == set(entries):
        for key, entry in entries.items():
            groups.setdefault(weight_map[key], []).append(entry)
    else:
        groups, index = _shard(list(entries.values()), shard_size), None
    files = tuple(weights_file(root / name, group, by_key) for name, group in groups.items())
    buffers = sum(prod(slot.shape) for slot in by_key.values() if BUFFERS.intersection(slot.rule.pattern.tensors))
    texts = {} if list(groups) == [SINGLE] else {INDEX: _index(groups, index, buffers)}
    return Target(files, texts, {})


def with_originals(index: Mapping[str, Any], spec: Spec) -> dict[str, Any]:
    """An index in which a tied tensor has its own name, where it only had that of its copy (`placed.match`)."""
    weight_map, slots = dict(index["weight_map"]), model_slots(spec)
    originals = {content_of(slot): slot for slot in slots if not slot.replica}
    for copy in filter(is_tied, slots):
        key, original = next((key for key in copy.keys if key in weight_map), None), originals[content_of(copy)]
        if key and weight_map.keys().isdisjoint(original.keys):
            weight_map[original.keys[0]] = weight_map.pop(key)
    return {**index, "weight_map": weight_map}


def weights_file(path: Path, entries: Sequence[Entry], slots_by_key: Mapping[str, Slot]) -> OutputFile:
    """A safetensors file with some tensors, in this order, each named as its slot's key."""
    header, offsets = safetensors_header(entries, {"format": "pt"})
    placed = tuple(
        Placed(
            entry.name,
            slots_by_key[entry.name],
            Fragment(path, offsets[entry.name], entry.dtype, entry.shape, row_major(entry.shape)),
        )
        for entry in entries
    )
    size = len(header) + sum(prod(entry.shape) * DTYPES[entry.dtype] for entry in entries)
    return OutputFile(path, size, placed, {}, lambda _: [(0, header)])


def _shard(entries: Sequence[Entry], limit: int) -> dict[str, list[Entry]]:
    """The tensors by file, split as huggingface_hub 2.4.0 does (`split_state_dict_into_shards_factory`)."""
    shards, current, size = list[list[Entry]](), list[Entry](), 0
    for entry in entries:
        nbytes = prod(entry.shape) * DTYPES[entry.dtype]
        if nbytes > limit:  # a file of its own, before the one that is being filled
            shards.append([entry])
            continue
        if current and size + nbytes > limit:
            shards.append(current)
            current, size = [], 0
        current.append(entry)
        size += nbytes
    shards += [current] if current or not shards else []
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards)}


def _index(groups: Mapping[str, Sequence[Entry]], like: Mapping[str, Any] | None, buffers: int) -> bytes:
    """The index of a folder, as JSON; with the metadata keys of the index `like`, if there is one.

    `buffers` is the number of elements that are no parameters.
    """
    entries = list(chain.from_iterable(groups.values()))
    totals = {
        "total_parameters": sum(prod(entry.shape) for entry in entries) - buffers,
        "total_size": sum(prod(entry.shape) * DTYPES[entry.dtype] for entry in entries),
    }
    remembered = like.get("metadata") if like else None
    metadata: dict[str, Any] = dict(totals)
    if isinstance(remembered, dict):
        metadata = {key: totals.get(key, value) for key, value in remembered.items()}
    weight_map = {entry.name: name for name, group in groups.items() for entry in group}
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()
