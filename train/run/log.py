"""Logs of a training run: a line for people, a line of JSON for each step, and trackers.

    SAVE/log.jsonl, evaluations.jsonl    always
    SAVE/runs/                           TensorBoard

A resumed run continues its curves: lines of steps that will be trained again are dropped first.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from types import MappingProxyType
from typing import NamedTuple

from converters.common.atomic import write_file
from converters.common.progress import clock, size
from train.run.checkpoint import Progress
from train.run.evaluate import CSV, Score, line_of, record_of, write_csv
from train.run.generate import Answer
from train.run.trackers import open_tracker
from train.settings.config import Config
from train.start.run_folder import EVALUATIONS, GENERATIONS, LOG

RECENT, LEAST = 50, 20
"""A new loss is compared with those of at most RECENT steps before it, once there are at least LEAST."""
Say = Callable[[str], None]


class Step(NamedTuple):
    """What is logged of a step, over all ranks.

    Attributes:
        loss: mean over trained labels.
        norm: norm of the gradient, before clipping.
        trained: number of trained labels.
        tokens: number of input tokens.
        flops: model FLOPs.
        memory: peak memory of rank 0, in bytes.
        rate: learning rate.
        stop: whether a rank has to stop, for a signal or because its time is up.
        written: whether all ranks have written their part of a checkpoint.
        due: whether `save.every_minutes` have passed on rank 0.
        norms: gradient norm of each layer, with `log.layer_norms`.
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
    norms: Mapping[str, float] = MappingProxyType({})


class Log:
    """The log of a run, on rank 0. Lines of steps that will be trained again are dropped."""

    def __init__(self, config: Config, ranks: int, progress: Progress, total: int, peak: float | None) -> None:
        self.folder, self.every, self.peak, self.ranks = config.save.path, config.log.every, peak, ranks
        self.seconds = 0.0
        step = progress.offset + progress.step
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (LOG, EVALUATIONS, GENERATIONS):
            _forget(self.folder / name, step)
        self.spike, self.losses = config.log.spike, deque(_losses(self.folder / LOG), RECENT)
        for path in (self.folder / CSV).rglob("*.csv"):
            if path.stem.isdecimal() and step < int(path.stem) <= progress.offset + total:
                path.unlink()
        self.trackers = [open_tracker(name, config, step) for name in config.log.trackers]

    def line(self, progress: Progress, total: int, step: Step, seconds: float, say: Say) -> None:
        """Log a step: a record in `log.jsonl` and the trackers, and every `log.every` steps a printed line."""
        number = progress.offset + progress.step
        self.seconds = seconds if not self.seconds else 0.9 * self.seconds + 0.1 * seconds
        record: dict[str, float] = {
            "step": progress.step, "global_step": number, "loss": step.loss, "lr": step.rate, "grad_norm": step.norm,
            "trained_tokens": step.trained, "all_trained_tokens": progress.tokens, "tokens": step.tokens,
            "tokens_per_second": round(step.tokens / seconds, 1), "seconds": round(seconds, 4), "memory": step.memory,
        }  # fmt: skip
        if self.peak:
            record["mfu"] = round(step.flops / seconds / self.peak / self.ranks, 4)
        record |= {f"grad_norm/{layer}": norm for layer, norm in step.norms.items()}
        self._write(LOG, record)
        self._notice(number, step.loss, say)
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

    def _notice(self, number: int, loss: float, say: Say) -> None:
        """Print a note if a loss is far above the mean of the last steps."""
        if self.spike is not None and len(self.losses) >= LEAST:
            mean, deviation = fmean(self.losses), pstdev(self.losses)
            if loss > mean + self.spike * deviation:
                far = f"{(loss - mean) / deviation:.1f} standard deviations" if deviation else "far"
                say(f"note       global step {number}: loss {loss:.4g} is {far} above {mean:.4g}, the mean before it")
        self.losses.append(loss)

    def answers(self, progress: Progress, answers: Sequence[Answer], say: Say) -> None:
        """Log the answers to the prompts."""
        step = {"step": progress.step, "global_step": progress.offset + progress.step}
        with (self.folder / GENERATIONS).open("a") as file:
            file.writelines(json.dumps(step | answer._asdict(), ensure_ascii=False) + "\n" for answer in answers)
        for answer in answers:
            shown = " ".join(f"{answer.prompt} -> {answer.text}".split())
            say(f"answer     {shown[:200]}{'…' if len(shown) > 200 else ''}")

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


def _losses(path: Path) -> list[float]:
    """The losses of the last steps of a log."""
    lines = path.read_text().splitlines()[-RECENT:] if path.is_file() else []
    return [float(json.loads(line)["loss"]) for line in lines]


def _forget(path: Path, step: int) -> None:
    """Drop the lines after a global step, and an incomplete last line of a killed job."""
    if path.is_file():
        earlier = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        write_file(path, "".join(line + "\n" for line in earlier).encode())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["global_step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
