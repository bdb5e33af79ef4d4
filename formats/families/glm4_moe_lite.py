"""GLM-4.7-Flash: DeepSeek-V3 whose config lists the dense layers.

Facts: transformers models/glm4_moe_lite/modeling_glm4_moe_lite.py and configuration_glm4_moe_lite.py, 5.23.0:
`head_dim` is another key for the number of elements that rotate; the norms of latents have an epsilon of 1e-6, and the
model's `rms_norm_eps` is 1e-5.
"""

from dataclasses import replace

from formats.families import deepseek_v3

FAMILY = replace(
    deepseek_v3.FAMILY,
    name="glm4_moe_lite",
    native={},
    copied={},
    architecture="Glm4MoeLiteForCausalLM",
    requires={**deepseek_v3.FAMILY.requires, "first_k_dense_replace": 1},
    keys={**deepseek_v3.FAMILY.keys, "rope_dim": "qk_rope_head_dim head_dim", "dense_layers": "mlp_layer_types"},
    defaults={
        **deepseek_v3.FAMILY.defaults,
        "kv_heads": 20,
        "head_dim": 256,
        "query_rank": 768,
        "nope_dim": 192,
        "experts": 64,
        "top_k": 4,
        "expert_ffn": 1536,
        "shared_ffn": 1,
        "dense_layers": 1,
        "router_scale": 1.8,
        "router_groups": 1,
        "router_top_groups": 1,
    },
)
