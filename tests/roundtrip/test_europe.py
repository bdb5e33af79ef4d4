"""The open models of Europe at their real sizes: planned into the layouts that their groups train in, without weights.

Each folder has a true config and true headers, and holes for weights. That the numbers of a config are those of the
model shows in the number of its parameters, where the group has published that.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from formats.huggingface import folder as huggingface
from formats.huggingface.config import from_huggingface
from tests.bench.make_model import SHARD, lay_out

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}


def sizes(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, length: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocab, "max_position_embeddings": length,
        "tie_word_embeddings": False,
    }  # fmt: skip


class Model(NamedTuple):
    """A config, the published parameters (exactly, or in billions), their source, and commands that are right."""

    config: dict[str, Any]
    published: float | int | None
    source: str
    commands: tuple[str, ...]
    refused: tuple[tuple[str, str], ...] = ()


MEGATRON = ("hf2megatron --tp 4 --pp 2",)
MODELS = {
    "EuroLLM-9B": Model(
        {**LLAMA, **sizes(42, 4096, 12288, 32, 8, 128000, 4096), "rope_theta": 10000.0},
        9.15, "model card utter-project/EuroLLM-9B: layers, sizes, 9.154 billion parameters",
        ("hf2megatron --format torch_dist --tp 4 --pp 2",),
    ),
    "EuroLLM-1.7B": Model(
        {**LLAMA, **sizes(24, 2048, 5632, 16, 8, 128000, 4096), "rope_theta": 10000.0},
        1.66, "model card utter-project/EuroLLM-1.7B: 1.657 billion parameters", MEGATRON,
    ),
    "Teuken-7B": Model(
        {**LLAMA, **sizes(32, 4096, 13440, 32, 2, 250680, 4096), "rope_theta": 10000.0},
        None, "arXiv 2410.03730: layers, heads, groups, MLP; the vocabulary from memory", MEGATRON,
    ),
    "Salamandra-2B": Model(
        {**LLAMA, **sizes(24, 2048, 5440, 16, 16, 256000, 8192), "rope_theta": 10000.0},
        2253490176, "model card BSC-LT/salamandra-2b", MEGATRON,
    ),
    "Salamandra-7B": Model(
        {**LLAMA, **sizes(32, 4096, 11008, 32, 8, 256000, 8192), "rope_theta": 10000.0},
        7768117248, "model card BSC-LT/salamandra-7b", MEGATRON,
    ),
    "ALIA-40B": Model(
        {**LLAMA, **sizes(48, 8192, 24576, 64, 8, 256000, 4096), "rope_theta": 10000.0},
        40433885184, "model card BSC-LT/ALIA-40b", ("hf2megatron --tp 8 --pp 4",),
    ),
    "Apertus-8B": Model(
        {
            **sizes(32, 4096, 21504, 32, 8, 131072, 65536), "model_type": "apertus", "hidden_act": "xielu",
            "architectures": ["ApertusForCausalLM"], "rms_norm_eps": 1e-5, "mlp_bias": False, "qk_norm": True,
            "rope_theta": 12000000,
            "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "type": "llama3",
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
        8.05, "arXiv 2509.14233: sizes; the count is that of the model card swiss-ai/Apertus-8B-2509",
        ("hf2fsdp --ranks 8",), (("hf2megatron --tp 4", "xIELU"),),
    ),
    "Apertus-70B": Model(
        {
            **sizes(80, 8192, 43008, 64, 8, 131072, 65536), "model_type": "apertus", "hidden_act": "xielu",
            "architectures": ["ApertusForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 12000000,
        },
        70.6, "arXiv 2509.14233: sizes; the count is that of the model card swiss-ai/Apertus-70B-2509",
        ("hf2fsdp --ranks 8",),
    ),
    "TildeOpen-30B": Model(
        {**LLAMA, **sizes(60, 6144, 21504, 48, 8, 131072, 8192), "rope_theta": 500000.0},
        30.7, "model card TildeAI/TildeOpen-30b: a table of sizes; the base of the rotation from memory",
        ("hf2neox --tp 4", "hf2megatron --tp 8 --pp 4"),
    ),
    "Viking-7B": Model(
        {**LLAMA, **sizes(32, 4096, 11008, 32, 32, 131072, 4096), "rope_theta": 10000.0},
        None, "model card LumiOpen/Viking-7B: layers, heads, width, vocabulary; the MLP from memory", MEGATRON,
    ),
    "Poro-34B": Model(
        {
            "model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_layer": 54, "n_head": 56,
            "hidden_size": 7168, "vocab_size": 128000, "seq_length": 2048, "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        34.2, "model card LumiOpen/Poro-34B: 34.2 billion, 54 layers, 56 heads, 7168, 128000 tokens",
        ("hf2fsdp --ranks 8",), (("hf2megatron --tp 4", "ALiBi"),),
    ),
    "Lucie-7B": Model(
        {**LLAMA, **sizes(32, 4096, 12288, 32, 8, 65024, 32000), "rope_theta": 20000000.0},
        6706958336, "model card OpenLLM-France/Lucie-7B", MEGATRON,
    ),
    "Minerva-7B": Model(
        {**MISTRAL, **sizes(32, 4096, 14336, 32, 8, 51200, 4096), "rope_theta": 10000.0},
        7.4, "model card sapienzanlp/Minerva-7B-base-v1.0: 7.4 billion; the vocabulary from memory", MEGATRON,
    ),
    "Occiglot-7B-EU5": Model(
        {**MISTRAL, **sizes(32, 4096, 14336, 32, 8, 32000, 32768), "rope_theta": 10000.0},
        7241732096, "Mistral 7B v0.1, of which it is a continuation (model card occiglot/occiglot-7b-eu5)", MEGATRON,
    ),
    "GPT-SW3-6.7B": Model(
        {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 32, "n_head": 32, "n_embd": 4096,
            "n_inner": 16384, "n_positions": 2048, "vocab_size": 64000, "activation_function": "gelu",
            "layer_norm_epsilon": 1e-5, "bos_token_id": 2, "eos_token_id": 3,
        },
        None, "arXiv 2305.12987: 32 layers, 32 heads, 4096, 64000 tokens; the rest from memory",
        MEGATRON,
    ),
    "open-sci-ref-1.7B": Model(
        {
            **LLAMA, **sizes(24, 2048, 8192, 32, 32, 50304, 4096), "model_type": "opensci", "attention_bias": True,
            "architectures": ["OpensciForCausalLM"], "head_dim": 64, "mlp_bias": True, "qk_layernorm": True,
            "rope_theta": 10000, "rope_scaling": None, "tie_word_embeddings": True, "use_cache": True,
        },
        1.71, "the config.json that open-sci's converter from Megatron writes, whose sizes make 1.7 billion", MEGATRON,
    ),
    "Velvet-14B": Model(
        {**MISTRAL, **sizes(50, 5120, 12544, 40, 8, 126976, 16384), "rope_theta": 100000.0},
        14.1, "model card Almawave/Velvet-14B: sizes; the base of the rotation from memory", MEGATRON,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """`real(name)`: a folder of the size of a real model, of holes, and how many parameters it has."""
    folders: dict[str, tuple[Path, int]] = {}

    def get(name: str) -> tuple[Path, int]:
        if name not in folders:
            config, out = MODELS[name].config, tmp_path_factory.mktemp(name) / "hf"
            out.mkdir()
            (out / "config.json").write_text(json.dumps(config))
            spec = from_huggingface(config, {}, name)
            dtypes = {(tensor, layer): "BF16" for tensor in spec.tensors for layer in (None, *range(spec.layers))}
            lay_out(out, huggingface.write(out, spec, dtypes, SHARD), sparse=True)
            folders[name] = out, sum(math.prod(shape) for _, _, shape in spec.boxes())
        return folders[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_it_has_as_many_parameters_as_its_group_says(real, name):
    counted, published = real(name)[1], MODELS[name].published
    if isinstance(published, float):
        assert round(counted / 1e9, len(str(published).partition(".")[2])) == published
    elif published is not None:
        assert counted == published


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, model in MODELS.items() for line in model.commands])
def test_it_is_planned(real, convert, tmp_path, monkeypatch, name, line):
    command, *options = line.split()
    monkeypatch.setattr("converters.convert.require_space", lambda *_: None)  # the largest would not fit on this disk
    ran = convert(command, real(name)[0], tmp_path / "out", *options, "-n")
    assert ran.code == 0, ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "line", "why"), [(name, *row) for name, model in MODELS.items() for row in model.refused]
)
def test_what_its_format_cannot_hold_is_refused(real, convert, tmp_path, name, line, why):
    command, *options = line.split()
    ran = convert(command, real(name)[0], tmp_path / "out", *options, "-n")
    assert ran.code == 4
    assert why in ran.err
