"""Evaluates saved checkpoints, without touching the training run that made them.

Weights come from an FSDP2 checkpoint of this trainer, without its optimizer state, or from a Hugging Face folder, on
any number of ranks. Any other checkpoint is converted to a temporary Hugging Face folder. Results are `STEP.csv` in a
folder, like those of tilde-nlp's perplexity tester.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from formats.deepspeed import folders as deepspeed
from formats.errors import RefusedError, SourceError, UsageError, some
from formats.megatron import folders
from train.data.rows import Rows, open_rows
from train.distributed import World
from train.engines.fsdp import read_weights, sharded
from train.model import lora
from train.model.trainee import fill
from train.run.checkpoint import Progress, newest, read_progress, require_sound
from train.run.evaluate import Score, evaluate, open_sets
from train.run.identity import differing, read_settings, require_tied
from train.run.metrics import Judge, open_judge
from train.run.prepare import choose_attention
from train.settings.config import Config
from train.start.run_folder import PREFIX, is_ours, started
from train.start.start_weights import folder_of, is_folder

METADATA = ".metadata"
"""File of DCP checkpoints. A Hugging Face folder converted from a checkpoint has its `.progress`, but not this file."""
STEP = re.compile(r"(?:global_step|iter_)(\d+)")
"""Matches names of checkpoints of this trainer, GPT-NeoX and Megatron."""


class Place(NamedTuple):
    """A checkpoint: its folder, and its progress if this trainer wrote the checkpoint."""

    path: Path
    progress: Progress | None

    @property
    def step(self) -> int | None:
        """The global step, from the progress or the folder's name; None if neither has it."""
        if self.progress is not None:
            return self.progress.offset + self.progress.step
        match = STEP.fullmatch(self.path.name)
        return int(match[1]) if match else None

    @property
    def sharded(self) -> bool:
        """Whether the checkpoint is an FSDP2 checkpoint of this trainer, which ranks read directly."""
        return self.progress is not None and (self.path / METADATA).is_file()


def find(save: Path, name: str) -> Place:
    """A checkpoint by its step or name in a run, by `latest`, or by its path.

    Raises:
        UsageError: there is no such checkpoint, or it belongs to another run.
        SourceError: `latest` names no checkpoint of this trainer although there are some.
    """
    inside = save / (f"{PREFIX}{name}" if name.isdecimal() else name)
    if name == "latest":
        path = _latest(save)
    else:
        numbered = [place.path for place in every(save) if name.isdecimal() and place.step == int(name)]
        path = next(iter(numbered), inside if inside.is_dir() else Path(name))
    if path is None:
        raise UsageError(f"{save} has no checkpoint", "name one: --checkpoint FOLDER")
    if not path.is_dir():
        names = ", ".join(place.path.name for place in every(save)) or "none"
        raise UsageError(f"{inside} is not there", f"checkpoints of {save}: {names}")
    place = _place(started(path))
    if place.progress is not None and not inside_of(save, place):
        raise UsageError(f"{path} is a checkpoint of another run than {save}", f"train eval {path.resolve().parent}")
    return place


