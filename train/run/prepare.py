"""What a training needs before its model is made: rows, their order, and where it begins.

It begins with the model's folder, goes on from its own latest checkpoint, or takes up the last one of the phase before
it, which lies in the same folder at the global step that this one starts from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import RefusedError
from formats.huggingface import folder as huggingface
from train.data.rows import Rows, check_tokenizer, open_rows
from train.distributed import World
from train.engines import ENGINES
from train.model import kernels, lora
from train.model.attention import resolve
from train.model.selfcheck import require_masks, self_check
from train.model.trainee import DTYPES, fitted, open_config
from train.run.checkpoint import Progress, check_same, newest, read_progress, require_places
from train.run.export import check_export
from train.run.identity import changed_files, require_same_config, require_same_tokenizer
from train.settings.batching import Order, Sizes, batch_sizes, make_order
from train.settings.config import Config
from train.settings.effects import check_effect
from train.settings.schedule import check_schedule
from train.start.run_folder import changes
from train.start.start_weights import folder_of


class Prepared(NamedTuple):
    """A training before its first step.

    Attributes:
        config: the settings; `model.path` is a Hugging Face folder by now.
        rows: what it is trained on.
        sizes: the batch equation.
        order: which rows make a step.
        total: steps.
        progress: how far it is.
        start: checkpoint whose weights and moments it takes, None to begin with the model's folder.
        notes: of what will be exported, and of settings that are not those of before.
    """

    config: Config
    rows: Rows
    sizes: Sizes
    order: Order
    total: int
    progress: Progress
    start: Path | None
    notes: tuple[str, ...]


def prepare(config: Config, world: World) -> Prepared:
    """Check the settings against each other, the data and the checkpoints.

    Raises:
        VitruvianError: they contradict each other.
    """
    sizes = batch_sizes(config.batch, world.ranks)
    rows = open_rows(config.data, config.data.train, config.seed)
    order, total = make_order(len(rows), config.seed, config.steps, sizes.size)
    check_schedule(config, total)
    check_effect(config, total)
    kind = ENGINES[config.engine][2]
    fresh = Progress(0, config.steps.iteration_offset, sizes.size, config.seed, rows.digest, 0, order.samples, kind)
    start, progress = world.told(lambda: _start(config, fresh))
    notes = list[str]()
    if start is not None:
        world.told(lambda: lora.require_same_settings(start, config.lora))
    if start is not None and progress.step:
        notes.append(world.told(lambda: changes(config, done=progress.step >= total)))
    if progress.step < total:
        world.told(lambda: require_places(config.save.path, progress, total))
        path = world.told(lambda: folder_of(config, resumed=start is not None))
        if start is not None:
            world.told(lambda: require_same_config(start, path))
            world.told(lambda: require_same_tokenizer(start, path))
            notes.append(world.told(lambda: changed_files(start, path) if progress.step else ""))
        notes += world.told(lambda: [check_export(config, path, rows.documents), huggingface.unread(path)])
        world.told(lambda: check_tokenizer(rows.documents, path))
        rows = fitted(rows, path)
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    return Prepared(config, rows, sizes, order, total, progress, start, tuple(filter(None, notes)))


def choose_attention(config: Config, world: World, rows: int = 1) -> tuple[Any, str, float]:
    """The model's configuration, the attention for it, and how far documents of a row are from documents alone.

    Args:
        config: the settings.
        world: the ranks.
        rows: that are computed as one sequence.

    Raises:
        VitruvianError: its layers cannot keep documents apart, or the attention does not.
    """
    made = open_config(config.model.path)
    require_masks(made, config.data.seq_length, rows)
    dtype = DTYPES[config.model.dtype]
    backend = resolve(config.model.attention, made, world.device, dtype)
    found = kernels.resolve(config.model.kernels, made, world.device) if config.engine == "fsdp" else "torch"
    return made, backend, self_check(made, world.device, backend, dtype, found)


def _start(config: Config, fresh: Progress) -> tuple[Path | None, Progress]:
    """The checkpoint to take up, and how far this run is.

    Raises:
        RefusedError: the settings ask for one that there is not, or is another run's.
    """
    found = newest(config.save.path)
    if found is None:
        if config.init == "resume":
            hint = "--init auto begins where there is none"
            raise RefusedError(f"{config.save.path} has no checkpoint to resume from", hint)
        return None, fresh
    held = read_progress(found)
    if config.init == "finetune" and held.offset != fresh.offset:
        return None, fresh
    if held.engine != fresh.engine:
        raise RefusedError(
            f"{found} was written by the engine {held.engine}",
            f"go on with --engine {held.engine}, or begin with its weights: --model.path {found} --save.path …",
        )
    if held.name == fresh.name:
        return found, fresh
    check_same(held, fresh, found)
    return found, held
