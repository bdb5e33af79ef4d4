"""The commands for checkpoints of DeepSpeed whose models have Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    require_effect,
    settings_of,
    shard_size,
    tag,
    writing,
)
from converters.commands.running import carry_out, request_of, to_huggingface
from formats.deepspeed import NEOX, ZERO
from formats.errors import UsageError
from formats.format import Format

KNOWN: Mapping[str, Sequence[Format]] = {
    "gqa_layout": (NEOX,),
    "config": (NEOX,),
    "vocab_size": (NEOX,),
    "settings": (NEOX,),
    "verbatim": (),
    "container": (),
}
"""What a model with names of its own is not asked: every parameter stays as it is."""


@click.command()
@places
@deepspeed_reading
@shard_size
@chat_template
@reading_of(ZERO)
@writing
def zero2hf(src: Path, out: Path, **options: Any) -> None:
    """DeepSpeed ZeRO checkpoint to a Hugging Face folder.

    SRC is the folder with `latest`, the checkpoint-N of the HF Trainer, or a global_stepN. Of stage 3, and with
    --weights fp32-master of every stage, the weights come out of the optimizer states of all ranks.
    """
    to_huggingface(opened(src, options, ZERO), out, options)


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
    from converters.plan.training_state import optimizer_of
    from converters.plan.universal import is_partitioned, open_states, plan_of_optimizer, plan_universal

    if options["dtype"] != "keep":
        raise UsageError("a universal checkpoint holds float32 alone", "leave --dtype out")
    if is_partitioned(src, options["tag"]):
        states = open_states(src, settings_of(options))
        require_effect(options, states.opened[0], known=KNOWN)
        request = request_of(out, options, states.opened[0])
        plan = plan_universal(states, request)
    else:
        source = opened(src, options)
        request = request_of(out, options, source)
        plan = plan_of_optimizer(source, optimizer_of(source), request)
    carry_out(plan, request, options)
