"""MiniMax-M3 (text): clamped experts with a shared expert, and layers whose attention sees blocks of keys.

Facts: transformers 5.23.0, models/minimax_m3_vl/modeling_minimax_m3_vl.py, configuration_minimax_m3_vl.py and
conversion_mapping.py: on the Hub the language model is only in the multimodal model, with names as in Mixtral; the
class of the language model alone has only the names in memory. The weights of norms are stored minus 1; `hidden_act` is
ignored, as is `rotary_dim` beside the rotary settings.
"""

from formats.families.blocks import ATTENTION, HEAD, NORMS, QK_NORMS
from formats.families.family import Family

INDEXER = """
model.layers.{layer}.self_attn.index_q_proj.weight                        block_query: (index_head index_dim) hidden    blocks separate
model.layers.{layer}.self_attn.index_k_proj.weight                        block_key: index_dim hidden                   blocks separate
model.layers.{layer}.self_attn.index_q_norm.weight                        block_query_norm: index_dim                   blocks separate
model.layers.{layer}.self_attn.index_k_norm.weight                        block_key_norm: index_dim                     blocks separate
model.layers.{layer}.self_attn.indexer.q_proj.weight                      block_query: (index_head index_dim) hidden    blocks fused
model.layers.{layer}.self_attn.indexer.k_proj.weight                      block_key: index_dim hidden                   blocks fused
model.layers.{layer}.self_attn.indexer.q_norm.weight                      block_query_norm: index_dim                   blocks fused
model.layers.{layer}.self_attn.indexer.k_norm.weight                      block_key_norm: index_dim                     blocks fused
"""
MLP = """
model.layers.{layer}.mlp.gate_proj.weight                                 gate: ffn hidden                 dense separate
model.layers.{layer}.mlp.up_proj.weight                                   up: ffn hidden                   dense separate
model.layers.{layer}.mlp.gate_up_proj.weight                              (gate: ffn | up: ffn) hidden     dense fused
model.layers.{layer}.mlp.down_proj.weight                                 down: hidden ffn                 dense
"""
EXPERTS = """
model.layers.{layer}.block_sparse_moe.gate.weight                         router: expert hidden            sparse separate
model.layers.{layer}.block_sparse_moe.e_score_correction_bias             router_bias: expert              sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight          expert_gate: expert_ffn hidden   sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight          expert_up: expert_ffn hidden     sparse separate
model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight          expert_down: hidden expert_ffn   sparse separate
model.layers.{layer}.block_sparse_moe.shared_experts.gate_proj.weight     shared_gate: shared_ffn hidden   sparse separate
model.layers.{layer}.block_sparse_moe.shared_experts.up_proj.weight       shared_up: shared_ffn hidden     sparse separate
model.layers.{layer}.block_sparse_moe.shared_experts.down_proj.weight     shared_down: hidden shared_ffn   sparse separate
model.layers.{layer}.mlp.gate.weight                                      router: expert hidden            sparse fused
model.layers.{layer}.mlp.gate.e_score_correction_bias                     router_bias: expert              sparse fused
model.layers.{layer}.mlp.experts.gate_up_proj                             expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.mlp.experts.down_proj                                expert_down: expert hidden expert_ffn    sparse fused
model.layers.{layer}.mlp.shared_experts.gate_up_proj.weight               (shared_gate: shared_ffn | shared_up: shared_ffn) hidden    sparse fused
model.layers.{layer}.mlp.shared_experts.down_proj.weight                  shared_down: hidden shared_ffn   sparse fused
"""
TABLE = ATTENTION + QK_NORMS + INDEXER + MLP + EXPERTS + NORMS + HEAD

FAMILY = Family(
    name="minimax_m3_vl_text",
    architecture="MiniMaxM3VLForCausalLM",
    table=TABLE,
    in_memory=True,
    rope_theta=5000000.0,
    head_dim=128,
    centred=True,
    keys={
        "ffn": "dense_intermediate_size",
        "experts": "num_local_experts num_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn": "intermediate_size",
        "shared_ffn": "shared_intermediate_size",
        "dense_layers": "moe_layer_freq",
        "router_scale": "routed_scaling_factor",
        "index_heads": "index_n_heads",
        "index_dim": "index_head_dim",
        "block_layers": "sparse_attention_config",
        "rotary_fraction": "partial_rotary_factor",
    },
    defaults={
        "layers": 60,
        "hidden": 6144,
        "heads": 64,
        "kv_heads": 4,
        "ffn": 12288,
        "vocab": 200064,
        "max_positions": 524288,
        "norm_epsilon": 1e-6,
        "experts": 128,
        "top_k": 4,
        "expert_ffn": 3072,
        "shared_ffn": 3072,
        "router_scale": 2.0,
        "rotary_fraction": 1.0,
        "index_heads": 4,
        "index_dim": 128,
    },
    own={
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    only_here="megatron-core has no attention to blocks of keys that an indexer chooses",
    router="sigmoid",
    tokens={"bos_token_id": 200034, "eos_token_id": 200020},
)
