"""Which tensors in memory each tensor that transformers would save consists of, followed on the meta device.

`meta_model.py`, a program of its own, loads this file. `revert_weight_conversion` of transformers
(core_model_loading.py, 5.23.0) is run on tensors without data that record which boxes of which other tensors they
consist of. Rows in another order are a box each; the pieces of a tensor that boxes cannot describe, or only too many
boxes could, are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

Box = tuple[tuple[int, int], ...]
MOST_ROWS = 20_000
"""Most rows of a tensor that are followed one by one: more than the towers have in which transformers sorts rows."""


class Piece(NamedTuple):
    """The box `box` of a tensor, which is the box `source_box` of the tensor `name`.

    `axes` has, for each dimension of `box`, the dimension of `source_box` that it runs along, or None.
    """

    name: str
    source_box: Box
    box: Box
    axes: tuple[int | None, ...]


class TracedTensor(torch.Tensor):
    """A tensor without data that records its pieces; None where they are not known."""

    pieces: tuple[Piece, ...] | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as torch does, and set the pieces of the results."""
        compute: Any = super().__torch_function__
        result = compute(function, types, args, kwargs or {})
        follow = TRACERS.get(getattr(function, "__name__", ""))
        if follow is not None:
            parts = [result] if isinstance(result, torch.Tensor) else result
            for part, pieces in zip(parts, follow(result, *args, **(kwargs or {})), strict=True):
                part.pieces = pieces
        return result


Pieces = tuple[Piece, ...] | None


def traced(name: str, shape: Sequence[int]) -> TracedTensor:
    """A tensor of a model in memory, whose one piece is itself."""
    tensor = torch.empty(tuple(shape), device="meta").as_subclass(TracedTensor)
    box = tuple((0, size) for size in shape)
    tensor.pieces = (Piece(name, box, box, tuple(range(len(shape)))),)
    return tensor


def _put(box: Sequence[Any], at: int, value: Any) -> tuple[Any, ...]:
    return (*box[:at], value, *box[at + 1 :])


def _narrow(pieces: Pieces, dim: int, low: int, high: int) -> Pieces:
    """The pieces cut to [low, high) of a dimension, with `here` counted from `low`."""
    if pieces is None:
        return None
    narrowed = []
    for piece in pieces:
        first, last = max(piece.box[dim][0], low), min(piece.box[dim][1], high)
        if first >= last:
            continue
        axis, there = piece.axes[dim], piece.source_box
        if axis is not None:
            start = there[axis][0] + first - piece.box[dim][0]
            there = _put(there, axis, (start, start + last - first))
        narrowed.append(piece._replace(box=_put(piece.box, dim, (first - low, last - low)), source_box=there))
    return tuple(narrowed)


def _parts(result: Any, tensor: Any, _: Any, dim: int = 0) -> Iterator[Pieces]:
    """The pieces of each result of `chunk` and `split`."""
    dim, low = _dim(tensor, dim), 0
    for part in result:
        yield _narrow(tensor.pieces, dim, low, low + part.shape[dim])
        low += part.shape[dim]


def _dim(tensor: Any, dim: int) -> int:
    return dim % max(int(tensor.dim()), 1)


def _cat(result: Any, tensors: Any, dim: int = 0) -> Iterator[Pieces]:
    dim, low, pieces = _dim(result, dim), 0, list[Piece]()
    for tensor in tensors:
        if getattr(tensor, "pieces", None) is None:
            yield None
            return
        for piece in tensor.pieces:
            first, last = piece.box[dim]
            pieces.append(piece._replace(box=_put(piece.box, dim, (low + first, low + last))))
        low += tensor.shape[dim]
    yield tuple(pieces)


def _stack(result: Any, tensors: Any, dim: int = 0) -> Iterator[Pieces]:
    dim, pieces = _dim(result, dim), list[Piece]()
    for number, tensor in enumerate(tensors):
        if getattr(tensor, "pieces", None) is None:
            yield None
            return
        for piece in tensor.pieces:
            here = (*piece.box[:dim], (number, number + 1), *piece.box[dim:])
            pieces.append(piece._replace(box=here, axes=(*piece.axes[:dim], None, *piece.axes[dim:])))
    yield tuple(pieces)


def _ordered(pieces: tuple[Piece, ...], order: Sequence[int]) -> tuple[Piece, ...]:
    """The pieces with the dimensions `order`, in this order."""
    return tuple(
        piece._replace(box=tuple(piece.box[i] for i in order), axes=tuple(piece.axes[i] for i in order))
        for piece in pieces
    )


def _squeeze(result: Any, tensor: Any, dim: int) -> Iterator[Pieces]:
    dim = _dim(tensor, dim)
    if result.dim() == tensor.dim() or tensor.pieces is None:
        yield tensor.pieces
        return
    order = [axis for axis in range(tensor.dim()) if axis != dim]
    yield _ordered(tensor.pieces, order)


