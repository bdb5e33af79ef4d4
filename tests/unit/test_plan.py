"""Plans: what does not cover the model once, on either side, is refused before a byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from converters.plan.plan import make_plan
from converters.plan.request import Request
from converters.plan.targets import plan_megatron
from formats.errors import RefusedError
from formats.layout.placed import OnRank, Placed
from formats.megatron import classic
from formats.megatron.args.options import Options
from formats.megatron.tables import MCORE
from formats.registry import open_checkpoint


def wider(placed: Placed) -> Placed:
    """A physical tensor with a row that no leaf fills."""
    rows, *rest = placed.fragment.shape
    return placed._replace(fragment=placed.fragment._replace(shape=(rows + 1, *rest)))


def spoilt(tensors: Sequence[Placed], key: str, fault: str) -> tuple[Placed, ...]:
    """Some tensors, one of them missing, there twice, or with another content than it should have."""
    mine = [placed for placed in tensors if placed.key.endswith(key)]
    others = [placed for placed in tensors if placed not in mine]
    changed = {
        "absent": [],
        "twice": [*mine, mine[0]],
        "a rank's": [mine[0]._replace(fragment=placed.fragment) for placed in mine],
        "wider": [*map(wider, mine)],
    }
    return (*others, *changed[fault])


@pytest.mark.parametrize(
    ("side", "key", "fault", "message"),
    [
        ("source", "layers.1.mlp.down_proj.weight", "absent", "nothing holds down.1"),
        ("source", "layers.1.mlp.down_proj.weight", "twice", "down.1 in the source has 6144 elements, the layout cov"),
        ("target", "layers.1.mlp.linear_fc2.weight", "absent", "nothing writes down.1"),
        ("target", "layers.1.mlp.linear_fc2.weight", "twice", "down.1 in the target has 6144 elements, the layout cov"),
        ("target", "layers.1.mlp.linear_fc2.weight", "a rank's", "two parts of down.1 in the target overlap"),
        ("target", "layers.1.mlp.linear_fc2.weight", "wider", "48 elements of .*linear_fc2.weight have no source"),
        ("target", "final_layernorm.weight", "absent", "nothing writes final_norm"),
        ("target", "word_embeddings.weight", "wider", None),  # a vocabulary may have padding
    ],
)
def test_a_side_that_does_not_cover_the_model_once_is_refused(model, tmp_path, side, key, fault, message):
    source = open_checkpoint(model("llama"))
    target = plan_megatron(source, Request(tmp_path / "out"), Options(tp=2), None).target
    if side == "source":
        source = replace(source, tensors=spoilt(source.tensors, key, fault))
    else:
        every = [placed for file in target.files for placed in file.tensors]
        target = replace(target, files=(replace(target.files[0], tensors=spoilt(every, key, fault)),))
    if message is None:
        make_plan(source, target)
        return
    with pytest.raises(RefusedError, match=message):
        make_plan(source, target)


@pytest.mark.parametrize("options", [Options(tp=2, pp=2, ep=2), Options(tp=4, ep=4, etp=2), Options(tp=2, ep=4, etp=1)])
def test_ranks_that_are_planned_together_hold_what_each_would_by_itself(model, tmp_path, options):
    source = open_checkpoint(model("mixtral"))
    target = plan_megatron(source, Request(tmp_path / "out"), options, None).target
    pipeline, padded = classic.topology_of(source.spec, options)
    alone = classic.slots_of(source.spec, MCORE, options.mesh, pipeline, padded)
    planned = [(file.path.parent.name, placed) for file in target.files for placed in file.tensors]
    assert all(place == placed.slot.place.file == placed.fragment.path.parent.name for place, placed in planned)
    assert {each.slot._replace(rule=None) for _, each in planned} == {each._replace(rule=None) for each in alone}
    assert len(planned) == len(alone)
    assert sorted(placed.slot.keys for alike in target.tensors for placed in alike.each()) == sorted(
        s.keys for s in alone
    )


@pytest.mark.parametrize("fault", ["a file less", "two ranks that hold the same part"])
def test_a_rank_that_does_not_hold_its_part_is_missed(model, tmp_path, fault):
    source = open_checkpoint(model("mixtral"))
    target = plan_megatron(source, Request(tmp_path / "out"), Options(tp=2, ep=2), None).target
    if fault == "a file less":
        files = target.files[:-1]
    else:
        alike = target.files[0].tensors.tensors
        meshes = alike[0].files.ranks.meshes
        ranks = replace(alike[0].files.ranks, meshes=(meshes[0], *meshes[2:], meshes[0]))
        alike = tuple(tensor._replace(files=replace(tensor.files, ranks=ranks)) for tensor in alike)
        files = tuple(replace(file, tensors=OnRank(alike, rank)) for rank, file in enumerate(target.files))
    with pytest.raises(RefusedError, match=r"in the target.* elements, the layout covers|in the target.* overlap"):
        make_plan(source, replace(target, files=files))
