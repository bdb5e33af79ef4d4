"""The command `train`. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import click

from converters.common.cli_main import Sections, run
from train.commands import (
    bench,
    chat,
    doctor,
    evaluate,
    fetch,
    init,
    look,
    pack,
    packs,
    plot,
    role_bins,
    submit,
    tokenize,
)
from train.commands import run as training
from train.commands.examples import EXAMPLES

SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "Data": (
        fetch.fetch,
        look.lint,
        tokenize.tokenize,
        look.show,
        look.count,
        pack.pack,
        role_bins.role_bins,
    ),
    "Data packs": (packs.packs,),
    "Train": (init.init, training.plan, training.run, submit.submit, doctor.doctor),
    "Look at it": (evaluate.evaluate, plot.plot, chat.chat, bench.bench),
}


@click.group(cls=Sections, sections=SECTIONS, examples=EXAMPLES, program="train")
@click.version_option(package_name="vitruvian", message="vitruvian %(version)s")
@click.option("-v", "--verbose", count=True, help="-vv shows the traceback of an error.")
def cli(verbose: int) -> None:
    """Data and supervised fine-tuning: every token counted, every mask shown, every row reproducible."""
    del verbose  # `run` looks for it, because errors are caught there


def main() -> None:
    """Entry point."""
    run(cli, "train")
