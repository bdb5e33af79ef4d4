"""What a config and the names and shapes of tensors alone tell: whether they can be one model that is complete.

For models without a table. Every check passes over what it does not know, so that it is never the only one where
weights of the base model, or transformers, can be asked (`converters/plan/agreement.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from formats.model.spec import Verbatim
from formats.model.untabled import language
from formats.model.vocab_rows import EMBEDDING, HEAD

OTHERS = {r"vis(?:ion|ual)|image": "vision_config", r"audio|speech": "audio_config"}
"""Part of a name: the config of that part of the model."""
DEPTH = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "num_blocks",
)  # fmt: skip
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Layers that predict further tokens, which the Hub's files number after the others."""
HIDDEN = re.compile(r"(?:hidden|(?:\w*_)?embed\w*)_(?:size|dim)|word_embed_proj_dim|n_embd|d_model|d_embed|dim")
LISTS = ("layers", "h", "blocks", "block", "layer")
"""What a list of layers is called: each of them has tensors."""
ITEM = re.compile(r"(.*?)\.(\d+)\.(.+)")
NORM = re.compile(r"(?:.*[._])?(?:norm\w*|ln\w*|\w*layer_?norm\w*)\.weight", re.IGNORECASE)
BEFORE = re.compile(r"(?:.*\.)?(?:word_embeddings_layernorm|layernorm_embedding)\.\w+")
"""Norms of the embedding, not of what the last layer returns (transformers 5.23.0: BLOOM; BART and its kin)."""
FIRST = re.compile(r"(?:.*\.)?(?:relative_attention_bias|rel_attn_embed|pre_ln)\.\w+")
"""What only the first layer of a list has (transformers 5.23.0: T5 and its kin, which share its bias between layers;
WavLM; RWKV)."""
FEW, ALL = 3, 4
"""So many tensors may be missing from a layer that is taken for a damaged one, and not for one of another kind; and so
many modules, if no norm is among them: all of an attention or an MLP."""

Shapes = Mapping[str, tuple[int, ...]]


class Finding(NamedTuple):
    """What does not agree: the name of a tensor, or of a part of the model, and a sentence about it."""

    name: str
    text: str


def contradictions(config: dict[str, Any], spec: Verbatim) -> Iterator[Finding]:
    """Numbers of the config that are not those of the tensors: layers, hidden size, vocabulary."""
    embedding, outer = _embedding(spec.shapes)
    lists = _lists(spec.shapes)
    for prefix, layers in lists.items():
        main = _parent(prefix) == outer if embedding is not None else len(lists) == 1
        yield from _depth(config, prefix, len(layers), main=main)
    if embedding is not None:
        yield from _sizes(config, spec, embedding)


def predicts_further(config: dict[str, Any], key: str) -> bool:
    """Whether a tensor is of a layer that predicts further tokens, which its config says it has after the others."""
    of, item = language(config), _item(key)
    further = sum(of[name] for name in FURTHER if type(of.get(name)) is int)
    depth = of.get("num_hidden_layers")
    if item is None or not isinstance(depth, int):
        return False
    return bool(depth <= int(item[2]) < depth + further)


def losses(config: dict[str, Any], spec: Verbatim) -> Iterator[Finding]:
    """What the names themselves show to be missing."""
    lists = _lists(spec.shapes)
    embedding, outer = _embedding(spec.shapes)
    for prefix, layers in lists.items():
        yield from _gaps(prefix, layers)
        yield from _damaged(prefix, layers)
        yield from _halves(prefix, layers)
    if not any(map(EMBEDDING.fullmatch, spec.shapes)):
        longest = max(lists, key=lambda prefix: len(lists[prefix]), default="")
        yield Finding(f"{_parent(longest)}.embedding".lstrip("."), "no tensor has the name of an input embedding")
    if embedding is not None and outer is not None:
        yield from _norm(spec.shapes, outer, lists)
        yield from _head(config, spec, embedding)


def _embedding(shapes: Shapes) -> tuple[str, str] | tuple[None, None]:
    """The one embedding of tokens, and the module that it is in."""
    embeddings = [key for key in shapes if EMBEDDING.fullmatch(key)]
    return (embeddings[0], _parent(_parent(embeddings[0]))) if len(embeddings) == 1 else (None, None)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _item(key: str) -> re.Match[str] | None:
    """The list of layers, the number and the rest, of a tensor that is in one."""
    item = ITEM.fullmatch(key)
    return item if item and item[1].rpartition(".")[2] in LISTS else None


def _lists(shapes: Shapes) -> dict[str, dict[int, set[str]]]:
    """The names in each layer of each list of layers."""
    lists: dict[str, dict[int, set[str]]] = {}
    for key in shapes:
        if item := _item(key):
            lists.setdefault(item[1], {}).setdefault(int(item[2]), set()).add(item[3])
    return lists


def _gaps(prefix: str, layers: Mapping[int, object]) -> Iterator[Finding]:
    for number in sorted(set(range(max(layers))) - set(layers)):
        yield Finding(f"{prefix}.{number}", f"{prefix}.{number} is missing, {prefix}.{max(layers)} is there")


