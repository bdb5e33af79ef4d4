"""Loaders of servers: what vLLM and SGLang are given of a checkpoint is what its conversion holds, or it is refused.

Where the servers are not installed, their classes are stood for by the few lines that a loader meets: as of vLLM 0.33.0
(model_executor/model_loader/default_loader.py) and SGLang 0.5.23 (srt/model_loader/loader.py). With the real packages,
on a CPU, the test of vLLM passed; what that of SGLang does was run with stand-ins for torchvision and loguru.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vitruvian
from converters.library.frameworks import serving
from converters.library.view import Reader

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOML = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def outputs(source, out):
    """Folders of each trainer, of one model."""
    vitruvian.convert(source, out / "megatron", to="megatron", tp=2, pp=2)
    vitruvian.convert(source, out / "fsdp", to="fsdp", ranks=3)
    vitruvian.convert(source, out / "neox", to="neox", tp=2)
    return [out / name for name in ("megatron", "fsdp", "neox")]


@dataclass
class Config:
    """LoadConfig, which both are given."""

    load_format: Any = "vitruvian"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)
    draft_model_idx: int | None = None


class Loader:
    """DefaultModelLoader, of both: it takes an extra config that it knows, and loads the weights that it is told."""

    def __init__(self, load_config):
        self.load_config = load_config
        if odd := load_config.model_loader_extra_config.keys() - {"enable_multithread_load", "num_threads"}:
            raise ValueError(f"Unexpected extra config keys for load format {load_config.load_format}: {odd}")

    def load_weights(self, model, model_config):
        model.load_weights(self.get_all_weights(model_config, model))

    def load_model(self, *, model_config, device_config):
        model = Model()
        model.load_weights(self._get_all_weights(model_config, model))
        return model


class Model(torch.nn.Module):
    """A model of a server, which keeps what it is given."""

    def load_weights(self, weights):
        self.taken = list(weights)
        return


REGISTERED = {}


def register_model_loader(name):
    """As vLLM's: a decorator."""
    return lambda loader: REGISTERED.setdefault(name, loader)


@pytest.fixture
def stand_ins(monkeypatch):
    """The modules of both servers, and ours as they are imported there."""
    for name, members in {
        "vllm.model_executor.model_loader": {
            "DefaultModelLoader": Loader, "register_model_loader": register_model_loader},
        "sglang.srt.model_loader.loader": {"DefaultModelLoader": Loader},
    }.items():  # fmt: skip
        parts = name.split(".")
        for number in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:number]))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(members)
    for ours in ("vitruvian", "converters.library.frameworks"):
        for name in ("vllm", "sglang", "vllm_loader", "sglang_loader"):
            monkeypatch.delitem(sys.modules, f"{ours}.{name}", raising=False)
    yield
    for ours in ("vitruvian", "converters.library.frameworks"):
        for name in ("vllm", "sglang", "vllm_loader", "sglang_loader"):
            sys.modules.pop(f"{ours}.{name}", None)


def same(taken, source):
    """Names, types and bits of what was taken are those of a Hugging Face folder, each once."""
    expected = load_file(source / "model.safetensors")
    assert [name for name, _ in taken] == list(dict.fromkeys(name for name, _ in taken))
    assert {name for name, _ in taken} == expected.keys()
    assert all(tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]) for name, tensor in taken)


def test_a_server_is_given_the_tensors_of_the_conversion(model, tmp_path, monkeypatch):
    source, read = model("llama", "bfloat16"), Counter()
    own = Reader.read

    def counted(self, placed, state, values):
        read[placed.key] += 1
        own(self, placed, state, values)

    monkeypatch.setattr(Reader, "read", counted)
    for number, folder in enumerate(outputs(source, tmp_path), start=1):
        config = {"checkpoint": str(folder), "prefetch": 2, "threads": 1}
        same(list(serving.weights(config, str(source), None, torch.nn.Module())), source)
        assert set(read.values()) == {number}, "a tensor was read twice"


