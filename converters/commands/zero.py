"""The commands for checkpoints of DeepSpeed, those of Megatron-DeepSpeed among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converters.commands.options import (
    adapter,
    chat_template,
    deepspeed_reading,
    opened,
    parallel,
    places,
    reading,
    reading_of,
    settings_of,
    shard_size,
    tag,
    vocab_multiple,
    writing,
)
from converters.commands.running import carry_out, convert_to, output_of, request_of
from converters.common.cli_help import command
from formats.deepspeed import MDS, ZERO


@command()
@places
@deepspeed_reading
@shard_size
@chat_template
@adapter
@reading_of(ZERO, MDS)
@writing
def zero2hf(src: Path, out: Path, **options: Any) -> None:
    """DeepSpeed ZeRO checkpoint to a Hugging Face folder.

    SRC is the folder with `latest`, the checkpoint-N of the HF Trainer, a global_stepN, or a universal checkpoint. Of
    stage 3, and with --weights fp32-master of every stage, the weights come out of the optimizer states of all ranks.
    """
    convert_to("huggingface", opened(src, options, MDS, ZERO), out, options)


@command()
@places
@parallel
@click.option(
    "--qkv",
    type=click.Choice(["grouped", "blocked", "separate"]),
    help="Query, key and value as the code has them that loads OUT: blocked since 2024-12-04 (deepspeedai), grouped "
    "before; separate where heads share keys in OpenLLM-France's (Lucie). Has to be said, but of a BLOOM.  "
    "[default: as in SRC]",
)
@click.option("--iteration", type=click.IntRange(0), metavar="N",
              help="Write global_stepN.  [default: 0; of Megatron-DeepSpeed as in SRC]")  # fmt: skip
@vocab_multiple
@click.option(
    "--with-optimizer",
    is_flag=True,
    help="Convert the optimizer too (FP32 master weights, moments, step), as a universal checkpoint that a training "
    "resumes from with --universal-checkpoint, at any topology.",
)
@click.option(
    "--consumed-samples",
    type=click.IntRange(0),
    metavar="N",
    help="With the optimizer: where schedule and data resume.  [default: what SRC says]",
)
@deepspeed_reading
@reading
@writing
def hf2mds(src: Path, out: Path, **options: Any) -> None:
    """Any checkpoint to Megatron-DeepSpeed: a run with the layer files of a pipeline.

    A training loads it with `--finetune`, or resumes where the optimizer is converted too. From Megatron-DeepSpeed too,
    to another topology or to the order of other code.
    """
    convert_to("megatron-deepspeed", opened(src, options), out, options)


@command()
@places
@tag
@reading
@writing
def zero2universal(src: Path, out: Path, **options: Any) -> None:
    """Any training to DeepSpeed: a universal checkpoint, for any number of ranks and any stage.

    It holds master weights, both moments and the step of every parameter that is trained. Train on with `checkpoint:
    {load_universal: true}`. Of DeepSpeed ZeRO and GPT-NeoX, parameters keep the names of the training. Of any other
    checkpoint whose optimizer is read, they have those of transformers. Biases that tensor parallel ranks add up, of a
    parallel residual, load at that tensor parallel size alone.
    """
    from converters.plan.opening import open_training, source_of
    from converters.plan.output import plan_output

    training = open_training(src, settings_of(options), options["family"])
    request = request_of(out, options, source_of(training))
    carry_out(plan_output(training, request, "deepspeed", output_of(options)), request, options, "deepspeed")
