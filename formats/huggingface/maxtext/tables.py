"""The layout of MaxText's tensors, with separate tensors for each layer.

Matrices are input-major. Arrays of several layers are split into layers before a table is applied (`layers.py`).

The decoders of Llama, Mistral, Mixtral and Gemma 2 do not scale attention scores: their query matrix is divided by the
square root that the scores of other frameworks are divided by, which is `rooted` here. Qwen2, Qwen3 and Gemma 3 scale
queries in the computation. Gemma's norms multiply by the stored weight (`raised`: transformers adds 1 to its own), and
its embedding is looked up as it is stored (`scaled`: transformers multiplies by the root). Rotary embeddings rotate
halves of a head (`rope_type: default`), or neighbouring rows (`llama3.1`).

Facts: maxtext 0.2.5 (PyPI), layers/attentions.py (`init_query_w`, `init_rotary_embedding`), layers/embeddings.py,
layers/linears.py, layers/moe.py, layers/nnx_decoders.py (`apply_output_head`), models/llama2.py, mistral.py,
mixtral.py, qwen2.py, qwen3.py, gemma2.py, gemma3.py; checkpoints that it saved are in tests/golden/maxtext, with its
logits.
"""

from __future__ import annotations

from typing import NamedTuple

from formats.layout.slots import Slot
from formats.layout.table import Rule, rules
from formats.model.spec import ModelSpec

_ATTENTION = """
decoder.layers_{layer}.self_attention.query.kernel               query: hidden (group head) (half pair)
decoder.layers_{layer}.self_attention.key.kernel                 key: hidden group (half pair)
decoder.layers_{layer}.self_attention.value.kernel               value: hidden group dim
decoder.layers_{layer}.self_attention.out.kernel                 output: (group head) dim hidden
decoder.layers_{layer}.mlp.wi_0.kernel                           gate: hidden ffn    dense
decoder.layers_{layer}.mlp.wi_1.kernel                           up: hidden ffn    dense
decoder.layers_{layer}.mlp.wo.kernel                             down: ffn hidden    dense
"""
_LLAMA = f"""
token_embedder.embedding                                         embedding: (vocab | ~padding) hidden
decoder.layers_{{layer}}.pre_self_attention_layer_norm.scale       input_norm: hidden
{_ATTENTION}
decoder.layers_{{layer}}.self_attention.query.bias                 query_bias: (group head) (half pair)
decoder.layers_{{layer}}.self_attention.query_norm.scale           query_norm: (half pair)
decoder.layers_{{layer}}.self_attention.key.bias                   key_bias: group (half pair)
decoder.layers_{{layer}}.self_attention.key_norm.scale             key_norm: (half pair)
decoder.layers_{{layer}}.self_attention.value.bias                 value_bias: group dim
decoder.layers_{{layer}}.post_self_attention_layer_norm.scale      post_norm: hidden
decoder.layers_{{layer}}.{{moe_block|MoeBlock_0}}.gate.kernel        router: hidden expert    sparse
decoder.layers_{{layer}}.{{moe_block|MoeBlock_0}}.wi_0               expert_gate: expert hidden expert_ffn    sparse
decoder.layers_{{layer}}.{{moe_block|MoeBlock_0}}.wi_1               expert_up: expert hidden expert_ffn    sparse
decoder.layers_{{layer}}.{{moe_block|MoeBlock_0}}.wo                 expert_down: expert expert_ffn hidden    sparse
decoder.decoder_norm.scale                                       final_norm: hidden
decoder.logits_dense.kernel                                      head: hidden (vocab | ~padding)    untied
"""
_GEMMA = f"""
token_embedder.embedding                                         embedding: (vocab | ~padding) hidden    scaled
decoder.layers_{{layer}}.pre_self_attention_norm.scale             input_norm: hidden    raised
{_ATTENTION}
decoder.layers_{{layer}}.self_attention.query_norm.scale           query_norm: (half pair)    raised
decoder.layers_{{layer}}.self_attention.key_norm.scale             key_norm: (half pair)    raised
decoder.layers_{{layer}}.post_self_attention_norm.scale            output_norm: hidden    raised
decoder.layers_{{layer}}.pre_ffw_norm.scale                        post_norm: hidden    raised
decoder.layers_{{layer}}.post_ffw_norm.scale                       down_norm: hidden    raised
decoder.decoder_norm.scale                                       final_norm: hidden    raised
"""
_QUERY = "query: hidden (group head) (half pair)"
ROOTED, RAISED, SCALED = "rooted", "raised", "scaled"


class Decoder(NamedTuple):
    """A decoder of MaxText: whether its query is stored divided by a root, and whether it is one of Gemma."""

    rooted: bool = False
    gemma: bool = False


FAMILIES = {
    "llama": Decoder(rooted=True),
    "mistral": Decoder(rooted=True),
    "mixtral": Decoder(rooted=True),
    "qwen2": Decoder(),
    "qwen3": Decoder(),
    "qwen3_moe": Decoder(),
    "gemma2": Decoder(rooted=True, gemma=True),
    "gemma3_text": Decoder(gemma=True),
}
"""The decoder of each supported family."""


def _name(decoder: Decoder, *, neighbours: bool) -> str:
    about = "Gemma, " if decoder.gemma else ""
    about += "neighbours" if neighbours else "halves"
    return f"maxtext ({about}{', root in the query' if decoder.rooted else ''})"


def _table(decoder: Decoder, *, neighbours: bool) -> tuple[Rule, ...]:
    text = _GEMMA if decoder.gemma else _LLAMA
    text = text.replace(_QUERY, f"{_QUERY}    {ROOTED}") if decoder.rooted else text
    return rules(text.replace("(half pair)", "(pair half)") if neighbours else text)


TABLES = {
    _name(decoder, neighbours=neighbours): _table(decoder, neighbours=neighbours)
    for decoder in dict.fromkeys(FAMILIES.values())
    for neighbours in (False, True)
    if not (decoder.gemma and neighbours)
}
"""The layouts, by name."""


def slots_of(spec: ModelSpec, padded: int, *, neighbours: bool) -> list[Slot]:
    """Return the tensors of a model, each layer separately; `padded` is the rows of the embedding with padding."""
    table = TABLES[_name(FAMILIES[spec.family], neighbours=neighbours)]
    return spec.slots_in(table, spec.sizes(padded))
