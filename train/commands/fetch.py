"""`train fetch`: makes training data of a public data set, or of files."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import FOLDER, as_json
from converters.common.atomic import STOPS, handling_signals
from converters.common.cli_help import command

if TYPE_CHECKING:
    from types import FrameType

    from train.data.fetch.fetch import Counts
    from train.data.fetch.recipe import Recipe
    from train.data.fetch.sources import Source

OFTEN, MASK = 0.5, 0xFF
"""Seconds between two updates of the progress line on a terminal; the clock is read once every 256 records."""
AGAIN = 5.0
"""Seconds after which a signal is raised again, in case a library has swallowed it."""
PREVIEW = 1000
"""Maximum number of records that --dry-run reads."""


@command()
@click.argument("recipe", required=False)
@click.argument("out", type=FOLDER, required=False, metavar="[OUT.jsonl]")
@click.option("--list", "listing", is_flag=True, help="List the recipes that are included.")
@click.option("--source", metavar="SET|PATH", help="Read this instead: org/name of the Hub, ./file or ./folder.")
@click.option("--split", "splits", multiple=True, metavar="NAME", help="Read this split; repeat it.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit on the Hub.  [default: main]")
@click.option("--sample", type=click.IntRange(1), metavar="N", help="Draw N of the records, in their order.")
@click.option("--seed", type=click.IntRange(0), metavar="S", help="Seed of --sample.  [default: 0]")
@click.option("--dedup", type=click.Choice(["prompt"]), help="Keep the first record of those with the same prompt.")
@click.option("--cache", type=FOLDER, metavar="FOLDER", help="Copy the set there first; read the copy if it is there.")
@click.option("--strict", is_flag=True, help="Stop at a malformed record instead of dropping it.")
@click.option("-n", "--dry-run", is_flag=True, help="Read the first records, print what they become, write nothing.")
@click.option("--force", is_flag=True, help="Replace OUT.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@as_json
def fetch(recipe: str | None, out: Path | None, listing: bool, as_json: bool, **options: Any) -> None:
    """Public data or files to JSON lines, by a RECIPE: a name of --list, or a YAML file.

    It needs internet access unless the source is local or a copy that --cache made.
    """
    from formats.errors import UsageError
    from train.data.fetch.recipe_yaml import load, override

    if listing:
        _list(as_json)
        return
    if recipe is None:
        raise UsageError("no recipe is named", "train fetch --list")
    loaded = override(
        load(recipe),
        source=options["source"],
        splits=options["splits"],
        revision=options["revision"],
        sample=options["sample"],
        seed=options["seed"],
        dedup=True if options["dedup"] else None,
    )
    if options["seed"] is not None and loaded.sample is None:
        raise UsageError("--seed has no effect without --sample", "--sample N --seed S")
    quiet = options["quiet"] or as_json
    target = (out or Path(f"{loaded.name}.jsonl")).expanduser()
    with _ended_by_signals():
        _run(loaded, target, quiet, as_json, options)


def _run(recipe: Recipe, out: Path, quiet: bool, as_json: bool, options: dict[str, Any]) -> None:
    from train.data.fetch.fetch import check_free
    from train.data.fetch.fetch import fetch as fetched
    from train.data.fetch.hub_copy import copy_set
    from train.data.fetch.sources import open_source

    if not options["dry_run"]:
        check_free(out, options["force"])
    began, commit = time.monotonic(), None
    if options["cache"]:
        recipe, commit = copy_set(recipe, options["cache"].expanduser(), quiet)
    source = open_source(recipe, quiet)
    if options["dry_run"]:
        _preview(recipe, source, out, options["strict"], as_json)
        return
    with _line(quiet) as tell:
        counts = fetched(recipe, source, out, options["force"], options["strict"], tell)
    _report(recipe, source, commit or source.revision, out, counts, time.monotonic() - began, as_json)


def _report(
    recipe: Recipe, source: Source, commit: str | None, out: Path, counts: Counts, seconds: float, as_json: bool
) -> None:
    from train.data.fetch.fetch import explanations, summary

    if as_json:
        facts = {"out": str(out), "examples": counts.written, "bytes": counts.nbytes, **_counted(counts)}
        drawn = {"sample": recipe.sample, "seed": recipe.seed} if recipe.sample else {}
        click.echo(json.dumps({**facts, **drawn, **_origin(recipe, source, commit), "seconds": round(seconds, 3)}))
        return
    for line in explanations(counts):
        click.echo(f"dropped as {line}", err=True)
    if recipe.sample and counts.written < recipe.sample:
        click.echo(f"note: a sample of {recipe.sample} was asked for, there are no more records", err=True)
    click.echo(summary(counts) + (f"; commit {commit}" if commit else ""))
    click.echo(f"Saved {counts.written} examples to {out}")


def _preview(recipe: Recipe, source: Source, out: Path, strict: bool, as_json: bool) -> None:
    """Print the output of the first records."""
    from train.data.fetch.fetch import Counts, made, summary

    counts, first = Counts(), b""
    for record in made(recipe, source, counts, strict):
        first = first or record.line
        if counts.read >= PREVIEW:
            break
    if as_json:
        facts = {"out": str(out), **_counted(counts), **_origin(recipe, source, source.revision)}
        click.echo(json.dumps({**facts, "first": json.loads(first) if first else None}))
        return
    for name, _ in source.parts:
        click.echo(f"read: {name}")
    for condition in recipe.where:
        click.echo(f"where: {condition.field} {condition.test} {json.dumps(condition.value, ensure_ascii=False)}")
    drawn = f", a sample of {recipe.sample} with seed {recipe.seed}" if recipe.sample else ""
    click.echo(f"write: {out} as {recipe.form}{', each prompt once' if recipe.dedup else ''}{drawn}")
    click.echo(f"first records: {summary(counts)}")
    click.echo(first.decode(), nl=False)


def _counted(counts: Counts) -> dict[str, Any]:
    return {"read": counts.read, "kept": counts.kept, "dropped": dict(counts.dropped.most_common())}


def _origin(recipe: Recipe, source: Source, commit: str | None) -> dict[str, Any]:
    parts = [name for name, _ in source.parts]
    return {"recipe": recipe.name, "source": list(recipe.source), "commit": commit, "parts": parts}


def _list(as_json: bool) -> None:
    from converters.common.progress import table
    from train.data.fetch.recipe_yaml import shipped

    known = shipped()
    if as_json:
        click.echo(
            json.dumps(
                [{"name": recipe.name, "about": recipe.about, "source": list(recipe.source)} for recipe in known]
            )
        )
        return
    click.echo(table(((recipe.name, recipe.source[0], recipe.about) for recipe in known), ""))


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let signals end the work, with exit code 75 and without partial output.

    A library may swallow the exception and keep waiting for a server, so the signal is raised again every 5 s.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
        signal.default_int_handler(number, frame)

    with handling_signals(end, (*STOPS, signal.SIGALRM)):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _line(quiet: bool) -> Iterator[Any]:
    """Yield a function that shows progress: one live line on a terminal, one line every 30 s in a log file."""
    from converters.common.progress import EVERY

    terminal, began = sys.stderr.isatty(), time.monotonic()
    reported = began

    def tell(counts: Counts) -> None:
        nonlocal reported
        if quiet or counts.read & MASK:
            return
        now = time.monotonic()
        if now - reported >= (OFTEN if terminal else EVERY):
            reported = now
            text = f"{counts.read:,} read, {counts.kept:,} kept, {counts.read / (now - began):,.0f} a second"
            sys.stderr.write(f"\r{text}\x1b[K" if terminal else f"{text}\n")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        if terminal and reported != began:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
