"""How a command that writes a checkpoint carries out its plan."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from converters.convert import Request
    from converters.plan import Plan
    from formats.checkpoint import Checkpoint


def request_of(out: Path, options: Mapping[str, Any], source: Checkpoint) -> Request:
    """What the options of `writing` ask for.

    The norms of GPT-NeoX drift apart between tensor parallel ranks in every long training: their mean is what is
    wanted, and told. Anywhere else copies that differ are a damage.
    """
    from converters.convert import Request
    from converters.engine import Limits

    usual = "verify" if source.format != "neox" else "drift" if source.proof is None else "mean"
    replicas = options["replicas"] or usual
    limits = Limits(options["threads"], options["memory"], replicas)
    cast = None if options["dtype"] == "keep" else options["dtype"]
    return Request(out, cast, limits, options["force"], options["verify"], options["quiet"] or options["as_json"])


def carry_out(plan: Plan, request: Request, options: Mapping[str, Any]) -> None:
    """Print the plan, or run it and print what came out."""
    from converters import digest
    from converters.convert import check_paths, run
    from converters.report import size
    from converters.show import drift_lines, plan_lines, plan_record

    record = plan_record(plan)
    if options["dry_run"]:
        click.echo(json.dumps(record, indent=1) if options["as_json"] else "\n".join(plan_lines(plan)))
        check_paths(plan.source, request)
        return
    for note in record["notes"]:
        click.echo(f"note: {note}", err=True)
    began = time.monotonic()
    drifted: dict[str, float] = {}
    digests = run(plan, request, lambda job, distance: drifted.update({job.name: distance}))
    seconds, total = time.monotonic() - began, digest.total(digest.of_weights(plan, digests))
    if options["as_json"]:
        facts = {"out": str(request.out), "digest": total, "tensors": len(digests), "bytes": plan.nbytes}
        click.echo(json.dumps(facts | {"seconds": round(seconds, 3), "verified": request.verify, "averaged": drifted}))
        return
    for line in drift_lines(drifted):
        click.echo(line, err=True)
    checked = "read back and equal" if request.verify else "not read back"
    click.echo(f"{request.out}: {len(digests)} tensors, {size(plan.nbytes)} in {seconds:.1f} s, {checked}")
    click.echo(f"digest {total}")
