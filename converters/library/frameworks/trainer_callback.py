"""The callback of transformers' Trainer that exports each checkpoint at its save."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from converters.library.exporting import Exporter, exporter, possible
from converters.library.options import Conversion, Place

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ExportCallback(TrainerCallback):
    """Exports each checkpoint that the Trainer saves, on the first rank, while the training continues.

    `save_total_limit` may delete a checkpoint before its turn: then its export counts as failed. The end of the
    training waits for the exports that are left.

    Args:
        out: the folder in which each `checkpoint-N` becomes a Hugging Face folder.
        push: ORG/NAME to which each model is pushed afterwards, into a branch `checkpoint-N`.
        waiting: how many checkpoints may wait for the one that is exported; a further one is skipped.
        strict: at the end of the training, raise if an export failed or was skipped.
        options: the options of `vitruvian.convert`; for sharded checkpoints `config="BASE"`.

    Raises:
        UsageError: an option is unknown or has an impossible value, or `push` is not a valid name on the Hub.
    """

    def __init__(
        self,
        out: Place,
        *,
        push: str | None = None,
        waiting: int = 1,
        strict: bool = False,
        **options: Unpack[Conversion],
    ) -> None:
        possible(push, waiting, options)  # now, and not when the first checkpoint is saved
        self.out, self.push, self.waiting, self.strict, self.options = out, push, waiting, strict, options
        self.exporter: Exporter | None = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Submit the checkpoint that was saved."""
        del control
        if state.is_world_process_zero:
            if self.exporter is None:
                self.exporter = exporter(self.out, push=self.push, waiting=self.waiting, **self.options)
            self.exporter.submit(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the exports that are left."""
        del args, state, control
        if self.exporter is not None:
            self.exporter.close(strict=self.strict)
            self.exporter = None
