"""GLM-4.5-Air: GLM-4.5 without norms on query and key (transformers models/glm4_moe, 5.23.0)."""

from dataclasses import replace

from formats.families import glm4_moe
from formats.families.blocks import HEAD, QK_NORMS, SECOND, second

BLOCK = glm4_moe.BLOCK.replace(QK_NORMS, "")

FAMILY = replace(
    glm4_moe.FAMILY,
    name="glm4_moe_air",
    table=BLOCK + HEAD + second(BLOCK) + SECOND,
    marks={},
    requires={"hidden_act": "silu", "use_qk_norm": False},
)
