"""`train tokenize`: makes token files; takes the flags of GPT-NeoX's tool, and a few more."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import FILE, NAMED, as_json, option_group
from converters.common.cli_help import Finite, command
from formats.errors import UnsupportedError, UsageError, short
from train.commands.record_options import chat_template, parse_control_tokens, record_format

if TYPE_CHECKING:
    from train.data.tokens.input_ranges import Ranges
    from train.data.tokens.tokenize import Request
    from train.data.tokens.workers import Job

KINDS = {
    "SPMTokenizer": ".model",
    "SentencePieceTokenizer": ".model",
    "HFTokenizer": ".json",
    "HuggingFaceTokenizer": ".json",
}
"""Tokenizer type of GPT-NeoX or Megatron: the suffix of the file that it reads."""

unused = option_group(
    click.option("--dataset-impl", type=click.Choice(["mmap"]), hidden=True),
    click.option("--num-docs", type=int, hidden=True),
    click.option("--log-interval", type=int, hidden=True),
)
"""Flags of GPT-NeoX's tool that have no effect here: `mmap` is always written, and progress needs no count."""
running = option_group(
    click.option("--workers", type=click.IntRange(1, 1024), help="Processes.  [default: all cores]"),
    click.option("--strict", is_flag=True, help="One malformed record is an error."),
    click.option(
        "--max-drop-rate",
        type=Finite(0, 1),
        default=0.1,
        show_default=True,
        help="Share of records that may be malformed.",
    ),
    click.option("-n", "--dry-run", is_flag=True, help="Print what would be done, and write nothing."),
    click.option("--force", is_flag=True, help="Replace the output."),
    click.option("-q", "--quiet", is_flag=True, help="No progress."),
    as_json,
)


@command()
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    type=NAMED,
    metavar="FILE[,FILE…]",
    help="JSON lines (.gz and .zst too), parquet, or .txt with a document on each line.",
)
@click.option(
    "--vocab-file",
    "--tokenizer",
    "tokenizer",
    required=True,
    type=FILE,
    metavar="FILE",
    help="SentencePiece .model, tokenizer.json, or the folder of one.",
)
@click.option(
    "--tokenizer-type", type=click.Choice(list(KINDS)), metavar="KIND", help=f"{', '.join(KINDS)}.  [default: found]"
)
@click.option(
    "--output-prefix", "prefix", required=True, type=FILE, metavar="P", help="Writes P_text_document.bin and .idx."
)
@click.option("--append-eod", is_flag=True, help="End each document with the end-of-document token.")
@click.option("--eod", metavar="TOKEN", help="That token.  [default: <|endoftext|>, or the eos of a tokenizer.json]")
@chat_template
@click.option(
    "--date", type=click.DateTime(["%Y-%m-%d"]), help="Today, for a chat template that asks.  [default: today]"
)
@click.option("--control-tokens", metavar="ROLE=ID,…", help="Ids to check, such as user=7,assistant=8.")
@click.option("--ftfy", is_flag=True, help="Repair wrongly decoded texts (mojibake) with ftfy before anything else.")
@record_format
@running
@unused
def tokenize(**options: Any) -> None:
    """Text or dialogues to token files for Megatron and GPT-NeoX, on all cores.

    A turn is its role's control token, the text, and the token again (<|user|>…<|user|>); with a chat template it is
    what the template renders. A malformed record is dropped and counted. A killed run resumes when it is run again.
    Each of several --jsonl-keys, such as text,summary, gets files of its own.
    """
    from train.data.tokens.indexed import named_prefix
    from train.data.tokens.input_ranges import ranges
    from train.data.tokens.tokenize import tokenize

    parts, prefix = ranges(paths(options["inputs"])), options["prefix"]
    if prefix.is_dir():
        click.echo(
            f"note: {prefix} is a folder, the files are written beside it; {prefix}/NAME writes them into it", err=True
        )
    jobs = [make_job({**options, "key": key}, parts) for key in options["key"].split(",")]
    for job in jobs:
        out = named_prefix(prefix).with_name(f"{prefix.name}_{job.key}_document")
        request = make_request(options, job, parts, out)
        if print_decisions(options, request, {"turns": _turns(job), "documents": _end(job), "output": f"{out}.bin"}):
            report(out, tokenize(request).counts, options["as_json"])


