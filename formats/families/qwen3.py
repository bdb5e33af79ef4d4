"""Qwen3: Llama with a norm on each query and key head (transformers models/qwen3/modeling_qwen3.py, 5.23.0)."""

from formats.families.blocks import GATED_MLP, HEAD, NORMS, OPTIONAL_BIASES, QK_NORMS
from formats.families.family import Family

TABLE = OPTIONAL_BIASES + QK_NORMS + GATED_MLP + NORMS + HEAD

TORCHTITAN = """
tok_embeddings.weight                                    embedding: vocab hidden
layers.{layer}.attention.{qkv_linear.wq|wq}.weight       query: (group head half pair) hidden
layers.{layer}.attention.{qkv_linear.wk|wk}.weight       key: (group half pair) hidden
layers.{layer}.attention.{qkv_linear.wv|wv}.weight       value: (group dim) hidden
layers.{layer}.attention.wo.weight                       output: hidden (group head dim)
layers.{layer}.attention.q_norm.weight                   query_norm: (half pair)
layers.{layer}.attention.k_norm.weight                   key_norm: (half pair)
layers.{layer}.feed_forward.w1.weight                    gate: ffn hidden
layers.{layer}.feed_forward.w3.weight                    up: ffn hidden
layers.{layer}.feed_forward.w2.weight                    down: hidden ffn
layers.{layer}.attention_norm.weight                     input_norm: hidden
layers.{layer}.ffn_norm.weight                           post_norm: hidden
norm.weight                                              final_norm: hidden
{lm_head|output}.weight                                  head: vocab hidden          untied
{lm_head|output}.weight                                  embedding: vocab hidden     tied optional
"""
"""The native names of torchtitan, which rotates the halves of a head, as Hugging Face does."""

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu"},
    nulls=("num_key_value_heads",),
    biases={"attention_bias": ("qkv_bias output_bias", False)},
    switch="use_sliding_window",
    window_default=4096,
    full_until=("max_window_layers", 28),
    head_dim=128,
    native={"torchtitan": TORCHTITAN},
)
