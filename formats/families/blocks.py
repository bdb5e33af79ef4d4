"""Table rows and config keys that several families share; all others are in the file of a family.

The rows are written as in `llama.py`, which has a whole table in one place. A table has the order of the parameters.
"""


def among(kind: str, block: str) -> str:
    """The lines of a block that only layers of the kind `kind` have."""
    return "".join(f"{line}    {kind}\n" for line in block.strip().splitlines())


EMBEDDING = """
model.embed_tokens.weight     embedding: vocab hidden
"""
QKVO = """
model.layers.{layer}.self_attn.q_proj.weight     query: (group head half pair) hidden
model.layers.{layer}.self_attn.k_proj.weight     key: (group half pair) hidden
model.layers.{layer}.self_attn.v_proj.weight     value: (group dim) hidden
model.layers.{layer}.self_attn.o_proj.weight     output: hidden (group head dim)
"""
ATTENTION = EMBEDDING + QKVO
"""The embedding, and attention as in Llama, without biases."""

PAIRED_ATTENTION = ATTENTION.replace("half pair", "pair half")
"""The embedding, and attention with an interleaved rotary embedding, which rotates adjacent elements of a whole head:
its order is `pair half`. Where only a part of a head rotates, it is `half pair` (`formats/layout/tensors.py`)."""

BIASED_QKVO = """
model.layers.{layer}.self_attn.q_proj.weight     query: (group head half pair) hidden
model.layers.{layer}.self_attn.q_proj.bias       query_bias: (group head half pair)
model.layers.{layer}.self_attn.k_proj.weight     key: (group half pair) hidden
model.layers.{layer}.self_attn.k_proj.bias       key_bias: (group half pair)
model.layers.{layer}.self_attn.v_proj.weight     value: (group dim) hidden
model.layers.{layer}.self_attn.v_proj.bias       value_bias: (group dim)
model.layers.{layer}.self_attn.o_proj.weight     output: hidden (group head dim)
"""
BIASED_ATTENTION = EMBEDDING + BIASED_QKVO
"""The embedding, and attention as in Llama, with biases on query, key and value."""

OUTPUT_BIAS = """
model.layers.{layer}.self_attn.o_proj.bias       output_bias: hidden
"""
ALL_BIASES = BIASED_ATTENTION + OUTPUT_BIAS
"""The embedding, and attention as in Llama, with biases on query, key, value and output."""

OPTIONAL_QKVO = """
model.layers.{layer}.self_attn.q_proj.weight     query: (group head half pair) hidden
model.layers.{layer}.self_attn.q_proj.bias       query_bias: (group head half pair)    qkv_bias
model.layers.{layer}.self_attn.k_proj.weight     key: (group half pair) hidden
model.layers.{layer}.self_attn.k_proj.bias       key_bias: (group half pair)           qkv_bias
model.layers.{layer}.self_attn.v_proj.weight     value: (group dim) hidden
model.layers.{layer}.self_attn.v_proj.bias       value_bias: (group dim)               qkv_bias
model.layers.{layer}.self_attn.o_proj.weight     output: hidden (group head dim)
"""
OPTIONAL_QKV_BIASES = EMBEDDING + OPTIONAL_QKVO
"""The embedding, and attention with biases on query, key and value where a config key turns them on."""

OPTIONAL_BIASES = f"{OPTIONAL_QKV_BIASES}{OUTPUT_BIAS.strip()}    output_bias\n"
"""The embedding, and attention with biases on query, key, value and output where config keys turn them on."""

INDEXER = """
model.layers.{layer}.self_attn.indexer.wq_b.weight            index_query: (index_head index_dim) query_rank    indexing
model.layers.{layer}.self_attn.indexer.wk.weight              index_key: index_dim hidden                       indexing
model.layers.{layer}.self_attn.indexer.k_norm.weight          index_norm: index_dim                             indexing
model.layers.{layer}.self_attn.indexer.k_norm.bias            index_norm_bias: index_dim                        indexing
model.layers.{layer}.self_attn.indexer.weights_proj.weight    index_weights: index_head hidden                  indexing
"""
"""The indexer, which chooses the tokens that attention sees."""

QK_NORMS = """
model.layers.{layer}.self_attn.q_norm.weight     query_norm: (half pair)
model.layers.{layer}.self_attn.k_norm.weight     key_norm: (half pair)
"""
"""A norm on each query and key head."""

WIDTH_NORMS = """
model.layers.{layer}.self_attn.q_norm.weight     query_width_norm: (group head half pair)
model.layers.{layer}.self_attn.k_norm.weight     key_width_norm: (group half pair)
"""
"""Norms over all queries and all keys of a token."""

GATED_MLP = """
model.layers.{layer}.mlp.gate_proj.weight     gate: ffn hidden
model.layers.{layer}.mlp.up_proj.weight       up: ffn hidden
model.layers.{layer}.mlp.down_proj.weight     down: hidden ffn
"""
"""An MLP with a gate."""

