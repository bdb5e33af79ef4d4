"""Qwen3.5 (text): Qwen3-Next without experts, with separate input projections of linear attention.

Facts: transformers 5.23.0, models/qwen3_5/modeling_qwen3_5.py. In text the three positions of a token are equal.
"""

from formats.families.blocks import EMBEDDING, GATED_MLP, HEAD, NORMS, second
from formats.families.family import Family
from formats.families.qwen3_next import DEFAULTS, GATED_ATTENTION, JOIN, KEYS, LINEAR_OUTPUT, LINEAR_STATE, MTP

LINEAR_INPUTS = """
model.layers.{layer}.linear_attn.in_proj_qkv.weight    (linear_query: key_head key_dim | linear_key: key_head key_dim | linear_value: key_head spread value_dim) hidden    recurrent
model.layers.{layer}.linear_attn.in_proj_z.weight      linear_gate: (key_head spread value_dim) hidden    recurrent
model.layers.{layer}.linear_attn.in_proj_b.weight      linear_beta: (key_head spread) hidden    recurrent
model.layers.{layer}.linear_attn.in_proj_a.weight      linear_alpha: (key_head spread) hidden    recurrent
"""
LINEAR = LINEAR_STATE + LINEAR_OUTPUT + LINEAR_INPUTS
BLOCK = GATED_ATTENTION + GATED_MLP + NORMS
TABLE = EMBEDDING + LINEAR + BLOCK + HEAD + JOIN + second(BLOCK, MTP)

FAMILY = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    head_dim=256,
    centred=True,
    keys=KEYS,
    defaults=DEFAULTS,
)
