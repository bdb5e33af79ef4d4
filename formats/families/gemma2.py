"""Gemma 2: four norms per layer, soft caps, a window in every other layer (transformers models/gemma2, 5.23.0).

The weights of the norms are stored minus 1, and are converted as they are: only Hugging Face and FSDP hold the family.
"""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS_AROUND
from formats.families.family import Family

TABLE = ATTENTION + GATED_MLP + NORMS_AROUND + HEAD

FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    divided=True,
    table=TABLE,
    requires={"attention_bias": False},
    head_dim=256,
    window="sliding_window",
    window_default=4096,
    keys={"activation": "hidden_activation"},
    defaults={"activation": "gelu_pytorch_tanh", "tied": True},
    own={
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "layer_types": None,
        "use_bidirectional_attention": None,
    },
    only_here="megatron-core has no norms after attention and MLP, and caps no logits",
)
