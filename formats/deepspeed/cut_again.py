"""Read a universal checkpoint of tensor parallel ranks: each rank's part of every parameter, as the ranks had it.

DeepSpeed's ds_to_universal joins the parts of the ranks by what the training has said of each parameter, and writes
beside the tensor how it was joined, for its loader to cut it again:

    (no key)            all ranks had the same, or their mean was taken: whole
    cat_dim             the parts are concatenated along that dimension, in rank order
    param_n_sub_params  so many sections of equal size, each concatenated by itself, along `cat_dim`
    sub_param_shape     sections of the sizes that the shape lists, along its `partition_dim`
    vocab_tensor        rows of the vocabulary, without the padding at their end: whole

What the training has not said is concatenated along dimension 0, also where that makes no matrix of the model: norms
that each rank has, matrices that are cut by columns, query, key and value of each rank in turn. Cut at the sizes of the
training, the parts are right in any case, so that they are read in its layout, and by its tables.

Facts: deepspeed/checkpoint/ds_to_universal.py `merge_tp_slices` and universal_checkpoint.py `load_hp_checkpoint_state`,
0.19.8; constants.py has the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from formats.deepspeed import universal
from formats.disk.safetensors import DTYPES, Fragment
from formats.errors import SourceError, UnsupportedError, short
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import Scattered, from_pieces, place_pieces
from formats.layout.placed import Placed, match
from formats.layout.slots import Place, Slot
from formats.torch_files.pickle_values import Opaque

KEYS = {"param", "cat_dim", "param_n_sub_params", "sub_param_shape", "vocab_tensor"}
"""The keys that a file may have; others, such as those of experts, say that it is laid out otherwise."""
Parts = Mapping[str, Sequence[Scattered]]
"""The part of each rank, by the key of the parameter; of one that is whole a single one."""


def parts(tag: Path, state: str, ranks: int, key_of: Callable[[str], str], skip: Collection[str] = ()) -> Parts:
    """One optimizer state of each parameter, cut for the tensor parallel ranks of the training.

    Args:
        tag: the folder of the checkpoint.
        state: one of `optimizer.STATES`.
        ranks: the tensor parallel size of the training.
        key_of: returns the key of a parameter, with the number of its module in front.
        skip: the names that are left out.

    Raises:
        SourceError: a file is missing or damaged, does not divide over the ranks, or a parameter is there twice.
        UnsupportedError: a file says that its tensor is laid out in another way.
    """
    tensors: dict[str, Sequence[Scattered]] = {}
    for name, tensor, keys in universal.parameters(tag, {}, state, skip):
        key, where = key_of(name), tag / "zero" / name / f"{state}.pt"
        if odd := sorted(str(other) for other in keys.keys() - KEYS):
            raise UnsupportedError(f"{where} says {short(odd[0])} of its tensor, whose layout is not known")
        if key in tensors:
            raise SourceError(f"{tag} holds {key} twice, the second time as {short(name)}")
        tensors[key] = [*_cut(where, tensor, keys, ranks)]
    return tensors


def _cut(where: Path, tensor: Scattered, keys: Mapping[str, Any], ranks: int) -> Iterator[Scattered]:
    """The part of each rank, or the whole tensor, which is not cut."""
    ((piece,),) = tensor.copies
    fragment, shape = piece.fragment, tensor.shape
    dim, sizes = _sections(where, shape, keys)
    if ranks == 1 or dim is None:
        yield tensor
        return
    if any(size % ranks for size in sizes):
        listed = " + ".join(map(str, sizes))
        raise SourceError(f"{where} holds {listed} along dimension {dim}, which {ranks} ranks cannot have had")
    own = [size // ranks for size in sizes]
    own_shape = (*shape[:dim], sum(own), *shape[dim + 1 :])
    starts, places = _starts(sizes), _starts(own)
    for rank in range(ranks):
        pieces = [
            _piece(fragment, own_shape, dim, at, start + rank * size, size)
            for start, at, size in zip(starts, places, own, strict=True)
        ]
        yield from_pieces(str(where), own_shape, tensor.dtype, pieces)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _piece(fragment: Fragment, shape: tuple[int, ...], dim: int, at: int, start: int, size: int) -> Piece:
    """The `size` rows (or columns) of a tensor from `start` on, which a part of that shape has from `at` on."""
    offset = fragment.offset + start * fragment.strides[dim] * DTYPES[fragment.dtype]
    cut_shape = (*shape[:dim], size, *shape[dim + 1 :])
    box = tuple((at, at + size) if each == dim else (0, extent) for each, extent in enumerate(shape))
    return Piece(Cut(box), fragment._replace(offset=offset, shape=cut_shape))


def _sections(where: Path, shape: tuple[int, ...], keys: Mapping[str, Any]) -> tuple[int | None, Sequence[int]]:
    """The dimension along which a tensor is cut, and the size of each section; None if it is whole.

    Raises:
        SourceError: the keys contradict the shape.
        UnsupportedError: they are in an unknown form.
    """
    dim, sections, runs = keys.get("cat_dim"), keys.get("param_n_sub_params", 1), keys.get("sub_param_shape")
    if not isinstance(keys.get("vocab_tensor", False), bool):
        raise UnsupportedError(f"{where} says vocab_tensor = {short(keys['vocab_tensor'])}")
    if runs is not None:
        state = runs.state if isinstance(runs, Opaque) and isinstance(runs.state, dict) else {}
        sizes_of, dim = state.get("shape"), state.get("partition_dim")
        if not isinstance(sizes_of, tuple) or type(dim) is not int or not 0 <= dim < len(shape) == len(sizes_of):
            raise UnsupportedError(f"{where} says sub_param_shape in a form that is not known")
        sizes = sizes_of[dim]
        if not isinstance(sizes, tuple) or not all(type(size) is int and size > 0 for size in sizes):
            raise UnsupportedError(
                f"{where} says sub_param_shape = {short(sizes_of)}, without the size of each section"
            )
        if sum(sizes) != shape[dim]:
            raise SourceError(f"{where} holds {list(shape)}, and says sections of {' + '.join(map(str, sizes))}")
        return dim, sizes
    if dim is None or keys.get("vocab_tensor"):
        return None, ()
    if type(dim) is not int or not 0 <= dim < len(shape) or type(sections) is not int or sections < 1:
        raise UnsupportedError(f"{where} says cat_dim = {short(dim)}, param_n_sub_params = {short(sections)}")
    if shape[dim] % sections:
        raise SourceError(f"{where} holds {list(shape)}, which has no {sections} sections along dimension {dim}")
    return dim, [shape[dim] // sections] * sections


def placed(
    tensors: Parts, whole: Iterable[Slot], shards: Iterable[Slot], drops: Sequence[str], tag: Path
) -> tuple[tuple[Placed, ...], tuple[str, ...]]:
    """Pair each tensor with its slot, and the parts of ranks with those of the training's topology.

    Args:
        tensors: the result of `parts`.
        whole: the tensors of the model for one tensor parallel rank.
        shards: the tensors of the model for the ranks of the training.
        drops: regular expressions of keys that carry no weights.
        tag: the folder, for errors.

    Returns:
        The pieces of every tensor, and the keys that a rule dropped.

    Raises:
        SourceError: a tensor is missing, left over, or has another shape.
    """
    cut = {key for key, each in tensors.items() if len(each) > 1}
    wanted = [_of_rank(slot, 0) for slot in whole if cut.isdisjoint(slot.keys)]
    wanted += [_of_rank(slot, dict(slot.mesh)["tp"][0]) for slot in shards if not cut.isdisjoint(slot.keys)]
    by_rank: dict[Place, dict[str, Scattered]] = {Place(): {}}
    for key, each in tensors.items():
        for rank, part in enumerate(each):
            by_rank.setdefault(_place(rank), {})[key] = part
    fragments = {place: {key: part.whole for key, part in of_rank.items()} for place, of_rank in by_rank.items()}
    matched, dropped = match(wanted, fragments, drops, tag)
    pieces = (piece for each in matched for piece in place_pieces(each, by_rank[each.slot.place][each.key]))
    return tuple(pieces), tuple(dropped)


def _place(rank: int) -> Place:
    return Place(chunk=str(rank) if rank else "")


def _of_rank(slot: Slot, rank: int) -> Slot:
    """A slot without the name of a file, which a universal checkpoint does not have."""
    return slot._replace(place=_place(rank))
