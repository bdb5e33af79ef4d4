"""The number of tokens that a model has room for: the rows of its embedding and of its output head."""

from __future__ import annotations

import re
from dataclasses import replace

from formats.errors import UnsupportedError
from formats.model.spec import Spec, Verbatim

EMBEDDING = re.compile(
    r"(?:.*\.)?(?:(?:model\.|llm\.)embed|embed_in|embed_tokens|embeddings|shared|tok_embeddings|tokens_embed|"
    r"word_embeddings|wte)\.weight"
)
"""Matches the key of an input embedding, which only a model has: the keys of transformers 5.23.0, except the `w` of
CTRL and the `input_embedding` of CPM-Ant, which has further rows."""
BY_LAYER = re.compile(r"(?:.*\.)?embed_tokens_per_layer\.weight")
"""Matches the key of an embedding for each layer beside the input embedding (Gemma 3n, Gemma 4)."""
HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.(?:weight|bias)")


def rows(spec: Spec) -> int | None:
    """The number of rows of the embedding, None if it cannot be determined."""
    if not isinstance(spec, Verbatim):
        return spec.vocab
    counts = [shape[0] for key, shape in spec.shapes.items() if EMBEDDING.fullmatch(key) and shape]
    return counts[0] if len(counts) == 1 else None


def grown(spec: Spec, count: int) -> Spec:
    """The spec of the same model with more embedding rows, which are added at the end of its tensors.

    Raises:
        UnsupportedError: the model has an embedding for each layer, which does not reach as far.
    """
    by_layer = _rows_by_layer(spec)
    if by_layer is not None and by_layer < count:
        raise UnsupportedError(
            f"the embedding for each layer has {by_layer} rows, which do not grow, and {count} tokens need one each",
            "let the template use tokens that the tokenizer has already",
        )
    if not isinstance(spec, Verbatim):
        return replace(spec, vocab=count)
    before = rows(spec)
    shapes = {
        key: (count, *shape[1:])
        if shape[:1] == (before,) and (EMBEDDING.fullmatch(key) or HEAD.fullmatch(key))
        else shape
        for key, shape in spec.shapes.items()
    }
    return replace(spec, shapes=shapes, vocab=count)


def _rows_by_layer(spec: Spec) -> int | None:
    if not isinstance(spec, Verbatim):
        return spec.layer_vocab if spec.layer_width else None
    return next((shape[0] for key, shape in spec.shapes.items() if BY_LAYER.fullmatch(key) and shape), None)
