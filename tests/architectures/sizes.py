"""Sizes with which the classes of transformers make tiny models: those that most have, and what single types want."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALL: Mapping[str, int] = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "embedding_size": 64, "word_embed_proj_dim": 64,
    "num_hidden_layers": 3, "n_layer": 3, "n_layers": 3, "num_layers": 3, "depth": 3, "decoder_layers": 3,
    "encoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "moe_intermediate_size": 24, "ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96,
    "d_ff": 96, "vocab_size": 160, "max_position_embeddings": 64, "n_positions": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "out_hidden_size": 64, "image_size": 32, "patch_size": 16, "state_size": 8, "expand": 2, "projection_dim": 64,
    "lm_head_dim": 64, "embed_dim": 64, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32,
    "audio_vocab_size": 160, "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 16,
}  # fmt: skip
"""Sizes, as far as a config has them, that keep a model under a megabyte."""

IMAGE_CODES = {
    "<image>": 5, "<|image token|>": 5, "<|extra_200|>": 6, "IMGIMGBPZ": 10, "IMGIMGBPAZ": 11
}  # fmt: skip
"""A vocabulary in which some tokens are codes of parts of images."""
CODEBOOK = {
    "num_embeddings": 64, "latent_channels": 8, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1
}  # fmt: skip
TEXT = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
TOWER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 16,
}  # fmt: skip
TOKENS = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
ROTARIES = {"full_attention": ROTARY, "sliding_attention": ROTARY}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
SHARED_CACHE = TEXT | {
    "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
}  # fmt: skip
DOTS = TOKENS | {
    "num_key_value_heads": 4, "head_dim": 32, "index_head_dim": 32, "index_n_heads": 4,
    "shared_experts_intermediate_size": 24,
}  # fmt: skip
STEP = TEXT | DENSE_FIRST | {
    "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "moe_intermediate_size": 24, "share_expert_dim": 24, "num_sliding_attention_heads": 6,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "swiglu_limits": [0.0, 0.2, 0.3],
}  # fmt: skip
"""A text with heads and clamps of single layers, whose class assumes no window."""
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "blt": {
        "encoder_hash_byte_group_vocab": 100, "encoder_hash_byte_group_size": [3, 4],
        "encoder_config": {"hidden_size_global": 64}, "decoder_config": {"hidden_size_global": 64},
    },
    "chameleon": {"vocabulary_map": IMAGE_CODES, "vq_config": CODEBOOK},
    "cohere_compass": {
        "text_config": {"rope_parameters": ROTARIES}, "vision_config": {"deepstack_visual_indexes": [0, 1]}
    },
    "cohere_compass_text": {"rope_parameters": ROTARIES},
    "cosmos3_edge": {
        "text_config": {"rope_parameters": ROTARY | {"mrope_section": [4, 2, 2]}}, "projector_hidden_size": 96
    },
    "deepseek_ocr2": {
        "text_config": DENSE_FIRST,
        "vision_config": {
            "sam_config": {
                "mlp_dim": 96, "output_channels": 32, "downsample_channels": [48, 64], "global_attn_indexes": [1]
            }
        },
    },
    "diffusion_gemma": {
        "text_config": {
            "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24, "layer_types": WINDOWS,
            "num_kv_shared_layers": 0,
        },
        "vision_config": {"position_embedding_size": 64},
    },
    "dots3_note": {
        "text_config": DOTS, "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 8},
    },
    "dots3_note_text": DOTS,
    "emu3": {
        "vocabulary_map": IMAGE_CODES, "text_config": TOKENS,
        "vq_config": {
            "codebook_size": 64, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1,
            "attn_resolutions": [1],
        },
    },
    "ernie4_5_vl_moe": {
        "text_config": DENSE_FIRST | {
            "moe_intermediate_size": [24, 16], "moe_k": 2, "moe_num_experts": 4,
            "rope_parameters": ROTARY | {"mrope_section": [2, 2, 4]},
        },
    },
    "florence2": {
        "vision_config": {
            "embed_dim": [16, 16, 32, 32], "num_heads": [2, 2, 4, 4], "num_groups": [2, 2, 4, 4], "depths": [1, 1, 1, 1]
        }
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_assistant": {
        "text_config": SHARED_CACHE, "backbone_hidden_size": 64, "num_centroids": 16, "centroid_intermediate_top_k": 2
    },
    "glm5_next": {
        "text_config": {
            "qk_rope_head_dim": 0, "num_key_value_heads": 4, "index_head_dim": 32, "index_n_heads": 4,
            "linear_head_dim": 16, "linear_num_heads": 4,
        },
        "vision_config": {"projection_intermediate_size": 96},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "1/2", "spatial_target_layers": [0, 1],
        "qformer_config": {"encoder_hidden_size": 64},
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "inkling2": {
        "vision_config": {"text_hidden_size": 64, "projection_hidden_dim": 96},
        "text_config": {
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "unpadded_vocab_size": 150,
            "rel_extent": 32,
        },
    },
    "janus": {"vq_config": CODEBOOK | {"image_token_embed_dim": 64, "num_patches": 2}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [2, 1], "text_hidden_size": 64},
        "vision_config": {"num_position_embeddings": 16, "image_size": [64, 64]},
        "text_config": {"rope_scaling_layers": [0, 1, 2]},
    },
    "muse_spark": {
        "audio_config": {"num_hidden_layers": 2, "patch_sizes": [4, 4], "hidden_sizes": [32, 64], "depths": [1, 1]},
        "text_config": {"layer_rope_theta": [10000.0, 0, 10000.0], "moe_hidden_size": 64}, "projector_hidden_size": 96,
    },
    "nemotron_h_omni": {
        "text_config": {
            "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
            "moe_shared_expert_intermediate_size": 32, "layers_block_type": ["mamba", "moe", "attention"],
        },
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 64},
        "projector_hidden_size": 96, "vision_hidden_size": 64,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "step3p7": {"text_config": STEP},
    "t5gemma2": {
        "encoder": {"text_config": TEXT, "vision_config": TOWER, "mm_tokens_per_image": 4}, "decoder": TEXT,
        "image_token_index": 150, "eoi_token_index": 151,
    },
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit", **TOWER},
        "decoder": {"model_type": "gpt2", "add_cross_attention": True, "vocab_size": 160, "n_embd": 64, "n_layer": 2,
                    "n_head": 4, "n_positions": 64},
    },
    "xlm": {"emb_dim": 64},
    "xlnet": {"d_head": 16},
    "zamba": {
        "num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "attn_layer_period": 2,
        "attn_layer_offset": 1, "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 6, "layer_types": ["mamba", "hybrid"] * 3, "hybrid_layer_ids": [1, 3, 5],
        "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4, "num_query_groups": 4,
        "mamba_headdim": 16, "kv_channels": 16, "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Settings that the class of a type wants beside the small sizes; those of an inner config (`…_config`) change that."""


def with_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with changes, in its inner configs too."""
    inner = {
        key: with_changes(config.get(key) or {}, value) for key, value in changes.items() if key.endswith("_config")
    }
    return {**config, **changes, **inner}
