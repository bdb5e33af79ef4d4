"""Ministral 3: Mistral with queries scaled by their position, and YaRN (transformers models/ministral3, 5.23.0).

`llama_4_scaling_beta` in the rotary settings determines this scaling; without it the model cannot be computed.
"""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS
from formats.families.family import Family

FAMILY = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    table=ATTENTION + GATED_MLP + NORMS + HEAD,
    requires={"hidden_act": "silu"},
    rope_theta=1000000.0,
    head_dim=128,
    window="sliding_window",
    defaults={
        "kv_heads": 8,
        "rope_scaling": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    only_here="megatron-core does not scale queries by their position",
    tokens={"pad_token_id": 11},
)
