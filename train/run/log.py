"""Logs of a training run: a line for people, a line of JSON for each step, and trackers.

    SAVE/log.jsonl, evaluations.jsonl    always
    SAVE/runs/                           TensorBoard

A resumed run continues its curves: lines of steps that will be trained again are dropped first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from converters.common.atomic import write_file
from converters.common.progress import clock, size
from formats.errors import UnsupportedError
from train.run.checkpoint import Progress
from train.run.evaluate import CSV, Score, line_of, record_of, write_csv
from train.settings.config import Config
from train.start.run_folder import EVALUATIONS, LOG

Say = Callable[[str], None]
Tracker = Callable[[int, Mapping[str, float]], None]
"""Called with a global step and its metrics."""


class Step(NamedTuple):
    """A step, over all ranks.

    Attributes:
        loss: mean over trained labels.
        norm: of the gradient, before clipping.
        trained: trained labels.
        tokens: input tokens.
        flops: model FLOPs.
        memory: peak memory of rank 0, in bytes.
        rate: learning rate.
        stop: a rank has to stop: a signal, or its time is up.
        written: all ranks have written their part of a checkpoint.
        due: `save.every_minutes` have passed on rank 0.
    """

    loss: float
    norm: float
    trained: int
    tokens: int
    flops: float
    memory: int
    rate: float
    stop: bool
    written: bool
    due: bool


class Log:
    """The log of a run, on rank 0. Lines of steps that will be trained again are dropped."""

    def __init__(self, config: Config, ranks: int, progress: Progress, total: int, peak: float | None) -> None:
        self.folder, self.every, self.peak, self.ranks = config.save.path, config.log.every, peak, ranks
        self.seconds = 0.0
        step = progress.offset + progress.step
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (LOG, EVALUATIONS):
            _forget(self.folder / name, step)
        for path in (self.folder / CSV).rglob("*.csv"):
            if path.stem.isdecimal() and step < int(path.stem) <= progress.offset + total:
                path.unlink()
        self.trackers: list[Tracker] = [TRACKERS[name](config, step) for name in config.log.trackers]

    def line(self, progress: Progress, total: int, step: Step, seconds: float, say: Say) -> None:
        """Log a step."""
        number = progress.offset + progress.step
        self.seconds = seconds if not self.seconds else 0.9 * self.seconds + 0.1 * seconds
        record: dict[str, float] = {
            "step": progress.step, "global_step": number, "loss": step.loss, "lr": step.rate, "grad_norm": step.norm,
            "trained_tokens": step.trained, "all_trained_tokens": progress.tokens, "tokens": step.tokens,
            "tokens_per_second": round(step.tokens / seconds, 1), "seconds": round(seconds, 4), "memory": step.memory,
        }  # fmt: skip
        if self.peak:
            record["mfu"] = round(step.flops / seconds / self.peak / self.ranks, 4)
        self._write(LOG, record)
        if progress.step % self.every and progress.step != total:
            return
        in_loss = 100 * step.trained / max(1, step.tokens)
        parts = [
            f"step {progress.step}/{total}" + (f" (global {number})" if progress.offset else ""),
            f"loss {step.loss:.4g}",
            f"lr {step.rate:.3g}",
            f"grad-norm {step.norm:.3g}",
            f"{step.tokens / seconds:,.0f} tokens/s ({in_loss:.0f} % in the loss)",
            *([f"MFU {100 * record['mfu']:.1f} %"] if self.peak else []),
            size(step.memory),
            f"{clock((total - progress.step) * self.seconds)} left",
        ]
        say(" · ".join(parts))

    def scores(self, progress: Progress, scores: Mapping[str, Score], say: Say) -> None:
        """Log an evaluation."""
        step = progress.offset + progress.step
        self._write(EVALUATIONS, {"step": progress.step, "global_step": step} | record_of(scores))
        write_csv(self.folder / CSV, step, scores)
        say(line_of(step, scores))

    def _write(self, name: str, record: Mapping[str, float]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(record) + "\n")
        numbers = {key: value for key, value in record.items() if key not in ("step", "global_step")}
        for tracker in self.trackers:
            tracker(int(record["global_step"]), numbers)


def _forget(path: Path, step: int) -> None:
    """Drop the lines after a global step, and an incomplete last line of a killed job."""
    if path.is_file():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        write_file(path, "".join(line + "\n" for line in kept).encode())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["global_step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


# --- trackers --------------------------------------------------------------------------------------------------------


def _lacking(name: str) -> UnsupportedError:
    return UnsupportedError(f"log.trackers names {name}, which is not installed", "pip install 'vitruvian[trackers]'")


def _tensorboard(config: Config, step: int) -> Tracker:
    """TensorBoard; it drops later steps by itself (`purge_step`)."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise _lacking("tensorboard") from None
    writer = SummaryWriter(str(config.save.path / "runs"), purge_step=step + 1)

    def track(number: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, number)
        writer.flush()

    return track


def _wandb(config: Config, _: int) -> Tracker:
    """Weights & Biases; a resumed run has the same id, which is made from its folder's path."""
    try:
        import wandb
    except ImportError:
        raise _lacking("wandb") from None
    from blake3 import blake3

    place = config.save.path.resolve()
    name = blake3(str(place).encode()).hexdigest(8)
    wandb_run: Any = wandb.init(
        id=name, name=place.name, dir=str(place), resume="allow", config=config.model_dump(mode="json")
    )

    def track(number: int, numbers: Mapping[str, float]) -> None:
        wandb_run.log(dict(numbers), step=number)

    return track


TRACKERS: Mapping[str, Callable[[Config, int], Tracker]] = {"tensorboard": _tensorboard, "wandb": _wandb}
