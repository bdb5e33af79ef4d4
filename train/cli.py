"""The command `train`. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import click

from converters.common.cli_main import Sections, run
from train.commands.examples import EXAMPLES

HOME = "train.commands"
SECTIONS = {
    "Data": {
        "fetch": f"{HOME}.fetch",
        "lint": f"{HOME}.look",
        "tokenize": f"{HOME}.tokenize",
        "show": f"{HOME}.look",
        "count": f"{HOME}.look",
        "pack": f"{HOME}.pack",
        "role-bins": f"{HOME}.role_bins",
    },
    "Data packs": {"packs": f"{HOME}.packs"},
    "Train": {
        "init": f"{HOME}.init",
        "plan": f"{HOME}.run",
        "run": f"{HOME}.run",
        "submit": f"{HOME}.submit",
        "doctor": f"{HOME}.doctor",
    },
    "Look at it": {
        "eval": f"{HOME}.evaluate:evaluate",
        "plot": f"{HOME}.plot",
        "chat": f"{HOME}.chat",
        "bench": f"{HOME}.bench",
    },
}
"""The commands, and the module of each."""


@click.group(cls=Sections, sections=SECTIONS, examples=EXAMPLES, program="train")
@click.version_option(package_name="vitruvian", message="vitruvian %(version)s")
@click.option("-v", "--verbose", count=True, help="-vv shows the traceback of an error.")
def cli(verbose: int) -> None:
    """Data and supervised fine-tuning: every token counted, every mask shown, every row reproducible."""
    del verbose  # `run` looks for it, because errors are caught there


def main() -> None:
    """Entry point."""
    run(cli, "train")
