"""Gemma 3 (text): Gemma 2 with norms on query and key, and two rotary bases (transformers models/gemma3, 5.23.0)."""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight             query: (group head half pair) hidden
model.layers.{layer}.self_attn.k_proj.weight             key: (group half pair) hidden
model.layers.{layer}.self_attn.v_proj.weight             value: (group dim) hidden
model.layers.{layer}.self_attn.o_proj.weight             output: hidden (group head dim)
model.layers.{layer}.self_attn.q_norm.weight             query_norm: (half pair)
model.layers.{layer}.self_attn.k_norm.weight             key_norm: (half pair)
model.layers.{layer}.mlp.gate_proj.weight                gate: ffn hidden
model.layers.{layer}.mlp.up_proj.weight                  up: ffn hidden
model.layers.{layer}.mlp.down_proj.weight                down: hidden ffn
model.layers.{layer}.input_layernorm.weight              input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight     output_norm: hidden
model.layers.{layer}.pre_feedforward_layernorm.weight    post_norm: hidden
model.layers.{layer}.post_feedforward_layernorm.weight   down_norm: hidden
model.norm.weight                                        final_norm: hidden
lm_head.weight                                           head: vocab hidden          untied
lm_head.weight                                           embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    table=TABLE,
    requires={"attention_bias": False},
    rope_theta=1000000.0,
    head_dim=256,
    window="sliding_window",
    window_default=4096,
    keys={"activation": "hidden_activation"},
    defaults={"activation": "gelu_pytorch_tanh", "tied": True},
    own={
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": None,
        "sliding_window_pattern": None,
        "rope_local_base_freq": 10000.0,
        "use_bidirectional_attention": False,
    },
    only_here="megatron-core has no norms behind attention and MLP, and one rotary base for all layers",
)
