"""The training: steps, numbers, checkpoints, and an end that the next job can go on from."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from converters.durable import stoppable
from formats.errors import Interrupted, RefusedError, UsageError
from train.attention import require_masks, resolve, self_check
from train.batching import Order, Sizes, batch_sizes, make_order
from train.checkpoint import Progress, Saver, check_same, load, newest, read_progress
from train.config import Config
from train.distributed import World
from train.evaluate import Score, evaluate, line_of, open_sets, write_csv
from train.model import DTYPES, Trainee, build
from train.neftune import noise_for
from train.rows import Rows, open_rows
from train.schedule import check_schedule, learning_rate


class Run(NamedTuple):
    """Everything that a step needs."""

    config: Config
    world: World
    rows: Rows
    sizes: Sizes
    order: Order
    total: int
    trainee: Trainee
    optimizer: torch.optim.AdamW
    saver: Saver
    sets: dict[str, Rows]


class Step(NamedTuple):
    """What a step was."""

    loss: float
    norm: float
    tokens: int
    stop: bool
    written: bool


def train(config: Config, world: World, say: Callable[[str], None]) -> Progress:
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
    run, progress = _prepare(config, world, say)
    log = _Log(config, world, progress.step)
    began = time.monotonic()
    with stoppable() as stopped:
        before = signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGTERM))
        try:
            for number in range(progress.step, run.total):
                started = time.monotonic()
                step = _step(run, number, stopped() or _late(config, time.monotonic() - began))
                done = number + 1
                progress = replace(progress, step=done, tokens=progress.tokens + step.tokens)
                log.line(run, progress, step, time.monotonic() - started, say)
                if step.written:
                    run.saver.finish()
                leaving = (step.stop or _interval(config, done)) and done < run.total
                if done % config.save.every == 0 or done == run.total or leaving:
                    run.saver.start(run.trainee.model, run.optimizer, progress)
                if run.sets and (done % (config.evaluate.every or config.save.every) == 0 or done == run.total):
                    log.scores(progress, evaluate(run.trainee, run.sets, world), say)
                if leaving:
                    run.saver.finish()
                    raise Interrupted(
                        f"stopped behind step {done} of {run.total}, saved as {progress.name}",
                        "run the same command again to go on",
                    )
            run.saver.finish()
        finally:
            signal.signal(signal.SIGUSR1, before)
    return progress


def _interval(config: Config, done: int) -> bool:
    return config.steps.exit_interval is not None and done % config.steps.exit_interval == 0


def _late(config: Config, seconds: float) -> bool:
    """Whether this rank's clock says that time is up. Clocks differ: a step sums what ranks think, and all leave."""
    return config.steps.exit_minutes is not None and seconds > 60 * config.steps.exit_minutes


def _prepare(config: Config, world: World, say: Callable[[str], None]) -> tuple[Run, Progress]:
    from transformers import AutoConfig

    check_schedule(config)
    sizes = batch_sizes(config.batch, world.ranks)
    rows = open_rows(config.data, config.data.train, config.seed)
    order, total = make_order(len(rows), config.seed, config.steps, sizes.size)
    progress = Progress(0, config.steps.iteration_offset, sizes.size, config.seed, rows.digest, 0)
    start = world.told(_start(config, progress) if world.first else None)
    if not (config.model.path / "config.json").is_file():
        raise UsageError(
            f"{config.model.path} is no Hugging Face folder",
            "make one of another checkpoint: convert fsdp2hf, megatron2hf or neox2hf CHECKPOINT FOLDER",
        )
    made: Any = AutoConfig.from_pretrained(config.model.path)
    require_masks(made)
    backend = resolve(config.model.attention, world.device)
    apart = self_check(made, world.device, backend, DTYPES[config.model.dtype])
    trainee = build(config, made, world, backend)
    optimizer = _optimizer(config, trainee, world)
    saver = Saver(config.save.path, config.model.path, config.save.keep, world)
    if start is not None:
        progress = load(Path(start), trainee.model, optimizer, world)
    if world.first:
        count = sum(plan.counts["tokens"] for plan in rows.plans)
        packing, capacity = config.data.packing, rows.plans[0].capacity
        say(f"rows       {len(rows)} with {count} tokens, {packing}, {capacity} at most")
        say(f"batch      {sizes}")
        say(f"steps      {total}, from global step {config.steps.iteration_offset + progress.step + 1}")
        say(f"attention  {backend}, packed documents differ by {apart:.1e} from documents alone")
        say(f"weights    {start or config.model.path}")
    return Run(config, world, rows, sizes, order, total, trainee, optimizer, saver, open_sets(config)), progress


