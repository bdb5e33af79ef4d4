"""The training: steps, checkpoints, and an end that the next job can go on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import cast

import torch

from converters.common.atomic import lock, stoppable, write_file
from formats.errors import Interrupted, OutputError
from formats.torch_files import saves
from train.distributed import World
from train.engines import Stepping, open_engine
from train.run.checkpoint import Progress, Saver, require_sound
from train.run.evaluate import open_sets
from train.run.identity import begun, record, small_files
from train.run.log import Log, Say, Step
from train.run.metrics import open_judge
from train.run.prepare import Prepared, choose_attention, prepare
from train.run.profiling import Profiler
from train.run.step import Run, Watch, after, ahead, late, loss_of
from train.run.throughput import memory_of, multiplied, peak_of
from train.settings.batching import passes, seed_of
from train.settings.config import Config
from train.settings.schedule import learning_rate
from train.start.run_folder import RECORD, write_config

RESUME = "RESUME"
"""File in the save folder of a training that is not at its end, or not exported: the next job has something to do."""


def train(config: Config, world: World, say: Say) -> Progress:
    """Train until the last step, an exit interval, or a signal.

    Args:
        config: the settings.
        world: the ranks.
        say: prints a line; called on the first rank.

    Returns:
        How far the training is.

    Raises:
        Interrupted: it is not at its end, and everything is saved.
        VitruvianError: the settings contradict themselves, or the data or the checkpoint is not what they say.
    """
    with _alone(config, world):
        return _train(config, world, say)


@contextmanager
def _alone(config: Config, world: World) -> Iterator[None]:
    """Be the only training that writes into a save folder.

    Raises:
        OutputError: another one does.
    """
    save = config.save.path

    def begin() -> None:
        save.mkdir(parents=True, exist_ok=True)
        lock(stack.enter_context((save / ".lock").open("w")).fileno(), save)

    with ExitStack() as stack:
        world.told(begin)
        yield


def _train(config: Config, world: World, say: Say) -> Progress:
    made = prepare(config, world)
    if made.progress.step >= made.total:
        if world.first:
            say(f"nothing left to do: {made.progress.name} is after the last of {made.total} steps")
            for note in made.notes:
                say(f"note       {note}")
        return made.progress
    if config.export is not None and config.export.exists():
        raise OutputError(
            f"{config.export}, where the model is to be exported to, exists", "name a new folder: --export"
        )
    run = _open(made, world, say)
    log = None
    if world.first:
        log = Log(config, world.ranks, made.progress, made.total, peak_of(world.device))
        write_config(config, config.save.path)
        write_file(config.save.path / RESUME, f"{made.total} steps\n".encode())
    steps = _steps
    if config.engine == "transformers":
        from train.run.trainer_steps import steps
    progress = steps(run, log, say)
    if progress.step < made.total:
        raise Interrupted(
            f"stopped behind step {progress.step} of {made.total}, saved as {progress.name}",
            "run the same command again to go on",
        )
    return progress


def _steps(run: Run, log: Log | None, say: Say) -> Progress:
    """The steps of a run, to its end or until it has to leave; everything is saved."""
    config, total, progress = run.made.config, run.made.total, run.made.progress
    with stoppable() as stopped, Profiler(config, run.world, say) as profiler, run.watch:
        for number in range(progress.step, total):
            run.watch.again()
            started = time.monotonic()
            step = _step(run, number, stopped() or late(config))
            progress = replace(progress, step=number + 1, tokens=progress.tokens + step.trained)
            profiler.step()
            if after(run, log, progress, step, time.monotonic() - started, say):
                break
        run.saver.finish()
    return progress


def _open(made: Prepared, world: World, say: Callable[[str], None]) -> Run:
    config, rows = made.config, made.rows
    sets = open_sets(config, world)
    judge = open_judge(config.evaluate.metrics, config.evaluate.tokenizer or config.model.path, sets)
    model, backend, apart = choose_attention(config, world, made.sizes.micro)
    if made.start is not None:
        require_sound(made.start, world)
    path = config.model.path
    digests, of_start = begun(made.start, path, config.lora is not None, world)
    beside = dict[str, bytes]()
    world.told(lambda: beside.update({**small_files(path), RECORD: record(digests)}))
    engine = open_engine(config, model, world, backend)
    if made.start is not None:
        engine.read(made.start)
    if world.first:
        count = sum(plan.counts["tokens"] for plan in rows.plans)
        packing, capacity = rows.plans[0].algorithm, rows.plans[0].capacity
        say(f"rows       {len(rows)} of {count} tokens, {packing}, {100 * count / (len(rows) * capacity):.2f} % full")
        for name, one in {"data.train": rows, **sets}.items():
            if one.overlong:
                say(f"note       {name}: {one.overlong}")
        if made.start is not None and saves.recorded(made.start) is None:
            say(f"note       {made.start} has no {saves.RECORD}: that its files are of one save, nothing tells")
        for note in [*made.notes, *filter(None, [of_start])]:
            say(f"note       {note}")
        if told := passes(len(rows), config.steps, made.sizes.size):
            say(f"note       {told}")
        say(f"batch      {made.sizes}")
        say(f"steps      {made.total}, from global step {made.progress.offset + made.progress.step + 1}")
        say(f"attention  {backend}, packed documents differ by {apart:.1e} from documents alone")
        say(f"kernels    {engine.kernels}")
        say(f"weights    {made.start or config.model.path}")
        if config.lora is not None:
            counts = [(one.numel(), one.requires_grad) for one in engine.model.parameters()]
            trained = sum(count for count, wanted in counts if wanted)
            say(f"adapters   {trained:,} of {sum(count for count, _ in counts):,} parameters are trained")
    saver = Saver(config.save, beside, world)
    return Run(made, world, engine, saver, sets, judge, multiplied(engine.model), Watch(config))


def _step(run: Run, number: int, stopped: bool) -> Step:
    """One step of all ranks. A token counts the same on whichever rank and in whichever micro-batch it is."""
    made, world, engine = run.made, run.world, cast("Stepping", run.engine)
    config = made.config
    torch.manual_seed(seed_of(config.seed, number, world.rank))  # dropout: of the step, so nothing has to be saved
    batches = [made.rows.flat(rows) for rows in made.order.batch(number, made.sizes, world.rank)]
    step = ahead(run, batches, stopped)
    losses = torch.zeros((), dtype=torch.float64, device=world.device)  # read once: that waits for the device
    for place, flat in enumerate(batches):
        loss = loss_of(run, engine.trainee, flat, (config.seed, number, world.rank, place))
        engine.backward(loss * (world.ranks / max(1, step.trained)), place == len(batches) - 1)
        losses += loss.detach()
    rate = learning_rate(config, number, made.total)
    norm = engine.step(rate)
    (summed,) = world.sums(float(losses))
    return step._replace(loss=summed / max(1, step.trained), norm=norm, rate=rate, memory=memory_of(world.device))
