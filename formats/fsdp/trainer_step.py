"""The steps that a trainer has counted, which are those that the optimizer beside its FSDP checkpoint has made.

    checkpoint-3/trainer_state.json    `global_step`, of the Trainer of transformers, axolotl and TRL
    step3/train/rank0.pt               `global_step`, of OLMo-core
    step-3/.metadata                   `train_state.step`, of torchtitan, in the files of the optimizer

The count continues where the optimizer does not: a gradient scaler (float16) and OLMo-core's SkipStepAdamW leave steps
out, and a training may begin with the weights and the count of another, and without its optimizer.

Facts: transformers 5.23.0, trainer.py `_run_epoch` and `_save_checkpoint`; ai2-olmo-core 3.0.0, train/trainer.py
`state_dict`, train/checkpoint.py `_save_train_state`, optim/adamw.py; torchtitan 0.3.0, trainer.py `state_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from formats.disk.json_file import read_json
from formats.errors import SourceError
from formats.fsdp.checkpoint import INSIDE
from formats.model.accepted import TRAINER_STEP
from formats.optimizer import number_of
from formats.torch_files.archive import read_torch

KEY, SAVED = "global_step", "train_state.step"
TRAINER, OLMO_CORE = "trainer_state.json", "train/rank0.pt"
FOLDER = re.compile(r"(?:checkpoint-|step-?)(\d+)")
"""The name of the folder of a save, with the step that the trainer had counted."""


def require_same(source: Checkpoint, where: Path, step: int, saved: Any) -> tuple[str, ...]:
    """Refuse an optimizer that has made other steps than the trainer has counted.

    Args:
        source: the opened checkpoint.
        where: the place of its optimizer.
        step: the number of steps that the optimizer has made.
        saved: the value of `SAVED` in the files of the optimizer; None if there is none.

    Returns:
        Notes for the user: on a difference that was accepted, and on a folder that has the name of another step.

    Raises:
        SourceError: the numbers differ, and this was not accepted; or the record of a trainer is damaged.
    """
    folder = source.home.parent if source.home.name in INSIDE[1:] else source.home
    name, notes = folder.resolve().name, list[str]()
    named, records = FOLDER.fullmatch(name), _counted(folder, where, saved)
    if not records and named and int(named[1]) != step:
        notes.append(f"{name} holds an optimizer that has made {step} steps")
    for record, counted in records.items():
        if counted != step:
            difference = f"the optimizer in {where} has made {step} steps, {record} = {counted}"
            if TRAINER_STEP not in source.settings.accept:
                raise SourceError(
                    f"{difference}: files of different saves",
                    "copy the files of one save from all nodes; of a training whose optimizer left steps out, or that "
                    f"began without the optimizer of the one before: --accept {TRAINER_STEP}",
                )
            notes.append(f"{difference}: accepted")
        if named and int(named[1]) != counted:
            notes.append(f"{name} holds step {counted}, as its files say: {record} = {counted}")
    return tuple(notes)


def _counted(folder: Path, where: Path, saved: Any) -> dict[str, int]:
    """What each record of a trainer says, by its place; without those that say no number."""
    said: dict[str, Any] = {}
    if saved is not None:
        said[f"{where} says {SAVED}"] = int(number_of(saved, f"{where}: {SAVED}"))
    if (path := folder / TRAINER).is_file():
        said[f"{path} says {KEY}"] = read_json(path).get(KEY)
    if (path := folder / OLMO_CORE).is_file():
        value = read_torch(path).value
        said[f"{path} says {KEY}"] = value.get(KEY) if isinstance(value, Mapping) else None
    return {record: count for record, count in said.items() if type(count) is int}
