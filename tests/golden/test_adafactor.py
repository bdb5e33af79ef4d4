"""Adafactor: whose states can be moved, as real torch, transformers and DeepSpeed keep them."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from tests.faults.dcp_tools import refused, save
from tests.golden.test_zero import differences
from tests.golden.zero_worlds import ADAFACTORS
from tests.models import build

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).with_name("adafactor_world.py")
NOT_SHARDED = {"torch": "in-place operations that require placement changes", "transformers": "got mixed torch.Tensor"}
"""Of which class: why it makes no step where parameters are DTensors."""
ELSEWHERE = "would be another on other ranks: convert the weights without the optimizer"


@pytest.mark.parametrize("kind", ADAFACTORS.kinds)
def test_zero_gives_adafactor_a_part_for_a_parameter(made, convert, tmp_path, kind):
    """What it keeps is of a rank's flat part. The master weights are carried; in stage 3 they are the weights."""
    config, whose = made(ADAFACTORS) / "hf", "Adafactor, of " + ("transformers" if "hf-" in kind else "torch")
    for command, words in (("hf2fsdp", ["--with-optimizer"]), ("zero2universal", [])):
        ran = convert(command, made(ADAFACTORS) / kind, tmp_path / "out", *words, "--config", config)
        refused(ran, 3, f"its optimizer ({whose}) is not Adam or Lion", ELSEWHERE)
    assert not (tmp_path / "out").exists()
    options = ["--weights", "fp32-master", "--config", config]
    ran = convert("zero2hf", made(ADAFACTORS) / kind, tmp_path / "fp32", *options)
    assert ran.code == 0, ran.err
    assert differences(tmp_path / "fp32", made(ADAFACTORS) / f"{kind}.truth.safetensors", "fp32") == []


def test_fsdp_and_adafactor(fsdp, convert, tmp_path):
    """FSDP2 and tensor parallelism make no step. FSDP1 does: its steps depend on the ranks, and transformers' has no
    checkpoint."""
    build(tmp_path / "hf", "llama-tied", "float32", num_hidden_layers=2)
    losses = {}
    for ranks in (2, 4):
        folder = tmp_path / f"of-{ranks}"
        folder.mkdir()
        code, output = fsdp([str(tmp_path / "hf"), str(folder), str(ranks)], 1, SCRIPT)
        assert code == 0, output[-4000:]
        records = {record["name"]: record for record in map(json.loads, re.findall("^{.*", output, re.MULTILINE))}
        assert len(records) == 9
        losses[ranks] = {name: record["losses"] for name, record in records.items()}
        for kind, why in NOT_SHARDED.items():
            for sharded in ("fsdp2", "tp"):
                assert (records[f"{kind}-{sharded}"]["losses"], why in records[f"{kind}-{sharded}"]["error"]) == (
                    [],
                    True,
                )
        assert "has different values for RMS" in records["transformers-fsdp1"]["error"]
        saved = sorted(path.name for path in folder.iterdir())
        assert saved == ["adamw-fsdp1", "adamw-fsdp2", "adamw-tp", "torch-fsdp1"]
        ran = convert(
            "hf2fsdp", folder / "torch-fsdp1", tmp_path / "out", "--with-optimizer", "--config", tmp_path / "hf"
        )
        refused(ran, 4, "(Adafactor, of torch)", "it keeps variance", ELSEWHERE)
    assert losses[2]["adamw-fsdp1"] == losses[4]["adamw-fsdp1"], "AdamW makes the same steps on any ranks"
    for kind in NOT_SHARDED:
        first, second = losses[2][f"{kind}-fsdp1"], losses[4][f"{kind}-fsdp1"]
        assert first[0] == second[0]
        assert abs(first[2] - second[2]) > 1e-5 * first[2], "those of Adafactor are others"


@pytest.mark.parametrize("kind", NOT_SHARDED)
@pytest.mark.filterwarnings("ignore")
def test_of_whole_parameters_it_keeps_rows_and_columns(convert, tmp_path, kind):
    """In one process, or with DDP: neither is a tensor of the model, and both are refused."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from transformers import AutoModelForCausalLM
    from transformers.optimization import Adafactor

    build(tmp_path / "hf", "llama", "float32", num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    kinds = {"torch": torch.optim.Adafactor, "transformers": functools.partial(Adafactor, relative_step=False)}
    optimizer = kinds[kind](model.parameters(), lr=0.01)
    model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step()
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    options = ["--with-optimizer", "--config", tmp_path / "hf"]
    ran = convert("hf2fsdp", save(tmp_path / "c", states), tmp_path / "out", *options)
    refused(ran, 4, f"(Adafactor, of {kind})", "its statistics of rows and columns are no tensors of the model")
