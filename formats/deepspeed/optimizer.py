"""Read the optimizer of DeepSpeed, GPT-NeoX and Megatron-DeepSpeed into the framework-independent `Optimizer`.

`partitions.py` and `universal.py` find the states, which are in the layout of the weights. The settings of a parameter
are those of its flat group: each flat group belongs to one parameter group, whose `params` are numbers of flat groups
(in stage 3 a parameter group has several of them).

Facts: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py and bf16_optimizer.py at 0.19.8.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from formats.deepspeed import model_files, muon, optimizer_config, universal, zero
from formats.deepspeed import partitions as zero_partitions
from formats.deepspeed.mds import checkpoint as mds
from formats.deepspeed.neox import checkpoint as neox
from formats.deepspeed.partitions import Partition
from formats.deepspeed.steps import COUNTER
from formats.errors import RefusedError, SourceError, UnsupportedError
from formats.model.accepted import COUPLED
from formats.optimizer import (
    CARRIED,
    DECOUPLED,
    MOMENTS,
    MOMENTUM,
    NAMES,
    STATES,
    AnyGroup,
    Group,
    Optimizer,
    group_of,
    kind_of,
    required_states,
    states_by,
)
from formats.torch_files import saved_names

OPENERS = {neox.Neox: neox.read_states, mds.MegatronDeepSpeed: mds.read_states}
"""Class of a checkpoint's details: the reader of its states, for formats with tensor-parallel shards."""
Owners = Mapping[Path, Sequence[tuple[int, AnyGroup]]]
"""File: (offset in bytes, settings) of each flat group in it, in order of offset."""


def is_trained(source: Checkpoint) -> bool:
    """Whether there are optimizer states besides the weights."""
    names = (path.name for path in source.home.iterdir())
    return universal.is_universal(source.home) or any(map(saved_names.OPTIM.fullmatch, names))


def read(source: Checkpoint) -> Optimizer:
    """Read the optimizer of an opened checkpoint of DeepSpeed, GPT-NeoX or Megatron-DeepSpeed.

    Raises:
        RefusedError: the checkpoint was opened with moments as its weights (`--weights`).
        SourceError: there is no optimizer, or it is damaged or incomplete.
        UnsupportedError: the optimizer is neither Adam nor Lion nor Muon, or of stage 0, or parameters were not
            trained, or not equally often.
    """
    model: Mapping[str, Any]
    settings = source.settings
    if settings.weights in STATES[1:]:
        raise RefusedError(
            f"--weights {settings.weights} takes moments of {source.root} for its weights", "leave --weights out"
        )
    if opener := OPENERS.get(type(source.details)):
        _require_no_sums(source)
        opened, model, partitions = opener(source.home, replace(settings, tag=None))
        states = dict(opened)
    else:
        training = zero.trained(source.home, settings.accept)
        states, model, partitions = zero.states_of(source, training), training.model, training.partitions
    configs = {"ds_config": model.get("ds_config"), "yml": source.run_config}
    if COUPLED in settings.accept:
        configs = {}
    if partitions:
        step, owners = step_of(partitions, model), _owners(partitions, configs)
    else:
        shapes = model_files.shapes_in(model, source.home)
        step, owners = _universal(source.home, shapes, model.get("module") or (), configs)
    if set(source.dtypes().values()) == {"F32"} and not states["fp32"].twins:
        states.pop("fp32")  # the weights are the master weights
    samples = model.get("global_samples")
    if MOMENTUM in states:
        muon.require_whole_matrices(model, str(source.home))
    moments = [states[state] for state in ("exp_avg", MOMENTUM) if state in states]
    groups = _groups(moments, owners) if owners else {}
    _require_kept(source.home, groups, states)
    return Optimizer(states, int(step), groups, samples if type(samples) is int else None)


states = states_by(read)


def _require_kept(where: Path, groups: Mapping[Any, AnyGroup], states: Collection[str]) -> None:
    """Refuse states other than those that the optimizers of the parameter groups keep.

    Raises:
        UnsupportedError: there are more states, such as the zeros of DeepSpeed's Lion on CPUs (ops/lion/cpu_lion.py),
            or fewer.
    """
    kinds = {*map(type, groups.values())} or {Group}
    carried = [state for state in CARRIED if state in states and state != "fp32"]
    known = [state for state in CARRIED if any(state in MOMENTS[kind] for kind in kinds)]
    if carried != known:
        raise UnsupportedError(
            f"{where} keeps {' and '.join(carried)}, and the settings of its optimizer are those of "
            f"{' and '.join(sorted(NAMES[kind] for kind in kinds))}, which is carried with {' and '.join(known)}",
            "convert zero2universal keeps all that there is",
        )


def _require_no_sums(source: Checkpoint) -> None:
    """Refuse tensors that are sums over tensor-parallel ranks, since moments of summands cannot be added.

    Raises:
        UnsupportedError: a tensor is a sum over tensor-parallel ranks.
    """
    for placed in source.tensors if source.topology["tp"] > 1 else ():
        if "partial" in placed.slot.rule.conditions:
            raise UnsupportedError(
                f"{placed.key} is a sum over tensor parallel ranks, whose moments no other format can hold",
                "convert the weights alone",
            )


