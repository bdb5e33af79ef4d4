"""Read a universal checkpoint of tensor parallel ranks: each rank's part of every parameter, as the ranks had it.

DeepSpeed's ds_to_universal joins the parts of the ranks by what the training has said of each parameter (`joined.py`).
What the training has not said is concatenated along dimension 0, also where that makes no matrix of the model: norms
that each rank has, matrices that are cut by columns, query, key and value of each rank in turn. Cut at the sizes of the
training, the parts are right in any case, so that they are read in its layout, and by its tables. That the tensor
parallel size is that of the training shows in the model file of each rank, which has the shapes of the rank's parts
(`param_shapes`). What was written here is joined by the tables, and has no such shapes where layer files say the size.

Facts: deepspeed/checkpoint/ds_to_universal.py `merge_tp_slices` and universal_checkpoint.py `load_hp_checkpoint_state`,
0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from formats.deepspeed import joined, model_files, universal
from formats.deepspeed.folders import OURS
from formats.deepspeed.joined import Layout
from formats.disk.safetensors import DTYPES, Fragment
from formats.errors import SourceError, short
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import Scattered, from_pieces, place_pieces
from formats.layout.placed import Placed, match
from formats.layout.slots import Place, Slot
from formats.torch_files.archive import TorchFile


class Joined(NamedTuple):
    """A parameter of a universal checkpoint.

    Attributes:
        path: the file of its tensor.
        name: what the training calls it.
        shape: the shape of the tensor in the file.
        layout: how it is joined, by the keys in the file.
        parts: the part of each rank; of one that is whole a single one.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    layout: Layout
    parts: Sequence[Scattered]


Parts = Mapping[str, Joined]
"""The parameters by key."""


def is_ours(models: Mapping[int, TorchFile]) -> bool:
    """Whether a universal checkpoint was written here, and so is joined by the tables."""
    return OURS in models[0].value


def parts(
    tag: Path,
    models: Mapping[int, TorchFile],
    state: str,
    ranks: int,
    key_of: Callable[[str], str],
    skip: Collection[str] = (),
) -> Parts:
    """One optimizer state of each parameter, cut for the tensor parallel ranks of the training.

    Args:
        tag: the folder of the checkpoint.
        models: the model file of each model parallel rank.
        state: one of `optimizer.STATES`.
        ranks: the tensor parallel size of the training.
        key_of: returns the key of a parameter, with the number of its module in front.
        skip: the names that are left out.

    Raises:
        SourceError: a file is missing or damaged, does not divide over the ranks, or is joined or cut otherwise than
            the model files say; or a parameter is there twice.
        UnsupportedError: a file says that its tensor is laid out in another way.
    """
    tensors: dict[str, Joined] = {}
    ours = is_ours(models)
    for name, tensor, keys in universal.parameters(tag, {}, state, skip):
        key, where = key_of(name), tag / "zero" / name / f"{state}.pt"
        layout = joined.layout(where, tensor.shape, keys)
        if key in tensors:
            raise SourceError(f"{tag} holds {key} twice, the second time as {short(name)}")
        if not ours:
            joined.require(
                where, name, layout, joined.wanted(models[0], name, where, tensor.shape), models[0].path.name
            )
        tensors[key] = Joined(where, name, tensor.shape, layout, [*_cut(where, tensor, layout, ranks)])
    if not ours:
        _require_shapes(models, ranks, {each.name: each for each in tensors.values()})
    return tensors


def _require_shapes(models: Mapping[int, TorchFile], ranks: int, by_name: Mapping[str, Joined]) -> None:
    """Refuse parts that are not shaped as the model file of their rank says; of the vocabulary without the padding.

    Raises:
        SourceError: a part has another shape.
    """
    for number, file in models.items():
        rank = number % ranks
        for name, shape in (pair for group in model_files.param_shapes(file) for pair in group.items()):
            if name not in by_name:
                continue  # what is missing is found by the tables
            each = by_name[name]
            own = each.parts[rank if len(each.parts) > 1 else 0].shape
            start = 1 if each.layout.vocab else 0
            if own[start:] != shape[start:]:
                raise SourceError(
                    f"{each.path} has {list(own)} for tensor parallel rank {rank} of {ranks}, {file.path.name} says "
                    f"{list(shape)} of {short(name)}",
                    "the parallel sizes are not those of the training, or files of another one are among these",
                )


def _cut(where: Path, tensor: Scattered, layout: Layout, ranks: int) -> Iterator[Scattered]:
    """The part of each rank, or the whole tensor, which is not cut."""
    ((piece,),) = tensor.copies
    fragment, shape = piece.fragment, tensor.shape
    dim, sizes, vocab = layout
    if ranks == 1 or dim is None or vocab:
        yield tensor
        return
    if any(size % ranks for size in sizes):
        terms = " + ".join(map(str, sizes))
        raise SourceError(f"{where} holds {terms} along dimension {dim}, which {ranks} ranks cannot have had")
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


def placed(
    tensors: Parts, whole: Sequence[Slot], shards: Iterable[Slot], drops: Sequence[str], tag: Path, *, ours: bool
) -> tuple[tuple[Placed, ...], tuple[str, ...]]:
    """Pair each tensor with its slot, and the parts of ranks with those of the training's topology.

    Args:
        tensors: the result of `parts`.
        whole: the tensors of the model for one tensor parallel rank.
        shards: the tensors of the model for the ranks of the training.
        drops: regular expressions of keys that carry no weights.
        tag: the folder, for errors.
        ours: whether the tensors were joined by the tables (`is_ours`).

    Returns:
        The pieces of every tensor, and the keys that a rule dropped.

    Raises:
        SourceError: a tensor is missing, left over, has another shape, or is joined otherwise than by its table.
    """
    if ours:
        _require_tables(tensors, whole)
    cut = {key for key, each in tensors.items() if len(each.parts) > 1}
    slots = [_of_rank(slot, 0) for slot in whole if cut.isdisjoint(slot.keys)]
    slots += [_of_rank(slot, dict(slot.mesh)["tp"][0]) for slot in shards if not cut.isdisjoint(slot.keys)]
    by_rank: dict[Place, dict[str, Scattered]] = {Place(): {}}
    for key, each in tensors.items():
        for rank, part in enumerate(each.parts):
            by_rank.setdefault(_place(rank), {})[key] = part
    fragments = {place: {key: part.whole for key, part in of_rank.items()} for place, of_rank in by_rank.items()}
    matched, dropped = match(slots, fragments, drops, tag)
    pieces = (piece for each in matched for piece in place_pieces(each, by_rank[each.slot.place][each.key]))
    return tuple(pieces), tuple(dropped)


def _require_tables(tensors: Parts, whole: Iterable[Slot]) -> None:
    """Refuse tensors that are joined otherwise than by the tables. Args as for `placed`.

    Raises:
        SourceError: a tensor is.
    """
    for slot in whole:
        for each in (tensors[key] for key in slot.keys if key in tensors):
            wanted = joined.layout(each.path, each.shape, universal.cut_of(slot))
            joined.require(each.path, each.name, each.layout, wanted, "the layout of its model")


def _place(rank: int) -> Place:
    return Place(chunk=str(rank) if rank else "")


def _of_rank(slot: Slot, rank: int) -> Slot:
    """A slot without the name of a file, which a universal checkpoint does not have."""
    return slot._replace(place=_place(rank))
