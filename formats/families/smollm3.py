"""SmolLM3: the tensors of Llama, and layers in which nothing rotates (transformers models/smollm3, 5.23.0)."""

from formats.families import Family
from formats.families.llama import TABLE
from formats.layout import rules

FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    tensors=rules(TABLE),
    requires={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
    rope_theta=2000000.0,
    keys={"nope_layers": "no_rope_layers"},
    defaults={"tied": True},
)
