"""Ranks whose files have the same tensors, each its own part of them: the data that ranks share is stored once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

Mesh = tuple[tuple[str, tuple[int, int]], ...]
"""(rank, number of ranks) of each mesh axis, with its name."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """Some ranks. Results that depend only on a `Ranks` object are computed once for all tensors split over its ranks.

    Attributes:
        meshes: for each rank, the mesh of dense tensors and the mesh of tensors that are split over experts.
        experts: number of the first expert of each rank.
    """

    meshes: tuple[tuple[Mesh, Mesh], ...]
    experts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.meshes)


@dataclass(frozen=True, eq=False)
class Files:
    """The files of some ranks: the place and the path of each file, in the order of the ranks."""

    ranks: Ranks
    places: tuple[str, ...]
    paths: tuple[Path, ...]
