"""Ranks whose files hold the same tensors, each its own part of them: what they have in common is kept once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

Mesh = tuple[tuple[str, tuple[int, int]], ...]
"""Mesh axis, the rank on it, and its size."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """Some ranks. What follows from them alone is worked out once for all tensors that are cut over the same object.

    Attributes:
        meshes: of each rank, that of dense tensors and that of tensors that are split over experts.
        experts: the first expert of each rank.
    """

    meshes: tuple[tuple[Mesh, Mesh], ...]
    experts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.meshes)


@dataclass(frozen=True, eq=False)
class Files:
    """The files of some ranks: the place and the path of each, in their order."""

    ranks: Ranks
    places: tuple[str, ...]
    paths: tuple[Path, ...]
