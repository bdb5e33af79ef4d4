"""Reads state dicts of torch.save: a full one, or one for each rank with DTensors, sharded or flat tensors.

Facts: torch 2.13.0 (distributed/tensor, distributed/_shard, distributed/fsdp/_flat_param.py), accelerate 1.15.0
utils/fsdp_utils.py; files that they wrote are in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from formats.disk.safetensors import DTYPES, Fragment
from formats.errors import SourceError, UnsupportedError, short
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import Scattered, from_pieces, whole_part
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.pickle_values import Opaque, TensorRef
from formats.torch_files.saved_names import MODEL_DUMP

FLAT = "_flat_param"
Keys = tuple[str, ...]


@dataclass(frozen=True)
class FlatPart:
    """The interval of a tensor of shape `shape`, from element `start` on, that a rank has in a flat tensor."""

    shape: tuple[int, ...]
    start: int
    ref: TensorRef


def open_ranks(folder: Path, names: re.Pattern[str] = MODEL_DUMP) -> dict[int, TorchFile]:
    """The dump of each rank, by the rank's number, which is in the file's name.

    Raises:
        SourceError: a dump is missing, damaged, or there twice.
    """
    paths: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        name = names.fullmatch(path.name)
        if name:
            other = paths.setdefault(int(name["rank"]), path)
            if other is not path:
                raise SourceError(f"{folder} holds two dumps of rank {name['rank']}: {other.name} and {path.name}")
    worlds = {int(n) for path in paths.values() for n in re.findall(r"world_size_(\d+)", path.name)}
    if len(worlds) > 1:
        raise SourceError(f"{folder} holds dumps of {' and '.join(map(str, sorted(worlds)))} ranks", "keep one set")
    missing = sorted(set(range(max([*worlds, max(paths) + 1]))) - set(paths))
    if missing:
        raise SourceError(
            f"{folder} lacks the dumps of rank {', '.join(map(str, missing))}", "copy them from their nodes"
        )
    return {rank: read_torch(paths[rank]) for rank in sorted(paths)}


def leaves(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every tensor of a nested dictionary, with the path of its key."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    elif isinstance(value, TensorRef | Opaque | FlatPart) and path:
        yield path, value


def load(files: Mapping[int, TorchFile], paths: Sequence[Keys]) -> Iterator[Scattered]:
    """Each tensor, put together from the pieces of every rank.

    Raises:
        SourceError: pieces are missing or overlap.
        UnsupportedError: a value is not a tensor of a known kind.
    """
    of_rank = {rank: dict(leaves(file.value)) for rank, file in files.items()}
    for path in paths:
        shapes, pieces, name = set(), [], ".".join(path)
        for rank, file in files.items():
            if path in of_rank[rank]:
                shape, parts = pieces_of(of_rank[rank][path], rank, file, path[-1])
                shapes.add(shape)
                pieces += parts
        if len(shapes) != 1:
            raise SourceError(f"the ranks disagree about the shape of {name}: {sorted(shapes)}")
        dtype = pieces[0].fragment.dtype if pieces else "F32"
        yield from_pieces(path[-1], shapes.pop(), dtype, pieces)


def pieces_of(value: Any, rank: int, file: TorchFile, name: str) -> tuple[tuple[int, ...], list[Piece]]:
    """The shape of a tensor, and the pieces that a rank has of this tensor."""
    if isinstance(value, TensorRef):
        return value.shape, [Piece(whole_part(value.shape), file.fragment(value, name))]
    if isinstance(value, FlatPart):
        cut = Cut(((value.start, value.start + value.ref.shape[0]),), flat=True)
        return value.shape, [Piece(cut, file.fragment(value.ref, name))]
    kind, state = _subclass(value)
    try:
        if kind == "DTensor":
            state = _fields(state)
            spec = _fields(state["_spec"].state)
            _require_saved_by(rank, _fields(spec["mesh"].state), file, name)
            shape, local = tuple(spec["tensor_meta"].args[0]), state["_local_tensor"]
            box = _local_box(shape, spec, rank)
            return shape, [_piece(box, local, file, name)]
        if kind == "ShardedTensor":
            shape = tuple(_fields(state[1].state)["size"])
            return shape, [_shard(shard, file, name) for shard in state[0]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise UnsupportedError(f"{file.path} holds {name} as a {kind} of a version that is not known") from None
    raise UnsupportedError(f"{file.path} holds {name} as {value!r}, which is not a tensor that is known")


def _subclass(value: Any) -> tuple[str, Any]:
    """Class name and state of a tensor that torch pickled with `_rebuild_from_type_v2`; empty for other values."""
    if isinstance(value, Opaque) and value.name == "_rebuild_from_type_v2" and len(value.args) == 4:
        kind = value.args[1]
        return (kind.name if isinstance(kind, Opaque) else ""), value.args[3]
    return "", None


def _fields(state: Any) -> dict[str, Any]:
    """The attributes of an object, from a dictionary, or from a pair of the attributes in `__dict__` and in slots."""
    if isinstance(state, tuple):
        return {name: value for part in state if part for name, value in part.items()}
    return dict(state)


def _piece(box: tuple[tuple[int, int], ...], local: Any, file: TorchFile, name: str) -> Piece:
    part = Cut(box)
    if not isinstance(local, TensorRef):
        raise UnsupportedError(f"{file.path} holds {name} with a local part that is no plain tensor: {local!r}")
    if local.shape != part.shape and max(prod(local.shape), prod(part.shape)) > 0:
        raise UnsupportedError(
            f"{file.path} holds {list(local.shape)} of {name}, its placement says {list(part.shape)}: "
            f"a placement that is not known"
        )
    return Piece(part, file.fragment(local, name))


def _shard(shard: Any, file: TorchFile, name: str) -> Piece:
    """The piece of a local shard of a ShardedTensor, whose metadata has its offsets and sizes."""
    state = _fields(shard.state)
    where = _fields(state["metadata"].state)
    starts, sizes = where["shard_offsets"], where["shard_sizes"]
    box = tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
    return _piece(box, state["tensor"], file, name)


def _local_box(shape: tuple[int, ...], spec: Mapping[str, Any], rank: int) -> tuple[tuple[int, int], ...]:
    """The box of a DTensor that a rank has.

    Each mesh dimension that shards cuts the remaining box into chunks of ceil(n / ranks). Mesh dimensions are taken
    from left to right; `_StridedShard` marks dimensions that cut last (FSDP outside of tensor parallelism): its split
    factor is the number of parts that the later mesh dimensions make.
    """
    coordinates, sizes = _coordinates(_fields(spec["mesh"].state), rank)
    placements = list(zip(spec["placements"], coordinates, sizes, strict=True))
    box = [(0, n) for n in shape]
    for strided in (False, True):
        for placement, index, ranks in placements:
            if placement.name not in ("Shard", "Replicate", "_StridedShard"):
                raise UnsupportedError(f"a tensor placed as {placement.name} is not known")
            if placement.name == ("_StridedShard" if strided else "Shard"):
                dim = _fields(placement.state)["dim"]
                if strided and _fields(placement.state)["split_factor"] != _later(placements, placement, dim):
                    raise UnsupportedError("a _StridedShard whose parts are not those of later dimensions is not known")
                low, high = box[dim]
                step = -(-(high - low) // ranks)
                box[dim] = min(high, low + index * step), min(high, low + (index + 1) * step)
    return tuple(box)


def _require_saved_by(rank: int, mesh: Mapping[str, Any], file: TorchFile, name: str) -> None:
    """Check that a DTensor was saved by the rank in the file's name.

    Its DeviceMesh has the coordinates of the rank that made it (torch 2.2 to 2.13).
    """
    coordinates, recorded = _coordinates(mesh, rank)[0], mesh.get("_coordinate_on_dim")
    if recorded is not None and list(recorded) != coordinates:
        raise SourceError(
            f"{file.path} was saved by another rank: its {name} is at {list(recorded)} of the device mesh, rank {rank} "
            f"at {coordinates}: files are mixed up",
            "copy the dumps of all ranks again, each under its own name",
        )


def _later(placements: Sequence[tuple[Any, int, int]], strided: Any, dim: int) -> int:
    """The number of parts into which the mesh dimensions after a strided one cut a tensor dimension."""
    after = placements[[placement for placement, _, _ in placements].index(strided) + 1 :]
    return prod(n for other, _, n in after if other.name == "Shard" and _fields(other.state)["dim"] == dim)


def _coordinates(mesh: Mapping[str, Any], rank: int) -> tuple[list[int], list[int]]:
    """The coordinates of a rank in a DeviceMesh, and the size of each mesh dimension."""
    if "_layout" in mesh:  # torch 2.10 and later
        axes = _axes(_fields(mesh["_layout"].state))
        position = list(mesh["_flatten_rank_map"]).index(rank)
        coordinates = []
        for parts, strides in axes:
            index = 0
            for size, stride in zip(parts, strides, strict=True):
                index = index * size + position // stride % size
            coordinates.append(index)
        return coordinates, [prod(parts) for parts, _ in axes]
    sizes = list(mesh["mesh"].shape)
    position = list(mesh["_flatten_mesh_list"]).index(rank)
    return [position // prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes)], sizes


def _axes(layout: Mapping[str, Any]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Sizes and strides of each mesh dimension (torch/distributed/_mesh_layout.py): several if it was flattened."""
    if "axes" in layout:  # torch 2.13
        inner = (_fields(axis.state) for axis in layout["axes"])
        return [(axis["shape"], axis["stride"]) for axis in inner]
    sizes, strides = (
        (value if isinstance(value, tuple) else (value,)) for value in (layout["shape"], layout["stride"])
    )
    return [(_numbers(size), _numbers(stride)) for size, stride in zip(sizes, strides, strict=True)]  # torch 2.10


