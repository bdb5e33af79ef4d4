"""The training loop of transformers' Trainer, with our rows, loss, learning rate, log and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainingArguments

from converters.common.atomic import stoppable
from train.engines.trainer import SHARDED, TrainerEngine
from train.model.trainee import DTYPES
from train.run.checkpoint import Progress
from train.run.log import Log, Say, Step
from train.run.profiling import Profiler
from train.run.step import Run, finish_step, loss_of, reduce_counts, time_is_up
from train.run.throughput import memory_of
from train.settings.batching import Order, seed_of
from train.settings.schedule import learning_rate


class Samples(Dataset[int | None]):
    """Rows in their order, starting at a sample; None after the last row.

    accelerate gives micro-batch `b` to rank `b mod ranks`, as `Order.batch` does.
    """

    def __init__(self, order: Order, first: int, many: int) -> None:
        self.order, self.first, self.many = order, first, many

    def __len__(self) -> int:
        return self.many

    def __getitem__(self, place: int) -> int | None:
        sample = self.first + place
        return self.order.row(sample) if sample < self.order.samples else None


class Loop(Trainer):
    """The Trainer of a run. The Trainer counts the steps of this job, `progress` counts those of the run."""

    def __init__(
        self, run: Run, on_step_begin: Callable[[], bool], on_step_end: Callable[[Progress, Step, float], bool]
    ) -> None:
        prepared = run.prepared
        self.engine, self.progress = cast(TrainerEngine, run.engine), prepared.progress
        self.job, self.on_step_begin, self.on_step_end = run, on_step_begin, on_step_end
        sizes, done = prepared.sizes, prepared.progress.step
        self.samples = Samples(prepared.order, done * sizes.size, (prepared.total - done) * sizes.size)
        super().__init__(self.engine.trainee, _arguments(run, self.engine.kinds), self._flat, self.samples)
        self.model_accepts_loss_kwargs = True  # `compute_loss` divides by the labels of all micro-batches
        self.remove_callback(PrinterCallback)

    def _flat(self, rows: Sequence[int | None]) -> dict[str, Any]:
        return {"flat": self.job.prepared.rows.flat([row for row in rows if row is not None])}

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:  # noqa: ARG002
        return SequentialSampler(self.samples)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs  # `Trainee` moves them to the device

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:  # noqa: ARG002
        """Return the engine's AdamW, because the Trainer's own has other parameter groups."""
        self.optimizer = self.engine.optimizer
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:  # noqa: ARG002
        """Return the learning rate of `settings.schedule`; fills the weights, as the model is sharded by now."""
        self.engine.fill()
        config, first, total = self.job.prepared.config, self.progress.step, self.job.prepared.total
        prepared: Any = self.optimizer
        self.lr_scheduler = LambdaLR(prepared, lambda step: learning_rate(config, first + step, total))
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *_: Any) -> tuple[list[Any], int]:
        """The micro-batches of a step, and the number of labels that all ranks train in the step."""
        self.began = time.monotonic()
        stopped = self.on_step_begin()
        torch.manual_seed(seed_of(self.job.prepared.config.seed, self.progress.step, self.job.world.rank))
        batches = [next(epoch_iterator) | {"place": place} for place in range(num_batches)]
        self.step = reduce_counts(self.job, [batch["flat"] for batch in batches], stopped)
        return batches, self.step.trained

    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
        """This micro-batch's part of the mean over all labels of the step; gradients are averaged over ranks."""
        seed = self.job.prepared.config.seed, self.progress.step, self.job.world.rank, inputs["place"]
        return loss_of(self.job, model, inputs["flat"], seed) * (self.job.world.ranks / max(1, num_items_in_batch))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:  # noqa: ARG002
        """Finish a step. Called after each step with `grad_norm`; the call at the end, without it, is ignored."""
        if "grad_norm" not in logs:
            return
        memory = memory_of(self.job.world.device)
        loss, norm, rate = logs["loss"], logs["grad_norm"], logs["learning_rate"]
        step = self.step._replace(loss=loss, norm=norm, rate=rate, memory=memory)
        self.progress = replace(self.progress, step=self.progress.step + 1, tokens=self.progress.tokens + step.trained)
        if self.on_step_end(self.progress, step, time.monotonic() - self.began):
            self.control.should_training_stop = True


def steps(run: Run, log: Log | None, say: Say) -> Progress:
    """Train until the last step or until the run has to stop, and save everything. Returns how far it has come."""
    config = run.prepared.config
    with stoppable() as stopped, Profiler(config, run.world, say) as profiler, run.watch:

        def on_step_begin() -> bool:
            run.watch.restart()
            return stopped() or time_is_up(config)

        def on_step_end(progress: Progress, step: Step, seconds: float) -> bool:
            profiler.step()
            return finish_step(run, log, progress, step, seconds, say)

        loop = Loop(run, on_step_begin, on_step_end)
        loop.train()
        run.saver.finish()
    return loop.progress


def _arguments(run: Run, kinds: Sequence[str]) -> TrainingArguments:
    """The arguments for the Trainer and accelerate, which report, save and download nothing.

    Args:
        run: the run and its settings.
        kinds: class names of the decoder's layers.
    """
    prepared, device = run.prepared, run.world.device.type
    config, dtype = prepared.config, DTYPES[prepared.config.model.dtype]
    shards = device in SHARDED
    arguments = TrainingArguments(
        output_dir=str(config.save.path),
        max_steps=prepared.total - prepared.progress.step,
        per_device_train_batch_size=prepared.sizes.micro,
        gradient_accumulation_steps=prepared.sizes.accumulation,
        max_grad_norm=config.optim.clip,
        seed=config.seed,
        use_cpu=device == "cpu",
        bf16=dtype == torch.bfloat16 and not shards,  # autocast; shards have a policy
        fsdp=True if shards else None,  # type: ignore[arg-type]  # as its documentation says
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": list(kinds)} if shards else None,
        # else every rank keeps the gradients of the whole model until the last micro-batch
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}} if shards else None,
        ddp_find_unused_parameters=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    if shards:
        arguments.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(dtype, torch.float32)
    return arguments
