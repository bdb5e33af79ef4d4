"""Gemma 4 unified (text), of the model with one stack for all inputs: Gemma 4 without per-layer inputs and experts.

Facts: transformers 5.23.0, models/gemma4_unified/modeling_gemma4_unified.py and configuration_gemma4_unified.py.
"""

from dataclasses import replace

from formats.families import gemma4_text
from formats.families.blocks import GATED_MLP, HEAD, NORMS_AROUND
from formats.families.gemma4_text import ATTENTION

TABLE = ATTENTION + GATED_MLP + NORMS_AROUND + HEAD
APART = ("layer_width", "layer_vocab")

FAMILY = replace(
    gemma4_text.FAMILY,
    name="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    table=TABLE,
    requires={"attention_bias": False},
    window_default=1024,
    keys={name: key for name, key in gemma4_text.FAMILY.keys.items() if name not in APART},
    defaults={name: usual for name, usual in gemma4_text.FAMILY.defaults.items() if name not in APART}
    | {"max_positions": 262144},
    own={**gemma4_text.FAMILY.own, "use_bidirectional_attention": "vision"},
    only_here="megatron-core has one number of heads and one size of them for all layers, and this model two; nor has it "
    "keys and values that layers share",
)
