"""Gemma 2: four norms a layer, soft caps, every other layer with a window (transformers models/gemma2, 5.23.0).

The weights of its norms are stored less one, and stay so: no format but Hugging Face's and FSDP's holds them.
"""

from formats.families.family import Family

TABLE = """
model.embed_tokens.weight                                embedding: vocab hidden
model.layers.{layer}.self_attn.q_proj.weight             query: (group head half pair) hidden
model.layers.{layer}.self_attn.k_proj.weight             key: (group half pair) hidden
model.layers.{layer}.self_attn.v_proj.weight             value: (group dim) hidden
model.layers.{layer}.self_attn.o_proj.weight             output: hidden (group head dim)
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
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    table=TABLE,
    requires={"attention_bias": False},
    head_dim=256,
    window="sliding_window",
    window_default=4096,
    keys={"activation": "hidden_activation"},
    defaults={"activation": "gelu_pytorch_tanh", "tied": True},
    own={
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "layer_types": None,
        "use_bidirectional_attention": None,
    },
    only_here="megatron-core has no norms behind attention and MLP, and caps no logits",
)
