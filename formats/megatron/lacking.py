"""What megatron-core lacks for models that no table describes: why there is no Megatron layout of them.

Facts: transformers 5.23.0, the configuration_*.py and modeling_*.py of each; megatron-core up to 0.19.2,
transformer/transformer_config.py, and ssm/gated_delta_net.py for linear attention.
"""

from __future__ import annotations

from collections.abc import Mapping

LAYERS = "megatron-core has one number of heads and one size of them for all layers, and this model two"
REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma4", "gemma4_text"),
        f"{LAYERS}; nor has it embeddings for each layer, or keys and values that layers share",
    ),
    **dict.fromkeys(
        ("gemma4_unified", "gemma4_unified_text"), f"{LAYERS}; nor has it keys and values that layers share"
    ),
    "kimi_linear": "megatron-core has no linear attention that forgets channel by channel (KDA)",
    **dict.fromkeys(
        ("minimax_m3_vl", "minimax_m3_vl_text"),
        "megatron-core has no attention to blocks of keys that an indexer chooses",
    ),
    "mimo_v2_flash": f"{LAYERS}; nor has it values that are narrower than keys without latents",
    **dict.fromkeys(("step3p5", "step3p7"), f"{LAYERS}; nor has it a clamp for each layer"),
}
"""Model type: the reason."""
