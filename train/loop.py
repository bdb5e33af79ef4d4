"""The training: steps, checkpoints, and an end that the next job can go on from."""

from __future__ import annotations

import faulthandler
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from converters.durable import lock, stoppable, write_file
from formats import saves
from formats.errors import Interrupted, OutputError, VerificationError
from train import BEGAN
from train.batching import passes, seed_of
from train.checkpoint import Progress, Saver, require_sound
from train.config import Config
from train.distributed import World
from train.engines import Engine, Stepping, open_engine
from train.evaluate import evaluate, open_sets
from train.identity import RECORD, begun, record, small_files
from train.metrics import Judge, open_judge
from train.neftune import noise_for
from train.observe import Log, Say, Step
from train.prepare import Prepared, choose_attention, prepare
from train.profiling import Profiler
from train.rows import Flat, Rows
from train.runs import write_config
from train.schedule import learning_rate
from train.speed import flops_of, memory_of, multiplied, peak_of

RESUME = "RESUME"
"""File in the save folder of a training that is not at its end, or not exported: the next job has something to do."""


class Run(NamedTuple):
    """Everything that a step needs."""

    made: Prepared
    world: World
    engine: Engine
    saver: Saver
    sets: dict[str, Rows]
    judge: Judge | None
    parameters: float
    watch: Watch


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
        from train.engines.trainer import steps
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


def after(run: Run, log: Log | None, progress: Progress, step: Step, seconds: float, say: Say) -> bool:
    """What follows a step: its line, a checkpoint, an evaluation. Whether to leave before the end."""
    config, done, total = run.made.config, progress.step, run.made.total
    if log:
        log.line(progress, total, step, seconds, say)
    if not math.isfinite(step.loss + step.norm):
        run.saver.finish()
        raise VerificationError(
            f"behind step {done} the loss is {step.loss} and the gradient's norm {step.norm}; nothing of it was saved",
            "a lower optim.lr, or a look at the rows: the next run goes on from the last checkpoint",
        )
    if step.written:
        run.saver.finish()
    leaving = (step.stop or _interval(config, done)) and done < total
    if done % config.save.every == 0 or done == total or leaving or step.due:
        run.saver.start(run.engine, progress)
    if run.sets and (done % (config.evaluate.every or config.save.every) == 0 or done == total):
        run.saver.finish()  # whatever ends a long evaluation leaves the checkpoint before it
        most = config.evaluate.max_rows
        scores = evaluate(run.engine.trainee, run.sets, run.world, run.judge, most, run.watch.again)
        if log:
            log.scores(progress, scores, say)
    return leaving


class Watch:
    """Ends a rank that has done nothing for too long, behind a print of what each of its threads waits for."""

    def __init__(self, config: Config) -> None:
        self.seconds = 60 * config.parallel.timeout_minutes

    def __enter__(self) -> Watch:
        return self

    def again(self) -> None:
        """A step begins, or a row of an evaluation."""
        faulthandler.dump_traceback_later(self.seconds, exit=True)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def _interval(config: Config, done: int) -> bool:
    return config.steps.exit_interval is not None and done % config.steps.exit_interval == 0


def late(config: Config) -> bool:
    """Whether this rank's clock says that time is up. Clocks differ: a step sums what ranks think, and all leave."""
    minutes = config.steps.exit_minutes
    return minutes is not None and time.monotonic() - BEGAN > 60 * minutes


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


def ahead(run: Run, batches: Sequence[Flat], stopped: bool) -> Step:
    """A step before it is computed, of all ranks: what it has to compute, and what they want. The rest is to come."""
    ready = run.saver.ready and run.saver.running is not None
    flops = flops_of(batches, run.engine.model.config, run.parameters)
    mine = sum(flat.trained for flat in batches), sum(flat.tokens for flat in batches)
    due = run.world.first and run.saver.due
    trained, tokens, flops, stops, written, saves = run.world.sums(*mine, flops, stopped, ready, due)
    return Step(0.0, 0.0, int(trained), int(tokens), flops, 0, 0.0, stops > 0, written == run.world.ranks, saves > 0)


def loss_of(run: Run, trainee: Any, flat: Flat, seed: tuple[int, ...]) -> torch.Tensor:
    """The sum of the losses of a micro-batch.

    Args:
        run: the settings.
        trainee: the model, wrapped by whatever shards it.
        flat: rows.
        seed: of the noise on embeddings, if there is any: of the training, and the step, rank and micro-batch.
    """
    noise, device = None, run.world.device
    if run.made.config.neftune_alpha:
        noise = noise_for(run.engine.model, flat, run.made.config.neftune_alpha, seed).to(device)
    loss: torch.Tensor = trainee(flat, device, noise)
    return loss


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
