"""How many steps the packs of a folder are enough for, counted from their indexes.

Facts: tilde-nlp/llm-gpt-neox at 374a5c6, misc/iters_per_datapack.sh, which adds up the bytes of every `.bin`, four for
each token, and prints what awk does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from formats.errors import SourceError
from train.data.tokens.indexed import bin_path, open_indexed

COPY = "eod_"
"""What `append-eod` puts before the name of what it makes."""


@dataclass(frozen=True)
class Count:
    """The tokens of a folder.

    Attributes:
        folder: the folder, as it was named.
        tokens: of all `.bin` that are no copies.
        copies: tokens of those that `append-eod` or `merge` made of what is counted, by prefix.
    """

    folder: Path
    tokens: int
    copies: tuple[tuple[Path, int], ...]


def count(root: Path) -> list[Count]:
    """The tokens of each folder of a folder, or of that folder if it is a pack.

    What was merged of a pack that is counted is a copy of it. `states` is no pack.

    Raises:
        SourceError: there is no such folder, or an index is missing or tells of another `.bin`.
    """
    if not root.is_dir():
        raise SourceError(f"{root} is no folder")
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
    held = {folder: _finished(folder.rglob("*.bin")) for folder in folders}
    direct = _finished(root.glob("*.bin"))
    tokens = {prefix: _tokens(prefix) for prefix in (*direct, *(one for found in held.values() for one in found))}
    merged = _merged(tokens)
    if any(prefix not in merged and _original(prefix) not in merged for prefix in direct):
        held = {root: sorted(tokens)}
    elif direct:
        held[root] = direct
    own: dict[Path, int] = {}
    copies: dict[Path, list[tuple[Path, int]]] = {}
    for folder, found in held.items():
        mine = [one for one in found if _original(one) not in tokens and one not in merged]
        if mine or not (found or folder.name == "states"):
            own[folder], copies[folder] = sum(tokens[one] for one in mine), []
    for folder, found in held.items():
        for one in found:
            source = merged.get(one)
            if source is not None or _original(one) in tokens:
                place = next((path for path in own if source is not None and source.is_relative_to(path)), folder)
                copies.setdefault(place if place in own else next(iter(own)), []).append((one, tokens[one]))
    if not own:
        raise SourceError(f"{root} holds neither packs nor folders of packs")
    return [Count(folder, number, tuple(copies[folder])) for folder, number in own.items()]


def _finished(paths: Iterable[Path]) -> list[Path]:
    """The prefixes of token files, none of which is still being written."""
    held = sorted(path.with_name(path.name[:-4]) for path in paths)
    unfinished = next((path for path in held if path.parent.name.endswith(".partial")), None)
    if unfinished is not None:
        raise SourceError(f"{unfinished.parent} is not finished", "run again what was writing it")
    return held


def _merged(tokens: Mapping[Path, int]) -> dict[Path, Path]:
    """Prefixes that a merge made of a folder that is counted too, and that folder.

    It has the name of the folder, and beside it a log of the merge, or as many tokens as the folder.
    """
    sums: dict[str, dict[Path, int]] = {}
    for prefix, number in tokens.items():
        if _original(prefix) not in tokens:
            places = sums.setdefault(prefix.parent.name, {})
            places[prefix.parent] = places.get(prefix.parent, 0) + number
    found = {}
    for prefix, number in tokens.items():
        for folder, total in sums.get(prefix.name, {}).items():
            told = prefix.with_name(prefix.name + ".merge.log").is_file()
            if folder != prefix.parent and (told or total == number):
                found[prefix] = folder
                break
    return found


def _original(prefix: Path) -> Path | None:
    name = prefix.name.removeprefix(COPY)
    return prefix.with_name(name) if name not in ("", prefix.name) else None


def _tokens(prefix: Path) -> int:
    found = open_indexed(bin_path(prefix), tokens=False)
    held, wanted = bin_path(prefix).stat().st_size, found.total * found.dtype.itemsize
    if held != wanted:
        raise SourceError(f"{bin_path(prefix)} has {held:,} bytes, its index tells of {wanted:,}")
    return found.total


def as_awk(number: float) -> str:
    """A number as awk prints it: whole ones whole, others with six digits."""
    return str(int(number)) if number == int(number) else f"{number:.6g}"
