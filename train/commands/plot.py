"""`train plot`: draws diagrams of runs."""

from __future__ import annotations

from pathlib import Path

import click

from converters.commands.options import FOLDER
from converters.common.cli_help import command
from formats.errors import OutputError


@command()
@click.argument("runs", type=FOLDER, nargs=-1, required=True, metavar="RUN…")
@click.option("-o", "--out", type=FOLDER, metavar="FILE.png", help="[default: RUN/plot.png of the last run]")
@click.option("--log-scale", is_flag=True, help="Logarithmic axes of loss and gradient norm.")
@click.option("--force", is_flag=True, help="Replace a file that --out names.")
def plot(runs: tuple[Path, ...], out: Path | None, log_scale: bool, force: bool) -> None:
    """Loss, learning rate, gradient norm and evaluations over the global step, as a PNG.

    Several runs, such as the phases of a pre-training, are drawn in one diagram. A run may still be training.
    """
    from train.tools.plot import draw, read_history

    if out is not None and out.exists() and not force:
        raise OutputError(f"{out} exists", "choose another --out, or replace it with --force")
    place = out or runs[-1] / "plot.png"
    draw([read_history(run) for run in runs], place, log_scale)
    click.echo(place)
