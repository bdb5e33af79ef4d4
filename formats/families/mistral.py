"""Mistral: the tensors of Llama, and a sliding window (transformers models/mistral/configuration_mistral.py, 5.23.0)."""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS
from formats.families.family import Family

FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    general=True,
    table=ATTENTION + GATED_MLP + NORMS + HEAD,
    requires={"hidden_act": "silu"},
    nulls=("head_dim",),
    window="sliding_window",
    window_default=4096,
    neox="llama",
)
