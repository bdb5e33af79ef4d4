"""The commands that read weights to prove something about them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import (
    FOLDER,
    as_json,
    effort,
    memory,
    opened,
    reading,
    replicas,
    require_effect,
    require_family,
    weights,
)
from formats.errors import (
    OptionNeededError,
    RefusedError,
    SourceError,
    UnsupportedError,
    UsageError,
    VerificationError,
    some,
)
from formats.megatron import DIST, MEGATRON

if TYPE_CHECKING:
    from converters.plan.plan import Job
    from formats.checkpoint import Checkpoint


@click.command()
@click.argument("src", type=FOLDER)
@click.option("--tensors", is_flag=True, help="Print the digest of every logical tensor too.")
@reading
@weights
@replicas
@effort
@as_json
def digest(src: Path, tensors: bool, as_json: bool, **options: Any) -> None:
    """A hash of the weights, the same in every format and topology."""
    from converters.common.manifest import total

    found = _digests(opened(src, options), options, as_json)
    if as_json:
        click.echo(json.dumps({"digest": total(found), "tensors": found}, indent=1))
        return
    for name in sorted(found) if tensors else ():
        click.echo(f"{found[name]}  {name}")
    click.echo(f"{total(found)}  {src}")


@click.command()
@click.argument("out", type=FOLDER)
@click.argument("src", type=FOLDER, required=False)
@reading
@weights
@replicas
@effort
@as_json
def verify(out: Path, src: Path | None, as_json: bool, **options: Any) -> None:
    """Check OUT against its manifest, or against SRC in any format.

    A checkpoint of another program has no manifest: its files of torch.save are checked against their own CRC-32, and
    must make a checkpoint together.
    """
    from converters.common.manifest import contradictions, is_verbatim, read_manifest, remembered_states, total
    from formats.checkpoint import MANIFEST
    from formats.model.spec import Verbatim, differences

    if src is None and out.is_dir() and not any(out.rglob(MANIFEST)):
        _verify_archives(out, options, as_json)
        return
    options["verbatim"] |= src is None and is_verbatim(out)
    checkpoint = opened(out, _own_config(out, options), alone=src is None)
    settings: list[str]
    if src is not None:
        source = opened(src, _own_config(src, options, out), alone=False)
        require_effect(options, checkpoint, source)
        require_family(options, checkpoint, source)
        settings = differences(checkpoint.spec, source.spec)
        against, name = _digests(source, options, as_json), str(src)
    else:
        remembered, name = read_manifest(checkpoint.home), MANIFEST
        if remembered is None:
            raise SourceError(
                f"{checkpoint.home} holds no {MANIFEST}", f"compare it with its source: convert verify {out} SRC"
            )
        facts, against = remembered
        if isinstance(checkpoint.spec, Verbatim) and "layers" in facts and not options["verbatim"]:
            raise VerificationError(
                f"{out} is of a model that a table described when {name} was written, and none does now: "
                f"{checkpoint.spec.why}",
                "correct its config.json",
            )
        settings = contradictions(checkpoint.spec.settings(), facts)
    found = _digests(checkpoint, options, as_json, checked=False)
    states = remembered_states(checkpoint.home) if src is None else {}
    held = _state_digests(checkpoint, options, as_json) if states else {}  # digests say more than a CRC-32
    here, there = {**found, **held}, {**against, **states}
    wrong = sorted(tensor for tensor in {*here, *there} if here.get(tensor) != there.get(tensor))
    if as_json:
        record = {"equal": not (wrong or settings), "digest": total(found), "against": total(against)}
        click.echo(json.dumps(record | {"settings": settings, "differing": wrong}, indent=1))
    if settings:
        raise VerificationError(f"{out} and {name} differ in settings (here | there): {'; '.join(settings)}")
    if wrong:
        names = ", ".join(wrong[:5]) + (" …" if len(wrong) > 5 else "")
        raise VerificationError(
            f"{len(wrong)} of {len({*here, *there})} tensors of {out} differ from {name}: {names}",
            f"convert diff {out} {src}" if src else "copy the checkpoint again, or compare it with its source",
        )
    if not as_json:
        click.echo(f"{out} equals {name}: {len(here)} tensors\ndigest {total(found)}")
    if "optimizer" in checkpoint.state and not states:
        click.echo("note: the weights were compared, the optimizer was not", err=True)
    if src is None and isinstance(checkpoint.spec, Verbatim):
        click.echo("note: no table says what its config.json means, which was not compared", err=True)


def _verify_archives(folder: Path, options: Mapping[str, Any], as_json: bool) -> None:
    from converters.common.progress import Progress
    from converters.prove.archive_crc import archives, check
    from formats.checkpoint import MANIFEST
    from formats.torch_files import saves

    paths = archives(folder)
    with Progress("checking", sum(path.stat().st_size for path in paths), as_json) as progress:
        found = check(paths, options["threads"], progress.advance)
    if not found.files:
        raise SourceError(
            f"{folder} holds no {MANIFEST}, and no file of torch.save, which has checksums of its own",
            f"compare it with its source: convert verify {folder} SRC",
        )
    mixed = list[str]()
    for note in () if found.damaged else sorted(folder.rglob(saves.RECORD)):
        record = saves.recorded(note.parent) or {}
        files = saves.files_of(record, note.parent)
        mixed += [str(note.parent / name) for name in saves.differing(record, files)]
    unopened = None if found.damaged or mixed else _unopened(folder, options)
    if as_json:
        facts = {"equal": not (found.damaged or mixed), **asdict(found), "mixed": mixed, "unopened": unopened}
        click.echo(json.dumps(facts, indent=1))
    if mixed:
        raise VerificationError(
            f"{folder} is a mixture of different saves: {some(mixed, 5)} are recorded otherwise", "copy them again"
        )
    if found.damaged:
        names = "; ".join(found.damaged[:5]) + (" …" if len(found.damaged) > 5 else "")
        raise VerificationError(
            f"{len(found.damaged)} parts of {folder} are not what was written: {names}", "copy them again"
        )
    if not as_json:
        click.echo(f"{folder}: {found.files} files, {found.members} parts, each with its CRC-32")
        if found.unrecorded or found.others:
            click.echo(f"without one: {found.unrecorded} parts, {len(found.others)} files that are no archives")
    if unopened:
        click.echo(f"note: whether the files are one checkpoint was not looked at: {unopened}", err=True)


def _unopened(folder: Path, options: Mapping[str, Any]) -> str | None:
    """Why a folder could not be opened as a checkpoint; None when it could.

    Raises:
        SourceError: its files do not belong together.
    """
    from formats.registry import is_known

    if not is_known(folder):
        return f"{folder} is no checkpoint of a known format"
    try:
        opened(folder, _own_config(folder, options))
    except (OptionNeededError, RefusedError, UnsupportedError, UsageError) as error:
        return str(error)
    return None


@click.command()
@click.argument("one", type=FOLDER)
@click.argument("two", type=FOLDER)
@reading
@weights
@replicas
@memory
@as_json
def diff(one: Path, two: Path, memory: int, as_json: bool, **options: Any) -> None:
    """Compare two checkpoints in any formats; exit 6 when they differ."""
    from converters.common.progress import Progress, table
    from converters.plan.request import Limits
    from converters.plan.targets import plan_reading
    from converters.prove.diff import compare
    from formats.model.spec import differences

    first = opened(one, _own_config(one, options, two), alone=False)
    second = opened(two, _own_config(two, options, one), alone=False)
    require_effect(options, first, second)
    require_family(options, first, second)
    settings = differences(first.spec, second.spec)
    left, right = plan_reading(first), plan_reading(second)
    with Progress("comparing", left.nbytes, as_json) as progress:
        found = compare(left, right, Limits(1, memory, options["replicas"]), progress.advance)
    if as_json:
        tensors = [{"name": d.name, "what": d.what, "elements": d.count, "largest": d.largest} for d in found]
        facts = {"equal": not settings and not found, "settings": settings, "tensors": tensors}
        click.echo(json.dumps(facts, indent=1))
    else:
        for line in settings:
            click.echo(f"setting {line}")
        counts = (f"{d.count} elements differ by up to {d.largest:g}" if d.count else "" for d in found)
        rows = [(d.name, d.what, count) for d, count in zip(found, counts, strict=True)]
        click.echo(table(rows, ""), nl=bool(rows))
    if settings or found:
        raise VerificationError(f"{one} and {two} differ in {len(settings)} settings and {len(found)} tensors")
    if not as_json:
        click.echo(f"{one} and {two} are equal: {len(left.jobs)} tensors, all settings")


def _own_config(path: Path, options: Mapping[str, Any], other: Path | None = None) -> dict[str, Any]:
    """Options for one of two checkpoints: its own config, else the one that was named, else that of the other."""
    own = (path / "config.json").is_file()
    if other is not None and options["config"] is None and (other / "config.json").is_file():
        return {**options, "config": None if own or _knows_itself(path) else other}
    return {**options, "config": None if own else options["config"]}


def _knows_itself(path: Path) -> bool:
    """Whether a checkpoint's settings are in it: Megatron's are."""
    return any(form.reader.detect(path) for form in (DIST, MEGATRON))


def _digests(source: Checkpoint, options: Mapping[str, Any], quiet: bool, checked: bool = True) -> dict[str, str]:
    """The digest of each logical tensor of a checkpoint."""
    from converters.plan.targets import plan_reading

    return _hashed(plan_reading(source).jobs, options, quiet, checked)


def _state_digests(source: Checkpoint, options: Mapping[str, Any], quiet: bool) -> dict[str, str]:
    """The digest of each state of a run's optimizer."""
    from converters.plan.training_state import state_jobs, training_of

    states, _ = training_of(source).states(source)
    return _hashed(state_jobs(source, states), options, quiet, checked=False)


def _hashed(jobs: Iterable[Job], options: Mapping[str, Any], quiet: bool, checked: bool) -> dict[str, str]:
    from converters.common.progress import Progress
    from converters.move.engine import digest_of
    from converters.plan.request import Limits

    every = list(jobs)
    limits = Limits(options["threads"], options["memory"], options["replicas"])
    with Progress("hashing", sum(job.nbytes for job in every), quiet) as progress:
        return digest_of(every, limits, progress.advance, checked=checked)
