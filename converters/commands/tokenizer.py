"""The command that turns a SentencePiece model into a fast tokenizer, and proves on texts that the ids are the same."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from converters.commands.options import FOLDER, as_json
from formats.errors import OutputError, SourceError, UnsupportedError, VerificationError, short

if TYPE_CHECKING:
    from converters.publish.tokenizer import Converted

BATCH, SHOWN, LONGEST_LINE = 256, 5, 1 << 14
OURS = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "chat_template.jinja"}
"""What a folder may hold that --force deletes."""
SCRIPTS = (
    (0x00, 0x1F), (0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x17F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x45F),
    (0x5B0, 0x5EA), (0x610, 0x652), (0x905, 0x94D), (0xE01, 0xE4E), (0x1100, 0x11FF), (0x1E00, 0x1EFF),
    (0x2000, 0x206F), (0x2070, 0x20BF), (0x2100, 0x218F), (0x2460, 0x24FF), (0x2580, 0x2590), (0x3000, 0x30FF),
    (0x4E00, 0x4FFF), (0xAC00, 0xAD00), (0xF900, 0xF9FF), (0xFB00, 0xFB4F), (0xFE00, 0xFE0F), (0xFE70, 0xFEFF),
    (0xFF01, 0xFF9F), (0xFFF0, 0xFFFF), (0x1D400, 0x1D4FF), (0x1F1E6, 0x1F1FF), (0x1F300, 0x1F6FF), (0xE000, 0xE010),
)  # fmt: skip
"""First and last code point of what is drawn from: scripts, marks, spaces, symbols, emoji, presentation forms."""
SPACES = (" ", "  ", "     ", "\t", "\n", "\n\n", "\r\n", "\r", "\u00a0", "\u3000", "\u200b", "\u2581", "a", "b c")
MARKS = ("\u0300", "\u0301", "\u0302", "\u0304", "\u0308", "\u030c", "\u0323", "\u0327", "\u0338", "\ufe0f", "\u200d")
EDGES = ("", " ", "   ", "\n", "\t x", "x ", " x", "\0", "a\0b", "\u2581", "\u2581\u2581x", "\ufeffx", "x" * 5000)


class Example(NamedTuple):
    """A text for which the tokenizers differ."""

    text: str
    expected: Sequence[int] | str
    found: Sequence[int] | str


@dataclass
class Check:
    """What was compared, and what differed.

    Attributes:
        what: the kind of text.
        compared: how many.
        different: how many of them differ.
        examples: the first of those.
    """

    what: str
    compared: int = 0
    different: int = 0
    examples: list[Example] = field(default_factory=list)

    def add(self, text: str, expected: Sequence[int] | str, found: Sequence[int] | str) -> None:
        """Compare two results."""
        self.compared += 1
        if expected != found:
            self.different += 1
            if len(self.examples) < SHOWN:
                self.examples.append(Example(text, expected, found))

    @property
    def rate(self) -> float:
        """The share that differs."""
        return self.different / self.compared if self.compared else 0.0


@click.command()
@click.argument("model", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option("--control", multiple=True, metavar="TOKEN", help="A control token, such as '<|user|>'; repeat it.")
@click.option("--add", is_flag=True, help="Give tokens that are no piece of MODEL new ids.")
@click.option("--bos", metavar="TOKEN", help="The token that begins a text.  [default: as in MODEL]")
@click.option("--eos", metavar="TOKEN", help="The token that ends a text, such as '<|endoftext|>'.")
@click.option("--pad", metavar="TOKEN", help="The token that fills a batch.")
@click.option("--unk", metavar="TOKEN", help="The token of the unknown: that of MODEL and no other.")
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
    type=click.FloatRange(0, 1),
    default=0.0,
    metavar="SHARE",
    help="Publish although a share, such as 0.002, of the texts differs.",
)
@click.option("--force", is_flag=True, help="Delete the tokenizer that OUT is.")
@as_json
def tokenizer(model: Path, out: Path, as_json: bool, **options: Any) -> None:
    """SentencePiece MODEL to a Hugging Face fast tokenizer."""
    from converters.publish.tokenizer import ROLES, convert_tokenizer

    began = time.monotonic()
    _check_free(out, options["force"])
    names = {role: options[role] for role in ROLES if options[role] is not None}
    converted = convert_tokenizer(
        model, control=options["control"], names=names, add=options["add"], add_bos=options["add_bos"]
    )
    checks = check(converted, options["count"], options["corpus"])
    click.echo(_record(converted, checks, out, time.monotonic() - began) if as_json else _lines(converted, checks))
    worst = max(checks, key=lambda one: one.rate)
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


# --- proof -----------------------------------------------------------------------------------------------------------


def check(converted: Converted, count: int, corpus: Path | None = None) -> tuple[Check, ...]:
    """Compare a fast tokenizer with SentencePiece, in batches.

    Texts are compared with special tokens switched off, as messages of users must be encoded; dialogues as a whole,
    with each span between two special tokens encoded by itself in SentencePiece; decoding on the same ids.

    Args:
        converted: the tokenizer.
        count: how many texts are made, and how many lines of a corpus are read at most.
        corpus: a text file.

    Raises:
        VerificationError: the vocabularies differ.
    """
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

    texts, dialogues, decoded = checks = Check("texts"), Check("dialogues"), Check("decoded texts")
    draw = random.Random(0)  # noqa: S311 - the same texts each time
    source = chain(_lines_of(corpus, count) if corpus else (), made(converted, count, draw))
    raw = SentencePieceProcessor()
    raw.LoadFromSerializedProto(converted.reference)
    with _library():
        fast = Tokenizer.from_str(converted.files["tokenizer.json"].decode())
        _check_vocabulary(converted, fast)
        while batch := list(islice(source, BATCH)):
            _compare_texts(fast, raw, batch, texts, decoded)
            spoken = list(_dialogues(batch, tuple(converted.control), draw))
            _compare_dialogues(fast, raw, spoken, converted.control, dialogues)
    return checks


@contextmanager
def _library() -> Iterator[None]:
    """What the tokenizers library raises: plain Exceptions, and PyO3's panics, which are none."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UnsupportedError(f"the tokenizers library fails with this model: {short(str(error))}") from None


