"""`convert to FORMAT SRC OUT`: one verb for the commands that are named after two formats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click

from converters.commands.options import OUTPUT, SOURCE
from converters.common.cli_help import command
from formats.detect.rivals import require_one
from formats.errors import UsageError
from formats.format import Format
from formats.registry import detected, is_known

NAMES = {
    "hf": ("hf", "huggingface", "transformers", "safetensors"),
    "megatron": ("megatron", "mcore", "torchdist"),
    "fsdp": ("fsdp", "dcp", "torch", "accelerate", "axolotl", "torchtitan", "verl"),
    "neox": ("neox", "gptneox"),
    "zero": ("zero", "deepspeed", "universal"),
    "mds": ("mds", "megatrondeepspeed", "megads"),
    "mistral": ("mistral", "consolidated", "mistralinference"),
    "nanotron": ("nanotron",),
    "maxtext": ("maxtext", "orbax"),
    "gguf": ("gguf", "ggml", "llamacpp"),
}
"""The name of a format in commands: words that users have for it."""
ELSEWHERE = {
    "gguf": "convert_hf_to_gguf.py of llama.cpp makes it of a Hugging Face folder: convert to hf SRC OUT",
    "maxtext": "maxtext.checkpoint_conversion.to_maxtext makes it of a Hugging Face folder: convert to hf SRC OUT",
    "hf to zero": "DeepSpeed starts from the Hugging Face folder itself; a training moves by `convert zero2universal`",
}
"""Target, or source and target, that no command writes: what does."""
UNWRITTEN = ("gguf", "maxtext")
"""What no command writes, of any source."""
INTO = {"hf": {"hf": "hf2hf", "mds": "zero2hf"}, "megatron": {"megatron": "reshard"}, "neox": {"neox": "reshard"}}
"""Target: source: the command, where it is not named `hf2…`, `…2hf` or `zero2universal` by the two formats."""


def format_name(word: str) -> str:
    """The name of a format in commands; empty for a word that is no format."""
    letters = re.sub("[-_.]", "", word.lower())
    return next((name for name, words in NAMES.items() if letters in words), "")


def command_for(source: str, target: str) -> str:
    """The command from one format to another; empty where there is none."""
    if within := INTO.get(target, {}).get(source):
        return within
    if target == "zero":
        return "" if source == "hf" else "zero2universal"
    if target in UNWRITTEN or source == "gguf":
        return ""
    return f"{source}2hf" if target == "hf" else f"hf2{target}"


def other_way_hint(source: str, target: str) -> str:
    """The hint on what converts between two formats that no command converts between; empty if nothing is known."""
    return ELSEWHERE.get(target) or ELSEWHERE.get(f"{source} to {target}", "")


def detect_format(path: Path) -> Format | None:
    """The format of a source, by its files alone; None where it is of no format, or cannot be read."""
    from converters.common.hub_names import folder_of
    from formats.errors import SourceError

    try:
        return detected(folder_of(path).folder)
    except (OSError, SourceError):
        return None


@command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("target", metavar="FORMAT")
@click.argument("src", type=SOURCE)
@click.argument("out", type=OUTPUT)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF THAT COMMAND]")
@click.pass_context
def to(context: click.Context, /, target: str, src: Path, out: Path, words: Sequence[str]) -> None:
    """Any checkpoint to FORMAT: hf, megatron, fsdp, neox, zero, mds (Megatron-DeepSpeed), mistral or nanotron.

    Same as the command named after the two formats, whose options it takes after OUT: see `convert hf2megatron --help`,
    for instance.
    """
    wanted = format_name(target)
    if not wanted:
        raise UsageError(
            f"there is no format {target}", f"one of {', '.join(name for name in NAMES if name not in UNWRITTEN)}"
        )
    require_one(src, is_known)
    form = detect_format(src)
    source = form.to_folder.removesuffix("2hf") if form else ""
    name = command_for(source or "hf", wanted)
    if not name:
        raise UsageError(f"no command writes {target} from {src}", other_way_hint(source or "hf", wanted))
    group = context.parent.command if context.parent else None
    assert isinstance(group, click.Group)
    conversion = group.commands[name]
    with conversion.make_context(name, [str(src), str(out), *words], parent=context.parent) as inside:
        conversion.invoke(inside)
