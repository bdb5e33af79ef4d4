"""`train run`: a training, under torchrun, srun, or alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from converters.commands.options import FILE, as_json
from formats.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from train.settings.config import Config

VARIABLES = {
    "CURSE_ATTENTION": "documents of a row never see each other",
    "SAMPLE_ENDS": "documents of a row never see each other",
    "SFT_ENABLED": "data.loss says what is trained: assistant, or all",
}
"""Variables of the users' GPT-NeoX, and what decides instead."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=FILE)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def run(config: Path, overrides: tuple[str, ...]) -> None:
    """Fine-tune on packed rows.

    \b
    torchrun --nproc-per-node 8 -m train run CONFIG.yml [--optim.lr 1e-5 …]

    Every setting of the file can be given as a dotted word. Under srun with a task for each GPU torchrun is not needed.
    Run again, it goes on from its latest checkpoint.
    """  # noqa: D301  # \b is the sign of click for lines as they stand
    from train.once import reported_once

    with reported_once():
        _run(config, overrides)


def _run(path: Path, overrides: tuple[str, ...]) -> None:
    from train.settings.config import load_config

    settings, notes = load_config(path, overrides)

    from train.distributed import world
    from train.run.export import export
    from train.run.loop import RESUME, train

    with world(settings.parallel.replicas, settings.parallel.timeout_minutes) as ranks:
        if ranks.first:
            for note in [*notes, *_hints(settings)]:
                click.echo(f"note: {note}", err=True)
        try:
            progress = train(settings, ranks, click.echo)
        except Interrupted:
            if ranks.first:
                raise
            sys.exit(Interrupted.exit_code)  # one of them tells
    if not ranks.first:
        return
    if settings.export is not None and not settings.export.exists():
        checkpoint, moved = settings.save.path / progress.name, settings.model.path
        note = export(checkpoint, settings.export, settings.chat_template, moved)
        if note:
            click.echo(f"note: {note}", err=True)
        click.echo(f"exported to {settings.export}")
    (settings.save.path / RESUME).unlink(missing_ok=True)


def _hints(settings: Config) -> list[str]:
    """What has no effect, though a user of GPT-NeoX may think so."""
    idle = [(name, os.environ[name], told) for name, told in VARIABLES.items() if name in os.environ]
    notes = [f"{name} {value} in the environment has no effect: {told}" for name, value, told in idle]
    return notes + [f"{path} means the files without .bin" for path in settings.data.train if path.suffix == ".bin"]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=FILE)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="How many GPUs it will run on.")
@click.option("--device", metavar="A100|H100|…", help="Tell the time on GPUs of this kind.")
@click.option("--mfu", type=click.FloatRange(0, 1, min_open=True), default=0.4, show_default=True,
              help="Share of their speed that they will reach; the log of a run tells it.")  # fmt: skip
@as_json
def plan(config: Path, overrides: tuple[str, ...], ranks: int, device: str | None, mfu: float, as_json: bool) -> None:
    """What a training will take: batch equation, steps, tokens, memory, time. Needs no GPU."""
    from converters.common.progress import size, table
    from train.run.estimate import PEAK, estimate
    from train.settings.batching import passes
    from train.settings.config import load_config

    if device is not None and device not in PEAK:
        raise UsageError(f"nobody knows how fast a {device} is", f"--device is one of {', '.join(PEAK)}")

    settings, notes = load_config(config, overrides)
    found = estimate(settings, ranks)
    total, tokens = sum(found.memory.values()), sum(one.counts["tokens"] for one in found.rows.plans)
    seconds = found.seconds(device, mfu) if device else None
    if as_json:
        facts = {"rows": len(found.rows), "tokens": tokens, "batch": found.sizes.size, "steps": found.steps}
        facts |= {"parameters": found.parameters, "trained": found.trained, "bytes": total}
        facts |= {"epochs": found.epochs, "flops": found.flops, "memory": found.memory, "seconds": seconds}
        click.echo(json.dumps(facts))
        return
    once = passes(len(found.rows), settings.steps, found.sizes.size)
    for note in [*notes, *_hints(settings), *filter(None, [found.rows.overlong, once])]:
        click.echo(f"note: {note}", err=True)
    parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in found.memory.items())
    fill = tokens / (len(found.rows) * (settings.data.seq_length + 1))
    lines = [
        ("rows", f"{len(found.rows)}, {100 * fill:.2f} % full, {tokens} tokens"),
        ("batch", found.sizes),
        ("steps", f"{found.steps}, {found.epochs:.3g} epochs"),
        ("model", f"{found.parameters:,} parameters, {found.flops:.3g} floating point operations in all"),
        *([("adapters", f"{found.trained:,} parameters are trained")] if settings.lora else []),
        ("memory", f"about {size(total)} a rank: {parts}"),
    ]
    if seconds is not None:
        told = f"about {seconds / 3600:.3g} h on {ranks} {device} at {100 * mfu:g} % MFU"
        lines.append(("time", f"{told}, {seconds * ranks / 3600:.3g} GPU hours"))
    click.echo(table(lines, ""))
