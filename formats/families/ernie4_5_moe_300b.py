"""ERNIE 4.5 of 300 billion parameters (text): no shared experts (transformers models/ernie4_5_moe, 5.23.0)."""

from dataclasses import replace

from formats.families import ernie4_5_moe
from formats.families.blocks import DENSE_MLP, EXPERTS, HEAD, NORMS, PAIRED_ATTENTION
from formats.families.ernie4_5_moe import ROUTER

FAMILY = replace(
    ernie4_5_moe.FAMILY,
    name="ernie4_5_moe_300b",
    model_type="ernie4_5_moe",
    marks={"moe_num_shared_experts": 0},
    table=PAIRED_ATTENTION + DENSE_MLP + ROUTER + EXPERTS + NORMS + HEAD,
    keys={name: key for name, key in ernie4_5_moe.FAMILY.keys.items() if name != "shared_ffn"},
    defaults={name: value for name, value in ernie4_5_moe.FAMILY.defaults.items() if name != "shared_ffn"},
)
