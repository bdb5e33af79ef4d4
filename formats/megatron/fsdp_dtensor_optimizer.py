"""The optimizer in a checkpoint of Megatron-FSDP: for each parameter Adam's moments, and an object for each setting.

The weights are the FP32 master weights. torch's Adam stores its step beside the moments, Transformer Engine's among the
settings; both are written. gate and up, which are one parameter, have separate moments and one set of settings.

Facts: megatron-core 0.19.2, optimizer/distrib_optimizer.py `sharded_param_state_fsdp_dtensor` and
`_param2group_meta_to_param_groups`, torch 2.13.0 optim/adam.py, TransformerEngine 2.x pytorch/optimizers/fused_adam.py.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import SourceError, UnsupportedError, short, some
from formats.layout.pieces import Scattered, match_pieces
from formats.layout.slots import Slot
from formats.layout.tensors import BUFFERS
from formats.megatron.chained_optimizer import EXPERTS, decays, is_spread
from formats.megatron.optimizer import Optimizer
from formats.optimizer import number_of
from formats.torch_files import dcp
from formats.torch_files.archive_plan import packed
from formats.torch_files.archive_writer import Small, packed_plain, plain, small_of

STATES, GROUPS, SCHEDULER = "optimizer.state.", "optimizer.param_to_group_meta.", "opt_param_scheduler"
STATE = re.compile(re.escape(STATES) + r"(?:module\.)+(.+)\.(\w+)")
SETTING = re.compile(re.escape(GROUPS) + r"(?:module\.)+(.+)\.(\w+)")
HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias)\d*)_[wv]")
"""The key of gate or of up; its group is the key of the parameter that both are of."""
MOMENTS = ("exp_avg", "exp_avg_sq")
HEAD = (SCHEDULER, "num_floating_point_operations_so_far")
"""Objects beside the optimizer that are carried over with it."""
ADAMS = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True, "bias_correction": True, "default_config": True,
}  # fmt: skip
"""Settings that a strict load needs, of torch's AdamW and of the fused one: defaults where a source lacks them."""


def parameter(key: str) -> str:
    """The key of the parameter that a tensor of the checkpoint is, or is half of."""
    return half[1] if (half := HALF.fullmatch(key)) else key


# --- reading ---------------------------------------------------------------------------------------------------------


def read(source: Checkpoint, grads: str) -> Optimizer:
    """The optimizer of an opened checkpoint.

    Args:
        source: the checkpoint.
        grads: the element type in which gradients are reduced.

    Raises:
        SourceError: the optimizer is incomplete, or of another model.
        UnsupportedError: the optimizer is not Adam, or its parameters differ in step or settings.
    """
    entries, objects = dcp.contents(source.home)
    by_state: dict[str, dict[str, dcp.Entry]] = {}
    for entry in entries:
        if named := STATE.fullmatch(entry.name):
            by_state.setdefault(named[2], {})[named[1]] = entry
    steps = by_state.pop("step", {})
    if unknown := sorted(set(by_state) - {*MOMENTS}):
        raise UnsupportedError(f"{source.home}: the optimizer keeps {some(unknown, 4)}, and Adam does not")
    trained = [entry for entry in source.tensors if not BUFFERS.intersection(entry.slot.rule.pattern.tensors)]
    states = {"fp32": replace(source, tensors=tuple(trained), without=BUFFERS)}
    slots = {entry.key: entry.slot for entry in trained}
    for state in MOMENTS:
        states[state] = _state(source, state, by_state.get(state, {}), slots.values())
    groups = _groups(source, [name for name in objects if name.startswith(GROUPS)], slots)
    if steps:
        step = _step(source, steps, slots)
        groups = [{**group, "step": step} for group in groups]
    files = dcp.read_objects(source.home, [name for name in objects if name.partition(".")[0] in HEAD])
    return Optimizer(states, groups, True, None, None, _nested(files), grads)


def _state(source: Checkpoint, state: str, entries: Mapping[str, dcp.Entry], slots: Iterable[Slot]) -> Checkpoint:
    tensors: dict[str, Scattered] = dict(zip(entries, dcp.load(entries.values()), strict=True))
    try:
        _, pieces, _ = match_pieces(slots, tensors, (), source.home)
    except SourceError as error:
        raise SourceError(f"{state} of its optimizer: {error}", error.hint) from None
    return replace(source, tensors=pieces, without=BUFFERS)


