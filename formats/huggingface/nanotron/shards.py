"""The weights files of nanotron: their names, and the metadata that places a shard in its parameter.

    model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors
    model/model/decoder/0/pp_block/input_layernorm/model_weight.safetensors

Each file holds one tensor, `data`. The metadata of a shard records the shape of the whole parameter, and pairs of
slices: a part of the file (before `#`) and its place in the whole.

    0,16,None|None,None,None#0,16,None|None,None,None;16,24,None|…

In 0.5 the name of a shard repeats prefix and suffix: `model_model_weight.safetensors_pp-rank-0-of-1_tp-rank-0-of-2….`

Facts: huggingface/nanotron at 2411b022 and v0.5 (2024-04-19), serialize/utils.py (`get_path`), serialize/metadata.py
(`TensorMetadata`), parallel/parameters.py (`SlicesPair`), parallel/sharded_parameters.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from formats.disk.safetensors import DTYPES, Fragment, read_safetensors
from formats.errors import SourceError, UnsupportedError, short
from formats.layout.boxes import overlap
from formats.layout.columns import Cut, Piece
from formats.layout.lowering import shape as shape_of
from formats.layout.pattern import splits
from formats.layout.pieces import Scattered, from_pieces, single_piece
from formats.layout.slots import Slot

FOLDER = "model"
DATA = "data"
VERSION = "1.5"
"""The newest known version of the files (constants.py)."""
FILE = re.compile(
    r"model_(?:model_)?(?P<name>.+?)(?:\.safetensors)?"
    r"(?:_pp-rank-(?P<pp>\d+)-of-(?P<pps>\d+)_tp-rank-(?P<tp>\d+)-of-(?P<tps>\d+)"
    r"(?P<experts>_exp-rank-\d+-of-\d+)?)?\.safetensors"
)
SHAPE, SLICES, NUMBER = "unsharded_shape", "local_global_slices_pairs", "version"
"""Keys in the metadata of a shard."""
ALL = "None,None,None"
"""The slice that is a whole dimension."""

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension."""
Pair = tuple[Box, Box]
"""A part of the tensor in a file, and its place in the whole parameter."""


class Rank(NamedTuple):
    """The pipeline and tensor-parallel rank that wrote a file, each with the number of ranks."""

    pp: int
    pps: int
    tp: int
    tps: int


ONE = Rank(pp=0, pps=1, tp=0, tps=1)
"""The rank of a training on one device; files are written under this rank."""


class Shard(NamedTuple):
    """A weights file: its parameter, the rank that wrote it (None where the parameter is not split), and its tensor."""

    key: str
    rank: Rank | None
    fragment: Fragment
    metadata: Mapping[str, str]


def shards(folder: Path) -> Iterator[Shard]:
    """Yield the files of all parameters.

    Raises:
        SourceError: a file name is not one of nanotron's or names an impossible rank, or the file has not one tensor.
        UnsupportedError: a file is of one of several expert-parallel ranks, or of an unknown version.
    """
    for path, modules in _walk(folder / FOLDER, ()):
        match = FILE.fullmatch(path.name)
        if match is None:
            raise SourceError(f"{path} is no file of a parameter of nanotron", "move it away, or save again")
        if match["experts"]:
            raise UnsupportedError(
                f"{path} is of one of several expert parallel ranks, which are not read",
                "load it in nanotron with expert_parallel_size: 1 and save it there",
            )
        tensors, metadata = read_safetensors(path)
        if {*tensors} != {DATA}:
            raise SourceError(f"{path} holds {short(sorted(tensors))}, and a file of nanotron holds one tensor, {DATA}")
        rank = None if match["tp"] is None else Rank(*(int(match[name]) for name in ("pp", "pps", "tp", "tps")))
        if rank and (rank.pp >= rank.pps or rank.tp >= rank.tps):
            raise SourceError(f"{path} is of a rank that there is not: they are counted from 0", "was it renamed?")
        if NUMBER in metadata:
            require_known(metadata[NUMBER], path)
        yield Shard(".".join((*modules, match["name"])), rank, tensors[DATA], metadata)


def require_known(version: object, path: Path) -> None:
    """Refuse a file of an unknown version.

    Raises:
        UnsupportedError: the version is newer than `VERSION`, or is not a version number.
    """
    numbers = str(version).split(".")
    known = [int(number) for number in VERSION.split(".")]
    if not all(re.fullmatch("[0-9]{1,9}", number) for number in numbers) or [int(number) for number in numbers] > known:
        raise UnsupportedError(
            f"{path}: version {short(version)} of nanotron's checkpoints, the newest that is read is {VERSION}"
        )


