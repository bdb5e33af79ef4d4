"""The optimizer in a checkpoint of Megatron-FSDP: Adam's moments of each parameter, and its settings one by one.

The weights are the master weights. torch's Adam counts its steps beside the moments, Transformer Engine's among the
settings; both are written. gate and up, which are one parameter, have moments of their own and one entry of settings.

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
"""The key of gate or of up, and that of both."""
MOMENTS = ("exp_avg", "exp_avg_sq")
HEAD = (SCHEDULER, "num_floating_point_operations_so_far")
"""Objects beside the optimizer that travel on with it."""
ADAMS = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True, "bias_correction": True, "default_config": True,
}  # fmt: skip
"""What a strict load asks for of torch's AdamW or of the fused one, where a source has the words of the other."""


def parameter(key: str) -> str:
    """The parameter that a key of the model is of, or half of."""
    return half[1] if (half := HALF.fullmatch(key)) else key


# --- reading ---------------------------------------------------------------------------------------------------------


def read(source: Checkpoint, grads: str) -> Optimizer:
    """The optimizer of an opened checkpoint.

    Args:
        source: the checkpoint.
        grads: the element type in which gradients are reduced.

    Raises:
        SourceError: it is incomplete, or of another model.
        UnsupportedError: it is not Adam's, or its parameters differ in step or settings.
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
        made = _step(source, steps, slots)
        groups = [{**group, "step": made} for group in groups]
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
    """How many updates all parameters have had, as torch's Adam counts them."""
    if missing := sorted(set(slots) - set(steps)):
        raise SourceError(f"{source.home} holds no step of {some(missing, 4)}: is it frozen?")
    made: dict[float, str] = {}
    for key, tensor in zip(steps, dcp.load(steps.values()), strict=True):
        number = number_of(small_of(tensor), f"{source.home}: the step of {key}")
        made.setdefault(number, key)
    if len(made) > 1:
        listed = " and ".join(f"{key} {number:g}" for number, key in list(made.items())[:2])
        raise UnsupportedError(f"{source.home}: its parameters have made different numbers of steps, {listed}")
    return next(iter(made))


def _groups(source: Checkpoint, names: Iterable[str], slots: Mapping[str, Slot]) -> list[dict[str, Any]]:
    """The group with weight decay and the one without, of which each parameter says the settings again.

    Raises:
        SourceError: one does not, or is none of the model's.
        UnsupportedError: more than weight decay tells two of them apart.
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
    """Objects by name, those whose names have a part after a dot in a map."""
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
    """What stands before the keys of parameters: a module wraps the model in half precision (`Float16Module`)."""
    return "module." * (3 if args.get("bf16") or args.get("fp16") else 2)


def objects(
    optimizer: Optimizer, moved: Iterable[tuple[str, Slot]], args: Mapping[str, Any]
) -> dict[str, bytes | Small]:
    """Steps, settings and schedule, by name.

    Args:
        optimizer: what is written.
        moved: key and slot of each tensor that it moves.
        args: those of the training, which say what stands before the keys, and whether experts are spread.
    """
    schedule = optimizer.head.get(SCHEDULER, {})
    groups = {bool(group["wd_mult"]): _words(optimizer, group, schedule) for group in optimizer.groups}
    saved: dict[str, bytes | Small] = {}
    prefix = prefix_of(args)
    for key, slot in moved:
        group, name = groups[decays(key, slot.shape)], parameter(key)
        saved[f"{STATES}{prefix}{key}.step"] = Small("F32", (), struct.pack("<f", group["step"]))
        about = {**group, "is_expert_parallel": EXPERTS in key and is_spread(args)}
        saved |= {f"{GROUPS}{prefix}{name}.{word}": packed(value) for word, value in about.items()}
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
