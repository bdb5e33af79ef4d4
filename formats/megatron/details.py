"""What a checkpoint of Megatron says that no other format has a word for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.checkpoint import Checkpoint, Details
from formats.megatron.args import fields

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

    def record(self, source: Checkpoint) -> dict[str, Any]:
        """Its part of `inspect`."""
        place = {"iteration": self.iteration, "folder": source.home.name}
        return {**place, "padded_vocab": source.padded_vocab, "dialect": self.dialect}

    def residue(self) -> dict[str, list[str]]:
        """Settings that no table knows."""
        return {"args": fields.residue(self.args)}
