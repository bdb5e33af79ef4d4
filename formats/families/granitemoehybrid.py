"""Granite 4 with experts: a state space (Mamba2) or attention in each layer, experts beside a shared MLP.

Facts: transformers 5.23.0, models/granitemoehybrid/modeling_granitemoehybrid.py: there is no rotary embedding unless
`position_embedding_type` is `rope`; gate and up of the shared MLP are the two halves of the rows of `input_linear`.
"""

from formats.families import granite
from formats.families.bamba import DEFAULTS, KEYS, MIXED, PLAIN
from formats.families.blocks import HEAD, NORMS, STATE_SPACE
from formats.families.family import Family
from formats.families.granitemoe import EXPERTS

EMBEDDING = """
model.embed_tokens.weight     embedding: vocab hidden
"""
SHARED = """
model.layers.{layer}.shared_mlp.input_linear.weight     (shared_gate: shared_ffn | shared_up: shared_ffn) hidden
model.layers.{layer}.shared_mlp.output_linear.weight    shared_down: hidden shared_ffn
"""

FAMILY = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    table=EMBEDDING + NORMS + EXPERTS + SHARED + STATE_SPACE + MIXED + HEAD,
    requires=PLAIN,
    keys={
        **KEYS,
        "state_layers": "layer_types layers_block_type",
        "experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "shared_ffn": "shared_intermediate_size",
    },
    defaults={**DEFAULTS, "experts": 8, "top_k": 2, "shared_ffn": 1024},
    own={**granite.FAMILY.own, "mamba_expand": 2, "position_embedding_type": None, "time_step_limit": None},
    only_here=granite.FAMILY.only_here,
    mha=True,
    router="softmax",
)
