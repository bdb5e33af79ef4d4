"""Megatron's layers for multi-token prediction (MTP): blocks like those of the decoder, with norms and a projection.

Facts: megatron-core 0.16.1, transformer/multi_token_prediction.py (names, and the order of parameters),
models/gpt/gpt_model.py: MTP layers are on the last stage, which then has the embedding too;
transformer/transformer_block.py: the decoder's final norm is on the stage of its last layer. Modules, classic files and
fsdp_dtensor call a block `mtp_model_layer` since 0.17; torch_dist has the older name, and never stacks MTP layers
(`sharded_state_dict`). 0.16.1 and 0.19.2, models/gpt/gpt_layer_specs.py `get_gpt_mtp_block_spec_for_backend`: a block
is built like the last layer of the decoder; multi_token_prediction.py `MultiTokenPredictionLayer.__init__` asserts that
it has attention with a mask. Megatron-Bridge 0.4.2 to 0.6.0, models/gpt_provider.py `mtp_block_spec`, calls the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from formats.errors import RefusedError
from formats.layout.table import MTP, Rule, rules
from formats.megatron.pipeline import Chunk, Pipeline
from formats.model.spec import ModelSpec

MIXERS = {"recurrent", "state"}
"""Conditions of decoder rows that no MTP layer has: mixers in the place of attention."""
BLOCK = "transformer_layer"
"""The name of a block up to 0.16, and in torch_dist always."""
DROP = "--drop mtp where the source is one of Hugging Face, FSDP or DeepSpeed"
STATES = ("eh_proj",)
TE_STATES = ("enorm", "hnorm", "final_layernorm")
"""The modules around a block whose `_extra_state` a strict load of torch_dist asks for; norms of Transformer Engine."""
LAYER, DEPTH = "decoder.layers.{layer}.", "mtp.layers.{depth}."
BEFORE = rules("""
mtp.layers.{depth}.enorm.weight      mtp_embedding_norm: hidden    mtp last
mtp.layers.{depth}.hnorm.weight      mtp_hidden_norm: hidden    mtp last
mtp.layers.{depth}.eh_proj.weight    mtp_join: hidden/tp joined    mtp last
""")
BEHIND = rules("""
mtp.layers.{depth}.final_layernorm.weight    mtp_final_norm: hidden    mtp last
embedding.word_embeddings.weight             (embedding: vocab | ~padding)/tp hidden    last predicting copy
""")


def rules_of(table: Iterable[Rule], block: str = f"{{{BLOCK}|mtp_model_layer}}") -> tuple[Rule, ...]:
    """The table rows of MTP layers, made of the rows of a decoder.

    Args:
        table: the rows of the decoder.
        block: the name of a block in keys.
    """
    layers = [rule for rule in table if rule.key.startswith(LAYER) and not rule.conditions & MIXERS]
    inner = [
        replace(rule, key=rule.key.replace(LAYER, f"{DEPTH}{block}."), conditions=rule.conditions | {MTP, "last"})
        for rule in layers
    ]
    return (*BEFORE, *inner, *BEHIND)


def layers_of(spec: ModelSpec, decoder: Iterable[int], *, last: bool = True) -> list[tuple[int, int]]:
    """(number in the key, number in the model) of each layer of a chunk.

    Args:
        spec: the model.
        decoder: the numbers in the model of the chunk's decoder layers.
        last: whether the chunk is the last, which has the MTP layers too.
    """
    further = [(depth, spec.layers + depth) for depth in range(spec.mtp_layers if last else 0)]
    return [*enumerate(decoder), *further]


def require_attention(spec: ModelSpec) -> None:
    """Refuse MTP layers behind a decoder whose last layer has no attention, as they do.

    Raises:
        RefusedError: the last layer of the decoder has linear attention.
    """
    if spec.mtp_layers and "attention" not in spec.layer_kinds[spec.layers - 1]:
        raise RefusedError(
            "megatron-core builds the layer that predicts a second token like the last layer of the decoder, and layer "
            f"{spec.layers - 1}, the last of this {spec.family}, has linear attention, with which it builds none",
            DROP,
        )


def require_pipeline(spec: ModelSpec, pipeline: Pipeline, parts: Iterable[Chunk]) -> None:
    """Refuse a pipeline in which the stage of the MTP layers is not that of the decoder's last layer.

    Raises:
        RefusedError: the last stage has no decoder layer, or the pipeline has a layout of its own.
    """
    if spec.mtp_layers and (pipeline.layout or any(chunk.last and not chunk.layers for chunk in parts)):
        raise RefusedError(
            "layers that predict further tokens go to the last stage, after a layer of the decoder: a pipeline "
            "layout, or a last stage without layers, is not supported with them",
            f"stages of one size, or {DROP}",
        )
