"""Convert a raw SentencePiece model to a fast tokenizer of Hugging Face that gives the same ids.

SentencePiece normalizes, prefixes and splits a text in one piece of C++; a tokenizer.json is a chain of small steps.
Facts that determine the chain (sentencepiece 0.2.3, tokenizers 0.23.3; each is measured in tests/tokenizer):

* The prefix is `Prepend`. `Metaspace` adds none to a text that begins with a space. Every text between two control
  tokens gets a prefix, as in training, where each span is encoded by itself.
* A user-defined piece is found inside a text, and the text after it gets no prefix. AddedTokens cannot do that, so it
  is an ordinary piece that a pre-tokenizer splits off.
* Unigram would find control and byte pieces in a text, SentencePiece does not. A text that spells such a piece is split
  in two where no ordinary piece reaches across.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from converters.assets import normalizer
from converters.assets.normalizer import SPACE, literal, replace
from converters.assets.tokenizer_json import FLAGS
from formats.errors import RefusedError, SourceError, UnsupportedError, UsageError, short

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""ModelProto.SentencePiece.Type"""
KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
"""TrainerSpec.ModelType"""
ROLES = ("bos", "eos", "pad", "unk")
MOST_BYTES = 1 << 28
SERVING = (
    "a control token that is spelled out in a text becomes that token: serve with split_special_tokens=True, or escape "
    "messages"
)


class Piece(NamedTuple):
    """A line of the vocabulary; its id is its place."""

    text: str
    type: int
    score: float


@dataclass(frozen=True)
class Converted:
    """A fast tokenizer that is not on disk yet.

    Attributes:
        files: contents by name, relative to the folder of the model.
        kind: bpe or unigram.
        pieces: the pieces of the SentencePiece model. Added tokens follow them.
        size: how many rows an embedding needs.
        special: the ids of bos, eos, pad and unk, as far as there are any.
        control: every special token and its id.
        reference: the SentencePiece model, in which each special token has the type of a control token.
        notes: messages for the user.
    """

    files: Mapping[str, bytes]
    kind: str
    pieces: tuple[str, ...]
    size: int
    special: Mapping[str, int]
    control: Mapping[str, int]
    reference: bytes
    notes: tuple[str, ...]


def convert_tokenizer(
    model: Path,
    *,
    control: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
    add: bool = False,
    add_bos: bool = False,
) -> Converted:
    """Convert a SentencePiece model.

    Args:
        model: the .model file.
        control: tokens that are control tokens, whatever type the model gives them.
        names: the tokens of some of the roles bos, eos, pad and unk, instead of the model's own.
        add: give a named token that is no piece a new id, after the last piece.
        add_bos: begin each text with bos.

    Raises:
        SourceError: the file is not a SentencePiece model.
        UnsupportedError: the model does something that no fast tokenizer can do.
        RefusedError: a named token is no piece, or a piece of ordinary text.
    """
    raw, proto = _read(model)
    pieces = _pieces(proto, model)
    _require_supported(proto, model)
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    special_texts = dict.fromkeys([*control, *(names or {}).values()])
    new = [token for token in special_texts if _is_new(token, ids, pieces, add, model)]
    for i in {ids[token] for token in special_texts if token not in new}:
        if pieces[i].type == USER:
            pieces[i] = pieces[i]._replace(type=CONTROL)
            proto.pieces[i].type = CONTROL
    tokens = {piece.text: i for i, piece in enumerate(pieces) if piece.type in (UNKNOWN, CONTROL)}
    tokens |= {token: len(pieces) + i for i, token in enumerate(new)}
    proto.DiscardUnknownFields()  # among them a self-test with the old types
    special = _special(proto.trainer_spec, pieces, tokens, names or {}, model)
    if add_bos and "bos" not in special:
        raise RefusedError(f"{model} has no token for the beginning of a text", "name one with --bos")
    roles = {role: next(token for token, i in tokens.items() if i == special[role]) for role in special}
    backend = _backend(proto, pieces, tokens, roles["bos"] if add_bos else "")
    files = {
        "tokenizer.json": _dump(backend),
        "tokenizer_config.json": _dump(_config(backend["added_tokens"], roles, add_bos)),
        "tokenizer.model": raw,
    }
    size, texts, kind = len(pieces) + len(new), tuple(piece.text for piece in pieces), backend["model"]["type"].lower()
    notes = [SERVING] if "eos" in special else [SERVING, "no token ends a text: name one with --eos"]
    if new:
        notes.append(f"{len(new)} tokens are new: the embedding needs {size} rows, the model has {len(pieces)} pieces")
    return Converted(files, kind, texts, size, special, tokens, proto.SerializeToString(), tuple(notes))