def _start(config: Config, now: Progress) -> str | None:
    """The checkpoint to go on from, None to begin with the model's folder.

    Raises:
        RefusedError: the settings ask for one that there is not, or is another run's.
    """
    found = newest(config.save.path)
    if config.init == "finetune" or (config.init == "auto" and found is None):
        if found is not None and read_progress(found).offset == now.offset:
            raise RefusedError(
                f"{config.save.path} has a checkpoint of this run, {found.name}, and init is finetune",
                "go on with --init auto, or take another save.path",
            )
        return None
    if found is None:
        raise RefusedError(
            f"{config.save.path} has no checkpoint to resume from", "--init auto begins where there is none"
        )
    check_same(read_progress(found), now, found)
    return str(found)


def _optimizer(config: Config, trainee: Trainee, world: World) -> torch.optim.AdamW:
    """AdamW, whose weight decay leaves vectors (norms and biases) alone."""
    held = [tensor for tensor in trainee.parameters() if tensor.requires_grad]
    groups = [
        {"params": [one for one in held if one.ndim > 1], "weight_decay": config.optim.weight_decay},
        {"params": [one for one in held if one.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.optim.lr, betas=config.optim.betas,
        eps=config.optim.eps, fused=world.device.type == "cuda",
    )  # fmt: skip


def _step(run: Run, number: int, stopped: bool) -> Step:
    """One step of all ranks. A token counts the same on whichever rank and in whichever micro-batch it is."""
    config, world, trainee, optimizer = run.config, run.world, run.trainee, run.optimizer
    batches = [run.rows.flat(rows) for rows in run.order.batch(number, run.sizes, world.rank)]
    mine = sum(flat.trained for flat in batches)
    tokens, stops, written = world.sums(mine, stopped, run.saver.ready and run.saver.running is not None)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, number, run.total)
    losses = 0.0
    for place, flat in enumerate(batches):
        trainee.set_requires_gradient_sync(place == len(batches) - 1)  # type: ignore[operator]
        noise = None
        if config.neftune_alpha:
            noise = noise_for(run.trainee.model, flat, config.neftune_alpha, (config.seed, number, world.rank, place))
        loss = trainee(flat, world.device, None if noise is None else noise.to(world.device))
        (loss * (world.ranks / max(1.0, tokens))).backward()
        losses += float(loss.detach())
    norm = _clip(trainee, config.optim.clip)
    optimizer.step()
    optimizer.zero_grad()
    (total,) = world.sums(losses)
    return Step(total / max(1.0, tokens), norm, int(tokens), stops > 0, written == world.ranks)


def _clip(trainee: Trainee, most: float) -> float:
    """Clip the gradient of the whole model; its norm before that."""
    held: Sequence[torch.Tensor] = [one for one in trainee.parameters() if one.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(held, most or float("inf"))
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class _Log:
    """Lines on the console and in `SAVE/log.jsonl`; a resumed run drops what comes again."""

    def __init__(self, config: Config, world: World, step: int) -> None:
        self.path = config.save.path / "log.jsonl"
        self.every, self.first = config.log.every, world.first
        if self.first:
            config.save.path.mkdir(parents=True, exist_ok=True)
            held = self.path.read_text().splitlines() if self.path.is_file() else []
            kept = [line for line in held if _step_of(line) <= step]
            self.path.write_text("".join(line + "\n" for line in kept))

    def line(self, run: Run, progress: Progress, step: Step, seconds: float, say: Callable[[str], None]) -> None:
        """Write down a step."""
        if not self.first:
            return
        rate = learning_rate(run.config, progress.step - 1, run.total)
        record = {
            "step": progress.step, "global_step": progress.offset + progress.step, "loss": step.loss, "lr": rate,
            "grad_norm": step.norm, "trained_tokens": step.tokens, "all_trained_tokens": progress.tokens,
            "seconds": round(seconds, 4),
        }  # fmt: skip
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if progress.step % self.every == 0 or progress.step == run.total:
            left = (run.total - progress.step) * seconds
            where = f"step {progress.step}/{run.total} (global {record['global_step']})"
            speed = f"{step.tokens} tokens  {step.tokens / seconds:.0f}/s  {left:.0f} s left"
            say(f"{where}  loss {step.loss:.4f}  lr {rate:.3g}  norm {step.norm:.3f}  {speed}")

    def scores(self, progress: Progress, found: Mapping[str, Score], say: Callable[[str], None]) -> None:
        """Write down an evaluation."""
        if not self.first:
            return
        step = progress.offset + progress.step
        record: dict[str, float] = {"step": progress.step, "global_step": step}
        record |= {f"{name}_loss": one.loss for name, one in found.items()}
        with self.path.with_name("evaluations.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        write_csv(self.path.with_name("perplexity"), step, found)
        say(line_of(step, found))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
