"""What shipped converters of GPT-NeoX get wrong without a word, and that NeoX's own logits would show it here.

* Upstream's neox-to-hf and hf-to-neox, and a fork's, take query_key_value of a model without shared heads for blocked.
* Upstream's neox-to-hf multiplies the row-parallel biases of a serial residual by the number of ranks.
* ds_to_universal with round_robin_gradients, and with tensor parallelism without metadata: test_universal.py.
* zero_to_fp32 reads no round-robin order either way; master weights that are not the module's: test_zero.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden.test_neox import HERE, MEAN, flags, golden

BIASES = ("attention.dense.bias", "mlp.dense_4h_to_h.bias")


def mean_distance(model: Any, case: Path) -> float:
    import torch

    expected = golden(case)
    with torch.no_grad():
        logits = model.eval()(torch.arange(len(expected))[None]).logits[0]
    return float((logits - expected[:, : logits.shape[1]]).abs().mean())


@pytest.fixture
def loaded(convert, tmp_path):
    """`loaded(name)`: the model that neox2hf makes of a golden checkpoint, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    def make(name: str) -> Any:
        assert convert("neox2hf", HERE / name, tmp_path / "out", *flags(HERE / name)).code == 0
        return AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)

    return make


def test_query_key_value_of_a_model_without_shared_heads_is_interleaved(loaded):
    import torch

    case, model = HERE / "llama-mha-tp2", loaded("llama-mha-tp2")
    assert mean_distance(model, case) < MEAN
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            heads = [
                each.weight.unflatten(0, (4, 8)) for each in (attention.q_proj, attention.k_proj, attention.v_proj)
            ]
            rows = torch.stack(heads, 1).flatten(0, 2)  # as they lie in the file
            for each, part in zip((attention.q_proj, attention.k_proj, attention.v_proj), rows.chunk(3), strict=True):
                each.weight.copy_(part)
    assert mean_distance(model, case) > 10 * MEAN


@pytest.mark.parametrize("case", ["neox-serial-tp2", "neox-parallel-tp2", "neox-parallel-tp4"])
def test_biases_after_a_sum_over_ranks(loaded, case):
    """With a serial residual they are added once, with a parallel one by each rank: then the bias is the sum."""
    import torch

    model, ranks = loaded(case), int(case[-1])
    assert mean_distance(model, HERE / case) < MEAN
    wrong = ranks if "serial" in case else 1 / ranks
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(BIASES):
                parameter.mul_(wrong)
    assert mean_distance(model, HERE / case) > 1.5 * MEAN


def test_gate_and_up_are_not_swapped(loaded):
    import torch

    model = loaded("llama-mha-tp2")
    with torch.no_grad():
        for layer in model.model.layers:
            gate = layer.mlp.gate_proj.weight.clone()
            layer.mlp.gate_proj.weight.copy_(layer.mlp.up_proj.weight)
            layer.mlp.up_proj.weight.copy_(gate)
    assert mean_distance(model, HERE / "llama-mha-tp2") > 1.5 * MEAN
