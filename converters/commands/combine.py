"""The commands that read several checkpoints: averages, and adapters with their base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converters.commands.options import (
    FOLDER,
    OUTPUT,
    SOURCE,
    deepspeed_reading,
    opened,
    reading,
    settings_of,
    shard_size,
    writing,
)
from converters.commands.running import ADAPTER_OF_BRIDGE, carry_out, output_of, request_of
from converters.common.cli_help import command
from formats.errors import UsageError


class Weights(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """An option type: numbers separated by commas, such as 0.5,0.3,0.2."""

    name = "weights"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse numbers separated by commas."""
        try:
            return [float(word) for word in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list such as 0.5,0.3,0.2", param, ctx)


@command()
@click.argument("checkpoints", metavar="CKPT...", type=SOURCE, nargs=-1, required=True)
@click.argument("out", type=OUTPUT)
@click.option("--weights", type=Weights(), metavar="W,W,...",
              help="The weight of each CKPT, in their order, 1 in all.  [default: equal ones]")  # fmt: skip
@click.option("--ema", type=float, metavar="DECAY",
              help="Exponential mean: from the first CKPT on, mean = DECAY * mean + (1 - DECAY) * next.")  # fmt: skip
@click.option("--last", type=click.IntRange(2), metavar="K",
              help="CKPT is the folder of a run: its K newest checkpoints, the oldest of them first.")  # fmt: skip
@shard_size
@reading
@writing
def average(
    checkpoints: tuple[Path, ...],
    out: Path,
    weights: list[float] | None,
    ema: float | None,
    last: int | None,
    **options: Any,
) -> None:
    """Weighted mean of checkpoints of one model, as a Hugging Face folder.

    They may be of different formats. FP32 master weights are averaged where there are any. Sums are in float64, in the
    order of the CKPTs, and rounded once. Config and tokenizer are those of the first.
    """
    from converters.plan.averaging import last_of, plan_average, weights_of
    from converters.plan.opening import open_all

    if last is not None:
        if len(checkpoints) > 1:
            raise UsageError(f"--last is for one run, and there are {len(checkpoints)}", "name the run and OUT")
        checkpoints = tuple(last_of(checkpoints[0], last))
    weights = weights_of(len(checkpoints), weights, ema)
    sources = open_all(checkpoints, settings_of(options), options["family"])
    request = request_of(out, options, sources[0])
    plan = plan_average(sources, weights, request, "huggingface", output_of(options), options["replicas"])
    carry_out(plan, request, options, "huggingface")


@command()
@click.argument("base", type=SOURCE)
@click.argument("adapter", type=FOLDER)
@click.argument("out", type=OUTPUT)
@shard_size
@deepspeed_reading
@reading
@writing
def merge(base: Path, adapter: Path, out: Path, **options: Any) -> None:
    """LoRA adapter of PEFT merged into its base, as a Hugging Face folder.

    BASE is a checkpoint of any format, ADAPTER the folder with adapter_config.json. W + scale * B @ A is computed in
    float64 and rounded once, to the type of BASE or --dtype. DoRA, rsLoRA, embeddings, experts and modules_to_save too.
    """
    from converters.plan.merging import plan_merge
    from converters.plan.output import plan_output
    from formats.huggingface.adapter import read

    source = opened(base, options)
    request = request_of(out, options, source)
    plan = plan_merge(
        source, read(adapter), request, lambda model: plan_output(model, request, "huggingface", output_of(options))
    )
    carry_out(plan, request, options, "huggingface")


@command()
@click.argument("base", type=SOURCE)
@click.argument("adapter", type=FOLDER)
@click.argument("out", type=OUTPUT)
@click.option(
    "--lora",
    "kind",
    type=click.Choice(["canonical", "fused"]),
    default="canonical",
    show_default=True,
    help="CanonicalLoRA of Bridge; or LoRA, where query, key and value share lora_A, and gate and up.",
)
@click.option(
    "--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel size of the training."
)
@click.option(
    "--iteration", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Where Bridge counts on."
)
@reading
@writing
def peft2megatron(base: Path, adapter: Path, out: Path, kind: str, tp: int, iteration: int, **options: Any) -> None:
    """LoRA adapter of PEFT to Megatron-Bridge's: torch_dist, to train on beside its base.

    BASE is the model that the adapter is of, in any format. `megatron2hf --adapter only` leads back.
    """
    from converters.plan.adapted import plan_bridge
    from formats.huggingface.adapter import read

    source = opened(base, options)
    request = request_of(out, options, source)
    carry_out(plan_bridge(source, read(adapter), request, kind, tp, iteration), request, options, ADAPTER_OF_BRIDGE)
