"""Rename the tensors of models without a table between files and memory, as transformers converts them.

`tensor_origins.py` tells which boxes of tensors in memory each tensor of a file consists of. A checkpoint whose tensors
have the one kind of names is read as if it had the other: each physical tensor is a part of the tensors that are
written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from converters.assets.files import config_text
from converters.plan import agreement
from formats.checkpoint import Checkpoint
from formats.disk.safetensors import DTYPES, Fragment
from formats.errors import SourceError, UnsupportedError
from formats.fsdp import FSDP
from formats.huggingface import HUGGINGFACE
from formats.layout.columns import Cut
from formats.layout.leaves import Leaf
from formats.layout.placed import Placed
from formats.layout.slots import Slot
from formats.model import untabled
from formats.model.spec import Verbatim
from formats.model.vocab_rows import HEAD

Box = tuple[tuple[int, int], ...]


class Move(NamedTuple):
    """The box `box` of a tensor, which is the box `target_box` of the tensor `name`.

    `axes` has, for each dimension of `box`, the dimension of `target_box` that it runs along, or None.
    """

    box: Box
    name: str
    target_box: Box
    axes: tuple[int | None, ...]


class Names(NamedTuple):
    """A renaming: the shapes of the new tensors, the moves of each old tensor, and the old tensors that are copies."""

    shapes: Mapping[str, tuple[int, ...]]
    moves: Mapping[str, Sequence[Move]]
    copies: tuple[str, ...] = ()


class TransformersNames(NamedTuple):
    """The answer of transformers on a model without a table.

    Args:
        spec: the model.
        memory: the shapes of its tensors in memory.
        hub: shape and pieces of each tensor of its files.
        tied: copy in memory: the tensor that it is a copy of.
        renamed: name of a tensor of the checkpoint, of one that is loaded as it is: its name in memory.
        buffers: the names in memory of its buffers.
    """

    spec: Verbatim
    memory: dict[str, tuple[int, ...]]
    hub: Mapping[str, Mapping[str, Any]]
    tied: Mapping[str, str]
    renamed: Mapping[str, str]
    buffers: frozenset[str]


def has_names_in_memory(source: Checkpoint, config: Mapping[str, Any]) -> bool:
    """Whether transformers tells what the tensors of a checkpoint are called in memory."""
    return _transformers_names(source, config) is not None


def with_copies_in_memory(source: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint without the copies that its model does not have in memory, where transformers tells.

    Args:
        source: the opened checkpoint.
        config: the config.json of the output.
    """
    answer = _transformers_names(source, config)
    if answer is None:
        return source
    copies = {copy: entry for copy, entry in answer.spec.copies.items() if copy in answer.memory}
    return replace(source, spec=replace(answer.spec, copies=copies))


