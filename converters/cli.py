"""The command `convert`. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import re

import click

from converters.commands import assets, check, combine, convert, look, neox, publish, submit, tokenizer, zero
from converters.common.cli_main import Sections, run
from formats.errors import UsageError

SECTIONS = {
    "Convert": (
        convert.fsdp2hf,
        convert.hf2fsdp,
        convert.hf2megatron,
        neox.hf2neox,
        convert.hf2hf,
        convert.megatron2hf,
        neox.neox2hf,
        zero.zero2hf,
        zero.zero2universal,
        convert.reshard,
        neox.average_norms,
        combine.average,
        combine.merge,
        submit.submit,
    ),
    "Look": (look.inspect, look.plan, look.explain, look.formats),
    "Check": (check.digest, check.verify, check.diff),
    "Publish": (assets.assets, tokenizer.tokenizer, publish.push),
}
NAMES = {
    "hf": ("hf", "huggingface", "transformers", "safetensors"),
    "megatron": ("megatron", "mcore", "torchdist"),
    "fsdp": ("fsdp", "dcp", "torch", "accelerate", "axolotl", "torchtitan", "verl"),
    "neox": ("neox", "gptneox"),
    "zero": ("zero", "deepspeed", "universal"),
}
"""What commands call a format, and what those call it who look for one."""


SPELLED = {
    "--tensor-model-parallel-size": "--tp", "--tensor-parallel-size": "--tp", "--tp-size": "--tp",
    "--pipeline-model-parallel-size": "--pp", "--pipeline-parallel-size": "--pp", "--pp-size": "--pp",
    "--expert-model-parallel-size": "--ep", "--ep-size": "--ep", "--expert-tensor-parallel-size": "--etp",
}  # fmt: skip
"""What other programs call an option: ours."""


class Converter(Sections):
    """The commands, and a hint for two formats that no command is named after."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, options by the names of other programs too."""
        parts = [word.partition("=") for word in args]
        return super().parse_args(ctx, ["".join((SPELLED.get(name, name), *rest)) for name, *rest in parts])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command.

        Raises:
            UsageError: there is none of that name, and another one does it.
        """
        name = args[0]
        if name not in self.commands and (other := meant(name)):
            also = ", which reads any format" if other.startswith("hf2") else ""
            raise UsageError(f"there is no command {name}", f"convert {other} SRC OUT{also}")
        return super().resolve_command(ctx, args)


def meant(name: str) -> str:
    """The command for two formats, such as deepspeed-to-megatron; "" where there is none."""
    words = [re.sub("[-_]", "", word) for word in re.split("2|[-_]to[-_]", name.lower())]
    pair = [one for word in words for one, names in NAMES.items() if word in names]
    match pair:
        case ["hf", "zero"]:
            return ""
        case ["hf", "hf"]:
            return "hf2hf"
        case ["megatron", "megatron"] | ["neox", "neox"]:
            return "reshard"
        case [_, "zero"]:
            return "zero2universal"
        case [source, "hf"]:
            return f"{source}2hf"
        case [_, target]:
            return f"hf2{target}"
    return ""


@click.group(cls=Converter, sections=SECTIONS)
@click.version_option(package_name="vitruvian", message="vitruvian %(version)s")
@click.option("-v", "--verbose", count=True, help="-vv shows the traceback of an error.")
def cli(verbose: int) -> None:
    """Move LLM checkpoints between frameworks: on a login node, in constant memory, proven complete."""
    del verbose  # `run` looks for it, because errors are caught there


def main() -> None:
    """Entry point."""
    run(cli, "convert")
