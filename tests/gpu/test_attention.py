"""Documents of a row, on the real device, in bf16: every attention that it has, against documents alone."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from formats.errors import UnsupportedError
from tests.train.test_model import flat_of
from train.model.attention import BACKENDS, named, resolve
from train.model.selfcheck import self_check
from train.model.trainee import Trainee

DEVICE = torch.device("cuda")
FAMILIES = ["llama", "mistral", "qwen3", "gpt_neox"]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
"""head_dim 32: flash kernels take multiples of 8 from 16 up, and bf16 or fp16 only."""
NEAR = 5e-2
"""Of gradients in bf16: sdpa on CPUs has 0.004 to 0.015; where documents see each other it is 0.2 (mistral) or 1.1."""


@pytest.fixture(autouse=True)
def _compiled_anew():
    """Flex is compiled for each test: torch gives up after eight kinds of inputs to one function."""
    torch._dynamo.reset()


def available(backend: str, folder) -> str:
    from transformers import AutoConfig

    try:
        return resolve(backend, AutoConfig.from_pretrained(folder), DEVICE, torch.bfloat16)
    except UnsupportedError as error:
        pytest.skip(f"{backend}: {error}")


def loaded(folder, backend):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=named(backend), dtype=torch.bfloat16)
    return Trainee(model.to(DEVICE), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_self_check_passes_and_is_fast_enough_for_every_start(model, backend):
    from transformers import AutoConfig

    folder = model("llama", vocab_size=1000, **WIDE)
    config = AutoConfig.from_pretrained(folder)
    assert self_check(config, DEVICE, available(backend, folder), torch.bfloat16) < 2e-2


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"head_dim": 264}),
        ("llama", {"head_dim": 20}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"qk_nope_head_dim": 12}),
    ],
)
def test_auto_takes_what_runs_with_heads_of_any_width(model, family, changes):
    from transformers import AutoConfig

    folder = model(family, vocab_size=1000, **WIDE | changes)
    backend = available("auto", folder)
    assert backend in BACKENDS
    assert self_check(AutoConfig.from_pretrained(folder), DEVICE, backend, torch.bfloat16) < 2e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_is_unpacked_in_losses_and_gradients(model, family, backend):
    folder = model(family, vocab_size=1000, **WIDE)
    random = np.random.default_rng(1)
    documents = [(random.integers(0, 1000, size), random.random(size) < 0.6) for size in (400, 2, 170, 5, 640, 90)]
    packed, alone = loaded(folder, available(backend, folder)), loaded(folder, backend)
    total = packed(flat_of(documents), DEVICE)
    total.backward()
    parts = [alone(flat_of([document]), DEVICE) for document in documents]
    torch.stack(parts).sum().backward()
    assert total.item() == pytest.approx(sum(part.item() for part in parts), rel=2e-3)
    ours = torch.cat([tensor.grad.flatten().float() for tensor in packed.parameters()])
    theirs = torch.cat([tensor.grad.flatten().float() for tensor in alone.parameters()])
    assert float((ours - theirs).norm() / theirs.norm()) < NEAR


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "eager"])
def test_every_attention_gives_what_eager_gives(model, backend):
    folder = model("mistral", vocab_size=1000, sliding_window=48, **WIDE | {"head_dim": 32})
    random = np.random.default_rng(2)
    flat = flat_of([(random.integers(0, 1000, size), np.ones(size, bool)) for size in (300, 7, 64)])
    with torch.no_grad():
        loss = loaded(folder, available(backend, folder))(flat, DEVICE).item()
        assert loss == pytest.approx(loaded(folder, "eager")(flat, DEVICE).item(), rel=2e-3)
