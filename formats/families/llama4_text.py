"""Llama 4 (text): experts with a shared expert, and layers without rotary embedding (transformers, 5.23.0).

Facts: models/llama4/modeling_llama4.py: `apply_rotary_emb` rotates adjacent elements, so that the order of a head is
`pair half` here; gate and up are the two halves of an expert's columns; the MLP of a layer without experts has a width
of its own.
"""

from formats.families.blocks import HEAD, NORMS, PAIRED_ATTENTION
from formats.families.family import Family

MLP_AND_EXPERTS = """
model.layers.{layer}.feed_forward.gate_proj.weight                  gate: ffn hidden                          dense
model.layers.{layer}.feed_forward.up_proj.weight                    up: ffn hidden                            dense
model.layers.{layer}.feed_forward.down_proj.weight                  down: hidden ffn                          dense
model.layers.{layer}.feed_forward.experts.gate_up_proj              expert hidden (expert_gate: expert_ffn | expert_up: expert_ffn)    sparse
model.layers.{layer}.feed_forward.experts.down_proj                 expert_down: expert expert_ffn hidden     sparse
model.layers.{layer}.feed_forward.router.weight                     router: expert hidden                     sparse
model.layers.{layer}.feed_forward.shared_expert.gate_proj.weight    shared_gate: shared_ffn hidden            sparse
model.layers.{layer}.feed_forward.shared_expert.up_proj.weight      shared_up: shared_ffn hidden              sparse
model.layers.{layer}.feed_forward.shared_expert.down_proj.weight    shared_down: hidden shared_ffn            sparse
"""
TABLE = PAIRED_ATTENTION + MLP_AND_EXPERTS + NORMS + HEAD

FAMILY = Family(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    rope_theta=500000.0,
    head_dim=128,
    keys={
        "ffn": "intermediate_size_mlp",
        "experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn": "intermediate_size",
        "shared_ffn": "intermediate_size",
        "dense_layers": "moe_layers",
    },
    defaults={"experts": 16, "top_k": 1},
    own={
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    only_here="megatron-core has no attention in chunks, and scales no queries by their positions",
    router="sigmoid",
)
