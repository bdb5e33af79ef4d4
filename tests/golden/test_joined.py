"""What DeepSpeed's own `merge_tp_slices` joins, in each way that a training may record, is cut into the parts again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from formats.deepspeed import cut_again
from formats.deepspeed.joined import INFO
from formats.errors import SourceError, UnsupportedError
from formats.torch_files.archive import TorchFile

NAME, RANKS, STATES = "2.mlp.weight", 2, ("fp32", "exp_avg", "exp_avg_sq")
PATTERN = r"\d+.mlp.weight"
SECTIONS = "parameter_with_sub_params"


def runs(*shape: Any, **more: Any) -> dict[str, Any]:
    return {SECTIONS: [{"patterns": [PATTERN], "shape": shape, "partition_dim": 0}], **more}


INFOS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "nothing recorded": ({}, (6, 4)),
    "no tree": ({"universal_checkpoint_version": 0.2}, (6, 4)),
    "replicated": ({"tp_replicated_parameter_patterns": [PATTERN]}, (4,)),
    "averaged": ({"parameter_to_average_patterns": [PATTERN]}, (4,)),
    "columns": ({"parameter_with_row_parallelism_patterns": [r"\d+.other", PATTERN]}, (6, 4)),
    "gate and up": ({"parameter_with_2_sub_params_cat_dim_0": [PATTERN]}, (6, 4)),
    "so many sections": (runs(3, -1), (6, 4)),
    "sections of sizes": (runs((8, 2, 2), 4, universal_checkpoint_version=0.3), (6, 4)),
    "sections of widths": (
        runs((8, 2, 2), 4, universal_checkpoint_version=0.4,
             sub_param_shard_widths={PATTERN: [[4, 4], [1, 1], [1, 1]]}), (6, 4),
    ),
    "a vocabulary": ({"vocabulary_parameter_patterns": [PATTERN], "original_vocab_size": 11}, (6, 4)),
}  # fmt: skip
"""What is recorded, and the shape of the part of a rank."""


@pytest.fixture
def joined(tmp_path):
    """`joined(info, shape)`: the parts of the ranks by state, after the script has joined them into a tag."""

    def get(info: dict[str, Any], shape: tuple[int, ...]) -> dict[str, list[Any]]:
        import torch
        from deepspeed.checkpoint.ds_to_universal import dump_param_fragment, merge_tp_slices

        parts = {state: [torch.randn(shape) for _ in range(RANKS)] for state in STATES}
        if "tp_replicated_parameter_patterns" in info:
            parts = {state: [first, first] for state, (first, _) in parts.items()}
        for state, of_ranks in parts.items():
            for rank, part in enumerate(of_ranks):
                dump_param_fragment(tmp_path / "slices", rank, 0, state, part.flatten(), NAME, 0, part.numel())
        (tmp_path / "tag/zero" / NAME).mkdir(parents=True)
        merge_tp_slices(info, tmp_path / "tag/zero", tmp_path / "slices", RANKS, (NAME, [shape] * RANKS))
        return parts

    return get


def cut(tag: Path, info: dict[str, Any] | None, shape: tuple[int, ...], state: str) -> list[Any]:
    """The parts of each rank that are read, as tensors."""
    import torch

    value = {"param_shapes": [{NAME: shape}], **({INFO: info} if info else {})}
    models = {rank: TorchFile(tag / f"mp_rank_{rank:02d}_model_states.pt", value, {}) for rank in range(RANKS)}
    (parameter,) = cut_again.parts(tag, models, state, RANKS, lambda name: name).values()
    tensors = []
    for part in parameter.parts:
        whole = torch.empty(part.shape)
        for piece in part.copies[0]:
            fragment = piece.fragment
            storage = torch.frombuffer(
                bytearray(fragment.path.read_bytes()[fragment.offset :][: 4 * 10**4]), dtype=torch.uint8
            )
            count = 1 + sum((size - 1) * stride for size, stride in zip(fragment.shape, fragment.strides, strict=True))
            values = storage[: 4 * count].view(torch.float32).as_strided(fragment.shape, fragment.strides)
            whole[tuple(slice(*span) for span in piece.part.ranges)] = values
        tensors.append(whole)
    return tensors


@pytest.mark.parametrize("kind", INFOS)
def test_it_is_cut_as_the_ranks_had_it(joined, tmp_path, kind):
    import torch

    info, shape = INFOS[kind]
    parts = joined(info, shape)
    for state in STATES:
        read = cut(tmp_path / "tag", info, shape, state)
        wanted = {
            "replicated": parts[state][:1],
            "averaged": [sum(parts[state]) / RANKS],
            "a vocabulary": [torch.cat(parts[state])[:11]],
        }.get(kind, parts[state])
        assert len(read) == len(wanted)
        for one, other in zip(read, wanted, strict=True):
            assert one.equal(other), state


@pytest.mark.parametrize("kind", INFOS)
@pytest.mark.parametrize("other", INFOS)
def test_another_record_is_refused(joined, tmp_path, kind, other):
    """But for one that joins the same way."""
    alike = ({"nothing recorded", "no tree"}, {"replicated", "averaged"}, {"sections of sizes", "sections of widths"})
    if kind == other or any({kind, other} <= kinds for kinds in alike):
        return
    info, shape = INFOS[kind]
    joined(info, shape)
    with pytest.raises((SourceError, UnsupportedError), match=r"after mp_rank_00|says|sub_params|sections"):
        cut(tmp_path / "tag", INFOS[other][0], shape, "fp32")


@pytest.mark.parametrize(
    "info",
    [
        {"tp_replicated_parameter_patterns": [r"(\d+)*x"]},
        {"tp_replicated_parameter_patterns": [r"\d+\d+\d+x"]},
        {"tp_replicated_parameter_patterns": 3},
        {"affine_map": {"version": 1, "params": {}}},
        {SECTIONS: "x"},
        runs(0, -1),
        runs((8, 2, 2), 4, universal_checkpoint_version=0.4),
        runs((8, 4), 4, universal_checkpoint_version=0.4, sub_param_shard_widths={PATTERN: [[4, 4], [3, 1]]}),
        runs((8, 4), 4, universal_checkpoint_version=0.4, sub_param_shard_widths=[1]),
        "x",
    ],
)
def test_a_record_that_is_not_known(joined, tmp_path, info):
    joined({}, (6, 4))
    with pytest.raises(UnsupportedError, match=INFO + "|sub_param_shape"):
        cut(tmp_path / "tag", info, (6, 4), "fp32")