# --- the model -------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[bytes, Any]:
    """The bytes of a model and its protocol buffer, after SentencePiece has loaded the model.

    Raises:
        SourceError: the file cannot be read, or is no SentencePiece model.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    if not path.is_file():
        raise SourceError(f"{path} is not a file", "name the .model file of SentencePiece")
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        if not 0 < len(raw) <= MOST_BYTES:
            raise ValueError("it is too large" if raw else "it is empty")
        proto.ParseFromString(raw)
        if not (proto.pieces and proto.HasField("trainer_spec") and proto.HasField("normalizer_spec")):
            raise ValueError("pieces or settings are missing")
        SentencePieceProcessor().LoadFromSerializedProto(raw)
    except (DecodeError, RuntimeError, ValueError) as error:
        raise SourceError(f"{path} is not a SentencePiece model, or cut off: {short(str(error))}") from None
    return raw, proto


def _pieces(proto: Any, path: Path) -> list[Piece]:
    pieces = [Piece(piece.piece, piece.type, piece.score) for piece in proto.pieces]
    for i, piece in enumerate(pieces):
        if not isinstance(piece.text, str) or not math.isfinite(piece.score):
            raise SourceError(f"{path} is damaged: piece {i} is {short(piece.text)} with the score {piece.score}")
    if [piece.type for piece in pieces].count(UNKNOWN) != 1:
        raise SourceError(f"{path} is damaged: it needs one piece for what is unknown")
    return pieces


def _require_supported(proto: Any, path: Path) -> None:
    kind = KINDS[proto.trainer_spec.model_type]
    if kind not in ("bpe", "unigram"):
        raise UnsupportedError(f"{path} is a {kind} model, only BPE and Unigram can be converted")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise UnsupportedError(f"{path} marks where words end (treat_whitespace_as_suffix), not where they begin")
    if proto.denormalizer_spec.precompiled_charsmap:
        raise UnsupportedError(f"{path} rewrites what it decodes (denormalizer), a fast tokenizer cannot")


def _is_new(token: str, ids: Mapping[str, int], pieces: Sequence[Piece], add: bool, path: Path) -> bool:
    """Whether a named token gets a new id.

    Raises:
        UsageError: the token is blank, or no valid text.
        RefusedError: the token is no piece and may not be added, or it is a piece of ordinary text.
    """
    if not token.strip() or any("\ud800" <= char <= "\udfff" for char in token):
        raise UsageError(f"{token!a} cannot be a token")
    if token in ids and pieces[ids[token]].type not in (UNKNOWN, CONTROL, USER):
        raise RefusedError(f"{short(token)} is ordinary text in {path}, and cannot be a control token")
    if token not in ids and not add:
        hint = "name one of its pieces, or give it a new id with --add: the embedding must have a row for it"
        raise RefusedError(f"{short(token)} is no piece of {path}, which would call it unknown", hint)
    return token not in ids


def _special(
    trainer: Any, pieces: Sequence[Piece], tokens: Mapping[str, int], names: Mapping[str, str], path: Path
) -> dict[str, int]:
    """The ids of bos, eos, pad and unk: of the named tokens, else of the model's own."""
    unknown = next(piece.text for piece in pieces if piece.type == UNKNOWN)
    own = {"bos": trainer.bos_piece, "eos": trainer.eos_piece, "pad": trainer.pad_piece, "unk": unknown}
    texts = own | dict(names)
    special = {role: tokens[texts[role]] for role in ROLES if texts[role] in tokens}
    if texts["unk"] != unknown:
        raise RefusedError(f"{path} calls what it does not know {short(unknown)}, not {short(texts['unk'])}")
    for kind, other in (("bos", "unk"), ("eos", "unk"), ("eos", "pad")):
        if kind in special and special[kind] == special.get(other):
            raise RefusedError(f"{kind} and {other} of {path} would be one token, {short(texts[kind])}")
    return special


# --- the files -------------------------------------------------------------------------------------------------------