def _step(source: Checkpoint, steps: Mapping[str, dcp.Entry], slots: Iterable[str]) -> float:
    """The number of updates of all parameters, from the step that torch's Adam stores for each.

    Raises:
        SourceError: a parameter has no step.
        UnsupportedError: two parameters have different steps.
    """
    if missing := sorted(set(slots) - set(steps)):
        raise SourceError(f"{source.home} holds no step of {some(missing, 4)}: is it frozen?")
    steps_seen: dict[float, str] = {}
    for key, tensor in zip(steps, dcp.load(steps.values()), strict=True):
        number = number_of(small_of(tensor), f"{source.home}: the step of {key}")
        steps_seen.setdefault(number, key)
    if len(steps_seen) > 1:
        examples = " and ".join(f"{key} {number:g}" for number, key in list(steps_seen.items())[:2])
        raise UnsupportedError(f"{source.home}: its parameters have made different numbers of steps, {examples}")
    return next(iter(steps_seen))


def _groups(source: Checkpoint, names: Iterable[str], slots: Mapping[str, Slot]) -> list[dict[str, Any]]:
    """The parameter groups with and without weight decay, from the settings that are stored for each parameter.

    Args:
        source: the opened checkpoint.
        names: the names of the objects with settings.
        slots: the slots of the trained tensors by key.

    Raises:
        SourceError: a parameter has no settings, or there are settings of a parameter that the model has not.
        UnsupportedError: two parameters differ in more than weight decay, or weight decay is not Megatron's.
    """
    about: dict[str, dict[str, Any]] = {}
    for name, file in dcp.read_objects(source.home, [*names]).items():
        if named := SETTING.fullmatch(name):
            about.setdefault(named[1], {})[named[2]] = plain(file, file.value, name)
    parameters = {parameter(key): slot for key, slot in slots.items()}
    if odd := sorted(parameters.keys() ^ about.keys()):
        raise SourceError(f"{source.home}: its model or the settings of its optimizer lack {some(odd, 4)}")
    groups: dict[bool, dict[str, Any]] = {}
    for key, slot in parameters.items():
        group = {**about[key], "is_expert_parallel": False}
        decayed = bool(group.get("wd_mult"))
        if decayed != decays(key, slot.shape):
            raise UnsupportedError(
                f"{source.home}: the weight decay of {key} is multiplied by {short(group.get('wd_mult'))}, in Megatron "
                "that of matrices by 1, and that of all else by 0"
            )
        if (first := groups.setdefault(decayed, group)) != group:
            name = next(name for name in {**first, **group} if first.get(name) != group.get(name))
            raise UnsupportedError(
                f"{source.home} trains {key} with {name} = {short(group.get(name))}, others like it with "
                f"{short(first.get(name))}: in Megatron nothing but weight decay differs"
            )
    return [groups[decayed] for decayed in (True, False)]


def _nested(files: Mapping[str, Any]) -> dict[str, Any]:
    """The values of objects by name; objects named `outer.inner` become one map for each `outer`."""
    nested: dict[str, Any] = {}
    for name, file in files.items():
        outer, _, inner = name.partition(".")
        value = plain(file, file.value, name)
        if inner:
            nested.setdefault(outer, {})[inner] = value
        else:
            nested[outer] = value
    return nested


# --- writing ---------------------------------------------------------------------------------------------------------


def prefix_of(args: Mapping[str, Any]) -> str:
    """The prefix of parameter keys: in half precision one more module wraps the model (`Float16Module`)."""
    return "module." * (3 if args.get("bf16") or args.get("fp16") else 2)


def objects(
    optimizer: Optimizer, moved: Iterable[tuple[str, Slot]], args: Mapping[str, Any]
) -> dict[str, bytes | Small]:
    """The objects of an optimizer by name: steps, settings, and the state of the scheduler.

    Args:
        optimizer: the optimizer to write.
        moved: key and slot of each tensor that the optimizer trains.
        args: the args of the training, which determine the prefix of keys, and whether experts are on several ranks.
    """
    schedule = optimizer.head.get(SCHEDULER, {})
    groups = {bool(group["wd_mult"]): _words(optimizer, group, schedule) for group in optimizer.groups}
    saved: dict[str, bytes | Small] = {}
    prefix = prefix_of(args)
    for key, slot in moved:
        group, name = groups[decays(key, slot.shape)], parameter(key)
        saved[f"{STATES}{prefix}{key}.step"] = Small("F32", (), struct.pack("<f", group["step"]))
        settings = {**group, "is_expert_parallel": EXPERTS in key and is_spread(args)}
        saved |= {f"{GROUPS}{prefix}{name}.{word}": packed(value) for word, value in settings.items()}
    for name, value in optimizer.head.items():
        words_of = (
            {f"{name}.{word}": item for word, item in value.items()} if isinstance(value, Mapping) else {name: value}
        )
        saved |= {word: packed_plain(item) for word, item in words_of.items()}
    return saved


def _words(optimizer: Optimizer, group: Mapping[str, Any], schedule: Mapping[str, Any]) -> dict[str, Any]:
    rates = {f"{end}_lr": schedule.get(f"{end}_lr", group["lr"]) for end in ("max", "min")}
    step = int(group["step"] if optimizer.step is None else optimizer.step.number)
    return {**ADAMS, **rates, **group, "step": step}
