"""Seed-OSS: the tensors of Llama, with an independent head dimension (transformers models/seed_oss, 5.23.0)."""

from formats.families.family import Family
from formats.families.llama import TABLE

FAMILY = Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    nulls=("head_dim", "num_key_value_heads"),
    biases={
        "attention_bias": ("qkv_bias", True),
        "attention_out_bias": ("output_bias", False),
        "mlp_bias": ("mlp_bias", False),
    },
    head_dim=128,
)
