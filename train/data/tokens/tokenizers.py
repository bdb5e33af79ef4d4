"""Tokenizers: ids of plain text, and ids of control tokens by name.

`encode` never turns text into a control token, whatever the text spells: otherwise a document could open a turn.

Facts: sentencepiece 0.2.3 (`piece_to_id` of a missing piece silently returns the id of <unk>; a piece of the type
USER_DEFINED is found in any text, one of the type CONTROL never), tokenizers 0.23.3 (`encode_special_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from formats.errors import SourceError, UsageError, short
from train.data.tokens.sidecar import Facts

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of ModelProto.SentencePiece.Type."""
EOD = "<|endoftext|>"
"""GPT-NeoX's end-of-document token (megatron/tokenizer/tokenizer.py at ea7aefd8)."""
ROLES = ("user", "assistant", "system")
FILES = ("tokenizer.json", "tokenizer.model")
"""Names of tokenizer files in a folder; the first that exists is used."""


class Vocabulary(Protocol):
    """A tokenizer.

    Attributes:
        path: the tokenizer's file.
        digest: BLAKE3 of the file.
        size: number of tokens.
        special: whether each id is of a control token that `encode` may produce nevertheless, bool[size].
        unusable: ids that cannot end a document, and what they are: unknown or padding.
    """

    path: Path
    digest: str
    size: int
    special: NDArray[np.bool_]
    unusable: dict[int, str]

    def id_of(self, token: str) -> int | None:
        """The id of a control token by its name, None if there is none."""

    def encode(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """The ids of texts, each encoded separately, without control tokens."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The name of each id."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


def open_vocabulary(path: Path, control: Iterable[str] = ()) -> Vocabulary:
    """Load a tokenizer: a SentencePiece `.model`, a `tokenizer.json`, or a folder that has one of them.

    Args:
        path: the file or folder.
        control: tokens to treat as control tokens, even if the model would find them in text. Tokens of the form
            <|name|> always are.

    Raises:
        SourceError: the path is no tokenizer, or a damaged one.
    """
    if path.is_dir():
        files = [path / name for name in FILES if (path / name).is_file()]
        if not files:
            raise SourceError(f"{path} holds neither a tokenizer.json nor a tokenizer.model")
        path = files[0]
    if not path.is_file():
        raise SourceError(
            f"{path} is {'not a tokenizer' if path.exists() else 'not there'}",
            "name a .model of SentencePiece, a tokenizer.json, or its folder",
        )
    return Fast(path) if path.suffix == ".json" else SentencePiece(path, control)


class SentencePiece:
    """A SentencePiece model, run by its own library."""

    def __init__(self, path: Path, control: Iterable[str] = ()) -> None:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

        from converters.assets.chat_template import MARKER

        raw = path.read_bytes()
        proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        self.model = SentencePieceProcessor()
        try:
            proto.ParseFromString(raw)
            control_names = set(control)
            for piece in proto.pieces:
                if piece.type == USER_DEFINED and (piece.piece in control_names or MARKER.fullmatch(piece.piece)):
                    piece.type = CONTROL
            proto.DiscardUnknownFields()  # they include a self-test with the original types
            self.model.LoadFromSerializedProto(proto.SerializeToString())
        except Exception as error:  # noqa: BLE001  # protobuf and the library have no narrower common class
            raise SourceError(f"{path} is not a SentencePiece model, or cut off: {short(str(error))}") from None
        self.path, self.digest = path, blake3(raw).hexdigest()
        self.size = self.model.get_piece_size()
        kinds = (UNKNOWN, CONTROL, USER_DEFINED)
        self.control = {piece.piece: number for number, piece in enumerate(proto.pieces) if piece.type in kinds}
        pads = {self.model.pad_id(), self.control.get("<|pad|>", -1)} - {-1}
        self.special = np.zeros(self.size, bool)  # text never becomes a control token here
        self.unusable = dict.fromkeys(pads, "padding") | {self.model.unk_id(): "unknown"}

    def id_of(self, token: str) -> int | None:
        """The id of a control token by its name, None if there is none."""
        return self.control.get(token)

    def encode(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """The ids of texts; each has the prefix that the model adds to a text."""
        ids: list[NDArray[np.int32]] = self.model.encode(texts, num_threads=1, return_type="numpy")
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The name of each id."""
        return [self.model.id_to_piece(int(number)) if number < self.size else f"<{number}?>" for number in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self.model.decode([int(number) for number in ids if number < self.size])
        return text


class Fast:
    """A fast tokenizer of Hugging Face, run by its own library."""

    def __init__(self, path: Path) -> None:
        from converters.assets.tokenizer_json import read_vocabulary

        raw = path.read_bytes()
        self.path, self.digest = path, blake3(raw).hexdigest()
        known = _whole(read_vocabulary(raw, str(path)))
        self.known = known
        self.size, self.ids, self.added = known.length, known.ids, known.added
        self.marking = known.tokenizer
        """The tokenizer that finds control tokens in text, for the text of chat templates."""
        self.plain = _whole(read_vocabulary(raw, str(path))).tokenizer
        self.plain.encode_special_tokens = True
        unknown = [known.tokenizer.token_to_id(token) for token in ("<unk>", "[UNK]")]
        pad = self.named.get("pad", "")
        padding = [self.ids[pad]] if pad in self.ids and pad != self.named.get("eos") else []
        self.special = np.zeros(self.size, bool)
        self.special[[known.ids[token] for token, special in known.added.items() if special]] = True
        self.special[[number for number in unknown if number is not None]] = False  # text may contain these
        self.unusable = dict.fromkeys(padding, "padding") | {
            number: "unknown" for number in unknown if number is not None
        }

    @cached_property
    def beside(self) -> Mapping[str, Path]:
        """The files in the folder of the tokenizer's file: path by name."""
        return {path.name: path for path in self.path.parent.iterdir() if path.is_file()}

    @cached_property
    def named(self) -> Mapping[str, str]:
        """The tokens that are named bos, eos and pad in the files beside the tokenizer's file."""
        from converters.assets.token_files import named_tokens

        return named_tokens(self.beside)

    def id_of(self, token: str) -> int | None:
        """The id of a special token by its name, None if there is none."""
        return self.ids.get(token) if self.added.get(token) else None

    def encode(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """The ids of texts, without the tokens that the tokenizer adds around a text."""
        encodings = self.plain.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The name of each id."""
        return [self.plain.id_to_token(int(number)) or f"<{number}?>" for number in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        text: str = self.plain.decode([int(number) for number in ids], skip_special_tokens=False)
        return text


def _whole(known: Any) -> Any:
    """A tokenizer without truncation, padding and dropout, and with exact character offsets."""
    from tokenizers.processors import ByteLevel

    known.tokenizer.no_truncation()
    known.tokenizer.no_padding()
    known.tokenizer.post_processor = ByteLevel(trim_offsets=False)
    if getattr(known.tokenizer.model, "dropout", None):
        known.tokenizer.model.dropout = None
    return known


def names_digest(vocabulary: Vocabulary, size: int, special: Mapping[str, int] = MappingProxyType({})) -> str:
    """BLAKE3 of the names of the tokens below an id; the same after tokens are added or the file is rewritten.

    Args:
        vocabulary: the tokenizer.
        size: the id.
        special: id by name of tokens that are not in the tokenizer's file.
    """
    names = vocabulary.pieces(range(size))
    for name, number in special.items():
        names[number] = name
    return blake3("\n".join(names).encode()).hexdigest()


def made_with(facts: Facts, vocabulary: Vocabulary) -> bool:
    """Whether token files were made with a tokenizer."""
    return facts.tokenizer == vocabulary.digest or facts.names == names_digest(vocabulary, facts.vocabulary)


def control_ids(vocabulary: Vocabulary, given: Mapping[str, int]) -> dict[str, int]:
    """The ids of the roles' control tokens, such as `<|user|>`.

    Args:
        vocabulary: the tokenizer.
        given: ids that the user gave, checked against the tokenizer.

    Returns:
        Ids by role: of the given roles, or if none are given, of all roles that the tokenizer has.

    Raises:
        UsageError: a given id is not the id of the role's token.
    """
    for role, number in given.items():
        actual = vocabulary.id_of(f"<|{role}|>")
        if actual != number:
            have = f"has it as {actual}" if actual is not None else "has no such token"
            raise UsageError(f"<|{role}|> is given as {number}, {vocabulary.path} {have}", "remove the ids")
    ids = {role: vocabulary.id_of(f"<|{role}|>") for role in (given or ROLES)}
    return {role: number for role, number in ids.items() if number is not None}


def eod_id(vocabulary: Vocabulary, token: str | None) -> int:
    """The id of the token that ends a document.

    Args:
        vocabulary: the tokenizer.
        token: name of the token; None takes GPT-NeoX's `EOD`, or the tokenizer's eos if it lacks that.

    Raises:
        UsageError: the tokenizer has no such token, or the token means unknown or padding.
    """
    eos = vocabulary.named.get("eos") if isinstance(vocabulary, Fast) else None
    name = token or (EOD if vocabulary.id_of(EOD) is not None or eos is None else eos)
    number = vocabulary.id_of(name)
    if number is None:
        raise UsageError(
            f"{vocabulary.path} has no control token {name}, which would silently become the unknown token",
            "name the token that ends a document: --eod " + ("TOKEN" if vocabulary.id_of("</s>") is None else "'</s>'"),
        )
    if number in vocabulary.unusable:
        raise UsageError(f"{name} is the {vocabulary.unusable[number]} token of {vocabulary.path}, id {number}")
    return number
