"""Mamba2: only a state space in every layer.

Facts: transformers 5.23.0, models/mamba2/modeling_mamba2.py. The model has no attention, no MLP and no positions: the
settings of a spec for these are read from other keys, and no tensor depends on them.
"""

from formats.families.blocks import STATE_SPACE
from formats.families.family import Family

EMBEDDING = """
backbone.embeddings.weight             embedding: vocab hidden
backbone.layers.{layer}.norm.weight    pre_norm: hidden
"""
MIXER = STATE_SPACE.replace("model.", "backbone.").replace(".mamba.", ".mixer.").replace("    state\n", "\n")
HEAD = """
backbone.norm_f.weight    final_norm: hidden
lm_head.weight            head: vocab hidden         untied
lm_head.weight            embedding: vocab hidden    tied optional
"""

FAMILY = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    table=EMBEDDING + MIXER + HEAD,
    requires={"hidden_act": "silu", "use_bias": False, "use_conv_bias": True},
    rope_theta=None,
    keys={
        "heads": "num_heads",
        "kv_heads": "",
        "ffn": "hidden_size",
        "max_positions": "chunk_size",
        "norm_epsilon": "layer_norm_epsilon",
        "state_heads": "num_heads",
        "state_groups": "n_groups",
        "state_dim": "head_dim",
        "state_size": "state_size",
        "taps": "conv_kernel",
    },
    defaults={
        "heads": 128,
        "max_positions": 256,
        "norm_epsilon": 1e-5,
        "state_heads": 128,
        "state_groups": 8,
        "state_dim": 64,
        "state_size": 128,
        "taps": 4,
    },
    own={"expand": 2, "time_step_limit": [0.0, {"__float__": "Infinity"}], "rescale_prenorm_residual": False},
    only_here="the arguments of megatron-core ask for heads of attention and an MLP, of which it has none",
)
