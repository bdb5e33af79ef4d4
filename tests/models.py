"""Tiny models that transformers itself builds and saves, with weights in which every mistake shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tests.opensci  # noqa: F401  # a class that transformers lacks is registered
from formats.families import find_family
from formats.families.family import Family

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": True,
    "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.4,
}  # fmt: skip
LATENT_YARN = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
"""That of latents in stock Megatron, which has no options for these three."""
PLAIN_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
    "original_max_position_embeddings": 32,
}  # fmt: skip
BY_KIND = {"full_attention": PLAIN_YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}
GROWING = {**PLAIN_YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
PARTIAL = {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.75}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Where the default of a family lies beyond our vocabulary."""
TIED = {"tie_word_embeddings": True, **TOKENS}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, **TOKENS}
DOTS = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, **TOKENS,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 48,
    "n_shared_experts": 2, "n_routed_experts": 8, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "num_key_value_heads": 8, **TOKENS,
}  # fmt: skip
YOUTU = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 8,
    **TOKENS, "pad_token_id": None,
}  # fmt: skip
"""Its class zeroes the row of a padding token whenever it loads a model."""
DSA = {
    **LATENT, "q_lora_rank": 24, "index_n_heads": 4, "index_head_dim": 12, "index_topk": 5, "rms_norm_eps": 1e-6,
}  # fmt: skip
BIASED = {"attention_bias": True, "mlp_bias": True}
ALL = {"first_k_dense_replace": 0}
LITE = {"mlp_layer_types": ["dense", "sparse"] * 2, "rms_norm_eps": 1e-6}
GLM = {"n_routed_experts": 4, "attention_bias": True, "head_dim": 16, **DOTS}
HUNYUAN = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_shared_experts": 2, "head_dim": 16,
    "router_scaling_factor": 2.5, **TOKENS,
}  # fmt: skip
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "tie_word_embeddings": False, **TOKENS}
GROUPS = {"n_group": 4, "topk_group": 2}
LIMITED = {"topk_method": "group_limited_greedy", "num_experts_per_tok": 2, **GROUPS}
OSS = {"num_experts_per_tok": 2, "sliding_window": 8}
MINIMAX = {"head_dim": 16, "rotary_dim": 8, "num_experts_per_tok": 2, **TOKENS}
LLAMA4 = {"num_local_experts": 4, "intermediate_size_mlp": 80, "no_rope_layers": [1, 1, 0, 1], **TOKENS}
DELTA = {
    "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 4,
    "linear_value_head_dim": 6, **TOKENS,
}  # fmt: skip
MIXED = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 4, "mamba_d_state": 6, **TOKENS}
NEMOTRON = {
    "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 4, "ssm_state_size": 6, "chunk_size": 16,
    "n_routed_experts": 4, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 40, **TOKENS,
}  # fmt: skip
MAMBA = {"num_heads": 8, "head_dim": 16, "n_groups": 4, "state_size": 6, "chunk_size": 16, **TOKENS}
STATE, FULL = "linear_attention", "full_attention"
FOUR = {"num_experts_per_tok": 4}
FIRST = ["full_attention", *["sliding_attention"] * 3]
ALTERNATING = ["sliding_attention", "full_attention"] * 2
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "layer_types": ALTERNATING}
KIMI = {
    "linear_num_heads": 4, "linear_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "kv_lora_rank": 16,
    "moe_intermediate_size": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 8, **TOKENS,
}  # fmt: skip
M3 = {
    "head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 80,
    "shared_intermediate_size": 40, "index_head_dim": 12, "index_block_size": 4, "index_topk_blocks": 2, **TOKENS,
}  # fmt: skip
MIMO = {
    "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "sliding_window": 8, **TOKENS,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 8},
    "llama-mqa": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-biased": {"model_type": "llama", **BIASED},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": 8, "head_dim": 16},
    "mistral-tied": {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "opensci": {"model_type": "opensci", "head_dim": 16, "attention_bias": True},
    "opensci-tied": {"model_type": "opensci", "head_dim": 8, "attention_bias": True, **TIED},
    "qwen3-biased": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "phi3": {"model_type": "phi3", "sliding_window": 8, **TOKENS, "rope_parameters": PARTIAL},
    "phi3-tied": {"model_type": "phi3", "tie_word_embeddings": True, **TOKENS},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 8, "tie_word_embeddings": False, **TOKENS},
    "starcoder2-tied": {"model_type": "starcoder2", "hidden_act": "gelu", **TOKENS},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "granite-tied": {"model_type": "granite", "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2", **TOKENS},
    "olmo2-tied": {"model_type": "olmo2", "tie_word_embeddings": True, **TOKENS},
    "olmo3": {"model_type": "olmo3", "sliding_window": 8, "rope_parameters": BY_KIND, **TOKENS},
    "olmo3-tied": {"model_type": "olmo3", "sliding_window": 8, "layer_types": ALTERNATING, **TIED},
    "apertus": {"model_type": "apertus"},
    "apertus-tied": {"model_type": "apertus", "attention_bias": True, "rope_parameters": PLAIN_YARN, **TIED},
    "ministral3": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": GROWING, **TOKENS},
    "ministral3-tied": {"model_type": "ministral3", "head_dim": 8, "sliding_window": 8, **TIED},
    "cohere2": {"model_type": "cohere2", "sliding_window": 8, "logit_scale": 0.25, **TOKENS},
    "cohere2-untied": {
        "model_type": "cohere2",
        "sliding_window": 8,
        "layer_types": ALTERNATING,
        "tie_word_embeddings": False,
        **TOKENS,
    },
    "exaone4": {"model_type": "exaone4", "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2},
    "exaone4-tied": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 4, **TIED},
    "glm4": {"model_type": "glm4", "head_dim": 16, **TOKENS},
    "glm4-tied": {"model_type": "glm4", "head_dim": 8, "attention_bias": False, "rope_parameters": PARTIAL, **TIED},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", "head_dim": 16, "rope_parameters": ALPHA},
    "hunyuan_v1_dense-tied": {"model_type": "hunyuan_v1_dense", "head_dim": 8, "attention_bias": True, **TIED},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 32},
    "gemma2-untied": {
        "model_type": "gemma2",
        "head_dim": 8,
        "attn_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "layer_types": ALTERNATING},
    "gemma3-untied": {"model_type": "gemma3_text", "head_dim": 16, "tie_word_embeddings": False},
    "gemma4_text": {
        "model_type": "gemma4_text",
        "vocab_size_per_layer_input": 211,
        "hidden_size_per_layer_input": 12,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        **GEMMA4,
    },
    "gemma4_text-untied": {
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": False,
        **GEMMA4,
    },
    "gemma4_text_moe": {
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        **GEMMA4,
    },
    "gemma4_text_moe-untied": {
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 220,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        "num_kv_shared_layers": 1,
        "tie_word_embeddings": False,
        **GEMMA4,
    },
    "gemma4_unified_text": {"model_type": "gemma4_unified_text", "num_kv_shared_layers": 2, **GEMMA4},
    "gemma4_unified_text-untied": {
        "model_type": "gemma4_unified_text",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "tie_word_embeddings": False,
        **GEMMA4,
    },
    "kimi_linear": {"model_type": "kimi_linear", "layer_types": [STATE, FULL] * 2, **KIMI},
    "kimi_linear-queries": {
        "model_type": "kimi_linear",
        "q_lora_rank": 24,
        "mlp_layer_types": ["sparse"] * 4,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "head_dim": 10,
            "num_heads": 6,
            "short_conv_kernel_size": 3,
        },
        **KIMI,
    },
    "minimax_m3_vl_text": {
        "model_type": "minimax_m3_vl_text",
        "layer_types": [FULL, "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        **M3,
    },
    "minimax_m3_vl_text-tied": {"model_type": "minimax_m3_vl_text", "moe_layer_freq": [0, 0, 1, 1], **M3, **TIED},
    "mimo_v2_flash": {"model_type": "mimo_v2_flash", **MIMO},
    "mimo_v2_flash-tied": {
        "model_type": "mimo_v2_flash",
        "layer_types": ALTERNATING,
        "attention_bias": True,
        **MIMO,
        **TIED,
    },
    "gpt_neox": {"model_type": "gpt_neox", "use_parallel_residual": True},
    "gpt_neox-tied": {"model_type": "gpt_neox", "use_parallel_residual": False, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_inner": 96, **TOKENS},
    "gpt2-untied": {"model_type": "gpt2", "activation_function": "gelu", "tie_word_embeddings": False, **TOKENS},
    "bloom": {"model_type": "bloom"},
    "bloom-untied": {"model_type": "bloom", "tie_word_embeddings": False},
    "falcon": {"model_type": "falcon", "ffn_hidden_size": 96, **TOKENS},
    "falcon-untied": {"model_type": "falcon", "tie_word_embeddings": False, **TOKENS},
    "falcon-40b": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 4, **TOKENS},
    "falcon-40b-untied": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "tie_word_embeddings": False,
        **TOKENS,
    },
    "falcon-11b": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
        "num_kv_heads": 4,
        **TOKENS,
    },
    "falcon-11b-untied": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
        "tie_word_embeddings": False,
        **TOKENS,
    },
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": PLAIN_YARN},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
    "seed_oss-tied": {"model_type": "seed_oss", "head_dim": 8, "attention_out_bias": True, **BIASED, **TIED},
    "seed_oss-plain": {"model_type": "seed_oss", "head_dim": 16, "attention_bias": False},
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": False, **TOKENS},
    "smollm3-tied": {"model_type": "smollm3", "no_rope_layers": [0, 1, 1, 0], **BIASED, **TOKENS},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16, "tie_word_embeddings": False},
    "ernie4_5-tied": {"model_type": "ernie4_5", "head_dim": 8, "rope_parameters": PLAIN_YARN},
    "helium": {"model_type": "helium", "head_dim": 8},
    "helium-tied": {"model_type": "helium", "head_dim": 8, "rope_parameters": PLAIN_YARN, **TIED},
    "helium-qkv": {"model_type": "helium", "head_dim": 8, "num_key_value_heads": 8, "attention_bias": True},
    "helium-biased": {"model_type": "helium", "head_dim": 8, **BIASED},
    "arcee": {"model_type": "arcee", "head_dim": 16, **TOKENS},
    "arcee-tied": {"model_type": "arcee", "hidden_act": "gelu", "tie_word_embeddings": True, **TOKENS},
    "nemotron": {"model_type": "nemotron", "head_dim": 16},
    "nemotron-tied": {"model_type": "nemotron", "tie_word_embeddings": True, "rope_parameters": PARTIAL},
    "jais2": {"model_type": "jais2", "head_dim": 16, **TOKENS},
    "jais2-tied": {"model_type": "jais2", "hidden_act": "gelu", **TIED},
    "ministral": {"model_type": "ministral", "head_dim": 16, "sliding_window": 8, "layer_types": ALTERNATING},
    "ministral-tied": {"model_type": "ministral", "head_dim": 8, "sliding_window": 8, "layer_types": FIRST, **TIED},
    "cwm": {"model_type": "cwm", "head_dim": 16, "sliding_window": 8, "rope_parameters": LLAMA3, **TOKENS},
    "cwm-tied": {"model_type": "cwm", "head_dim": 8, "sliding_window": 8, "rope_parameters": PLAIN_YARN, **TIED},
    "internlm3": {"model_type": "internlm3", "head_dim": 8},
    "internlm3-tied": {"model_type": "internlm3", "head_dim": 8, "rope_parameters": LLAMA3, **TIED},
    "iquestcoder": {"model_type": "iquestcoder", "head_dim": 8},
    "iquestcoder-tied": {"model_type": "iquestcoder", "head_dim": 8, **BIASED, **TIED},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, **TOKENS},
    "mixtral-tied": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 8, **TIED},
    "qwen2_moe": {"model_type": "qwen2_moe", "num_experts": 4, "norm_topk_prob": True, **MOE},
    "qwen2_moe-tied": {"model_type": "qwen2_moe", "num_experts": 4, "decoder_sparse_step": 2, **MOE, **TIED},
    "qwen3_next": {"model_type": "qwen3_next", "num_experts": 4, **MOE, **DELTA},
    "qwen3_next-tied": {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "mlp_only_layers": [0],
        "full_attention_interval": 2,
        "norm_topk_prob": False,
        **MOE,
        **DELTA,
        **TIED,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **DELTA},
    "qwen3_5_text-tied": {"model_type": "qwen3_5_text", "layer_types": MIXED, **DELTA, **TIED},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", "num_experts": 4, **MOE, **DELTA},
    "qwen3_5_moe_text-tied": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "layer_types": MIXED,
        **MOE,
        **DELTA,
        **TIED,
    },
    "nemotron_h": {"model_type": "nemotron_h", "layers_block_type": [STATE, "mlp", FULL, "moe"], **NEMOTRON},
    "nemotron_h-latent": {
        "model_type": "nemotron_h",
        "layers_block_type": ["moe", FULL, STATE, "mlp"],
        "moe_latent_size": 20,
        **NEMOTRON,
    },
    "nemotron_h_dense": {"model_type": "nemotron_h", "layers_block_type": [STATE, "mlp", FULL, "mlp"], **NEMOTRON},
    "bamba": {"model_type": "bamba", "attn_layer_indices": [1, 2], **STATES},
    "bamba-tied": {"model_type": "bamba", "attn_layer_indices": [3], **STATES, **TIED},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": [STATE, FULL, STATE, STATE],
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
        "logits_scaling": 8.0,
        **STATES,
    },
    "granite_hybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": [FULL, STATE, STATE, FULL],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        **STATES,
    },
    "granitemoehybrid-tied": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
        **STATES,
        **TIED,
    },
    "falcon_h1": {"model_type": "falcon_h1", "mamba_d_ssm": 96, "key_multiplier": 0.5, **STATES, "mamba_d_head": 12},
    "falcon_h1-tied": {"model_type": "falcon_h1", "mamba_d_ssm": 128, "ssm_in_multiplier": 2.0, **STATES, **TIED},
    "falcon_h1_normed": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        **STATES,
    },
    "mamba2": {"model_type": "mamba2", **MAMBA},
    "mamba2-tied": {"model_type": "mamba2", **MAMBA, **TIED},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", FULL, "conv", "conv"], "block_multiple_of": 16},
    "lfm2-untied": {
        "model_type": "lfm2",
        "full_attn_idxs": [0, 2],
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "head_dim": 16, "norm_topk_prob": True, **MOE},
    "qwen3_moe-tied": {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0, 2], **MOE, **TIED},
    "dots1": {"model_type": "dots1", "n_routed_experts": 4, "first_k_dense_replace": 1, **DOTS},
    "dots1-tied": {"model_type": "dots1", "n_routed_experts": 8, "n_group": 4, "topk_group": 2, **DOTS, **FOUR, **TIED},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 16, "rope_parameters": YARN, **OSS},
    "gpt_oss-tied": {"model_type": "gpt_oss", "num_local_experts": 4, "swiglu_limit": 0.3, **OSS, **TIED},
    "deepseek_v2": {"model_type": "deepseek_v2", "q_lora_rank": None, "rope_parameters": LATENT_YARN, **LATENT},
    "deepseek_v2-tied": {"model_type": "deepseek_v2", "q_lora_rank": 24, **LATENT, **TIED, **ALL},
    "deepseek_v2-grouped": {"model_type": "deepseek_v2", "q_lora_rank": 24, **LATENT, **LIMITED},
    "deepseek_v3": {"model_type": "deepseek_v3", "q_lora_rank": 24, "rope_parameters": LATENT_YARN, **GROUPS, **LATENT},
    "deepseek_v3-tied": {"model_type": "deepseek_v3", "q_lora_rank": None, **GROUPS, **LATENT, **TIED},
    "deepseek_v32": {"model_type": "deepseek_v32", "rope_parameters": LATENT_YARN, **GROUPS, **DSA},
    "deepseek_v32-tied": {"model_type": "deepseek_v32", **GROUPS, **DSA, **TIED},
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"] * 2, **DSA},
    "glm_moe_dsa-tied": {"model_type": "glm_moe_dsa", "mlp_layer_types": ["sparse"] * 4, **DSA, **TIED},
    "glm4_moe": {"model_type": "glm4_moe", "use_qk_norm": True, **GLM},
    "glm4_moe-plain": {"model_type": "glm4_moe", "use_qk_norm": True, **GLM, "attention_bias": False},
    "glm4_moe_air": {"model_type": "glm4_moe", "first_k_dense_replace": 2, **GLM},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", "q_lora_rank": 24, **LITE, **LATENT},
    "glm4_moe_lite-tied": {"model_type": "glm4_moe_lite", "q_lora_rank": None, "rms_norm_eps": 1e-6, **LATENT, **TIED},
    "youtu": {"model_type": "youtu", "q_lora_rank": 24, "tie_word_embeddings": False, **YOUTU},
    "youtu-tied": {"model_type": "youtu", "q_lora_rank": None, "rope_parameters": LATENT_YARN, **YOUTU},
    "solar_open": {"model_type": "solar_open", "n_routed_experts": 4, "rope_parameters": PLAIN_YARN, **DOTS},
    "hy_v3": {"model_type": "hy_v3", **HUNYUAN},
    "ernie4_5_moe": {"model_type": "ernie4_5_moe", **ERNIE},
    "ernie4_5_moe_300b": {"model_type": "ernie4_5_moe", "moe_num_shared_experts": 0, "moe_layer_interval": 2, **ERNIE},
    "minimax_m2": {"model_type": "minimax_m2", "num_local_experts": 4, **MINIMAX},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "clip_qkv": 0.5, "num_experts_per_tok": 2, **TOKENS},
    "granitemoe": {"model_type": "granitemoe", "num_local_experts": 4, "logits_scaling": 8.0, **TOKENS},
    "llama4_text": {"model_type": "llama4_text", "interleave_moe_layer_step": 2, "head_dim": 16, **LLAMA4},
    "llama4_text-tied": {"model_type": "llama4_text", "moe_layers": [0, 1], "head_dim": 8, **LLAMA4, **TIED},
}
"""Every family, tied and untied, with MHA, GQA and MQA, head_dim other than hidden / heads, llama3 and yarn scaling."""

