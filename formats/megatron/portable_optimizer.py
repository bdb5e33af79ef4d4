"""Convert the optimizer of a Megatron run to the framework-independent form (`formats.optimizer`), and back.

State that only Megatron has is made from the state that every training has. The scheduler is put at the number of
samples trained on; its settings are those of a constant learning rate, which `--override-opt_param-scheduler` replaces
by those of the training. Parameter groups have the settings of torch's Adam and of the fused ones, which keep their
step in the group.

Facts: megatron-core 0.16.1, optimizer/__init__.py `_get_param_groups`, optimizer_param_scheduler.py `load_state_dict`,
optimizer/optimizer.py `_filter_and_reorder_param_groups`; trainings that resume are in tests/golden/test_optimizers.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import SourceError, UnsupportedError, UsageError
from formats.layout.tensors import BUFFERS
from formats.megatron import muon, weight_decay
from formats.megatron.chained_optimizer import decays
from formats.megatron.details import Megatron
from formats.megatron.optimizer import OTHERS
from formats.megatron.optimizer import Optimizer as Native
from formats.optimizer import MOMENTUM, Group, Muon, Optimizer, group_of, step_tensor

SCHEDULER = "opt_param_scheduler"
NO_SAMPLES = "nothing says how many samples were trained on: data and schedule begin anew"


def is_trained(source: Checkpoint) -> bool:
    """Whether a checkpoint holds optimizer states besides the weights."""
    return "optimizer" in source.state


def states(source: Checkpoint) -> tuple[Mapping[str, Checkpoint], dict[str, Any]]:
    """The optimizer states of a checkpoint, and details for `inspect`.

    Of an optimizer that is not supported the states are the FP32 master weights alone.
    """
    from formats.megatron import optimizer_reader

    try:
        optimizer = optimizer_reader.read(source)
    except UnsupportedError:
        masters, others = optimizer_reader.masters(source)
        if not masters:
            raise
        return masters, {"optimizer": source.details_of(Megatron).args["optimizer"], "left": list(others)}
    return optimizer.states, {"distributed": optimizer.distributed}


def read(source: Checkpoint) -> Optimizer:
    """The optimizer of an opened Megatron run, without the state that only Megatron has.

    Raises:
        SourceError: there is no optimizer, or it is damaged, incomplete, or without its step or settings.
        UnsupportedError: the optimizer is neither Adam nor Muon beside Adam, or is stored in a way that is not known.
    """
    from formats.megatron import optimizer_reader

    native = optimizer_reader.read(source)
    try:
        where, matrices = str(source.home), native.states.get(MOMENTUM)
        implied = weight_decay.implied_settings(source)
        groups = {bool(group["wd_mult"]): group_of({**implied, **group}, where) for group in native.groups}
        muons = {name for item in (matrices.tensors if matrices else ()) for name in item.slot.rule.pattern.tensors}
        of_muon = muon.of_torch(native.muon, source.details_of(Megatron).args, where) if native.muon else None
        step = int(native.step.number) if native.step is not None else int(native.groups[0]["step"])
        treated = {
            (name, placed.slot.layer): of_muon
            if of_muon and name in muons
            else groups[decays(placed.key, placed.slot.shape)]
            for placed in source.tensors
            for name in set(placed.slot.rule.pattern.tensors) - BUFFERS
        }
    except (KeyError, TypeError, ValueError, struct.error):
        raise SourceError(f"{source.home} holds an optimizer without its step or settings") from None
    groups_of = sorted(treated.items(), key=lambda item: isinstance(item[1], Group))  # parameters of Muon come first
    return Optimizer(native.states, step, dict(groups_of), _samples(native))


def native(
    source: Checkpoint, optimizer: Optimizer, rates: tuple[float, float] | None = None
) -> tuple[Native, list[str]]:
    """An optimizer of any framework as Megatron's plain optimizer, and notes on how Megatron differs.

    Args:
        source: the checkpoint of the optimizer.
        optimizer: the optimizer, with the FP32 master weights of rounded weights, and of no others.
        rates: the largest and the smallest learning rate of the training that resumes, by which megatron-core 0.19.2
            finds parameter groups (optimizer/optimizer.py `param_group_identifier_keys`); None if not given.

    Raises:
        UsageError: Muon, which only releases that need the rates have, is to resume without `rates`.
        UnsupportedError: the settings of parameters are not known, or differ where Megatron has one setting for all.
    """
    optimizer.require_only((Group, Muon), source.home, OTHERS["lion"])
    matrices, vectors = sides(source, optimizer)
    muons = {group for group in optimizer.groups.values() if isinstance(group, Muon)}
    for other in muons:
        if len(muons) > 1 or (other.lr, other.weight_decay) != (matrices.lr, matrices.weight_decay):
            raise UnsupportedError(
                f"{source.home} trains with Muon at the rate {other.lr:g}, with a weight decay of "
                f"{other.weight_decay:g}, and embedding and head at {matrices.lr:g}, with {matrices.weight_decay:g}: "
                "Megatron has one for all of them",
                "convert the weights without --with-optimizer",
            )
    made = optimizer.updates(source.home)
    step = step_tensor(made)
    known = _KNOWN | ({} if rates is None else dict(zip(("max_lr", "min_lr"), rates, strict=True)))
    if muons and rates is None:
        raise UsageError(
            f"{source.home} trains with Muon, whose parameter groups Megatron finds by its rates", "--lr, and --min-lr"
        )
    decayed_sides = ((matrices, 1.0), (vectors._replace(weight_decay=0.0), 0.0))
    words = {"step": made, "bias_correction": True, **({"optimizer": "adam"} if muons else {})}
    groups = [{**known, **words, "wd_mult": decayed, **group._asdict()} for group, decayed in decayed_sides]
    schedule = {
        "max_lr": matrices.lr, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 1, "lr_decay_style": "constant",
        "num_steps": optimizer.samples or 0, "start_wd": matrices.weight_decay, "end_wd": matrices.weight_decay,
        "wd_incr_steps": 0, "wd_incr_style": "constant",
    }  # fmt: skip
    notes = [
        *optimizer.notes,
        "Megatron resumes with --override-opt_param-scheduler: the schedule of the other framework is not converted",
    ]
    if rates is None:
        notes.append("Megatron-LM 0.19 resumes only from what was written with --lr and --min-lr of its training")
    if optimizer.samples is None:
        notes.append(f"{NO_SAMPLES} (--consumed-samples N)")
    notes += decayed_vectors(vectors)
    head = {SCHEDULER: schedule}
    native_of = Native(optimizer.states, groups, False, step, None, head, "float32")
    for other in muons:
        args = muon.args_of(other, str(source.home))
        about = {"lr": other.lr, "momentum": other.momentum, "weight_decay": other.weight_decay}
        native_of = replace(native_of, muon={**known, "wd_mult": 1.0, **about}, run=args)
        notes.append(f"Muon trains on with {muon.flags_of(args)}")
    return native_of, notes


def sides(source: Checkpoint, optimizer: Optimizer) -> tuple[Group, Group]:
    """How Adam treats what decays in Megatron, and what does not; the second without a decay where there is no such.

    Args:
        source: the checkpoint that it belongs to.
        optimizer: the optimizer, of any framework.

    Raises:
        UnsupportedError: the settings of parameters are not known, or differ where Megatron has one for all.
    """
    if not optimizer.groups:
        raise UnsupportedError(
            f"{source.home} does not say with which rate, betas, eps and weight decay Adam trains",
            "convert the weights without --with-optimizer",
        )
    kinds: dict[bool, set[Group]] = {True: set(), False: set()}
    for placed in source.tensors:
        for name in set(placed.slot.rule.pattern.tensors) - BUFFERS:
            decayed = decays(placed.key, placed.slot.shape) and not name.endswith("_bias")  # experts' are in one matrix
            group = optimizer.groups[name, placed.slot.layer]
            if isinstance(group, Group):
                kinds[decayed].add(group)
    for decayed, groups in kinds.items():
        if len(groups) > 1:
            what = "matrices" if decayed else "vectors and biases"
            first, second, *_ = sorted(groups)
            raise UnsupportedError(
                f"{source.home} trains its {what} with different settings, such as {_text(first)} and {_text(second)}: "
                "Megatron has one for all of them"
            )
    if not kinds[True]:
        raise UnsupportedError(
            f"{source.home} trains all of its matrices with Muon, and Megatron trains embedding and head with Adam",
            "convert the weights without --with-optimizer",
        )
    (matrices,) = kinds[True]
    (vectors,) = kinds[False] or {matrices._replace(weight_decay=0.0)}
    if vectors.lr != matrices.lr:
        raise UnsupportedError(
            f"{source.home} trains norms and biases at the rate {vectors.lr:g}, and all else at {matrices.lr:g}: "
            "Megatron has one rate for both",
            "convert the weights without --with-optimizer",
        )
    return matrices, vectors


def decayed_vectors(vectors: Group) -> list[str]:
    """What the user should know of a weight decay that Megatron leaves out."""
    decay = vectors.weight_decay
    return [f"norms and biases had a weight decay of {decay:g}: in Megatron they have none"] if decay else []


_KNOWN = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
"""The settings by which Megatron identifies a parameter group."""


def _text(group: Group) -> str:
    return ", ".join(f"{name} {value}" for name, value in group._asdict().items())


def _samples(native: Native) -> int | None:
    scheduler = native.head.get(SCHEDULER)
    steps = scheduler.get("num_steps") if isinstance(scheduler, dict) else None
    return steps if isinstance(steps, int) else None
