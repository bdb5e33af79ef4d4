"""DeepSpeed's universal checkpoints: each parameter unsharded in its own files, for any number of ranks.

    TAG/zero/{parameter}/{fp32,exp_avg,exp_avg_sq}.pt    {"param": tensor, "cat_dim": the dimension that TP cuts, ...}
    TAG/zero/{parameter}/step.pt                         Adam's step
    TAG/zero/optimizer_state.pt                          the parameter groups
    TAG/mp_rank_00_model_states.pt                       for stages 1 and 2; its `module` is not read by DeepSpeed
    TAG/zero_pp_rank_0_mp_rank_00_model_states.pt        the same for stage 3
    latest_universal                                     the tag

Facts: deepspeed/checkpoint/universal_checkpoint.py and runtime/engine.py at 0.19.8, and what a real load requires
(tests/golden/test_universal.py): one folder serves every stage. The loader of stage 3 gives every parameter group the
values of the first group in `optimizer_state_dict` (runtime/zero/stage3.py:3692), so that group is written without the
keys in which groups differ, which keep the values of the training. Frozen parameters have no states, and DeepSpeed
does not restore them: they keep the values with which the model was initialized.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint, OutputFile
from formats.deepspeed.folders import OURS
from formats.deepspeed.partitions import Partition
from formats.deepspeed.steps import steps_by_group, steps_made
from formats.disk.safetensors import FLOATS, Fragment, row_major
from formats.errors import SourceError, UnsupportedError, short, some
from formats.layout.columns import Cut, Piece
from formats.layout.lowering import run_sizes
from formats.layout.pieces import Scattered, from_pieces, whole_part
from formats.layout.placed import Placed
from formats.layout.slots import Slot
from formats.model.accepted import STEPS
from formats.model.adapters import is_of_adapter
from formats.optimizer import required_states
from formats.torch_files import duplicate_files
from formats.torch_files.archive import read_torch
from formats.torch_files.archive_plan import packed
from formats.torch_files.archive_writer import archived
from formats.torch_files.pickle_values import Namespace, Opaque, StorageRef, TensorRef, is_plain
from formats.torch_files.unpickle import DAMAGE
from formats.torch_files.wrappers import unwrapped

LATEST = "latest_universal"
MODEL, MODEL_OF_STAGE_3 = "mp_rank_{:02d}_model_states.pt", "zero_pp_rank_0_mp_rank_{:02d}_model_states.pt"
"""The names of model files, by the model parallel rank."""
VERSION = 0.2
"""The version in `universal_checkpoint_info`: the newest that plain tensor parallelism needs."""
OF_NEOX = re.compile(r"(?:sequential\.)?(?:\d+|tied_modules)\.")
"""The beginning of a parameter's name in GPT-NeoX."""


class Parameter(NamedTuple):
    """A parameter as DeepSpeed names it.

    Attributes:
        name: the name in the module.
        slot: the unsharded parameter.
        cut: how tensor parallelism splits the parameter, in the loader's keys: `cat_dim` and the like.
        step: Adam's step.
        summands: of a parameter that is a sum over tensor-parallel ranks, the summand of each rank, in rank order.
    """

    name: str
    slot: Slot
    cut: Mapping[str, Any]
    step: float
    summands: tuple[Slot, ...] = ()


class States(NamedTuple):
    """The source of a universal checkpoint.

    Attributes:
        opened: name of an optimizer state (`optimizer.STATES`): the state of every trained parameter, as a checkpoint.
        model: the content of the first model file.
        partitions: the optimizer partition of each rank.
    """

    opened: Mapping[str, Checkpoint]
    model: Mapping[str, Any]
    partitions: Sequence[Partition]


def files(root: Path, parameters: Sequence[Parameter], state: str) -> tuple[OutputFile, ...]:
    """Lay out the file of each parameter for one of `optimizer.STATES`."""
    return tuple(_file(root / "zero" / parameter.name / f"{state}.pt", parameter) for parameter in parameters)


