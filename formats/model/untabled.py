"""Models without a table: every tensor is a logical tensor of its own, under its own name.

This is enough to merge, cast, split and publish a model of any kind, because the names stay those of Hugging Face. It
is not enough to convert a model to a format that names or cuts tensors differently.

Fused experts of some models have their last two dimensions swapped in memory, compared with the files of the Hub, and
transformers loads both. A logical tensor has the order of the Hub's files, so that a model has one digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from formats.errors import UnsupportedError
from formats.layout.pattern import Axis, Pattern
from formats.layout.slots import ALONE, DIM, ORIGINAL, SHARED, Replica, Slot
from formats.layout.table import Rule
from formats.layout.tensors import TENSORS
from formats.model.spec import Verbatim

TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a config of several modalities has the config of its language model."""
HEAD = "lm_head.weight"
EMBEDDINGS = (
    "model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "model.decoder.embed_tokens.weight",
    "transformer.wte.weight", "transformer.word_embeddings.weight",
)  # fmt: skip
"""Keys of embeddings that are one tensor with `HEAD` in a tied model."""
CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes that have an output head."""
MULTIMODAL = ("ForConditionalGeneration",)
"""End of the names of further classes with that head, where the embedding is of a language model (`HEADED`)."""
HEADED = "model.embed_tokens.weight"
"""End of the key of such an embedding, also of `language_model`; that of an encoder and decoder is of `decoder`."""
FUSED = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)$")
FUSED_ON_HUB = ("gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe")
TRANSPOSED = {"qwen3_vl_moe": {".experts.gate_up_proj": -1, ".experts.down_proj": -2}}
"""Model type: the fused experts whose last two dimensions are swapped between files and memory, and the axis that is
the hidden state in memory. transformers decides by the shape too (5.23.0, core_model_loading.py `Transpose` with
`check_dims`)."""
TIED_NOTE = (
    "its config.json does not say whether its head is tied, and no file holds one: it is taken to be {}, as where its "
    "class ties it; should the class have a head of its own, that is lost"
)
FUSED_NOTE = "its experts are fused, as transformers 5 holds them in memory: other readers expect the Hub's names"


def describe(
    config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any], why: str
) -> Verbatim:
    """The spec of a model that consists of given tensors.

    Args:
        config: content of the model's config.json.
        shapes: shapes of the model's tensors by key, in the order of the model.
        settings: values of `tied` and `vocab` with which the user overrules the config.
        why: why no table describes the model.

    Raises:
        UnsupportedError: the config names no model type, a tensor has no name or that of a logical tensor, or a setting
            would have no effect.
    """
    if not isinstance(config.get("model_type"), str):
        raise UnsupportedError(why)
    idle = sorted(settings.keys() - {"tied", "vocab"})
    if idle:
        raise UnsupportedError(f"--set {idle[0]} would have no effect: {why}", "leave it out, or correct config.json")
    clash = sorted(set(shapes) & set(TENSORS))
    if clash:
        raise UnsupportedError(f"a tensor is called {clash[0]}, which is the name of a logical tensor here")
    if "" in shapes:
        raise UnsupportedError(f"a tensor of shape {list(shapes[''])} has an empty name", "remove it from its file")
    embedding = next((key for key in EMBEDDINGS if key in shapes), "")
    names = config.get("architectures")
    causal = _is_any(names, CAUSAL)
    silent = "tied" not in settings and "tie_word_embeddings" not in config  # allowed where the class ties
    headless = silent and causal and embedding != "" and HEAD not in shapes
    tied = headless or settings.get("tied", config.get("tie_word_embeddings")) is True
    headed = not names or causal or (embedding.endswith(HEADED) and _is_any(names, MULTIMODAL))
    same = embedding != "" and (shapes[HEAD] == shapes[embedding] if HEAD in shapes else headed)
    copies = {HEAD: embedding} if tied and same else {}
    fused = any(map(FUSED.search, shapes)) and config["model_type"] not in FUSED_ON_HUB
    notes = [TIED_NOTE.format(embedding)] * headless + [FUSED_NOTE] * fused
    vocab = settings.get("vocab", language(config).get("vocab_size"))
    return Verbatim(
        config["model_type"],
        {key: shape for key, shape in shapes.items() if key not in copies},
        tied,
        vocab if type(vocab) is int else None,
        why,
        copies,
        tuple(notes),
        transposed=frozenset(_transposed_experts(config, shapes)),
    )


def _is_any(names: Any, ends: tuple[str, ...]) -> bool:
    """Whether the `architectures` of a config name a class whose name has one of some ends."""
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(ends) for name in names)


def hidden_axis(kind: str, key: str) -> int | None:
    """The axis of fused experts that is the hidden state in memory; None where files have the same order as memory."""
    return next((axis for end, axis in TRANSPOSED.get(kind, {}).items() if key.endswith(end)), None)


def _transposed_experts(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Keys of the fused experts that have their dimensions in the order of memory; square matrices are left alone."""
    hidden = language(config).get("hidden_size")
    for key, shape in shapes.items():
        axis = hidden_axis(config["model_type"], key)
        if axis is not None and len(shape) == 3 and shape[axis] == hidden and shape[1] != shape[2]:
            yield key


def language(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model, which is nested in a config of several modalities."""
    inner = next((config[name] for name in TEXT if isinstance(config.get(name), dict)), None)
    return config if inner is None else language(inner)


def slots(spec: Verbatim) -> Iterator[Slot]:
    """A physical tensor for each logical tensor, and one for each copy."""
    for key, shape in spec.shapes.items():
        yield slot(key, key, shape, ORIGINAL, transposed=key in spec.transposed)
    for key, original in spec.copies.items():
        yield slot(key, original, spec.shapes[original], SHARED)


def slot(key: str, tensor: str, shape: tuple[int, ...], replica: Replica, *, transposed: bool = False) -> Slot:
    """A physical tensor that is a logical tensor, or a part of one; `transposed` swaps its last two axes."""
    axes = tuple(f"{DIM}{i}" for i in range(len(shape)))
    axes = (*axes[:-2], axes[-1], axes[-2]) if transposed else axes
    conditions = frozenset({"copy", "optional"} if replica else ())
    rule = Rule(key, Pattern(f"{tensor}: {' '.join(axes)}", tensor, tuple(map(Axis, axes))), conditions)
    return Slot(ALONE, (key,), shape, rule, (), tuple(zip(axes, shape, strict=True)), None, replica)
