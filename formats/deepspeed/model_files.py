"""Read the model files of a DeepSpeed checkpoint.

They hold the module, the shapes of its parameters, the frozen parameters, and in stage 0 the whole optimizer states.

Facts: deepspeed/runtime/engine.py `_save_checkpoint` and `_get_zero_param_shapes`, 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from formats.deepspeed import folders as deepspeed
from formats.deepspeed import universal
from formats.deepspeed.flat_pieces import flat_piece, whole_of
from formats.deepspeed.partitions import flat_fragment
from formats.disk.safetensors import FLOATS, Fragment, read_bytes
from formats.errors import SourceError, UnsupportedError, count, short, some
from formats.layout.columns import Piece
from formats.layout.pieces import Scattered, single_piece, whole_part
from formats.torch_files import duplicate_files, saved_names
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.pickle_values import Opaque, TensorRef
from formats.torch_files.saves import require_same
from formats.torch_files.unpickle import DAMAGE

OWN = {"module", "optimizer", "frozen_param_fragments", "random_ltd", "data_sampler", "lr_scheduler"}
"""Entries of a model file in which DeepSpeed keeps tensors; other entries are of the training (`client_state`)."""
TIES = ("global_steps", "global_samples", "skipped_steps")
"""Entries that are equal in all model files of one save (deepspeed 0.19.8, runtime/engine.py `_get_checkpoint_state`).
The partitions have Adam's step (`partitions.py`)."""
OF_RANK = (*TIES, "mp_world_size", "frozen_param_fragments")
"""Entries that are kept of all model files of stage 3 but the first, since a thousand whole files are a gigabyte."""
SAMPLE = 1 << 16
"""The most bytes of parameters that are compared to tell them apart."""
MIXED = "the file was changed, or put together of two: copy those of one save again"


def files_of_ranks(tag: Path) -> list[TorchFile]:
    """The opened model file, or in stage 3 the model file of each data parallel rank.

    Raises:
        SourceError: a rank's file is missing, or there are files of several topologies.
        UnsupportedError: the model is a pipeline, or cut over several model parallel ranks, in a way that is not known.
    """
    deepspeed.require_no_experts(tag)
    if universal.is_universal(tag) and (models := [path for path in tag.iterdir() if deepspeed.is_model(path.name)]):
        return [_file(min(models))]
    shards: dict[int, Path] = {}
    for path in sorted(tag.iterdir()):
        name = saved_names.MODEL_OF_STAGE_3.fullmatch(path.name)
        if name and int(name[2]):
            raise UnsupportedError(f"{path} is of a second model parallel rank, whose layout is not known")
        if name and shards.setdefault(int(name[1]), path) is not path:
            raise SourceError(f"{tag} holds two files of rank {int(name[1])}: {shards[int(name[1])].name}, {path.name}")
    if not shards:
        files = deepspeed.model_files(tag)
        first_file = _file(files[0])  # a file that cannot be read tells no layout
        _require_no_pipeline(tag, first_file, len(files))
        if len(files) > 1:
            raise UnsupportedError(
                f"{tag} holds {len(files)} model parallel ranks of a model whose layout is not known",
                "`convert neox2hf` knows that of GPT-NeoX; what DeepSpeed's own tensor parallelism cuts, it gathers",
            )
        return [_require_alone(first_file)]
    if any(saved_names.MODEL.fullmatch(path.name) for path in tag.iterdir()):
        raise SourceError(f"{tag} holds model files of stage 3 and of another stage", "remove those that are older")
    first = min(shards)
    opened = {first: _file(shards[first])}
    opened |= {rank: _rank(path, opened[first]) for rank, path in sorted(shards.items()) if rank != first}
    world = opened[first].value.get("dp_world_size")
    count = world if isinstance(world, int) else max(opened) + 1
    if count > deepspeed.MOST_RANKS:
        raise SourceError(f"{opened[first].path} claims {count} data parallel ranks")
    require_same({file.path: file.value.get for file in opened.values()}, TIES)
    missing = sorted(set(range(count)) - set(opened))
    if missing or len(opened) > count:
        names = ", ".join(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in missing[:4])
        raise SourceError(
            f"{tag} is of {count} data parallel ranks, {len(opened)} are there"
            + (f"; it lacks {names}" if missing else ""),
            "copy them from their nodes" if missing else "remove the files of another run",
        )
    return [_require_alone(file) for file in opened.values()]


