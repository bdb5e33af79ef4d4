"""GLM-4.5-Air: GLM-4.5 without norms on query and key (transformers models/glm4_moe, 5.23.0)."""

from dataclasses import replace

from formats.families import glm4_moe
from formats.families.blocks import QK_NORMS

FAMILY = replace(
    glm4_moe.FAMILY,
    name="glm4_moe_air",
    table=glm4_moe.TABLE.replace(QK_NORMS, ""),
    marks={},
    requires={"hidden_act": "silu", "use_qk_norm": False},
)