UNKNOWN = {
    "gpt_neox": ("num_key_value_heads",),
    "gpt2": ("num_key_value_heads", "intermediate_size"),
    "bloom": ("num_key_value_heads", "intermediate_size"),
    "falcon": ("num_key_value_heads", "intermediate_size"),
    "qwen3_5_moe_text": ("intermediate_size",),
    "nemotron_h": ("num_hidden_layers",),
    "mamba2": ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"),
}
"""Model type: what its config calls otherwise, or does not have."""

HARMLESS = {
    "attention_dropout", "attn_pdrop", "classifier_dropout", "embd_pdrop", "embedding_dropout", "hidden_dropout",
    "resid_pdrop", "residual_dropout", "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "is_decoder", "reorder_and_upcast_attn", "pretraining_tp", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "_sliding_window_pattern", "max_window_layers",
    "sliding_window", "original_max_position_embeddings", "num_kv_heads", "num_ln_in_parallel_attn",
    "router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "shared_expert_intermediate_size",
    "qk_head_dim", "num_nextn_predict_layers", "n_group", "topk_group",
    "enable_moe_fp32_combine", "eod_token_id", "slow_but_exact", "mamba_chunk_size", "chunk_size", "num_logits_to_keep",
    "residual_in_fp32", "time_step_floor", "time_step_max",
    "time_step_rank", "z_loss_coefficient", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
    "n_shared_experts", "expand", "use_mamba_kernels", "mtp_layers_block_type", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
    "embedding_initializer_range",
    "routed_scaling_factor", "num_experts", "top_k_experts", "rotary_dim",
}  # fmt: skip
"""Keys of transformers 5.23.0 that no table knows. They are of training, generation or precision, or of what the family
has switched off: the window of Qwen, the longrope of Phi-3, the groups and norms of another Falcon, what Qwen3-MoE does
not share, the experts of a Nemotron-H without any, and of its state spaces what only a kernel or a first step minds; of
DeepSeek a sum of two others, the layer that transformers drops, and V2's groups, as a greedy router has none; the
experts of a Gemma 4 without any; of MiniMax-M3 what its class replaces or does not read."""

