"""What a model file of DeepSpeed says: its module, the shapes of its parameters, those that are frozen, whole states.

Facts: deepspeed/runtime/engine.py `_save_checkpoint` and `_get_zero_param_shapes`, 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from formats.deepspeed.partitions import flat_fragment, flat_piece, whole_of
from formats.disk.safetensors import FLOATS, Fragment
from formats.errors import SourceError, UnsupportedError, short
from formats.layout.columns import Piece
from formats.layout.pieces import Scattered, in_one, whole_part
from formats.torch_files.archive import TorchFile
from formats.torch_files.pickle_values import Opaque, TensorRef
from formats.torch_files.unpickle import DAMAGE

OWN = {"module", "optimizer", "frozen_param_fragments", "random_ltd", "data_sampler", "lr_scheduler"}
"""What a model file holds tensors in besides what a training itself puts there (`client_state`)."""
MIXED = "the file was changed, or put together of two: copy those of one save again"


def param_shapes(file: TorchFile) -> list[dict[str, tuple[int, ...]]]:
    """The parameters of each optimizer group (in stage 3: of each sub group), in the order in which they are laid out.

    Raises:
        SourceError: the file does not say.
    """
    groups = file.value.get("param_shapes")
    if isinstance(groups, Mapping):
        groups = [groups]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise SourceError(f"{file.path} holds no param_shapes, without which a partition cannot be taken apart")
    for group in groups:
        for name, shape in group.items():
            if not isinstance(name, str) or not _is_shape(shape):
                raise SourceError(f"{file.path} holds param_shapes that are none: {short(name)} {short(shape)}")
    return [dict(group) for group in groups]


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**62 for n in value)


def frozen(files: Sequence[TorchFile]) -> Iterator[tuple[str, Scattered]]:
    """The parameters that are not trained: in stage 2 whole, as they lay in memory, in stage 3 a part on each rank.

    Args:
        files: the model files of all data parallel ranks; of stage 2 only the first is there.
    """
    shapes = files[0].value.get("frozen_param_shapes") or {}
    for name, shape in shapes.items():
        if not _is_shape(shape):
            raise SourceError(f"{files[0].path} holds a frozen parameter of the shape {short(shape)}")
        pieces, start = list[Piece](), 0
        for file in files:
            ref = (file.value.get("frozen_param_fragments") or {}).get(name)
            if not isinstance(ref, TensorRef):
                raise SourceError(f"{file.path} holds no fragment of {name}, which is frozen")
            if ref.shape == shape and len(files) == 1:
                fragment = file.fragment(ref, name)
                pieces.append(Piece(whole_part(shape), fragment))
                continue
            fragment = flat_fragment(file, ref, f"the frozen {name}")
            stop = min(prod(shape), start + fragment.shape[0])
            if stop > start:
                pieces.append(flat_piece(fragment, 0, start, stop))
            start = stop
        yield name, whole_of(name, shape, pieces, fragment)


def module(file: TorchFile) -> dict[str, Fragment]:
    """The tensors of the module in a model file.

    Raises:
        SourceError: it holds none.
    """
    tensors = file.value.get("module")
    if not isinstance(tensors, Mapping):
        raise SourceError(f"{file.path} holds no module")
    fragments = {}
    for name, ref in tensors.items():
        if isinstance(ref, TensorRef):
            fragments[str(name)] = file.fragment(ref, str(name))
        elif not isinstance(ref, Opaque | None):
            raise UnsupportedError(f"{file.path}: {short(name)} holds {short(ref)}, which is not a tensor")
    return fragments


def left_out(file: TorchFile) -> Iterator[str]:
    """What to tell of weights that a training keeps beside its module, such as their moving average."""
    for name, value in file.value.items():
        if name not in OWN and (count := _floats(value)):
            tensors = "1 tensor" if count == 1 else f"{count} tensors"
            yield f"{short(name)} in {file.path}, {tensors} beside the module, is not carried"


def _floats(value: Any) -> int:
    """How many tensors of floating point numbers are in a value; a scalar is no weight."""
    if isinstance(value, TensorRef):
        return int(value.dtype in FLOATS and value.shape != ())
    within = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(_floats, within))


def require_of_module(
    file: TorchFile, groups: Sequence[Mapping[str, tuple[int, ...]]], modules: Mapping[str, Fragment]
) -> None:
    """The parameters that an optimizer lays out are the module's; what of the module is none of them, is said.

    Args:
        file: a model file.
        groups: its `param_shapes`.
        modules: the tensors of its module, in stage 3 empty placeholders; none where it has none.

    Raises:
        SourceError: a parameter has another name or shape in the module, or one of the module is unexplained.
    """
    shapes = {name: shape for group in groups for name, shape in group.items()}
    for name, shape in shapes.items() if modules else ():
        own_shape = modules[name].shape if name in modules else None
        if own_shape not in (shape, (0,)):
            there = "which its module lacks" if own_shape is None else f"which is {list(own_shape)} in its module"
            raise SourceError(f"{file.path} lays out {short(name)} {list(shape)}, {there}", MIXED)
    by_name = [file.value.get(key) for key in ("frozen_param_shapes", "buffer_names", "shared_params")]
    if not isinstance(by_name[0], Mapping):
        return  # older versions, and those that leave frozen parameters out, do not say which are frozen
    if twice := [name for name in by_name[0] if name in shapes]:
        raise SourceError(f"{file.path} calls {short(twice[0])} both trained and frozen", MIXED)
    known = {name for names in (shapes, *by_name) for name in names or ()}
    if odd := [name for name in modules if name not in known]:
        raise SourceError(
            f"{file.path} holds {short(odd[0])}, which it calls neither trained nor frozen nor a buffer", MIXED
        )


def whole(file: TorchFile, state: str, modules: Mapping[str, Fragment]) -> Iterator[tuple[str, Scattered]]:
    """The states of stage 0, which keeps them whole, in the order of its groups and without a name.

    Each takes the first parameter of its shape that is left. That this is right, the comparison of the master weights
    with the module proves, also where moments are asked for: `converters/move/replicas.py` lets no one switch it off.

    Raises:
        SourceError: there are none, or they fit no parameter.
        UnsupportedError: there are no master weights, so that nothing would tell which parameter a moment belongs to.
    """
    try:
        groups = _whole_groups(file, state)
        left = dict(modules)
        for ref in (ref for group in groups for ref in group):
            name = next(name for name, one in left.items() if one.shape == ref.shape)
            del left[name]
            fragment = file.fragment(ref, state)
            yield name, in_one(name, fragment)
    except (*DAMAGE, StopIteration):
        raise SourceError(
            f"{file.path} holds no {state} of its parameters in a form that is known", "take --weights module"
        ) from None


def _whole_groups(file: TorchFile, state: str) -> list[list[TensorRef]]:
    """The states of each group. A training in float32 has no master weights: its optimizer is that of torch alone."""
    optimizer = file.value["optimizer"]
    masters = optimizer.get("fp32_groups")
    inner = optimizer["optimizer_state_dict"] if masters is not None else optimizer
    if state == "fp32":
        return [list(group) for group in masters or ()]
    if masters is None:
        raise UnsupportedError(f"{file.path} is of stage 0 in float32, which does not say whose {state} is whose")
    return [[inner["state"][number][state] for number in group["params"]] for group in inner["param_groups"]]
