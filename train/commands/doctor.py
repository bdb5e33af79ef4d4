"""`train doctor`: checks what this machine has, and whether a training on it would be correct."""

from __future__ import annotations

import json
from pathlib import Path

import click

from converters.commands.options import FOLDER, as_json
from converters.common.cli_help import Finite, command
from formats.errors import VerificationError


@command()
@click.argument("model", type=FOLDER, required=False)
@click.option("--slower", type=Finite(1, min_open=True), default=1.2, show_default=True,
              help="A node is slow if it takes so many times the median of all nodes.")  # fmt: skip
@as_json
def doctor(model: Path | None, slower: float, as_json: bool) -> None:
    """Look at this machine: versions, device, attention, ranks, nodes.

    \b
    train doctor [MODEL]
    torchrun --nproc-per-node 8 -m vitruvian train doctor

    Each attention backend runs two layers (of MODEL, if given) on packed documents and on each separately. Exit code 6
    if the one that a training would take mixes documents, or if an all-reduce is wrong. Slow nodes are named.
    """  # noqa: D301  # \b makes click keep the line breaks
    from train.distributed import world
    from train.tools.doctor import examine

    with world(1, 5) as ranks:
        findings = list(examine(ranks, model, slower))
    faults = [finding for finding in findings if finding.fault]
    if ranks.first and as_json:
        click.echo(
            json.dumps(
                {finding.name: finding.text for finding in findings} | {"faults": [finding.name for finding in faults]}
            )
        )
    elif ranks.first:
        for finding in findings:
            click.echo(f"{'FAULT ' if finding.fault else ''}{finding.name:<18}{finding.text}")
    if faults:
        raise VerificationError(f"{faults[0].name}: {faults[0].text}")