def _walk(folder: Path, modules: tuple[str, ...]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the files in a folder, recursively, each with the names of its subfolders."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _walk(path, (*modules, path.name))
        else:
            yield path, modules


def topology(files: Iterable[Shard], where: Path) -> dict[str, int]:
    """Return the parallel sizes, on which all files must agree.

    Raises:
        SourceError: the files are of several topologies, so of several saves.
    """
    sizes = {(file.rank.tps, file.rank.pps): file.fragment.path for file in files if file.rank}
    if len(sizes) > 1:
        (sizes_of_first, first), (sizes_of_second, second) = [*sizes.items()][:2]
        raise SourceError(
            f"{where} holds files of two topologies: {first} is of tp {sizes_of_first[0]}, pp {sizes_of_first[1]}, "
            f"{second} of tp {sizes_of_second[0]}, pp {sizes_of_second[1]}",
            "they are of two saves: move away what is not meant",
        )
    tp, pp = next(iter(sizes), (1, 1))
    return {"tp": tp, "pp": pp}


def pieces_by_parameter(files: Sequence[Shard]) -> dict[str, Scattered]:
    """Return each parameter as the pieces in its files, by name.

    Raises:
        SourceError: a shard is missing or present twice, or its metadata is damaged.
    """
    by_key: dict[str, list[Shard]] = {}
    for file in files:
        by_key.setdefault(file.key, []).append(file)
    return {key: _pieces_of_parameter(key, parts) for key, parts in by_key.items()}


def _pieces_of_parameter(key: str, files: list[Shard]) -> Scattered:
    first = files[0]
    if first.rank is None:
        if len(files) > 1:
            raise SourceError(
                f"{first.fragment.path} is whole, and {files[1].fragment.path} a part of the same parameter"
            )
        return single_piece(key, first.fragment)
    ranks = [file.rank.tp for file in files if file.rank]
    if {*ranks} != {*range(first.rank.tps)} or len(ranks) != first.rank.tps:
        raise SourceError(
            f"{first.fragment.path.parent} holds shards {sorted(ranks)} of {key}, and there were {first.rank.tps} ranks"
        )
    shapes = {file.fragment.path: _shape(file) for file in files}
    for path, shape in shapes.items():
        if shape != shapes[first.fragment.path]:
            raise SourceError(f"{path} says {SHAPE} {list(shape)}, {first.fragment.path} another one")
    pieces = [piece for file in files for piece in _pieces(file, shapes[file.fragment.path])]
    return from_pieces(key, shapes[first.fragment.path], first.fragment.dtype, pieces)


def _shape(file: Shard) -> tuple[int, ...]:
    """Return the shape of the whole parameter from a shard's metadata; numpy 2 writes integers as `np.int64(96)`."""
    path, text = file.fragment.path, file.metadata.get(SHAPE, "")
    if not re.fullmatch(r"\((?:(?:np\.int\d+\(\d{1,18}\)|\d{1,18}),? ?)+\)", text):
        raise SourceError(f"{path} does not say of what shape it is a part: {SHAPE} = {short(text)}")
    return tuple(int(number) for number in re.findall(r"(?<![\w.])\d+", text))


def _pieces(file: Shard, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Yield the pieces of the whole parameter in a file."""
    fragment = file.fragment
    for inner, outer in _pairs(file, shape):
        offset = sum(low * stride for (low, _), stride in zip(inner, fragment.strides, strict=True))
        yield Piece(
            Cut(outer),
            fragment._replace(offset=fragment.offset + offset * DTYPES[fragment.dtype], shape=Cut(inner).shape),
        )


def _pairs(file: Shard, shape: tuple[int, ...]) -> list[Pair]:
    """Return the parts of the tensor in a file with their places in the whole parameter, from the file's metadata.

    Raises:
        SourceError: a slice is outside the file or the whole, or the slices do not cover the file exactly once.
    """
    path, text, fragment = file.fragment.path, file.metadata.get(SLICES, ""), file.fragment
    pairs: list[Pair] = []
    for pair in text.split(";"):
        local, mark, whole = pair.partition("#")
        inner, outer = _box(local, fragment.shape), _box(whole, shape)
        if not mark or inner is None or outer is None or Cut(inner).shape != Cut(outer).shape:
            raise SourceError(f"{path} does not say which part it is: {SLICES} = {short(text)}")
        pairs.append((inner, outer))
    inside = [inner for inner, _ in pairs]
    if overlap(inside) or sum(prod(Cut(box).shape) for box in inside) != prod(fragment.shape):
        raise SourceError(f"{path}: its slices are not all of the file, each element once: {SLICES} = {short(text)}")
    return pairs


def _box(text: str, shape: tuple[int, ...]) -> Box | None:
    """Parse slices such as `0,16,None|None,None,None` into a box in a shape; None where they are invalid."""
    slices = text.split("|")
    if len(slices) != len(shape):
        return None
    box = []
    for piece, size in zip(slices, shape, strict=True):
        match = re.fullmatch(r"(\d{1,18}|None),(\d{1,18}|None),None", piece)
        if match is None:
            return None
        low = 0 if match[1] == "None" else int(match[1])
        high = size if match[2] == "None" else int(match[2])
        if not low <= high <= size:
            return None
        box.append((low, high))
    return tuple(box)


# --- the part of a rank by the layout --------------------------------------------------------------------------------


def require_own_parts(files: Iterable[Shard], slots: Iterable[Slot]) -> None:
    """Refuse a file whose metadata records another part of its parameter than the rank in its name holds.

    nanotron itself loads by name in the topology of the save, and by metadata in any other (serialize/weights.py
    `load_weights`).

    Args:
        files: the files of all parameters.
        slots: the whole parameters; each file is of one of them and records its shape.

    Raises:
        SourceError: the metadata contradicts the file's name, or the layout of the parameter.
    """
    by_key = {slot.keys[0]: slot for slot in slots}
    for file in files:
        if file.rank is None:
            continue
        slot = by_key[file.key]
        expected, recorded = (sorted(pairs) for pairs in (_parts_of(slot, file.rank), _pairs(file, slot.shape)))
        if recorded != expected:
            raise SourceError(
                f"{file.fragment.path} is by its name of tensor parallel rank {file.rank.tp} of {file.rank.tps}, which "
                f"holds {_text(expected)} of {file.key} {list(slot.shape)}, its metadata says {_text(recorded)}",
                "was it renamed, or edited?",
            )


def _split_dim(slot: Slot) -> int | None:
    """Return the dimension that is split over tensor-parallel ranks; None if there is none."""
    return next((number for number, term in enumerate(slot.rule.pattern.dims) if splits(term)), None)


def _parts_of(slot: Slot, rank: Rank) -> list[Pair]:
    """Return the parts of a parameter on a rank, a pair for each section that is split by itself (query, key, …)."""
    dim, whole = _split_dim(slot), tuple((0, size) for size in slot.shape)
    if dim is None:
        return [(whole, whole)]
    pairs: list[Pair] = []
    inner = outer = 0
    for part in slot.rule.pattern.apart():
        size = shape_of(part, dict(slot.sizes), dict(slot.mesh))[dim]
        low, high = (size * number // rank.tps for number in (rank.tp, rank.tp + 1))
        ranges = (inner, inner + high - low), (outer + low, outer + high)
        local, place = ((*whole[:dim], along, *whole[dim + 1 :]) for along in ranges)
        pairs.append((local, place))
        inner, outer = inner + high - low, outer + size
    return pairs


def _text(pairs: Iterable[Pair]) -> str:
    return ", ".join(f"[{', '.join(f'{low}:{high}' for low, high in place)}]" for _, place in pairs)


# --- writing ---------------------------------------------------------------------------------------------------------


def path_of(key: str, *, split: bool) -> Path:
    """Return the path of a parameter's file, relative to the checkpoint, as a training on one rank names it."""
    *modules, name = key.split(".")
    suffix = "_pp-rank-0-of-1_tp-rank-0-of-1" if split else ""
    return Path(FOLDER, *modules, f"model_{name}{suffix}.safetensors")


def metadata_of(slot: Slot) -> dict[str, str]:
    """Return the metadata of a parameter's file, as one tensor-parallel rank writes it; empty if it is never split.

    Each section that is split by itself (query, key, value) is a pair of slices; a single section has no local slices.
    """
    dim = _split_dim(slot)
    if dim is None:
        return {}
    parts = _parts_of(slot, ONE)
    texts = []
    for _, place in parts:
        whole = [f"{low},{high},None" if number == dim else ALL for number, (low, high) in enumerate(place)]
        local = whole if len(parts) > 1 else [ALL] * len(place)
        texts.append(f"{'|'.join(local)}#{'|'.join(whole)}")
    return {NUMBER: VERSION, SLICES: ";".join(texts), SHAPE: str(slot.shape)}
