"""The training: steps, checkpoints, and an end that the next job can go on from."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from converters.durable import stoppable, write_file
from formats.errors import Interrupted
from train.checkpoint import Progress, Saver
from train.config import Config, write_config
from train.distributed import World
from train.engines import Engine, open_engine
from train.evaluate import evaluate, open_sets
from train.neftune import noise_for
from train.observe import Log, Say, Step
from train.prepare import Prepared, choose_attention, prepare
from train.profiling import Profiler
from train.rows import Rows
from train.schedule import learning_rate
from train.speed import flops_of, memory_of, multiplied, peak_of

RESUME = "RESUME"
"""File in the save folder of a training that is not at its end: the next job has something to do."""


class Run(NamedTuple):
    """Everything that a step needs."""

    made: Prepared
    world: World
    engine: Engine
    saver: Saver
    sets: dict[str, Rows]
    parameters: float


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
    made = prepare(config, world)
    if made.progress.step >= made.total:
        if world.first:
            say(f"nothing left to do: {made.progress.name} is behind the last of {made.total} steps")
        return made.progress
    run = _open(made, world, say)
    log = None
    if world.first:
        log = Log(config, world.ranks, made.progress, peak_of(world.device))
        write_config(config, config.save.path)
        write_file(config.save.path / RESUME, f"{made.total} steps\n".encode())
    progress = _steps(run, log, say)
    if world.first:
        (config.save.path / RESUME).unlink()
    return progress


def _steps(run: Run, log: Log | None, say: Say) -> Progress:
    config, world, total, progress = run.made.config, run.world, run.made.total, run.made.progress
    began = time.monotonic()
    with stoppable() as stopped, Profiler(config, world, say) as profiler, _Watch(config) as watch:
        for number in range(progress.step, total):
            watch.again()
            started = time.monotonic()
            step = _step(run, number, stopped() or _late(config, time.monotonic() - began))
            done = number + 1
            progress = replace(progress, step=done, tokens=progress.tokens + step.trained)
            profiler.step()
            if log:
                log.line(progress, total, step, time.monotonic() - started, say)
            if step.written:
                run.saver.finish()
            leaving = (step.stop or _interval(config, done)) and done < total
            if done % config.save.every == 0 or done == total or leaving:
                run.saver.start(run.engine, progress)
            if run.sets and (done % (config.evaluate.every or config.save.every) == 0 or done == total):
                scores = evaluate(run.engine.trainee, run.sets, world)
                if log:
                    log.scores(progress, scores, say)
            if leaving:
                run.saver.finish()
                raise Interrupted(
                    f"stopped behind step {done} of {total}, saved as {progress.name}",
                    "run the same command again to go on",
                )
        run.saver.finish()
    return progress


class _Watch:
    """Ends a rank that has made no step for too long, behind a print of what each of its threads waits for."""

    def __init__(self, config: Config) -> None:
        self.seconds = 60 * config.parallel.timeout_minutes
        self.before = signal.getsignal(signal.SIGUSR1)

    def __enter__(self) -> _Watch:
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGTERM))  # Slurm's, before the time is up
        return self

    def again(self) -> None:
        """A step begins."""
        faulthandler.dump_traceback_later(self.seconds, exit=True)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGUSR1, self.before)


def _interval(config: Config, done: int) -> bool:
    return config.steps.exit_interval is not None and done % config.steps.exit_interval == 0


def _late(config: Config, seconds: float) -> bool:
    """Whether this rank's clock says that time is up. Clocks differ: a step sums what ranks think, and all leave."""
    return config.steps.exit_minutes is not None and seconds > 60 * config.steps.exit_minutes


def _open(made: Prepared, world: World, say: Callable[[str], None]) -> Run:
    config, rows = made.config, made.rows
    model, backend, apart = choose_attention(config, world)
    engine = open_engine(config, model, world, backend)
    if made.start is not None:
        engine.read(made.start)
    if world.first:
        count = sum(plan.counts["tokens"] for plan in rows.plans)
        packing, capacity = config.data.packing, rows.plans[0].capacity
        say(f"rows       {len(rows)} of {count} tokens, {packing}, {100 * count / (len(rows) * capacity):.2f} % full")
        say(f"batch      {made.sizes}")
        say(f"steps      {made.total}, from global step {made.progress.offset + made.progress.step + 1}")
        say(f"attention  {backend}, packed documents differ by {apart:.1e} from documents alone")
        say(f"kernels    {engine.kernels}")
        say(f"weights    {made.start or config.model.path}")
        if config.lora is not None:
            counts = [(one.numel(), one.requires_grad) for one in engine.model.parameters()]
            trained = sum(count for count, wanted in counts if wanted)
            say(f"adapters   {trained:,} of {sum(count for count, _ in counts):,} parameters are trained")
    saver = Saver(config.save.path, config.model.path, config.save.keep, world)
    return Run(made, world, engine, saver, open_sets(config), multiplied(engine.model))


def _step(run: Run, number: int, stopped: bool) -> Step:
    """One step of all ranks. A token counts the same on whichever rank and in whichever micro-batch it is."""
    made, world, engine = run.made, run.world, run.engine
    config = made.config
    torch.manual_seed(_seed(config.seed, number, world.rank))  # dropout: of the step alone, so nothing has to be saved
    batches = [made.rows.flat(rows) for rows in made.order.batch(number, made.sizes, world.rank)]
    ready = run.saver.ready and run.saver.running is not None
    flops = flops_of(batches, engine.model.config, run.parameters)
    mine = sum(flat.trained for flat in batches), sum(len(flat.input_ids) for flat in batches)
    trained, tokens, flops, stops, written = world.sums(*mine, flops, stopped, ready)
    losses = 0.0
    for place, flat in enumerate(batches):
        noise = None
        if config.neftune_alpha:
            noise = noise_for(engine.model, flat, config.neftune_alpha, (config.seed, number, world.rank, place))
        loss = engine.trainee(flat, world.device, None if noise is None else noise.to(world.device))
        engine.backward(loss * (world.ranks / max(1.0, trained)), place == len(batches) - 1)
        losses += float(loss.detach())
    rate = learning_rate(config, number, made.total)
    norm = engine.step(rate)
    (total,) = world.sums(losses)
    return Step(
        total / max(1.0, trained), norm, int(trained), int(tokens), flops, memory_of(world.device), rate, stops > 0,
        written == world.ranks,
    )  # fmt: skip


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
