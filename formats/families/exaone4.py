"""EXAONE 4: norms after attention and MLP and on each head; in models with windows, layers without one do not rotate.

Facts: transformers models/exaone4/modeling_exaone4.py and configuration_exaone4.py, 5.23.0. Where `layer_types` is
missing, every `sliding_window_pattern`-th layer has no window; without `layer_types` transformers builds no model if
the pattern is a string of letters, or the window is null.
"""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS_AFTER, QK_NORMS
from formats.families.family import Family

TABLE = ATTENTION + QK_NORMS + GATED_MLP + NORMS_AFTER + HEAD

FAMILY = Family(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    window="sliding_window",
    window_default=4096,
    own={"layer_types": None, "sliding_window_pattern": None},
    only_here="megatron-core has no norms after attention and MLP",
)
