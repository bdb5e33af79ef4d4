"""Gemma 4 with experts (text): in each layer an MLP and experts have the same input, and their outputs are added.

Facts: transformers 5.23.0, models/gemma4/modeling_gemma4.py: the Hub's files have fused experts, as in memory; the
router scales its input, without norm weights of its own, and the output of each expert.
"""

from dataclasses import replace

from formats.families import gemma4_text
from formats.families.gemma4_text import BLOCK, HEAD

EXPERTS = """
model.layers.{layer}.router.scale                            router_input_scale: hidden        sparse
model.layers.{layer}.router.per_expert_scale                 router_expert_scale: expert       sparse
model.layers.{layer}.router.proj.weight                      router: expert hidden             sparse
model.layers.{layer}.experts.gate_up_proj                    expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse
model.layers.{layer}.experts.down_proj                       expert_down: expert hidden expert_ffn    sparse
model.layers.{layer}.post_feedforward_layernorm_1.weight     mlp_norm: hidden                  sparse
model.layers.{layer}.post_feedforward_layernorm_2.weight     experts_down_norm: hidden         sparse
model.layers.{layer}.pre_feedforward_layernorm_2.weight      experts_norm: hidden              sparse
"""
TABLE = BLOCK + EXPERTS + HEAD

FAMILY = replace(
    gemma4_text.FAMILY,
    name="gemma4_text_moe",
    model_type="gemma4_text",
    table=TABLE,
    marks={"enable_moe_block": True},
    requires={"attention_bias": False},
    keys={
        **gemma4_text.FAMILY.keys,
        "experts": "num_experts",
        "top_k": "top_k_experts",
        "expert_ffn": "moe_intermediate_size",
    },
    router="softmax",
)
