"""Kimi Linear: linear attention with a decay for each channel (KDA), latents without rotation in the other layers.

Facts: transformers 5.23.0, models/kimi_linear/modeling_kimi_linear.py, configuration_kimi_linear.py and
conversion_mapping.py: in memory the three convolutions are one, and the tensors of the decay are in the module
`forget_gate`. The MLP of a dense layer is `mlp` in the Hub's files, and `block_sparse_moe` in files that transformers
saves; transformers reads both. The class never ties the head (`_tied_weights_keys` is empty), whatever its config says.
"""

from formats.families import deepseek_v3
from formats.families.blocks import EMBEDDING, HEAD, NORMS, ROUTER_DEFAULTS, among
from formats.families.deepseek_v2 import LATENT
from formats.families.family import Family

DELTA = """
model.layers.{layer}.self_attn.q_proj.weight                   linear_query: (key_head key_dim) hidden             recurrent
model.layers.{layer}.self_attn.k_proj.weight                   linear_key: (key_head key_dim) hidden               recurrent
model.layers.{layer}.self_attn.v_proj.weight                   linear_value: (key_head spread value_dim) hidden    recurrent
model.layers.{layer}.self_attn.q_conv1d.weight                 linear_query_taps: (key_head key_dim) () tap        recurrent separate
model.layers.{layer}.self_attn.k_conv1d.weight                 linear_key_taps: (key_head key_dim) () tap          recurrent separate
model.layers.{layer}.self_attn.v_conv1d.weight                 linear_value_taps: (key_head spread value_dim) () tap    recurrent separate
model.layers.{layer}.self_attn.conv1d.weight                   (linear_query_taps: key_head key_dim | linear_key_taps: key_head key_dim | linear_value_taps: key_head spread value_dim) () tap    recurrent fused
model.layers.{layer}.self_attn.dt_bias                         linear_forget_bias: (key_head key_dim)              recurrent separate
model.layers.{layer}.self_attn.A_log                           linear_decay: () () (key_head spread) ()            recurrent separate
model.layers.{layer}.self_attn.f_a_proj.weight                 linear_forget_down: channel_rank hidden             recurrent separate
model.layers.{layer}.self_attn.f_b_proj.weight                 linear_forget_up: (key_head key_dim) channel_rank    recurrent separate
model.layers.{layer}.self_attn.forget_gate.dt_bias             linear_forget_bias: (key_head key_dim)              recurrent fused
model.layers.{layer}.self_attn.forget_gate.A_log               linear_decay: () () (key_head spread) ()            recurrent fused
model.layers.{layer}.self_attn.forget_gate.f_a_proj.weight     linear_forget_down: channel_rank hidden             recurrent fused
model.layers.{layer}.self_attn.forget_gate.f_b_proj.weight     linear_forget_up: (key_head key_dim) channel_rank    recurrent fused
model.layers.{layer}.self_attn.b_proj.weight                   linear_beta: (key_head spread) hidden               recurrent
model.layers.{layer}.self_attn.g_a_proj.weight                 linear_gate_down: channel_rank hidden               recurrent
model.layers.{layer}.self_attn.g_b_proj.weight                 linear_gate_up: (key_head spread value_dim) channel_rank    recurrent
model.layers.{layer}.self_attn.o_norm.weight                   linear_norm: value_dim                              recurrent
model.layers.{layer}.self_attn.o_proj.weight                   linear_output: hidden (key_head spread value_dim)    recurrent
"""
MLP = """
model.layers.{layer}.{mlp|block_sparse_moe}.gate_proj.weight    gate: ffn hidden    dense
model.layers.{layer}.{mlp|block_sparse_moe}.up_proj.weight      up: ffn hidden      dense
model.layers.{layer}.{mlp|block_sparse_moe}.down_proj.weight    down: hidden ffn    dense
"""
EXPERTS = """
model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight                expert_gate: expert_ffn hidden     sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight                expert_up: expert_ffn hidden       sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight                expert_down: hidden expert_ffn     sparse separate
model.layers.{layer}.block_sparse_moe.gate.weight                               router: expert hidden              sparse separate
model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias              router_bias: expert                sparse separate
model.layers.{layer}.block_sparse_moe.shared_experts.gate_proj.weight           shared_gate: shared_ffn hidden     sparse separate
model.layers.{layer}.block_sparse_moe.shared_experts.up_proj.weight             shared_up: shared_ffn hidden       sparse separate
model.layers.{layer}.block_sparse_moe.shared_experts.down_proj.weight           shared_down: hidden shared_ffn     sparse separate
model.layers.{layer}.mlp.experts.gate_up_proj                                   expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.mlp.experts.down_proj                                      expert_down: expert hidden expert_ffn    sparse fused
model.layers.{layer}.mlp.gate.weight                                            router: expert hidden              sparse fused
model.layers.{layer}.mlp.gate.e_score_correction_bias                           router_bias: expert                sparse fused
model.layers.{layer}.mlp.shared_experts.gate_proj.weight                        shared_gate: shared_ffn hidden     sparse fused
model.layers.{layer}.mlp.shared_experts.up_proj.weight                          shared_up: shared_ffn hidden       sparse fused
model.layers.{layer}.mlp.shared_experts.down_proj.weight                        shared_down: hidden shared_ffn     sparse fused
"""
TABLE = EMBEDDING + DELTA + among("attention", LATENT) + MLP + EXPERTS + NORMS + HEAD

FAMILY = Family(
    name="kimi_linear",
    architecture="KimiLinearForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False},
    rope_theta=None,
    keys={
        **deepseek_v3.FAMILY.keys,
        "max_positions": "model_max_length max_position_embeddings",
        "recurrent_layers": "linear_attn_config",
        "linear_key_heads": "linear_num_heads",
        "linear_value_heads": "linear_num_heads",
        "linear_key_dim": "linear_head_dim",
        "linear_value_dim": "linear_head_dim",
        "linear_taps": "linear_conv_kernel_dim",
        "experts": "num_experts num_local_experts",
        "top_k": "num_experts_per_token num_experts_per_tok",
        "shared_ffn": "num_shared_experts n_shared_experts",
        "dense_layers": "mlp_layer_types",
        "router_normalized": "moe_renormalize norm_topk_prob",
        "router_groups": "num_expert_group n_group",
    },
    defaults={
        "layers": 27,
        "hidden": 2304,
        "heads": 32,
        "kv_heads": 32,
        "ffn": 9216,
        "vocab": 163840,
        "max_positions": 1048576,
        "norm_epsilon": 1e-5,
        "head_dim": 128,
        "latent_rank": 512,
        "nope_dim": 128,
        "rope_dim": 64,
        "linear_key_heads": 32,
        "linear_value_heads": 32,
        "linear_key_dim": 128,
        "linear_value_dim": 128,
        "linear_taps": 4,
        "experts": 256,
        "top_k": 8,
        "expert_ffn": 1024,
        "shared_ffn": 1,
        "dense_layers": 1,
        **ROUTER_DEFAULTS,
        "router_scale": 2.446,
    },
    only_here="megatron-core has no linear attention that forgets channel by channel (KDA)",
    router="sigmoid",
    tokens={"pad_token_id": 163839, "bos_token_id": 163584, "eos_token_id": 163586},
)
