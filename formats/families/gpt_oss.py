"""GPT-OSS: sinks and biases in attention, experts that the Hub's files hold as [in, out] (transformers, 5.23.0).

Facts: models/gpt_oss/modeling_gpt_oss.py: `_apply_gate` takes the gate of an expert from the even columns and up from
the odd ones; the router adds its bias to the scores, from which it also computes the weights of the experts.
"""

from formats.families.blocks import (
    BIASED_QKVO,
    EMBEDDING,
    HEAD,
    NORMS,
    OUTPUT_BIAS,
    TORCHTITAN_ATTENTION,
    TORCHTITAN_ENDS,
    TORCHTITAN_NORMS,
)
from formats.families.family import Family

SINKS = """
model.layers.{layer}.self_attn.sinks                   sinks: (group head)
"""
INPUT_FIRST = """
model.layers.{layer}.mlp.router.weight                 router: expert hidden                      sparse
model.layers.{layer}.mlp.router.bias                   router_score_bias: expert                  sparse
model.layers.{layer}.mlp.experts.gate_up_proj          expert hidden (expert_ffn (expert_gate: | expert_up:))    sparse
model.layers.{layer}.mlp.experts.gate_up_proj_bias     expert (expert_ffn (expert_gate_bias: | expert_up_bias:))    sparse
model.layers.{layer}.mlp.experts.down_proj             expert_down: expert expert_ffn hidden      sparse
model.layers.{layer}.mlp.experts.down_proj_bias        expert_down_bias: expert hidden            sparse
"""
TABLE = EMBEDDING + SINKS + BIASED_QKVO + OUTPUT_BIAS + INPUT_FIRST + NORMS + HEAD

TORCHTITAN_BIASES = """
layers.{layer}.attention.qkv_linear.wq.bias                        query_bias: (group head half pair)
layers.{layer}.attention.qkv_linear.wk.bias                        key_bias: (group half pair)
layers.{layer}.attention.qkv_linear.wv.bias                        value_bias: (group dim)
layers.{layer}.attention.wo.bias                                   output_bias: hidden
layers.{layer}.attention.sinks                                     sinks: (group head)
"""
TORCHTITAN_OUTPUT_FIRST = """
layers.{layer}.moe.router.gate.weight                              router: expert hidden                      sparse
layers.{layer}.moe.router.gate.bias                                router_score_bias: expert                  sparse
layers.{layer}.moe.routed_experts.inner_experts.mlp1_weight_EGD    expert (expert_ffn (expert_gate: | expert_up:)) hidden    sparse
layers.{layer}.moe.routed_experts.inner_experts.mlp1_bias_EG       expert (expert_ffn (expert_gate_bias: | expert_up_bias:))    sparse
layers.{layer}.moe.routed_experts.inner_experts.mlp2_weight_EDF    expert_down: expert hidden expert_ffn      sparse
layers.{layer}.moe.routed_experts.inner_experts.mlp2_bias_ED       expert_down_bias: expert hidden            sparse
"""
TORCHTITAN = TORCHTITAN_ATTENTION + TORCHTITAN_BIASES + TORCHTITAN_OUTPUT_FIRST + TORCHTITAN_NORMS + TORCHTITAN_ENDS
"""The native names of torchtitan 0.3.0, whose experts are [out, in]. Its own adapter does not know `_EGD` and similar
names, and leaves these experts out."""

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""The default rotary settings of the config (configuration_gpt_oss.py)."""

FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": True},
    rope_theta=150000.0,
    head_dim=64,
    window="sliding_window",
    window_default=128,
    keys={"experts": "num_local_experts num_experts", "top_k": "num_experts_per_tok"},
    defaults={"experts": 128, "top_k": 4, "rope_scaling": YARN},
    own={"layer_types": None, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    router="softmax",
    native={"torchtitan": TORCHTITAN},
)
