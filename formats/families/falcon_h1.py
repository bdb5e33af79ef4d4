"""Falcon-H1: attention and a state space (Mamba2) in parallel in each layer, after one norm.

Facts: transformers 5.23.0, models/falcon_h1/modeling_falcon_h1.py: the output of a state space has a norm where
`mamba_rms_norm` is true; a dozen factors are in the config, and none in the files.
"""

from dataclasses import replace

from formats.families import bamba
from formats.families.bamba import DEFAULTS, HEAD, KEYS, MLP, NORMS, PLAIN
from formats.families.blocks import EMBEDDING, QKVO, STATE_SPACE

MIXER = STATE_SPACE.replace("    state\n", "\n")
"""A state space, in every layer."""
WITHOUT_NORM = "".join(f"{line}\n" for line in MIXER.splitlines() if "state_norm" not in line)


def table(mixer: str) -> str:
    """The table of the family, with the rows `mixer` for its state spaces."""
    return EMBEDDING + MLP + mixer + QKVO + NORMS + HEAD


FAMILY = replace(
    bamba.FAMILY,
    name="falcon_h1",
    architecture="FalconH1ForCausalLM",
    table=table(WITHOUT_NORM),
    requires={**PLAIN, "mlp_bias": False, "projectors_bias": False, "mamba_rms_norm": False},
    keys=KEYS,
    defaults={**DEFAULTS, "kv_heads": 8},
    own={
        "mamba_d_ssm": 1024,
        **dict.fromkeys(
            (
                *("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier"),
                *("lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
            ),
            1.0,
        ),
        "mamba_norm_before_gate": True,
        **dict.fromkeys(("mlp_multipliers", "ssm_multipliers", "time_step_limit")),
    },
    only_here="its layers have attention and a state space side by side, those of megatron-core one of both",
)
