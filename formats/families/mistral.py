"""Mistral: the tensors of Llama, and a sliding window (transformers models/mistral/configuration_mistral.py, 5.23.0)."""

from formats.families.family import Family
from formats.families.llama import TABLE
from formats.layout.table import BIASES, without

FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    general=True,
    table=without(TABLE, BIASES),
    requires={"hidden_act": "silu"},
    window="sliding_window",
    window_default=4096,
    neox="rms",
)
