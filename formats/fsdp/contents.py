"""List the tensors in the files of an FSDP checkpoint, of each kind of files, without a config of the model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import Settings
from formats.disk.safetensors import DTYPES, Fragment, read_safetensors
from formats.errors import RefusedError, SourceError, UnsupportedError, some
from formats.fsdp import FSDP, native
from formats.huggingface import folder as huggingface
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import Scattered, from_pieces, single_piece
from formats.torch_files import dcp, rank_dumps, saved_names
from formats.torch_files.archive import TorchFile, read_torch

SHARD = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
FULL = "pytorch_model_fsdp.bin"
DCP = r"(?:__\d+)?\.metadata|__.*\.distcp"
HUGGING_FACE = "weights of Hugging Face"
"""Kind of files: those of `_consolidated`."""
SAVES = (
    (DCP, r"pytorch_model_fsdp\.bin"),  # a note names the second
    (r"shard-\d{5}-model-.*\.safetensors", DCP),  # and here the first
    ("sharded", HUGGING_FACE),
    (HUGGING_FACE, r"optimizer\.bin"),
    ("pytorch_model_fsdp_0", "optimizer_0"),
    (r"pytorch_model_fsdp\.bin", r"optimizer\.bin"),
    (r"pytorch_model_fsdp_rank\d+\.(?:bin|pt)", "optimizer_0"),
    (r"pytorch_model_fsdp_0_rank\d+\.(?:bin|pt)", r"optimizer_0_rank_?\d+\.(?:bin|pt)"),
    (r"pytorch_model_rank\d+\.(?:bin|pt)", "optimizer_0"),
    (r"pytorch_model_rank\d+\.(?:bin|pt)", r"optimizer\.bin"),
    (r"model_world_size_\d+_rank_\d+\.(?:bin|pt)", r"optim_world_size_\d+_rank_?\d+\.(?:bin|pt)"),
    ("actor", "optimizer_0"),  # this optimizer is not read, nor in the next rows
    ("policy", "optimizer_0"),
    ("model_and_optim", "optimizer_0"),
)
"""The kinds of files and folders that may be beside one another, as patterns of their names; kinds that no row has
together are of two saves.