HARMLESS_HERE = {
    "falcon_40b": {"multi_query"},
    "falcon_11b": {"multi_query"},
    "mamba2": {"time_step_min"},
    "minimax_m3_vl_text": {"hidden_act"},
    "nemotron_h": {"mamba_proj_bias", "norm_topk_prob", "rescale_prenorm_residual", "time_step_limit"},
    "nemotron_h_dense": {"mamba_proj_bias", "norm_topk_prob", "rescale_prenorm_residual", "time_step_limit"},
}
"""Family: further ones, which other families require to have one value."""


WITHOUT_TABLE = next(kind for kind in ("glm", "stablelm", "olmo") if not find_family({"model_type": kind}))
"""A model type that no table describes yet: some tests need one."""


def variants_slow(names: Any) -> list[Any]:
    """Names for `parametrize`: the variants of a family, such as `llama-tied`, are slow."""
    import pytest

    return [pytest.param(name, marks=pytest.mark.slow if "-" in name else ()) for name in names]


def settings_of(name: str, **changes: Any) -> dict[str, Any]:
    """What `AutoConfig.for_model` makes a tiny model of."""
    settings = SMALL | MODELS[name]
    for key in UNKNOWN.get(settings["model_type"], ()):
        settings.pop(key)
    return settings | changes


