"""Which layers each pipeline stage and virtual chunk holds.

The rules are those of megatron-core 0.16.1 (transformer/transformer_layer.py `get_transformer_layer_offset` and
transformer/transformer_block.py `get_num_layers_to_build`), against which the tests compare every case; stages in the
pattern of a hybrid are those of 0.19.2 (models/hybrid/hybrid_layer_allocation.py `select_pipeline_segment`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.model.values import MOST_LAYERS

PATTERN = "hybrid_override_pattern|hybrid_layer_pattern"
"""The arguments for the kind of each layer of a hybrid, as letters; the second is the name since 0.17."""
LONGEST = 100_000
"""The largest number of characters of an expanded pipeline layout."""


@dataclass(frozen=True)
class Chunk:
    """A contiguous run of layers: virtual chunk `virtual` of pipeline stage `stage`."""

    stage: int
    virtual: int
    layers: range
    first: bool
    last: bool


@dataclass(frozen=True)
class Pipeline:
    """How layers are cut into stages, in Megatron's terms.

    `first_layers` and `last_layers` are --decoder-first/last-pipeline-num-layers, `embedding` and `loss` are
    --account-for-embedding/loss-in-pipeline-split, `layout` is --pipeline-model-parallel-layout.
    """

    stages: int = 1
    virtual: int = 1
    first_layers: int | None = None
    last_layers: int | None = None
    embedding: bool = False
    loss: bool = False
    layout: str | None = None


def chunks(pipeline: Pipeline, layers: int) -> list[Chunk]:
    """The chunks of a model in the order of its layers.

    Raises:
        RefusedError: the layers do not divide over the chunks, or the pipeline layout holds another number of layers.
    """
    if pipeline.layout:
        counts = _layout_counts(pipeline)
        if sum(counts) != layers:
            raise RefusedError(
                f"the pipeline layout {short(pipeline.layout)} holds {sum(counts)} layers, the model has {layers}"
            )
    else:
        counts = _even_counts(pipeline, layers)
    result, start = [], 0
    for index, count in enumerate(counts):
        virtual, stage = divmod(index, pipeline.stages)
        result.append(Chunk(stage, virtual, range(start, start + count), index == 0, index == len(counts) - 1))
        start += count
    return result


def _divide(layers: int, parts: int, what: str) -> int:
    if parts < 1 or layers % parts or layers < 0:
        raise RefusedError(
            f"{layers} {what} do not divide over {parts} pipeline parts",
            f"--pp times --vpp may be {_divisors(layers)}; stages of other sizes: --first-stage-layers N, "
            "--last-stage-layers N or --pp-layout LAYOUT"
            if what == "layers"
            else "",
        )
    return layers // parts


def _divisors(layers: int) -> str:
    return ", ".join(str(parts) for parts in range(1, layers + 1) if layers % parts == 0)


def _even_counts(pipeline: Pipeline, layers: int) -> list[int]:
    """The number of layers of each chunk, chunk 0 of every stage first.

    Raises:
        RefusedError: the layers do not divide over the chunks.
    """
    stages, virtual = pipeline.stages, pipeline.virtual
    ends = [pipeline.first_layers, pipeline.last_layers]
    if ends != [None, None]:
        if pipeline.embedding or pipeline.loss:
            raise RefusedError("first/last stage layers and account-for-embedding/loss exclude each other")
        middle = stages - sum(end is not None for end in ends)
        rest = layers - sum(end or 0 for end in ends)
        if rest < 0:
            raise RefusedError(f"the first and last stage would hold {layers - rest} layers, the model has {layers}")
        if middle == 0 and rest:
            raise RefusedError(f"{rest} of {layers} layers lie between the first and the last of {stages} stages")
        share = _divide(rest, middle, "middle layers") if middle else 0
        sizes = [share] * stages
        if ends[0] is not None:
            sizes[0] = ends[0]
        if ends[1] is not None:
            sizes[-1] = ends[1]
        return [_divide(size, virtual, "layers of a stage") for _ in range(virtual) for size in sizes]
    extra = int(pipeline.embedding) + int(pipeline.loss)
    share = _divide(layers + extra, stages * virtual, "layers" if not extra else "layers with embedding and loss")
    counts = [share] * (stages * virtual)
    counts[0] -= pipeline.embedding
    counts[-1] -= pipeline.loss
    return counts


def virtual_chunks(layout: str, stages: int) -> int:
    """The number of virtual chunks of each stage in a pipeline layout.

    Raises:
        RefusedError: the entries of the layout do not divide over the stages.
    """
    return _divide(len(_entries(layout)), stages, f"entries of the pipeline layout {short(layout)}")


def _layout_counts(pipeline: Pipeline) -> list[int]:
    """The number of decoder layers in each entry of a pipeline layout.

    Raises:
        RefusedError: the layout has not one entry for each chunk of each stage.
    """
    entries = _entries(pipeline.layout or "")
    if len(entries) != pipeline.stages * pipeline.virtual:
        raise RefusedError(
            f"the pipeline layout {short(pipeline.layout)} has {len(entries)} entries for {pipeline.stages} stages of "
            f"{pipeline.virtual} chunks"
        )
    return [entry.count("t") for entry in entries]


def _entries(layout: str) -> list[str]:
    """The entries of a pipeline layout such as `Et*3|(tt|)*29,t|L`, chunk 0 of every stage first.

    E is the embedding, t a decoder layer, L the loss; `|` ends an entry, commas are cosmetic, `x*n` and `(..)*n` repeat
    (megatron-core transformer/pipeline_parallel_layer_layout.py). m, a multi-token-prediction layer, is not supported.

    Raises:
        UnsupportedError: the layout holds more than E, t, L and |.
        RefusedError: the layout is too long, or does not begin with its only E and end with its only L.
    """
    refused, text = f"the pipeline layout {short(layout)}", layout.replace(",", "").replace(" ", "")
    while repeat := re.search(r"\(([^()]*)\)\*(\d+)|([a-zA-Z|])\*(\d+)", text):
        body, count = (repeat[1], repeat[2]) if repeat[1] is not None else (repeat[3], repeat[4])
        if len(count) > 5 or len(text) + len(body) * int(count) > LONGEST:
            raise RefusedError(f"{refused} is longer than any model")
        text = text[: repeat.start()] + body * int(count) + text[repeat.end() :]
    if not re.fullmatch(r"[EtL|]*", text):
        raise UnsupportedError(f"{refused} holds more than E, t, L and |")
    if not re.fullmatch(r"\|*E[t|]*L\|*", text):
        raise RefusedError(f"{refused} has to begin with its one E and to end with its one L")
    return text.split("|")


def pipeline_of(args: Mapping[str, Any], pp: int, virtual: int, path: Path) -> Pipeline:
    """The pipeline of a checkpoint, as its args describe it.

    Args:
        args: the attributes of the checkpoint's `args`.
        pp: pipeline parallel size.
        virtual: virtual chunks of each stage.
        path: the file that holds the args, for errors.

    Raises:
        SourceError: the layers of the first or last stage are no numbers.
        UnsupportedError: the pipeline layout is no text.
    """
    layout = args.get("pipeline_model_parallel_layout")
    for pattern in (args.get(name) for name in PATTERN.split("|")):
        if isinstance(pattern, str) and "|" in pattern:  # stages of a hybrid (0.19)
            layout = f"E{re.sub('[^|]', 't', pattern)}L"
    ends = [args.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    if not all(end is None or (type(end) is int and 0 <= end < MOST_LAYERS) for end in ends):
        raise SourceError(f"{path}: the layers of its first and last stage are {short(ends)}")
    if not (layout is None or (isinstance(layout, str) and len(layout) < MOST_LAYERS)):
        raise UnsupportedError(f"{path}: pipeline_model_parallel_layout = {short(layout)} is no text")
    return Pipeline(
        pp,
        virtual,
        ends[0],
        ends[1],
        bool(args.get("account_for_embedding_in_pipeline_split")),
        bool(args.get("account_for_loss_in_pipeline_split")),
        layout,
    )
