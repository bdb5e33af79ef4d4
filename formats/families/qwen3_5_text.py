"""Qwen3.5 (text): Qwen3-Next without experts, with separate input projections of linear attention.

Facts: transformers 5.23.0, models/qwen3_5/modeling_qwen3_5.py. In text the three positions of a token are equal.
"""

from formats.families.blocks import (
    EMBEDDING,
    GATED_MLP,
    HEAD,
    NORMS,
    TORCHTITAN_ENDS,
    TORCHTITAN_MLP,
    TORCHTITAN_NORMS,
    second,
)
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

TORCHTITAN_MIXERS = """
tok_embeddings.weight                    embedding: vocab hidden
layers.{layer}.attn.wq.weight            (group head (query: half pair | query_gate: dim)) hidden    attention
layers.{layer}.attn.wk.weight            key: (group half pair) hidden                  attention
layers.{layer}.attn.wv.weight            value: (group dim) hidden                      attention
layers.{layer}.attn.wo.weight            output: hidden (group head dim)                attention
layers.{layer}.attn.q_norm.weight        query_norm: (half pair)                        attention
layers.{layer}.attn.k_norm.weight        key_norm: (half pair)                          attention
layers.{layer}.attn.in_proj_q.weight     linear_query: (key_head key_dim) hidden        recurrent
layers.{layer}.attn.in_proj_k.weight     linear_key: (key_head key_dim) hidden          recurrent
layers.{layer}.attn.in_proj_v.weight     linear_value: (key_head spread value_dim) hidden    recurrent
layers.{layer}.attn.in_proj_z.weight     linear_gate: (key_head spread value_dim) hidden     recurrent
layers.{layer}.attn.in_proj_a.weight     linear_alpha: (key_head spread) hidden         recurrent
layers.{layer}.attn.in_proj_b.weight     linear_beta: (key_head spread) hidden          recurrent
layers.{layer}.attn.conv_q.weight        linear_query_taps: (key_head key_dim) () tap   recurrent
layers.{layer}.attn.conv_k.weight        linear_key_taps: (key_head key_dim) () tap     recurrent
layers.{layer}.attn.conv_v.weight        linear_value_taps: (key_head spread value_dim) () tap    recurrent
layers.{layer}.attn.A_log                linear_decay: (key_head spread)                recurrent
layers.{layer}.attn.dt_bias              linear_step_bias: (key_head spread)            recurrent
layers.{layer}.attn.norm.weight          linear_norm: value_dim                         recurrent
layers.{layer}.attn.out_proj.weight      linear_output: hidden (key_head spread value_dim)    recurrent
"""
TORCHTITAN = TORCHTITAN_MIXERS + TORCHTITAN_MLP + TORCHTITAN_NORMS + TORCHTITAN_ENDS
"""The native names of torchtitan, which has the language model with its vision tower alone
(`formats/fsdp/whole_models.py`)."""

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
