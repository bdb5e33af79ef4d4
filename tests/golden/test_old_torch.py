"""Checkpoints that torch 2.1.2, 2.4.1 and 2.10.0 wrote: other classes in the pickles, no version, another mesh layout.

`expected.safetensors` is the state dict from which they were saved (old_torch/README.md).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.dcp_tools import refused, with_config
from tests.golden.test_torchtitan import same

HERE = Path(__file__).parent / "old_torch"
LLAMA = sorted(path for path in (HERE / "llama").iterdir() if path.is_dir())
ODD = sorted(path for path in (HERE / "odd").iterdir() if path.is_dir())


def test_there_are_folders():
    assert [path.name for path in LLAMA] == [
        "dcp_fsdp1_2.1.2", "dcp_fsdp1mesh_2.4.1", "dcp_fsdp2_2.4.1", "local_flat_2.1.2", "local_orig_2.4.1",
        "ranks_fsdp1_2.1.2", "ranks_fsdp1mesh_2.4.1", "ranks_fsdp2_2.10.0", "ranks_fsdp2_2.4.1", "ranks_hsdp_2.10.0",
    ]  # fmt: skip
    assert [path.name for path in ODD] == ["noflat_2.1.2", "noflat_2.4.1", "tree_2.1.2"]


@pytest.mark.parametrize("folder", LLAMA, ids=lambda path: path.name)
def test_a_model_of_a_known_family(convert, tmp_path, folder):
    ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", HERE / "llama")
    assert ran.code == 0, ran.err
    same(tmp_path / "out/model.safetensors", HERE / "llama/expected.safetensors")


@pytest.mark.parametrize("folder", LLAMA + ODD, ids=lambda path: path.name)
def test_verbatim(convert, tmp_path, folder):
    ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", folder.parent, "--verbatim")
    assert ran.code == 0, ran.err
    same(tmp_path / "out/model.safetensors", folder.parent / "expected.safetensors")


@pytest.mark.parametrize("folder", [path for path in LLAMA if "dcp" not in path.name], ids=lambda path: path.name)
def test_the_dump_of_the_last_rank_is_missed(convert, tmp_path, folder):
    """Nobody is told how many there are: it shows in what the pickles of the other ranks say of the whole."""
    some = tmp_path / "some"
    some.mkdir()
    for path in sorted(folder.iterdir())[:-1]:
        (some / path.name).write_bytes(path.read_bytes())
    refused(convert("fsdp2hf", some, tmp_path / "out", "--config", HERE / "llama"), 3)
    assert not (tmp_path / "out").exists()


def test_flat_parameters_need_a_table(convert, tmp_path):
    """They have no shapes of their own, so without a table there is no model."""
    config = with_config(tmp_path / "config", HERE / "llama", model_type="odd")
    ran = convert("fsdp2hf", HERE / "llama/local_flat_2.1.2", tmp_path / "out", "--config", config, "--verbatim")
    refused(ran, 4, "LOCAL_STATE_DICT records no shapes", "SHARDED_STATE_DICT")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [-1, 1])
def test_flat_parameters_of_another_model_are_refused(convert, tmp_path, more):
    """Each tensor would be cut out of the flat parameter, at the places of the other model's."""
    sizes = json.loads((HERE / "llama/config.json").read_text())["intermediate_size"] + more
    config = with_config(tmp_path / "config", HERE / "llama", intermediate_size=sizes)
    ran = convert("fsdp2hf", HERE / "llama/local_flat_2.1.2", tmp_path / "out", "--config", config)
    refused(ran, 3, "_flat_param has", "elements, the tensors of that module have")
    assert not (tmp_path / "out").exists()
