"""`train lint`, `show` and `count`: look at data before and after tokenization."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import FILE, as_json
from converters.common.cli_help import command
from formats.errors import OutputError, SourceError, UsageError, VerificationError
from train.commands.record_options import chat_template, control_tokens, parse_control_tokens, record_format
from train.commands.tokenize import make_job

if TYPE_CHECKING:
    from train.data.look.counts import Counts
    from train.data.look.lint import Findings
    from train.data.tokens.workers import Job

LOSS = click.option("--loss", type=click.Choice(["assistant", "last_turn", "all"]), default="assistant",
                    show_default=True, help="What is trained: every reply, the last one, or all tokens.")  # fmt: skip
SPELLED = {"seq_length": "seq-length", "template": "chat-template"}
"""Options of lint that need a tokenizer: parameter, and its spelling on the command line."""


@command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@record_format
@click.option(
    "--vocab-file",
    "--tokenizer",
    "tokenizer",
    type=FILE,
    metavar="FILE",
    help="Check what this tokenizer would drop or refuse, and lengths with --seq-length.",
)
@chat_template
@click.option("--seq-length", type=click.IntRange(1), metavar="N", help="Tokens of a row, to find what is longer.")
@as_json
def lint(**options: Any) -> None:
    """Find records that would be dropped: collisions of markers, odd pairs, empty turns, unknown roles.

    With --tokenizer each record is encoded, as `train tokenize` would. Exits with 6 if there are any.
    """
    from train.data.look.lint import NOTES
    from train.data.look.lint import lint as check

    for name in ("seq_length", "template"):
        if options[name] and not options["tokenizer"]:
            raise UsageError(f"--{SPELLED[name]} needs --tokenizer", "name the tokenizer: --tokenizer M")
    longest = options["seq_length"] and options["seq_length"] + 1
    findings = check(options["files"], form=options["form"], key=options["key"], job=_job(options), longest=longest)
    bad = sum(number for finding, number in findings.counts.items() if finding not in NOTES)
    if options["as_json"]:
        record = {"records": findings.records, "malformed": bad, "format": findings.form}
        click.echo(json.dumps(record | {"findings": dict(findings.counts), "places": findings.places}))
    elif findings.records or not findings.unread:
        _report(findings)
    for error in findings.unread:
        raise error  # the first; findings of the other files are printed already
    if bad:
        over = findings.counts.get("over", 0)
        long = f", {over} documents are longer than a row" if over else ""
        raise VerificationError(f"{bad - over} of {findings.records} records are malformed{long}")


def _job(options: Mapping[str, Any]) -> Job | None:
    """The job that encodes the files as `train tokenize` would; None without a tokenizer, or if no file can be read."""
    from train.data.tokens.input_ranges import ranges

    if not options["tokenizer"]:
        return None
    unasked = dict.fromkeys(("tokenizer_type", "eod", "append_eod", "control_tokens", "ftfy", "date"))
    readable: list[Path] = []
    for path in options["files"]:
        with suppress(SourceError):  # the linter reports it
            readable += ranges([path]).files
    return make_job({**options, **unasked}, ranges(readable)) if readable else None


def _report(findings: Findings) -> None:
    from train.data.look.lint import NOTES, OVER
    from train.data.tokens.records import REASONS

    click.echo(f"{findings.records} records, {findings.form}")
    for finding, number in findings.counts.most_common():
        meaning = {**NOTES, **REASONS, "over": OVER}[finding]
        places = ", ".join(findings.places[finding])
        click.echo(f"  {number}  {meaning}: {places}" + (", …" if number > len(findings.places[finding]) else ""))


@command()
@click.argument("prefix", type=FILE)
@click.argument("out", required=False, type=FILE)
@click.option("--seq-length", type=click.IntRange(1), metavar="N", help="Tokens of a row, to count what is longer.")
@click.option("--force", is_flag=True, help="Replace OUT.")
@as_json
def count(prefix: Path, out: Path | None, seq_length: int | None, force: bool, as_json: bool) -> None:
    """Tokens of each document, from the index only: sums, quantiles, a histogram.

    OUT gets one number a line, in the order of the documents.
    """
    from train.data.look.counts import count as counted
    from train.data.look.counts import write_counts
    from train.data.tokens.documents import require_mask_length
    from train.data.tokens.indexed import open_indexed

    indexed = open_indexed(prefix, tokens=False)
    require_mask_length(indexed)
    counts = counted(indexed, None if seq_length is None else seq_length + 1)
    if out is not None:
        if out.is_dir() or not out.name:
            raise OutputError(f"{out} is a folder", "name a file for OUT")
        if out.exists() and not force:
            raise OutputError(f"{out} exists", "choose another OUT, or replace it with --force")
        write_counts(indexed, out)
    if as_json:
        click.echo(json.dumps(asdict(counts)))
        return
    for line in _counted(counts, seq_length):
        click.echo(line)


def _counted(counts: Counts, seq_length: int | None) -> list[str]:
    mean = counts.tokens / counts.documents if counts.documents else 0.0
    lines = [
        f"{counts.documents} documents, {counts.tokens} tokens, {counts.shortest} to {counts.longest}, mean {mean:.1f}",
        "quantiles  " + ", ".join(f"{share} {tokens}" for share, tokens in counts.quantiles.items()),
    ]
    most = max((many for _, _, many in counts.bars), default=1)
    for low, high, many in counts.bars:
        lines.append(f"{low:>9} to {high:>9}  {many:>10}  {'█' * max(1, round(40 * many / most))}")
    if seq_length is not None:
        lines.append(f"{counts.over[0]} documents with {counts.over[1]} tokens are longer than {seq_length + 1}")
    return lines


@command()
@click.argument("prefix", type=FILE)
@click.argument("model", type=FILE, required=False)
@click.option("--tokenizer", type=FILE, metavar="M", help="The same as MODEL.")
@click.option("--first", type=click.IntRange(0), default=100, show_default=True, help="Documents to show.")
@click.option("--document", type=click.IntRange(0), metavar="N", help="Show this one only.")
@LOSS
@control_tokens
@click.option(
    "--compat",
    type=click.Choice(["neox", "megatron-llm"]),
    help="Show the mask of that program, and where it differs from ours.",
)
@click.option("--color/--no-color", default=None, help="[default: on a terminal, unless NO_COLOR is set]")
def show(prefix: Path, model: Path | None, **options: Any) -> None:
    """Documents as text, pieces and ids: trained tokens in green, masked ones grey.

    MODEL is the tokenizer; without it only ids are shown.

    Without colours trained tokens are between » and «.
    """
    from train.data.look.show import lines_of
    from train.data.tokens.documents import open_documents
    from train.data.tokens.tokenizers import open_vocabulary

    colour = options["color"]
    if colour is None:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if model is not None and options["tokenizer"] is not None:
        raise UsageError(f"{model} and --tokenizer {options['tokenizer']} are both a tokenizer", "give one")
    tokenizer = model or options["tokenizer"]
    vocabulary = None if tokenizer is None else open_vocabulary(tokenizer)
    documents = open_documents(prefix, vocabulary, parse_control_tokens(options["control_tokens"]))
    for number in _numbers(options, len(documents.indexed)):
        for line in lines_of(documents, number, vocabulary, options["loss"], options["compat"], colour):
            click.echo(line, color=colour)


def _numbers(options: Mapping[str, Any], total: int) -> range:
    number = options["document"]
    if number is None:
        return range(min(options["first"], total))
    if number >= total:
        raise UsageError(f"there are {total} documents, the last is {total - 1}, not {number}")
    return range(number, number + 1)
