"""The training loop: steps, checkpoints, and a stop from which the next job can resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import cast

import torch

from converters.common.atomic import lock, stoppable, write_file
from formats.errors import Interrupted, OutputError, RefusedError
from train.data.parts import rank_part
from train.distributed import World
from train.engines import Stepping, open_engine
from train.run.best import Best, open_best, write_best
from train.run.checkpoint import Progress, Saver, require_sound
from train.run.evaluate import compared, open_sets, unscored
from train.run.generate import open_prompts
from train.run.identity import begun, record, small_files
from train.run.layer_norms import layer_norms
from train.run.log import Log, Say, Step
from train.run.metrics import open_judge
from train.run.opening_lines import opening_lines
from train.run.prepare import Prepared, choose_attention, prepare
from train.run.profiling import Profiler
from train.run.step import Run, Watch, finish_step, loss_of, reduce_counts, time_is_up
from train.run.throughput import memory_of, multiplied, peak_of
from train.settings.batching import seed_of
from train.settings.config import Config
from train.settings.schedule import learning_rate
from train.start.run_folder import RECORD, write_config

RESUME = "RESUME"
"""Name of the file in the save folder of a run that is not finished or not exported: the next job has work left."""


def train(config: Config, world: World, say: Say) -> Progress:
    """Train until the last step, an exit interval, or a signal.

    Args:
        config: the settings.
        world: the ranks.
        say: prints a line; called on the first rank.

    Returns:
        How far the training has come.

    Raises:
        Interrupted: the run is not finished, and everything is saved.
        VitruvianError: the settings contradict each other, or do not match the data or the checkpoint.
    """
    with _alone(config, world):
        return _train(config, world, say)


@contextmanager
def _alone(config: Config, world: World) -> Iterator[None]:
    """Lock the save folder, so that no other training writes into it.

    Raises:
        OutputError: another training holds the lock.
    """
    save = config.save.path

    def begin() -> None:
        save.mkdir(parents=True, exist_ok=True)
        lock(stack.enter_context((save / ".lock").open("w")).fileno(), save)

    with ExitStack() as stack:
        world.from_first(begin)
        yield


def _train(config: Config, world: World, say: Say) -> Progress:
    prepared = prepare(config, world)
    best = world.from_first(lambda: open_best(config, prepared.progress))
    if best is not None:
        world.from_first(lambda: write_best(config.save.path, best))
    missing = world.from_first(lambda: unscored(config, prepared.progress, prepared.total))
    if missing:
        prepared = prepared._replace(notes=(*prepared.notes, f"{missing[0]}; {missing[1]} makes up for it"))
    if prepared.progress.step >= prepared.total or (best is not None and best.is_over):
        if missing and best is not None and config.export is not None and not config.export.exists():
            raise RefusedError(missing[0], f"{missing[1]}, and the same command again exports the best")
        if world.first:
            after = f"after the last of {prepared.total} steps"
            if best is not None and best.is_over:
                after = f"where the training stopped early; the best is {best}"
            say(f"nothing left to do: {prepared.progress.name} is {after}")
            for note in prepared.notes:
                say(f"note       {note}")
        return prepared.progress
    if config.export is not None and config.export.exists():
        raise OutputError(
            f"{config.export}, where the model is to be exported to, exists", "name a new folder: --export"
        )
    run = _open(prepared, best, world, say)
    log = None
    if world.first:
        log = Log(config, world.ranks, prepared.progress, prepared.total, peak_of(world.device))
        write_config(config, config.save.path)
        write_file(config.save.path / RESUME, f"{prepared.total} steps\n".encode())
    steps = _steps
    if config.engine == "transformers":
        from train.run.trainer_steps import steps
    progress = steps(run, log, say)
    if progress.step < prepared.total and not (best is not None and best.is_over):
        raise Interrupted(
            f"stopped after step {progress.step} of {prepared.total}, saved as {progress.name}",
            "run the same command again to resume",
        )
    return progress


def _steps(run: Run, log: Log | None, say: Say) -> Progress:
    """Train until the last step or until the run has to stop, and save everything. Returns how far it has come."""
    config, total, progress = run.prepared.config, run.prepared.total, run.prepared.progress
    with stoppable() as stopped, Profiler(config, run.world, say) as profiler, run.watch:
        for number in range(progress.step, total):
            run.watch.restart()
            started = time.monotonic()
            step = _step(run, number, stopped() or time_is_up(config))
            progress = replace(progress, step=number + 1, tokens=progress.tokens + step.trained)
            profiler.step()
            if finish_step(run, log, progress, step, time.monotonic() - started, say):
                break
        run.saver.finish()
    return progress


def _open(prepared: Prepared, best: Best | None, world: World, say: Callable[[str], None]) -> Run:
    config = prepared.config
    sets = open_sets(config, world)
    progress, of_sets = compared(sets, prepared.progress)
    prepared = prepared._replace(progress=progress, notes=(*prepared.notes, *filter(None, [of_sets])))
    judge = open_judge(config.evaluate.metrics, config.evaluate.tokenizer or config.model.path, sets)
    model, backend, difference = choose_attention(config, world, prepared.sizes.micro)
    if prepared.start is not None:
        require_sound(prepared.start, world)
    path = config.model.path
    # DeepSpeed restores no frozen weights on another number of ranks, and LoRA saves none
    partial = config.lora is not None or (config.engine == "deepspeed" and bool(config.model.freeze))
    digests, of_start = begun(prepared.start, path, partial, world)
    beside = dict[str, bytes]()
    world.from_first(lambda: beside.update({**small_files(path), RECORD: record(digests)}))
    engine = open_engine(config, model, world, backend)
    continued = prepared.start or (prepared.moments and prepared.moments.path)
    if continued is not None:
        engine.read(continued)
    if world.first:
        attention = f"{backend}, packed documents differ by {difference:.1e} from unpacked ones"
        for line in opening_lines(prepared, sets, engine, world, attention, of_start):
            say(line)
    return Run(
        prepared=prepared,
        world=world,
        engine=engine,
        saver=Saver(config.save, beside, world),
        sets=sets,
        judge=judge,
        parameters=multiplied(engine.model),
        watch=Watch(config),
        best=best,
        prompts=open_prompts(config),
    )


def _step(run: Run, number: int, stopped: bool) -> Step:
    """Do one step on all ranks. Each label has the same weight, whichever rank and micro-batch it is in."""
    prepared, world, engine = run.prepared, run.world, cast("Stepping", run.engine)
    config = prepared.config
    torch.manual_seed(
        seed_of(config.seed, number, world.rank)
    )  # for dropout; a function of the step, so no RNG state has to be saved
    taken = prepared.order.batch(number, prepared.sizes, world.reader)
    batches = [rank_part(prepared.rows.flat(rows), world, config.model.compile) for rows in taken]
    step = reduce_counts(run, batches, stopped)
    losses = torch.zeros((), dtype=torch.float64, device=world.device)  # read once a step: reading waits for the device
    for place, flat in enumerate(batches):
        loss = loss_of(run, engine.trainee, flat, (config.seed, number, world.rank, place))
        # FSDP averages over ranks, and those that split layers have one loss
        engine.backward(loss * (world.ranks / world.tensor / max(1, step.trained)), place == len(batches) - 1)
        losses += loss.detach()
    norms = layer_norms(engine.model, world) if config.log.layer_norms else {}
    rate = learning_rate(config, number, prepared.total)
    norm = engine.step(rate)
    (summed,) = world.sums(float(losses))
    step = step._replace(norm=norm, rate=rate, memory=memory_of(world.device), norms=norms)
    return step._replace(loss=summed / world.tensor / max(1, step.trained))