def step_of(partitions: Sequence[Partition], model: Mapping[str, Any]) -> float:
    """The number of steps of the optimizer; that of the model file for a Lion that does not record it.

    Raises:
        SourceError: a file does not record the steps.
        UnsupportedError: groups of parameters have made different numbers of steps.
    """
    lion = STATES[2] not in required_states((group for partition in partitions for group in partition.settings), ())
    iterations, skipped = model.get(COUNTER), model.get("skipped_steps") or 0
    if lion and not any(partition.steps for partition in partitions) and type(iterations) is type(skipped) is int:
        return iterations - skipped
    for partition in partitions:
        if len(partition.steps) < sum(flat is not None for flat in partition.groups["exp_avg"]):
            raise SourceError(f"{partition.path} does not say how many steps its optimizer has made")
    steps = {step for partition in partitions for step in partition.steps}
    if len(steps) > 1:
        raise UnsupportedError(f"{partitions[0].path.parent}: its groups of parameters have made {sorted(steps)} steps")
    return steps.pop() if steps else 0.0


def _owners(partitions: Iterable[Partition], configs: Mapping[str, Any]) -> Owners:
    owners = {}
    for partition in partitions:
        groups = _by_number(partition.path, partition.settings, partition.kept, configs)
        try:
            owners[partition.path] = sorted(
                (flat.fragment.offset, groups[number])
                for state in ("exp_avg", MOMENTUM)
                for number, flat in enumerate(partition.groups.get(state, ()))
                if flat
            )
        except KeyError as error:
            raise SourceError(
                f"{partition.path}: no group of its optimizer holds the parameters of group {error}"
            ) from None
    return owners


def _universal(
    tag: Path, shapes: Sequence[Mapping[str, Any]], module: Collection[str], configs: Mapping[str, Any]
) -> tuple[float, Owners]:
    """Return the step of a universal checkpoint and the settings of its parameters; no settings if no group has any.

    Groups without any are those written here of a source without settings: an optimizer's own have a rate at least.

    `shapes` maps the parameters of each flat group to their shapes, `module` has the names in the module, `configs`
    are those of `_by_number`.

    Raises:
        SourceError: model file and checkpoint have different parameters, or a group or a step is missing.
        UnsupportedError: parameters have made different numbers of steps.
    """
    trained = {name for group in shapes for name in group}
    there = {*universal.names(tag)} - universal.copies(tag, trained, module)
    if odd := sorted(trained ^ there):
        raise SourceError(
            f"{tag}: {len(odd)} parameters, such as {odd[0]}, are in its model file or in zero/, not in both"
        )
    settings, common = universal.settings(tag)
    made = universal.numbers_of_steps(tag, (name for group in shapes for name in group), common)
    if made.unknown:
        raise SourceError(f"{tag / 'zero' / made.unknown} does not say how many steps its optimizer has made")
    step = next(iter(made.first), 0.0)
    if settings and all(group.keys() == {"params"} for group in settings):
        for name in trained:
            zero_partitions.require_known(tag, (path.stem for path in (tag / "zero" / name).iterdir()))
        return step, {}
    owners: dict[Path, Sequence[tuple[int, AnyGroup]]] = {}
    for number, group in enumerate(shapes):
        for name in group:
            folder = tag / "zero" / name
            groups = _by_number(folder, settings, (path.stem for path in folder.iterdir()), configs)
            if number not in groups:
                raise SourceError(f"{tag}: no group of its optimizer holds the parameters of group {number}")
            owners[folder / "exp_avg.pt"] = [(0, groups[number])]
    return step, owners


def _by_number(
    path: Path, settings: Sequence[Mapping[str, Any]], state_names: Iterable[str], configs: Mapping[str, Any]
) -> dict[int, AnyGroup]:
    """Return the settings of each flat group, by its number.

    `configs` has the configurations of the training that may deny that an Adam is an AdamW, by name.

    Raises:
        SourceError: a parameter group is in an unknown form.
        UnsupportedError: the optimizer is neither Adam nor Lion nor Muon, or has its weight decay in the gradients.
    """
    zero_partitions.require_known(path, state_names)
    by_number: dict[int, AnyGroup] = {}
    kinds = {kind_of(group) for group in settings}
    for group in settings:
        members = group.get("params")
        if not isinstance(members, list) or not all(type(member) is int for member in members):
            raise SourceError(f"{path} holds a parameter group in an unknown form")
        of_group = group_of(group, str(path))
        if isinstance(of_group, Group) and group.keys().isdisjoint(DECOUPLED):
            for name, config in configs.items():
                optimizer_config.require_adamw(name, config, of_group.weight_decay, kinds, path)
        by_number |= dict.fromkeys(members, of_group)
    return by_number


def _groups(moments: Iterable[Checkpoint], owners: Owners) -> dict[tuple[str, int | None], AnyGroup]:
    """Return the settings of each logical tensor, by (tensor, layer), in the training's order of groups.

    Raises:
        UnsupportedError: a parameter is trained in two parameter groups.
    """
    groups: dict[tuple[str, int | None], AnyGroup] = {}
    for placed in (each for checkpoint in moments for each in checkpoint.fragments()):
        starts = owners[placed.fragment.path]
        group = starts[bisect(starts, placed.fragment.offset, key=lambda pair: pair[0]) - 1][1]
        for name in placed.slot.rule.pattern.tensors:
            if groups.setdefault((name, placed.slot.layer), group) != group:
                raise UnsupportedError(f"{placed.key} in {placed.fragment.path} is trained in two parameter groups")
    order = list(dict.fromkeys(group for every in owners.values() for _, group in every))
    return dict(sorted(groups.items(), key=lambda pair: order.index(pair[1])))
