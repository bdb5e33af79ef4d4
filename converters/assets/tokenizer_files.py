"""The tokenizer of a training without a Hugging Face folder: a SentencePiece model, or a tokenizer.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from converters.assets.token_files import named_tokens
from formats.checkpoint import Checkpoint
from formats.errors import SourceError, VerificationError

NAMES = {"eos": "<|endoftext|>", "pad": "<|pad|>"}
"""GPT-NeoX's tokens that end a document and fill a batch (megatron/tokenizer/tokenizer.py at ea7aefd8)."""
CHECKED = 3000
"""How many texts a converted tokenizer is compared with SentencePiece on."""


class Tokenizer(NamedTuple):
    """A tokenizer in the form that Hugging Face reads.

    Attributes:
        path: the file that it was read from.
        files: contents of the files by name.
        size: how many tokens the tokenizer has.
        special: the ids of bos, eos, pad and unk, as far as there are any.
        notes: messages for the user.
    """

    path: Path
    files: Mapping[str, bytes]
    size: int
    special: Mapping[str, int]
    notes: tuple[str, ...]


def load(path: Path) -> Tokenizer:
    """Read a SentencePiece model, a tokenizer.json, or a folder that holds one.

    Raises:
        SourceError: the path is none of these.
        VerificationError: the fast tokenizer that was made from the model gives other ids.
    """
    if (path / "tokenizer.json").is_file():
        return _fast(path / "tokenizer.json")
    if path.suffix == ".json" and path.is_file():
        return _fast(path)
    if not path.is_file():
        raise SourceError(f"{path} is no tokenizer", "name a .model of SentencePiece, a tokenizer.json, or its folder")
    return _sentencepiece(path)


def named_in_yml(path: Path, tag: str | None, config: Path | None) -> Tokenizer | None:
    """The tokenizer that the yml of a GPT-NeoX checkpoint names, if the yml names one that exists.

    Args:
        path: the folder of the run or the checkpoint.
        tag: as in `Settings`.
        config: as in `Settings`; a Hugging Face folder has its own tokenizer.

    Raises:
        UnsupportedError: the checkpoint is of a program whose checkpoints are not read.
    """
    from formats.deepspeed import folders as deepspeed
    from formats.deepspeed.neox import checkpoint as neox
    from formats.detect import signs

    signs.check(path)
    if not path.is_dir() or not neox.detect(path) or (config and (config / "config.json").is_file()):
        return None
    _, place = deepspeed.locate(path, tag)
    vocab_file = neox.config_of(place, config)[0].get("vocab_file")
    return load(Path(vocab_file)) if isinstance(vocab_file, str) and Path(vocab_file).exists() else None


def attached(source: Checkpoint, tokenizer: Tokenizer, folder: Path) -> Checkpoint:
    """A checkpoint whose small files are a tokenizer, and a config with the tokenizer's special tokens.

    Args:
        source: the checkpoint, opened with the tokenizer's size as its vocabulary.
        tokenizer: the tokenizer.
        folder: the folder that the files are written to, kept until the checkpoint is converted.
    """
    from converters.assets.files import config_text

    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    ids = {f"{role}_token_id": tokenizer.special.get(role) for role in ("bos", "eos", "pad")}
    config = json.loads(config_text(source, None)) | ids
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    known_ids = {name: number for name, number in ids.items() if number is not None}
    (folder / "generation_config.json").write_text(json.dumps(known_ids, indent=2) + "\n")
    return replace(source, assets=folder, config=config, notes=(*source.notes, *tokenizer.notes))


def _sentencepiece(path: Path) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor

    from converters.assets.chat_template import MARKER
    from converters.assets.sentencepiece import convert_tokenizer
    from converters.assets.tokenizer_proof import check

    converted = convert_tokenizer(path)
    tokens = [piece for piece in converted.pieces if MARKER.fullmatch(piece)]
    model = SentencePieceProcessor()
    model.LoadFromSerializedProto(converted.reference)
    control = [token for token in tokens if token in converted.control or not model.is_unused(model.piece_to_id(token))]
    names = {role: token for role, token in NAMES.items() if token in tokens}
    converted = convert_tokenizer(path, control=control, names=names)
    wrong = [check_result for check_result in check(converted, CHECKED) if check_result.different]
    if wrong:
        raise VerificationError(
            f"{wrong[0].different} of {wrong[0].compared} {wrong[0].what} get other ids from the tokenizer made "
            f"of {path}",
            f"look with `convert tokenizer {path} FOLDER --allow-mismatches 0.01`, then --tokenizer FOLDER",
        )
    return Tokenizer(path, converted.files, converted.size, converted.special, converted.notes)


def _fast(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the library raises nothing narrower
        raise SourceError(f"{path} is no tokenizer.json: {error}") from None
    near = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "vocab.json")
    files = {name: (path.parent / name).read_bytes() for name in near if (path.parent / name).is_file()}
    names = NAMES | named_tokens({name: path.parent / name for name in files})
    ids = {role: backend.token_to_id(token) for role, token in names.items()}
    special = {role: number for role, number in ids.items() if number is not None}
    if "tokenizer_config.json" not in files:
        named = {f"{role}_token": names[role] for role in special}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        files["tokenizer_config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    files["tokenizer.json"] = path.read_bytes()
    return Tokenizer(path, files, backend.get_vocab_size(with_added_tokens=True), special, ())
