"""Numbers of a Megatron optimizer and its scheduler that no training saves: refused, as in all other formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import SourceError, UnsupportedError, short
from formats.megatron.optimizer import Optimizer
from formats.optimizer import group_of, number_of
from formats.torch_files.archive_writer import Small

ADAMS = ("lr", "betas", "eps", "weight_decay")
MUONS = ("lr", "weight_decay", "momentum")
SCHEDULERS = ("opt_param_scheduler", "lr_scheduler")


def require_numbers(optimizer: Optimizer, where: str) -> None:
    """Refuse numbers that no training saves, and parameters with different numbers of updates.

    Steps are not compared with the iteration: skipped updates, and a training that begins again at 0, are not errors.

    Raises:
        SourceError: a setting, the step or the scheduler's `num_steps` is no number of its kind.
        UnsupportedError: parameter groups and states record different numbers of updates.
    """
    for group in optimizer.groups:
        group_of({"amsgrad": False, **{name: group.get(name) for name in ADAMS}}, where)
    for name in MUONS if optimizer.muon else ():
        number_of((optimizer.muon or {}).get(name), f"{where}: its {name}")
    if not isinstance(optimizer.step, Small | None):
        raise SourceError(f"{where}: the step of its optimizer is {short(optimizer.step)}, which is no tensor")
    saved = [group["step"] for group in (*optimizer.groups, optimizer.muon or {}) if "step" in group]
    saved += [] if optimizer.step is None else [optimizer.step]
    steps = {_count(step, f"{where}: the step of its optimizer") for step in saved}
    if len(steps) > 1:
        numbers = ", ".join(f"{number:g}" for number in sorted(steps))
        raise UnsupportedError(f"{where}: its parameters have made different numbers of steps: {numbers}")
    for name in SCHEDULERS:
        schedule = optimizer.head.get(name, {})
        if not isinstance(schedule, Mapping):
            raise SourceError(f"{where}: its {name} is {short(schedule)}, which is no map of settings")
        if "num_steps" in schedule:
            _count(schedule["num_steps"], f"{where}: num_steps of its {name}")


def _count(value: Any, what: str) -> float:
    """A whole number from 0 on; `value` may be a float, or a tensor with one element (SourceError: it is none)."""
    number = number_of(value, what)
    if number < 0 or number != int(number):
        raise SourceError(f"{what} is {number:g}, which is no count")
    return number