def _check_vocabulary(converted: Converted, fast: Any) -> None:
    """Each piece has its id, each id its piece, and each special token is one id."""
    if fast.get_vocab_size() != converted.size:
        raise VerificationError(f"the tokenizer has {fast.get_vocab_size()} tokens instead of {converted.size}")
    for text, i in chain(((text, i) for i, text in enumerate(converted.pieces)), converted.control.items()):
        if fast.token_to_id(text) != i or fast.id_to_token(i) != text:
            raise VerificationError(f"piece {i}, {short(text)}, is {short(fast.id_to_token(i))} in the tokenizer")
    for text, i in converted.control.items():
        if fast.encode(text, add_special_tokens=False).ids != [i]:
            raise VerificationError(f"the special token {short(text)} is not encoded as {i}")


def _compare_texts(fast: Any, raw: Any, batch: list[str], texts: Check, decoded: Check) -> None:
    fast.encode_special_tokens = True
    ids = raw.encode(batch)
    for text, expected, found in zip(batch, ids, fast.encode_batch(batch, add_special_tokens=False), strict=True):
        texts.add(text, expected, found.ids)
    known = [one for one in ids if raw.unk_id() not in one]
    again = fast.decode_batch(known, skip_special_tokens=False)
    for expected, found in zip(raw.decode(known), again, strict=True):
        decoded.add(expected, expected, found)


def _compare_dialogues(fast: Any, raw: Any, dialogues: list[str], control: Mapping[str, int], check: Check) -> None:
    """Compare whole dialogues with spans that SentencePiece encodes one by one."""
    fast.encode_special_tokens = False
    token = re.compile("(" + "|".join(map(re.escape, sorted(control, key=len, reverse=True))) + ")")
    for text, found in zip(dialogues, fast.encode_batch(dialogues, add_special_tokens=False), strict=True):
        parts = token.split(text)
        spans = raw.encode(parts[::2])
        marks = [[control[part]] for part in parts[1::2]]
        expected = chain.from_iterable(chain.from_iterable(zip_longest(spans, marks, fillvalue=())))
        check.add(text, list(expected), found.ids)


# --- texts -----------------------------------------------------------------------------------------------------------


