"""DeepSeek-V3 and R1: the attention of DeepSeek-V2, experts after a sigmoid.

Facts: transformers 5.23.0, models/deepseek_v3/modeling_deepseek_v3.py: the layer after the last, which predicts a
second token, is not loaded of a model with 61 layers.
"""

from dataclasses import replace

from formats.families import deepseek_v2
from formats.families.blocks import HEAD, MIXTURE, NORMS
from formats.families.deepseek_v2 import LATENT_ATTENTION

TABLE = LATENT_ATTENTION + MIXTURE + NORMS + HEAD

FAMILY = replace(
    deepseek_v2.FAMILY,
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    table=TABLE,
    drops=(r"model\.layers\.61\..*",),
    requires={
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    keys={
        **deepseek_v2.FAMILY.keys,
        "experts": "n_routed_experts num_local_experts",
        "router_groups": "n_group",
        "router_top_groups": "topk_group",
    },
    defaults={
        **deepseek_v2.FAMILY.defaults,
        "experts": 256,
        "top_k": 8,
        "expert_ffn": 2048,
        "shared_ffn": 1,
        "dense_layers": 3,
        "router_normalized": True,
        "router_scale": 2.5,
        "router_groups": 8,
        "router_top_groups": 4,
    },
    router="sigmoid",
)
