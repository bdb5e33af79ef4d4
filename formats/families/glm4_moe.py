"""GLM-4.5, 4.6 and 4.7: half of each head rotates, biases on query, key and value, experts as in dots.llm1.

Facts: transformers models/glm4_moe/modeling_glm4_moe.py and conversion_mapping.py, 5.23.0: the layer after the last,
which predicts a second token (MTP), is not loaded in models with 46 and 92 layers; `attention_bias` adds no bias to the
output projection.
"""

from formats.families import dots1
from formats.families.blocks import HEAD, MIXTURE, NORMS, OPTIONAL_QKV_BIASES, QK_NORMS, ROUTER_DEFAULTS, SECOND, second
from formats.families.family import Family

BLOCK = OPTIONAL_QKV_BIASES + QK_NORMS + MIXTURE + NORMS
TABLE = BLOCK + HEAD + second(BLOCK) + SECOND

FAMILY = Family(
    name="glm4_moe",
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    table=TABLE,
    marks={"use_qk_norm": True},
    biases={"attention_bias": ("qkv_bias", False)},
    requires={"hidden_act": "silu"},
    keys={**dots1.FAMILY.keys, "rotary_fraction": "partial_rotary_factor"},
    defaults={
        "rotary_fraction": 0.5,
        "experts": 128,
        "top_k": 8,
        "expert_ffn": 1408,
        "shared_ffn": 1,
        "dense_layers": 1,
        **ROUTER_DEFAULTS,
    },
    router="sigmoid",
)
