"""What a checkpoint of Megatron says that no other format has a word for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.checkpoint import Details
from formats.megatron import megatron_llm
from formats.megatron.args import fields
from formats.megatron.shards import iteration_of, vocab_multiple
from formats.torch_files.archive import TorchFile

FRESH = "--no-load-optim --no-load-rng"
"""The flags with which megatron-core begins with fresh optimizer states."""


@dataclass(frozen=True, kw_only=True)
class Megatron(Details):
    """What a run of Megatron was saved with, and is written with again.

    Attributes:
        args: the attributes of its `args`.
        iteration: that of the files; 0 in a release.
        vocab_multiple: what the vocabulary was padded to a multiple of, for each tensor rank.
        norm: names of the norms, `te` or `local`.
        experts: names of the experts, likewise; None where those of the norms tell.
        interleaves: rows of interleaved blocks of gate and up, as patterns name them.
        dialect: what wrote the files: a key of `args.Options.dialect`.
    """

    args: Mapping[str, Any]
    iteration: int
    vocab_multiple: int
    norm: str
    experts: str | None
    interleaves: Mapping[str, int]
    dialect: str


def details(
    file: TorchFile, args: Mapping[str, Any], dialect: str, folder: Path, padded: int, norm: str, experts: str | None,
    interleaves: Mapping[str, int],
) -> Megatron:  # fmt: skip
    """The details of a checkpoint with `padded` rows of embeddings in a folder, of which a file says the iteration."""
    kind, fresh = ("", FRESH) if dialect != megatron_llm.NAME else (dialect, megatron_llm.FRESH)
    iteration = iteration_of(file)
    return Megatron(
        kind=kind,
        fresh=fresh,
        shown={"iteration": iteration, "folder": folder.name, "padded_vocab": padded, "dialect": dialect},
        residue={"args": fields.residue(args)},
        arguments=tuple(args),
        args=args,
        iteration=iteration,
        vocab_multiple=vocab_multiple(args, file.path),
        norm=norm,
        experts=experts,
        interleaves=interleaves,
        dialect=dialect,
    )
