"""Ministral (2024): the tensors of Llama, and a sliding window in some layers (transformers models/ministral, 5.23.0)."""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS
from formats.families.family import Family

FAMILY = Family(
    name="ministral",
    architecture="MinistralForCausalLM",
    table=ATTENTION + GATED_MLP + NORMS + HEAD,
    requires={"hidden_act": "silu"},
    window="sliding_window",
    window_default=4096,
    keys={"full_layers": "layer_types"},
    defaults={"full_layers": ()},
)
