"""Granite 3 with experts: the attention and multipliers of Granite, all experts in an input and an output tensor.

Facts: transformers models/granitemoe/modeling_granitemoe.py and conversion_mapping.py, 5.23.0: gate and up are the two
halves of the rows of `input_linear`; in memory the tensors have other names.
"""

from dataclasses import replace

from formats.families import granite
from formats.families.blocks import ATTENTION, HEAD, NORMS

EXPERTS = """
model.layers.{layer}.block_sparse_moe.router.layer.weight        router: expert hidden                   sparse separate
model.layers.{layer}.block_sparse_moe.router.weight              router: expert hidden                   sparse fused
model.layers.{layer}.block_sparse_moe.input_linear.weight        expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse separate
model.layers.{layer}.block_sparse_moe.experts.gate_up_proj       expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.block_sparse_moe.output_linear.weight       expert_down: expert hidden expert_ffn   sparse separate
model.layers.{layer}.block_sparse_moe.experts.down_proj          expert_down: expert hidden expert_ffn   sparse fused
"""
TABLE = ATTENTION + NORMS + EXPERTS + HEAD

FAMILY = replace(
    granite.FAMILY,
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    keys={"experts": "num_local_experts", "top_k": "num_experts_per_tok"},
    defaults={"experts": 8, "top_k": 2},
    router="softmax",
)
