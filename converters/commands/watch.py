"""`convert watch`: each new checkpoint of a training becomes a Hugging Face folder, once."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import (
    FOLDER,
    NAMED,
    adapter,
    as_json,
    chat_template,
    dtype,
    effort,
    policy,
    reading,
    shard_size,
    weights,
)
from converters.common.cli_help import Finite, command
from converters.common.cli_main import printable

if TYPE_CHECKING:
    from converters.library.exporting import Export
    from converters.library.watch_log import Watch

OWN = ("to", "out", "push", "every", "idle", "once", "keep", "keep_every", "dry_run", "quiet", "as_json")
"""Options of the watch itself; all others are options of each conversion."""
IDLE = 48


@command()
@click.argument("run", type=FOLDER)
@click.option("--to", type=click.Choice(["hf"]), default="hf", show_default=True, help="What each becomes.")
@click.option("--out", type=FOLDER, required=True, metavar="DIR", help="Each becomes DIR/NAME, NAME of its folder.")
@click.option("--push", type=NAMED, metavar="ORG/NAME", help="Then send it to the Hub, into a branch of its name.")
@click.option(
    "--every",
    type=Finite(min=0.01),
    default=5,
    show_default=True,
    metavar="MIN",
    help="Minutes between two checks.",
)
@click.option(
    "--idle",
    type=Finite(min=0),
    default=IDLE,
    show_default=True,
    metavar="HOURS",
    help="End when no checkpoint was new for so long.",
)
@click.option("--once", is_flag=True, help="Check once. Exit code 75 as long as the watch is not finished.")
@click.option("--keep", type=click.IntRange(1), metavar="N", help="Delete all but the newest N of DIR.  [default: all]")
@click.option("--keep-every", type=click.IntRange(1), metavar="STEPS", help="Keep those of such steps too.")
@shard_size
@chat_template
@adapter
@weights
@dtype
@policy
@reading
@effort
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be converted now.")
@click.option("-q", "--quiet", is_flag=True, help="Failures only.")
@as_json
def watch(run: Path, **options: Any) -> None:  # fmt: skip
    """Convert each new checkpoint of a training once, when it is complete.

    RUN is the folder of the training. Its trainer says what is complete: by latest_checkpointed_iteration.txt, latest,
    trainer_state.json or .metadata. What happened is in DIR/.watch, so that any number of watches, on any nodes, share
    the work, and the same command resumes after a kill. Checkpoints of other names, and links, are left alone.
    """
    from converters.library import watching
    from converters.library.watch_log import begin, records
    from formats.errors import Interrupted

    watched = _watch_of(run, options)
    if options["dry_run"]:
        _show(watched, options["as_json"])
        return
    begin(watched, anew=not options["once"])
    with watching.stoppable() as stop:
        while True:
            try:
                watching.look(watched, stop)
            except OSError as error:
                if error.errno not in watching.FULL:
                    raise
                click.echo(f"note: {watched.out}: {error.strerror}", err=True)
            if watching.is_over(watched, records(watched)):
                watching.require_all(watched)
                return
            if options["once"]:
                sys.exit(Interrupted.exit_code)
            stop.check(60 * options["every"])


def _watch_of(run: Path, options: Mapping[str, Any]) -> Watch:
    """The watch from the options of the command.

    Raises:
        UsageError: an option has an impossible value, or has no effect without another one.
        SourceError: RUN is not a folder.
    """
    from converters.hub.push_plan import check_names
    from converters.hub.upload import require_token
    from converters.library.options import Conversion, checked
    from converters.library.watch_log import Watch
    from formats.detect import commits
    from formats.errors import SourceError, UsageError
    from formats.model.settings import parse_settings

    if options["keep_every"] and not options["keep"]:
        raise UsageError("--keep-every adds to what --keep keeps", "--keep 3, for instance; without it all are kept")
    if options["out"].absolute() == run.absolute():
        raise UsageError(f"--out {run} is the folder of the training itself", "--out models, for instance")
    if not run.is_dir():
        raise SourceError(f"{run} is not a folder", "name that of the training, before its first checkpoint too")
    above = [options["out"].resolve(), *options["out"].resolve().parents]
    if inside := [run / name for name in commits.folders(run) if (run / name).resolve() in above]:
        raise UsageError(f"--out {options['out']} is in {inside[0]}, a checkpoint of the training", "--out models")
    if options["push"]:
        check_names(options["push"], None)
        if not options["dry_run"]:
            require_token()
    given = {name: value for name, value in options.items() if name not in OWN and value not in (None, (), False)}
    given["set"] = parse_settings(given.pop("settings", ()))
    if "family" in given:
        given["family"] = str(given["family"].file)
    places = {name: str(Path(given[name]).absolute()) for name in ("config",) if name in given and given[name].exists()}
    given = checked({**given, **places}, Conversion.__optional_keys__)

    told = set[str]()

    def tell(export: Export) -> None:
        if options["as_json"]:
            click.echo(json.dumps({"src": str(export.src), "out": str(export.out), **export.outcome}))
            return
        for text in [text for text in (export.error, *export.notes) if text and text not in told]:
            click.echo(printable(f"note: {export.src.name}: {text}"), err=True)
        told.update(export.notes)
        if not export.error and not options["quiet"]:
            click.echo(
                f"{options['out'] / export.out.name}: digest {export.digest}"
                + (f", {export.url}" if export.url else "")
            )

    def tell_removed(model: Path, reason: str) -> None:
        shown = options["out"] / model.name
        if reason:
            text = f"{shown} {reason}; --keep leaves it, delete it yourself"
            click.echo(printable(f"note: {text}"), err=True)
        elif not options["quiet"]:
            click.echo(printable(f"{shown}: deleted, as --keep says"), err=options["as_json"])

    retention = options["keep"], options["keep_every"]
    return Watch(
        run.absolute(),
        options["out"].absolute(),
        given,
        options["push"],
        *retention,
        3600 * options["idle"],
        tell,
        tell_removed,
    )


def _show(watched: Watch, as_json: bool) -> None:
    """Print the checkpoints that are due, or the plans of those that can be converted.

    Raises:
        VitruvianError: none of them can be converted.
    """
    from converters.library import conversion, watching
    from converters.library.options import Planning
    from converters.library.watch_log import last, records
    from formats.detect import commits
    from formats.errors import VitruvianError

    states = last(records(watched))
    todo = watching.due(watched, states)
    if as_json:
        names = Planning.__optional_keys__
        asked = {name: value for name, value in watched.options.items() if name in names}

        def planned(folder: Path) -> Mapping[str, Any] | VitruvianError:
            try:
                return conversion.plan(folder, **asked).record
            except VitruvianError as error:
                return error

        plans = {checkpoint.folder.name: planned(checkpoint.folder) for checkpoint in todo}
        refused = [plan for plan in plans.values() if isinstance(plan, VitruvianError)]
        if refused and len(refused) == len(plans):
            raise refused[-1]
        for name, plan in plans.items():
            if isinstance(plan, VitruvianError):
                click.echo(printable(f"note: {name}: {plan}"), err=True)
            else:
                click.echo(json.dumps(plan))
        return
    waiting = {checkpoint.folder.name for checkpoint in todo}
    overwritten = commits.overwritten(watched.run)
    for name in dict.fromkeys([*states, *commits.folders(watched.run)]):
        state = "to be converted" if name in waiting else states[name]["state"] if name in states else "not complete"
        if state == "converted" and not (watched.out / name).exists():
            state = f"converted, and no longer in {watched.out}"
        if name not in waiting and watching.is_stale(watched, name, states):
            state = watching.stale_text(watched, name)
        click.echo(printable(f"{name}: {overwritten.get(name, state)}"))