def paths(inputs: Sequence[str]) -> list[Path]:
    """The files of --input, which may be comma-separated lists; `~` is the home folder."""
    files = []
    try:
        for value in inputs:
            names = [value] if Path(value).expanduser().exists() else value.split(",")
            files += [Path(name).expanduser() for name in names if name]
    except RuntimeError as error:  # there is no such user
        raise UsageError(f"--input {','.join(inputs)}: {error}", "write the whole path") from None
    except OSError as error:
        raise UsageError(f"--input {short(value)} names no file: {error.strerror}") from None
    return files


def make_job(options: Mapping[str, Any], parts: Ranges) -> Job:
    """The job that the options describe, checked against the tokenizer."""
    from train.data.tokens.input_ranges import first_values
    from train.data.tokens.shapes import form_of_all
    from train.data.tokens.template_encoder import check_template
    from train.data.tokens.tokenizers import Fast, control_ids, eod_id, names_digest, open_vocabulary
    from train.data.tokens.workers import Job

    path, kind = options["tokenizer"], options["tokenizer_type"]
    vocabulary = open_vocabulary(path, [options["eod"]] if options["eod"] else [])
    if kind and (KINDS[kind] == ".json") != isinstance(vocabulary, Fast):
        raise UsageError(f"{path} is not a file for {kind}", "remove --tokenizer-type: the file determines it")
    key = options["key"]
    form = form_of_all(first_values(parts, key), key) if options["form"] == "auto" else options["form"]
    control = control_ids(vocabulary, parse_control_tokens(options["control_tokens"]))
    template = _template(options["template"], vocabulary, form, control)
    date = _date(options["date"], template)
    if template is not None and isinstance(vocabulary, Fast):
        check_template(vocabulary, template)
    elif form != "text" and not {"user", "assistant"} <= control.keys():
        hint = "name a template: --chat-template chatml, llama3 or a file"
        if form in ("control-text", "mixed"):
            hint = "records with markers need a tokenizer that has them; conversations can have a --chat-template"
        raise UsageError(f"{vocabulary.path} has no control tokens <|user|> and <|assistant|> for dialogues", hint)
    eod = eod_id(vocabulary, options["eod"]) if options["append_eod"] else None
    token = vocabulary.pieces([eod])[0] if eod is not None else None
    if eod in control.values() and template is None:
        raise UsageError(f"{token} opens and closes turns, so it cannot end documents too", "name another --eod")
    if options["eod"] and not options["append_eod"]:
        raise UsageError("--eod names the token of --append-eod", "add --append-eod")
    if "/" in key:
        raise UsageError(f"--jsonl-keys {key} becomes part of a file name, and cannot hold a slash")
    return Job(
        tokenizer=vocabulary.path,
        digest=vocabulary.digest,
        vocabulary=vocabulary.size,
        names=names_digest(vocabulary, vocabulary.size),
        form=form,
        key=key,
        control=control,
        eod=eod,
        eod_token=token,
        template=template,
        date=date,
        named=dict(vocabulary.named) if template is not None and isinstance(vocabulary, Fast) else {},
        ftfy=_ftfy() if options["ftfy"] else None,
        auto=options["form"] == "auto",
    )


def _date(given: Any, template: str | None) -> str | None:
    """The date that a chat template takes for today, None if the template does not ask for the date."""
    asks = template is not None and "strftime_now" in template
    if given is not None and not asks:
        raise UsageError("--date has no effect: the chat template does not ask for it", "remove it")
    return str((given or datetime.now()).date()) if asks else None


def _ftfy() -> str:
    """The version of ftfy. Raises UnsupportedError if ftfy is not installed."""
    try:
        return version("ftfy")
    except PackageNotFoundError:
        raise UnsupportedError(
            "--ftfy needs a library that is not installed", "pip install 'vitruvian[ftfy]'"
        ) from None


