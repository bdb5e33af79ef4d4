"""Experts that lie input first: what our tables call gate, up and down computes what transformers' own layers do."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, silu
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

from formats.errors import UnsupportedError
from formats.huggingface.config import from_huggingface, to_huggingface
from formats.registry import open_checkpoint
from tests.models import settings_of

LAYER = 1
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
"""As OpenAI wrote it on the Hub, as far as it says something of the model; its quantization apart."""


def logical(source) -> dict[str, torch.Tensor]:
    """The logical tensors of one layer, in their own order of axes, out of the file's bytes."""
    stored, tensors = load_file(source / "model.safetensors"), {}
    for placed in open_checkpoint(source).fragments():
        for leaf in placed.leaves() if placed.slot.layer == LAYER else []:
            spans = [span for span in leaf.spans if span.axis != "layer"]
            sizes, strides = [span.size for span in spans], [span.stride for span in spans]
            tensors[leaf.tensor] = torch.as_strided(stored[placed.key], sizes, strides, leaf.base)
    return tensors


def test_experts_of_gpt_oss(model):
    source = model("gpt_oss", swiglu_limit=0.3)
    ours = logical(source)
    mlp = AutoModelForCausalLM.from_pretrained(source).model.layers[LAYER].mlp
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    scores = linear(x, ours["router"], ours["router_score_bias"])
    best, chosen = scores.topk(2)
    expected = torch.zeros(5, 64)
    for token, expert, weight in zip(range(5), chosen, best.softmax(-1), strict=True):
        for number, share in zip(expert, weight, strict=True):
            gate, up = (
                linear(x[token], ours[f"expert_{name}"][number], ours[f"expert_{name}_bias"][number])
                for name in ("gate", "up")
            )
            gate = gate.clamp(max=0.3)
            inside = (up.clamp(-0.3, 0.3) + 1) * gate * torch.sigmoid(1.702 * gate)
            expected[token] += share * linear(inside, ours["expert_down"][number], ours["expert_down_bias"][number])
    with torch.no_grad():
        output, _ = mlp(x[None])
    torch.testing.assert_close(output[0], expected)
    assert torch.equal(ours["expert_gate"], mlp.experts.gate_up_proj[..., ::2].transpose(1, 2))


def test_experts_of_llama_4(model):
    """Each expert gets what its score weighs; the expert of all tokens gets them as they are."""
    source = model("llama4_text", num_experts_per_tok=2)
    ours = logical(source)
    moe = AutoModelForCausalLM.from_pretrained(source).model.layers[LAYER].feed_forward
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    def mlp(tokens: torch.Tensor, name: str, *index: int) -> torch.Tensor:
        gate, up = (linear(tokens, ours[f"{name}_{part}"][index]) for part in ("gate", "up"))
        return linear(silu(gate) * up, ours[f"{name}_down"][index])

    best, chosen = linear(x, ours["router"]).topk(2)
    expected = mlp(x, "shared")
    for token, expert, score in zip(range(5), chosen, best.sigmoid(), strict=True):
        expected[token] += sum(
            mlp(x[token] * factor, "expert", int(n)) for n, factor in zip(expert, score, strict=True)
        )
    with torch.no_grad():
        output, _ = moe(x[None])
    torch.testing.assert_close(output, expected)


def test_heads_of_llama_4(model):
    """What `half` and `pair` are: turned by our own hands, queries and keys have the scores of transformers."""
    source = model("llama4_text")
    ours = logical(source)
    net = AutoModelForCausalLM.from_pretrained(source).model
    x, positions = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0)), torch.arange(5)[None]
    angles = positions[0, :, None] * 500000.0 ** (-torch.arange(8) / 8)
    turned = {}
    for name in ("query", "key"):
        first, second = (x[0] @ ours[name].movedim(-1, 0).flatten(1)).unflatten(1, ours[name].shape[:-1]).unbind(-2)
        cos, sin = (part.view(5, *[1] * (first.ndim - 2), 8) for part in (angles.cos(), angles.sin()))
        turned[name] = torch.stack([first * cos - second * sin, first * sin + second * cos], -2)
    scores = torch.einsum("tghij,sgij->ghts", turned["query"], turned["key"]).flatten(0, 1)
    with torch.no_grad():
        attention = net.layers[LAYER].self_attn
        heads = (proj(x).unflatten(-1, (-1, 16)) for proj in (attention.q_proj, attention.k_proj))
        query, key = apply_rotary_emb(*heads, net.rotary_emb(x, positions))
        theirs = torch.einsum("thd,shd->hts", query[0], key[0].repeat_interleave(2, 1))
    torch.testing.assert_close(scores, theirs)


@pytest.mark.parametrize(
    ("fields", "dense"), [({}, ()), ({"interleave_moe_layer_step": 2}, (0, 2)), ({"moe_layers": [2]}, (0, 1, 3))]
)
def test_layers_of_llama_4_without_experts(fields, dense):
    """The list goes before the step, whatever transformers adds to them."""
    base = AutoConfig.for_model(**settings_of("llama4_text") | {"interleave_moe_layer_step": 1} | fields)
    config = base.to_dict()
    spec = from_huggingface(config, {}, "config.json")
    assert spec.dense_layers == dense
    assert sorted(spec.sparse_layers) == base.moe_layers
    apart = {key: value for key, value in config.items() if key not in ("moe_layers", "layer_types")} | fields
    assert from_huggingface(apart, {}, "config.json").dense_layers == dense
    written = to_huggingface(from_huggingface(config, {"dense_layers": [3]}, "config.json"), config)
    assert AutoConfig.for_model(**written).moe_layers == [0, 1, 2]


def test_the_config_of_the_hub():
    spec = from_huggingface(GPT_OSS_20B, {}, "config.json")
    assert (spec.experts, spec.top_k, spec.expert_ffn, spec.sliding_window, spec.notes) == (32, 4, None, 128, ())
    assert spec.rope_scaling == GPT_OSS_20B["rope_scaling"]
    assert to_huggingface(spec, GPT_OSS_20B) == GPT_OSS_20B
    with pytest.raises(UnsupportedError, match="models with a quantization_config"):
        from_huggingface(GPT_OSS_20B | {"quantization_config": {"quant_method": "bitsandbytes"}}, {}, "config.json")


@pytest.mark.parametrize("rotary", [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": {}}])
def test_gpt_oss_rotates_as_transformers_assumes(rotary):
    """yarn, where its config does not say; and a plain one, once written, is not taken for that."""
    base = {key: value for key, value in GPT_OSS_20B.items() if key != "rope_scaling"} | rotary
    theirs = AutoConfig.for_model(**base).rope_parameters
    plain = {"rope_theta": theirs["rope_theta"], "rope_type": "default"}
    spec = from_huggingface(base, {}, "config.json")
    assert (spec.rope_scaling or {"rope_type": "default"}) | {"rope_theta": spec.rope_theta} == theirs
    written = to_huggingface(from_huggingface(base, {"rope_scaling": None}, "config.json"), base)
    assert AutoConfig.for_model(**json.loads(json.dumps(written))).rope_parameters == plain
