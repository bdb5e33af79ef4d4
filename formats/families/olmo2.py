"""OLMo 2: norms after attention and MLP, and over all queries and all keys of a token.

Facts: transformers models/olmo2/modeling_olmo2.py, 5.23.0.
"""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS_AFTER, WIDTH_NORMS
from formats.families.family import Family

TABLE = ATTENTION + WIDTH_NORMS + GATED_MLP + NORMS_AFTER + HEAD

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    only_here="megatron-core has no norms after attention and MLP, and none over all heads of a token",
    mha=True,
    tokens={"eos_token_id": 50279},
)
