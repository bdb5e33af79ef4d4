"""Documents of a row, on the real device, in bf16: every attention that it has, against documents alone."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from formats.errors import UnsupportedError
from tests.train.test_model import flat_of
from train.attention import BACKENDS, resolve, self_check
from train.model import Trainee

DEVICE = torch.device("cuda")
FAMILIES = ["llama", "mistral", "qwen3", "gpt_neox"]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
"""head_dim 32: flash kernels take multiples of 8 from 16 up, and bf16 or fp16 only."""


def available(backend: str) -> str:
    try:
        return resolve(backend, DEVICE)
    except UnsupportedError as error:
        pytest.skip(f"{backend}: {error}")


def loaded(folder, backend):
    from transformers import AutoModelForCausalLM

    if backend == "varlen":
        from train.attention import register

        register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=BACKENDS[backend], dtype=torch.bfloat16)
    return Trainee(model.to(DEVICE), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_self_check_passes_and_is_fast_enough_for_every_start(model, backend):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model("llama", vocab_size=1000, **WIDE))
    assert self_check(config, DEVICE, available(backend), torch.bfloat16) < 2e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_is_unpacked_in_losses_and_gradients(model, family, backend):
    folder = model(family, vocab_size=1000, **WIDE)
    random = np.random.default_rng(1)
    documents = [(random.integers(0, 1000, size), random.random(size) < 0.6) for size in (400, 2, 170, 5, 640, 90)]
    packed, alone = loaded(folder, available(backend)), loaded(folder, backend)
    total = packed(flat_of(documents), DEVICE)
    total.backward()
    parts = [alone(flat_of([one]), DEVICE) for one in documents]
    torch.stack(parts).sum().backward()
    assert total.item() == pytest.approx(sum(part.item() for part in parts), rel=2e-3)
    ours = torch.cat([one.grad.flatten().float() for one in packed.parameters()])
    theirs = torch.cat([one.grad.flatten().float() for one in alone.parameters()])
    assert float((ours - theirs).norm() / theirs.norm()) < 2e-2


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "eager"])
def test_every_attention_gives_what_eager_gives(model, backend):
    folder = model("mistral", vocab_size=1000, sliding_window=48, **WIDE | {"head_dim": 32})
    random = np.random.default_rng(2)
    flat = flat_of([(random.integers(0, 1000, size), np.ones(size, bool)) for size in (300, 7, 64)])
    with torch.no_grad():
        found = loaded(folder, available(backend))(flat, DEVICE).item()
        assert found == pytest.approx(loaded(folder, "eager")(flat, DEVICE).item(), rel=2e-3)
