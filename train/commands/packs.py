"""`train packs`: makes data packs for a pre-training in phases, each with its own mixture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import FOLDER, as_json, option_group
from converters.common.cli_help import Helped

if TYPE_CHECKING:
    from train.data.packs.phases import Pool, Schedule
    from train.data.packs.slices import Plan

dry_run = click.option("-n", "--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
force = click.option("--force", is_flag=True, help="Replace existing output.")
jobs = click.option("-j", "--jobs", type=click.IntRange(1, 256), default=2, show_default=True, help="Files at a time.")
quiet = click.option("-q", "--quiet", is_flag=True, help="No progress.")
schedule = option_group(
    click.option("--tokens-per-iter", "--tokens_per_iter", type=click.IntRange(1), required=True, metavar="N",
                 help="Tokens of a step: sequence length times global batch size, such as 4718592."),
    click.option("--warmup-iters", "--warmup_iters", type=click.IntRange(0), required=True, metavar="N",
                 help="Steps of the warm-up, which is the beginning of U1 and one pack."),
    click.option("--cd-phase", "--cd_phase", type=click.IntRange(0, 100), required=True, metavar="PERCENT",
                 help="Share of U1, N and U3 together that the cool-down takes from the end of U3."),
    click.option("--max-tokens-per-pack", "--max_tokens_per_pack", type=click.IntRange(1), required=True, metavar="N",
                 help="Tokens of the largest pack, such as 165150720000."),
)  # fmt: skip


@click.group()
def packs() -> None:
    """Data sets cut for the phases of a pre-training, and merged."""


@packs.command(cls=Helped)
@click.argument("folder", type=FOLDER)
@click.argument("out", type=FOLDER, default=Path("state.0.yaml"))
@dry_run
@force
@as_json
def state(folder: Path, out: Path, dry_run: bool, force: bool, as_json: bool) -> None:
    """State file of a folder of token files.

    None of them is sliced yet.

    It records for `slice` where each data set is and at which document it begins.
    """
    from converters.common.atomic import write_file
    from formats.errors import OutputError
    from train.data.packs import inputs

    sets = inputs.first_state(folder)
    if out.exists() and not force:
        raise OutputError(f"{out} exists", "name another file, or replace it with --force")
    text = inputs.state_text(sets)
    if not dry_run:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, text)
    if as_json:
        content = {name: {"datapath": entry.datapath, "idxs": list(entry.idxs)} for name, entry in sets.items()}
        click.echo(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        click.echo(text.decode() if dry_run else f"{out}: {len(sets)} data sets", nl=not dry_run)


@packs.command(cls=Helped)
@click.argument("weights", type=FOLDER)
@click.argument("out", type=FOLDER, default=Path("slices.json"))
@dry_run
@force
def weights(weights: Path, out: Path, dry_run: bool, force: bool) -> None:
    """Slices json from weights.

    WEIGHTS is YAML, such as U1: {tokens: 150000000000, weights: {arxiv: 1, wiki: 2.5}}, for some of U1, U2, N, U3 and
    Ext. The tokens of a phase are divided exactly.
    """
    from converters.common.atomic import write_file
    from formats.errors import OutputError
    from train.data.packs.files import json_bytes
    from train.data.packs.weights import slices_of

    slices = slices_of(weights)
    if out.exists() and not force:
        raise OutputError(f"{out} exists", "name another file, or replace it with --force")
    if dry_run:
        click.echo(json_bytes(slices).decode(), nl=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, json_bytes(slices))
    click.echo(f"{out}: {len(slices['names'])} data sets")


@packs.command("slice", cls=Helped)
@schedule
@click.option("--out-dir", "--out_dir", type=FOLDER, required=True, metavar="DIR",
              help="Where the folders of the packs are written.")  # fmt: skip
@click.option("--slices-json", "--slices_json", type=FOLDER, required=True, metavar="FILE",
              help="Tokens of each data set: names, and U1, U2, N, U3 and Ext with their total.")  # fmt: skip
@click.option("--state-file", "--state_file", type=FOLDER, required=True, metavar="FILE",
              help="Where each data set is and begins, from `train packs state` or an earlier slicing.")  # fmt: skip
@dry_run
@click.option("--force", is_flag=True, help="Delete the packs of an earlier slicing, and start over.")
@jobs
@quiet
@as_json
def slice_(
    out_dir: Path, slices_json: Path, state_file: Path, dry_run: bool, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Cut data sets into packs.

    The phases are the warm-up, U1, N, U3, its cool-down, and E.

    After an interruption run it again: it resumes with the missing slices.
    """
    from converters.common.progress import size
    from train.data.packs import inputs, phases, slices, writing

    keys = ("tokens_per_iter", "warmup_iters", "cd_phase", "max_tokens_per_pack")
    step_schedule = phases.Schedule(*(options[key] for key in keys))
    names, pools = inputs.read_slices(slices_json)
    start_state = inputs.read_state(state_file)
    plan = slices.make_plan(names, pools, phases.packs(pools, step_schedule), start_state)
    record = plan_record(plan, pools, step_schedule)
    if dry_run:
        click.echo(json.dumps(record, indent=1, ensure_ascii=False) if as_json else plan_text(plan, record))
        return
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)
    began, nbytes = time.monotonic(), sum(part.nbytes for part in plan.slices)
    there = writing.write(
        plan, step_schedule, start_state, out_dir, jobs=options["jobs"], force=options["force"], quiet=quiet or as_json
    )
    seconds = time.monotonic() - began
    if as_json:
        click.echo(json.dumps(record | {"already_there": there, "seconds": round(seconds, 3)}, ensure_ascii=False))
        return
    before = f", {there} of them were there" if there else ""
    click.echo(
        f"{out_dir}: {len(plan.slices)} slices in {len(plan.packs)} packs, {size(nbytes)} in {seconds:.1f} s{before}"
    )


