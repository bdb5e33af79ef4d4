"""Adam's moments of the checkpoint that a run starts from, in any format, converted to the engine's format."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from formats.errors import RefusedError, SourceError, UnsupportedError
from formats.optimizer import Group
from train.settings.config import Config
from train.start.run_folder import started
from train.start.start_weights import notes_of, opened

MOMENTS = ".moments"
"""Name of the folder in `save.path` with the converted training state; the run's first checkpoint deletes it."""
STEP = re.compile(r"(?:global_step|iter_|checkpoint-)(\d+)")
"""Matches names of checkpoints that contain their step: DeepSpeed's, Megatron's and transformers'."""


class Moments(NamedTuple):
    """The training state that a run continues from.

    Attributes:
        path: a checkpoint in the engine's format.
        step: number of updates that Adam has made.
        notes: notes on the conversion.
    """

    path: Path
    step: int
    notes: list[str]


def moments_of(config: Config, target: str) -> Moments:
    """Convert FP32 master weights, moments and step of `model.path`, as `convert hf2fsdp --with-optimizer` does.

    Args:
        config: the settings; `model`, `save.path` and `steps.iteration_offset` are read.
        target: the format to write, `fsdp` or `deepspeed`.

    Raises:
        RefusedError: the checkpoint is of another step than `steps.iteration_offset`.
        SourceError: the checkpoint has no optimizer state, or an incomplete one.
        UnsupportedError: the optimizer state cannot be read, or is not of Adam alone.
    """
    from converters.convert import run
    from converters.plan.opening import replicas_of
    from converters.plan.output import Output, plan_output
    from converters.plan.request import Limits, Request
    from converters.plan.training_state import optimizer_of

    out = config.save.path / MOMENTS
    with TemporaryDirectory(prefix="vitruvian-") as scratch:
        source = opened(started(config.model.path), config, Path(scratch))
        named = STEP.fullmatch(source.home.name)
        if named and int(named[1]) != config.steps.iteration_offset:
            raise RefusedError(
                f"init moments continues {source.home}, and steps.iteration_offset is {config.steps.iteration_offset}",
                f"--steps.iteration_offset {int(named[1])}",
            )
        try:
            optimizer = optimizer_of(source)
            optimizer.require_only((Group,), source.home, "init moments continues with AdamW")
            step = optimizer.updates(source.home)
        except (SourceError, UnsupportedError) as error:
            raise type(error)(str(error), "--init finetune takes the weights alone") from error
        request = Request(out, quiet=True, force=True, limits=Limits(replicas=replicas_of(source, None)))
        output = Output(with_optimizer=True) if target == "fsdp" else Output()
        plan = plan_output(source, request, target, output)
        notes = notes_of(plan)
        run(plan, request)
    return Moments(next(out.glob("global_step*"), out), step, notes)
