"""The ranks of a Megatron run: tensor, pipeline, expert and expert-tensor parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from formats.errors import RefusedError
from formats.layout.ranks import Ranks
from formats.model.spec import ModelSpec


@dataclass(frozen=True)
class Mesh:
    """How the tensors of a pipeline stage are cut: dense tensors over `tp`, experts over `ep`, each expert over `etp`.

    With `interleave` 0 the rows of an expert's gate are before those of up, else they alternate in blocks of that many
    rows; `shared_interleave` is the same for shared experts.
    """

    tp: int = 1
    ep: int = 1
    etp: int = 1
    interleave: int = 0
    shared_interleave: int = 0

    @property
    def interleaves(self) -> dict[str, int]:
        """Rows of the interleaved blocks, by their names in patterns."""
        return {"interleave": self.interleave, "shared_interleave": self.shared_interleave}

    @property
    def ranks(self) -> int:
        """The number of ranks that a pipeline stage needs."""
        return max(self.tp, self.ep * self.etp)

    @property
    def in_files(self) -> bool:
        """Whether the files of the classic format hold all of a model, each part under a name of its own."""
        return not (self.tp % self.etp or self.ep * self.etp % self.tp)

    def files(self) -> Iterator[tuple[int, int, int]]:
        """(rank, tensor rank, expert rank) of each file of a stage; only the first ranks with all experts write."""
        return ((rank, rank % self.tp, rank // self.etp % self.ep) for rank in range(self.ep * self.etp))

    def of(self, rank: int, experts: int) -> dict[str, Any]:
        """The arguments of `ModelSpec.slots_in` that describe a rank.

        Args:
            rank: the number of the rank in its stage.
            experts: the number of experts of the model.
        """
        number, share = rank // self.etp % self.ep, experts // self.ep
        copy = "ep" if self.tp == self.etp else "copy"
        return {
            "mesh": {"tp": (rank % self.tp, self.tp), copy: (rank // self.tp, -(-self.ranks // self.tp))},
            "experts": list(enumerate(range(number * share, (number + 1) * share))),
            "expert_mesh": {"ep": (number, self.ep), "etp": (rank % self.etp, self.etp)},
        }

    def together(self, experts: int) -> Ranks:
        """The ranks of `files`, for a model with `experts` experts."""
        every = [self.of(rank, experts) for rank, _, _ in self.files()]
        meshes = tuple((tuple(place["mesh"].items()), tuple(place["expert_mesh"].items())) for place in every)
        return Ranks(meshes, tuple(place["experts"][0][1] if place["experts"] else 0 for place in every))


def require_mesh(mesh: Mesh, spec: ModelSpec, *, classic: bool) -> None:
    """Refuse a mesh over which the experts of a model do not divide, or whose classic files would be incomplete.

    Raises:
        RefusedError: the model has no experts, they cannot be cut so, or the sizes do not divide each other; or, of a
            `classic` checkpoint, Megatron's files would not hold all of the model.
    """
    if not spec.experts and (mesh.ep, mesh.etp) != (1, mesh.tp):
        raise RefusedError(f"a {spec.family} has no experts to spread over ep = {mesh.ep} and etp = {mesh.etp}")
    if not spec.experts and mesh.interleave:
        raise RefusedError(f"a {spec.family} has no experts whose gate and up could be interleaved", "leave it out")
    if mesh.etp > 1 and "expert_down_bias" in spec.tensors:
        raise RefusedError(
            f"megatron-core cuts no experts that have biases: etp = {mesh.etp}", "--etp 1, and --ep to spread them"
        )
    if spec.experts and spec.experts % mesh.ep:
        raise RefusedError(f"{spec.experts} experts do not divide over ep = {mesh.ep}")
    if mesh.ranks % mesh.tp or mesh.ranks % (mesh.ep * mesh.etp):
        raise RefusedError(
            f"tp = {mesh.tp} does not go with ep = {mesh.ep} x etp = {mesh.etp}: one must divide the other"
        )
    if classic and not mesh.in_files:
        raise RefusedError(
            f"with tp = {mesh.tp}, ep = {mesh.ep} and etp = {mesh.etp} the files of Megatron's classic format do not "
            "hold all of a model",
            "etp must divide tp, and tp must divide ep * etp; torch_dist holds any",
        )