def plan_record(plan: Plan, pools: dict[str, Pool], schedule: Schedule) -> dict[str, Any]:
    """The packs and slices that will be written, for --json."""
    from train.data.packs import phases

    sums = phases.sums(plan.packs, pools)
    rows = []
    for pack, end in zip(plan.packs, phases.ends(plan.packs, schedule), strict=True):
        own = {part.source.name: part for part in plan.of(pack)}
        sets = {
            name: {
                "target": target,
                "tokens": own[name].count if name in own else 0,
                "documents": list(own[name].documents) if name in own else None,
                "files": own[name].stem if name in own else None,
            }
            for name, target in zip(plan.names, pack.targets, strict=True)
        }
        rows.append({
            "pack": pack.name, "phase": pack.phase, "tokens": pack.tokens,
            "iterations": pack.tokens / schedule.tokens_per_iter, "train_iters": pack.steps(schedule), "end_step": end,
            "written_tokens": sum(part.count for part in own.values()), "sets": sets,
        })  # fmt: skip
    totals = {name: {"tokens": pool.total, "packs": sums[name]} for name, pool in pools.items()}
    return {"packs": rows, "pools": totals, "notes": list(plan.notes)}


def plan_text(plan: Plan, record: dict[str, Any]) -> str:
    """The packs and slices that will be written, as text."""
    from converters.common.progress import size, table

    rows: list[tuple[str, ...]] = [
        ("pack", "tokens", "iterations", "train_iters", "end step", "tokens of whole documents", "files")
    ]
    for pack in record["packs"]:
        files = sum(entry["files"] is not None for entry in pack["sets"].values())
        numbers = (f"{pack['iterations']:.2f}", str(pack["train_iters"]), str(pack["end_step"]))
        rows.append((pack["pack"], f"{pack['tokens']:,}", *numbers, f"{pack['written_tokens']:,}", str(files)))
    sums = [
        f"{name}: {entry['tokens']:,} tokens, the same by packs and by data sets"
        for name, entry in record["pools"].items()
    ]
    nbytes = sum(part.nbytes for part in plan.slices)
    notes = [f"note: {note}" for note in plan.notes]
    return "\n".join([table(rows), *sums, *notes, f"{len(plan.slices)} slices, {size(nbytes)}"])


