"""Youtu-LLM: the attention of DeepSeek-V3, and a dense MLP in every layer (transformers models/youtu, 5.23.0)."""

from formats.families import deepseek_v2
from formats.families.blocks import GATED_MLP, HEAD, NORMS
from formats.families.deepseek_v2 import LATENT_ATTENTION
from formats.families.family import Family

SIZES = ("head_dim", "query_rank", "latent_rank", "nope_dim", "rope_dim")

FAMILY = Family(
    name="youtu",
    architecture="YoutuForCausalLM",
    table=LATENT_ATTENTION + GATED_MLP + NORMS + HEAD,
    requires={"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
    keys={name: deepseek_v2.FAMILY.keys[name] for name in SIZES},
    defaults={
        "kv_heads": 16,
        "head_dim": 128,
        "query_rank": 1536,
        "latent_rank": 512,
        "nope_dim": 128,
        "rope_dim": 64,
        "tied": True,
    },
    copied={"head_dim": "rope_dim"},
    tokens={"bos_token_id": 128000, "eos_token_id": 128001},
)
