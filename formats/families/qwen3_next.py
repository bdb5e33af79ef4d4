"""Qwen3-Next: Gated DeltaNet in most layers, gated attention in the others, experts in all layers.

Facts: transformers 5.23.0, models/qwen3_next/modeling_qwen3_next.py: the rows of `in_proj_qkvz` and `in_proj_ba` are
ordered by key head (`fix_query_key_value_ordering`), those of `q_proj` have the gate of a head after its query; the
weights of all norms are stored minus 1, except for that of linear attention; the first quarter of each head rotates.
"""

from formats.families.blocks import DENSE_MLP, EMBEDDING, EXPERTS, GATED_SHARED_EXPERT, HEAD, NORMS, ROUTER, second
from formats.families.family import Family

LINEAR_INPUTS = """
model.layers.{layer}.linear_attn.in_proj_qkvz.weight    (key_head (linear_query: key_dim | linear_key: key_dim | linear_value: spread value_dim | linear_gate: spread value_dim)) hidden    recurrent
model.layers.{layer}.linear_attn.in_proj_ba.weight      (key_head (linear_beta: spread | linear_alpha: spread)) hidden    recurrent
"""
LINEAR_STATE = """
model.layers.{layer}.linear_attn.dt_bias          linear_step_bias: (key_head spread)    recurrent
model.layers.{layer}.linear_attn.A_log            linear_decay: (key_head spread)    recurrent
model.layers.{layer}.linear_attn.conv1d.weight    (linear_query_taps: key_head key_dim | linear_key_taps: key_head key_dim | linear_value_taps: key_head spread value_dim) () tap    recurrent
"""
LINEAR_OUTPUT = """
model.layers.{layer}.linear_attn.norm.weight        linear_norm: value_dim    recurrent
model.layers.{layer}.linear_attn.out_proj.weight    linear_output: hidden (key_head spread value_dim)    recurrent
"""
GATED_ATTENTION = """
model.layers.{layer}.self_attn.q_proj.weight      (group head (query: half pair | query_gate: dim)) hidden    attention
model.layers.{layer}.self_attn.k_proj.weight      key: (group half pair) hidden    attention
model.layers.{layer}.self_attn.v_proj.weight      value: (group dim) hidden    attention
model.layers.{layer}.self_attn.o_proj.weight      output: hidden (group head dim)    attention
model.layers.{layer}.self_attn.q_norm.weight      query_norm: (half pair)    attention
model.layers.{layer}.self_attn.k_norm.weight      key_norm: (half pair)    attention
"""
JOIN = """
mtp.fc.weight                       mtp_join: hidden joined         mtp
mtp.pre_fc_norm_embedding.weight    mtp_embedding_norm: hidden      mtp
mtp.pre_fc_norm_hidden.weight       mtp_hidden_norm: hidden         mtp
mtp.norm.weight                     mtp_final_norm: hidden          mtp
"""
"""The tensors around the block of the layer that predicts a second token (MTP), which has attention."""
MTP = "mtp.layers.{depth}."
MIXTURE = ROUTER + EXPERTS + GATED_SHARED_EXPERT
LINEAR = LINEAR_STATE + LINEAR_INPUTS + LINEAR_OUTPUT
BLOCK = GATED_ATTENTION + DENSE_MLP + MIXTURE + NORMS
TABLE = EMBEDDING + LINEAR + BLOCK + HEAD + JOIN + second(BLOCK, MTP)

KEYS = {
    "rotary_fraction": "partial_rotary_factor",
    "recurrent_layers": "layer_types",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "linear_taps": "linear_conv_kernel_dim",
}
DEFAULTS = {
    "rotary_fraction": 0.25,
    "linear_key_heads": 16,
    "linear_value_heads": 32,
    "linear_key_dim": 128,
    "linear_value_dim": 128,
    "linear_taps": 4,
}
"""Setting: its default, in all families with Gated DeltaNet."""
EXPERT_KEYS = {
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": "shared_expert_intermediate_size",
}

FAMILY = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    table=TABLE,
    general=True,
    requires={"hidden_act": "silu", "attention_bias": False},
    head_dim=256,
    centred=True,
    keys={
        **KEYS,
        **EXPERT_KEYS,
        "dense_layers": "mlp_only_layers",
        "router_normalized": "norm_topk_prob",
    },
    defaults={
        **DEFAULTS,
        "experts": 512,
        "top_k": 10,
        "expert_ffn": 512,
        "shared_ffn": 512,
        "router_normalized": True,
    },
    router="softmax",
)