def every(save: Path) -> list[Place]:
    """All checkpoints of a run (of this trainer, GPT-NeoX, Megatron), oldest first, including a linked start."""
    folders = [path for path in save.glob("*") if STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(map(_place, folders), key=lambda place: (place.step, place.path.name))


def inside_of(save: Path, place: Place) -> bool:
    """Whether a checkpoint, or a link to one, is in the folder of a run."""
    return place.path.parent.resolve() == save.resolve()


def _place(path: Path) -> Place:
    return Place(path, read_progress(path) if is_ours(path) and not is_folder(path) else None)


def _latest(save: Path) -> Path | None:
    """The newest checkpoint of this trainer; otherwise the latest one that GPT-NeoX or Megatron has recorded."""
    if (path := newest(save)) is not None or not save.is_dir():
        return path
    if deepspeed.detect(save):
        return deepspeed.locate(save, None)[1]
    return folders.locate(save)[1] if (save / folders.TRACKER).is_file() else None


@contextmanager
def readable(place: Place, config: Config, world: World, tell: Callable[[str], None]) -> Iterator[Place]:
    """Yield a checkpoint that ranks can read: the given one, or a temporary Hugging Face folder converted from it.

    `tell` is called on rank 0 with each note on the conversion.

    Raises:
        VitruvianError: the checkpoint cannot be converted.
    """
    if place.sharded or is_folder(place.path):
        yield place
        return
    with ExitStack() as stack:

        def convert() -> Path:
            config.save.path.mkdir(parents=True, exist_ok=True)
            scratch = stack.enter_context(TemporaryDirectory(prefix="folder.", dir=config.save.path.absolute()))
            sections = {
                "model": config.model.model_copy(update={"path": place.path}),
                "save": config.save.model_copy(update={"path": Path(scratch)}),
            }
            folder, notes = folder_of(config.model_copy(update=sections))
            for note in notes:
                tell(note)
            return folder

        yield Place(world.from_first(convert), None)
        world.wait()


def load_weights(place: Place, model: Any, world: World) -> None:
    """Fill a model with the weights of a checkpoint; each rank reads its own shards.

    Raises:
        SourceError: the checkpoint has only adapters.
        VerificationError: the config ties the output head to the embedding, and the files hold another head.
    """
    if (place.path / lora.NOTE).is_file():
        raise SourceError(
            f"{place.path} holds only adapters",
            "train run CONFIG --export OUT merges them into --checkpoint OUT",
        )
    with torch.no_grad():
        if place.sharded:
            require_sound(place.path, world)
            read_weights(model, place.path, world)
        else:
            world.from_first(lambda: require_tied(place.path))
            fill(model, place.path)


@contextmanager
def opened_sets(config: Config, texts: Path | None, world: World, tokenizer: Path) -> Iterator[Mapping[str, Rows]]:
    """Yield the sets to score: the validation sets, or the files of a folder, tokenized into a temporary folder.

    Args:
        config: the settings.
        texts: a folder of `*.jsonl`, records with `text`; each file is a set. All tokens but the first are labels; no
            begin or end token is added.
        world: the ranks, which share the file system of `save.path`.
        tokenizer: file or folder of the tokenizer.

    Raises:
        UsageError: there are no sets.
    """
    if texts is None:
        if not config.data.validation:
            raise UsageError("data.validation names no set", "--data.validation.NAME PREFIX, or --ppl FOLDER")
        yield open_sets(config, world)
        return
    files = sorted(texts.glob("*.jsonl"))
    if not files:
        raise UsageError(f"{texts} has no *.jsonl")
    with ExitStack() as stack:

        def tokenize_texts() -> Path:
            config.save.path.mkdir(parents=True, exist_ok=True)
            scratch = TemporaryDirectory(prefix="texts.", dir=config.save.path.absolute())
            return _tokenize(files, Path(stack.enter_context(scratch)), tokenizer)

        folder = world.from_first(tokenize_texts)
        data = config.data.model_copy(update={"loss": "all", "control_tokens": {}})
        yield {file.stem: open_rows(data, [folder / file.stem], config.seed) for file in files}
        world.wait()


def _tokenize(files: list[Path], folder: Path, tokenizer: Path) -> Path:
    """Tokenize text files into token files of the same names in a folder. Returns the folder."""
    from train.data.tokens.input_ranges import ranges
    from train.data.tokens.tokenize import Request, tokenize
    from train.data.tokens.tokenizers import names_digest, open_vocabulary
    from train.data.tokens.workers import Job

    known = open_vocabulary(tokenizer)
    names = names_digest(known, known.size)
    job = Job(
        tokenizer=known.path,
        digest=known.digest,
        vocabulary=known.size,
        names=names,
        form="text",
        key="text",
        control={},
    )
    for file in files:
        parts, prefix = ranges([file]), folder / file.stem
        tokenize(Request(job=job, parts=parts, prefix=prefix, workers=1, strict=True, quiet=True))
    return folder


def score(
    config: Config, places: Sequence[Place], texts: Path | None, world: World, tell: Callable[[str], None]
) -> Iterator[tuple[Place, Mapping[str, Score]]]:
    """Evaluate checkpoints of one model.

    Args:
        config: the settings; `model`, `data.validation`, `evaluate` and `save.path` are read.
        places: the checkpoints, at least one.
        texts: folder of text files, see `opened_sets`; None for the validation sets.
        world: the ranks.
        tell: called on rank 0 with a note of documents that are left out, or on the conversion of a checkpoint.

    Yields:
        Each checkpoint and its scores.

    Raises:
        VitruvianError: a set or a checkpoint is damaged or does not match the model.
    """
    with ExitStack() as stack:
        evaluator: _Evaluator | None = None
        first: Mapping[str, Any] = {}
        for place in places:
            with readable(place, config, world, tell) as readable_place:
                settings = world.from_first(partial(read_settings, readable_place.path))
                if evaluator is not None and (other := differing(first, settings)):
                    raise RefusedError(
                        f"{place.path} is not of the model that {places[0].path} is of: {some(other, 4)}",
                        f"evaluate it separately: --checkpoint {quote(str(place.path))}",
                    )
                first = settings
                if evaluator is None:
                    evaluator = stack.enter_context(_open_evaluator(config, readable_place.path, texts, world, tell))
                load_weights(readable_place, evaluator.trainee.model, world)
                scores = evaluate(evaluator.trainee, evaluator.sets, world, evaluator.judge, config.evaluate.max_rows)
                evaluator.trainee.reshard()  # FSDP2 leaves the root unsharded; the next checkpoint fills shards
                yield place, scores


class _Evaluator(NamedTuple):
    sets: Mapping[str, Rows]
    judge: Judge | None
    trainee: Any


@contextmanager
def _open_evaluator(
    config: Config, path: Path, texts: Path | None, world: World, tell: Callable[[str], None]
) -> Iterator[_Evaluator]:
    """Yield what all checkpoints share, made from the first of them: the sets, the judge, and a model to fill."""
    tokenizer = config.evaluate.tokenizer or path
    start = config.model.model_copy(update={"path": path})
    config = config.model_copy(update={"model": start, "lora": None})
    with opened_sets(config, texts, world, tokenizer) as sets:
        if world.first:
            for name, rows in sets.items():
                if rows.overlong:
                    tell(f"{name}: {rows.overlong}")
        judge = open_judge(config.evaluate.metrics, tokenizer, sets)
        model_config, backend, _ = choose_attention(config, world)
        yield _Evaluator(sets, judge, sharded(config, model_config, world, backend))


def facts_of(place: Place, scores: Mapping[str, Score]) -> str:
    """The scores as a line of JSON."""
    sets = {
        name: {
            "tokens": score_of_set.tokens,
            "loss": score_of_set.loss,
            "ppl": score_of_set.perplexity,
            **score_of_set.texts,
        }
        for name, score_of_set in scores.items()
    }
    return json.dumps({"checkpoint": str(place.path), "global_step": place.step, "sets": sets})
