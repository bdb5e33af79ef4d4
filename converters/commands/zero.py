"""The commands for checkpoints of DeepSpeed whose models have Hugging Face names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converters.commands.options import FOLDER, Size, chat_template, deepspeed_reading, opened, reading, writing
from converters.commands.running import carry_out, request_of


@click.command()
@click.argument("src", type=FOLDER)
@click.argument("out", type=FOLDER)
@deepspeed_reading
@click.option("--shard-size", type=Size(), default="5GB", show_default=True, help="Size of each safetensors file.")
@chat_template
@reading
@writing
def zero2hf(src: Path, out: Path, **options: Any) -> None:
    """DeepSpeed ZeRO checkpoint to a Hugging Face folder.

    SRC is the folder with `latest`, the checkpoint-N of the HF Trainer, or a global_stepN. Of stage 3, and with
    --weights fp32-master of every stage, the weights come out of the optimizer states of all ranks.
    """
    from converters.convert import plan_huggingface

    source = opened(src, options, "zero")
    request = request_of(out, options, source)
    carry_out(plan_huggingface(source, request, options["shard_size"], options["template"]), request, options)