def test_what_is_not_the_server_s_model_is_refused_before_a_tensor_is_given(model, tmp_path):
    source = model("llama", "bfloat16")
    run = tmp_path / "run"
    vitruvian.convert(source, run, to="megatron", tp=2)

    def first(config, base=source, model=None):
        next(serving.weights(config, str(base), None, model))

    with pytest.raises(vitruvian.UsageError, match="names no checkpoint"):
        first({})
    with pytest.raises(vitruvian.UsageError, match="there is no option tp"):
        first({"checkpoint": str(run), "tp": 2})
    with pytest.raises(vitruvian.UsageError, match="checkpoint = 3 is not a text"):
        first({"checkpoint": 3})
    with pytest.raises(vitruvian.UsageError, match="the config is that of the server's model"):
        first({"checkpoint": str(run), "config": str(source)})
    with pytest.raises(vitruvian.VitruvianError, match="its config a qwen2, which differs in add_qkv_bias"):
        first({"checkpoint": str(run)}, base=model("qwen2-tied", "bfloat16"))
    with pytest.raises(vitruvian.UnsupportedError, match="takes weights from further folders"):
        first({"checkpoint": str(run)}, model=SimpleNamespace(secondary_weights=[object()]))
    next(run.rglob("mp_rank_01*/*.pt")).unlink()
    with pytest.raises(vitruvian.SourceError):
        first({"checkpoint": str(run)})


def test_a_loader_of_each_server(model, tmp_path, stand_ins):
    source, run = model("llama", "bfloat16"), tmp_path / "run"
    vitruvian.convert(source, run, to="fsdp", ranks=2)
    (run / "config.json").unlink(missing_ok=True)  # config and tokenizer are the server's
    config = Config(model_loader_extra_config={"checkpoint": str(run)})
    ((name, value),) = TOML["project"]["entry-points"]["vllm.general_plugins"].items()
    EntryPoint(name, value, "vllm.general_plugins").load()()
    of_vllm = REGISTERED["vitruvian"](config)
    filled, about = Model(), SimpleNamespace(model=str(source), model_path=str(source), revision=None)
    of_vllm.download_model(about)
    of_vllm.load_weights(filled, about)
    same(filled.taken, source)
    of_sglang = import_module("vitruvian.sglang").CheckpointLoader(config)
    of_sglang.download_model(about)
    same(of_sglang.load_model(model_config=about, device_config=None).taken, source)
    config.draft_model_idx = 1
    with pytest.raises(vitruvian.UnsupportedError, match="layer 1 of multi-token prediction"):
        of_sglang.load_model(model_config=about, device_config=None)


def test_the_loader_that_vllm_makes(model, tmp_path):
    """Real vLLM: its plugin, its registry, its config, its loader; the model is a Linear, as its own need a GPU."""
    loaders = pytest.importorskip("vllm.model_executor.model_loader", reason="vLLM is not installed")
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    source, run = model("llama", "bfloat16"), tmp_path / "run"
    vitruvian.convert(source, run, to="megatron", tp=2)
    loader = loaders.get_model_loader(
        LoadConfig(load_format="vitruvian", model_loader_extra_config={"checkpoint": str(run)})
    )
    about = SimpleNamespace(model=str(source), revision=None, quantization=None, is_moe=False, multimodal_config=None)
    loader.download_model(about)
    filled = Model()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        loader.load_weights(filled, about)
        same(filled.taken, source)
        filled.lacking = torch.nn.Linear(2, 2)
        filled.load_weights = lambda weights: {name for name, _ in weights}
        with pytest.raises(ValueError, match=r"not initialized from checkpoint: .*lacking\.weight"):
            loader.load_weights(filled, about)


def test_the_loader_that_sglang_makes(model, tmp_path):
    """Real SGLang: its config and the choice of a loader; the model is not made, as that needs a GPU."""
    loaders = pytest.importorskip("sglang.srt.model_loader.loader", reason="SGLang is not installed")
    from sglang.srt.configs.load_config import LoadConfig

    from vitruvian.sglang import CheckpointLoader

    source, run = model("llama", "bfloat16"), tmp_path / "run"
    vitruvian.convert(source, run, to="megatron", tp=2)
    config = f'{{"checkpoint": "{run}"}}'
    loader = loaders.get_model_loader(LoadConfig(load_format=CheckpointLoader, model_loader_extra_config=config))
    about, filled = SimpleNamespace(model_path=str(source), revision=None), Model()
    loader.download_model(about)
    loaders.DefaultModelLoader.load_weights_only(filled, loader._get_all_weights(about, filled), torch.device("cpu"))
    same(filled.taken, source)
