"""Which kernels are taken. What they compute is compared in tests/gpu."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from formats.errors import UnsupportedError
from train.model.kernels import resolve

LLAMA = SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "default"})


def test_a_cpu_has_kernels_of_torch():
    cpu = torch.device("cpu")
    assert resolve("auto", LLAMA, cpu) == resolve("torch", LLAMA, cpu) == "torch"
    with pytest.raises(UnsupportedError, match="liger do not run on cpu"):
        resolve("liger", LLAMA, cpu)


def test_a_gpu_without_liger(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr("train.model.kernels.find_spec", lambda _: None)
    assert resolve("auto", LLAMA, cuda) == resolve("torch", LLAMA, cuda) == "torch"
    with pytest.raises(UnsupportedError, match="not installed"):
        resolve("liger", LLAMA, cuda)


def test_models_that_liger_knows(monkeypatch):
    module = ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr("train.model.kernels.find_spec", lambda _: True)
    cuda = torch.device("cuda")
    assert resolve("auto", LLAMA, cuda) == resolve("liger", LLAMA, cuda) == "liger"
    part = SimpleNamespace(model_type="llama", rope_parameters={"partial_rotary_factor": 0.75})
    other = SimpleNamespace(model_type="gpt_neox")
    for config, told in ((part, "llama with partial rotary positions"), (other, "gpt_neox")):
        assert resolve("auto", config, cuda) == "torch"
        with pytest.raises(UnsupportedError, match=f"no kernels for {told}"):
            resolve("liger", config, cuda)
