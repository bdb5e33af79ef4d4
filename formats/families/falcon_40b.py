"""Falcon 40B and 180B: grouped queries, one norm each for attention and MLP (transformers models/falcon, 5.23.0)."""

from dataclasses import replace

from formats.families import falcon

NORMS = """
transformer.h.{layer}.ln_mlp.weight                           post_norm: hidden
transformer.h.{layer}.ln_mlp.bias                             post_norm_bias: hidden
transformer.ln_f.weight""".lstrip()
TABLE = falcon.TABLE.replace("input_layernorm", "ln_attn").replace("transformer.ln_f.weight", NORMS)

FAMILY = replace(
    falcon.FAMILY,
    name="falcon_40b",
    model_type="falcon",
    marks={"new_decoder_architecture": True},
    table=TABLE,
    requires={"alibi": False, "bias": False, "parallel_attn": True, "apply_residual_connection_post_layernorm": False},
    keys={**falcon.FAMILY.keys, "kv_heads": "num_kv_heads"},
    defaults={name: value for name, value in falcon.FAMILY.defaults.items() if name != "kv_heads"},
    mha=True,
)