def _require_no_pipeline(tag: Path, first: TorchFile, ranks: int) -> None:
    """Refuse a PipelineModule, each of whose modules has a file of its own, or one for each tensor parallel rank.

    Raises:
        UnsupportedError: there are such files, and the model files hold no module.
    """
    layers = sorted(path.name for path in tag.glob("layer_*-model_states.pt"))
    if layers and first.value.get("module") is None:
        stages = count(ranks // len({name.partition("-")[2] for name in layers}), "stage", "stages")
        raise UnsupportedError(
            f"{tag} holds a PipelineModule of {stages}, whose modules have numbers for names ({some(layers, 2)})",
            "`convert neox2hf` knows those of GPT-NeoX, `convert to hf` Megatron-DeepSpeed's; of another, save the "
            "model under its names in transformers where it was trained",
        )


def _require_alone(file: TorchFile) -> TorchFile:
    """A model file, if it is that of the only model parallel rank.

    Raises:
        UnsupportedError: there are several model parallel ranks.
    """
    world = file.value.get("mp_world_size", 1)
    if world not in (1, None):
        raise UnsupportedError(
            f"{file.path} is one of {short(world)} model parallel ranks of a model whose layout is not known"
        )
    return file


def _file(path: Path) -> TorchFile:
    file = read_torch(path)
    if not isinstance(file.value, Mapping):
        raise SourceError(f"{path} holds no model states of DeepSpeed")
    experts = file.value.get("num_experts")  # by MoE layer: engine.py `_save_moe_checkpoint`, 0.19.8
    if experts or "ds_autoep_layers" in file.value:
        sign = f"num_experts = {short(experts)}" if experts else "ds_autoep_layers"
        raise UnsupportedError(
            f"{path} is of a model with DeepSpeed's MoE layers (it has {sign}): not supported", deepspeed.WITH_EXPERTS
        )
    return file


def _rank(path: Path, first: TorchFile) -> TorchFile:
    """The model file of a further rank of stage 3, with the entries `OF_RANK` alone.

    Raises:
        SourceError: the file lays out other parameters, or in another order, than the first.
    """
    file = _file(path)
    if "param_shapes" in file.value:
        own_shapes, first_shapes = (
            [list(group.items()) for group in param_shapes(each_file)] for each_file in (file, first)
        )
        if own_shapes != first_shapes:
            pairs = zip(chain(*own_shapes), chain(*first_shapes), strict=False)
            (ours, _), (theirs, _) = next((pair for pair in pairs if pair[0] != pair[1]), (("nothing", ()),) * 2)
            raise SourceError(
                f"{path} and {first.path} lay out different parameters, first {short(ours)} and {short(theirs)}: files "
                "of different runs",
                "copy the files of one save from all nodes",
            )
    entries = {name: file.value[name] for name in OF_RANK if name in file.value}
    return replace(file, value=entries, storages=file.storages if entries.get("frozen_param_fragments") else {})


def param_shapes(file: TorchFile) -> list[dict[str, tuple[int, ...]]]:
    """Name and shape of the parameters of each optimizer group (in stage 3: of each sub group), in the stored order.

    Raises:
        SourceError: the file does not hold them.
    """
    return shapes_in(file.value, file.path)


def shapes_in(model: Mapping[str, Any], path: Path) -> list[dict[str, tuple[int, ...]]]:
    """The same, of what a model file at `path` says."""
    groups = model.get("param_shapes")
    if isinstance(groups, Mapping):
        groups = [groups]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise SourceError(f"{path} holds no param_shapes, without which a partition cannot be taken apart")
    for group in groups:
        for name, shape in group.items():
            if not isinstance(name, str) or not _is_shape(shape):
                raise SourceError(f"{path} holds param_shapes that are none: {short(name)} {short(shape)}")
    return [dict(group) for group in groups]


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**62 for n in value)


def frozen(files: Sequence[TorchFile]) -> dict[str, Scattered]:
    """The parameters that are not trained: in stage 2 whole, strided as in memory, in stage 3 a part on each rank.

    Args:
        files: the model files of all data parallel ranks; in stage 2 the only model file.

    Raises:
        SourceError: a frozen parameter has no tensor in a file, or no valid shape; or two ranks hold the same parts.
    """
    shapes = files[0].value.get("frozen_param_shapes") or {}
    tensors, parts = dict[str, Scattered](), {file.path: list[Fragment]() for file in files}
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
            parts[file.path].append(fragment)
            stop = min(prod(shape), start + fragment.shape[0])
            if stop > start:
                pieces.append(flat_piece(fragment, 0, start, stop))
            start = stop
        tensors[name] = whole_of(name, shape, pieces, fragment)
    duplicate_files.require_own(parts.items())
    return tensors