def _file(path: Path, parameter: Parameter) -> OutputFile:
    """Lay out the file of a parameter, with summands concatenated: only so can the loader give each rank its own."""
    slots = parameter.summands or (parameter.slot,)
    shape = _joined(parameter.slot.shape, len(slots))
    file = archived(path, [("param", parameter.slot, shape, "F32")], lambda refs: {**parameter.cut, **refs}, path.stem)
    if not parameter.summands:
        return file
    ((_, _, whole, *_),) = file.tensors
    parts = [whole._replace(shape=slot.shape, strides=row_major(slot.shape)) for slot in slots]
    offsets = (whole.offset + number * part.nbytes for number, part in enumerate(parts))
    each = zip(slots, parts, offsets, strict=True)
    return replace(file, tensors=tuple(Placed("param", slot, part._replace(offset=at)) for slot, part, at in each))


def _joined(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the shape of `count` tensors of one shape, concatenated along the first dimension."""
    return shape if count == 1 else (count * shape[0], *shape[1:])


def cut_of(slot: Slot) -> dict[str, Any]:
    """Return the keys by which the loader splits a whole tensor (deepspeed/checkpoint/universal_checkpoint.py:236).

    A dimension is split as one section, or as several sections, each by itself: of one size, or of listed sizes.
    """
    if "partial" in slot.rule.conditions:
        return {"cat_dim": 0}
    for dim, term in enumerate(slot.rule.pattern.dims):
        sizes = run_sizes(term, dict(slot.sizes), dict(slot.mesh))
        if len(sizes) == 1:
            return {"cat_dim": dim, **({"vocab_tensor": True} if slot.rule.pattern.filled else {})}
        if len({*sizes}) == 1:
            return {"cat_dim": dim, "param_n_sub_params": len(sizes)}
        if sizes:
            shape = tuple(tuple(sizes) if each == dim else size for each, size in enumerate(slot.shape))
            state = {"patterns": [], "shape": shape, "partition_dim": dim}
            runs = Opaque("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", state=state)
            return {"cat_dim": dim, "sub_param_shape": runs}
    return {}


def texts(
    parameters: Sequence[Parameter], groups: Sequence[Mapping[str, Any]], model: Mapping[str, Any], ranks: int
) -> dict[str, bytes]:
    """Return the content of the small files, by path relative to the tag.

    Args:
        parameters: every trained parameter.
        groups: the parameter groups of the optimizer.
        model: the content of the source's model file; its module, and values that are not plain data, are left out.
        ranks: number of model-parallel ranks of the source.
    """
    info = {"universal_checkpoint_version": VERSION}
    head = {key: value for key, value in model.items() if is_plain(value) and key != "module"}
    head |= {"module": {}, "universal_checkpoint_info": info, "optimizer": None}
    names = (name.format(rank) for rank in range(ranks) for name in (MODEL, MODEL_OF_STAGE_3))
    return {**steps_and_groups(parameters, groups), **dict.fromkeys(names, packed(head))}


def steps_and_groups(parameters: Sequence[Parameter], groups: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Return the small files beside the states: step of each parameter, and parameter groups. Args as for `texts`."""
    texts = {f"zero/{parameter.name}/step.pt": scalar(parameter.step) for parameter in parameters}
    plain = [{key: value for key, value in group.items() if is_plain(value)} for group in groups]
    common = {key: value for key, value in plain[0].items() if all(parameter.get(key) == value for parameter in plain)}
    common["params"] = []
    step = parameters[0].step if parameters else 0.0
    texts["zero/optimizer_state.pt"] = packed(
        {
            "ds_version": "0.19.8",
            "param_groups": plain,
            "optimizer_state_dict": {"state": {0: {"step": _reference()}}, "param_groups": [common]},
        },
        {"0": struct.pack("<f", step)},
    )
    return texts


def left_out(model: Mapping[str, Any]) -> list[str]:
    """Return the keys of the model file that `texts` leaves out, except the module."""
    return sorted(str(key) for key, value in model.items() if not is_plain(value) and key != "module")


def _reference() -> TensorRef:
    return TensorRef(StorageRef("F32", "0", 1), 0, (), (), "F32")


def scalar(value: float) -> bytes:
    """Return the bytes of a torch.save file with one float32 number."""
    return packed(_reference(), {"0": struct.pack("<f", value)})


# --- reading ---------------------------------------------------------------------------------------------------------


def is_universal(tag: Path) -> bool:
    """Whether a tag folder is a universal checkpoint."""
    return (tag / "zero").is_dir() or (tag / "zero").is_symlink()


def names(tag: Path) -> list[str]:
    """Return the names of the parameters of a universal checkpoint."""
    return sorted(path.name for path in (tag / "zero").iterdir() if path.is_dir())


def is_numbered(tag: Path) -> bool:
    """Whether a universal checkpoint has names with the numbers of pipeline modules."""
    return any(map(OF_NEOX.match, names(tag)))


def require_plain(tag: Path) -> None:
    """Refuse a universal checkpoint whose names contain numbers of pipeline modules, where they tell no trainer.

    Raises:
        UnsupportedError: a parameter has such a name.
    """
    if name := next(filter(OF_NEOX.match, names(tag)), None):
        raise UnsupportedError(
            f"{tag} is a universal checkpoint with numbers of modules in its names, such as {short(name)}, and its "
            "model file is neither GPT-NeoX's nor Megatron-DeepSpeed's",
            "convert the checkpoint that it was made of",
        )


def copies(tag: Path, trained: Collection[str], module: Collection[str]) -> set[str]:
    """Return the names in zero/ that are no trained parameters: ds_to_universal copies each other tensor of the module.

    Such a folder has an fp32.pt alone, of what the module has in another type: a buffer, a frozen parameter, or the
    second name of a parameter, of which the trained one has the master weights (ds_to_universal.py `main`, 0.19.8).

    Args:
        tag: the folder of the checkpoint.
        trained: the parameters of the optimizer; empty if the model file does not record them.
        module: the names in the module, second names among them.
    """
    others = (name for name in names(tag) if trained and name not in trained and name in module)
    return {name for name in others if not _is_trained(tag / "zero" / name)}


def _is_trained(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} != {"fp32.pt"}


def tensors(
    tag: Path, shapes: Mapping[str, tuple[int, ...]], state: str, skip: Collection[str] = ()
) -> Iterator[tuple[str, Scattered]]:
    """Yield the (name, tensor) of one optimizer state of each parameter. Args and errors as for `parameters`."""
    yield from ((name, tensor) for name, tensor, _ in parameters(tag, shapes, state, skip))


def parameters(
    tag: Path, shapes: Mapping[str, tuple[int, ...]], state: str, skip: Collection[str] = ()
) -> Iterator[tuple[str, Scattered, Mapping[str, Any]]]:
    """Yield name, tensor and further keys (`cat_dim` and the like) of one optimizer state of each parameter.

    Args:
        tag: the folder of the checkpoint.
        shapes: the shapes in the model file, needed as DeepSpeed's conversion of stage 3 writes flat tensors.
        state: one of `optimizer.STATES`.
        skip: the parameters that are left out.

    Raises:
        SourceError: a file is missing, holds no tensor or one of another shape or element type, or is another's copy.
    """
    matrices = list[tuple[Path, list[Fragment]]]()  # not biases: two that are added to each other are alike
    for name in names(tag):
        if name in skip:
            continue
        folder = tag / "zero" / name
        file = read_torch(folder / f"{state}.pt")
        keys = file.value if isinstance(file.value, Mapping) else {}
        ref = keys.get("param") if keys else file.value
        if not isinstance(ref, TensorRef) or isinstance(file.value, Namespace):
            raise SourceError(f"{file.path} holds {short(ref)}, which is not a tensor")
        fragment = file.fragment(ref, name)
        shape = shapes.get(name, fragment.shape)
        if prod(shape) != prod(fragment.shape):
            raise SourceError(f"{file.path} holds {prod(fragment.shape)} elements, its model has {list(shape)}")
        if shape != fragment.shape and len(fragment.shape) != 1:
            raise SourceError(f"{file.path} holds {list(fragment.shape)}, its model has {list(shape)}")
        if state == "fp32" and fragment.dtype != "F32":
            raise SourceError(f"{file.path} holds {fragment.dtype}, a master is F32")
        if fragment.dtype not in FLOATS:
            raise SourceError(f"{file.path} holds {state} of {short(name)} as {fragment.dtype}, which is no float")
        matrices += [(file.path, [fragment])] * (len(shape) > 1 and _is_trained(folder))
        part = whole_part(shape) if shape == fragment.shape else Cut(((0, prod(shape)),), flat=True)
        yield name, from_pieces(name, shape, fragment.dtype, [Piece(part, fragment)]), keys
    duplicate_files.require_own(matrices)


def lacking(slots: Iterable[Slot], keys: Mapping[str, str]) -> list[str]:
    """Return the first key of each required tensor of a model that is present under none of its keys."""
    needed = (slot for slot in slots if "optional" not in slot.rule.conditions)
    return [slot.keys[0] for slot in needed if keys.keys().isdisjoint(slot.keys)]


def require_trained(
    tag: Path,
    model: Mapping[str, Any],
    slots: Sequence[Slot] | None,
    keys: Mapping[str, str],
    *,
    adapter: bool,
    buffers: bool,
) -> None:
    """Refuse a universal checkpoint that lacks a tensor of the model, since only trained parameters are in it.

    Args:
        tag: the folder of the checkpoint.
        model: the content of the model file.
        slots: the tensors of the model; if None, the model file's lists of untrained tensors are used.
        keys: the name of each tensor in the checkpoint, by its key.
        adapter: whether an adapter alone is read, whose base is elsewhere.
        buffers: whether buffers that the model file lists are required.

    Raises:
        SourceError: a tensor of the model was not trained.
    """
    marked = model.get(OURS)
    lists = [
        model.get("frozen_param_shapes"),
        model.get("buffer_names") if buffers else None,
        *(marked.values() if isinstance(marked, dict) else ()),
    ]
    parameters = {unwrapped(str(name)) for names in lists if isinstance(names, list | dict) for name in names}
    if adapter:
        parameters = {name for name in parameters if is_of_adapter(name)} - {*map(unwrapped, keys.values())}
    if missing := sorted(parameters.difference(keys) if slots is None else lacking(slots, keys)):
        raise SourceError(
            f"{tag} is a universal checkpoint, which holds no parameters that were not trained: it lacks "
            f"{some(missing, 8)}",
            "convert the checkpoint that it was made of: convert zero2hf, or of an FSDP training fsdp2hf",
        )


def settings(tag: Path) -> tuple[tuple[Mapping[str, Any], ...], float | None]:
    """Return the parameter groups, and Adam's step, which may be recorded nowhere else.

    DeepSpeed's own checkpoints of stage 3 have the optimizer's state too; those of the other stages have what Apex'
    FusedAdam counts in the groups.

    Raises:
        SourceError: the groups are missing or in an unknown form.
    """
    file = read_torch(tag / "zero" / "optimizer_state.pt")
    try:
        inner = file.value.get("optimizer_state_dict", {}).get("state", {})
        groups = tuple(map(dict, file.value["param_groups"]))
        of_groups = (steps_made(file, group["step"]) for group in groups if "step" in group)
        counts = {*(steps_by_group(file, inner, groups) if inner else of_groups)}
        return groups, counts.pop() if len(counts) == 1 else None
    except DAMAGE:
        raise SourceError(f"{file.path} holds no parameter groups of an optimizer in a form that is known") from None


def states(tag: Path) -> tuple[str, ...]:
    """Return which of `optimizer.STATES` the checkpoint holds."""
    groups, _ = settings(tag)
    return required_states(groups, {path.stem for path in (tag / "zero").glob("*/*.pt")})


def _step(tag: Path, name: str) -> float | None:
    """Return how many steps Adam has made with a parameter; None without step.pt.

    Raises:
        SourceError: step.pt holds no number of steps.
    """
    path = tag / "zero" / name / "step.pt"
    if not path.is_file():
        return None
    file = read_torch(path)
    try:
        return steps_made(file, file.value)
    except DAMAGE:
        raise SourceError(f"{path} holds no number of steps") from None


def _step_of_groups(tag: Path) -> float:
    """Return the number of steps that all parameter groups count, as Apex' FusedAdam does; 0 if they count none."""
    path = tag / "zero" / "optimizer_state.pt"
    if not path.is_file():
        return 0.0
    file = read_torch(path)
    counts = {steps_made(file, group["step"]) if "step" in group else 0.0 for group in settings(tag)[0]}
    return counts.pop() if len(counts) == 1 else 0.0


class StepCounts(NamedTuple):
    """How many steps Adam has made with the parameters.

    Attributes:
        first: each number of steps: the first parameter that has made so many.
        unknown: the first parameter of which no number is known; empty if there is none.
    """

    first: Mapping[float, str]
    unknown: str = ""


def numbers_of_steps(
    tag: Path, trained: Iterable[str], common: float | None, accept: Collection[str] = ()
) -> StepCounts:
    """Return the numbers of steps that Adam has made.

    DeepSpeed gives a training step.pt and the count in the parameter groups, and Apex' FusedAdam resumes from the
    latter alone. In its next save step.pt is unchanged, so that the larger number is right (`steps_by_group`).

    Args:
        tag: the folder of the checkpoint.
        trained: the names of the parameters.
        common: the number for parameters whose files say none.
        accept: the deviations that the user accepts.

    Raises:
        UnsupportedError: parameters have made different numbers of steps, and this is not accepted.
    """
    first, unknown, of_groups = dict[float, str](), "", _step_of_groups(tag)
    for name in trained:
        said = _step(tag, name)
        count = common if said is None else max(said, of_groups)
        if count is None:
            unknown = unknown or name
        else:
            first.setdefault(count, name)
    if len(first) > 1 and STEPS not in accept:
        listed = ", ".join(f"{name} {int(count)}" for count, name in sorted(first.items())[:4])
        raise UnsupportedError(
            f"{tag}: its parameters have made different numbers of steps, such as {listed}",
            f"copy the files of one save again; weights that were trained so are taken with --accept {STEPS}",
        )
    return StepCounts(first, unknown)


def steps(tag: Path, accept: Collection[str] = ()) -> tuple[Path, Collection[float]]:
    """Return a file that records a step count, and how many steps Adam has made with the parameters.

    Raises:
        UnsupportedError: parameters have made different numbers of steps, and this is not among what the user accepts.
    """
    if made := numbers_of_steps(tag, names(tag), None, accept).first:
        return tag / "zero" / next(iter(made.values())) / "step.pt", made.keys()
    path = tag / "zero" / "optimizer_state.pt"
    common = settings(tag)[1] if path.is_file() else None
    return path, () if common is None else (common,)


def unchanged(file: OutputFile) -> tuple[Placed, ...]:
    """Return the tensors of a written file, after comparing their place with that in the file's own archive.

    Raises:
        SourceError: the archive has the tensor at another place than was planned.
    """
    opened, first = read_torch(file.path), file.tensors[0].fragment
    shape = _joined(first.shape, len(file.tensors))
    whole = opened.fragment(opened.value["param"], "param")._replace(member=None)
    if whole != first._replace(shape=shape, strides=row_major(shape)):
        raise SourceError(f"{file.path} holds its tensor elsewhere than was planned")
    return tuple(file.tensors)
