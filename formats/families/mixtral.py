"""Mixtral: Mistral with experts in place of the MLP (transformers models/mixtral/modeling_mixtral.py, 5.23.0).

transformers 5 fuses the experts of a layer in memory, and saves them under the Hub's names (conversion_mapping.py).
"""

from formats.families.blocks import ATTENTION, HEAD, NORMS
from formats.families.family import Family

EXPERTS_AND_ROUTER = """
model.layers.{layer}.block_sparse_moe.gate.weight                      router: expert hidden                   sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight       expert_gate: expert_ffn hidden          sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight       expert_up: expert_ffn hidden            sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight       expert_down: hidden expert_ffn          sparse separate
model.layers.{layer}.mlp.gate.weight                                   router: expert hidden                   sparse fused
model.layers.{layer}.mlp.experts.gate_up_proj                          expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.mlp.experts.down_proj                             expert_down: expert hidden expert_ffn   sparse fused
"""
TABLE = ATTENTION + EXPERTS_AND_ROUTER + NORMS + HEAD

FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    nulls=("head_dim",),
    rope_theta=1000000.0,
    window="sliding_window",
    keys={"experts": "num_local_experts num_experts", "top_k": "num_experts_per_tok"},
    defaults={"experts": 8, "top_k": 2},
    router="softmax",
)
