"""Prepare a training before its model is built: its rows, their order, and where it starts.

A training starts from the model folder, resumes from its own latest checkpoint, or continues from the last checkpoint
of the previous phase, which is in the same folder at the global step that this phase starts from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from formats.disk.json_file import read_json
from formats.errors import RefusedError
from formats.huggingface import folder as huggingface
from formats.huggingface.config import from_huggingface
from train.data.rows import Rows, check_tokenizer, open_rows
from train.distributed import World
from train.engines import ENGINES
from train.model import kernels, lora
from train.model.attention import resolve
from train.model.selfcheck import require_masks, require_sharable, self_check
from train.model.tensor_parallel import require_no_dropout
from train.model.trainee import DTYPES, fitted, open_config
from train.run.checkpoint import Progress, check_same, newest, read_progress, require_places, unrecorded
from train.run.export import check_export
from train.run.identity import changed_files, require_same_config, require_same_tokenizer
from train.settings.batching import Order, Sizes, batch_sizes, make_order, mixed
from train.settings.config import Config
from train.settings.effects import check_effect
from train.settings.schedule import check_schedule
from train.settings.splitting import require_divisible
from train.start.run_folder import changes
from train.start.start_adapter import resolved
from train.start.start_moments import Moments, moments_of
from train.start.start_weights import folder_of


class Prepared(NamedTuple):
    """A training before its first step.

    Attributes:
        config: the settings; `model.path` is a Hugging Face folder by now.
        rows: the training data.
        sizes: micro-batch, accumulation and rows per step.
        order: which rows make up each step.
        total: number of steps.
        progress: how far the training has come.
        start: checkpoint of this trainer whose weights and moments are loaded, None to start from the model folder.
        moments: the optimizer moments of `model.path`, with `init: moments`.
        notes: lines to print, on the conversion of the start, the export, and settings that changed since the last job.
    """

    config: Config
    rows: Rows
    sizes: Sizes
    order: Order
    total: int
    progress: Progress
    start: Path | None
    moments: Moments | None
    notes: tuple[str, ...]


def prepare(config: Config, world: World) -> Prepared:
    """Check the settings against each other, the data and the checkpoints.

    Raises:
        VitruvianError: the settings contradict each other, the data or the checkpoint.
    """
    if config.lora is not None:
        config = config.model_copy(update={"lora": resolved(config.lora)})
    sizes = batch_sizes(config.batch, world.readers)
    rows = open_rows(config.data, config.data.train, config.seed)
    order, total = make_order(rows.ends, config.seed, config.data, config.steps, sizes.size)
    check_schedule(config, total)
    check_effect(config, total)
    kind = ENGINES[config.engine][2]
    fresh = Progress(
        step=0,
        offset=config.steps.iteration_offset,
        size=sizes.size,
        seed=config.seed,
        rows=mixed(rows.digest, order.weights),
        tokens=0,
        samples=order.samples,
        engine=kind,
        sidecars=rows.sidecars,
    )
    start, progress = world.from_first(lambda: _start(config, fresh))
    notes, moments = list[str](), None
    if start is not None:
        world.from_first(lambda: lora.require_same_settings(start, config.lora))
    if start is not None and progress.step:
        notes.append(world.from_first(lambda: changes(config, done=progress.step >= total)))
        notes.append(world.from_first(lambda: unrecorded(start)))
    if progress.step < total:
        world.from_first(lambda: require_places(config.save.path, progress, total))
        path, of_conversion = world.from_first(lambda: folder_of(config, resumed=start is not None))
        notes += of_conversion
        if start is not None:
            world.from_first(lambda: require_same_config(start, path))
            world.from_first(lambda: require_same_tokenizer(start, path))
            notes.append(world.from_first(lambda: changed_files(start, path) if progress.step else ""))
        notes += world.from_first(
            lambda: [check_export(config, path, rows.documents), huggingface.unread_pickles_note(path)]
        )
        world.from_first(lambda: check_tokenizer(rows.documents, path))
        rows = fitted(rows, path)
        if start is None and config.init == "moments":
            moments = world.from_first(lambda: moments_of(config, kind))
            notes += moments.notes
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    return Prepared(
        config=config,
        rows=rows,
        sizes=sizes,
        order=order,
        total=total,
        progress=progress,
        start=start,
        moments=moments,
        notes=tuple(dict.fromkeys(filter(None, notes))),
    )


def choose_attention(config: Config, world: World, rows: int = 1) -> tuple[Any, str, float]:
    """The model's configuration, its attention backend, and by how much packed documents differ from unpacked.

    Args:
        config: the settings.
        world: the ranks.
        rows: number of rows that are flattened into one sequence.

    Raises:
        VitruvianError: the model's layers cannot separate packed documents, or the attention backend does not.
    """
    model_config = open_config(config.model.path)
    require_masks(model_config, config.data.seq_length, rows, world.context)
    dtype = DTYPES[config.model.dtype]
    if world.context > 1:
        require_sharable(model_config)
    if world.tensor > 1:
        path = config.model.path / "config.json"
        require_divisible(world.tensor, from_huggingface(read_json(path), {}, str(path)))
        require_no_dropout(model_config)
    backend = resolve(config.model.attention, model_config, world.device, dtype, world.context)
    kernel = "torch"
    if config.engine == "fsdp":
        kernel = kernels.resolve(config.model.kernels, model_config, world.device, config.model.compile)
    return model_config, backend, self_check(model_config, world.device, backend, dtype, kernel, world)


def _start(config: Config, fresh: Progress) -> tuple[Path | None, Progress]:
    """The checkpoint to load, None to start from the model folder, and how far this run has come.

    Raises:
        RefusedError: there is no checkpoint to resume from, or it belongs to another run.
    """
    checkpoint = newest(config.save.path)
    if checkpoint is None:
        if config.init == "resume":
            hint = "--init auto starts a new run where there is none"
            raise RefusedError(f"{config.save.path} has no checkpoint to resume from", hint)
        return None, fresh
    saved = read_progress(checkpoint)
    if config.init == "finetune" and saved.offset != fresh.offset:
        return None, fresh
    if saved.engine != fresh.engine:
        raise RefusedError(
            f"{checkpoint} was written by the engine {saved.engine}",
            f"resume with --engine {saved.engine}, or start from its weights: --model.path {checkpoint} --save.path …",
        )
    if saved.name == fresh.name:
        return checkpoint, fresh
    check_same(saved, fresh, checkpoint)
    return checkpoint, replace(saved, sidecars=fresh.sidecars)
