"""How a command that writes a checkpoint carries out its plan."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.registry import format_of

if TYPE_CHECKING:
    from converters.move.source_checks import Verdict
    from converters.plan.plan import Job, Plan
    from converters.plan.request import Request
    from formats.checkpoint import Checkpoint


def request_of(out: Path, options: Mapping[str, Any], source: Checkpoint) -> Request:
    """What the options of `writing` ask for. Copies that differ are a damage, where they do not drift by themselves."""
    from converters.plan.request import Limits, Request

    usual = format_of(source).replicas
    replicas = options["replicas"] or ("mean" if usual == "drift" and source.proof is not None else usual)
    limits = Limits(options["threads"], options["memory"], replicas, accepted=options["accept"])
    cast = None if options["dtype"] == "keep" else options["dtype"]
    return Request(out, cast, limits, options["force"], options["verify"], options["quiet"] or options["as_json"])


def to_huggingface(source: Checkpoint, out: Path, options: Mapping[str, Any]) -> None:
    """Write a Hugging Face folder."""
    from converters.plan.targets import plan_huggingface

    request = request_of(out, options, source)
    carry_out(plan_huggingface(source, request, options["shard_size"], options["template"]), request, options)


def is_written(plan: Plan, request: Request) -> bool:
    """Whether OUT is what a plan would write. The source is read for it: a training may have written it anew."""
    from converters.common.progress import Progress
    from converters.move.engine import digest_of
    from converters.prove.digest import same_output

    remembered = same_output(plan, request.place)
    if remembered is None:
        return False
    jobs = [replace(job, targets=()) for job in plan.jobs]
    with Progress("comparing", plan.nbytes, request.quiet) as progress:
        return digest_of(jobs, request.limits, progress.advance) == remembered


def carry_out(plan: Plan, request: Request, options: Mapping[str, Any]) -> None:
    """Print the plan, or run it (or a share of it) and print what came out."""
    from converters.commands.inspect_text import drift_lines, plan_lines, plan_record
    from converters.common.manifest import check_manifest, total
    from converters.common.progress import size
    from converters.convert import check_paths, run, run_share
    from converters.prove import digest
    from formats.torch_files import saves

    record, share = plan_record(plan), options["share"]
    if options["dry_run"]:
        click.echo(json.dumps(record, indent=1) if options["as_json"] else "\n".join(plan_lines(plan)))
        check_paths(plan.source, request)
        check_manifest(plan.source)
        return
    for note in record["notes"]:
        click.echo(f"note: {note}", err=True)
    began = time.monotonic()
    averaged: dict[str, float] = {}
    verdicts: list[Verdict] = []

    def drifted(job: Job, distance: float) -> None:
        averaged[job.name] = distance

    if share is not None:
        jobs = run_share(plan, share, request, drifted)
        name, tensors, nbytes = f"part {share} of {request.out}", len(jobs), sum(job.nbytes for job in jobs)
        facts: dict[str, Any] = {"part": str(share)}
        told = "the same command without --part finishes"
    else:
        digests = run(plan, request, drifted, verdicts.append)
        name, tensors, nbytes, weights = (
            str(request.out),
            len(digests),
            plan.nbytes,
            total(digest.of_weights(plan, digests)),
        )
        (checked,) = verdicts
        facts = {"digest": weights, "verified": request.verify, "source_checksums": checked.record()}
        told = f"{'read back and equal' if request.verify else 'not read back'}\n"
        paths = {part.fragment.path for job in plan.jobs for part in job.sources if part.fragment.member}
        loose = saves.untied(plan.source.home, paths, plan.source.ties)
        told += f"source checksums: {checked}{loose and f' ({loose})'}\ndigest {weights}"
    seconds = time.monotonic() - began
    if options["as_json"]:
        facts |= {"out": str(request.out), "tensors": tensors, "bytes": nbytes, "seconds": round(seconds, 3)}
        click.echo(json.dumps(facts | {"averaged": averaged}))
        return
    for line in drift_lines(averaged):
        click.echo(line, err=True)
    click.echo(f"{name}: {tensors} tensors, {size(nbytes)} in {seconds:.1f} s, {told}")
