"""The commands for checkpoints of DeepSpeed whose models have Hugging Face names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converters.commands.options import (
    chat_template,
    deepspeed_reading,
    opened,
    places,
    reading,
    reading_of,
    settings_of,
    shard_size,
    tag,
    writing,
)
from converters.commands.running import carry_out, convert_to, output_of, request_of
from formats.deepspeed import MDS, ZERO


@click.command()
@places
@deepspeed_reading
@shard_size
@chat_template
@reading_of(ZERO, MDS)
@writing
def zero2hf(src: Path, out: Path, **options: Any) -> None:
    """DeepSpeed ZeRO checkpoint to a Hugging Face folder.

    SRC is the folder with `latest`, the checkpoint-N of the HF Trainer, or a global_stepN. Of stage 3, and with
    --weights fp32-master of every stage, the weights come out of the optimizer states of all ranks.
    """
    convert_to("huggingface", opened(src, options, MDS, ZERO), out, options)


@click.command()
@places
@tag
@reading
@writing
def zero2universal(src: Path, out: Path, **options: Any) -> None:
    """Any training to DeepSpeed: a universal checkpoint, for any number of ranks and any stage.

    It holds masters, both moments and the step of every parameter that is trained. Train on with `checkpoint:
    {load_universal: true}`. Of DeepSpeed ZeRO and GPT-NeoX, parameters keep the names of the training. Of any other
    checkpoint whose optimizer is read, they have those of transformers.
    """
    from converters.plan.opening import open_training, require_effect, require_family
    from converters.plan.output import plan_output
    from formats.deepspeed.universal import States

    settings = settings_of(options)
    training = open_training(src, settings)
    source = training.opened[0] if isinstance(training, States) else training
    if source is training:
        require_effect(settings, source)
        require_family(options["family"], source)
    request = request_of(out, options, source)
    carry_out(plan_output(training, request, "deepspeed", output_of(options)), request, options)
