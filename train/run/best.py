"""The best evaluation of a run: its checkpoint is kept and exported; training stops early when no later one improves.

No state is saved for this, because `evaluations.jsonl` has every evaluation. What counts as better, and when patience
ends, is as in transformers 5.23.0 trainer_callback.py, `EarlyStoppingCallback`, and trainer.py,
`_determine_best_metric`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from converters.common.atomic import write_file
from formats.errors import UsageError
from train.run.checkpoint import Progress
from train.run.evaluate import Score, record_of
from train.settings.config import Config
from train.start.run_folder import BEST, EVALUATIONS, PREFIX, lines_of

LOSS = "_loss"
"""Suffix of the metrics where lower is better; in all others (ROUGE and BLEU) higher is better."""


class Best:
    """The best evaluation so far.

    Attributes:
        metric: name of the compared metric in `evaluations.jsonl`.
        step: global step of the best evaluation, None before the first that is a number.
        value: the metric at `step`; infinite before.
        count: number of evaluations.
        stale: consecutive evaluations that did not improve on the best value by more than `evaluate.min_delta`.
    """

    def __init__(self, config: Config, evaluations: Iterable[tuple[int, float]] = ()) -> None:
        self.metric, self.patience = metric_of(config), config.evaluate.patience
        self.least = config.evaluate.min_delta
        self.step: int | None = None
        self.lower = self.metric.endswith(LOSS)
        self.value, self.stale, self.count = math.inf if self.lower else -math.inf, 0, 0
        for step, value in evaluations:
            self.add(step, value)

    def add(self, step: int, value: float) -> bool:
        """Record an evaluation. Returns whether it is the best so far, which NaN never is."""
        gain = self.value - value if self.lower else value - self.value
        self.stale = 0 if not self.count or gain > self.least else self.stale + 1
        self.count += 1
        if gain > 0:
            self.step, self.value = step, value
            return True
        return False

    @property
    def is_over(self) -> bool:
        """Whether training stops here: `evaluate.patience` evaluations in a row brought no improvement."""
        return self.patience is not None and self.stale >= self.patience

    def __str__(self) -> str:
        at = f" at global step {self.step}" if self.step is not None else ", as no evaluation gave a number"
        return f"{self.metric} {self.value:.6g}{at}"


def metric_of(config: Config) -> str:
    """The name of the metric that `evaluate.best` selects; the name of a validation set alone selects its loss.

    Raises:
        UsageError: `evaluate.best` names no metric that is evaluated.
    """
    name = str(config.evaluate.best)
    if name in config.data.validation:
        return name + LOSS
    of, _, kind = name.rpartition("_")
    kinds = ["loss", *(["bleu"] if "bleu" in config.evaluate.metrics else [])]
    if "rouge" in config.evaluate.metrics:
        kinds += ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    if of in config.data.validation and kind in kinds:
        return name
    known = [f"{part}_{kind}" for part in config.data.validation for kind in kinds]
    raise UsageError(f"evaluate.best is {name}, which is not evaluated", f"there are {', '.join(known) or 'none'}")


def open_best(config: Config, progress: Progress) -> Best | None:
    """The best evaluation of a run up to its current checkpoint; None if `evaluate.best` is not set."""
    if config.evaluate.best is None:
        return None
    last, metric = progress.offset + progress.step, metric_of(config)
    return Best(
        config,
        [
            (int(line["global_step"]), float(line[metric]))
            for line in lines_of(config.save.path / EVALUATIONS)
            if progress.offset < line["global_step"] <= last and metric in line
        ],
    )


def score_of(best: Best, scores: Mapping[str, Score]) -> float:
    """The value of the compared metric in an evaluation."""
    return record_of(scores)[best.metric]


def write_best(save: Path, best: Best) -> None:
    """Write the name of the best checkpoint into the file `best` of the run folder, which is deleted if there is none.

    A job begins with it: since the last one, the run may have been set back, or evaluated.
    """
    if best.step is None:
        (save / BEST).unlink(missing_ok=True)
    else:
        write_file(save / BEST, f"{PREFIX}{best.step}".encode())
