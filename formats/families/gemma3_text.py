"""Gemma 3 (text): Gemma 2 with norms on query and key, and two rotary bases (transformers models/gemma3, 5.23.0)."""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS_AROUND, QK_NORMS
from formats.families.family import Family

TABLE = ATTENTION + QK_NORMS + GATED_MLP + NORMS_AROUND + HEAD

FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    divided=True,
    table=TABLE,
    requires={"attention_bias": False},
    rope_theta=1000000.0,
    head_dim=256,
    window="sliding_window",
    window_default=4096,
    keys={"activation": "hidden_activation"},
    defaults={
        "activation": "gelu_pytorch_tanh",
        "tied": True,
        "heads": 8,
        "kv_heads": 4,
        "vocab": 262208,
        "max_positions": 131072,
        "norm_epsilon": 1e-6,
    },
    own={
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": None,
        "sliding_window_pattern": None,
        "rope_local_base_freq": 10000.0,
        "use_bidirectional_attention": False,
    },
    only_here="megatron-core has no norms after attention and MLP, and one rotary base for all layers",
)
