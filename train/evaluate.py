"""Perplexity of named sets: exact, and the same on any number of ranks.

The loss of a set is the sum over all its labels divided by their number, summed over ranks before the division. No row
is counted twice: a rank that has none left computes an empty one, because all ranks take every forward pass.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch

from train.config import Config
from train.distributed import World
from train.model import Trainee
from train.rows import Rows, open_rows


class Score(NamedTuple):
    """What a set got.

    Attributes:
        total: sum of the losses of its labels.
        tokens: labels.
    """

    total: float
    tokens: int

    @property
    def loss(self) -> float:
        """Mean over labels."""
        return self.total / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        """E to the loss; infinite where that is too large for a number."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def open_sets(config: Config) -> dict[str, Rows]:
    """The rows of each validation set."""
    return {name: open_rows(config.data, [path], config.seed) for name, path in config.data.validation.items()}


def evaluate(trainee: Trainee, sets: Mapping[str, Rows], world: World) -> dict[str, Score]:
    """Score every set with the weights as they are. Every rank has to come here."""
    trainee.eval()
    found = {}
    with torch.no_grad():
        for name, rows in sets.items():
            total, tokens = 0.0, 0
            for first in range(0, len(rows), world.ranks):
                number = first + world.rank
                flat = rows.flat([number] if number < len(rows) else [])
                total += float(trainee(flat, world.device))
                tokens += flat.trained
            sums = world.sums(total, tokens)
            found[name] = Score(sums[0], int(sums[1]))
    trainee.train()
    return found


def line_of(step: int, scores: Mapping[str, Score]) -> str:
    """One line for people, with the names that the users' logs have."""
    parts = [f"{name}: eval_ppl={one.perplexity:.6g} eval_epoch_loss={one.loss:.6g}" for name, one in scores.items()]
    return f"global_step={step} " + ", ".join(parts)


def write_csv(folder: Path, step: int, scores: Mapping[str, Score]) -> None:
    """`STEP.csv`, with the columns of the users' perplexity tester: total, mean, and perplexity of each set."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        f"{name}_{column}": value
        for name, one in scores.items()
        for column, value in (("TotalCE", one.total), ("CE", one.loss), ("PPL", one.perplexity))
    }
    with (folder / f"{step}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time", "step", *named])
        writer.writerow([datetime.now().isoformat(timespec="seconds"), step, *named.values()])
