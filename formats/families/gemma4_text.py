"""Gemma 4 (text): Gemma 3 with larger heads in layers without a window, and an input of its own for each layer.

Facts: transformers 5.23.0, models/gemma4/modeling_gemma4.py and configuration_gemma4.py: the weights of norms are
stored as they are, not minus 1; the last layers may reuse the keys and values of the last layer of their kind before
them, and files may still hold tensors for keys and values of these layers, which no class reads; the rotary settings of
each kind of layers are in one map.
"""

from formats.families.blocks import GATED_MLP, NORMS_AROUND
from formats.families.family import Family

ATTENTION = """
model.embed_tokens.weight                                    embedding: vocab hidden
model.layers.{layer}.layer_scalar                            layer_scalar: unit
model.layers.{layer}.self_attn.q_proj.weight                 query: (group head half pair) hidden
model.layers.{layer}.self_attn.q_norm.weight                 query_norm: (half pair)
model.layers.{layer}.self_attn.k_norm.weight                 key_norm: (half pair)             keyed
model.layers.{layer}.self_attn.k_proj.weight                 key: (group half pair) hidden     keyed
model.layers.{layer}.self_attn.v_proj.weight                 value: (group dim) hidden         valued
model.layers.{layer}.self_attn.o_proj.weight                 output: hidden (group head dim)
"""
LAYER_INPUT = """
model.layers.{layer}.per_layer_input_gate.weight             layer_input_gate: layer_width hidden    fed
model.layers.{layer}.per_layer_projection.weight             layer_input_up: hidden layer_width      fed
model.layers.{layer}.post_per_layer_input_norm.weight        layer_input_norm: hidden                fed
"""
HEAD = """
model.norm.weight                                            final_norm: hidden
model.embed_tokens_per_layer.weight                          layer_embedding: layer_vocab (every_layer layer_width)    fed
model.per_layer_model_projection.weight                      layer_projection: (every_layer layer_width) hidden        fed
model.per_layer_projection_norm.weight                       layer_projection_norm: layer_width                        fed
lm_head.weight                                               head: vocab hidden         untied
lm_head.weight                                               embedding: vocab hidden    tied optional
"""
BLOCK = ATTENTION + GATED_MLP + NORMS_AROUND + LAYER_INPUT
TABLE = BLOCK + HEAD

FAMILY = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    table=TABLE,
    drops=(r"model\.layers\.\d+\.self_attn\.(?:[kv]_proj|k_norm)\.weight",),
    requires={"attention_bias": False, "enable_moe_block": False},
    rope_theta=None,
    head_dim=256,
    window="sliding_window",
    window_default=512,
    keys={
        "activation": "hidden_activation",
        "full_layers": "layer_types",
        "full_head_dim": "global_head_dim",
        "full_kv_heads": "num_global_key_value_heads",
        "keys_as_values": "attention_k_eq_v",
        "reusing_layers": "num_kv_shared_layers",
        "reusing_ffn": "use_double_wide_mlp",
        "layer_width": "hidden_size_per_layer_input",
        "layer_vocab": "vocab_size_per_layer_input",
    },
    defaults={
        "activation": "gelu_pytorch_tanh",
        "tied": True,
        "layers": 30,
        "hidden": 2304,
        "ffn": 9216,
        "heads": 8,
        "kv_heads": 4,
        "vocab": 262144,
        "max_positions": 131072,
        "norm_epsilon": 1e-6,
        "full_layers": {"front": 0, "step": 6},
        "full_head_dim": 512,
        "keys_as_values": False,
        "layer_width": 256,
        "layer_vocab": 262144,
    },
    nulls=("global_head_dim", "num_global_key_value_heads"),
    own={
        "rope_parameters": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": None,
    },
    only_here="megatron-core has one number of heads and one size of them for all layers, and this model two; nor has it "
    "embeddings for each layer, or keys and values that layers share",
)
