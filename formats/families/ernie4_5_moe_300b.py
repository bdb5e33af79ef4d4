"""ERNIE 4.5 of 300 billion parameters (text): nothing is shared (transformers models/ernie4_5_moe, 5.23.0)."""

from dataclasses import replace

from formats.families import ernie4_5_moe

FAMILY = replace(
    ernie4_5_moe.FAMILY,
    name="ernie4_5_moe_300b",
    model_type="ernie4_5_moe",
    marks={"moe_num_shared_experts": 0},
    table="\n".join(line for line in ernie4_5_moe.TABLE.splitlines() if ".shared_experts." not in line),
    keys={name: key for name, key in ernie4_5_moe.FAMILY.keys.items() if name != "shared_ffn"},
    defaults={name: value for name, value in ernie4_5_moe.FAMILY.defaults.items() if name != "shared_ffn"},
)
