"""The optimizer of a Megatron run in no framework's terms, and one of another framework in Megatron's.

What only Megatron has is made up of what every training has. The scheduler stands where the samples say; its own words
are those of a constant rate, and `--override-opt_param-scheduler` puts the training's in their place. Groups are named
for torch's Adam and for the fused ones, which keep their step in the group.

Facts: megatron-core 0.16.1, optimizer/__init__.py `_get_param_groups`, optimizer_param_scheduler.py `load_state_dict`,
optimizer/optimizer.py `_filter_and_reorder_param_groups`; trainings that resume are in tests/golden/test_optimizers.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import SourceError, UnsupportedError
from formats.layout.tensors import BUFFERS
from formats.megatron.chained_optimizer import decays
from formats.megatron.details import Megatron
from formats.megatron.optimizer import Optimizer as Native
from formats.optimizer import Group, Optimizer, group_of, step_tensor

SCHEDULER = "opt_param_scheduler"


def is_trained(source: Checkpoint) -> bool:
    """Whether there are optimizer states besides the weights."""
    return "optimizer" in source.state


def states(source: Checkpoint) -> tuple[Mapping[str, Checkpoint], dict[str, Any]]:
    """Its states, and what `inspect` says of it: of an optimizer that is not read the master weights alone."""
    from formats.megatron import optimizer_reader

    masters, others = optimizer_reader.masters(source)
    if masters:
        return masters, {"optimizer": source.details_of(Megatron).args["optimizer"], "left": list(others)}
    optimizer = optimizer_reader.read(source)
    return optimizer.states, {"distributed": optimizer.distributed}


def read(source: Checkpoint) -> Optimizer:
    """The optimizer of an opened run of Megatron, without what only Megatron knows of it.

    Raises:
        SourceError: there is none, or it is damaged, incomplete, or without its step or settings.
        UnsupportedError: it is not Adam's, or kept in a way that cannot be cut again.
    """
    from formats.megatron import optimizer_reader

    native = optimizer_reader.read(source)
    if native.muon is not None:
        raise UnsupportedError(
            f"{source.home} trains its matrices with Muon, whose momentum goes to torch_dist alone",
            "reshard --with-optimizer --format torch_dist, or the weights without the optimizer",
        )
    try:
        groups = {bool(group["wd_mult"]): group_of(group, str(source.home)) for group in native.groups}
        step = int(native.step.number) if native.step is not None else int(native.groups[0]["step"])
        treated = {
            (name, placed.slot.layer): groups[decays(placed.key, placed.slot.shape)]
            for placed in source.tensors
            for name in set(placed.slot.rule.pattern.tensors) - BUFFERS
        }
    except (KeyError, TypeError, ValueError, struct.error):
        raise SourceError(f"{source.home} holds an optimizer without its step or settings") from None
    return Optimizer(native.states, step, treated, _samples(native))


def native(source: Checkpoint, optimizer: Optimizer) -> tuple[Native, list[str]]:
    """An optimizer of any framework as Megatron's plain one, and what Megatron will do otherwise.

    Args:
        source: the checkpoint that it belongs to.
        optimizer: the optimizer, with the master weights of weights that are rounded, and of no others.

    Raises:
        UnsupportedError: the settings of parameters are not known, or differ where Megatron has one for all.
    """
    optimizer.require_adam_alone(source.home, "Megatron")
    if not optimizer.groups:
        raise UnsupportedError(
            f"{source.home} does not say with which rate, betas, eps and weight decay Adam trains",
            "convert the weights without --with-optimizer",
        )
    sides: dict[bool, set[Group]] = {True: set(), False: set()}
    for placed in source.tensors:
        for name in set(placed.slot.rule.pattern.tensors) - BUFFERS:
            decayed = decays(placed.key, placed.slot.shape) and not name.endswith("_bias")  # experts' are in one matrix
            group = optimizer.groups[name, placed.slot.layer]
            assert isinstance(group, Group)
            sides[decayed].add(group)
    for decayed, kinds in sides.items():
        if len(kinds) > 1:
            what = "matrices" if decayed else "vectors and biases"
            first, second, *_ = sorted(kinds)
            raise UnsupportedError(
                f"{source.home} trains its {what} with different settings, such as {_said(first)} and {_said(second)}: "
                "Megatron has one for all of them"
            )
    (matrices,) = sides[True]
    (vectors,) = sides[False] or sides[True]
    if vectors.lr != matrices.lr:
        raise UnsupportedError(
            f"{source.home} trains norms and biases at the rate {vectors.lr:g}, and all else at {matrices.lr:g}: "
            "Megatron has one rate for both",
            "convert the weights without --with-optimizer",
        )
    step = step_tensor(optimizer.step)
    groups = [_words(matrices, 1.0, optimizer.step), _words(vectors._replace(weight_decay=0.0), 0.0, optimizer.step)]
    schedule = {
        "max_lr": matrices.lr, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 1, "lr_decay_style": "constant",
        "num_steps": optimizer.samples or 0, "start_wd": matrices.weight_decay, "end_wd": matrices.weight_decay,
        "wd_incr_steps": 0, "wd_incr_style": "constant",
    }  # fmt: skip
    notes = [
        "Megatron resumes with --override-opt_param-scheduler: the schedule of the other framework is not converted"
    ]
    if optimizer.samples is None:
        notes.append(
            "nothing says how many samples were trained on: data and schedule begin anew (--consumed-samples N)"
        )
    if sides[False] and vectors.weight_decay:
        notes.append(f"norms and biases had a weight decay of {vectors.weight_decay:g}: in Megatron they have none")
    head = {SCHEDULER: schedule}
    return Native(optimizer.states, groups, False, step, None, head, "float32"), notes


def _words(group: Group, wd_mult: float, step: int) -> dict[str, Any]:
    """A group as Megatron tells it from the others, and as each Adam expects it."""
    known = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return known | {"default_config": True, "step": step, "bias_correction": True} | group._asdict()


def _said(group: Group) -> str:
    return ", ".join(f"{name} {value}" for name, value in group._asdict().items())


def _samples(native: Native) -> int | None:
    scheduler = native.head.get(SCHEDULER)
    steps = scheduler.get("num_steps") if isinstance(scheduler, dict) else None
    return steps if isinstance(steps, int) else None