def with_names_in_memory(source: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint with tensor names of files, as if it had the names that its model has in memory.

    Args:
        source: the opened checkpoint.
        config: the config.json of the output.

    Raises:
        UnsupportedError: transformers converts a tensor in a way that boxes cannot describe.
    """
    answer = _transformers_names(source, config)
    if answer is None:
        return source
    spec, memory = answer.spec, answer.memory
    hub = {name: entry for name, entry in answer.hub.items() if tuple(entry["shape"]) == spec.shapes.get(name)}
    moves = {name: list(_pieces(source, name, entry)) for name, entry in hub.items()}
    rest = {name: shape for name, shape in spec.shapes.items() if name not in moves}
    written = {move.name for some in moves.values() for move in some} | rest.keys()
    stored = {
        name: answer.tied[inner] for name, inner in answer.renamed.items() if name in rest and inner in answer.tied
    }
    named_as_copies = {entry: name for name, entry in stored.items() if entry not in written}
    moves |= {name: [_whole(name, rest.pop(name))._replace(name=entry)] for name, entry in stored.items()}
    written = written - stored.keys() | named_as_copies.keys()
    copies = {copy: entry for copy, entry in answer.tied.items() if entry in written and copy not in written}
    for some in moves.values():
        some += [move._replace(name=copy) for copy, entry in copies.items() for move in some if move.name == entry]
    shapes = {name: shape for name, shape in (memory | rest).items() if name in written or name in copies}
    compared = tuple(name for name in stored if name not in named_as_copies.values())
    return _renamed(source, spec, config, Names(shapes, moves, compared), "its name in memory")


def with_names_in_files(source: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint with the tensor names that its model has in memory, as if it had those that transformers saves.

    Args:
        source: the opened checkpoint.
        config: the config.json of the output.

    Raises:
        UnsupportedError: transformers converts a tensor in a way that boxes cannot describe.
    """
    answer = _transformers_names(source, config)
    if answer is None:
        return source
    spec = answer.spec
    known, tied = _known(answer), _tied(answer)
    moves: dict[str, list[Move]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in answer.hub.items():
        for here, inner, there, axes in _pieces(source, name, entry):
            if inner in known - tied.keys():
                turned = tuple(axes.index(axis) if axis in axes else None for axis in range(len(there)))
                moves.setdefault(inner, []).append(Move(there, name, here, turned))
                shapes[name] = tuple(entry["shape"])
    moves |= {copy: moves[entry] for copy, entry in tied.items() if entry in moves}
    rest = {name: shape for name, shape in spec.shapes.items() if name not in moves}
    names = Names(shapes | rest, moves, tuple(copy for copy in tied if copy in moves))
    return _renamed(source, spec, config, names, "the name that transformers saves it under")


def as_trained(source: Checkpoint) -> Checkpoint:
    """An FSDP checkpoint as its optimizer knows it: tensors that transformers ties are copies of one parameter.

    What transformers says of the buffers of the model is in `buffers`.
    """
    if source.format != FSDP.name or not isinstance(source.spec, Verbatim):
        return source
    config = json.loads(config_text(source, None))
    answer = _transformers_names(source, config)
    if answer is None:
        return source
    spec, tied = answer.spec, _tied(answer)
    moves = {copy: [_whole(copy, spec.shapes[copy])._replace(name=entry)] for copy, entry in tied.items()}
    shapes = {name: shape for name, shape in spec.shapes.items() if name not in tied}
    renamed = _renamed(source, spec, config, Names(shapes, moves, tuple(tied)), spec.under)
    return replace(renamed, buffers=answer.buffers)


def with_names(source: Checkpoint, config: Mapping[str, Any], new: Mapping[str, str]) -> Checkpoint:
    """A checkpoint with some of its tensors under other names of files, by those that they have.

    Raises:
        SourceError: two of them would have one name.
    """
    spec = source.spec
    assert isinstance(spec, Verbatim)
    shapes = {new.get(name, name): shape for name, shape in spec.shapes.items()}
    if len(shapes) < len(spec.shapes):
        many = Counter(new.get(name, name) for name in spec.shapes)
        twice = next(name for name in spec.shapes if many[new.get(name, name)] > 1 and new.get(name, name) != name)
        raise SourceError(f"{source.root} holds {new[twice]} twice: {twice} is another name of it")
    moves = {old: [_whole(old, shape)._replace(name=new.get(old, old))] for old, shape in spec.shapes.items()}
    return _renamed(source, spec, config, Names(shapes, moves), "the name that files of the Hub have")


def _known(answer: TransformersNames) -> set[str]:
    """The tensors of a checkpoint that have name and shape of one in memory."""
    return {name for name, shape in answer.spec.shapes.items() if answer.memory.get(name) == shape}


def _tied(answer: TransformersNames) -> dict[str, str]:
    """The tensors of a checkpoint that are copies in memory: the tensor, also there, that each is a copy of."""
    known = _known(answer)
    return {copy: entry for copy, entry in answer.tied.items() if {copy, entry} <= known}


def slots_by_name_in_memory(source: Checkpoint, slots: Mapping[str, Slot]) -> dict[str, Slot] | None:
    """The slots of tensors in files by the names that the tensors have in memory.

    Args:
        source: the opened checkpoint.
        slots: the slots of the checkpoint by the tensor names in its files.

    Returns:
        The slots in the order of memory. A tensor that is the same in memory under another name is under that name; all
        others are as they were. None where transformers does not tell.
    """
    answer = _transformers_names(source, json.loads(config_text(source, None)))
    if answer is None:
        return None
    hub = {name: entry for name, entry in answer.hub.items() if name in slots and entry["pieces"]}
    moves = ((name, move) for name, entry in hub.items() for move in _pieces(source, name, entry))
    renamed = {name: move.name for name, move in moves if move == _whole(move.name, slots[name].shape)}
    named = {new: slot._replace(keys=(new,)) for key, slot in slots.items() for new in [renamed.get(key, key)]}
    return {name: named[name] for name in [*(name for name in answer.memory if name in named), *named]}


def parts_in_memory(source: Checkpoint) -> set[str]:
    """The tensors in files that are one tensor with others in memory, as experts are; none where nothing tells."""
    answer = _transformers_names(source, json.loads(config_text(source, None)))
    if answer is None:
        return set()
    pieces = ((name, *piece[:2]) for name, entry in answer.hub.items() for piece in entry["pieces"] or ())
    return {name for name, inner, there in pieces if _box(there) != tuple((0, size) for size in answer.memory[inner])}


def tied_names(source: Checkpoint, spec: Verbatim) -> set[str]:
    """All names, in memory and in files, of the tensors that transformers ties others to, such as an embedding."""
    answer = agreement.ask_transformers(json.loads(config_text(source, None)), spec.shapes)
    originals = {*answer.get("tied", {}).values()}
    hub = answer.get("hub", {}).items()
    return originals | {name for name, entry in hub if originals & {piece[0] for piece in entry["pieces"] or ()}}


def with_same_names(first: Checkpoint, second: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Two checkpoints of models without a table, both with tensor names of files where their names differ.

    If their files are of versions of transformers with different names, both have the names in memory.
    """
    specs = first.spec, second.spec
    if not all(isinstance(spec, Verbatim) for spec in specs) or _boxes(first) == _boxes(second):
        return first, second
    left, right = (
        each if each.format == HUGGINGFACE.name else with_names_in_files(each, json.loads(config_text(each, None)))
        for each in (first, second)
    )
    if _boxes(left) != _boxes(right):
        inner, other = (with_names_in_memory(each, json.loads(config_text(each, None))) for each in (left, right))
        left, right = (inner, other) if _boxes(inner) == _boxes(other) else (left, right)
    return left, right


def _boxes(source: Checkpoint) -> set[tuple[str, int | None, tuple[int, ...]]]:
    return {*source.spec.boxes()}


def _transformers_names(source: Checkpoint, config: Mapping[str, Any]) -> TransformersNames | None:
    """The answer of transformers on the names of a checkpoint; None where it has none, or is not to be asked."""
    spec = source.spec
    if not isinstance(spec, Verbatim) or source.settings.verbatim or config.get("quantization_config"):
        return None
    answer = agreement.ask_transformers(config, spec.shapes)
    if "memory" not in answer or agreement.doubled(answer):  # which `agreement.notes` refuses
        return None
    shapes = {name: tuple(shape) for name, shape in answer["memory"].items()}
    tied = answer["tied"]
    if (source.config or {}).get("tie_word_embeddings") is False:  # T5 1.1, whose class ties heads that no file holds
        tied = {copy: entry for copy, entry in tied.items() if copy not in spec.shapes or not HEAD.fullmatch(copy)}
    return TransformersNames(spec, shapes, answer["hub"], tied, dict(answer["renamed"]), frozenset(answer["buffers"]))


def _pieces(source: Checkpoint, name: str, entry: Mapping[str, Any]) -> Iterator[Move]:
    """The moves from a tensor of a file to tensors in memory.

    Raises:
        UnsupportedError: the pieces of the tensor are not known.
    """
    if entry["pieces"] is None:
        raise UnsupportedError(
            f"{source.root}: {name} is stored otherwise in memory than in files (rows in another order, or split "
            f"and turned), and no table describes {source.spec.family}",
            "--verbatim carries every tensor under its own name, as it is",
        )
    for inner, there, here, axes in entry["pieces"]:
        yield Move(_box(here), inner, _box(there), tuple(axes))


def _box(pairs: Iterable[Iterable[int]]) -> Box:
    return tuple((low, high) for low, high in pairs)


def _renamed(source: Checkpoint, spec: Verbatim, config: Mapping[str, Any], names: Names, under: str) -> Checkpoint:
    """The checkpoint with its tensors as parts of the new ones; the checkpoint itself where nothing changes."""
    if names.shapes == spec.shapes and all(
        list(moves) == [_whole(name, spec.shapes[name])] for name, moves in names.moves.items() if name in spec.shapes
    ):
        return source
    settings = {} if spec.vocab is None else {"vocab": spec.vocab}
    new = untabled.describe(dict(config), names.shapes, settings, spec.why)  # tied or not, as the output will be read
    new = replace(new, copies={copy: original for copy, original in new.copies.items() if copy in names.shapes})
    tensors = tuple(part for placed in source.fragments() for part in _parts(placed, spec, new, names))
    remarks = tuple(original for original in spec.remarks if original != untabled.FUSED_NOTE or original in new.remarks)
    return replace(
        source, tensors=tensors, spec=replace(new, remarks=remarks, under=under), original=source.original or source
    )


def _whole(name: str, shape: tuple[int, ...]) -> Move:
    """The move of a whole tensor to the tensor `name`."""
    box = tuple((0, size) for size in shape)
    return Move(box, name, box, tuple(range(len(shape))))


def _parts(placed: Placed, spec: Verbatim, new: Verbatim, names: Names) -> Iterator[Placed]:
    """A physical tensor, or a part of one, as parts of the new tensors.

    Raises:
        UnsupportedError: the part is in 8 bits, whose blocks run over the boxes that it has to be cut into.
    """
    (old,) = placed.slot.rule.pattern.tensors
    whole = _whole(old, spec.shapes[old])
    copy = placed.slot.replica
    copies = [*spec.copies, *names.copies]  # each of which has a number of its own, a shared head's is 0
    number = copies.index(old) if old in names.copies and not copy.shared else 0
    copy = copy._replace(shared=copy.shared or old in names.copies, number=copy.number * (len(copies) + 1) + number)
    leaves: list[Leaf] = []
    for move in names.moves.get(old, (whole,)):
        if move.name in new.copies:
            continue
        slot = untabled.slot(placed.key, move.name, new.shapes[move.name], copy, transposed=move.name in new.transposed)
        if move._replace(name=old) == whole and new.shapes[move.name] == spec.shapes[old]:
            yield placed._replace(slot=slot)
            continue
        if placed.fragment.pieces:
            raise UnsupportedError(
                f"{placed.fragment.path} holds {old} in 8 bits, of which transformers makes several tensors",
                "convert hf2fsdp, and what that writes with convert fsdp2hf",
            )
        leaves = leaves or [leaf for each in placed.layout.lowered() for leaf in each]
        for leaf in leaves:
            if (cut := _cut(placed.fragment, leaf, move)) is not None:
                yield Placed(placed.key, slot, *cut)


def _cut(fragment: Fragment, leaf: Leaf, move: Move) -> tuple[Fragment, Cut] | None:
    """The elements of a move in the fragment of a leaf of the old tensor, and their box in the new one, if any."""
    here = tuple(
        (max(span.start, low), min(span.stop, high)) for span, (low, high) in zip(leaf.spans, move.box, strict=True)
    )
    if any(low >= high for low, high in here):
        return None
    steps = zip(here, leaf.spans, strict=True)
    offset = leaf.base + sum((low - span.start) * span.stride for (low, _), span in steps)
    ranges, strides = list(move.target_box), [0] * len(move.target_box)
    for dim, axis in enumerate(move.axes):
        if axis is None:
            continue
        start = move.target_box[axis][0] + here[dim][0] - move.box[dim][0]
        ranges[axis] = (start, start + here[dim][1] - here[dim][0])
        strides[axis] = leaf.spans[dim].stride
    view = fragment._replace(
        offset=fragment.offset + offset * DTYPES[fragment.dtype],
        shape=tuple(high - low for low, high in ranges),
        strides=tuple(strides),
    )
    return view, Cut(tuple(ranges))
