"""Bamba: a state space (Mamba2) in place of attention in most layers, and an MLP in all layers.

Facts: transformers 5.23.0, models/bamba/modeling_bamba.py and configuration_bamba.py: half of each head rotates.
"""

from formats.families.blocks import EMBEDDING, QKVO, STATE_SPACE, among
from formats.families.family import Family

MLP = """
model.layers.{layer}.feed_forward.gate_proj.weight     gate: ffn hidden
model.layers.{layer}.feed_forward.up_proj.weight       up: ffn hidden
model.layers.{layer}.feed_forward.down_proj.weight     down: hidden ffn
"""
NORMS = """
model.layers.{layer}.input_layernorm.weight     input_norm: hidden
model.layers.{layer}.pre_ff_layernorm.weight    post_norm: hidden
"""
HEAD = """
model.final_layernorm.weight    final_norm: hidden
lm_head.weight                  head: vocab hidden         untied
lm_head.weight                  embedding: vocab hidden    tied optional
"""
MIXED = among("attention", QKVO)
"""Attention, in a model in which only some layers have it."""

KEYS = {
    "state_heads": "mamba_n_heads",
    "state_groups": "mamba_n_groups",
    "state_dim": "mamba_d_head",
    "state_size": "mamba_d_state",
    "taps": "mamba_d_conv",
}
DEFAULTS = {"state_heads": 128, "state_groups": 1, "state_size": 256, "taps": 4}
PLAIN = {"hidden_act": "silu", "attention_bias": False, "mamba_conv_bias": True, "mamba_proj_bias": False}

FAMILY = Family(
    name="bamba",
    architecture="BambaForCausalLM",
    table=EMBEDDING + MLP + NORMS + STATE_SPACE + MIXED + HEAD,
    requires={**PLAIN, "mlp_bias": False, "partial_rotary_factor": 0.5},
    keys={**KEYS, "state_layers": "attn_layer_indices", "rotary_fraction": "partial_rotary_factor"},
    defaults={**DEFAULTS, "kv_heads": 8, "rotary_fraction": 0.5},
    nulls=("attn_layer_indices",),
    own={"mamba_expand": 2, "time_step_limit": None},
    only_here="its layers have a state space and an MLP, those of megatron-core are one of both",
)
