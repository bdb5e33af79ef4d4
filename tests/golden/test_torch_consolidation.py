"""What torch's own merger of its Hugging Face shards does without a word, and what is done with the same files here.

torch 2.10 to 2.13, torch/distributed/checkpoint/_consolidate_hf_safetensors.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
ROWS = 101


@pytest.fixture
def shards(fsdp, tmp_path) -> Path:
    """Four shards of a model that no table describes."""
    folder = tmp_path / "shards"
    folder.mkdir()
    code, out = fsdp([str(folder), str(ROWS)], 4, Path(__file__).with_name("torch_shards.py"))
    assert code == 0, out
    return folder


@pytest.fixture
def base(tmp_path) -> Path:
    """The model that the training began with: it tells what there has to be."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "plain", "architectures": ["Plain"]}))
    save_file({"w": torch.zeros(ROWS, 8), "scale": torch.tensor(0.0)}, folder / "model.safetensors")
    return folder


def merged(shards: Path, out: Path):
    """The tensors that torch makes of them."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    out.mkdir()
    consolidate_safetensors_files(str(shards), str(out), {"w": 1, "scale": 1})
    return load_file(next(out.glob("*.safetensors")))


def test_a_scalar_becomes_zero_in_torch(shards, base, convert, tmp_path):
    from safetensors.torch import load_file

    assert float(merged(shards, tmp_path / "theirs")["scale"]) == 0.0
    ran = convert("fsdp2hf", shards, tmp_path / "out", "--config", base)
    assert ran.code == 0, ran.err
    ours = load_file(tmp_path / "out/model.safetensors")
    assert float(ours["scale"]) == 3.5
    assert ours["w"].shape == (ROWS, 8)


def test_a_lost_last_shard_shortens_the_model_in_torch(shards, base, convert, tmp_path):
    (shards / "shard-00004-model-00001-of-00001.safetensors").unlink()
    assert merged(shards, tmp_path / "theirs")["w"].shape == (78, 8)
    ran = convert("fsdp2hf", shards, tmp_path / "out", "--config", base)
    assert ran.code == 3, ran.err
    assert not (tmp_path / "out").exists()


def test_a_file_that_every_shard_lacks_is_named(shards, base, convert, tmp_path):
    """Names count the files of a shard; the tensors of a lost one are in no other."""
    for path in shards.glob("shard-*"):
        path.rename(path.with_name(path.name.replace("00001-of-00001", "00002-of-00002")))
    ran = convert("fsdp2hf", shards, tmp_path / "out", "--config", base)
    assert ran.code == 3, ran.err
    assert "lacks files model-00001-of-00002 of all of its shards" in ran.err
