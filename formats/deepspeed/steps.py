"""How many steps an optimizer of DeepSpeed has made: what its files of states say, and what its model files count."""

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
    """The steps that a file of optimizer states counts; none where its optimizer is kept in another way."""
    kept = file.value.get("optimizer_state_dict") if isinstance(file.value, Mapping) else None
    inner = (
        (kept.get("base_optimizer_state") or kept.get("optimizer_state_dict")) if isinstance(kept, Mapping) else None
    )
    state = inner.get("state") if isinstance(inner, Mapping) else None
    each = [moments["step"] for moments in state.values() if "step" in moments] if isinstance(state, Mapping) else []
    return frozenset(steps_made(file, value) for value in each if isinstance(value, int | float | TensorRef))


COUNTER = "global_steps"
"""What a model file calls the steps of its engine."""


def require_one_step(
    model: TorchFile, path: Path | None, steps: Collection[float], accept: Collection[str]
) -> list[str]:
    """The optimizer has made the steps that the model file counts, but for those that were skipped.

    The engine counts both (deepspeed/runtime/engine.py `_take_model_step`, 0.19.8). A training that began with the
    weights of another alone counts on, while its optimizer begins again.

    Args:
        model: the first model file.
        path: the file of the optimizer that was asked, None where there is none.
        steps: those that its parameters have made, none where it does not say.
        accept: what the user names in spite of a refusal.

    Returns:
        What the user should know, if a difference was accepted.

    Raises:
        SourceError: the two differ.
    """
    made, skipped = model.value.get(COUNTER), model.value.get("skipped_steps") or 0
    if type(made) is not int or type(skipped) is not int:
        return []
    if not steps or made - skipped in steps:
        return []
    counted = " and ".join(f"{step:g}" for step in sorted(steps))
    difference = f"{path} has made {counted} steps, {model.path} counts {made}" + (
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
    """A number, or that of a tensor with one element.

    Raises:
        SourceError: it has more or fewer.
    """
    if not isinstance(value, TensorRef):
        return float(value)
    if prod(value.shape) != 1:
        raise SourceError(f"{file.path} holds a tensor of {prod(value.shape)} elements where one number should be")
    return float(plain(file, value, "a number").number)


def steps_made(file: TorchFile, value: Any) -> float:
    """How many steps an optimizer has made.

    Raises:
        SourceError: it is no whole number.
    """
    if not isinstance(value, int | float | TensorRef) or not (made := number(file, value)) >= 0 or made % 1:
        count_text = short(value if isinstance(value, str) else number(file, value))
        raise SourceError(f"{file.path} says that its optimizer has made {count_text} steps", "the file is damaged")
    return made
