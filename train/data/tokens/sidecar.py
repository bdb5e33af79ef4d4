"""Sidecar files of token files: `PREFIX.json` (how the files were made) and `PREFIX.mask` (the loss mask).

Both are ours and optional: files of other programs do not have them, and other programs do not read them.
The mask has one byte for each token of the `.bin`: 1 where the token, as a label, belongs to a reply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from formats.errors import RefusedError, SourceError, short


@dataclass(frozen=True)
class Facts:
    """How token files were made.

    Attributes:
        tokenizer: BLAKE3 of the tokenizer's file, in hexadecimal digits.
        vocabulary: number of tokens of the tokenizer.
        control: id of the control token of each role that has one, by the name of the role, such as user.
        eod: id of the end-of-document token, None if none was appended.
        template: BLAKE3 of the chat template, None if none was used.
        counts: documents, tokens, and dropped records by reason.
        names: BLAKE3 of the names of the tokenizer's tokens in the order of ids; None in files of older versions.
        masked: whether `PREFIX.mask` is needed although there are control tokens: records exclude replies.
        plain: whether each document is a text without turns, which is trained as a whole.
        content: digest of the tokens and masks (or roles) as they were written, which a resumed training compares;
            None in files of older versions, and of commands that write tokens without reading all of them.
    """

    tokenizer: str
    vocabulary: int
    control: Mapping[str, int]
    eod: int | None
    template: str | None = None
    counts: Mapping[str, Any] = field(default_factory=dict)
    names: str | None = None
    masked: bool = False
    plain: bool = False
    content: str | None = None

    @property
    def encoding(self) -> tuple[Any, ...]:
        """The facts that must be equal in token files that are merged."""
        return self.tokenizer, self.vocabulary, dict(self.control), self.eod, self.template

    @property
    def known(self) -> dict[str, Any]:
        """All facts but those that are None: the same for a file of an older version, which lacks some."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def facts_path(prefix: Path) -> Path:
    """The path of the sidecar of a prefix."""
    return prefix.with_name(prefix.name + ".json")


def mask_path(prefix: Path) -> Path:
    """The path of the loss mask of a prefix."""
    return prefix.with_name(prefix.name + ".mask")


def read_facts(prefix: Path) -> Facts | None:
    """The sidecar of a prefix, None if there is no such file.

    Raises:
        SourceError: the file is damaged.
    """
    path = facts_path(prefix)
    if not path.is_file():
        return None
    try:
        return _sound(Facts(**json.loads(path.read_bytes())))
    except (ValueError, TypeError, RecursionError) as error:
        raise SourceError(f"{path} does not say how the tokens were made: {short(str(error))}") from None


def _sound(facts: Facts) -> Facts:
    """The facts, with checked types.

    Raises:
        ValueError: a field has a wrong type.
    """
    control = facts.control
    odd = {
        "tokenizer": not isinstance(facts.tokenizer, str),
        "vocabulary": not _number(facts.vocabulary),
        "control": not isinstance(control, dict) or not all(map(_number, control.values())),
        "eod": facts.eod is not None and not _number(facts.eod),
        "template": not isinstance(facts.template, str | None),
        "names": not isinstance(facts.names, str | None),
        "counts": not isinstance(facts.counts, dict),
        "masked": not isinstance(facts.masked, bool),
        "plain": not isinstance(facts.plain, bool),
        "content": not isinstance(facts.content, str | None),
    }
    wrong = next((name for name, is_odd in odd.items() if is_odd), None)
    if wrong is not None:
        raise ValueError(f"{wrong} is {short(getattr(facts, wrong))}")
    return facts


def _number(value: object) -> bool:
    return type(value) is int and value >= 0


def facts_text(facts: Facts) -> str:
    """The content of a sidecar file."""
    return json.dumps(asdict(facts), indent=1, ensure_ascii=False) + "\n"


def content_of(digests: Sequence[str]) -> str:
    """The digest of several files from the digest of each, which are the parts of the tokens and then of the masks."""
    return blake3(" ".join(digests).encode()).hexdigest()


def common_facts(prefixes: Sequence[Path], counts: Mapping[str, Any]) -> Facts | None:
    """The facts of token files that are merged from several; None unless all have a sidecar.

    Raises:
        RefusedError: two files were made with different tokenizers, control tokens or templates.
    """
    known = [(prefix, facts) for prefix in prefixes if (facts := read_facts(prefix)) is not None]
    for prefix, facts in known[1:]:
        if facts.encoding != known[0][1].encoding:
            raise RefusedError(
                f"{known[0][0]} and {prefix} were tokenized differently: {known[0][1].encoding} and {facts.encoding}"
            )
    if len(known) < len(prefixes) or not known:
        return None
    masked, plain = any(facts.masked for _, facts in known), all(facts.plain for _, facts in known)
    return replace(known[0][1], counts=counts, masked=masked, plain=plain, content=None)