def family_of(name: str) -> Family:
    """The family of a tiny model."""
    family = find_family(settings_of(name))
    assert family is not None, f"{name} is of no family"
    return family


def _has(name: str, condition: str) -> bool:
    return any(condition in rule.conditions for rule in family_of(name).tensors)


NOT_IN_MEGATRON = ("qwen3-biased", "helium-biased", "gpt_neox")
"""Those that Megatron cannot hold, of families that it can."""
IN_MEGATRON = [name for name in MODELS if not family_of(name).only_here and name not in NOT_IN_MEGATRON]
"""Those with a layout of Megatron."""
LINEAR = [name for name in IN_MEGATRON if _has(name, "recurrent") or _has(name, "state")]
"""Those with linear attention or state spaces, of which Megatron has no local layers."""
INDEXED = [name for name in IN_MEGATRON if _has(name, "indexing")]
"""Those with sparse attention, which Megatron has here since 0.19: judged by stock alone (`test_stock.py`)."""
EXPERTS = [name for name in IN_MEGATRON if _has(name, "sparse")]
"""Mixtures of experts in Megatron."""
FUSED_HERE = [name for name in MODELS if name not in IN_MEGATRON and _has(name, "separate")]
"""Others, of which transformers fuses what the Hub has apart."""
RENAMED = (*EXPERTS, *FUSED_HERE, "gpt_neox", "gpt_neox-tied", "nemotron_h_dense", "granite_hybrid")
"""Those of which transformers renames tensors as it loads and saves them, and sorts them by that."""
FEW = (
    "llama", "llama-mqa", "llama-biased", "qwen2-tied", "gpt2", "qwen3_5_text-tied",
    "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next-tied", "nemotron_h", "nemotron_h-latent",
)  # fmt: skip
"""Models that together use every line of Megatron's tables (`test_coverage.py` looks): what holds of a line, whosever
tensors it places, is shown with them."""
DTYPES = ("bfloat16", "float32", "float16")
IN_EVERY_TYPE = ("llama", "qwen2-tied", "gpt2", "mixtral", "gpt_neox")
"""The models that go through a round trip in all types; the others in bfloat16, for a type is only its width."""


