"""Which kernels are taken. What they compute is compared in tests/gpu."""

from __future__ import annotations

import sys
from functools import partial
from logging import CRITICAL
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from formats.errors import UnsupportedError
from train.data.parts import rank_part
from train.data.rows import Flat
from train.model.kernels import resolve
from train.model.parts import layers
from train.model.trainee import Trainee, compile_layers, fill, fill_buffers, make, open_config, save_memory

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
    assert resolve("auto", LLAMA, cuda, compiled=True) == "torch"
    assert resolve("liger", LLAMA, cuda, compiled=True) == "liger"
    part = SimpleNamespace(model_type="llama", rope_parameters={"partial_rotary_factor": 0.75})
    other = SimpleNamespace(model_type="gpt_neox")
    for config, description in ((part, "llama with partial rotary positions"), (other, "gpt_neox")):
        assert resolve("auto", config, cuda) == "torch"
        with pytest.raises(UnsupportedError, match=f"no kernels for {description}"):
            resolve("liger", config, cuda)


def test_padding_is_no_longer_than_the_kernels_are_told():
    """Of a rank that has no rows in the last step too: its one input is no token of a document."""
    zero = np.zeros(1, np.int64)
    empty = Flat(zero, zero - 100, zero, np.array([0, 1], np.int32), 0, 0)
    for context in (1, 2):
        part = rank_part(empty, SimpleNamespace(context=context, part=0), True)
        assert (len(part.input_ids), part.tokens, part.trained) == (128, 0, 0)
        assert part.longest == np.diff(part.cu_seqlens).max()
    assert rank_part(empty, SimpleNamespace(context=1)) is empty


def test_layers_are_compiled_once_for_all_sizes_of_rows(model, monkeypatch, caplog):
    """And not at all where checkpointing and hooks are in what is compiled: torch gives up after eight sizes."""
    caplog.set_level(CRITICAL, "torch")  # torch would trace into pytest's log, which takes minutes
    folder, graphs = model("llama", vocab_size=253), []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting, fullgraph=True))
    settings, cpu = SimpleNamespace(activation_checkpointing=True, activation_offload=False), torch.device("cpu")
    trainees, alone = [], SimpleNamespace(context=1)
    for compiled in (False, True):
        network = make(open_config(folder), "sdpa")
        trainees.append(Trainee(network.to_empty(device="cpu"), "sdpa"))
        with torch.no_grad():
            fill(network, folder)
        fill_buffers(network, cpu)
        if compiled:
            compile_layers(layers(network))
        save_memory(layers(network), settings, cpu)
    for sizes in ([9], [5, 20], [3, 4, 6], *([size, 7] for size in range(8, 18))):
        tokens = np.arange(sum(sizes)) % 250
        positions, ends = np.concatenate([*map(np.arange, sizes)]), np.cumsum([0, *sizes]).astype(np.int32)
        flat = Flat(tokens, tokens, positions, ends, max(sizes), len(tokens))
        losses = [
            trainee(rows, cpu) for trainee, rows in zip(trainees, (flat, rank_part(flat, alone, True)), strict=True)
        ]
        for loss in losses:
            loss.backward()
        assert torch.allclose(*losses, rtol=1e-6), sizes
    for plain, compiled in zip(*(trainee.parameters() for trainee in trainees), strict=True):
        assert torch.allclose(plain.grad, compiled.grad, rtol=1e-5, atol=1e-5)
    assert 1 <= len(graphs) <= 2  # sdpa gets a mask from the second document on
