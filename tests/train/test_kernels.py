"""Which kernels are taken. What they compute is compared in tests/gpu."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from formats.errors import UnsupportedError
from train.kernels import resolve


def test_a_cpu_has_kernels_of_torch():
    cpu = torch.device("cpu")
    assert resolve("auto", cpu, "llama") == resolve("torch", cpu, "llama") == "torch"
    with pytest.raises(UnsupportedError, match="liger do not run on cpu"):
        resolve("liger", cpu, "llama")


def test_a_gpu_without_liger(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr("train.kernels.find_spec", lambda _: None)
    assert resolve("auto", cuda, "llama") == resolve("torch", cuda, "llama") == "torch"
    with pytest.raises(UnsupportedError, match="not installed"):
        resolve("liger", cuda, "llama")
