"""GPT-2: learned positions, LayerNorm, biases in every linear layer, and matrices that are stored as [in, out].

Facts: transformers models/gpt2/modeling_gpt2.py and pytorch_utils.py `Conv1D`, 5.23.0. In the files of the first GPT-2
on the Hub tensor names have no prefix `transformer.`, and masks are among the weights.
"""

from formats.families.family import Family

TABLE = """
{transformer.|}wte.weight                            embedding: vocab hidden
{transformer.|}wpe.weight                            positions: position hidden
{transformer.|}h.{layer}.ln_1.weight                 input_norm: hidden
{transformer.|}h.{layer}.ln_1.bias                   input_norm_bias: hidden
{transformer.|}h.{layer}.attn.c_attn.weight          hidden (query: group head half pair | key: group half pair | value: group dim)
{transformer.|}h.{layer}.attn.c_attn.bias            (query_bias: group head half pair | key_bias: group half pair | value_bias: group dim)
{transformer.|}h.{layer}.attn.c_proj.weight          output: (group head dim) hidden
{transformer.|}h.{layer}.attn.c_proj.bias            output_bias: hidden
{transformer.|}h.{layer}.ln_2.weight                 post_norm: hidden
{transformer.|}h.{layer}.ln_2.bias                   post_norm_bias: hidden
{transformer.|}h.{layer}.mlp.c_fc.weight             up: hidden ffn
{transformer.|}h.{layer}.mlp.c_fc.bias               up_bias: ffn
{transformer.|}h.{layer}.mlp.c_proj.weight           down: ffn hidden
{transformer.|}h.{layer}.mlp.c_proj.bias             down_bias: hidden
{transformer.|}ln_f.weight                           final_norm: hidden
{transformer.|}ln_f.bias                             final_norm_bias: hidden
lm_head.weight                                       head: vocab hidden          untied
lm_head.weight                                       embedding: vocab hidden     tied optional
"""

FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    table=TABLE,
    drops=(r"(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias",),
    requires={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    linear="Conv1D",
    rope_theta=None,
    ffn_ratio=4,
    keys={
        "layers": "n_layer num_hidden_layers",
        "hidden": "n_embd hidden_size",
        "heads": "n_head num_attention_heads",
        "kv_heads": "",
        "head_dim": "",
        "ffn": "n_inner",
        "max_positions": "n_positions max_position_embeddings",
        "norm_epsilon": "layer_norm_epsilon",
        "activation": "activation_function",
    },
    defaults={"norm_epsilon": 1e-5, "activation": "gelu_new", "tied": True},
    tokens={"bos_token_id": 50256, "eos_token_id": 50256},
    neox="gpt2",
)
