"""Adam's moments of the checkpoint that a run starts from, of any format, converted for the engine that reads them."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from formats.errors import RefusedError, SourceError, UnsupportedError
from formats.optimizer import Group
from train.settings.config import Config
from train.start.run_folder import started
from train.start.start_weights import opened

MOMENTS = ".moments"
"""Folder in `save.path` with the converted training; the first checkpoint of the run replaces it."""
STEP = re.compile(r"(?:global_step|iter_|checkpoint-)(\d+)")
"""Names of checkpoints that say their step: DeepSpeed's, Megatron's and transformers'."""


class Moments(NamedTuple):
    """A training that a run continues.

    Attributes:
        path: a checkpoint that the engine reads.
        step: how many updates Adam has made.
    """

    path: Path
    step: int


def moments_of(config: Config, target: str) -> Moments:
    """Convert master weights, moments and step of `model.path`, as `convert hf2fsdp --with-optimizer` does.

    Args:
        config: `model`, `save.path` and `steps.iteration_offset`.
        target: what is written, `fsdp` or `deepspeed`.

    Raises:
        RefusedError: the checkpoint is of another step than `steps.iteration_offset`.
        SourceError: it has no optimizer, or an incomplete one.
        UnsupportedError: its optimizer is not read, or is not Adam alone.
    """
    from converters.convert import run
    from converters.plan.opening import replicas_of
    from converters.plan.output import Output, plan_output
    from converters.plan.request import Limits, Request
    from converters.plan.training_state import optimizer_of

    out = config.save.path / MOMENTS
    with TemporaryDirectory(prefix="vitruvian-") as scratch:
        source, _ = opened(started(config.model.path), config, Path(scratch))
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
        run(plan_output(source, request, target, output), request)
    return Moments(next(out.glob("global_step*"), out), step)
