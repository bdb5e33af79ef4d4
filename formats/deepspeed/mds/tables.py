"""The layouts of Megatron-DeepSpeed: the tensors of the modules of its pipeline, and their files.

Module 1 is the embedding. In the trees of deepspeedai and OpenLLM-France layers are numbered from 2, followed by the
final norm and the head. In BigScience's tree (BLOOM) layers are numbered from 3, as module 2 is a function, and another
function is between the layers and the norm.

Facts: megatron/model/gpt_model.py and transformer.py of deepspeedai/Megatron-DeepSpeed at 6acc370a and 4efb479d, of
OpenLLM-France's at a106b24, of bigscience-workshop's at 8387ae17; checkpoints that they wrote are in the tests, with
their logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from formats.deepspeed.modules import file_of, require_whole_heads, with_module_numbers
from formats.layout.slots import Place, Slot, slots
from formats.layout.table import rules
from formats.model.spec import ModelSpec

EMBEDDING = 1
FIRST_LAYER, OF_BIGSCIENCE = 2, 3
"""The module number of the first layer: in most trees, and in BigScience's."""
FIRST_LAYERS = {FIRST_LAYER: 0, OF_BIGSCIENCE: 1}
"""Number of the first layer: how many functions are between the last layer and the norm."""
FAMILIES = {"gpt2": FIRST_LAYER, "llama": FIRST_LAYER, "bloom": OF_BIGSCIENCE}
"""Supported family, trained by Megatron-DeepSpeed itself for the tests: the number of the first layer in the tree for
which it is written. BigScience's tree has one order of query, key and value: group by group."""
ORDERS = ("grouped", "blocked", "separate")
"""The orders of query, key and value, as conditions of table rows; exactly one holds."""

TABLE = rules("""
1.word_embeddings.weight                            (embedding: vocab | ~padding)/tp hidden
1.word_embeddings.norm.weight                       embedding_norm: hidden
1.word_embeddings.norm.bias                         embedding_norm_bias: hidden
1.position_embeddings.weight                        positions: position hidden
{layer}.input_layernorm.weight                      input_norm: hidden
{layer}.input_layernorm.bias                        input_norm_bias: hidden
{layer}.self_attention.query_key_value.weight       (group (query: head half pair | key: half pair | value: dim))/tp hidden    grouped
{layer}.self_attention.query_key_value.bias         (group (query_bias: head half pair | key_bias: half pair | value_bias: dim))/tp    grouped
{layer}.self_attention.query_key_value.weight       (query: group/tp head half pair | key: group/tp half pair | value: group/tp dim) hidden    blocked
{layer}.self_attention.query_key_value.bias         (query_bias: group/tp head half pair | key_bias: group/tp half pair | value_bias: group/tp dim)    blocked
{layer}.self_attention.query.weight                 query: (group head half pair)/tp hidden    separate
{layer}.self_attention.query.bias                   query_bias: (group head half pair)/tp    separate
{layer}.self_attention.key_value.weight             (group (key: half pair | value: dim))/tp hidden    separate
{layer}.self_attention.key_value.bias               (group (key_bias: half pair | value_bias: dim))/tp    separate
{layer}.self_attention.dense.weight                 output: hidden (group head dim)/tp
{layer}.self_attention.dense.bias                   output_bias: hidden
{layer}.post_attention_layernorm.weight             post_norm: hidden
{layer}.post_attention_layernorm.bias               post_norm_bias: hidden
{layer}.mlp.dense_h_to_4h.weight                    (gate: ffn/tp | up: ffn/tp) hidden
{layer}.mlp.dense_h_to_4h.weight                    up: ffn/tp hidden    plain
{layer}.mlp.dense_h_to_4h.bias                      (gate_bias: ffn/tp | up_bias: ffn/tp)
{layer}.mlp.dense_h_to_4h.bias                      up_bias: ffn/tp    plain
{layer}.mlp.dense_4h_to_h.weight                    down: hidden ffn/tp
{layer}.mlp.dense_4h_to_h.bias                      down_bias: hidden
{norm}.weight                                       final_norm: hidden
{norm}.bias                                         final_norm_bias: hidden
{head}.lm_head.weight                               (head: vocab | ~padding)/tp hidden    untied
""")
"""The layout of GPTModelPipe. A tied head is a function of the last stage's copy of module 1; functions have no files
(deepspeed/runtime/pipe/module.py `_build`, `save_state_dict`, 0.19.8)."""


def norm_number(first: int, layers: int) -> int:
    """Return the module number of the final norm for `layers` layers numbered from `first`; the head has the next."""
    return first + layers + FIRST_LAYERS[first]


def slots_of(spec: ModelSpec, tp: int, padded: int, order: Iterable[str], first: int) -> Iterator[Slot]:
    """Yield every physical tensor of a pipeline.

    Args:
        spec: the model.
        tp: tensor parallel size.
        padded: rows of the vocabulary, padding among them.
        order: the order of query, key and value, as the condition of table rows that holds.
        first: the number of the first layer.
    """
    require_whole_heads(spec, tp)
    table = with_module_numbers(TABLE, norm_number(first, spec.layers))
    for rank in range(tp):
        for slot in slots(
            table,
            spec.sizes(padded),
            tensors=spec.tensors,
            layers=[(layer + first, layer) for layer in range(spec.layers)],
            mesh={"tp": (rank, tp)},
            conditions={*spec.conditions, *order},
            kinds=spec.layer_kinds,
        ):
            yield slot._replace(place=Place(file_of(int(slot.keys[0].partition(".")[0]), rank)))
