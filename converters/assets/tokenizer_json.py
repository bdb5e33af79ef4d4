"""Read the vocabulary of a fast tokenizer (`tokenizer.json`), and add tokens to the file.

Facts: tokenizers 0.23.3. The ids of `added_tokens` in the file are ignored: a token that the model's vocabulary has
keeps that id, any other gets the next id after all others (added_vocabulary.rs, `add_tokens`). So the ids written here
are those that the library itself gives, and the edited file is loaded again to verify that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from converters.assets.json_edit import decoded, members, replaced
from formats.errors import RefusedError, SourceError, some

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAME = "tokenizer.json"
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
"""How a control token is matched: anywhere, as it is written, and hidden from decoded text."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer.

    Attributes:
        ids: every token, added ones included.
        added: the tokens that are split off a text before the model sees it, and whether they are special.
        tokenizer: the tokenizer of the library.
    """

    ids: Mapping[str, int]
    added: Mapping[str, bool]
    tokenizer: Tokenizer = field(repr=False, compare=False)

    @property
    def length(self) -> int:
        """How many rows an embedding needs: the highest id plus one."""
        return max(self.ids.values(), default=-1) + 1

    @property
    def padding(self) -> str | None:
        """The token that the file pads with, None if it does not say."""
        padding = self.tokenizer.padding
        return None if padding is None else str(padding["pad_token"])

    def extended(self, further: Mapping[str, bool]) -> Vocabulary:
        """With further tokens, which get the next ids: their texts, and whether they are special."""
        ids = {token: self.length + place for place, token in enumerate(further)}
        return replace(self, ids={**self.ids, **ids}, added={**self.added, **further})

    def entries(self) -> dict[int, dict[str, Any]]:
        """The added tokens with their flags, by id, as files list them."""
        names, tokens = ("content", *sorted(FLAGS)), self.tokenizer.get_added_tokens_decoder()
        return {number: {name: getattr(tokens[number], name) for name in names} for number in sorted(tokens)}

    def beyond(self, rows: int) -> list[str]:
        """The tokens whose ids are beyond an embedding of so many rows."""
        return [token for token, number in self.ids.items() if number >= rows]

    def excess(self, rows: int) -> Iterator[str]:
        """A sentence on the tokens beyond an embedding of so many rows; nothing if there are none."""
        if beyond := self.beyond(rows):
            entries = f"the tokenizer has {self.length} entries, the embedding {rows} rows"
            yield f"{entries}: no text may have {some(beyond, 3)} in it"

    def lacks(self, rows: int, used: str) -> bool:
        """Whether an embedding of so many rows is too small.

        A special token that nothing writes needs no row: Gemma 3's text models have no row for `<image_soft_token>`.

        Args:
            rows: how many rows the embedding has.
            used: text with the special tokens that are written: a chat template, and bos, eos and pad.
        """
        return any(not self.special(token) or token in used for token in self.beyond(rows))

    def special(self, token: str) -> bool:
        """Whether a token is special: split off a text and hidden from decoded text."""
        return self.added.get(token, False)

    def single(self, token: str) -> bool:
        """Whether a token is special, and is encoded as one id both alone and inside a text."""
        if not self.special(token):
            return False
        alone, inside = (self._encode(text) for text in (token, f"a{token}b"))
        return alone.count(self.ids[token]) == 1 and inside.count(self.ids[token]) == 1

    def require_single(self, tokens: Iterable[str], name: str = NAME, key: str = "added_tokens") -> None:
        """Check that the tokens of a chat template are found in the text that it writes.

        Args:
            tokens: their texts.
            name: the file that says how they are matched.
            key: where it does so.

        Raises:
            RefusedError: a token is not found, such as one with `single_word` beside a letter.
        """
        for token in tokens:
            if self.special(token) and not self.single(token):
                raise RefusedError(
                    f"{name} has the token {token}, and does not find it beside letters: the chat template would write "
                    "text",
                    f'"single_word": false in the entry of {token} in "{key}" makes it a token everywhere',
                )

    def _encode(self, text: str) -> list[int]:
        with _explained(f"{NAME} fails on {text!r}"):
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise errors of the tokenizers library, among them panics of its Rust code, as SourceErrors of the file."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise SourceError(f"{what}: {' '.join(str(error).split())[:300]}") from error


def read_vocabulary(content: bytes, name: str = NAME) -> Vocabulary:
    """Load a tokenizer.json.

    Raises:
        SourceError: the library cannot load it.
    """
    from tokenizers import Tokenizer

    try:
        with _explained(f"{name} is no tokenizer that can be loaded"):
            tokenizer = Tokenizer.from_buffer(content)
    except SourceError as error:
        if b'"model"' in content:
            raise
        hint = "a tokenizer.json is one, or a .model of SentencePiece"
        raise SourceError(f"{name} is no tokenizer: it has no model", hint) from error
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    return Vocabulary(tokenizer.get_vocab(with_added_tokens=True), added, tokenizer)


def rebuilt_ids(content: bytes, tokens: Iterable[str]) -> dict[str, int]:
    """The ids of added tokens, if these alone are added to the model's vocabulary, one after the other.

    Raises:
        SourceError: the library cannot load the tokenizer.json without its added tokens.
    """
    bare = read_vocabulary(replaced(decoded(content, NAME), NAME, "added_tokens", []).encode()).tokenizer
    bare.add_tokens([*tokens])
    return {token.content: number for number, token in bare.get_added_tokens_decoder().items()}


def with_flags(content: bytes, token: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a tokenizer.json in which a token is matched as an entry of another file says.

    Raises:
        SourceError: the file cannot be loaded.
    """
    from tokenizers import AddedToken

    known = read_vocabulary(content)
    flags = {name: bool(token[name]) for name in FLAGS if name in token}
    known.tokenizer.add_tokens([AddedToken(token["content"], **{"special": True} | flags)])
    return known


