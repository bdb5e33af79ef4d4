"""The details of a Megatron checkpoint that other formats do not have: args, iteration, names, dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.checkpoint import Details
from formats.errors import SourceError
from formats.megatron import megatron_llm
from formats.megatron.args import fields
from formats.megatron.folders import iteration_named, name_of
from formats.megatron.shards import iteration_of, vocab_multiple
from formats.torch_files.archive import TorchFile

FRESH = "--no-load-optim --no-load-rng"
"""The flags with which megatron-core begins with fresh optimizer states."""


@dataclass(frozen=True, kw_only=True)
class Megatron(Details):
    """The settings that a Megatron run was saved with, and that a resharded checkpoint is written with again.

    Attributes:
        args: the attributes of the checkpoint's `args`.
        iteration: the iteration in the files, or else that of the folder's name; 0 in a release.
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

    Raises:
        SourceError: the iteration is no number, or not that of the folder's name.
    """
    kind, fresh = ("", FRESH) if dialect != megatron_llm.NAME else (dialect, megatron_llm.FRESH)
    iteration = _iteration(file, folder)
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


def _iteration(file: TorchFile, folder: Path) -> int:
    """The iteration in a file; where the file says none, or 0 as of a release, that of the folder's name, or 0.

    Raises:
        SourceError: the iteration is no number, or not that of the folder's name.
    """
    saved, named = iteration_of(file), iteration_named(folder)
    if file.value.get("iteration", 0) in ("release", 0):
        return named or 0
    if named not in (None, saved):
        raise SourceError(
            f"{file.path} is of iteration {saved}, its folder of {named}: files of different saves",
            f"copy the iteration again; a folder that was only renamed has to be {name_of(saved)}",
        )
    return saved
