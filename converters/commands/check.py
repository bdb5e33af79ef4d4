"""The commands that read weights to prove something about them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import (
    FILE,
    SOURCE,
    ShareType,
    as_json,
    effort,
    memory,
    opened,
    reading,
    replicas,
    settings_of,
    weights,
)
from converters.commands.running import require_new, write_new
from converters.common.cli_help import command
from formats.errors import (
    OptionNeededError,
    RefusedError,
    SourceError,
    UnsupportedError,
    UsageError,
    VerificationError,
    some,
)

if TYPE_CHECKING:
    from converters.library.effects import Effects
    from converters.move.journal import Share


@command()
@click.argument("src", type=SOURCE)
@click.option("--tensors", is_flag=True, help="Print the digest of every logical tensor too.")
@reading
@weights
@replicas
@effort
@as_json
def digest(src: Path, tensors: bool, as_json: bool, **options: Any) -> None:
    """A hash of the weights, the same in every format and topology.

    A model without a table (`convert formats`) is hashed under the names that its files have, and a note says so.
    """
    from converters.library.proving import digest_with

    result = digest_with(opened(src, options), _effects(options, as_json))
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
        return
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    for name in sorted(result.tensors) if tensors else ():
        click.echo(f"{result.tensors[name]}  {name}")
    click.echo(f"{result.digest}  {src}")


@command()
@click.argument("out", type=SOURCE)
@click.argument("src", type=SOURCE, required=False)
@click.option(
    "--part",
    "share",
    type=ShareType(),
    metavar="I/N",
    help="The I-th of N parts, against the manifest, beside others on any nodes, and resumed after a kill. The "
    "same command without it finishes.",
)
@reading
@weights
@replicas
@effort
@as_json
def verify(out: Path, src: Path | None, share: Share | None, as_json: bool, **options: Any) -> None:
    """Check OUT against its manifest, or against SRC in any format.

    A checkpoint of another program has no manifest: its files of torch.save are checked against their own CRC-32, files
    in the Hub's cache against their names, which are hashes; and they must make a checkpoint together, whole and with
    equal copies.
    """
    from converters.common.hub_names import folder_of
    from converters.library.proving import verify_with
    from formats.checkpoint import MANIFEST
    from formats.disk.handle import is_remote

    folder, note = folder_of(out) if src is None else (out, "")
    whole = src is None and (is_remote(folder) or not folder.is_dir() or any(folder.rglob(MANIFEST)))
    if share is not None and not whole:
        raise UsageError("--part compares with a manifest", f"without it: convert verify {out} {src or ''}".rstrip())
    if src is None and not whole:
        if note:
            click.echo(f"note: {note}", err=True)
        _verify_alone(folder, options, as_json)
        return
    result = verify_with(out, src, _effects(options, as_json), share)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    result.require(f"convert diff {out} {src}" if src else "copy the checkpoint again, or compare it with its source")
    if share is not None and not as_json:
        remaining = "the same command without --part finishes"
        click.echo(f"part {share} of {out} equals {result.name}: {result.tensors} tensors, {remaining}")
    elif not as_json:
        click.echo(f"{out} equals {result.name}: {result.tensors} tensors\ndigest {result.digest}")


def _verify_alone(folder: Path, options: Mapping[str, Any], as_json: bool) -> None:
    """Check the files of a folder against the checksums that they have themselves."""
    from converters.common.progress import Progress
    from converters.prove import hub_blobs
    from converters.prove.archive_crc import archives, check
    from formats.checkpoint import MANIFEST
    from formats.torch_files import saves

    paths, blobs = archives(folder), hub_blobs.blobs(folder)
    with Progress("checking", sum(path.stat().st_size for path in (*paths, *blobs)), as_json) as progress:
        result = check(paths, options["threads"], progress.advance)
        changed = hub_blobs.changed(blobs, options["threads"], progress.advance)
    if not result.files and not blobs:
        raise SourceError(
            f"{folder} holds no {MANIFEST}, and no file of torch.save, which has checksums of its own",
            f"compare it with its source: convert verify {folder} SRC",
        )
    mixed = list[str]()
    for note in () if result.damaged else sorted(folder.rglob(saves.RECORD)):
        record = saves.recorded(note.parent) or {}
        files = saves.files_of(record, note.parent)
        mixed += [str(note.parent / name) for name in saves.differing(record, files)]
    weights = folder.rglob("*.safetensors")
    unchecked = sorted(str(path.relative_to(folder)) for path in weights if hub_blobs.blob(path) not in blobs)
    wrong = bool(result.damaged or mixed or changed)
    unopened = None if wrong else _unopened(folder, options)
    if as_json:
        of_hub = {"blobs": len(blobs), "changed": [*map(str, changed)]}
        others = {"mixed": mixed, "unchecked": unchecked, "unopened": unopened}
        facts = {"equal": not (wrong or unchecked), **asdict(result), **others, **of_hub}
        click.echo(json.dumps(facts, indent=1))
    if mixed:
        raise VerificationError(
            f"{folder} is a mixture of different saves: {some(mixed, 5)} are recorded otherwise", "copy them again"
        )
    if result.damaged:
        names = "; ".join(result.damaged[:5]) + (" …" if len(result.damaged) > 5 else "")
        raise VerificationError(
            f"{len(result.damaged)} parts of {folder} are not what was written: {names}", "copy them again"
        )
    if changed:
        raise VerificationError(
            f"{len(changed)} of {len(blobs)} files of {folder} are not what the Hub has, by the hashes in their names: "
            f"{some([*map(str, changed)], 5)}",
            "remove them, and download the model again",
        )
    if blobs and not as_json:
        click.echo(f"{folder}: {len(blobs)} files, each with the hash that the Hub has of it")
    if result.files and not as_json:
        click.echo(f"{folder}: {result.files} files, {result.members} parts, each with its CRC-32")
        if result.unrecorded or result.others:
            click.echo(f"without one: {result.unrecorded} parts, {len(result.others)} files that are no archives")
    if unchecked:
        raise SourceError(
            f"{some(unchecked, 5)} of {folder} {'has' if len(unchecked) == 1 else 'have'} no checksum, and what was "
            "checked is without a fault",
            f"compare it with its source: convert verify {folder} SRC",
        )
    if unopened:
        click.echo(f"note: whether the files are one checkpoint was not looked at: {unopened}", err=True)


def _unopened(folder: Path, options: Mapping[str, Any]) -> str | None:
    """Why a folder could not be opened as a checkpoint, or what was not looked at in it; None when all was.

    Raises:
        SourceError: the files do not belong together, or some are missing.
        VerificationError: copies of a tensor differ.
    """
    from converters.library.effects import own_config
    from converters.prove.belonging import require_one_checkpoint
    from formats.registry import is_known

    if not is_known(folder):
        return f"{folder} is not a checkpoint of a known format"
    try:
        effects = _effects(options, quiet=True)
        checkpoint = effects.open(folder, own_config(folder, effects.settings))
        return require_one_checkpoint(checkpoint, effects.limits) or None
    except (OptionNeededError, RefusedError, UnsupportedError, UsageError) as error:
        return str(error)


@command()
@click.argument("one", type=SOURCE)
@click.argument("two", type=SOURCE)
@click.option("--tensors", is_flag=True, help="List every tensor that differs.")
@click.option("--html", type=FILE, metavar="FILE", help="Which tensors differ, and where and how, as one page.")
@reading
@weights
@replicas
@memory
@as_json
def diff(one: Path, two: Path, tensors: bool, html: Path | None, memory: int, as_json: bool, **options: Any) -> None:
    """Compare two checkpoints in any formats; exit 6 when they differ."""
    from converters.commands.diff_text import lines
    from converters.library.proving import diff_with
    from converters.plan.agreement import APART

    if html:
        require_new(html)
    effects = _effects({**options, "memory": memory, "threads": 1}, as_json)
    result = diff_with(one, two, effects, measured=html is not None)
    if html:
        from converters.commands.pages.diff import page

        write_new(html, page(result, one, two))
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
    else:
        for line in lines(result, tensors):
            click.echo(line)
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    if result.config and not as_json:
        click.echo(f"{APART}: {some(result.config, 6)}")
    if not result.equal:
        counts = {"setting": len(result.settings), "tensor": len(result.tensors)}
        counted = " and ".join(f"{count} {noun}{'s' * (count > 1)}" for noun, count in counts.items() if count)
        raise VerificationError(
            f"{one} and {two} differ in {counted}", "" if tensors else "--tensors lists each tensor"
        )
    if not as_json:
        settings = "and the settings that they depend on" if result.config else "all settings"
        click.echo(f"{one} and {two} are equal: {result.compared} tensors, {settings}")


def _effects(options: Mapping[str, Any], quiet: bool) -> Effects:
    """The settings and limits with which a proof opens and reads checkpoints, from the options of a command."""
    from converters.library.effects import Effects
    from converters.plan.request import Limits

    limits = Limits(options["threads"], options["memory"], options["replicas"])
    return Effects(settings_of(options), limits, options["family"], quiet)
