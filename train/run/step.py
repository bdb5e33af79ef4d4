"""One training step: its counters, its loss, its watchdog, and the log, checkpoint and evaluation after it."""

from __future__ import annotations

import faulthandler
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from formats.errors import VerificationError
from train import BEGAN
from train.data.rows import Flat, Rows
from train.distributed import World
from train.engines import Engine
from train.model.neftune import noise_for
from train.run.best import Best, score_of, write_best
from train.run.checkpoint import Progress, Saver
from train.run.evaluate import Score, evaluate, is_due
from train.run.generate import Prompts, generate
from train.run.log import Log, Say, Step
from train.run.metrics import Judge
from train.run.prepare import Prepared
from train.run.throughput import flops_of
from train.settings.config import Config
from train.start.run_folder import is_ours


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
    best: Best | None
    prompts: Prompts | None


def finish_step(run: Run, log: Log | None, progress: Progress, step: Step, seconds: float, say: Say) -> bool:
    """Log a step, and save and evaluate where that is due. Returns whether to stop before the last step."""
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
    if is_due(config, done, total):
        run.saver.finish()  # so that the checkpoint survives if the evaluation is killed
        most = config.evaluate.max_rows
        scores = evaluate(run.engine.trainee, run.sets, run.world, run.judge, most, run.watch.restart)
        if log:
            log.scores(progress, scores, say)
        if run.prompts is not None:
            answers = generate(run.engine.trainee, run.prompts, run.world, run.watch.restart)
            if log:
                log.answers(progress, answers, say)
        if run.best is not None:
            return _judged(run, run.best, progress, scores, say) or leaving
    return leaving


def _judged(run: Run, best: Best, progress: Progress, scores: Mapping[str, Score], say: Say) -> bool:
    """Keep the checkpoint of the best evaluation. Returns whether training stops early here."""
    config, step = run.prepared.config, progress.offset + progress.step
    is_best = best.add(step, score_of(best, scores))
    if (is_best or best.is_over) and not is_ours(config.save.path / progress.name):
        run.saver.start(run.engine, progress)
        run.saver.finish()
    if is_best:
        run.world.from_first(lambda: write_best(config.save.path, best))
    if best.is_over and run.world.first:
        say(f"stopped early: {best.stale} evaluations without a better one than {best}")
    return best.is_over


class Watch:
    """Watchdog: a rank without progress for `parallel.timeout_minutes` dumps the stacks of its threads and exits."""

    def __init__(self, config: Config) -> None:
        self.seconds = 60 * config.parallel.timeout_minutes

    def __enter__(self) -> Watch:
        return self

    def restart(self) -> None:
        """Reset the timer: called at each step, and at each row of an evaluation."""
        faulthandler.dump_traceback_later(self.seconds, exit=True)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def _interval(config: Config, done: int) -> bool:
    return config.steps.exit_interval is not None and done % config.steps.exit_interval == 0


def time_is_up(config: Config) -> bool:
    """Whether `steps.exit_minutes` have passed on this rank. Flags are summed, so all ranks stop at the same step."""
    minutes = config.steps.exit_minutes
    return minutes is not None and time.monotonic() - BEGAN > 60 * minutes


def reduce_counts(run: Run, batches: Sequence[Flat], stopped: bool) -> Step:
    """Sum counters and flags over all ranks, before the step; loss, norm, rate and memory are filled in later."""
    ready = run.saver.ready and run.saver.running is not None
    flops = flops_of(batches, run.engine.model.config, run.parameters)
    mine = sum(flat.trained for flat in batches), sum(flat.tokens for flat in batches)
    due = run.world.first and run.saver.due
    trained, tokens, flops, stops, written, saves = run.world.sums(*mine, flops, stopped, ready, due)
    return Step(
        loss=0.0,
        norm=0.0,
        trained=int(trained) // run.world.tensor,
        tokens=int(tokens) // run.world.tensor,
        flops=flops / run.world.tensor,
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
        flat: the rows of the micro-batch.
        seed: of NEFTune's noise, if `neftune_alpha` is set: the training's seed, and the step, rank and micro-batch.
    """
    noise, device = None, run.world.device
    if run.prepared.config.neftune_alpha:
        noise = noise_for(run.engine.model, flat, run.prepared.config.neftune_alpha, seed).to(device)
    loss: torch.Tensor = trainee(flat, device, noise)
    return loss
