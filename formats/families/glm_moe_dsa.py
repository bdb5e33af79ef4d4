"""GLM-5: DeepSeek-V3.2 whose indexers rotate adjacent elements, and may be shared by layers.

Facts: transformers 5.23.0, models/glm_moe_dsa/modeling_glm_moe_dsa.py and configuration_glm_moe_dsa.py: a layer without
an indexer sees the tokens that the last indexer before it chose; the norms of latents have an epsilon of 1e-6, and the
model's `rms_norm_eps` is 1e-5.
"""

from dataclasses import replace

from formats.families import deepseek_v32

FAMILY = replace(
    deepseek_v32.FAMILY,
    name="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    requires={**deepseek_v32.FAMILY.requires, "indexer_rope_interleave": True},
    keys={**deepseek_v32.FAMILY.keys, "shared_index_layers": "indexer_types"},
    nulls=("indexer_types",),
    defaults={
        **deepseek_v32.FAMILY.defaults,
        "kv_heads": 64,
        "head_dim": 256,
        "query_rank": 2048,
        "nope_dim": 192,
        "router_groups": 1,
        "router_top_groups": 1,
        "index_heads": 32,
    },
)
