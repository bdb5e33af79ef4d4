"""The layout of nanotron: its tensors as they are when the shards of all ranks are put together.

Where a dimension is split over tensor parallel ranks, `/tp` says so: such tensors have a file for each rank, the others
one. Query, key and value follow one another in one matrix, as gate and up do, and each is split by itself.

Facts: huggingface/nanotron at 2411b022, models/llama.py, models/qwen.py, nn/moe.py; what it saved is in
tests/golden/nanotron, with its own logits.
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
"""Whether halves of a head rotate, or neighbours (`rope_interleaved`). A tied head has no file."""
TABLES = {"nanotron (halves)": HALVES, "nanotron (neighbours)": NEIGHBOURS}
WHOLE = (0, 1)
"""The rank of a training with one tensor parallel rank, and how many there are."""


def slots_of(spec: ModelSpec, padded: int, *, neighbours: bool, tp: tuple[int, int] = WHOLE) -> list[Slot]:
    """The tensors of a model with so many rows of the embedding: put together, or as a tensor parallel rank has them."""
    return spec.slots_in(NEIGHBOURS if neighbours else HALVES, spec.sizes(padded), mesh={"tp": tp})
