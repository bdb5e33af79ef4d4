"""The layouts of GPT-NeoX: the tensors of its modules, and the files that hold them.

Module 0 is the embedding, 2 to L + 1 are the layers, L + 3 is the last norm, L + 4 the head; 1 and L + 2 have no
tensors. Facts: EleutherAI/gpt-neox at ea7aefd8, megatron/model/gpt2_model.py and transformer.py; the tests have
checkpoints that GPT-NeoX wrote, with its own logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from formats.deepspeed.modules import file_of, require_whole_heads, with_module_numbers
from formats.families import family_named
from formats.layout.slots import Place, Slot
from formats.layout.table import rules
from formats.model.spec import ModelSpec

FIRST_LAYER = 2

LLAMA = rules("""
0.word_embeddings.weight                                                                        (embedding: vocab | ~padding)/tp hidden
{layer}.input_layernorm.{scale|norm.weight}                                                     input_norm: hidden
{layer}.attention.query_key_value.weight                                                        (group (query: head half pair | key: half pair | value: dim))/tp hidden    mha
{layer}.attention.query_key_value.weight                                                        (query: group/tp head half pair | key: group/tp half pair | value: group/tp dim) hidden    gqa
{layer}.attention.query_key_value.weight:query                                                  query: (group head half pair)/tp hidden    grouped
{layer}.attention.query_key_value.weight:key                                                    key: (group half pair)/tp hidden    grouped
{layer}.attention.query_key_value.weight:value                                                  value: (group dim)/tp hidden    grouped
{layer}.attention.dense.weight                                                                  output: hidden (group head dim)/tp
{layer}.post_attention_layernorm.{scale|norm.weight}                                            post_norm: hidden
{layer}.mlp.linear1.weight                                                                      (up: ffn/tp | gate: ffn/tp) hidden    fused
{layer}.mlp.w1.weight                                                                           gate: ffn/tp hidden    separate
{layer}.mlp.w3.weight                                                                           up: ffn/tp hidden    separate
{layer}.mlp.{linear2|w2}.weight                                                                 down: hidden ffn/tp
{norm}.norm.{scale|norm.weight}                                                                 final_norm: hidden
{head}.final_linear.weight                                                                      (head: vocab | ~padding)/tp hidden    untied
""")
"""The layout of models with RMSNorm, a gate and no biases. `.norm.weight` is Transformer Engine's norm
(transformer_engine.py:70, from the source: it runs on no CPU); w1, w2 and w3 are from before September 2024."""

GPT_NEOX = rules("""
0.word_embeddings.weight                                     (embedding: vocab | ~padding)/tp hidden
0.position_embeddings.weight                                 positions: position hidden
{layer}.input_layernorm.weight                               input_norm: hidden
{layer}.input_layernorm.bias                                 input_norm_bias: hidden
{layer}.attention.query_key_value.weight                     (group (query: head half pair | key: half pair | value: dim))/tp hidden
{layer}.attention.query_key_value.bias                       (group (query_bias: head half pair | key_bias: half pair | value_bias: dim))/tp
{layer}.attention.dense.weight                               output: hidden (group head dim)/tp
{layer}.attention.dense.bias                                 output_bias: hidden    serial
{layer}.attention.dense.bias                                 output_bias: hidden    parallel partial
{layer}.post_attention_layernorm.weight                      post_norm: hidden
{layer}.post_attention_layernorm.bias                        post_norm_bias: hidden
{layer}.mlp.{linear1|dense_h_to_4h}.weight                   up: ffn/tp hidden
{layer}.mlp.{linear1|dense_h_to_4h}.bias                     up_bias: ffn/tp
{layer}.mlp.{linear2|dense_4h_to_h}.weight                   down: hidden ffn/tp
{layer}.mlp.{linear2|dense_4h_to_h}.bias                     down_bias: hidden    serial
{layer}.mlp.{linear2|dense_4h_to_h}.bias                     down_bias: hidden    parallel partial
{norm}.norm.weight                                           final_norm: hidden
{norm}.norm.bias                                             final_norm_bias: hidden
{head}.final_linear.weight                                   (head: vocab | ~padding)/tp hidden    untied
""")
"""The layout of models with LayerNorm, biases and no gate. With a parallel residual each rank adds its own bias before
the sum over all ranks; with a serial one the bias is added once, after the sum (transformer.py:1041-1177,
`parallel_output`). Learned positions are whole on each rank (word_embeddings.py:88)."""

TABLES = {"llama": LLAMA, "pythia": GPT_NEOX, "gpt2": GPT_NEOX}
"""The layout by kind of model (`Family.neox`)."""


def slots_of(spec: ModelSpec, tp: int, padded: int, conditions: Iterable[str], *, layered: bool) -> Iterator[Slot]:
    """The slot of every physical tensor of a topology.

    Args:
        spec: the model.
        tp: tensor parallel size.
        padded: rows of the embedding.
        conditions: the conditions of table rows that leave a choice.
        layered: whether each module has files of its own, as in a pipeline; else a sequential checkpoint.
    """
    require_whole_heads(spec, tp)
    table = with_module_numbers(TABLES[family_named(spec.family).neox], spec.layers + FIRST_LAYER + 1)
    residual = {"serial"} if spec.parallel_residual is None else set[str]()  # fixed for the family
    layers = [(layer + FIRST_LAYER, layer) for layer in range(spec.layers)]
    for rank in range(tp):
        for slot in spec.slots_in(
            table, spec.sizes(padded), {*conditions, *residual}, layers=layers, mesh={"tp": (rank, tp)}
        ):
            index = int(slot.keys[0].partition(".")[0])
            yield slot._replace(place=Place(file_of(index, rank, layered=layered)))
