"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections (transformers models/phi3/modeling_phi3.py, 5.23.0).

In Phi-4-mini three quarters of a head rotate.
"""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                embedding: vocab hidden
model.layers.{layer}.self_attn.o_proj.weight             output: hidden (group head dim)
model.layers.{layer}.self_attn.qkv_proj.weight           (query: group head half pair | key: group half pair | value: group dim) hidden
model.layers.{layer}.mlp.gate_up_proj.weight             (gate: ffn | up: ffn) hidden
model.layers.{layer}.mlp.down_proj.weight                down: hidden ffn
model.layers.{layer}.input_layernorm.weight              input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight     post_norm: hidden
model.norm.weight                                        final_norm: hidden
lm_head.weight                                           head: vocab hidden          untied
lm_head.weight                                           embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    window="sliding_window",
    keys={"rotary_fraction": "partial_rotary_factor"},
    defaults={"rotary_fraction": 1.0},
    mha=True,
    tokens={"eos_token_id": 32000, "pad_token_id": 32000},
)
