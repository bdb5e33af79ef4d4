"""open-sci-ref (OpenEuroLLM): Qwen3 with biases in every linear layer.

Facts: OpensciConfig, OpensciMLP and OpensciForCausalLM of open-sci's branch of transformers, and the config.json that
its converter from Megatron writes; no release of transformers has the class.
"""

from formats.families.blocks import ALL_BIASES, HEAD, NORMS, QK_NORMS
from formats.families.family import Family

MLP = """
model.layers.{layer}.mlp.gate_proj.weight     gate: ffn hidden
model.layers.{layer}.mlp.gate_proj.bias       gate_bias: ffn
model.layers.{layer}.mlp.up_proj.weight       up: ffn hidden
model.layers.{layer}.mlp.up_proj.bias         up_bias: ffn
model.layers.{layer}.mlp.down_proj.weight     down: hidden ffn
model.layers.{layer}.mlp.down_proj.bias       down_bias: hidden
"""

FAMILY = Family(
    name="opensci",
    architecture="OpensciForCausalLM",
    table=ALL_BIASES + QK_NORMS + MLP + NORMS + HEAD,
    requires={"hidden_act": "silu", "attention_bias": True, "mlp_bias": True, "qk_layernorm": True},
    switch="use_sliding_window",
    window_default=4096,
    full_until=("max_window_layers", 28),
    head_dim=128,
    elsewhere="open-sci's branch of transformers",
)