def build(folder: Path, name: str, dtype: str = "float32", shard: str = "50GB", **changes: Any) -> Path:
    """Save a tiny model with transformers, and small files that stand for others."""
    save(folder, name, dtype, shard, **changes)
    (folder / "tokenizer.model").write_bytes(b"stands for a tokenizer: carried, never read")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def save(folder: Path, name: str, dtype: str = "float32", shard: str = "50GB", **changes: Any) -> None:
    """Save a tiny model with transformers: norms in 0.5..1.5, matrices and biases N(0, 0.08)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = settings_of(name, **changes)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or ".ln_" in parameter_name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.08, generator=generator)
    model.to(getattr(torch, dtype))
    exact = tuple(model._keep_in_fp32_modules_strict or ())  # as in the models of the Hub
    for kept_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(part in kept_name for part in exact):
            tensor.data = torch.empty(tensor.shape).normal_(0, 0.3, generator=generator)
        elif "correction_bias" in kept_name:
            tensor.data.normal_(0, 0.3, generator=generator)
    model.save_pretrained(folder, max_shard_size=shard)
    if settings_of(name)["model_type"] == "kimi_linear":
        _as_on_the_hub(folder, model)


def _as_on_the_hub(folder: Path, model: Any) -> None:
    """The dense layers of a Kimi Linear under the Hub's names, not under those that transformers 5.23.0 saves."""
    from safetensors.torch import load_file, save_file

    known = {key for key, _ in model.named_parameters()}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        names = {key: key.replace(".block_sparse_moe.", ".mlp.") for key in tensors}
        renamed = {
            names[key] if names[key] in known and "experts" not in key and ".gate." not in key else key: tensor
            for key, tensor in tensors.items()
        }
        save_file(renamed, path, {"format": "pt"})
    if (index := folder / "model.safetensors.index.json").exists():
        text = index.read_text()
        for layer, kind in enumerate(model.config.mlp_layer_types):
            if kind == "dense":
                text = text.replace(f"layers.{layer}.block_sparse_moe.", f"layers.{layer}.mlp.")
        index.write_text(text)


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by relative name, the manifest left out."""
    contents = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in contents.items() if Path(name).name != "vitruvian.json"}


def nearest_bfloat16(values: Any) -> Any:
    """Float64 to the nearest bfloat16, ties to even: by exact arithmetic on the neighbours."""
    import ml_dtypes
    import numpy as np

    near = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    candidates = np.stack([(near.astype(np.int64) + step * 65536).astype(np.uint32) for step in (-1, 0, 1)])
    apart = np.abs(candidates.view(np.float32).astype(np.float64) - values)
    odd = (candidates >> 16) & 1
    best = np.lexsort((odd.reshape(3, -1), apart.reshape(3, -1)), axis=0)[0]
    words = np.take_along_axis(candidates.reshape(3, -1), best[None], 0)[0] >> 16
    return words.astype(np.uint16).view(ml_dtypes.bfloat16).reshape(values.shape)
