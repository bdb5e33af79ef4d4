"""The layout of MaxText's tensors, with separate tensors for each layer.

Matrices are input-major. With scanned layers (`scan_layers`) an array stacks all layers along its second dimension
(`param_scan_axis: 1`); it is split into layers before this table is applied.

The decoders of Llama, Mistral and Mixtral do not scale attention scores: their query matrix is divided by the square
root of the head dimension, which is `rooted` here. Qwen2 and Qwen3 scale queries in the computation. Rotary embeddings
rotate halves of a head (`rope_type: default`), or neighbouring rows (`llama3.1`).

Facts: maxtext 0.2.5 (PyPI), layers/attentions.py (`init_query_w`, `init_rotary_embedding`), layers/embeddings.py,
layers/linears.py, layers/moe.py, models/llama2.py, mistral.py, mixtral.py, qwen2.py, qwen3.py; checkpoints that it
saved are in tests/golden/maxtext, with its logits.
"""

from __future__ import annotations

from formats.layout.slots import Slot
from formats.layout.table import Rule, rules
from formats.model.spec import ModelSpec

_TABLE = """
token_embedder.embedding                                         embedding: (vocab | ~padding) hidden
decoder.layers_{layer}.pre_self_attention_layer_norm.scale       input_norm: hidden
decoder.layers_{layer}.self_attention.query.kernel               query: hidden (group head) (half pair)
decoder.layers_{layer}.self_attention.query.bias                 query_bias: (group head) (half pair)
decoder.layers_{layer}.self_attention.query_norm.scale           query_norm: (half pair)
decoder.layers_{layer}.self_attention.key.kernel                 key: hidden group (half pair)
decoder.layers_{layer}.self_attention.key.bias                   key_bias: group (half pair)
decoder.layers_{layer}.self_attention.key_norm.scale             key_norm: (half pair)
decoder.layers_{layer}.self_attention.value.kernel               value: hidden group dim
decoder.layers_{layer}.self_attention.value.bias                 value_bias: group dim
decoder.layers_{layer}.self_attention.out.kernel                 output: (group head) dim hidden
decoder.layers_{layer}.post_self_attention_layer_norm.scale      post_norm: hidden
decoder.layers_{layer}.mlp.wi_0.kernel                           gate: hidden ffn    dense
decoder.layers_{layer}.mlp.wi_1.kernel                           up: hidden ffn    dense
decoder.layers_{layer}.mlp.wo.kernel                             down: ffn hidden    dense
decoder.layers_{layer}.{moe_block|MoeBlock_0}.gate.kernel        router: hidden expert    sparse
decoder.layers_{layer}.{moe_block|MoeBlock_0}.wi_0               expert_gate: expert hidden expert_ffn    sparse
decoder.layers_{layer}.{moe_block|MoeBlock_0}.wi_1               expert_up: expert hidden expert_ffn    sparse
decoder.layers_{layer}.{moe_block|MoeBlock_0}.wo                 expert_down: expert expert_ffn hidden    sparse
decoder.decoder_norm.scale                                       final_norm: hidden
decoder.logits_dense.kernel                                      head: hidden (vocab | ~padding)    untied
"""
_QUERY = "query: hidden (group head) (half pair)"
ROOTED = "rooted"
FAMILIES = {"llama": True, "mistral": True, "mixtral": True, "qwen2": False, "qwen3": False, "qwen3_moe": False}
"""Supported family: whether its decoder has the query divided by the square root of the head dimension."""


def _table(*, rooted: bool, neighbours: bool) -> tuple[Rule, ...]:
    text = _TABLE.replace(_QUERY, f"{_QUERY}    {ROOTED}") if rooted else _TABLE
    return rules(text.replace("(half pair)", "(pair half)") if neighbours else text)


TABLES = {
    f"maxtext ({'neighbours' if neighbours else 'halves'}{', root in the query' if rooted else ''})": _table(
        rooted=rooted, neighbours=neighbours
    )
    for neighbours in (False, True)
    for rooted in (False, True)
}
"""The layouts, in the order by which `slots_of` indexes them."""


def slots_of(spec: ModelSpec, padded: int, *, neighbours: bool) -> list[Slot]:
    """Return the tensors of a model, each layer separately; `padded` is the rows of the embedding with padding."""
    table = [*TABLES.values()][2 * neighbours + FAMILIES[spec.family]]
    return spec.slots_in(table, spec.sizes(padded))
