"""The layout of nanotron's tensors, with the shards of all ranks joined.

`/tp` marks a dimension that is split over tensor-parallel ranks: such a tensor has a file for each rank, any other
tensor has one file. Query, key and value are concatenated in one matrix, as gate and up are; each is split by itself.

Facts: huggingface/nanotron at 2411b022, models/llama.py, models/qwen.py, nn/moe.py; checkpoints that it
saved are in tests/golden/nanotron, with its logits.
"""

from __future__ import annotations

from formats.layout.slots import Slot
from formats.layout.table import rules
from formats.model.spec import ModelSpec

_TABLE = """
model.token_position_embeddings.pp_block.token_embedding.weight  (embedding: vocab | ~padding)/tp hidden
model.decoder.{layer}.pp_block.input_layernorm.weight            input_norm: hidden
model.decoder.{layer}.pp_block.attn.qkv_proj.weight              (query: group/tp head half pair | key: group/tp half pair | value: group/tp dim) hidden
model.decoder.{layer}.pp_block.attn.qkv_proj.bias                (query_bias: group/tp head half pair | key_bias: group/tp half pair | value_bias: group/tp dim)
model.decoder.{layer}.pp_block.attn.o_proj.weight                output: hidden (group head dim)/tp
model.decoder.{layer}.pp_block.post_attention_layernorm.weight   post_norm: hidden
model.decoder.{layer}.pp_block.mlp.gate_up_proj.weight           (gate: ffn/tp | up: ffn/tp) hidden    dense
model.decoder.{layer}.pp_block.mlp.down_proj.weight              down: hidden ffn/tp    dense
model.decoder.{layer}.pp_block.mlp.router.weight                 router: expert hidden    sparse
model.decoder.{layer}.pp_block.mlp.experts.merged_gate_up_proj   expert hidden (expert_gate: expert_ffn | expert_up: expert_ffn)    sparse
model.decoder.{layer}.pp_block.mlp.experts.merged_down_proj      expert_down: expert expert_ffn hidden    sparse
model.decoder.{layer}.pp_block.mlp.shared_expert.gate_up_proj.weight  (shared_gate: shared_ffn/tp | shared_up: shared_ffn/tp) hidden    sparse
model.decoder.{layer}.pp_block.mlp.shared_expert.down_proj.weight     shared_down: hidden shared_ffn/tp    sparse
model.decoder.{layer}.pp_block.mlp.shared_expert_gate.weight     shared_router: () hidden    sparse
model.final_layer_norm.pp_block.weight                           final_norm: hidden
model.lm_head.pp_block.weight                                    (head: vocab | ~padding)/tp hidden    untied
"""
HALVES, NEIGHBOURS = rules(_TABLE), rules(_TABLE.replace("half pair", "pair half"))
"""The layouts in which rotary embeddings rotate halves of a head, or neighbouring rows (`rope_interleaved`). A tied head
has no file."""
TABLES = {"nanotron (halves)": HALVES, "nanotron (neighbours)": NEIGHBOURS}
WHOLE = (0, 1)
"""(rank, number of ranks) of a training with one tensor-parallel rank."""


def slots_of(spec: ModelSpec, padded: int, *, neighbours: bool, tp: tuple[int, int] = WHOLE) -> list[Slot]:
    """Return the tensors of a model: whole, or as the tensor-parallel rank `tp` = (rank, ranks) holds them.

    `padded` is the number of rows of the embedding, padding among them.
    """
    return spec.slots_in(NEIGHBOURS if neighbours else HALVES, spec.sizes(padded), mesh={"tp": tp})
