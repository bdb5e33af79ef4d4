"""The kernels of liger compute what those of torch do: losses and gradients of packed rows."""

from __future__ import annotations

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from formats.errors import VerificationError
from train.data.rows import Flat
from train.model import kernels
from train.model.selfcheck import TOLERANCE, self_check
from train.model.trainee import Trainee

NEAR = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
"""Largest difference of a gradient, relative to its norm: bf16 alone gives 0.04 between sdpa and eager on CPUs."""


def rows():
    """Three documents, of which every third label is not trained."""
    sizes, chosen = (40, 7, 21), np.random.default_rng(1)
    tokens = chosen.integers(0, 253, sum(sizes))
    labels = np.where(np.arange(sum(sizes)) % 3, tokens, -100)
    positions = np.concatenate([np.arange(size) for size in sizes])
    ends = np.array([0, *np.cumsum(sizes)], np.int32)
    return Flat(tokens, labels, positions, ends, max(sizes), int((labels != -100).sum()))


def computed(folder, device, dtype, *, liger):
    """The loss, and the gradient of every weight."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
    code = vars(sys.modules[type(model).__module__])
    before = dict(code)
    if liger:
        kernels.replace(model)
    loss = Trainee(model, "sdpa")(rows(), device)
    loss.backward()
    code.update(before)
    return loss.item(), {name: tensor.grad.float() for name, tensor in model.named_parameters()}


def require_same(folder, device, dtype):
    torchs = computed(folder, device, dtype, liger=False)
    ligers = computed(folder, device, dtype, liger=True)
    assert ligers[0] == pytest.approx(torchs[0], rel=NEAR[dtype])
    assert ligers[0] != torchs[0] or any(
        not torch.equal(gradient, ligers[1][name]) for name, gradient in torchs[1].items()
    )
    for name, gradient in torchs[1].items():
        assert (gradient - ligers[1][name]).norm() <= NEAR[dtype] * gradient.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_losses_and_gradients(model, family, dtype):
    pytest.importorskip("liger_kernel", reason="liger_kernel is not installed")
    from transformers import AutoConfig

    device, folder = torch.device("cuda"), model(family, vocab_size=253)
    assert kernels.resolve("auto", AutoConfig.from_pretrained(folder), device) == "liger"
    require_same(folder, device, dtype)


def test_wrong_positions_are_refused_before_the_first_step(model, monkeypatch):
    pytest.importorskip("liger_kernel", reason="liger_kernel is not installed")
    from transformers import AutoConfig
    from transformers.models.llama import modeling_llama

    def wrong(model):
        kernels_of_liger(model)
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q.cumsum(2), k))

    kernels_of_liger = kernels.replace
    code = vars(modeling_llama)
    before = dict(code)
    config, device = AutoConfig.from_pretrained(model("llama", vocab_size=253)), torch.device("cuda")
    try:
        assert self_check(config, device, "sdpa", torch.bfloat16, "liger") < TOLERANCE[torch.bfloat16]
        monkeypatch.setattr("train.model.kernels.replace", wrong)
        with pytest.raises(VerificationError, match="see each other"):
            self_check(config, device, "sdpa", torch.bfloat16, "liger")
    finally:
        monkeypatch.undo()
        code.update(before)