Facts: accelerate 1.15.0, utils/fsdp_utils.py `save_fsdp_model` and `save_fsdp_optimizer` (sharded, full, local, and
sharded without DCP); of `pytorch_model_rank*` accelerate 0.18.0 (utils/dataclasses.py) and 0.21.0; verl
utils/checkpoint/fsdp_checkpoint_manager.py. torchtitan, llama-cookbook, Composer and Lightning save a model and its
optimizer in one DCP folder, OLMo-core in `model_and_optim`."""
PLACES = ("sharded", "actor", "policy", "model_and_optim")
"""The kinds that are folders, which count if they hold a checkpoint."""


class Listing(NamedTuple):
    """The tensors of a checkpoint.

    Attributes:
        paths: the path of each tensor in the saved dictionary.
        load: returns the tensors with some numbers in `paths`.
        files: the files that are read.
        flat: the dump of each rank, if the tensors are flat parameters.
        unbounded: whether a shape is only the extent of the pieces, since the files do not record how many there were.
    """

    paths: Sequence[tuple[str, ...]]
    load: Callable[[Sequence[int]], Iterable[Scattered]]
    files: tuple[Path, ...]
    flat: Mapping[int, TorchFile] | None = None
    unbounded: bool = False


def contents(path: Path, listing: Listing) -> dict[str, Any]:
    """The record for `inspect` without a config: of all tensors of the files, with those of an optimizer."""
    tensors = list(listing.load(range(len(listing.paths))))
    ranks = {path for tensor in tensors for path in tensor.files}
    containers = Counter(names[0] if len(names) > 1 else "" for names in listing.paths)
    return {
        "path": str(path),
        "format": FSDP.name,
        "topology": {"ranks": len(ranks)},
        "containers": dict(containers),
        "dtypes": dict(Counter(tensor.dtype for tensor in tensors)),
        "tensors": len(tensors),
        "files": len(listing.files),
        "bytes": sum(prod(tensor.shape) * DTYPES[tensor.dtype] for tensor in tensors),
    }


def require_one_save(folder: Path, read: Path) -> None:
    """Refuse a folder with files of kinds that no trainer saves together.

    Args:
        folder: the folder of a save.
        read: the folder of the weights that are read: `folder`, or one in it. Only in the first case do weights of
            Hugging Face count in `folder`, which a trainer may have exported beside its own.

    Raises:
        RefusedError: it holds two models, two optimizers, or the model of one save and the optimizer of another.
    """
    names = sorted(path.name for path in folder.iterdir())
    kinds = {kind for save in SAVES for kind in save}
    held = {kind: name for name in reversed(names) for kind in kinds if re.fullmatch(kind, name)}
    held = {kind: name for kind, name in held.items() if kind not in PLACES or lister(folder / name)}
    if folder == read and lister(folder) is _consolidated:
        held[HUGGING_FACE] = HUGGING_FACE
    if held and not any(held.keys() <= {*save} for save in SAVES):
        raise RefusedError(
            f"{folder} holds {', '.join(sorted(held.values()))}, which no trainer saves together: they are of two "
            "saves",
            f"move the model and the optimizer of one of the saves out of {folder}",
        )


def lister(folder: Path) -> Callable[[Path, Settings], Listing] | None:
    """The function that lists the tensors of a folder, chosen by its file names; None if it is no FSDP checkpoint."""
    if not folder.is_dir():
        return None
    if dcp.is_dcp(folder):
        return _dcp
    names = [path.name for path in folder.iterdir()]
    if any(map(SHARD.fullmatch, names)):
        return _shards
    if any(map(saved_names.MODEL_DUMP.fullmatch, names)):
        return _dumps
    if FULL in names:
        return _full
    if huggingface.has_weights(folder) and "config.json" not in names:
        return _consolidated
    return None


def _dcp(folder: Path, settings: Settings) -> Listing:
    entries, objects = dcp.contents(folder)
    if not entries:
        raise UnsupportedError(
            f"{folder} holds no tensors, only pickled objects: {some(objects, 8) or 'none'}",
            "save again with DefaultSavePlanner(flatten_state_dict=True), which is torch's default",
        )
    containers = [settings.container] if settings.container is not None else _starts(entries)
    paths = [entry.path or _split(entry.name, containers) for entry in entries]
    files = dcp.metadata_files(folder) + sorted({path for entry in entries for path in entry.items.files})
    return Listing(paths, lambda indices: dcp.load([entries[i] for i in indices]), tuple(files))


def _starts(entries: Sequence[dcp.Entry]) -> list[str]:
    """The prefixes, without the dot, before a key that every model of some naming has."""
    known = ("model.embed_tokens.weight", *(names.sign for names in native.TRAINERS.values()))
    starts = (entry.name.removesuffix(key) for entry in entries for key in known if entry.name.endswith(key))
    return list(dict.fromkeys(start.rstrip(".") for start in starts))


def _split(name: str, containers: Sequence[str]) -> tuple[str, ...]:
    """The path of a tensor of which an old torch recorded only the joined name; its container is in `containers`."""
    own = [prefix for prefix in containers if prefix and name.startswith(f"{prefix}.")]
    if own:
        container = max(own, key=len)
        return (container, name.removeprefix(f"{container}."))
    return ("", name) if containers and "" not in containers else (name,)


def _shards(folder: Path, _: Settings) -> Listing:
    """List files of torch's HuggingFaceStorageWriter, each of which records the boxes of the tensors that it holds.

    Raises:
        SourceError: a file is missing, or records no boxes.
    """
    files = sorted(path for path in folder.iterdir() if SHARD.fullmatch(path.name))
    numbered = [tuple(map(int, parts.groups())) for path in files if (parts := SHARD.fullmatch(path.name))]
    ranks = {rank for rank, _, _ in numbered}
    missing = sorted(set(range(1, max(ranks) + 1)) - ranks)
    if missing or len({count for _, _, count in numbered}) > 1:
        raise SourceError(f"{folder} lacks the files of shard {', '.join(map(str, missing))} of {max(ranks)} or more")
    numbers, (count,) = {number for _, number, _ in numbered}, {count for _, _, count in numbered}
    if missing := sorted(set(range(1, count + 1)) - numbers):
        raise SourceError(f"{folder} lacks files model-{missing[0]:05d}-of-{count:05d} of all of its shards")
    pieces: dict[str, list[tuple[tuple[int, ...], Fragment]]] = {}
    for file in files:
        tensors, metadata = read_safetensors(file)
        try:
            offsets = json.loads(metadata["DCP_SHARDING_INFO"])
            for key, fragment in tensors.items():
                start = tuple(offsets[key]["saved_offsets"])
                if len(start) != len(fragment.shape) or not all(type(n) is int and n >= 0 for n in start):
                    raise ValueError
                pieces.setdefault(key, []).append((start, fragment))
        except (KeyError, TypeError, ValueError, RecursionError):
            raise SourceError(f"{file} does not say which parts of its tensors it holds") from None
    keys = list(pieces)

    def load(indices: Sequence[int]) -> Iterable[Scattered]:
        for key in (keys[i] for i in indices):
            ends = [[low + n for low, n in zip(start, shard.shape, strict=True)] for start, shard in pieces[key]]
            shape = tuple(map(max, zip(*ends, strict=True)))
            parts = [
                Piece(Cut(tuple(zip(start, end, strict=True))), shard)
                for (start, shard), end in zip(pieces[key], ends, strict=True)
            ]
            yield from_pieces(key, shape, parts[0].fragment.dtype, parts)

    return Listing([(key,) for key in keys], load, tuple(files), unbounded=True)


def _dumps(folder: Path, _: Settings) -> Listing:
    files = rank_dumps.open_ranks(folder)
    paths = list(dict.fromkeys(path for file in files.values() for path, _ in rank_dumps.leaves(file.value)))
    file_paths = tuple(file.path for file in files.values())
    flat = files if rank_dumps.is_flat(paths) else None
    return Listing(paths, lambda indices: rank_dumps.load(files, [paths[i] for i in indices]), file_paths, flat)


def _full(folder: Path, _: Settings) -> Listing:
    files = {0: read_torch(folder / FULL)}
    paths = [path for path, _ in rank_dumps.leaves(files[0].value)]
    return Listing(paths, lambda indices: rank_dumps.load(files, [paths[i] for i in indices]), (folder / FULL,))


def _consolidated(folder: Path, _: Settings) -> Listing:
    """List the weight files of a Hugging Face folder without a config."""
    tensors = huggingface.read_files(folder)
    keys = list(tensors)
    files = tuple(sorted({fragment.path for fragment in tensors.values()}))
    return Listing(
        [(key,) for key in keys], lambda indices: (single_piece(keys[i], tensors[keys[i]]) for i in indices), files
    )
