"""MiniMax-M2: Mixtral with a sigmoid router, half of each head rotating, and norms over all queries and all keys.

Facts: transformers models/minimax_m2/modeling_minimax_m2.py, configuration_minimax_m2.py and conversion_mapping.py,
5.23.0: released configs have `rotary_dim`, the number of elements of a head that rotate.
"""

from formats.families.blocks import ATTENTION, HEAD, NORMS, WIDTH_NORMS
from formats.families.family import Family
from formats.families.mixtral import EXPERTS_AND_ROUTER

BIAS = """
model.layers.{layer}.block_sparse_moe.e_score_correction_bias          router_bias: expert                     sparse separate
model.layers.{layer}.mlp.e_score_correction_bias                       router_bias: expert                     sparse fused
"""
TABLE = ATTENTION + WIDTH_NORMS + BIAS + EXPERTS_AND_ROUTER + NORMS + HEAD

FAMILY = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    table=TABLE,
    requires={
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
    },
    rope_theta=5000000.0,
    head_dim=128,
    keys={
        "experts": "num_local_experts num_experts",
        "top_k": "num_experts_per_tok",
        "rotary_fraction": "partial_rotary_factor",
    },
    defaults={"experts": 256, "top_k": 8, "rotary_fraction": 1.0},
    own={"rotary_dim": None},
    only_here="megatron-core has no norms over all heads of a token",
    router="sigmoid",
    tokens={"bos_token_id": 200034, "eos_token_id": 200020},
)
