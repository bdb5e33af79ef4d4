"""`train role-bins`: takes the flags of Megatron-LLM's preprocess_instruct_data.py, also spelled with underscores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import FILE, NAMED, option_group
from converters.common.cli_help import command
from formats.errors import UsageError
from train.commands.tokenize import make_request, paths, print_decisions, report, running

if TYPE_CHECKING:
    from train.data.packing.role_bins import Packing
    from train.data.tokens.tokenizers import SentencePiece
    from train.data.tokens.workers import Job

unused = option_group(
    click.option("--tokenizer-type", "--tokenizer_type", type=click.Choice(["SentencePieceTokenizer"]), hidden=True),
    click.option("--dataset-impl", "--dataset_impl", type=click.Choice(["mmap"]), hidden=True),
    click.option("--chunk-size", "--chunk_size", type=int, hidden=True),
    click.option("--log-interval", "--log_interval", type=int, hidden=True),
)
"""Flags of Megatron-LLM's tool that have no effect here."""
LENGTH = 4096
"""Default number of tokens of a row, as in Megatron-LLM's tool."""


@command("role-bins")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    type=NAMED,
    metavar="FILE[ FILE…]",
    help="JSON lines of conversations (.gz and .zst too), or parquet.",
)
@click.argument("more", nargs=-1, metavar="")
@click.option(
    "--output-prefix",
    "--output_prefix",
    "prefix",
    required=True,
    type=FILE,
    metavar="P",
    help="Writes P-text.bin and P-role.bin, each with its .idx.",
)
@click.option(
    "--vocab-file",
    "--vocab_file",
    "--tokenizer",
    "tokenizer",
    required=True,
    type=FILE,
    metavar="FILE",
    help="SentencePiece .model, or its folder.",
)
@click.option(
    "--vocab-extra-ids-list",
    "--vocab_extra_ids_list",
    "extra",
    default="<|im_start|>,<|im_end|>",
    show_default=True,
    metavar="TOKEN,…",
    help="Special tokens; those that the model lacks get ids after its last one.",
)
@click.option(
    "--no-new-tokens", "--no_new_tokens", "no_new", is_flag=True, help="Do not add <CLS>, <SEP>, <EOD>, <MASK>, <PAD>."
)
@click.option(
    "--do-packing",
    "--do_packing",
    "pack",
    is_flag=True,
    help="Pack several conversations into a row, the longest first.",
)
@click.option(
    "--max-seq-length",
    "--max_seq_length",
    "length",
    type=click.IntRange(1),
    metavar="N",
    help=f"Tokens of a row; a longer conversation is cut.  [default: {LENGTH}]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["conversations", "sharegpt"]),
    default="conversations",
    show_default=True,
    help="Turns with role and content, or with from and value.",
)
@running
@unused
def role_bins(**options: Any) -> None:
    """Conversations to the text and role files of Megatron-LLM, as its own tool writes them.

    A turn is <|im_start|>ROLE, a line break, the content, <|im_end|> and a line break. A special token that a content
    spells stays text. A malformed record is dropped and counted. A killed run resumes when it is run again.
    """
    from train.data.packing.role_bins import write_role_bins
    from train.data.tokens.indexed import named_prefix
    from train.data.tokens.input_ranges import ranges

    if options["more"] and len(options["inputs"]) > 1:
        raise UsageError("several --input and files after them have no order", "name all files after one --input")
    if options["length"] and not options["pack"]:
        raise UsageError(f"--max-seq-length {options['length']} has no effect without --do-packing", "remove it")
    parts = ranges(paths([*options["inputs"], *options["more"]]))
    job, packing = make_job(options)
    request = make_request(options, job, parts, named_prefix(options["prefix"]))
    if not print_decisions(options, request, _decisions(job, packing, request.prefix)):
        return
    counts = write_role_bins(request, packing).counts
    report(request.prefix, counts, options["as_json"])
    if packing is not None and not options["as_json"]:
        click.echo(f"# Packed {counts['documents']} documents into {counts['rows']} documents")
        if counts["cut"]:
            many = f"{counts['cut']} document{'s' * (counts['cut'] > 1)}"
            click.echo(f"{many} longer than a row: cut, {counts['cut_tokens']} tokens are lost", err=True)


def make_job(options: Mapping[str, Any]) -> tuple[Job, Packing | None]:
    """The job that the options describe, checked against the tokenizer; and how to pack rows, None without packing."""
    from train.data.packing.role_bins import Packing, full_size, separator, special_tokens
    from train.data.tokens.tokenizers import names_digest
    from train.data.tokens.workers import Job

    extra = [token for token in options["extra"].split(",") if token]
    vocabulary = _sentencepiece(options["tokenizer"], extra)
    special = special_tokens(vocabulary, extra, not options["no_new"])
    packing = None
    if options["pack"]:
        packing = Packing(options["length"] or LENGTH, *separator(vocabulary, special))
    size = full_size(vocabulary, special)
    names = names_digest(vocabulary, size, special)
    job = Job(
        tokenizer=vocabulary.path,
        digest=vocabulary.digest,
        vocabulary=size,
        names=names,
        form=options["form"],
        key="text",
        control={},
        special=special,
    )
    return job, packing


def _sentencepiece(path: Path, extra: list[str]) -> SentencePiece:
    from train.data.packing.role_bins import NEW
    from train.data.tokens.tokenizers import SentencePiece, open_vocabulary

    if (path / "tokenizer.model").is_file():
        path /= "tokenizer.model"
    vocabulary = open_vocabulary(path, [*NEW, *extra])
    if not isinstance(vocabulary, SentencePiece):
        raise UsageError(f"{path} is not a SentencePiece model, which role bins require", "name the .model")
    return vocabulary


def _decisions(job: Job, packing: Packing | None, prefix: Path) -> dict[str, str]:
    rows = "one conversation in each" if packing is None else f"up to {packing.length} tokens"
    between = "" if packing is None else f", {packing.name} {packing.separator} between conversations"
    return {
        "special": ", ".join(f"{token} {number}" for token, number in (job.special or {}).items()),
        "rows": f"{rows}{between}",
        "output": f"{prefix}-text.bin, {prefix}-role.bin",
    }