PLAIN_MLP = """
model.layers.{layer}.mlp.up_proj.weight       up: ffn hidden
model.layers.{layer}.mlp.down_proj.weight     down: hidden ffn
"""
"""An MLP without a gate."""

FUSED_MLP = """
model.layers.{layer}.mlp.gate_up_proj.weight     (gate: ffn | up: ffn) hidden
model.layers.{layer}.mlp.down_proj.weight        down: hidden ffn
"""
"""An MLP with a gate, whose two matrices are fused in one tensor."""

DENSE_MLP = among("dense", GATED_MLP)
"""The MLP of layers without experts, with a gate."""

EXPERTS = """
model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight     expert_gate: expert_ffn hidden                                     sparse separate
model.layers.{layer}.mlp.experts.{expert}.up_proj.weight       expert_up: expert_ffn hidden                                       sparse separate
model.layers.{layer}.mlp.experts.{expert}.down_proj.weight     expert_down: hidden expert_ffn                                     sparse separate
model.layers.{layer}.mlp.experts.gate_up_proj                  expert (expert_gate: expert_ffn | expert_up: expert_ffn) hidden    sparse fused
model.layers.{layer}.mlp.experts.down_proj                     expert_down: expert hidden expert_ffn                              sparse fused
"""
"""Experts with a gate: one by one under the Hub's names, and fused under the names of transformers 5 in memory."""

ROUTER = """
model.layers.{layer}.mlp.gate.weight     router: expert hidden    sparse
"""
"""The router, which scores experts."""

BIASED_ROUTER = """
model.layers.{layer}.mlp.gate.weight                         router: expert hidden    sparse
model.layers.{layer}.mlp.gate.e_score_correction_bias        router_bias: expert      sparse
"""
"""The router, with a bias that is only used to choose experts."""

SHARED_EXPERTS = """
model.layers.{layer}.mlp.shared_experts.gate_proj.weight     shared_gate: shared_ffn hidden    sparse
model.layers.{layer}.mlp.shared_experts.up_proj.weight       shared_up: shared_ffn hidden      sparse
model.layers.{layer}.mlp.shared_experts.down_proj.weight     shared_down: hidden shared_ffn    sparse
"""
"""The shared experts, as one MLP."""

GATED_SHARED_EXPERT = """
model.layers.{layer}.mlp.shared_expert.gate_proj.weight     shared_gate: shared_ffn hidden    sparse
model.layers.{layer}.mlp.shared_expert.up_proj.weight       shared_up: shared_ffn hidden      sparse
model.layers.{layer}.mlp.shared_expert.down_proj.weight     shared_down: hidden shared_ffn    sparse
model.layers.{layer}.mlp.shared_expert_gate.weight          shared_router: () hidden          sparse
"""
"""A shared expert, whose output a gate scales, in Qwen2-MoE and its descendants."""

MIXTURE = DENSE_MLP + EXPERTS + BIASED_ROUTER + SHARED_EXPERTS
"""MLP, experts, router and shared experts, in the order of DeepSeek-V3."""

NORMS = """
model.layers.{layer}.input_layernorm.weight              input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight     post_norm: hidden
"""
"""The norms before attention and MLP."""

LAYER_NORMS = """
model.layers.{layer}.input_layernorm.weight              input_norm: hidden
model.layers.{layer}.input_layernorm.bias                input_norm_bias: hidden
model.layers.{layer}.post_attention_layernorm.weight     post_norm: hidden
model.layers.{layer}.post_attention_layernorm.bias       post_norm_bias: hidden
"""
"""LayerNorms, which have biases, before attention and MLP."""

NORMS_AFTER = """
model.layers.{layer}.post_attention_layernorm.weight       output_norm: hidden
model.layers.{layer}.post_feedforward_layernorm.weight     down_norm: hidden
"""
"""Norms after attention and MLP."""

NORMS_AROUND = """
model.layers.{layer}.input_layernorm.weight               input_norm: hidden
model.layers.{layer}.post_attention_layernorm.weight      output_norm: hidden
model.layers.{layer}.pre_feedforward_layernorm.weight     post_norm: hidden
model.layers.{layer}.post_feedforward_layernorm.weight    down_norm: hidden
"""
"""Norms before and after attention and MLP, as in Gemma."""


STATE_SPACE = """
model.layers.{layer}.mamba.dt_bias            state_step_bias: (state_group share)    state
model.layers.{layer}.mamba.A_log              state_decay: (state_group share)    state
model.layers.{layer}.mamba.D                  state_skip: (state_group share)    state
model.layers.{layer}.mamba.conv1d.weight      (state_x_taps: state_group share state_dim | state_b_taps: state_group state | state_c_taps: state_group state) () tap    state
model.layers.{layer}.mamba.conv1d.bias        (state_x_taps_bias: state_group share state_dim | state_b_taps_bias: state_group state | state_c_taps_bias: state_group state)    state
model.layers.{layer}.mamba.in_proj.weight     (state_gate: state_group share state_dim | state_x: state_group share state_dim | state_b: state_group state | state_c: state_group state | state_step: state_group share) hidden    state
model.layers.{layer}.mamba.norm.weight        state_norm: (state_group share state_dim)    state
model.layers.{layer}.mamba.out_proj.weight    state_output: hidden (state_group share state_dim)    state
"""
"""A state space (Mamba2); the order of its inputs is the same in all classes."""


