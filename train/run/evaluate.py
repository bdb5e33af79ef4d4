"""Perplexity, ROUGE and BLEU of named sets: exact, and the same on any number of ranks.

The loss of a set is the sum over all its labels divided by their number; both are summed over ranks before the
division, and so are the counts of `metrics.py`. No row is counted twice: a rank that has none left computes an empty
one, because all ranks have to take part in every forward pass.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch.distributed.fsdp import FSDPModule

from converters.common.atomic import write_file
from formats.errors import RefusedError
from train.data.parts import rank_part
from train.data.rows import Rows, check_tokenizer, open_rows
from train.distributed import World
from train.model.context import gathered
from train.model.trainee import Trainee, fitted
from train.run.checkpoint import Progress
from train.run.metrics import Judge
from train.settings.config import Config
from train.start.run_folder import EVALUATIONS, lines_of

CSV = "perplexity"
"""Name of the folder in the run folder that has a CSV file for each evaluated step."""


class Score(NamedTuple):
    """The scores of a validation set.

    Attributes:
        total: sum of the losses of the set's labels.
        tokens: number of labels.
        texts: ROUGE and BLEU by name, where `evaluate.metrics` asks for them.
    """

    total: float
    tokens: int
    texts: Mapping[str, float] = MappingProxyType({})

    @property
    def loss(self) -> float:
        """Mean loss over labels."""
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def open_sets(config: Config, world: World) -> dict[str, Rows]:
    """The rows of each validation set by name; `config.model.path` is a Hugging Face folder by now.

    Raises:
        RefusedError: a set was made with another tokenizer.
    """
    sets = {
        name: fitted(open_rows(config.data, [path], config.seed, name), config.model.path)
        for name, path in config.data.validation.items()
    }
    world.from_first(
        lambda: check_tokenizer(
            [documents for rows in sets.values() for documents in rows.documents], config.model.path
        )
    )
    return sets


def compared(sets: Mapping[str, Rows], progress: Progress) -> tuple[Progress, str]:
    """The progress with the digest of the validation sets now, and a note if it was of others; empty if it was not."""
    content = {name: [rows.digest, rows.sidecars] for name, rows in sets.items()}
    digest = blake3(json.dumps(content, sort_keys=True).encode()).hexdigest() if content else ""
    note = (
        f"data.validation has other rows or masks than at {progress.name}: scores until there, which evaluate.best and "
        "evaluate.patience count too, are not comparable with later ones"
    )
    return replace(progress, sets=digest), note if progress.sets not in ("", digest) else ""


def evaluate(
    trainee: Trainee,
    sets: Mapping[str, Rows],
    world: World,
    judge: Judge | None = None,
    most: int | None = None,
    alive: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Score every set with the current weights. Collective: all ranks call it.

    Args:
        trainee: the model.
        sets: rows by name.
        world: the ranks.
        judge: computes ROUGE and BLEU; None for perplexity only.
        most: maximum of rows a set, None for all.
        alive: called before each row, to reset the watchdog.

    Raises:
        RefusedError: no token of a set is trained.
    """
    trainee.eval()
    scores = {}
    with torch.no_grad():
        for name, rows in sets.items():
            sums = np.zeros(2 if judge is None else 2 + len(judge.nothing))
            chosen = _spread(len(rows), most)
            for first in range(0, len(chosen), world.readers):
                alive()
                flat = rows.flat(chosen[first + world.reader : first + world.reader + 1])
                part = rank_part(flat, world)
                if judge is None:
                    loss = trainee(part, world.device)
                else:
                    predicted = torch.zeros(len(part.labels), dtype=torch.int64, device=world.device)
                    loss = trainee(part, world.device, predicted=predicted)
                    if part.keys is not None:
                        predicted = gathered(predicted, world.sharing)[: len(flat.labels)]
                    if world.part == 0:
                        sums[2:] += judge.sums(flat, predicted.cpu().numpy())
                sums[:2] += float(loss), part.trained
            total, tokens, *texts = (value / world.tensor for value in world.sums(*sums.tolist()))
            if not tokens:
                raise RefusedError(
                    f"none of {len(chosen)} rows of data.validation.{name} has a token that is trained, so that it has "
                    "no loss",
                    "leave the set out, or correct its masks",
                )
            scores[name] = Score(total, int(tokens), {} if judge is None else judge.scores(texts))
    back_to_training(trainee)
    return scores


