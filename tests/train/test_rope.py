"""Rotary frequencies that depend on the length: packed documents have those that transformers gives each alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.train.test_model import flat_of
from train.data.rows import IGNORED
from train.model.trainee import Trainee

CPU = torch.device("cpu")
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0,
    "short_factor": [1.0 + number / 8 for number in range(4)], "long_factor": [2.0 + number for number in range(4)],
}  # fmt: skip
CASES = {
    "longrope": (
        "phi3",
        {
            "rope_parameters": LONG,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
            "sliding_window": None,
        },
    ),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 32},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_document_is_turned_as_it_is_alone(model, name):
    from transformers import AutoModelForCausalLM

    family, changes = CASES[name]
    random = np.random.default_rng(1)
    sizes = (40, 9, 34, 33, 90, 2, 40)  # of 33 tokens the last is no input
    documents = [(random.integers(0, 253, size), random.random(size) < 0.6) for size in sizes]
    plain = AutoModelForCausalLM.from_pretrained(model(family, vocab_size=253, **changes), dtype=torch.float32)
    packed, mixed = Trainee(copy.deepcopy(plain), "sdpa"), copy.deepcopy(plain)
    flat = flat_of(documents)
    total = packed(flat, CPU)
    total.backward()
    alone, gradients = 0.0, [torch.zeros_like(tensor) for tensor in plain.parameters()]
    for tokens, mask in documents:
        fresh = copy.deepcopy(plain)  # dynamic scaling remembers the longest
        logits = fresh(input_ids=torch.from_numpy(tokens[:-1])[None], use_cache=False).logits[0]
        labels = torch.from_numpy(np.where(mask[1:], tokens[1:], IGNORED))
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        loss.backward()
        alone += loss.item()
        for summed, tensor in zip(gradients, fresh.parameters(), strict=True):
            summed.add_(tensor.grad)
    assert total.item() == pytest.approx(alone, rel=1e-6)
    for (key, tensor), gradient in zip(packed.model.named_parameters(), gradients, strict=True):
        assert torch.allclose(tensor.grad, gradient, atol=2e-5, rtol=1e-4), key
    with torch.no_grad():
        logits = mixed(
            input_ids=torch.from_numpy(flat.input_ids)[None],
            position_ids=torch.from_numpy(flat.position_ids)[None],
            use_cache=False,
        ).logits[0]
        by_row = torch.nn.functional.cross_entropy(logits, torch.from_numpy(flat.labels), reduction="sum")
    assert abs(by_row.item() - alone) > 0.1