def module(file: TorchFile) -> dict[str, Fragment]:
    """The tensors of the module in a model file.

    Raises:
        SourceError: the file holds no module.
        UnsupportedError: the module holds an entry that is no tensor.
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


def no_module(dtypes: Collection[str]) -> str:
    """The note that master weights are read, since there is no module; DeepSpeed can keep them in 16 bits too."""
    text = "it holds no module: these are the {} master weights"
    if "F32" in dtypes:
        return text.format("float32") + "; --dtype bf16 rounds them as DeepSpeed does"
    return text.format(" and ".join(sorted(dtypes)))


def renamed(file: TorchFile, tag: Path) -> Iterator[str]:
    """A note if a folder has the default name of another step (deepspeed 0.19.8, runtime/engine.py:4903)."""
    steps = file.value.get("global_steps")
    if type(steps) is int and (name := re.match(r"global_step(\d+)", tag.name)) and int(name[1]) != steps:
        yield f"{tag} holds step {steps}, as its files say"


def left_out(file: TorchFile) -> Iterator[str]:
    """Notes for the user on weights that a training stores beside its module, such as their moving average."""
    for name, value in file.value.items():
        if name not in OWN and (count := _floats(value)):
            tensors = "1 tensor" if count == 1 else f"{count} tensors"
            yield f"{short(name)} in {file.path}, {tensors} beside the module, is not carried"


def _floats(value: Any) -> int:
    """The number of floating point tensors in a value, without scalars, which are no weights."""
    if isinstance(value, TensorRef):
        return int(value.dtype in FLOATS and value.shape != ())
    within = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(_floats, within))


def require_of_module(
    file: TorchFile, groups: Sequence[Mapping[str, tuple[int, ...]]], modules: Mapping[str, Fragment]
) -> None:
    """Refuse a model file whose optimizer and module do not have the same parameters.

    Args:
        file: the model file.
        groups: the `param_shapes` of the file.
        modules: the tensors of the module, in stage 3 empty placeholders; empty without a module.

    Raises:
        SourceError: a parameter of the optimizer has another name or shape in the module; or the file does not record
            that a tensor of the module is trained, frozen or a buffer, or records that it is both trained and frozen.
    """
    shapes = {name: shape for group in groups for name, shape in group.items()}
    for name, shape in shapes.items() if modules else ():
        own_shape = modules[name].shape if name in modules else None
        if own_shape not in (shape, (0,)):
            shape_in_module = (
                "which its module lacks" if own_shape is None else f"which is {list(own_shape)} in its module"
            )
            raise SourceError(f"{file.path} lays out {short(name)} {list(shape)}, {shape_in_module}", MIXED)
    by_name = [file.value.get(key) for key in ("frozen_param_shapes", "buffer_names", "shared_params")]
    if not isinstance(by_name[0], Mapping):
        return  # files of older versions, or saved without frozen parameters, do not record which are frozen
    if twice := [name for name in by_name[0] if name in shapes]:
        raise SourceError(f"{file.path} calls {short(twice[0])} both trained and frozen", MIXED)
    known = {name for names in (shapes, *by_name) for name in names or ()}
    if odd := [name for name in modules if name not in known]:
        raise SourceError(
            f"{file.path} holds {short(odd[0])}, which it calls neither trained nor frozen nor a buffer", MIXED
        )


def unpartitioned_states(
    file: TorchFile, state: str, modules: Mapping[str, Fragment]
) -> Iterator[tuple[str, Scattered]]:
    """The optimizer states of stage 0, which stores them whole, in the order of its groups and without names.

    Each state is assigned to the first parameter of its shape that is left. The comparison of the FP32 master weights
    with the module proves that this is right, also if moments are asked for: `converters/move/replicas.py` does not let
    the user switch it off. It proves nothing of parameters that are equal in the module, as norms of a young model are:
    those of one group are taken in the order of the module.

    Raises:
        SourceError: there are no states, or they fit no parameter.
        UnsupportedError: there are no master weights, without which the parameter of a moment is not known; or
            parameters are equal, and of several groups.
    """
    try:
        groups = _whole_groups(file, state)
        _require_told_apart(file, [{ref.shape for ref in group} for group in groups], modules)
        remaining = dict(modules)
        for ref in (ref for group in groups for ref in group):
            name = next(name for name, candidate in remaining.items() if candidate.shape == ref.shape)
            del remaining[name]
            fragment = file.fragment(ref, state)
            yield name, single_piece(name, fragment)
    except (*DAMAGE, StopIteration):
        raise SourceError(
            f"{file.path} holds no {state} of its parameters in a form that is known", "take --weights module"
        ) from None


def _require_told_apart(
    file: TorchFile, groups: Sequence[Set[tuple[int, ...]]], modules: Mapping[str, Fragment]
) -> None:
    """Refuse parameters of a shape that several groups have, where the module begins with the same elements.

    Raises:
        UnsupportedError: there are such parameters.
    """
    first: dict[tuple[tuple[int, ...], bytes], str] = {}
    for name, fragment in modules.items():
        if sum(fragment.shape in shapes for shapes in groups) > 1:
            sample = read_bytes(fragment.path, fragment.offset, min(SAMPLE, fragment.nbytes))
            if (other := first.setdefault((fragment.shape, sample), name)) != name:
                raise UnsupportedError(
                    f"{file.path} is of stage 0, which names no states, and {short(other)} and {short(name)} are equal "
                    "in its module: with several groups of parameters nobody can tell whose state is whose",
                    "take --weights module",
                )


def _whole_groups(file: TorchFile, state: str) -> list[list[TensorRef]]:
    """The tensors of a state in each group; a float32 training has no master weights, but torch's optimizer alone.

    Raises:
        UnsupportedError: there are no master weights beside the state.
    """
    optimizer = file.value["optimizer"]
    masters = optimizer.get("fp32_groups")
    inner = optimizer["optimizer_state_dict"] if masters is not None else optimizer
    if state == "fp32":
        return [list(group) for group in masters or ()]
    if masters is None:
        raise UnsupportedError(f"{file.path} is of stage 0 in float32, which does not say whose {state} is whose")
    return [[inner["state"][number][state] for number in group["params"]] for group in inner["param_groups"]]
