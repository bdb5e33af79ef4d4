"""Counts the tokens in the packs of a folder from their indexes, for the number of training steps.

Facts: tilde-nlp/llm-gpt-neox at 374a5c6, misc/iters_per_datapack.sh, which adds up the bytes of every `.bin`, four for
each token, and prints what awk does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from formats.errors import SourceError
from train.data.tokens.documents import ROLE, other_bin
from train.data.tokens.indexed import bin_path, open_indexed

COPY = "eod_"
"""Prefix of the names of files that `append-eod` writes."""


@dataclass(frozen=True)
class Count:
    """The tokens of a folder.

    Attributes:
        folder: the folder, as it was given.
        tokens: number of tokens of all `.bin` that are not copies.
        copies: prefix and number of tokens of each copy, which `append-eod` or `merge` made from counted files.
    """

    folder: Path
    tokens: int
    copies: tuple[tuple[Path, int], ...]


def count(root: Path) -> list[Count]:
    """The tokens of each pack in a folder, or of that folder if it is a pack itself.

    The merge of a counted pack is a copy of that pack. The folder `states` is not a pack.

    Raises:
        SourceError: the folder does not exist, or an index is missing or does not fit its `.bin`.
    """
    if not root.is_dir():
        raise SourceError(f"{root} is not a folder")
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
    prefixes_of = {folder: _finished(folder.rglob("*.bin")) for folder in folders}
    direct = _finished(root.glob("*.bin"))
    tokens = {prefix: _tokens(prefix) for prefix in chain(direct, *prefixes_of.values())}
    merged = _merged(tokens)
    if any(prefix not in merged and _original(prefix) not in merged for prefix in direct):
        prefixes_of = {root: sorted(tokens)}
    elif direct:
        prefixes_of[root] = direct
    own: dict[Path, int] = {}
    copies: dict[Path, list[tuple[Path, int]]] = {}
    for folder, prefixes in prefixes_of.items():
        mine = [prefix for prefix in prefixes if _original(prefix) not in tokens and prefix not in merged]
        if mine or not (prefixes or folder.name == "states"):
            own[folder], copies[folder] = sum(tokens[member] for member in mine), []
    for folder, prefixes in prefixes_of.items():
        for member in prefixes:
            source = merged.get(member)
            if source is not None or _original(member) in tokens:
                place = next((path for path in own if source is not None and source.is_relative_to(path)), folder)
                copies.setdefault(place if place in own else next(iter(own)), []).append((member, tokens[member]))
    if not own:
        raise SourceError(f"{root} has neither packs nor folders of packs")
    return [Count(folder, number, tuple(copies[folder])) for folder, number in own.items()]


def _finished(paths: Iterable[Path]) -> list[Path]:
    """The prefixes of token files, sorted, without those that have the roles of the tokens of others.

    Raises:
        SourceError: one of them is still being written.
    """
    prefixes = sorted(path.with_name(path.name[:-4]) for path in paths)
    unfinished = next((path for path in prefixes if path.parent.name.endswith(".partial")), None)
    if unfinished is not None:
        raise SourceError(f"{unfinished.parent} is not finished", "run the command that writes it again")
    return [prefix for prefix in prefixes if not (prefix.name.endswith(ROLE) and other_bin(prefix))]


def _merged(tokens: Mapping[Path, int]) -> dict[Path, Path]:
    """Each prefix that a merge made from a folder that is also counted, and that folder.

    A merge has the name of its folder, and a merge log beside it, or as many tokens as the folder.
    """
    sums: dict[str, dict[Path, int]] = {}
    for prefix, number in tokens.items():
        if _original(prefix) not in tokens:
            places = sums.setdefault(prefix.parent.name, {})
            places[prefix.parent] = places.get(prefix.parent, 0) + number
    folder_of = {}
    for prefix, number in tokens.items():
        for folder, total in sums.get(prefix.name, {}).items():
            has_log = prefix.with_name(prefix.name + ".merge.log").is_file()
            if folder != prefix.parent and (has_log or total == number):
                folder_of[prefix] = folder
                break
    return folder_of


def _original(prefix: Path) -> Path | None:
    name = prefix.name.removeprefix(COPY)
    return prefix.with_name(name) if name not in ("", prefix.name) else None


def _tokens(prefix: Path) -> int:
    indexed = open_indexed(bin_path(prefix), tokens=False)
    nbytes, expected = bin_path(prefix).stat().st_size, indexed.total * indexed.dtype.itemsize
    if nbytes != expected:
        raise SourceError(f"{bin_path(prefix)} has {nbytes:,} bytes, its index describes {expected:,}")
    return indexed.total


def as_awk(number: float) -> str:
    """A number as awk prints it: integers without a fraction, others with six digits."""
    return str(int(number)) if number == int(number) else f"{number:.6g}"
