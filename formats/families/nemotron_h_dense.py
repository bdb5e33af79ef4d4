"""Nemotron-H and Nemotron Nano 2: each layer is a state space (Mamba2), attention or an MLP, after one norm.

Facts: transformers 5.23.0, models/nemotron_h/modeling_nemotron_h.py and conversion_mapping.py (names in memory have
another prefix): there is no rotary embedding, and the head is never tied. In transformers a step of a state space is at
least `time_step_min`, in megatron-core it may be any number; in every config of the Hub `time_step_min` is the smallest
step that the initialization draws.
"""

from formats.families.blocks import STATE_SPACE
from formats.families.family import Family

EMBEDDING = """
model.embeddings.weight             embedding: vocab hidden
model.layers.{layer}.norm.weight    pre_norm: hidden
"""
MIXER = "model.layers.{layer}.mixer."
MLP = """
model.layers.{layer}.mixer.up_proj.weight      up: ffn hidden      dense
model.layers.{layer}.mixer.down_proj.weight    down: hidden ffn    dense
"""
QKV = """
model.layers.{layer}.mixer.q_proj.weight     query: (group head half pair) hidden    attention
model.layers.{layer}.mixer.k_proj.weight     key: (group half pair) hidden    attention
model.layers.{layer}.mixer.v_proj.weight     value: (group dim) hidden    attention
model.layers.{layer}.mixer.o_proj.weight     output: hidden (group head dim)    attention
"""
FINAL = """
model.norm_f.weight    final_norm: hidden
"""
HEAD = """
lm_head.weight    head: vocab hidden    untied
"""
COMMON = EMBEDDING + STATE_SPACE.replace(".mamba.", ".mixer.") + MLP + QKV


def in_both_namings(text: str) -> str:
    """The lines of a table twice: with the names in memory (`fused`), and with the Hub's names (`separate`)."""
    names = {"fused": "model.", "separate": "backbone."}
    lines = [line for line in text.splitlines() if line]
    return "".join(f"{line.replace('model.', name)}    {kind}\n" for kind, name in names.items() for line in lines)


BLOCKS = "hybrid_override_pattern layers_block_type layer_types"
KEYS = {
    "layers": BLOCKS,
    "state_layers": BLOCKS,
    "mlp_layers": BLOCKS,
    "norm_epsilon": "layer_norm_epsilon",
    "activation": "mlp_hidden_act",
    "state_heads": "mamba_num_heads",
    "state_groups": "n_groups mamba_n_groups",
    "state_dim": "mamba_head_dim",
    "state_size": "ssm_state_size",
    "taps": "conv_kernel mamba_d_conv",
}
DEFAULTS = {
    "kv_heads": 8,
    "norm_epsilon": 1e-5,
    "activation": "relu2",
    "state_heads": 128,
    "state_groups": 8,
    "state_dim": 64,
    "state_size": 128,
    "taps": 4,
}

FAMILY = Family(
    name="nemotron_h_dense",
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    table=in_both_namings(COMMON + FINAL) + HEAD,
    requires={
        "mamba_hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "mamba_conv_bias": True,
        "time_step_min": 0.001,
        "mamba_dt_min": 0.001,
        "tie_word_embeddings": False,
    },
    rope_theta=None,
    head_dim=128,
    keys=KEYS,
    defaults=DEFAULTS,
)
