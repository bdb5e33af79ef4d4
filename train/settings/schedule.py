"""The learning rate as a function of the step: no scheduler state to save or restore."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from formats.errors import UsageError
from train.settings.config import Config

SHAPES: Mapping[str, Callable[[float, float, float], float]] = {
    "constant": lambda high, _, __: high,
    "linear": lambda high, low, share: high - (high - low) * share,
    "cosine": lambda high, low, share: low + (high - low) * (1 + math.cos(math.pi * share)) / 2,
    "exponential": lambda high, low, share: high * (low / high) ** share,
    "sqrt": lambda high, low, share: high - (high - low) * math.sqrt(share),
}
"""Style: the learning rate from the highest rate, the lowest rate, and the share (0 to 1) of the decay that is done."""


def learning_rate(config: Config, step: int, total: int) -> float:
    """The learning rate of a step.

    Args:
        config: the settings; warm-up counts steps of this run, the decay global steps.
        step: number of the step in this run, from 0.
        total: number of steps of this run.
    """
    schedule, high, offset = config.schedule, config.optim.lr, config.steps.iteration_offset
    warmup = _warmup(config, total)
    if step < warmup:
        return high * (step + 1) / warmup
    start, end = _decay(config, total)
    share = min(1.0, max(0.0, (offset + step - start) / max(1, end - start)))
    return max(schedule.floor, SHAPES[schedule.style](high, schedule.min_lr, share))


def _warmup(config: Config, total: int) -> int:
    """Number of warm-up steps."""
    warmup = config.schedule.warmup
    if warmup == "all":
        return total
    return math.ceil(warmup if warmup >= 1 else warmup * total)


def _decay(config: Config, total: int) -> tuple[int, int]:
    """The global steps between which the learning rate decays: the first, and the end."""
    schedule, offset = config.schedule, config.steps.iteration_offset
    start = schedule.start if schedule.start is not None else offset + _warmup(config, total)
    return start, schedule.end if schedule.end is not None else offset + total


def check_schedule(config: Config, total: int) -> None:
    """Check the settings of the schedule against each other.

    Args:
        config: the settings; `schedule`, `optim.lr` and `steps.iteration_offset` are read.
        total: number of steps of the run.

    Raises:
        UsageError: the settings contradict each other.
    """
    schedule = config.schedule
    for name, low in {"min_lr": schedule.min_lr, "floor": schedule.floor}.items():
        if low > config.optim.lr:
            lowest, highest = config.called(f"schedule.{name}"), config.called("optim.lr")
            hint = f"the learning rate would never be as low as {highest}; --schedule.{name} 0 removes the bound"
            raise UsageError(f"{lowest} {low:g} is above {highest} {config.optim.lr:g}", hint)
    if schedule.warmup != "all" and _warmup(config, total) > total:
        raise UsageError(
            f"{config.called('schedule.warmup')} takes {_warmup(config, total)} steps, the run has {total}: "
            f"{config.called('optim.lr')} would never be reached",
            "--schedule.warmup all, or fewer steps",
        )
    if schedule.style == "exponential" and not schedule.min_lr:
        raise UsageError("an exponential decay never reaches schedule.min_lr 0", "such as --schedule.min_lr 1e-6")
    start, end = _decay(config, total)
    if schedule.style != "constant" and schedule.end is not None and end <= start:
        raise UsageError(
            f"{config.called('schedule.end')} {end} does not come after global step {start}, where the decay begins"
        )
