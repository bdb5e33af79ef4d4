"""The number of steps of a DeepSpeed optimizer: read from its optimizer states, and compared with the model files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from formats.checkpoint import MANIFEST
from formats.disk.json_file import read_json
from formats.errors import SourceError, short
from formats.model.accepted import STEPS, TRAINER_STEP
from formats.optimizer import STATES
from formats.torch_files.archive import TorchFile
from formats.torch_files.archive_writer import plain
from formats.torch_files.pickle_values import TensorRef
from formats.torch_files.unpickle import DAMAGE


def steps_in(file: TorchFile) -> frozenset[float]:
    """The step counts in a file of optimizer states; empty if the optimizer is stored in another way."""
    try:
        states = file.value["optimizer_state_dict"]
        inner = states.get("base_optimizer_state") or states["optimizer_state_dict"]
        return frozenset(steps_by_group(file, inner["state"], inner.get("param_groups") or ()))
    except DAMAGE:
        return frozenset()


def steps_by_group(
    file: TorchFile, state: Mapping[Any, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]
) -> list[float]:
    """The number of steps of each flat group that records one.

    Adam of torch and of DeepSpeed counts in the state, Apex' FusedAdam in the parameter group
    (apex/optimizers/fused_adam.py). After a universal checkpoint was loaded, which has both, the other count stays as
    it was then (deepspeed/runtime/base_optimizer.py `load_hp_checkpoint_state_from_checkpoint_dir`, 0.19.8): the
    larger one is right.

    Args:
        file: the file of optimizer states.
        state: what the optimizer keeps of each flat group, by the number of the group.
        groups: the parameter groups, whose `params` are numbers of flat groups.

    Raises:
        SourceError: a count is no whole number, or negative.
        KeyError, TypeError, AttributeError: what the optimizer keeps is in another form.
    """
    of_group = {member: group["step"] for group in groups if "step" in group for member in group["params"]}
    counts = []
    for number, kept in state.items():
        each = [kept["step"]] if "step" in kept else []
        each += [of_group[number]] if number in of_group and STATES[2] in kept else []
        counts += [max(steps_made(file, value) for value in each)] if each else []
    return counts


COUNTER = "global_steps"
"""The key of the engine's step count in a model file."""
TRAINER = "trainer_state.json"
"""The file of the Trainer of transformers, beside the folder of the model files."""
OF_GROUPS = "optimizer_state.pt"
"""The file of a universal checkpoint with the parameter groups, and with the step where no parameter has one."""
UNTOLD = "no parameter has a step.pt (ds_to_universal writes none of ZeRO-3): files of two saves would not be noticed"


def require_one_step(
    model: TorchFile, path: Path | None, steps: Collection[float], accept: Collection[str]
) -> list[str]:
    """Refuse an optimizer whose steps and skipped steps are not those of the model file, or of a trainer beside it.

    The engine counts steps and skipped steps (deepspeed/runtime/engine.py `_take_model_step`, 0.19.8). In a training
    that began with the weights of another training alone the engine's count continues, while the optimizer begins at 0.

    Args:
        model: the first model file.
        path: the file of optimizer states that was read; None if there is none.
        steps: the steps that its parameters have made; empty if the file does not record them.
        accept: the deviations that the user accepts.

    Returns:
        Notes for the user, if a difference was accepted, or no file tells with which step a parameter was saved.

    Raises:
        SourceError: the counts differ, and this was not accepted.
    """
    notes = list[str]()
    if path is not None and path.name == OF_GROUPS and not (path.parent.parent / MANIFEST).is_file():
        notes.append(f"{path.parent}: {UNTOLD}")
    iterations, skipped = model.value.get(COUNTER), model.value.get("skipped_steps") or 0
    if type(iterations) is not int or type(skipped) is not int:
        return notes
    notes += _of_trainer(model, iterations, accept)
    if not steps or iterations - skipped in steps:
        return notes
    counted = " and ".join(f"{step:g}" for step in sorted(steps))
    difference = f"{path} has made {counted} steps, {model.path} counts {iterations}" + (
        f", {skipped} of them skipped" if skipped else ""
    )
    if STEPS in accept:
        return [*notes, f"{difference}: accepted"]
    raise SourceError(
        f"{difference}: files of different saves",
        f"copy the files of one save from all nodes; of a training that began without the optimizer of the one before: "
        f"--accept {STEPS}",
    )


def _of_trainer(model: TorchFile, iterations: int, accept: Collection[str]) -> list[str]:
    """Refuse a model file of another step than the Trainer of transformers has counted.

    Both count skipped steps (transformers 5.23.0, trainer.py `_save_checkpoint`).
    """
    path = model.path.parent.parent / TRAINER
    counted = read_json(path).get("global_step") if path.is_file() else None
    if type(counted) is not int or counted == iterations:
        return []
    difference = f"{model.path} counts {iterations} steps, {path} {counted}"
    if TRAINER_STEP in accept:
        return [f"{difference}: accepted"]
    raise SourceError(
        f"{difference}: files of different saves",
        "copy the files of one save from all nodes; of a training that began with the count of another: "
        f"--accept {TRAINER_STEP}",
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
