"""MiMo-V2-Flash: most layers have a window, sinks and twice as many key/value heads; experts as in dots.llm1.

Facts: transformers 5.23.0, models/mimo_v2_flash/modeling_mimo_v2_flash.py, configuration_mimo_v2_flash.py and
conversion_mapping.py: values are narrower than keys, and scaled; the rotary settings of each kind of layers are in one
map; `first_k_dense_replace` is ignored.
"""

from formats.families.blocks import (
    BIASED_ROUTER,
    DENSE_MLP,
    EMBEDDING,
    EXPERT_KEYS,
    EXPERTS,
    HEAD,
    NORMS,
    OPTIONAL_QKVO,
    ROUTER_DEFAULTS,
)
from formats.families.family import Family

SINKS = """
model.layers.{layer}.self_attn.attention_sink_bias    sinks: (group head)    windowed separate
model.layers.{layer}.self_attn.sinks                  sinks: (group head)    windowed fused
"""
TABLE = EMBEDDING + SINKS + OPTIONAL_QKVO + DENSE_MLP + EXPERTS + BIASED_ROUTER + NORMS + HEAD

FAMILY = Family(
    name="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "first_k_dense_replace": 1},
    rope_theta=None,
    head_dim=192,
    window="sliding_window",
    window_default=129,
    nulls=("routed_scaling_factor", "attention_value_scale", "sliding_window_size"),
    keys={
        "value_head_dim": "v_head_dim",
        "full_layers": "layer_types",
        "window_kv_heads": "num_key_value_heads",
        **EXPERT_KEYS,
        "dense_layers": "mlp_layer_types",
    },
    defaults={
        "layers": 48,
        "hidden": 4096,
        "heads": 64,
        "kv_heads": 4,
        "ffn": 16384,
        "vocab": 152576,
        "max_positions": 131072,
        "norm_epsilon": 1e-5,
        "value_head_dim": 128,
        "full_layers": {"front": 1, "step": 6},
        "experts": 256,
        "top_k": 8,
        "expert_ffn": 2048,
        "dense_layers": 1,
        **ROUTER_DEFAULTS,
    },
    biases={"attention_bias": ("qkv_bias", False)},
    own={"attention_value_scale": 0.707, "sliding_window_size": None, "rope_parameters": None},
    only_here="megatron-core has one number of key/value heads for all layers, and this model two; nor has it values that "
    "are narrower than keys without latents",
    router="sigmoid",
)
