"""`train doctor`: what this machine has, and whether a training on it would be right."""

from __future__ import annotations

import json
from pathlib import Path

import click

from converters.commands.options import FOLDER, as_json
from formats.errors import VerificationError


@click.command()
@click.argument("model", type=FOLDER, required=False)
@click.option("--slower", type=click.FloatRange(1, min_open=True), default=1.2, show_default=True,
              help="A node is slow that takes so many times what the median of all nodes takes.")  # fmt: skip
@as_json
def doctor(model: Path | None, slower: float, as_json: bool) -> None:
    """Look at this machine: versions, device, attention, ranks, nodes.

    \b
    train doctor [MODEL]
    torchrun --nproc-per-node 8 -m train doctor

    Each attention runs two layers (of MODEL, if given) on packed documents and on each alone. Exit code 6 if the one
    that a training would take mixes them, or if ranks do not add up. Of several nodes the slow ones are named.
    """  # noqa: D301  # \b is the sign of click for lines as they stand
    from train.distributed import world
    from train.tools.doctor import examine

    with world(1, 5) as ranks:
        found = list(examine(ranks, model, slower))
    faults = [one for one in found if one.fault]
    if ranks.first and as_json:
        click.echo(json.dumps({one.name: one.told for one in found} | {"faults": [one.name for one in faults]}))
    elif ranks.first:
        for one in found:
            click.echo(f"{'FAULT ' if one.fault else ''}{one.name:<18}{one.told}")
    if faults:
        raise VerificationError(f"{faults[0].name}: {faults[0].told}")
