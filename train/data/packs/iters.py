"""How many steps the packs of a folder are enough for, counted from their indexes.

Facts: tilde-nlp/llm-gpt-neox at 374a5c6, misc/iters_per_datapack.sh, which adds up the bytes of every `.bin`, four for
each token, and prints what awk does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from formats.errors import SourceError
from train.data.indexed import bin_path, open_indexed

COPY = "eod_"
"""What `append-eod` puts before the name of what it makes."""


@dataclass(frozen=True)
class Count:
    """The tokens of a folder.

    Attributes:
        folder: the folder, as it was named.
        tokens: of all `.bin` that are no copies.
        copies: tokens of those that `append-eod` made of one that is counted, by prefix.
    """

    folder: Path
    tokens: int
    copies: tuple[tuple[Path, int], ...]


def count(root: Path) -> list[Count]:
    """The tokens of each folder of a folder, or of that folder if it is a pack.

    Raises:
        SourceError: there is no such folder, or an index is missing or tells of another `.bin`.
    """
    if not root.is_dir():
        raise SourceError(f"{root} is no folder")
    if any(root.glob("*.bin")):
        return [_count(root)]
    found = [_count(path) for path in sorted(root.iterdir()) if path.is_dir()]
    if not found:
        raise SourceError(f"{root} holds neither packs nor folders of packs")
    return found


def _count(folder: Path) -> Count:
    held = sorted(path.with_name(path.name[:-4]) for path in folder.rglob("*.bin"))
    unfinished = next((path for path in held if path.parent.name.endswith(".partial")), None)
    if unfinished is not None:
        raise SourceError(f"{unfinished.parent} is not finished", "run again what was writing it")
    tokens = {prefix: _tokens(prefix) for prefix in held}
    copies = [prefix for prefix in held if _original(prefix) in tokens]
    return Count(
        folder,
        sum(number for prefix, number in tokens.items() if prefix not in copies),
        tuple((prefix, tokens[prefix]) for prefix in copies),
    )


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