def with_tokens(content: bytes, tokens: Iterable[str]) -> tuple[bytes, Vocabulary]:
    """A tokenizer.json in which all wanted tokens are special, and its vocabulary.

    Args:
        content: the file.
        tokens: the wanted tokens, in the order in which new ones get ids; special tokens stay as they are.

    Raises:
        SourceError: the file cannot be loaded.
        RefusedError: the library would not give each new token an id of its own after all others.
    """
    from tokenizers import AddedToken

    before = read_vocabulary(content)
    lacking = [token for token in dict.fromkeys(tokens) if not before.special(token)]
    if not lacking:
        return content, before
    before.tokenizer.add_special_tokens([AddedToken(token, **FLAGS) for token in lacking if token not in before.added])
    known = before.tokenizer.get_vocab(with_added_tokens=True)
    edited = _edited(content, {token: known[token] for token in lacking})
    after = read_vocabulary(edited)
    fresh = [token for token in lacking if token not in before.ids]
    expected = dict(before.ids) | {token: before.length + place for place, token in enumerate(fresh)}
    if after.ids != expected or not all(after.single(token) for token in lacking):
        raise RefusedError(
            f"{', '.join(lacking)} cannot be added to {NAME}: the tokenizer would not read each as one token, "
            f"with new ids from {before.length} on",
            "add them with the tool that made the tokenizer",
        )
    return edited, after


def _edited(content: bytes, ids: Mapping[str, int]) -> bytes:
    """The file with entries for tokens: existing entries become special, others are appended."""
    text = decoded(content, NAME)
    added: list[dict[str, Any]] = []
    for member in members(text, NAME):
        if member.key == "added_tokens":
            added = member.value or []
            break
    entries = [entry | {"special": True} if entry["content"] in ids else entry for entry in added]
    known = {entry["content"] for entry in entries}
    entries += [{"id": number, "content": token} | FLAGS for token, number in ids.items() if token not in known]
    return replaced(text, NAME, "added_tokens", entries).encode()
