"""The number of steps of a DeepSpeed optimizer: read from its optimizer states, and compared with the model files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

from formats.errors import SourceError, short
from formats.model.accepted import STEPS
from formats.torch_files.archive import TorchFile
from formats.torch_files.archive_writer import plain
from formats.torch_files.pickle_values import TensorRef


def steps_in(file: TorchFile) -> frozenset[float]:
    """The step counts in a file of optimizer states; empty if the optimizer is stored in another way."""
    states = file.value.get("optimizer_state_dict") if isinstance(file.value, Mapping) else None
    inner = (
        (states.get("base_optimizer_state") or states.get("optimizer_state_dict"))
        if isinstance(states, Mapping)
        else None
    )
    state = inner.get("state") if isinstance(inner, Mapping) else None
    each = [moments["step"] for moments in state.values() if "step" in moments] if isinstance(state, Mapping) else []
    return frozenset(steps_made(file, value) for value in each if isinstance(value, int | float | TensorRef))


COUNTER = "global_steps"
"""The key of the engine's step count in a model file."""


def require_one_step(
    model: TorchFile, path: Path | None, steps: Collection[float], accept: Collection[str]
) -> list[str]:
    """Refuse an optimizer whose step count is not that of the model file, without skipped steps.

    The engine counts steps and skipped steps (deepspeed/runtime/engine.py `_take_model_step`, 0.19.8). In a training
    that began with the weights of another training alone the engine's count continues, while the optimizer begins at 0.

    Args:
        model: the first model file.
        path: the file of optimizer states that was read; None if there is none.
        steps: the steps that its parameters have made; empty if the file does not record them.
        accept: the deviations that the user accepts.

    Returns:
        Notes for the user, if a difference was accepted.

    Raises:
        SourceError: the counts differ, and this was not accepted.
    """
    iterations, skipped = model.value.get(COUNTER), model.value.get("skipped_steps") or 0
    if type(iterations) is not int or type(skipped) is not int:
        return []
    if not steps or iterations - skipped in steps:
        return []
    counted = " and ".join(f"{step:g}" for step in sorted(steps))
    difference = f"{path} has made {counted} steps, {model.path} counts {iterations}" + (
        f", {skipped} of them skipped" if skipped else ""
    )
    if STEPS in accept:
        return [f"{difference}: accepted"]
    raise SourceError(
        f"{difference}: files of different saves",
        f"copy the files of one save from all nodes; of a training that began without the optimizer of the one before: "
        f"--accept {STEPS}",
    )


def number(file: TorchFile, value: Any) -> float:
    """The value of a number, or of a tensor with one element.

    Raises:
        SourceError: the tensor has more or fewer elements.
    """
    if not isinstance(value, TensorRef):
        return float(value)
    if prod(value.shape) != 1:
        raise SourceError(f"{file.path} holds a tensor of {prod(value.shape)} elements where one number should be")
    return float(plain(file, value, "a number").number)


def steps_made(file: TorchFile, value: Any) -> float:
    """The number of steps that an optimizer has made, from the value in its file.

    Raises:
        SourceError: the value is no whole number, or negative.
    """
    if not isinstance(value, int | float | TensorRef) or not (steps := number(file, value)) >= 0 or steps % 1:
        count_text = short(value if isinstance(value, str) else number(file, value))
        raise SourceError(f"{file.path} says that its optimizer has made {count_text} steps", "the file is damaged")
    return steps