def _depth(config: dict[str, Any], prefix: str, count: int, *, main: bool) -> Iterator[Finding]:
    """The layers of the language model, and those of a part with a config of its own, are as many as it says."""
    named = next((name for part, name in OTHERS.items() if re.search(part, prefix)), None)
    of = language(config) if main else config.get(named or "")
    if not isinstance(of, Mapping):
        return
    depths = {of[name] for name in DEPTH if type(of.get(name)) is int}
    further = sum(of[name] for name in FURTHER if type(of.get(name)) is int)
    if depths and count not in depths | {depth + further for depth in depths}:
        texts = " or ".join(map(str, sorted(depths)))
        yield Finding(prefix, f"{prefix} has {count} layers, the config says {texts}")


def _damaged(prefix: str, layers: Mapping[int, set[str]]) -> Iterator[Finding]:
    """A layer that is alone in lacking a few tensors of another kind of layer."""
    first = min(layers)
    others = {name for number, names in layers.items() if number != first for name in names}
    shared = {name for name in layers[first] - others if FIRST.fullmatch(name)}
    layers = {**layers, first: layers[first] - shared}
    kinds = Counter(map(frozenset, layers.values()))
    for number, names in layers.items():
        wholes = [kind for kind in kinds if names < kind and _is_damage(kind - names)]
        if wholes and kinds[frozenset(names)] == 1 and (len(layers) == 2 or max(map(kinds.__getitem__, wholes)) > 1):
            lost = sorted(max(wholes, key=kinds.__getitem__) - names)[0]
            yield Finding(f"{prefix}.{number}.{lost}", f"{prefix}.{number} lacks {lost}, which other layers have")


def _is_damage(lost: frozenset[str]) -> bool:
    """Whether the tensors that a layer lacks are too few for one of another kind. A matrix may be several of them."""
    modules = {name.partition(".weight")[0] if ".weight" in name else _parent(name) for name in lost}
    return len(lost) <= FEW or (len(modules) <= ALL and not any(map(_is_norm, lost)))


def _sizes(config: dict[str, Any], spec: Verbatim, embedding: str) -> Iterator[Finding]:
    """The hidden size is that of the embedding, and of the norms beside it."""
    of = language(config)
    hidden_sizes = {value for name, value in of.items() if type(value) is int and HIDDEN.fullmatch(name)}
    outer = _parent(_parent(embedding))
    beside = [key for key in spec.shapes if NORM.fullmatch(key) and _parent(_parent(key)) == outer]
    for key in [embedding, *beside]:
        if hidden_sizes and spec.shapes[key] and spec.shapes[key][-1] not in hidden_sizes:
            yield Finding(
                key, f"{key} is {list(spec.shapes[key])}, the config says {' or '.join(map(str, hidden_sizes))}"
            )
    rows = spec.shapes[embedding][0]
    if spec.vocab is not None and rows < spec.vocab:
        yield Finding(embedding, f"{embedding} has {rows} rows, the vocabulary {spec.vocab}")


def _halves(prefix: str, layers: Mapping[int, set[str]]) -> Iterator[Finding]:
    """The norms beside each other in a layer all have a bias, or none has."""
    for number, names in layers.items():
        norms = {_parent(name) for name in names if name.count(".") == 1 and _is_norm(name)}
        kinds = {kind for kind in ("weight", "bias") if any(f"{norm}.{kind}" in names for norm in norms)}
        lost = sorted(f"{norm}.{kind}" for norm in norms for kind in kinds if f"{norm}.{kind}" not in names)
        if lost:
            yield Finding(
                f"{prefix}.{number}.{lost[0]}", f"{prefix}.{number} lacks {lost[0]}, which its other norms have"
            )


def _norm(shapes: Shapes, outer: str, lists: Mapping[str, Mapping[int, set[str]]]) -> Iterator[Finding]:
    """Where layers have norms, one follows the last layer, with a weight and a bias as they have."""
    layers = next((prefix for prefix in lists if _parent(prefix) == outer), None)
    inside = [name for names in lists.get(layers or "", {}).values() for name in names if NORM.fullmatch(name)]
    norms = dict.fromkeys(f"{_parent(key)}." for key in shapes if _is_norm(key) and _parent(_parent(key)) == outer)
    after = [norm for norm in norms if not BEFORE.fullmatch(f"{norm}weight")]
    if inside and not after:
        yield Finding(f"{outer}.norm.weight".lstrip("."), f"no norm follows the layers of {layers}")
    direct = {name for names in lists.get(layers or "", {}).values() for name in names if name.count(".") == 1}
    kinds = [kind for kind in ("weight", "bias") if any(_is_norm(name) and name.endswith(kind) for name in direct)]
    for lost in (f"{norm}{kind}" for norm in after for kind in kinds):
        if lost not in shapes:
            yield Finding(lost, f"{lost} is missing, the norms in the layers of {layers} have one")


def _is_norm(key: str) -> bool:
    """Whether a tensor is the weight or the bias of a norm."""
    module, _, kind = key.rpartition(".")
    return kind in ("weight", "bias") and bool(NORM.fullmatch(f"{module}.weight"))


def _head(config: dict[str, Any], spec: Verbatim, embedding: str) -> Iterator[Finding]:
    """A model that generates text and shares no embedding has a head of its own."""
    names = config.get("architectures")
    causal = isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)
    if not causal or spec.tied or language(config).get("tie_word_embeddings") is not False:
        return
    rows = spec.shapes[embedding][:1]
    outside = {key: shape for key, shape in spec.shapes.items() if key != embedding and not _item(key)}
    if not any(HEAD.fullmatch(key) or shape[:1] == rows for key, shape in outside.items()):
        yield Finding("lm_head.weight", "there is no output head, and the config does not tie it to the embedding")
