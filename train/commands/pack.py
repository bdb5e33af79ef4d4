"""`train pack`: decides which documents share a row, once and offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from converters.commands.options import FILE, as_json
from converters.common.cli_help import command
from formats.errors import UsageError, short


@command()
@click.argument("prefix", type=FILE)
@click.option(
    "--seq-length", type=click.IntRange(1), required=True, metavar="N", help="Sequence length of the training."
)
@click.option(
    "--algorithm",
    type=click.Choice(["bfd", "k_bin", "overflow", "packed"]),
    default="bfd",
    show_default=True,
    help="Best-fit decreasing; or as GPT-NeoX packs.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=1234, show_default=True)
@click.option(
    "--overlong",
    type=click.Choice(["drop", "error", "truncate"]),
    help="How documents longer than a row are treated.  [default: drop; packed cuts them over rows]",
)
@click.option(
    "--split",
    default="1",
    show_default=True,
    metavar="A,B,C",
    help="Shares of train, validation and test, such as 98,1,1.",
)
@click.option("--out", type=FILE, metavar="PLAN", help="Folder of the plan.  [default: PREFIX.pack]")
@click.option("--force", is_flag=True, help="Replace a plan.")
@click.option("-n", "--dry-run", is_flag=True, help="Pack and count, and write nothing.")
@as_json
def pack(prefix: Path, **options: Any) -> None:
    """Pack documents into rows of --seq-length tokens (and one more, the last label).

    `train run` packs by itself; a plan keeps splits apart, named in its data.train and data.validation.

    Only lengths are read. Only --algorithm packed cuts documents or joins their parts. Masks and positions keep
    documents apart in training.
    """
    from train.data.packing.pack_plan import SPLITS, make_plan, write_plan
    from train.data.tokens.documents import require_mask_length
    from train.data.tokens.indexed import open_indexed, prefix_of

    prefix = prefix_of(prefix)
    try:
        split = [float(share) for share in options["split"].replace("/", ",").split(",")]
    except ValueError:
        raise UsageError(f"--split {short(options['split'])} is not a list of shares such as 98,1,1") from None
    indexed = open_indexed(prefix)
    require_mask_length(indexed)
    plan = make_plan(
        indexed, algorithm=options["algorithm"], seq_length=options["seq_length"], seed=options["seed"],
        overlong=options["overlong"], split=split,
    )  # fmt: skip
    out = options["out"] or prefix.with_name(prefix.name + ".pack")
    if not options["dry_run"]:
        write_plan(plan, out, options["force"])
    counts = plan.counts
    empty = [name for name, share in zip(SPLITS, split, strict=False) if share and name not in plan.splits]
    if empty:
        few = f"{counts['packed']} of {counts['documents']} documents are packed: too few for such a share"
        click.echo(f"note: --split leaves {' and '.join(empty)} without a row, {few}", err=True)
    if options["as_json"]:
        click.echo(json.dumps({"plan": str(out), "splits": plan.splits} | dict(counts)))
        return
    click.echo(f"# Packed {counts['packed']} documents into {counts['rows']} documents")
    splits = ", ".join(f"{name} {stop - begin}" for name, (begin, stop) in plan.splits.items())
    click.echo(f"{counts['tokens']} tokens fill {100 * counts['fill']:.3f} % of rows of {plan.capacity}: {splits}")
    if plan.overlong:
        what = {"drop": "left out", "truncate": "cut to a row", "cut": "cut over several rows"}[plan.overlong]
        long = f"{counts['overlong']} documents with {counts['overlong_tokens']} tokens"
        click.echo(f"{long} are longer than a row: {what}", err=True)
    if counts["empty"]:
        click.echo(f"{counts['empty']} documents have no tokens: left out", err=True)