def _backend(proto: Any, pieces: Sequence[Piece], tokens: Mapping[str, int], first: str) -> dict[str, Any]:
    """The content of tokenizer.json; `first` is put before each text."""
    spec, trainer = proto.normalizer_spec, proto.trainer_spec
    unknown = next(i for i, piece in enumerate(pieces) if piece.type == UNKNOWN)
    user = [piece.text for piece in pieces if piece.type == USER]
    model: dict[str, Any] = {"byte_fallback": trainer.byte_fallback}
    if KINDS[trainer.model_type] == "bpe":
        long = sorted((text for text in user if len(text) > 1), key=len, reverse=True)
        vocabulary = {piece.text: i for i, piece in enumerate(pieces)}
        model |= {"type": "BPE", "unk_token": pieces[unknown].text, "fuse_unk": True, "ignore_merges": bool(long)}
        model |= {"vocab": vocabulary, "merges": _merges(pieces)}
        cut = [_split("|".join(map(literal, long)), "Isolated"), *_spelled(pieces)] if long else []
    else:
        scored = [(piece.text, score) for piece, score in zip(pieces, _scores(pieces), strict=True)]
        model |= {"type": "Unigram", "unk_id": unknown, "vocab": scored}
        cut = _spelled(pieces)
    decoders = [replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces:
        most = 0xFFFF if spec.remove_extra_whitespaces else 1
        decoders.append({"type": "Strip", "content": " ", "start": most, "stop": 0})
    text = {"Sequence": {"id": "A", "type_id": 0}}
    begin = {"SpecialToken": {"id": first, "type_id": 0}}
    pair = [begin, text, {"SpecialToken": {"id": first, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    special_ids = {first: {"id": first, "ids": [tokens.get(first)], "tokens": [first]}}
    template = {"type": "TemplateProcessing", "single": [begin, text], "pair": pair, "special_tokens": special_ids}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token} | FLAGS for i, token in sorted((tokens[t], t) for t in tokens)],
        "normalizer": {"type": "Sequence", "normalizers": normalizer.steps(proto, user)},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut} if cut else None,
        "post_processor": template if first else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _config(added: Sequence[Mapping[str, Any]], roles: Mapping[str, str], add_bos: bool) -> dict[str, Any]:
    """The content of tokenizer_config.json, for transformers 4 and 5."""
    decoder = {str(token["id"]): {key: token[key] for key in token if key != "id"} for token in added}
    others = [token["content"] for token in added if token["content"] not in roles.values()]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": token for role, token in roles.items()},
        "additional_special_tokens": others,
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": decoder,
    }


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """The merges of a BPE model, the best first."""
    ids = {piece.text: i for i, piece in enumerate(pieces) if piece.type in (NORMAL, UNUSED)}
    merges = []
    for text, i in ids.items():
        for left, right in ((text[:k], text[k:]) for k in range(1, len(text))):
            if left in ids and right in ids:
                merges.append((-pieces[i].score, ids[left], ids[right], left, right))
                if pieces[i].type == UNUSED:
                    raise UnsupportedError(f"the piece {short(text)} is unused, no fast tokenizer can leave it alone")
    return [(left, right) for *_, left, right in sorted(merges)]


def _scores(pieces: Sequence[Piece]) -> list[float]:
    """The scores of a Unigram model. That of a user-defined piece is as in unigram_model.cc, `EncodeOptimized`."""
    normal = [piece.score for piece in pieces if piece.type == NORMAL] or [0.0]
    low, high = min(normal), max(normal)
    of_user = {piece.text: len(piece.text.encode()) * high - 0.1 for piece in pieces if piece.type == USER}
    return [piece.score if piece.type == NORMAL else of_user.get(piece.text, low) for piece in pieces]


def _spelled(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """A step that splits text that spells a control, byte or unused piece, where no ordinary piece reaches across."""
    ordinary = {piece.text for piece in pieces if piece.type in (NORMAL, USER)}
    joined = {text[k : k + 2] for text in ordinary for k in range(len(text) - 1)}
    cuts = defaultdict(set)
    for text, kind, _ in pieces:
        if kind in (NORMAL, USER):
            continue
        free = [k for k in range(1, len(text)) if text[k - 1 : k + 1] not in joined]
        if kind == UNUSED and not free:
            raise UnsupportedError(f"the piece {short(text)} is unused, no fast tokenizer can leave it alone")
        known = [k for k in free if {text[k - 1], text[k]} & ordinary]  # two unknown characters would be one unknown
        if len(text) > 1:
            place = (known or free or [1])[0]
            cuts[text[:place]].add(text[place:])
    cuts_spelled = sorted(
        f"{literal(beginning)}(?={'|'.join(sorted(map(literal, rest)))})" for beginning, rest in cuts.items()
    )
    return [_split("|".join(cuts_spelled), "MergedWithPrevious")] if cuts_spelled else []


def _split(pattern: str, behavior: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=None if "model" in value else 2) + "\n").encode()
