"""One training step: its counters, its loss, its watchdog, and what follows it."""

from __future__ import annotations

import faulthandler
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from formats.errors import VerificationError
from train import BEGAN
from train.data.rows import Flat, Rows
from train.distributed import World
from train.engines import Engine
from train.model.neftune import noise_for
from train.run.checkpoint import Progress, Saver
from train.run.evaluate import evaluate
from train.run.log import Log, Say, Step
from train.run.metrics import Judge
from train.run.prepare import Prepared
from train.run.throughput import flops_of
from train.settings.config import Config


class Run(NamedTuple):
    """Everything that a step needs."""

    prepared: Prepared
    world: World
    engine: Engine
    saver: Saver
    sets: dict[str, Rows]
    judge: Judge | None
    parameters: float
    watch: Watch


def finish_step(run: Run, log: Log | None, progress: Progress, step: Step, seconds: float, say: Say) -> bool:
    """Log a step, and save and evaluate where they are due. Returns whether to stop before the end."""
    config, done, total = run.prepared.config, progress.step, run.prepared.total
    if log:
        log.line(progress, total, step, seconds, say)
    if not math.isfinite(step.loss + step.norm):
        run.saver.finish()
        raise VerificationError(
            f"after step {done} the loss is {step.loss} and the gradient norm {step.norm}; this step was not saved",
            "lower optim.lr, or look at the rows: the next run resumes from the last checkpoint",
        )
    if step.written:
        run.saver.finish()
    leaving = (step.stop or _interval(config, done)) and done < total
    if done % config.save.every == 0 or done == total or leaving or step.due:
        run.saver.start(run.engine, progress)
    if run.sets and (done % (config.evaluate.every or config.save.every) == 0 or done == total):
        run.saver.finish()  # so that the checkpoint survives if the evaluation is killed
        most = config.evaluate.max_rows
        scores = evaluate(run.engine.trainee, run.sets, run.world, run.judge, most, run.watch.again)
        if log:
            log.scores(progress, scores, say)
    return leaving


class Watch:
    """Watchdog: a rank without progress for `parallel.timeout_minutes` dumps the stacks of its threads and exits."""

    def __init__(self, config: Config) -> None:
        self.seconds = 60 * config.parallel.timeout_minutes

    def __enter__(self) -> Watch:
        return self

    def again(self) -> None:
        """Reset the timer: called at each step, and at each row of an evaluation."""
        faulthandler.dump_traceback_later(self.seconds, exit=True)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def _interval(config: Config, done: int) -> bool:
    return config.steps.exit_interval is not None and done % config.steps.exit_interval == 0


def time_is_up(config: Config) -> bool:
    """Whether `steps.exit_minutes` have passed on this rank. Flags are summed: all ranks stop at the same step."""
    minutes = config.steps.exit_minutes
    return minutes is not None and time.monotonic() - BEGAN > 60 * minutes


def reduce_counts(run: Run, batches: Sequence[Flat], stopped: bool) -> Step:
    """Sum the counters and flags of all ranks before the step is computed; loss, norm, rate and memory follow later."""
    ready = run.saver.ready and run.saver.running is not None
    flops = flops_of(batches, run.engine.model.config, run.parameters)
    mine = sum(flat.trained for flat in batches), sum(flat.tokens for flat in batches)
    due = run.world.first and run.saver.due
    trained, tokens, flops, stops, written, saves = run.world.sums(*mine, flops, stopped, ready, due)
    return Step(
        loss=0.0,
        norm=0.0,
        trained=int(trained),
        tokens=int(tokens),
        flops=flops,
        memory=0,
        rate=0.0,
        stop=stops > 0,
        written=written == run.world.ranks,
        due=saves > 0,
    )


def loss_of(run: Run, trainee: Any, flat: Flat, seed: tuple[int, ...]) -> torch.Tensor:
    """The sum of the losses of a micro-batch.

    Args:
        run: the settings.
        trainee: the model, wrapped by whatever shards it.
        flat: rows.
        seed: for NEFTune's noise, if there is any: the training's seed, and the step, rank and micro-batch.
    """
    noise, device = None, run.world.device
    if run.prepared.config.neftune_alpha:
        noise = noise_for(run.engine.model, flat, run.prepared.config.neftune_alpha, seed).to(device)
    loss: torch.Tensor = trainee(flat, device, noise)
    return loss
