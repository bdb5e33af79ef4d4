"""Granite 4 without experts: its only MLP is the shared MLP of the models with experts."""

from dataclasses import replace

from formats.families import granitemoehybrid as mixture
from formats.families.bamba import DEFAULTS, KEYS, MIXED
from formats.families.blocks import HEAD, NORMS, STATE_SPACE

MLP = """
model.layers.{layer}.shared_mlp.input_linear.weight     (gate: ffn | up: ffn) hidden
model.layers.{layer}.shared_mlp.output_linear.weight    down: hidden ffn
"""

FAMILY = replace(
    mixture.FAMILY,
    name="granite_hybrid",
    model_type="granitemoehybrid",
    marks={"num_local_experts": 0},
    table=mixture.EMBEDDING + NORMS + MLP + STATE_SPACE + MIXED + HEAD,
    keys={**KEYS, "state_layers": "layer_types layers_block_type", "ffn": "shared_intermediate_size"},
    defaults={**DEFAULTS, "ffn": 1024},
    own={**mixture.FAMILY.own, "intermediate_size": 11008},
    router="",
)