def second(block: str, prefix: str = "model.layers.{layer}.") -> str:
    """The lines of a layer, rewritten for a layer that predicts a token after the next (MTP), under another prefix."""
    lines = [line for line in block.splitlines() if line.startswith("model.layers.{layer}.")]
    return "".join(f"{line.replace('model.layers.{layer}.', prefix)}    mtp\n" for line in lines)


SECOND = """
model.layers.{layer}.enorm.weight               mtp_embedding_norm: hidden    mtp
model.layers.{layer}.hnorm.weight               mtp_hidden_norm: hidden       mtp
model.layers.{layer}.eh_proj.weight             mtp_join: hidden joined       mtp
model.layers.{layer}.shared_head.norm.weight    mtp_final_norm: hidden        mtp
model.layers.{layer}.shared_head.head.weight    head: vocab hidden            mtp untied optional
model.layers.{layer}.shared_head.head.weight    embedding: vocab hidden       mtp tied optional
model.layers.{layer}.embed_tokens.weight        embedding: vocab hidden       mtp optional
"""
"""The tensors around the block of a layer that predicts a token after the next (MTP), in DeepSeek-V3 and its
descendants, where its number follows those of the other layers."""

HEAD = """
model.norm.weight     final_norm: hidden
lm_head.weight        head: vocab hidden         untied
lm_head.weight        embedding: vocab hidden    tied optional
"""
"""The last norm, and the output head."""

LAYER_NORM_HEAD = """
model.norm.weight     final_norm: hidden
model.norm.bias       final_norm_bias: hidden
lm_head.weight        head: vocab hidden         untied
lm_head.weight        embedding: vocab hidden    tied optional
"""
"""The last norm, a LayerNorm, and the output head."""

TORCHTITAN_ENDS = """
norm.weight       final_norm: hidden
lm_head.weight    head: vocab hidden         untied
lm_head.weight    embedding: vocab hidden    tied optional
"""
"""The native names of torchtitan 0.3.0, here and below: the last norm, and the output head."""

TORCHTITAN_ATTENTION = """
tok_embeddings.weight                            embedding: vocab hidden
layers.{layer}.attention.qkv_linear.wq.weight    query: (group head half pair) hidden
layers.{layer}.attention.qkv_linear.wk.weight    key: (group half pair) hidden
layers.{layer}.attention.qkv_linear.wv.weight    value: (group dim) hidden
layers.{layer}.attention.wo.weight               output: hidden (group head dim)
"""
"""The embedding, and attention that rotates halves."""

TORCHTITAN_NORMS = """
layers.{layer}.attention_norm.weight    input_norm: hidden
layers.{layer}.ffn_norm.weight          post_norm: hidden
"""
"""The norms before attention and MLP."""

TORCHTITAN_MLP = """
layers.{layer}.feed_forward.w1.weight    gate: ffn hidden    dense
layers.{layer}.feed_forward.w3.weight    up: ffn hidden      dense
layers.{layer}.feed_forward.w2.weight    down: hidden ffn    dense
"""
"""The MLP of layers without experts: w1 is the gate, w3 up, and w2 down."""

TORCHTITAN_MIXTURE = """
layers.{layer}.moe.routed_experts.inner_experts.w1_EFD    expert_gate: expert expert_ffn hidden    sparse
layers.{layer}.moe.routed_experts.inner_experts.w3_EFD    expert_up: expert expert_ffn hidden      sparse
layers.{layer}.moe.routed_experts.inner_experts.w2_EDF    expert_down: expert hidden expert_ffn    sparse
layers.{layer}.moe.router.gate.weight                     router: expert hidden                    sparse
"""
"""Experts and router."""

TORCHTITAN_EXPERTS = TORCHTITAN_MLP + TORCHTITAN_MIXTURE

TORCHTITAN_SHARED_EXPERTS = """
layers.{layer}.moe.shared_experts.w1.weight    shared_gate: shared_ffn hidden    sparse
layers.{layer}.moe.shared_experts.w3.weight    shared_up: shared_ffn hidden      sparse
layers.{layer}.moe.shared_experts.w2.weight    shared_down: hidden shared_ffn    sparse
"""
"""The shared experts, as one MLP."""

EXPERT_KEYS = {
    "experts": "n_routed_experts num_local_experts",
    "top_k": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "router_normalized": "norm_topk_prob",
    "router_scale": "routed_scaling_factor",
    "router_groups": "n_group",
    "router_top_groups": "topk_group",
}
"""Setting of a mixture of experts: its config key, as in DeepSeek-V3."""

ROUTER_DEFAULTS = {"router_normalized": True, "router_scale": 1.0, "router_groups": 1, "router_top_groups": 1}
"""Setting of such a router: the default of most classes."""
