"""`train run` and `train plan`: runs a training under torchrun, srun, or as one process, and estimates it."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from converters.commands.options import FILE, as_json
from converters.common.cli_help import Finite, command
from formats.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from train.settings.config import Config

VARIABLES = {
    "CURSE_ATTENTION": "documents of a row never see each other",
    "SAMPLE_ENDS": "documents of a row never see each other",
    "SFT_ENABLED": "data.loss says what is trained: assistant, or all",
}
"""Environment variable of tilde-nlp's GPT-NeoX: what applies here instead."""


@command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=FILE)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def run(config: Path, overrides: tuple[str, ...]) -> None:
    """Fine-tune on packed rows.

    \b
    torchrun --nproc-per-node 8 -m vitruvian train run CONFIG.yml

    Every setting of the file can be given as a dotted option. Under srun with a task for each GPU torchrun is not
    needed. The same command resumes from the latest checkpoint.
    """  # noqa: D301  # \b makes click keep the line breaks
    from train.once import reported_once

    with reported_once():
        _run(config, overrides)


def _run(path: Path, overrides: tuple[str, ...]) -> None:
    from train.settings.config_file import load_config

    settings, notes = load_config(path, overrides)

    from train.distributed import world
    from train.run.checkpoint import best_of
    from train.run.export import export
    from train.run.loop import RESUME, train
    from train.start.run_folder import is_ours

    parallel = settings.parallel
    with world(parallel.replicas, parallel.timeout_minutes, parallel.context, parallel.tensor) as ranks:
        if ranks.first:
            for note in [*notes, *_hints(settings)]:
                click.echo(f"note: {note}", err=True)
        try:
            progress = train(settings, ranks, click.echo)
        except Interrupted:
            if ranks.first:
                raise
            sys.exit(Interrupted.exit_code)  # rank 0 prints the message
    if not ranks.first:
        return
    if settings.export is not None and not settings.export.exists():
        checkpoint, moved = settings.save.path / progress.name, settings.model.path
        if settings.evaluate.best is not None:
            best = best_of(settings.save.path)
            if best is not None and not is_ours(best):
                click.echo(f"note: the best checkpoint, {best}, is not there: {checkpoint.name} is exported", err=True)
            else:
                checkpoint = best or checkpoint
        for note in export(checkpoint, settings.export, settings.chat_template, moved):
            click.echo(f"note: {note}", err=True)
        click.echo(f"exported {checkpoint.name} to {settings.export}")
    (settings.save.path / RESUME).unlink(missing_ok=True)


def _hints(settings: Config) -> list[str]:
    """Notes on environment variables and names that have an effect in GPT-NeoX, but none here."""
    idle = [(name, os.environ[name], instead) for name, instead in VARIABLES.items() if name in os.environ]
    notes = [f"{name} {value} in the environment has no effect: {instead}" for name, value, instead in idle]
    return notes + [f"{path} means the files without .bin" for path in settings.data.train if path.suffix == ".bin"]


@command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=FILE)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Number of GPUs it will run on.")
@click.option("--device", metavar="A100|H100|…", help="Estimate the time on GPUs of this kind.")
@click.option("--gpus-per-node", type=click.IntRange(1), help="With --device: node hours too.")
@click.option("--mfu", type=Finite(0, 1, min_open=True), default=0.4, show_default=True,
              help="Expected MFU, the share of their peak; the log of a run has it.")  # fmt: skip
@as_json
def plan(
    config: Path,
    overrides: tuple[str, ...],
    ranks: int,
    device: str | None,
    gpus_per_node: int | None,
    mfu: float,
    as_json: bool,
) -> None:
    """Estimate a training: batch equation, steps, tokens, memory, time. Needs no GPU."""
    from converters.common.progress import size, table
    from train.run.estimate import PEAK, estimate
    from train.settings.batching import passes
    from train.settings.config_file import load_config

    if device is not None and device not in PEAK:
        raise UsageError(f"the peak speed of a {device} is not known", f"--device is one of {', '.join(PEAK)}")
    if gpus_per_node is not None and device is None:
        raise UsageError("--gpus-per-node needs --device, which says how long it takes", "--device A100")
    settings, notes = load_config(config, overrides)
    needs = estimate(settings, ranks)
    total, tokens = sum(needs.memory.values()), sum(row_plan.counts["tokens"] for row_plan in needs.rows.plans)
    seconds = needs.seconds(device, mfu) if device else None
    if as_json:
        facts = {"rows": len(needs.rows), "tokens": tokens, "batch": needs.sizes.size, "steps": needs.steps}
        facts |= {"parameters": needs.parameters, "trained": needs.trained, "bytes": total}
        facts |= {"epochs": needs.epochs, "flops": needs.flops, "memory": needs.memory, "seconds": seconds}
        facts |= {"mixture": [part._asdict() for part in needs.mixture]}
        click.echo(json.dumps(facts))
        return
    once = "" if needs.mixture else passes(len(needs.rows), settings.steps, needs.sizes.size)
    for note in [*notes, *_hints(settings), *filter(None, [needs.rows.overlong, once])]:
        click.echo(f"note: {note}", err=True)
    parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in needs.memory.items())
    fill = tokens / (len(needs.rows) * (settings.data.seq_length + 1))
    lines = [
        ("rows", f"{len(needs.rows)}, {100 * fill:.2f} % full, {tokens} tokens"),
        ("batch", needs.sizes),
        ("steps", f"{needs.steps}, {needs.epochs:.3g} epochs"),
        ("model", f"{needs.parameters:,} parameters, {needs.flops:.3g} floating point operations in all"),
        *([("adapters", f"{needs.trained:,} parameters are trained")] if settings.lora else []),
        *([("trained", f"{needs.trained:,} parameters, the others are frozen")] if settings.model.freeze else []),
        ("memory", f"about {size(total)} a rank: {parts}"),
    ]
    if seconds is not None:
        hours = f"about {seconds / 3600:.3g} h on {ranks} {device} at {100 * mfu:g} % MFU"
        nodes = math.ceil(ranks / gpus_per_node) if gpus_per_node else 0
        of_nodes = f", {seconds * nodes / 3600:.3g} node hours on {nodes} nodes" if nodes else ""
        lines.append(("time", f"{hours}, {seconds * ranks / 3600:.3g} GPU hours{of_nodes}"))
    click.echo(table(lines, ""))
    if needs.mixture:
        mixed = [
            (part.name, part.rows, f"{100 * part.share:.2f} %", part.trained, f"{part.epochs:.3g}", part.tokens)
            for part in needs.mixture
        ]
        click.echo("\n" + table([("set", "rows", "share", "trained rows", "epochs", "trained tokens"), *mixed], ""))
