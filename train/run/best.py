"""The best evaluation of a run: its checkpoint is kept and exported, and the training ends when none is better.

Nothing has to be saved for it: `evaluations.jsonl` has every evaluation. What counts as better, and when patience ends,
is as in transformers 5.23.0 trainer_callback.py, `EarlyStoppingCallback`, and trainer.py, `_determine_best_metric`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from converters.common.atomic import write_file
from formats.errors import UsageError
from train.run.checkpoint import Progress
from train.run.evaluate import Score, record_of
from train.settings.config import Config
from train.start.run_folder import BEST, EVALUATIONS, PREFIX

LOSS = "_loss"
"""Suffix of metrics that are better when they are lower: all others are ROUGE and BLEU."""


class Best:
    """The best evaluation so far.

    Attributes:
        metric: its name in `evaluations.jsonl`.
        step: global step of the best evaluation, None before the first.
        value: the metric there.
        stale: evaluations since then that were not better by `evaluate.min_delta`.
    """

    def __init__(self, config: Config, evaluations: Iterable[tuple[int, float]] = ()) -> None:
        self.metric, self.patience = metric_of(config), config.evaluate.patience
        self.least = config.evaluate.min_delta
        self.step: int | None = None
        self.value, self.stale = 0.0, 0
        for step, value in evaluations:
            self.add(step, value)

    def add(self, step: int, value: float) -> bool:
        """Add an evaluation. Returns whether it is the best one."""
        gain = self.value - value if self.metric.endswith(LOSS) else value - self.value
        first, self.stale = self.step is None, 0 if self.step is None or gain > self.least else self.stale + 1
        if first or gain > 0:
            self.step, self.value = step, value
            return True
        return False

    @property
    def is_over(self) -> bool:
        """Whether the training ends here."""
        return self.patience is not None and self.stale >= self.patience

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.6g} at global step {self.step}"


def metric_of(config: Config) -> str:
    """The metric that `evaluate.best` names: a set means its loss.

    Raises:
        UsageError: there is no such metric.
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
    """The best evaluation of a run so far, up to a checkpoint; None if nothing asks for it."""
    if config.evaluate.best is None:
        return None
    path, last = config.save.path / EVALUATIONS, progress.offset + progress.step
    lines = map(json.loads, path.read_text().splitlines()) if path.is_file() else ()
    metric = metric_of(config)
    return Best(
        config,
        [
            (int(line["global_step"]), float(line[metric]))
            for line in lines
            if progress.offset < line["global_step"] <= last and metric in line
        ],
    )


def score_of(best: Best, scores: Mapping[str, Score]) -> float:
    """The metric in an evaluation."""
    return record_of(scores)[best.metric]


def write_best(save: Path, best: Best) -> None:
    """Note the best checkpoint in the run folder."""
    write_file(save / BEST, f"{PREFIX}{best.step}".encode())
