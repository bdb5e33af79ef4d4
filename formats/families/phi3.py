"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections (transformers models/phi3/modeling_phi3.py, 5.23.0).

In Phi-4-mini three quarters of each head rotate. Its config takes one type of rope scaling (configuration_phi3.py
`validate_rope`). A key `default_theta` is the base where there is no other, since it is an argument of the function that
reads the rotary settings (`convert_rope_params_to_dict`). Its class has an `original_max_position_embeddings`, which takes
precedence over that of `rope_scaling`.
"""

from formats.families.blocks import FUSED_MLP, HEAD, NORMS
from formats.families.family import Family

FUSED_ATTENTION = """
model.embed_tokens.weight                                embedding: vocab hidden
model.layers.{layer}.self_attn.o_proj.weight             output: hidden (group head dim)
model.layers.{layer}.self_attn.qkv_proj.weight           (query: group head half pair | key: group half pair | value: group dim) hidden
"""
TABLE = FUSED_ATTENTION + FUSED_MLP + NORMS + HEAD

FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    scalings=("longrope",),
    window="sliding_window",
    keys={"rope_theta": "rope_theta default_theta", "rotary_fraction": "partial_rotary_factor"},
    defaults={"rotary_fraction": 1.0, "original_max_position_embeddings": 4096},
    mha=True,
    tokens={"eos_token_id": 32000, "pad_token_id": 32000},
)
