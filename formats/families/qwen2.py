"""Qwen2 and Qwen2.5: Llama with biases on query, key and value (transformers models/qwen2/modeling_qwen2.py, 5.23.0)."""

from formats.families.blocks import BIASED_ATTENTION, GATED_MLP, HEAD, NORMS
from formats.families.family import Family

TABLE = BIASED_ATTENTION + GATED_MLP + NORMS + HEAD

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    nulls=("num_key_value_heads",),
    switch="use_sliding_window",
    window_default=4096,
    full_until=("max_window_layers", 28),
)