def made(converted: Converted, count: int, draw: random.Random) -> Iterator[str]:
    """Texts of many kinds, always the same ones."""
    pieces = [text for text in converted.pieces if text not in converted.control] or ["x"]
    words = [text.replace("\u2581", " ") for text in pieces]
    spelled = [*converted.control, "<0x0A>", "<0xFF>", "\u2581", " ", "\n", "x", *pieces[:: len(pieces) // 50 + 1]]

    def one_script() -> str:
        first, last = draw.choice(SCRIPTS)
        return _joined(draw, lambda: chr(draw.randint(first, last)), 30)

    def word() -> str:
        return _joined(draw, lambda: draw.choice(words).strip(), 4)

    makers = (
        one_script,
        lambda: _joined(draw, lambda: chr(draw.randint(*draw.choice(SCRIPTS))), 30),
        lambda: _joined(draw, lambda: draw.choice(pieces), 20),
        lambda: _joined(draw, lambda: draw.choice(words), 20),
        lambda: " ".join(word() for _ in range(draw.randint(1, 25))),
        lambda: _joined(draw, lambda: draw.choice(SPACES), 15),
        lambda: _joined(draw, lambda: draw.choice("aeiouyAEIOUnsc ") + draw.choice(("", *MARKS)), 20),
        lambda: _joined(draw, lambda: draw.choice(spelled), 8),
        lambda: word() * draw.randint(1, 60),
        lambda: draw.choice((" ", "\n", "")) + one_script() + draw.choice(SPACES) + word() + draw.choice(SPACES),
    )
    yield from islice(EDGES, count)
    for i in range(count - len(EDGES)):
        yield makers[i % len(makers)]()


def _joined(draw: random.Random, make: Callable[[], str], most: int) -> str:
    return "".join(make() for _ in range(draw.randint(1, most)))


def _dialogues(batch: Sequence[str], control: Sequence[str], draw: random.Random) -> Iterator[str]:
    """Dialogues of two to four turns; the token that opens a turn closes it."""
    texts = iter(batch)
    while turns := list(islice(texts, draw.randint(2, 4))):
        yield "".join(f"{token}{text}{token}" for text in turns for token in [draw.choice(control)])


def _lines_of(path: Path, count: int) -> Iterator[str]:
    """The first lines of a corpus, each cut at 16 KB; bytes that are no UTF-8 are replaced."""
    try:
        with path.open("rb") as file:
            for _ in range(count):
                line = file.readline(LONGEST_LINE)
                if not line:
                    return
                yield line.decode(errors="replace").rstrip("\r\n")
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None


# --- what the user sees ----------------------------------------------------------------------------------------------


def _record(converted: Converted, checks: Iterable[Check], out: Path, seconds: float) -> str:
    facts = {"out": str(out), "kind": converted.kind, "pieces": len(converted.pieces), "size": converted.size}
    facts |= {"special": converted.special, "control": converted.control, "notes": converted.notes}
    found = {
        one.what: {
            "compared": one.compared,
            "different": one.different,
            "examples": [example._asdict() for example in one.examples],
        }
        for one in checks
    }
    return json.dumps(facts | {"checks": found, "seconds": round(seconds, 3)}, indent=1)


def _lines(converted: Converted, checks: Iterable[Check]) -> str:
    """The tokenizer and the proof, as text."""
    control = ", ".join(f"{text} {i}" for text, i in islice(converted.control.items(), 12))
    more = " …" if len(converted.control) > 12 else ""
    roles = ", ".join(f"{role} {i}" for role, i in converted.special.items())
    lines = [f"{converted.kind}, {len(converted.pieces)} pieces; {roles}", f"special tokens: {control}{more}"]
    for one in checks:
        lines.append(f"{one.compared} {one.what} compared with SentencePiece: {one.different} differ ({one.rate:.2%})")
        for text, expected, found in one.examples:
            start = max(0, next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), 0) - 2)
            lines.append(f"  {text[:120]!a}{'…' if len(text) > 120 else ''}, from place {start}:")
            lines += [f"    {name} {ids[start : start + 16]!a}" for name, ids in (("raw ", expected), ("fast", found))]
    return "\n".join(lines)


# --- the folder ------------------------------------------------------------------------------------------------------


def _check_free(out: Path, force: bool) -> Path:
    """The place of OUT, which is absent, empty, or a tokenizer that may be deleted."""
    place = out.resolve()
    if not place.name or place == Path.cwd():
        raise OutputError(f"{out} cannot be replaced by a tokenizer", "name a new folder")
    if place.exists() and not place.is_dir():
        raise OutputError(f"{out} exists and is no folder")
    held = {path.name for path in place.iterdir()} if place.is_dir() else set()
    if held and not force:
        raise OutputError(f"{out} exists", "choose another folder, or delete it with --force")
    if held - OURS:
        raise OutputError(
            f"{out} holds more than a tokenizer, such as {min(held - OURS)}",
            "--force deletes tokenizers only; write a new folder and copy its files",
        )
    return place


def _publish(files: Mapping[str, bytes], out: Path, force: bool) -> None:
    """Write everything beside OUT, then put it in its place in one step."""
    place = _check_free(out, force)
    staging = place.with_name(place.name + ".partial")
    try:
        if staging.exists():
            held = {path.name for path in staging.rglob("*")}
            if held - OURS - {"out", "replaced"}:
                raise OutputError(f"{staging} is in the way and holds other things", "remove it yourself")
            shutil.rmtree(staging)
        (staging / "out").mkdir(parents=True)
        for name, content in files.items():
            with (staging / "out" / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if place.exists():
            place.rename(staging / "replaced")
        (staging / "out").rename(place)
        shutil.rmtree(staging)
    except OSError as error:
        raise OutputError(f"{error.filename or out}: {error.strerror}", "free some space, or choose another") from None
