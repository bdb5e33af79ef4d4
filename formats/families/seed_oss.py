"""Seed-OSS: the tensors of Qwen2, with heads of a width of their own (transformers models/seed_oss, 5.23.0)."""

from formats.families import Family
from formats.families.qwen2 import TABLE
from formats.layout import rules

FAMILY = Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    tensors=rules(TABLE),
    requires={"hidden_act": "silu", "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    head_dim=128,
)