def _transpose(_: Any, tensor: Any, dim0: int, dim1: int) -> Iterator[Pieces]:
    if tensor.pieces is None:
        yield None
        return
    order = list(range(tensor.dim()))
    first, second = _dim(tensor, dim0), _dim(tensor, dim1)
    order[first], order[second] = second, first
    yield _ordered(tensor.pieces, order)


def _reshape(result: Any, tensor: Any, *_: Any) -> Iterator[Pieces]:
    """The pieces after `view` and `reshape`: rows before the last dimensions that both have are followed one by one."""
    old, new = tuple(tensor.shape), tuple(result.shape)
    if tensor.pieces is None or tensor.dtype != result.dtype:
        yield None
        return
    ends = [n for n in range(min(len(old), len(new)) + 1) if old[len(old) - n :] == new[len(new) - n :]]
    same = max(n for n in ends if prod(old[: len(old) - n]) == prod(new[: len(new) - n]))
    rows, rows_after = old[: len(old) - same], new[: len(new) - same]
    if prod(rows) > MOST_ROWS:
        yield None
        return
    pieces = []
    for piece in tensor.pieces:
        for row in product(*(range(low, high) for low, high in piece.box[: len(rows)])):
            there = piece.source_box
            for index, (low, _high), axis in zip(row, piece.box, piece.axes, strict=False):
                if axis is not None:
                    start = piece.source_box[axis][0] + index - low
                    there = _put(there, axis, (start, start + 1))
            number = sum(index * prod(rows[dim + 1 :]) for dim, index in enumerate(row))
            after = [number // prod(rows_after[dim + 1 :]) % size for dim, size in enumerate(rows_after)]
            here = (*((index, index + 1) for index in after), *piece.box[len(rows) :])
            pieces.append(Piece(piece.name, there, here, (*[None] * len(after), *piece.axes[len(rows) :])))
    yield tuple(pieces)


def _same(_: Any, tensor: Any, *__: Any, **___: Any) -> Iterator[Pieces]:
    yield tensor.pieces


TRACERS: dict[str, Callable[..., Iterator[Pieces]]] = {
    "chunk": _parts, "split": _parts, "cat": _cat, "stack": _stack, "squeeze": _squeeze, "transpose": _transpose,
    "view": _reshape, "reshape": _reshape, "contiguous": _same, "clone": _same, "detach": _same,
}  # fmt: skip
"""Name of a torch function: the function that gives the pieces of its results."""


def trace_model(model: Any, shapes: dict[str, Sequence[int]]) -> dict[str, Any]:
    """The tensors of a model in memory, which of them are copies, and those that it would be saved as.

    Args:
        model: a model of transformers on the meta device, which the tensors of `shapes` were loaded into.
        shapes: name and shape of each of these tensors.

    Returns:
        `memory`: name and shape of each tensor of its state dict; `buffers`: the names of those that are no parameters;
        `tied`: copy and original; `hub`: name, shape and pieces (None where they cannot be told) of each tensor that it
        would be saved as.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        fresh = type(model)(model.config)  # in `model` a tensor that is in a file twice is not tied
    fresh.tie_weights()
    first: dict[int, str] = {}
    own = dict(model.state_dict())
    state = {name: tensor for name, tensor in fresh.state_dict(keep_vars=True).items() if name in own}
    tied = {name: first[id(tensor)] for name, tensor in state.items() if first.setdefault(id(tensor), name) != name}
    for copy, original in (getattr(fresh, "all_tied_weights_keys", None) or {}).items():
        if tied.get(original) == copy:  # the original that the class names is the one that is saved
            tied = {name: original if other == copy else other for name, other in tied.items() if name != original}
            tied[copy] = original
    memory = {name: tuple(tensor.shape) for name, tensor in own.items()}
    origins = {name: traced(name, shape) for name, shape in memory.items() if name not in tied}
    if (
        origins.keys() <= shapes.keys()
    ):  # the names are those in memory: no file was loaded that would tell those in files
        model._weight_conversions = None  # noqa: SLF001
    hub = revert_weight_conversion(model, dict(origins))
    if any(shapes.get(name, tuple(tensor.shape)) != tuple(tensor.shape) for name, tensor in hub.items()):
        _transpose_always(model)
        hub = revert_weight_conversion(model, dict(origins))
    saved = {
        name: {"shape": list(tensor.shape), "pieces": getattr(tensor, "pieces", None)} for name, tensor in hub.items()
    }
    buffers = [name for name, tensor in state.items() if not isinstance(tensor, torch.nn.Parameter)]
    shapes_in_memory = {name: list(shape) for name, shape in memory.items()}
    return {"memory": shapes_in_memory, "buffers": buffers, "tied": tied, "hub": saved}


def _transpose_always(model: Any) -> None:
    """Make transformers transpose the tensors that it only transposes where their shape in a file differs."""
    for conversion in getattr(model, "_weight_conversions", None) or ():
        for operation in getattr(conversion, "operations", ()):
            if hasattr(operation, "check_dims"):
                operation.check_dims = False
