"""Stock Megatron-LM 0.19.2 trains with Lion what is a matrix of the layers, and all else with Adam: it is refused.

No other framework divides a model so, and beside a layer-wise Lion it saves no second moments of its Adam.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.torch_files import dcp
from tests.faults.dcp_tools import refused
from tests.golden.test_stock_dist import DISTRIBUTED, HALF, MODEL, UNTIED, VOCAB, stock
from tests.golden.test_stock_muon import SCRIPT

pytestmark = [pytest.mark.stock, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
ENDS = {"embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"}
MATRIX = "decoder.layers.mlp.linear_fc2.weight"


def kept(run: Path, state: str) -> set[str]:
    """The parameters of which a run has a state."""
    prefix = f"optimizer.state.{state}."
    return {item.name.split(prefix)[1] for item in dcp.entries(run / "iter_0000003") if prefix in item.name}


def test_lion_is_refused_by_name(convert, tmp_path):
    """Its weights are converted all the same."""
    flags = [*MODEL, UNTIED, HALF, "--optimizer", "lion"]
    plain, layered = tmp_path / "plain", tmp_path / "layered"
    job = {"tp": 2, "pp": 1, "steps": 3}
    jobs = [{**job, "flags": flags, "save": {str(plain): "plain"}}]
    jobs += [{**job, "flags": [*flags, DISTRIBUTED], "save": {str(layered): "fully_reshardable"}}]
    stock(jobs, tmp_path / "begun.json", script=SCRIPT)
    assert kept(plain, "exp_avg") > kept(plain, "exp_avg_sq") > ENDS
    assert MATRIX in kept(plain, "exp_avg") - kept(plain, "exp_avg_sq")
    assert kept(layered, "exp_avg") == kept(plain, "exp_avg")
    assert kept(layered, "exp_avg_sq") == set()
    for run in (plain, layered):
        for command in ("hf2fsdp", "zero2universal", "reshard"):
            options = [] if command == "zero2universal" else ["--with-optimizer"]
            ran = convert(command, run, tmp_path / "no", *options, "--vocab-size", VOCAB)
            refused(ran, 4, "its optimizer is 'lion'", "Megatron trains the matrices of the layers alone with it")
        assert convert("megatron2hf", run, tmp_path / f"{run.name}-hf", "--vocab-size", VOCAB).code == 0