def _numbers(nested: Any) -> tuple[int, ...]:
    """The integers of a number, or of nested tuples, as a flat tuple."""
    return tuple(n for inner in nested for n in _numbers(inner)) if isinstance(nested, tuple) else (int(nested),)


# --- flat parameters (FSDP1, LOCAL_STATE_DICT) -----------------------------------------------------------------------


def is_flat(paths: Iterable[Keys]) -> bool:
    """Whether a dump has FSDP1's flat parameters, which record neither names nor shapes."""
    return any(path[-1].endswith(FLAT) for path in paths)


def load_flat(
    files: Mapping[int, TorchFile], shapes: Mapping[str, tuple[int, ...]], tied: bool
) -> dict[str, Scattered]:
    """Split flat parameters into tensors, given the shapes of the model's tensors in the order of its modules.

    With `use_orig_params` each rank has its interval of every parameter under the parameter's own name; without, only
    its interval of the flat parameter of each module, in which the parameters are concatenated.

    Args:
        files: the dump of each rank.
        shapes: shape by Hugging Face key.
        tied: whether the output head may be a copy that the flat parameter leaves out.

    Raises:
        SourceError: the sizes do not add up.
    """
    of_rank = {rank: {path[-1]: value for path, value in leaves(file.value)} for rank, file in files.items()}
    first = next(iter(of_rank.values()))
    named = [key for key in shapes if key in first]
    if named:
        return {key: from_pieces(key, shapes[key], *_intervals(files, of_rank, key)) for key in named}
    units = sorted((key.removesuffix(FLAT) for key in first if key.endswith(FLAT)), key=len, reverse=True)
    tensors: dict[str, Scattered] = {}
    for unit in units:
        keys = [key for key in shapes if next((prefix for prefix in units if key.startswith(prefix)), None) == unit]
        parts = [
            part for rank, file in files.items() for part in _flat_parts(of_rank[rank].get(unit + FLAT), file, unit)
        ]
        tensors |= _unit(unit, {key: shapes[key] for key in keys}, parts, tied)
    return tensors


