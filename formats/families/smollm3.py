"""SmolLM3: the tensors of Llama, and layers without rotary embedding (transformers models/smollm3, 5.23.0)."""

from formats.families.family import Family
from formats.families.llama import TABLE

FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    nulls=("num_key_value_heads",),
    biases={"attention_bias": ("qkv_bias output_bias", False), "mlp_bias": ("mlp_bias", False)},
    switch="use_sliding_window",
    full_until=("", 0),
    rope_theta=2000000.0,
    keys={"nope_layers": "no_rope_layers"},
    defaults={"tied": True},
    tokens={"pad_token_id": 128004, "bos_token_id": 128000, "eos_token_id": 128001},
)