def back_to_training(trainee: Trainee) -> None:
    """Return to training mode, and free the weights that FSDP2 leaves gathered without a backward pass."""
    trainee.train()
    for module in trainee.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _spread(rows: int, most: int | None) -> Sequence[int]:
    """Numbers of at most `most` rows, evenly spread: a packed set is sorted by the longest document of a row."""
    return range(rows) if most is None or most >= rows else [place * rows // most for place in range(most)]


def line_of(step: int | None, scores: Mapping[str, Score]) -> str:
    """The log line of an evaluation, with the metric names of ControlLLM's logs, and a global step if there is one."""
    parts = []
    for name, score in scores.items():
        metrics = {"ppl": score.perplexity, "epoch_loss": score.loss} | dict(score.texts)
        parts.append(f"{name}: " + " ".join(f"eval_{key}={value:.6g}" for key, value in metrics.items()))
    return ("" if step is None else f"global_step={step} ") + ", ".join(parts)


def record_of(scores: Mapping[str, Score]) -> dict[str, float]:
    """The metrics of all sets as the keys and values of a line of `evaluations.jsonl`."""
    return {
        f"{name}_{key}": value
        for name, score in scores.items()
        for key, value in {"loss": score.loss, **score.texts}.items()
    }


def write_scores(save: Path, progress: Progress, scores: Mapping[str, Score]) -> str:
    """Write the evaluation of a checkpoint into its run folder, in the place where the training itself writes it.

    Returns:
        A note on other scores of that step that are replaced; empty if there are none.
    """
    step, path = progress.offset + progress.step, save / EVALUATIONS
    records = {record["global_step"]: record for record in lines_of(path)}
    before, now = records.get(step, {}), record_of(scores)
    records[step] = {"step": progress.step, "global_step": step} | now
    write_file(path, "".join(json.dumps(records[place]) + "\n" for place in sorted(records)).encode())
    write_csv(save / CSV, step, scores)
    other = [name for name in now.keys() & before.keys() if not math.isclose(before[name], now[name], rel_tol=1e-4)]
    name = min(other, default="")
    return (
        f"{path} had another {name} of global step {step}, {before[name]:.6g}, now {now[name]:.6g}: evaluate.best and "
        "evaluate.patience compare the new one when the training resumes"
        if other
        else ""
    )


def is_due(config: Config, done: int, total: int) -> bool:
    """Whether a run evaluates its validation sets after a number of its steps."""
    return bool(config.data.validation) and (done % (config.evaluate.every or config.save.every) == 0 or done == total)


def unscored(config: Config, progress: Progress, total: int) -> tuple[str, str] | None:
    """A note on a checkpoint whose evaluation was due and is not recorded, as of a job that was killed in it.

    Returns:
        The note, and the command that makes up for it; None if the evaluation is recorded, or was not due.
    """
    step = progress.offset + progress.step
    known = {record["global_step"] for record in lines_of(config.save.path / EVALUATIONS)}
    if not progress.step or step in known or not is_due(config, progress.step, total):
        return None
    return (
        f"the evaluation of {progress.name} was due and is not in {EVALUATIONS}: evaluate.best and evaluate.patience "
        "do not count it",
        f"train eval {quote(str(config.save.path))} --checkpoint {step}",
    )


def write_csv(folder: Path, step: int, scores: Mapping[str, Score]) -> None:
    """Write `STEP.csv`, with the columns of the users' perplexity tester: total loss, mean loss, perplexity per set.

    The columns of a set continue with ROUGE and BLEU, where `evaluate.metrics` asks for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    columns = {
        f"{name}_{column}": value
        for name, score in scores.items()
        for column, value in {"TotalCE": score.total, "CE": score.loss, "PPL": score.perplexity, **score.texts}.items()
    }
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["time", "step", *columns])
    writer.writerow([datetime.now().isoformat(timespec="seconds"), step, *columns.values()])
    write_file(folder / f"{step}.csv", text.getvalue().encode())