def _intervals(
    files: Mapping[int, TorchFile], of_rank: Mapping[int, Mapping[str, Any]], key: str
) -> tuple[str, list[Piece]]:
    """Element type and pieces of a parameter of which the ranks have consecutive intervals."""
    pieces, start = [], 0
    for rank, file in files.items():
        ref = of_rank[rank].get(key)
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1:
            raise UnsupportedError(f"{file.path} holds {key} as {short(ref)}, which is no flat piece")
        pieces.append(Piece(Cut(((start, start + ref.shape[0]),), flat=True), file.fragment(ref, key)))
        start += ref.shape[0]
    return pieces[0].fragment.dtype, pieces


def _unit(
    unit: str, shapes: Mapping[str, tuple[int, ...]], parts: Sequence[tuple[int, int, Fragment]], tied: bool
) -> dict[str, Scattered]:
    """The tensors of one flat parameter."""
    total = sum(stop - start for start, stop, _ in parts)
    tensor_shapes = dict(shapes)
    if tied and sum(map(prod, tensor_shapes.values())) != total:
        tensor_shapes.pop("lm_head.weight", None)
    if sum(map(prod, tensor_shapes.values())) != total:
        raise SourceError(
            f"{unit}{FLAT} has {total} elements, the tensors of that module have "
            f"{sum(map(prod, tensor_shapes.values()))}",
            "the dump of the last rank may be missing, or the configuration belongs to another model",
        )
    tensors, start = {}, 0
    for key, shape in tensor_shapes.items():
        stop = start + prod(shape)
        inside = [
            (max(low, start), min(high, stop), low, fragment)
            for low, high, fragment in parts
            if low < stop and start < high
        ]
        pieces = [
            Piece(
                Cut(((begin - start, end - start),), flat=True),
                fragment._replace(
                    offset=fragment.offset + (begin - low) * DTYPES[fragment.dtype], shape=(end - begin,)
                ),
            )
            for begin, end, low, fragment in inside
        ]
        tensors[key] = from_pieces(key, shape, parts[0][2].dtype, pieces)
        start = stop
    return tensors


def _flat_parts(value: Any, file: TorchFile, name: str) -> Iterator[tuple[int, int, Fragment]]:
    """Start, stop and fragment of each part of a flat parameter that a rank has."""
    _, pieces = pieces_of(value, 0, file, name)
    for part, fragment in pieces:
        if len(part.ranges) != 1:
            raise UnsupportedError(f"{file.path} holds {name} with {len(part.ranges)} dimensions")
        if prod(part.shape):
            yield *part.ranges[0], fragment
