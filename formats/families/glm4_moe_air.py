"""GLM-4.5-Air: GLM-4.5 without norms on query and key (transformers models/glm4_moe, 5.23.0)."""

from dataclasses import replace

from formats.families import glm4_moe
from formats.families.blocks import DENSE_MLP, EXPERTS, HEAD, NORMS, SHARED_EXPERTS
from formats.families.dots1 import ROUTER

TABLE = glm4_moe.ATTENTION_WITH_BIASES + DENSE_MLP + EXPERTS + ROUTER + SHARED_EXPERTS + NORMS + HEAD

FAMILY = replace(
    glm4_moe.FAMILY,
    name="glm4_moe_air",
    table=TABLE,
    marks={},
    requires={"hidden_act": "silu", "use_qk_norm": False},
)
