"""The command that converts a SentencePiece model to a fast tokenizer, and proves on texts that the ids are equal."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import FOLDER, as_json
from converters.common.cli_help import Finite, command
from formats.errors import OutputError, VerificationError

if TYPE_CHECKING:
    from converters.assets.sentencepiece import Converted
    from converters.assets.tokenizer_proof import Check

OURS = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "chat_template.jinja"}
"""The only files that may be in a folder that --force deletes."""


@command()
@click.argument("model", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option("--control", multiple=True, metavar="TOKEN", help="A control token, such as '<|user|>'; repeat it.")
@click.option("--add", is_flag=True, help="Add the tokens that MODEL lacks, with new ids.")
@click.option("--bos", metavar="TOKEN", help="The token that begins a text.  [default: as in MODEL]")
@click.option("--eos", metavar="TOKEN", help="The token that ends a text, such as '<|endoftext|>'.")
@click.option("--pad", metavar="TOKEN", help="The token that fills a batch.")
@click.option("--unk", metavar="TOKEN", help="The unknown token, which has to be that of MODEL.")
@click.option("--add-bos/--no-add-bos", default=False, show_default=True, help="Begin each text with bos.")
@click.option(
    "--check",
    "count",
    type=click.IntRange(1),
    default=30000,
    show_default=True,
    metavar="N",
    help="Texts to compare with SentencePiece.",
)
@click.option("--corpus", type=FOLDER, metavar="FILE", help="Compare up to N lines of this file too.")
@click.option(
    "--allow-mismatches",
    "allowed",
    type=Finite(0, 1),
    default=0.0,
    metavar="SHARE",
    help="Share of the texts that may differ, such as 0.002.",
)
@click.option("--force", is_flag=True, help="Replace the tokenizer in OUT.")
@as_json
def tokenizer(model: Path, out: Path, as_json: bool, **options: Any) -> None:
    """SentencePiece MODEL to a Hugging Face fast tokenizer."""
    from converters.assets.sentencepiece import ROLES, convert_tokenizer
    from converters.assets.tokenizer_proof import check

    began = time.monotonic()
    _check_free(out, options["force"])  # a tokenizer.model in OUT may be the input: it is written again
    names = {role: options[role] for role in ROLES if options[role] is not None}
    converted = convert_tokenizer(
        model, control=options["control"], names=names, add=options["add"], add_bos=options["add_bos"]
    )
    checks = check(converted, options["count"], options["corpus"])
    click.echo(_record(converted, checks, out, time.monotonic() - began) if as_json else _lines(converted, checks))
    worst = max(checks, key=lambda tested: tested.rate)
    if worst.rate > options["allowed"]:
        raise VerificationError(
            f"{worst.different} of {worst.compared} {worst.what} differ from SentencePiece, {out} was not written",
            f"--allow-mismatches {math.ceil(worst.rate * 1e4) / 1e4} accepts so many" if worst.rate < 0.01 else "",
        )
    _publish(converted.files, out, options["force"])
    if not as_json:
        click.echo(f"{out}: {converted.size} tokens, {time.monotonic() - began:.1f} s")
        for note in converted.notes:
            click.echo(f"note: {note}", err=True)


# --- what the user sees ----------------------------------------------------------------------------------------------


def _record(converted: Converted, checks: Iterable[Check], out: Path, seconds: float) -> str:
    facts = {"out": str(out), "kind": converted.kind, "pieces": len(converted.pieces), "size": converted.size}
    facts |= {"special": converted.special, "control": converted.control, "notes": converted.notes}
    results = {
        check.what: {
            "compared": check.compared,
            "different": check.different,
            "examples": [example._asdict() for example in check.examples],
        }
        for check in checks
    }
    return json.dumps(facts | {"checks": results, "seconds": round(seconds, 3)}, indent=1)


def _lines(converted: Converted, checks: Iterable[Check]) -> str:
    """The facts of the tokenizer and the result of the proof, as text."""
    control = ", ".join(f"{text} {i}" for text, i in islice(converted.control.items(), 12))
    more = " …" if len(converted.control) > 12 else ""
    roles = ", ".join(f"{role} {i}" for role, i in converted.special.items())
    lines = [f"{converted.kind}, {len(converted.pieces)} pieces; {roles}", f"special tokens: {control}{more}"]
    for check in checks:
        lines.append(
            f"{check.compared} {check.what} compared with SentencePiece: {check.different} differ ({check.rate:.2%})"
        )
        for text, expected, actual in check.examples:
            start = max(0, next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), 0) - 2)
            lines.append(f"  {text[:120]!a}{'…' if len(text) > 120 else ''}, from place {start}:")
            lines += [f"    {name} {ids[start : start + 16]!a}" for name, ids in (("raw ", expected), ("fast", actual))]
    return "\n".join(lines)


# --- the folder ------------------------------------------------------------------------------------------------------


def _check_free(out: Path, force: bool) -> None:
    """Refuse an OUT that is neither absent, nor empty, nor a tokenizer that may be deleted.

    Raises:
        OutputError: OUT may not be replaced.
    """
    place = out.resolve()
    if not place.name or place == Path.cwd():
        raise OutputError(f"{out} cannot be replaced by a tokenizer", "name a new folder")
    if place.exists() and not place.is_dir():
        raise OutputError(f"{out} exists and is not a folder")
    present = {path.name for path in place.iterdir()} if place.is_dir() else set()
    if present and not force:
        raise OutputError(f"{out} exists", "choose another folder, or delete it with --force")
    if present - OURS:
        raise OutputError(
            f"{out} holds more than a tokenizer, such as {min(present - OURS)}",
            "--force deletes tokenizers only; write a new folder and copy its files",
        )


def _publish(files: Mapping[str, bytes], out: Path, force: bool) -> None:
    """Write all files beside OUT, then rename the folder to OUT in one step."""
    from converters.assets.files import write
    from converters.common.atomic import REPLACED, put_back, put_in_place, sync_path

    place = out.resolve()
    staging = place.with_name(place.name + ".partial")
    try:
        put_back(place, staging)
        _check_free(out, force)
        if staging.exists():
            present = {path.name for path in staging.rglob("*")}
            if present - OURS - {"out", REPLACED}:
                raise OutputError(f"{staging} is in the way and holds other things", "remove it yourself")
            shutil.rmtree(staging)
        for path in write(staging / "out", files, {}):
            sync_path(path)
        put_in_place(staging / "out", place, staging)
        shutil.rmtree(staging)
    except OSError as error:
        raise OutputError(f"{error.filename or out}: {error.strerror}", "free some space, or choose another") from None
