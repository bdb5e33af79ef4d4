"""DeepSeek-V3 and R1: the attention of DeepSeek-V2, experts with a sigmoid router.

Facts: transformers 5.23.0, models/deepseek_v3/modeling_deepseek_v3.py, and modeling_layers.py `MtpModel` for the layer
after the last, which predicts a second token (MTP).
"""

from dataclasses import replace

from formats.families import deepseek_v2
from formats.families.blocks import (
    HEAD,
    MIXTURE,
    NORMS,
    SECOND,
    TORCHTITAN_ENDS,
    TORCHTITAN_EXPERTS,
    TORCHTITAN_NORMS,
    TORCHTITAN_SHARED_EXPERTS,
    second,
)
from formats.families.deepseek_v2 import LATENT_ATTENTION

BLOCK = LATENT_ATTENTION + MIXTURE + NORMS
TABLE = BLOCK + HEAD + second(BLOCK) + SECOND

TORCHTITAN_LATENT = """
tok_embeddings.weight                           embedding: vocab hidden
layers.{layer}.attention.wq.weight              latent_query: (group query_dim) hidden     uncompressed
layers.{layer}.attention.wq_a.weight            query_down: query_rank hidden              compressed
layers.{layer}.attention.q_norm.weight          query_latent_norm: query_rank              compressed
layers.{layer}.attention.wq_b.weight            query_up: (group query_dim) query_rank     compressed
layers.{layer}.attention.wkv_a.weight           latent_down: joint_dim hidden
layers.{layer}.attention.kv_norm.weight         latent_norm: latent_rank
layers.{layer}.attention.wkv_b.weight           latent_up: (group up_dim) latent_rank
layers.{layer}.attention.wo.weight              output: hidden (group head dim)
layers.{layer}.moe.expert_bias_E                router_bias: expert                        sparse
"""
TORCHTITAN = TORCHTITAN_LATENT + TORCHTITAN_SHARED_EXPERTS + TORCHTITAN_EXPERTS + TORCHTITAN_NORMS + TORCHTITAN_ENDS
"""The native names of torchtitan, which rotates adjacent elements, as the Hub's files do. Its layers that predict a
second token (`mtp_layers.{depth}`) have no rows, and are refused."""

FAMILY = replace(
    deepseek_v2.FAMILY,
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    divided=False,
    mha=False,
    nulls=(),
    table=TABLE,
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
        "kv_heads": 128,
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
    copied={"head_dim": "rope_dim"},
    native={"torchtitan": TORCHTITAN},
)
