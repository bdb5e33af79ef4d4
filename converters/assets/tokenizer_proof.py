"""Prove that a fast tokenizer gives the ids of SentencePiece, on many texts that are the same in each run."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from formats.errors import SourceError, UnsupportedError, VerificationError, short

if TYPE_CHECKING:
    from converters.assets.sentencepiece import Converted

BATCH, SHOWN, LONGEST_LINE = 256, 5, 1 << 14
SCRIPTS = (
    (0x00, 0x1F), (0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x17F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x45F),
    (0x5B0, 0x5EA), (0x610, 0x652), (0x905, 0x94D), (0xE01, 0xE4E), (0x1100, 0x11FF), (0x1E00, 0x1EFF),
    (0x2000, 0x206F), (0x2070, 0x20BF), (0x2100, 0x218F), (0x2460, 0x24FF), (0x2580, 0x2590), (0x3000, 0x30FF),
    (0x4E00, 0x4FFF), (0xAC00, 0xAD00), (0xF900, 0xF9FF), (0xFB00, 0xFB4F), (0xFE00, 0xFE0F), (0xFE70, 0xFEFF),
    (0xFF01, 0xFF9F), (0xFFF0, 0xFFFF), (0x1D400, 0x1D4FF), (0x1F1E6, 0x1F1FF), (0x1F300, 0x1F6FF), (0xE000, 0xE010),
)  # fmt: skip
"""First and last code points that texts are drawn from: scripts, marks, spaces, symbols, emoji, presentation forms."""
SPACES = (" ", "  ", "     ", "\t", "\n", "\n\n", "\r\n", "\r", "\u00a0", "\u3000", "\u200b", "\u2581", "a", "b c")
MARKS = ("\u0300", "\u0301", "\u0302", "\u0304", "\u0308", "\u030c", "\u0323", "\u0327", "\u0338", "\ufe0f", "\u200d")
EDGES = ("", " ", "   ", "\n", "\t x", "x ", " x", "\0", "a\0b", "\u2581", "\u2581\u2581x", "\ufeffx", "x" * 5000)


class Example(NamedTuple):
    """A text on which the tokenizers differ."""

    text: str
    expected: Sequence[int] | str
    found: Sequence[int] | str


@dataclass
class Check:
    """The counts of a comparison on one kind of text.

    Attributes:
        what: the kind of text.
        compared: how many texts were compared.
        different: how many of them differ.
        examples: the first texts that differ.
    """

    what: str
    compared: int = 0
    different: int = 0
    examples: list[Example] = field(default_factory=list)

    def add(self, text: str, expected: Sequence[int] | str, actual: Sequence[int] | str) -> None:
        """Compare two results."""
        self.compared += 1
        if expected != actual:
            self.different += 1
            if len(self.examples) < SHOWN:
                self.examples.append(Example(text, expected, actual))

    @property
    def rate(self) -> float:
        """The fraction of texts that differ."""
        return self.different / self.compared if self.compared else 0.0


def check(converted: Converted, count: int, corpus: Path | None = None) -> tuple[Check, ...]:
    """Compare a fast tokenizer with SentencePiece, in batches.

    Texts are compared with special tokens switched off, as messages of users must be encoded; dialogues as a whole,
    with each span between two special tokens encoded by itself in SentencePiece; decoding on the same ids.

    Args:
        converted: the fast tokenizer.
        count: how many texts are generated, and how many lines of the corpus are read at most.
        corpus: a text file with further texts.

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
    """Raise errors of the tokenizers library, plain Exceptions and PyO3's panics, as UnsupportedErrors."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UnsupportedError(f"the tokenizers library fails with this model: {short(str(error))}") from None


def _check_vocabulary(converted: Converted, fast: Any) -> None:
    """Refuse a tokenizer in which a piece has another id, an id another piece, or a special token is not one id.

    Raises:
        VerificationError: the vocabularies differ.
    """
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
    for text, expected, encoded in zip(batch, ids, fast.encode_batch(batch, add_special_tokens=False), strict=True):
        texts.add(text, expected, encoded.ids)
    known = [row for row in ids if raw.unk_id() not in row]
    fast_texts = fast.decode_batch(known, skip_special_tokens=False)
    for expected, encoded in zip(raw.decode(known), fast_texts, strict=True):
        decoded.add(expected, expected, encoded)


def _compare_dialogues(fast: Any, raw: Any, dialogues: list[str], control: Mapping[str, int], check: Check) -> None:
    """Compare whole dialogues with the spans between special tokens, which SentencePiece encodes one by one."""
    fast.encode_special_tokens = False
    token = re.compile("(" + "|".join(map(re.escape, sorted(control, key=len, reverse=True))) + ")")
    for text, encoded in zip(dialogues, fast.encode_batch(dialogues, add_special_tokens=False), strict=True):
        parts = token.split(text)
        spans = raw.encode(parts[::2])
        marks = [[control[part]] for part in parts[1::2]]
        expected = chain.from_iterable(chain.from_iterable(zip_longest(spans, marks, fillvalue=())))
        check.add(text, list(expected), encoded.ids)


# --- texts -----------------------------------------------------------------------------------------------------------


def made(converted: Converted, count: int, draw: random.Random) -> Iterator[str]:
    """Generated texts of many kinds, the same in each run."""
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
    """Dialogues of two to four turns, each between two copies of a special token."""
    texts = iter(batch)
    while turns := list(islice(texts, draw.randint(2, 4))):
        yield "".join(f"{token}{text}{token}" for text in turns for token in [draw.choice(control)])


def _lines_of(path: Path, count: int) -> Iterator[str]:
    """The first lines of a corpus, each at most 16 KB; bytes that are no UTF-8 are replaced."""
    try:
        with path.open("rb") as file:
            for _ in range(count):
                line = file.readline(LONGEST_LINE)
                if not line:
                    return
                yield line.decode(errors="replace").rstrip("\r\n")
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
