"""The command `convert`. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import re

import click

from converters.commands.examples import EXAMPLES
from converters.common.cli_main import Sections, run
from formats.errors import UsageError

HOME = "converters.commands"
SECTIONS = {
    "Convert": {
        "to": f"{HOME}.to",
        "fsdp2hf": f"{HOME}.convert",
        "hf2fsdp": f"{HOME}.convert",
        "hf2megatron": f"{HOME}.convert",
        "hf2neox": f"{HOME}.neox",
        "hf2mds": f"{HOME}.zero",
        "hf2mistral": f"{HOME}.convert",
        "hf2nanotron": f"{HOME}.convert",
        "hf2hf": f"{HOME}.convert",
        "maxtext2hf": f"{HOME}.convert",
        "megatron2hf": f"{HOME}.convert",
        "mistral2hf": f"{HOME}.convert",
        "nanotron2hf": f"{HOME}.convert",
        "neox2hf": f"{HOME}.neox",
        "zero2hf": f"{HOME}.zero",
        "zero2universal": f"{HOME}.zero",
        "reshard": f"{HOME}.convert",
        "average-norms": f"{HOME}.neox",
        "average": f"{HOME}.combine",
        "merge": f"{HOME}.combine",
        "peft2megatron": f"{HOME}.combine",
        "watch": f"{HOME}.watch",
        "submit": f"{HOME}.submit",
    },
    "Look": dict.fromkeys(("inspect", "plan", "explain", "formats"), f"{HOME}.look"),
    "A new family": {"family": f"{HOME}.family"},
    "Check": dict.fromkeys(("digest", "verify", "diff"), f"{HOME}.check"),
    "Publish": {"assets": f"{HOME}.assets", "tokenizer": f"{HOME}.tokenizer", "push": f"{HOME}.publish"},
}
"""Title of a section: its commands, and the module of each."""
SPELLED = {
    "--tensor-model-parallel-size": "--tp", "--tensor-parallel-size": "--tp", "--tp-size": "--tp",
    "--pipeline-model-parallel-size": "--pp", "--pipeline-parallel-size": "--pp", "--pp-size": "--pp",
    "--expert-model-parallel-size": "--ep", "--ep-size": "--ep", "--expert-tensor-parallel-size": "--etp",
}  # fmt: skip
"""The name of an option in other programs: the name here."""


class Converter(Sections):
    """The commands, and a hint for two formats that no command is named after."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, with options by the names of other programs too."""
        parts = [word.partition("=") for word in args]
        return super().parse_args(ctx, ["".join((SPELLED.get(name, name), *rest)) for name, *rest in parts])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command.

        Raises:
            UsageError: there is no such command, but the name is one of two formats: a hint names the command, or
                another program, that converts between these.
        """
        name = args[0]
        pair = formats_of(name) if name not in self.commands else ()
        if len(pair) == 2:
            from converters.commands import to

            other = to.command_for(*pair)
            also = ", which reads any format" if other.startswith("hf2") else ""
            hint = f"convert {other} SRC OUT{also}" if other else to.other_way_hint(*pair)
            raise UsageError(f"there is no command {name}", hint)
        return super().resolve_command(ctx, args)


def formats_of(name: str) -> list[str]:
    """The formats in a word such as deepspeed-to-megatron, by the names that commands have for them."""
    from converters.commands import to

    words = [to.format_name(word) for word in re.split("2|[-_]to[-_]", name.lower())]
    return words if all(words) else []


@click.group(cls=Converter, sections=SECTIONS, examples=EXAMPLES)
@click.version_option(package_name="vitruvian", message="vitruvian %(version)s")
@click.option("-v", "--verbose", count=True, help="-vv shows the traceback of an error.")
def cli(verbose: int) -> None:
    """Move LLM checkpoints between frameworks: on a login node, in constant memory, proven complete."""
    del verbose  # `run` looks for it, because errors are caught there


def main() -> None:
    """Entry point."""
    run(cli, "convert")
