"""Convert SentencePiece's normalizer to a chain of small steps that a fast tokenizer has.

Facts that determine the chain (sentencepiece 0.2.3, tokenizers 0.23.3; each is measured in tests/tokenizer):

* Only U+0020 is collapsed and stripped, and U+2581 at the end. `Strip` would remove newlines and tabs too.
* `Precompiled` (spm_precompiled 0.1.4) looks up a grapheme of less than 6 bytes, takes the shortest rule that it begins
  with and drops the rest: letters lose accents. So separators keep each character to itself there, and NFC then
  composes the pairs that the model's own rules compose, and no other.
"""

from __future__ import annotations

import base64
import itertools
import struct
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from formats.errors import SourceError, UnsupportedError

SPACE = "\u2581"
TABLES = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")
"""The normalizers that are built into SentencePiece."""
MOST_RULES, MOST_OWN_RULES = 1 << 20, 256
APART, ALONE = "\U000e0002", "\U000e0003"
"""Unassigned characters that end a grapheme: `APART` keeps NFC from composing, `ALONE` is removed before NFC."""
PRIVATE = 0xF0000
"""The first private code point that stands in for text that the charsmap must not change."""
JOINING = "\u200c\u200d\u0e33\u0eb3\uff9e\uff9f"
"""Characters, up to 3 bytes long, that join the grapheme before and are no marks (Unicode's GraphemeBreakProperty)."""


def charsmap_rules(charsmap: bytes) -> dict[str, str]:
    """The replacements of a precompiled charsmap, by the text that is replaced.

    A charsmap is the size of a double array, that array (darts-clone's units of 32 bits), and the replacements, each
    with a NUL after it (sentencepiece/src/normalizer.cc, `DecodePrecompiledCharsMap`).
    """
    (nbytes,) = struct.unpack_from("<I", charsmap)
    units = struct.unpack_from(f"<{nbytes // 4}I", charsmap, 4)
    texts = charsmap[4 + nbytes :]
    children = defaultdict(list)
    for i, unit in enumerate(units):
        if not unit >> 31 and unit & 0xFF:
            children[i ^ (unit & 0xFF)].append(i)
    rules: dict[str, str] = {}
    stack = [(0, b"")]
    while stack:
        i, key = stack.pop()
        base = i ^ ((units[i] >> 10) << ((units[i] & 0x200) >> 6))
        if units[i] & 0x100:
            start = units[base] & 0x7FFFFFFF
            rules[key.decode()] = texts[start : texts.index(0, start)].decode()
        if len(key) > 0xFF or len(rules) > MOST_RULES:
            raise ValueError("it has no end")
        stack.extend((child, key + bytes([units[child] & 0xFF])) for child in children.get(base, ()))
    return rules


def steps(proto: Any, user: Iterable[str]) -> list[dict[str, Any]]:
    """The steps of a fast tokenizer's normalizer that normalize as SentencePiece does."""
    spec = proto.normalizer_spec
    try:
        rules = charsmap_rules(spec.precompiled_charsmap) if spec.precompiled_charsmap else {}
    except (ValueError, IndexError, struct.error) as error:
        raise SourceError(f"the normalizer of the model is damaged: {error}") from None
    composed, kept = [], {text: text for text in user if any(char in rules for char in text)}
    for key, value in rules.items():
        if len(key) > 1 and unicodedata.normalize("NFC", "".join(rules.get(char, char) for char in key)) == value:
            composed.append(key)
        elif len(key) > 1 and spec.name not in TABLES:  # built-in ones are known, newer than this Python's Unicode
            kept[key] = value
    if len(kept) > MOST_OWN_RULES:
        raise UnsupportedError(f"the normalizer has {len(kept)} rules of its own, {MOST_OWN_RULES} can be converted")
    stands = {text: chr(PRIVATE + i) for i, text in enumerate(sorted(kept, key=len, reverse=True))}
    chain = [replace(text, stand) for text, stand in stands.items()]
    chain += _mapped(spec.precompiled_charsmap, composed) if rules else []
    chain += [replace(stand, kept[text]) for text, stand in stands.items()]
    space = SPACE if spec.escape_whitespaces else " "
    if spec.remove_extra_whitespaces:
        chain += [replace(" {2,}", " ", "Regex"), replace(r"\A +", "", "Regex")]
    if spec.add_dummy_prefix:
        chain.append({"type": "Prepend", "prepend": space})
    if spec.escape_whitespaces:
        chain.append(replace(" ", space))
    if spec.remove_extra_whitespaces:
        chain.append(replace(f"{literal(space)}+\\z", "", "Regex"))
    return chain


def _mapped(charsmap: bytes, composed: Iterable[str]) -> list[dict[str, Any]]:
    """The steps that map each character by itself with the charsmap, then compose.

    No separator is put before the first character: tokenizers 0.23.3 panics in the steps after it.
    """
    after: dict[str, set[str]] = defaultdict(set)
    for key in composed:
        for first, second in itertools.pairwise(key):
            after[first].add(second)
    alike = defaultdict(set)
    for first, followers in after.items():
        alike[frozenset(followers)].add(first)
    pairs = "|".join(sorted(f"(?<={one_of(ones)}){one_of(followers)}" for followers, ones in alike.items()))
    joining = one_of({*JOINING}.union(*alike), r"\p{M}")
    alone = replace(rf"(?={joining})(?<=[\s\S])|(?<=\r)(?=\n)", ALONE, "Regex")
    apart = replace(rf"(?={joining})(?<=[\s\S])(?!{pairs})", APART, "Regex")
    table = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    if not pairs:
        return [alone, table, replace(ALONE, "")]
    return [apart, alone, table, replace(ALONE, ""), {"type": "NFC"}, replace(APART, "")]


# --- patterns ---------------------------------------------------------------------------------------------------------


def replace(what: str, by: str, how: str = "String") -> dict[str, Any]:
    """A step that replaces a text, or a pattern."""
    return {"type": "Replace", "pattern": {how: what}, "content": by}


def literal(text: str) -> str:
    """A pattern for a text, in ASCII: tokenizers 0.23.3 panics when it prints a long pattern that is not."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def one_of(characters: Iterable[str], others: str = "") -> str:
    """A pattern, with ranges, that matches one of some characters."""
    ranges: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "[" + others + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges) + "]"
