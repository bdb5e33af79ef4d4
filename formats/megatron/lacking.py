"""Why multimodal models have no Megatron layout: the features that megatron-core lacks.

Facts: transformers 5.23.0, the configuration_*.py and modeling_*.py of each; megatron-core up to 0.19.2,
transformer/transformer_config.py. The reasons for a language model alone are in the file of its family.
"""

from __future__ import annotations

from collections.abc import Mapping

TOWER = "megatron-core has no tower of images"
LAYERS = "megatron-core has one number of heads and one size of them for all layers, and this model two"
STEP = (
    "megatron-core has one number of heads, one rotary base, one rotated part of a head and one clamp for all layers, "
    "and this model several; nor has it a gate of whole heads, or a clamp behind the activation"
)
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("gemma3", "glm4v_moe", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), TOWER),
    "gemma4": f"{LAYERS}; nor has it embeddings for each layer, or keys and values that layers share",
    "gemma4_unified": f"{LAYERS}; nor has it keys and values that layers share",
    "minimax_m3_vl": "megatron-core has no attention to blocks of keys that an indexer chooses",
    **dict.fromkeys(("step3p5", "step3p7"), STEP),
}
"""The reason by model type."""
