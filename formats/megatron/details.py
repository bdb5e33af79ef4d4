"""The details of a Megatron checkpoint that other formats do not have: args, iteration, names, dialect."""

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
    """The settings that a Megatron run was saved with, and that a resharded checkpoint is written with again.

    Attributes:
        args: the attributes of the checkpoint's `args`.
        iteration: the iteration in the files; 0 in a release.
        vocab_multiple: the vocabulary is padded to a multiple of this number times the tensor parallel size.
        norm: the naming of the norms, `te` (Transformer Engine) or `local`.
        experts: the naming of the experts, `te` or `local`; None if it is that of the norms.
        interleaves: rows of the interleaved blocks of gate and up, by their names in patterns.
        dialect: the program that wrote the files: a key of `args.Options.dialect`.
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
    """The details of a checkpoint.

    Args:
        file: the file that holds the iteration.
        args: the attributes of the checkpoint's `args`.
        dialect: the program that wrote the files.
        folder: the folder of the iteration.
        padded: rows of the embedding.
        norm: the naming of the norms.
        experts: the naming of the experts.
        interleaves: rows of the interleaved blocks of gate and up.
    """
    kind, fresh = ("", FRESH) if dialect != megatron_llm.NAME else (dialect, megatron_llm.FRESH)
    iteration = iteration_of(file)
    return Megatron(
        kind=kind,
        fresh=fresh,
        shown={"iteration": iteration, "folder": folder.name, "padded_vocab": padded, "dialect": dialect},
        residue={"args": fields.run_arguments(args)},
        arguments=tuple(args),
        args=args,
        iteration=iteration,
        vocab_multiple=vocab_multiple(args, file.path),
        norm=norm,
        experts=experts,
        interleaves=interleaves,
        dialect=dialect,
    )
