"""Evaluations of checkpoints that lie on disk. The training that made them is left alone.

Weights come from a checkpoint of this trainer, without its optimizer, or from a Hugging Face folder, on any number of
ranks. Results are `STEP.csv` in a folder, as the users' perplexity tester leaves them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from formats.errors import SourceError, UsageError
from train import lora
from train.checkpoint import Progress, newest, ours, read_progress
from train.config import Config
from train.distributed import World
from train.engines.fsdp import read_weights, sharded
from train.evaluate import Score, evaluate, open_sets
from train.metrics import open_judge
from train.model import fill
from train.prepare import choose_attention
from train.rows import Rows, open_rows
from train.runs import NOTE, PREFIX
from train.source import MAKE, is_folder

METADATA = ".metadata"
"""What DCP leaves. A folder that was converted from a checkpoint has its note, but not this."""


class Place(NamedTuple):
    """A checkpoint: its folder, and how far the training was; None for a Hugging Face folder."""

    path: Path
    progress: Progress | None

    @property
    def step(self) -> int | None:
        """The global step."""
        return None if self.progress is None else self.progress.offset + self.progress.step


def find(save: Path, wanted: str) -> Place:
    """A checkpoint by its number or name in a run, `latest`, or the path of any.

    Raises:
        UsageError: there is none, or it is another run's.
        SourceError: it is neither of this trainer's FSDP2 nor of Hugging Face.
    """
    inside = save / (f"{PREFIX}{wanted}" if wanted.isdecimal() else wanted)
    path = newest(save) if wanted == "latest" else inside if inside.is_dir() else Path(wanted)
    if path is None:
        raise UsageError(f"{save} has no checkpoint of this trainer", "name one: --checkpoint FOLDER")
    if not path.is_dir():
        held = ", ".join(place.path.name for place in every(save)) or "none"
        raise UsageError(f"{inside} is not there", f"checkpoints of {save}: {held}")
    home = path.resolve().parent
    if _ours(path):
        if home != save.resolve():
            raise UsageError(f"{path} is a checkpoint of another run than {save}", f"train eval {home}")
        return Place(path, read_progress(path))
    if not is_folder(path):
        raise SourceError(
            f"{path} is neither a checkpoint that FSDP2 wrote here nor a Hugging Face folder",
            MAKE,
        )
    return Place(path, None)


def every(save: Path) -> list[Place]:
    """All complete checkpoints of a run, the oldest first."""
    return [Place(folder, read_progress(folder)) for folder in ours(save) if _ours(folder)]


def _ours(path: Path) -> bool:
    return (path / NOTE).is_file() and (path / METADATA).is_file()


def load_weights(place: Place, model: Any, world: World) -> None:
    """Fill a model, each rank its own pieces.

    Raises:
        SourceError: the checkpoint holds adapters alone.
    """
    if (place.path / lora.NOTE).is_file():
        raise SourceError(
            f"{place.path} holds adapters alone",
            "train run CONFIG --export OUT merges them into --checkpoint OUT",
        )
    with torch.no_grad():
        if place.progress is not None:
            read_weights(model, place.path, world)
        else:
            fill(model, place.path)


@contextmanager
def opened_sets(config: Config, texts: Path | None, world: World, tokenizer: Path) -> Iterator[Mapping[str, Rows]]:
    """The sets to score: the validation sets, or the files of a folder, tokenized for as long as they are needed.

    Args:
        config: `data`.
        texts: a folder of `*.jsonl`, records with `text`; each file is a set. All tokens but the first are labels, and
            nothing is put before or behind a text.
        world: the ranks, which all see `save.path`.
        tokenizer: its file or folder.

    Raises:
        UsageError: there are no sets.
    """
    if texts is None:
        if not config.data.validation:
            raise UsageError("data.validation names no set", "--data.validation.NAME PREFIX, or --ppl FOLDER")
        yield open_sets(config)
        return
    files = sorted(texts.glob("*.jsonl"))
    if not files:
        raise UsageError(f"{texts} has no *.jsonl")
    with ExitStack() as stack:

        def made() -> Path:
            config.save.path.mkdir(parents=True, exist_ok=True)
            scratch = TemporaryDirectory(prefix="texts.", dir=config.save.path.absolute())
            return _tokenize(files, Path(stack.enter_context(scratch)), tokenizer)

        folder = world.told(made)
        data = config.data.model_copy(update={"loss": "all", "control_tokens": {}})
        yield {file.stem: open_rows(data, [folder / file.stem], config.seed) for file in files}
        world.wait()


def _tokenize(files: list[Path], folder: Path, tokenizer: Path) -> Path:
    """Write token files, named as the texts are, into a folder, and give it."""
    from train.data.inputs import ranges
    from train.data.tokenize import Request, tokenize
    from train.data.vocabulary import open_vocabulary
    from train.data.workers import Job

    known = open_vocabulary(tokenizer)
    job = Job(known.path, known.digest, known.size, "text", "text", {}, None, None, None)
    for file in files:
        tokenize(Request(job, ranges([file]), folder / file.stem, workers=1, strict=True, quiet=True))
    return folder


def score(
    config: Config, places: Sequence[Place], texts: Path | None, world: World, tell: Callable[[str], None]
) -> Iterator[tuple[Place, Mapping[str, Score]]]:
    """Evaluate checkpoints of one model.

    Args:
        config: `model`, `data.validation` and `evaluate`.
        places: the checkpoints, at least one.
        texts: see `opened_sets`.
        world: the ranks.
        tell: hears of documents that are left out, on the first rank.

    Yields:
        Each checkpoint and what it got.

    Raises:
        VitruvianError: a set or a checkpoint is not what it should be.
    """
    tokenizer = config.evaluate.tokenizer or places[0].path
    with opened_sets(config, texts, world, tokenizer) as sets:
        if world.first:
            for name, rows in sets.items():
                if rows.overlong:
                    tell(f"{name}: {rows.overlong}")
        judge = open_judge(config.evaluate.metrics, tokenizer, sets)
        start = config.model.model_copy(update={"path": places[0].path})
        config = config.model_copy(update={"model": start, "lora": None})
        made, backend, _ = choose_attention(config, world)
        trainee = sharded(config, made, world, backend)
        for place in places:
            load_weights(place, trainee.model, world)
            yield place, evaluate(trainee, sets, world, judge, config.evaluate.max_rows)


def facts_of(place: Place, scores: Mapping[str, Score]) -> str:
    """A line for programs."""
    sets = {
        name: {"tokens": one.tokens, "loss": one.loss, "ppl": one.perplexity, **one.texts}
        for name, one in scores.items()
    }
    return json.dumps({"checkpoint": str(place.path), "global_step": place.step, "sets": sets})
