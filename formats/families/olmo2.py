"""OLMo 2: norms after attention and MLP, and over all queries and all keys of a token.

Facts: transformers models/olmo2/modeling_olmo2.py, 5.23.0; formats/fsdp/native.py has the source of OLMo-core's names.
"""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS_AFTER, WIDTH_NORMS
from formats.families.family import Family

TABLE = ATTENTION + WIDTH_NORMS + GATED_MLP + NORMS_AFTER + HEAD

OLMO_CORE = """
embeddings.weight                           embedding: vocab hidden
blocks.{layer}.attention.w_q.weight         query: (group head half pair) hidden
blocks.{layer}.attention.w_k.weight         key: (group half pair) hidden
blocks.{layer}.attention.w_v.weight         value: (group dim) hidden
blocks.{layer}.attention.w_out.weight       output: hidden (group head dim)
blocks.{layer}.attention.q_norm.weight      query_width_norm: (group head half pair)
blocks.{layer}.attention.k_norm.weight      key_width_norm: (group half pair)
blocks.{layer}.feed_forward.w1.weight       gate: ffn hidden
blocks.{layer}.feed_forward.w3.weight       up: ffn hidden
blocks.{layer}.feed_forward.w2.weight       down: hidden ffn
blocks.{layer}.attention_norm.weight        output_norm: hidden
blocks.{layer}.feed_forward_norm.weight     down_norm: hidden
lm_head.norm.weight                         final_norm: hidden
lm_head.w_out.weight                        head: vocab hidden         untied
lm_head.w_out.weight                        embedding: vocab hidden    tied optional
"""
"""The names of OLMo-core, with which OLMo is trained; its norms follow attention and MLP (`reordered_norm`)."""

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False},
    only_here="megatron-core has no norms after attention and MLP, and none over all heads of a token",
    mha=True,
    tokens={"eos_token_id": 50279},
    native={"olmo-core": OLMO_CORE},
)
