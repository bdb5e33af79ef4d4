"""Files that torch.save wrote under the name of one rank, and that have the name of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from formats.errors import SourceError
from formats.torch_files.archive import read_torch

MIXED = [
    ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"),
    ("model_world_size_2_rank_0.pt", "model_world_size_4_rank_0.pt"),
    ("optim_world_size_2_rank_1.pt", "optim_world_size_2_rank_0.pt"),
    ("pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin"),
    ("pytorch_model_fsdp_rank3.bin", "pytorch_model_fsdp_rank12.bin"),
    ("pytorch_model_rank0.bin", "pytorch_model_rank10.bin"),
    ("optimizer_0_rank0.bin", "optimizer_0_rank1.bin"),
    ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
    ("layer_02-model_00-model_states.pt", "layer_12-model_00-model_states.pt"),
    ("layer_02-model_00-model_states.pt", "layer_02-model_01-model_states.pt"),
    ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"),
    ("exp_avg.pt", "exp_avg_sq.pt"),
]
HARMLESS = [
    ("pytorch_model_fsdp_0_rank0.bin", "archive"),
    ("model_world_size_2_rank_1.pt", "my_copy_of_rank_0"),
    ("model_world_size_2_rank_1.pt", "pytorch_model_rank1.pt"),
    ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_00optim_states.pt"),
    ("mp_rank_1_model_states.pt", "mp_rank_01_model_states.pt"),
    ("global_step200.pt", "global_step100.pt"),
    ("model_optim_rng.pt", "model_optim_rng.pt"),
    ("pytorch_model-00001-of-00002.bin", "pytorch_model-00001-of-00003.bin"),
    ("consolidated.00.pth", "consolidated.01.pth"),
]


def saved(folder: Path, name: str, then: str) -> Path:
    """A file that torch.save wrote under one name, under another one."""
    torch.save({"a": torch.ones(3)}, folder / then)
    return (folder / then).rename(folder / name)


@pytest.mark.parametrize(("name", "then"), [*MIXED, *((then, name) for name, then in MIXED)])
def test_the_name_of_another_rank_is_refused(tmp_path, name, then):
    path = saved(tmp_path, name, then)
    with pytest.raises(SourceError, match=f"{name} was saved as '{Path(then).stem}': files are mixed up") as raised:
        read_torch(path)
    assert "copy the files of all ranks again" in raised.value.hint


@pytest.mark.parametrize(("name", "then"), HARMLESS)
def test_another_name_of_the_same_rank_is_read(tmp_path, name, then):
    assert read_torch(saved(tmp_path, name, then)).value.keys() == {"a"}


@pytest.mark.parametrize("name", [name for name, _ in MIXED])
def test_a_file_under_its_own_name_is_read(tmp_path, name):
    torch.save({"a": torch.ones(3)}, tmp_path / name)
    assert read_torch(tmp_path / name).name == Path(name).stem
