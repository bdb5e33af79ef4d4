"""`convert verify` of what another program wrote: the CRC-32 that torch.save keeps are checked."""

from __future__ import annotations

import json

import pytest
import torch

from tests.faults.dcp_tools import refused, save
from tests.models import build

STATE = {"model.embed_tokens.weight": torch.arange(600.0).view(20, 30), "model.norm.weight": torch.ones(30)}


@pytest.fixture
def checkpoint(tmp_path):
    return save(tmp_path / "dcp", STATE)


def flip(path, needle: bytes) -> int:
    """Change one bit of a byte that stands behind some bytes of the file."""
    raw = bytearray(path.read_bytes())
    at = raw.index(needle) + len(needle)
    raw[at] ^= 1
    path.write_bytes(raw)
    return at


def test_a_sound_checkpoint(convert, checkpoint):
    ran = convert("verify", checkpoint)
    assert ran.code == 0
    assert ran.err == f"note: whether the files are one checkpoint was not looked at: {checkpoint} has no config.json\n"
    assert "1 files, " in ran.out
    assert json.loads(convert("verify", checkpoint, "--json").out)["damaged"] == []


def test_one_bit_of_a_weight(convert, checkpoint):
    flip(checkpoint / "__0_0.distcp", torch.arange(100.0, 110.0).numpy().tobytes())
    refused(convert("verify", checkpoint), 6, "1 parts of", "__0_0.distcp: archive/data/0 (2400 bytes at byte")
    assert not json.loads(convert("verify", checkpoint, "--json").out)["equal"]


def test_one_bit_of_a_pickle(convert, tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "model.pt")
    flip(tmp_path / "model.pt", b"FloatStorag")
    refused(convert("verify", tmp_path), 6, "model.pt: model/data.pkl")


def test_a_file_that_is_cut_off(convert, checkpoint):
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    refused(convert("verify", checkpoint), 6, "__0_0.distcp: no torch.save archive ends at byte")


def test_a_file_of_a_rank_that_is_empty(convert, checkpoint):
    """One of torch's own is where a thread had nothing to write; torch.save leaves none."""
    (checkpoint / "__1_0.distcp").touch()
    assert convert("verify", checkpoint).code == 0
    (checkpoint / "model_optim_rng.pt").touch()
    refused(convert("verify", checkpoint), 6, "1 parts of", "model_optim_rng.pt is empty")


def test_a_hole_between_two_archives(convert, checkpoint):
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"PK\x05\x06", bytes(4), 1))
    refused(convert("verify", checkpoint), 6, "__0_0.distcp: no torch.save archive ends at byte")


def test_checksums_that_were_not_written(convert, tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert "without one: 8 parts, 0 files" in convert("verify", tmp_path).out


def test_compressed_items_have_none(convert, tmp_path):
    from torch.distributed.checkpoint._extension import ZStandard

    save(tmp_path / "dcp", STATE, _extensions=[ZStandard()])
    refused(convert("verify", tmp_path / "dcp"), 3, "no file of torch.save")


def test_safetensors_have_none(convert, tmp_path):
    refused(convert("verify", build(tmp_path / "hf", "llama", "float32")), 3, "no file of torch.save", "SRC")


def test_nothing_there(convert, tmp_path):
    refused(convert("verify", tmp_path / "nowhere"), 3, "does not exist")