def _template(template: str | None, vocabulary: Any, form: str, control: Mapping[str, int]) -> str | None:
    """The chat template: the given one, or for conversations that of the tokenizer's folder; None if none is used."""
    from converters.assets.chat_template import load_template
    from converters.assets.token_files import held_template
    from train.data.tokens.tokenizers import Fast

    if form in ("text", "control-text"):
        if template is not None:
            raise UsageError(f"--chat-template has no effect on records of the format {form}", "remove it")
        return None
    if isinstance(vocabulary, Fast):
        if template is not None:
            return load_template(template)
        return held_template(vocabulary.beside)
    if template in (None, "control") and control:
        return None  # the control template is these tokens, and SentencePiece encodes them itself
    if template is None:
        raise UsageError(
            f"{vocabulary.path} has no control tokens <|user|> and <|assistant|> for dialogues, and no chat template",
            f"convert tokenizer {vocabulary.path} FOLDER --add --control '<|im_start|>' --control '<|im_end|>', "
            "then --tokenizer FOLDER --chat-template chatml",
        )
    raise UsageError(
        f"the chat template {template} needs a fast tokenizer, {vocabulary.path} is a SentencePiece model",
        f"convert tokenizer {vocabulary.path} FOLDER, then --tokenizer FOLDER",
    )


def _turns(job: Job) -> str:
    control = ", ".join(f"<|{role}|> {number}" for role, number in job.control.items())
    dated = f", which takes {job.date} for today" if job.date else ""
    turns = f"a chat template{dated}" if job.template is not None else control or "none"
    return turns if job.form != "text" else "none"


def _end(job: Job) -> str:
    return "nothing is appended" if job.eod is None else f"each ends with {job.eod_token} {job.eod}"


def make_request(options: Mapping[str, Any], job: Job, parts: Ranges, out: Path) -> Request:
    """The request that the shared options describe."""
    from train.data.tokens.tokenize import Request

    if not out.parent.is_dir():
        raise UsageError(f"the folder {out.parent} of --output-prefix is not there", f"mkdir -p {out.parent}")
    workers = options["workers"] or len(os.sched_getaffinity(0))
    return Request(
        job=job,
        parts=parts,
        prefix=out,
        workers=workers,
        force=options["force"],
        most_dropped=options["max_drop_rate"],
        strict=options["strict"],
        quiet=options["quiet"] or options["as_json"],
    )


def print_decisions(options: Mapping[str, Any], request: Request, decisions: Mapping[str, str]) -> bool:
    """Print the decisions, one line each.

    Returns:
        Whether to continue: False for --dry-run.
    """
    from converters.common.progress import size
    from train.data.tokens.indexed import best_dtype

    if not options["quiet"] or options["dry_run"]:
        job, files, nbytes, workers = request.job, request.parts.files, request.parts.nbytes, request.workers
        lines = {
            "input": f"{len(files)} file{'s' * (len(files) > 1)}, {size(nbytes)}, {job.form}",
            "tokenizer": f"{job.tokenizer}, {job.vocabulary} tokens, {best_dtype(job.vocabulary)}",
        } | dict(decisions)
        lines["output"] += f", {workers} worker{'s' * (workers > 1)}"
        for name, line in lines.items():
            click.echo(f"{name:<10} {line}", err=True)
    return not options["dry_run"]


def report(out: Path, counts: Mapping[str, Any], as_json: bool) -> None:
    """Print the number of documents, and what became of the other records."""
    from train.data.tokens.records import REASONS
    from train.data.tokens.template_encoder import LOST, SPLIT
    from train.data.tokens.workers import UNTRAINED

    if as_json:
        click.echo(json.dumps({"output": str(out)} | dict(counts)))
        return
    dropped = {reason: number for reason, number in counts.items() if reason in REASONS}
    if replies := counts.get(UNTRAINED):
        click.echo(
            f"note: {replies} replies are not trained, as their records say; {out.name}.mask records it for train run; "
            "other programs do not read it",
            err=True,
        )
    for kind, what in LOST.items():
        if number := counts.get(kind):
            click.echo(
                f"note: of {number} records the chat template leaves out or changes {what}: train show prints them",
                err=True,
            )
    if added := counts.get(SPLIT):
        click.echo(
            f"note: {added} documents are added, for replies that the chat template shows otherwise in a longer one",
            err=True,
        )
    click.echo(f"{out}: {counts['documents']} documents, {counts['tokens']} tokens, {sum(dropped.values())} dropped")
    for reason, number in sorted(dropped.items(), key=lambda pair: -pair[1]):
        click.echo(f"  {number} dropped: {REASONS[reason]}", err=True)