@packs.command(cls=Helped)
@click.argument("folder", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option("--verify/--no-verify", default=True, show_default=True, help="Read the result back and compare.")
@dry_run
@force
@jobs
@quiet
@as_json
def merge(
    folder: Path, out: Path, verify: bool, dry_run: bool, force: bool, jobs: int, quiet: bool, as_json: bool
) -> None:
    """Merge the token files of a folder into one.

    FOLDER .../XX makes OUT/XX.bin, OUT/XX.idx and OUT/XX.merge.log.

    In the order of their names, with all their documents, and with masks and sidecar files where they have them.
    """
    from converters.common.progress import size, table
    from train.data.packs import merge as merging

    plan = merging.plan_merge(folder)
    merging.check_out(plan, out, force)
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)
    began = time.monotonic()
    if not dry_run:
        merging.write_merge(plan, out, jobs=jobs, verify=verify, quiet=quiet or as_json)
    seconds = time.monotonic() - began
    if as_json:
        parts = {
            part.prefix.name: {"documents": documents, "tokens": part.total}
            for part, documents in zip(plan.parts, plan.documents, strict=True)
        }
        facts = {"documents": sum(plan.documents), "tokens": plan.tokens, "bytes": plan.nbytes}
        done = {} if dry_run else {"seconds": round(seconds, 3), "verified": verify}
        click.echo(json.dumps({"out": str(out / plan.prefix), **facts, **done, "parts": parts}, ensure_ascii=False))
        return
    if dry_run:
        click.echo(table(merging.part_rows(plan)))
        click.echo(f"{out / plan.prefix}: {size(plan.nbytes)} would be written")
        return
    checked = "read back and equal" if verify else "not read back"
    count = f"{len(plan.parts)} parts, {sum(plan.documents):,} documents, {plan.tokens:,} tokens"
    click.echo(f"{out / plan.prefix}: {count}, {size(plan.nbytes)} in {seconds:.1f} s, {checked}")


@packs.command(cls=Helped)
@click.argument("folder", type=FOLDER)
@click.option("--seq-length", type=click.IntRange(1), default=8192, show_default=True, help="Tokens of a sample.")
@click.option("--batch-size", type=click.IntRange(1), default=576, show_default=True, help="Samples of a step.")
@as_json
def iters(folder: Path, seq_length: int, batch_size: int, as_json: bool) -> None:
    """Number of steps that the tokens of packs last for.

    FOLDER is a pack, or a folder of packs. Rounded up, it is train_iters.
    """
    from train.data.packs import iters as counting

    counts, step = counting.count(folder), seq_length * batch_size
    if as_json:
        rows = [
            {
                "folder": str(pack.folder), "tokens": pack.tokens, "iterations": pack.tokens / step,
                "train_iters": -(-pack.tokens // step), "copies": {str(path): count for path, count in pack.copies},
            }
            for pack in counts
        ]  # fmt: skip
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for pack in counts:
        click.echo(f"{pack.folder}/: {counting.as_awk(pack.tokens / step)}")
    for pack in counts:
        for path, count in pack.copies:
            value = counting.as_awk(count / step)
            click.echo(f"note: {path} is a copy of what was counted, it alone makes {value}", err=True)


@packs.command("append-eod", cls=Helped)
@click.argument("file", type=FOLDER)
@click.argument("eod", metavar="ID", type=int)
@click.argument("mode", type=click.Choice(["append", "replace"]))
@dry_run
@force
@click.option("--doubled", is_flag=True, help="Append also where documents already end in ID.")
@quiet
@as_json
def append_eod(
    file: Path, eod: int, mode: str, dry_run: bool, force: bool, doubled: bool, quiet: bool, as_json: bool
) -> None:
    """End every document in a token.

    ID is added after the last token of a document, or replaces it. Writes eod_FILE.bin and .idx beside FILE.bin.
    """
    from converters.common.progress import size
    from train.data.packs import append

    work = append.plan_append(file, eod, mode)
    append.check_out(work, force)
    began = time.monotonic()
    if not dry_run:
        append.write_append(work, doubled=doubled, quiet=quiet or as_json)
    seconds = time.monotonic() - began
    if as_json:
        facts = {"documents": work.documents, "tokens": work.tokens, "bytes": work.nbytes}
        done = {} if dry_run else {"seconds": round(seconds, 3)}
        click.echo(json.dumps({"out": str(work.out), **facts, **done}, ensure_ascii=False))
        return
    what = f"{work.documents:,} documents, {work.tokens:,} tokens, {size(work.nbytes)}"
    click.echo(f"{work.out}: {what} would be written" if dry_run else f"{work.out}: {what} in {seconds:.1f} s")
