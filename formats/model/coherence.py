"""Checks from the config and the names and shapes of tensors alone whether they can be one complete model.

For models without a table. Every check ignores what it does not recognise, so these checks are never the only ones
where weights of the base model, or transformers, can be compared with (`converters/plan/agreement.py`).
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
"""Pattern of the name of a part of the model: the key in the config that has the config of this part."""
DEPTH = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "num_blocks",
)  # fmt: skip
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Config keys with the number of layers that predict further tokens, which the Hub's files number after the others."""
HIDDEN = re.compile(r"(?:hidden|(?:\w*_)?embed\w*)_(?:size|dim)|word_embed_proj_dim|n_embd|d_model|d_embed|dim")
LISTS = ("layers", "h", "blocks", "block", "layer")
"""Names of lists of layers, in which each layer has tensors."""
ITEM = re.compile(r"(.*?)\.(\d+)\.(.+)")
NORM = re.compile(r"(?:.*[._])?(?:norm\w*|ln\w*|\w*layer_?norm\w*)\.weight", re.IGNORECASE)
BEFORE = re.compile(r"(?:.*\.)?(?:word_embeddings_layernorm|layernorm_embedding)\.\w+")
"""Matches norms of the embedding, not of the last layer's output (transformers 5.23.0: BLOOM; BART and its kin)."""
FIRST = re.compile(r"(?:.*\.)?(?:relative_attention_bias|rel_attn_embed|pre_ln)\.\w+")
"""Matches tensors that only the first layer of a list has (transformers 5.23.0: T5 and its kin, which share its bias
between layers; WavLM; RWKV)."""
FEW, ALL = 3, 4
"""A layer that lacks up to FEW tensors counts as damaged, not as of another kind; so does a layer that lacks up to ALL
modules, without a norm among them: all modules of an attention or an MLP."""

Shapes = Mapping[str, tuple[int, ...]]


class Finding(NamedTuple):
    """A contradiction: the name of a tensor, or of a part of the model, and a sentence about it."""

    name: str
    text: str


def contradictions(config: dict[str, Any], spec: Verbatim) -> Iterator[Finding]:
    """Findings on numbers of the config that differ from the tensors: layers, hidden size, vocabulary."""
    embedding, outer = _embedding(spec.shapes)
    lists = _lists(spec.shapes)
    for prefix, layers in lists.items():
        main = _parent(prefix) == outer if embedding is not None else len(lists) == 1
        yield from _depth(config, prefix, len(layers), main=main)
    if embedding is not None:
        yield from _sizes(config, spec, embedding)


def predicts_further(config: dict[str, Any], key: str) -> bool:
    """Whether a tensor is of a layer that predicts further tokens, by the numbers of layers in the config."""
    of, item = language(config), _item(key)
    further = sum(of[name] for name in FURTHER if type(of.get(name)) is int)
    depth = of.get("num_hidden_layers")
    if item is None or not isinstance(depth, int):
        return False
    return bool(depth <= int(item[2]) < depth + further)


def losses(config: dict[str, Any], spec: Verbatim) -> Iterator[Finding]:
    """Findings on tensors whose names alone show that they are missing."""
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
    """The key of the token embedding, and the name of the module that has it; None unless there is exactly one."""
    embeddings = [key for key in shapes if EMBEDDING.fullmatch(key)]
    return (embeddings[0], _parent(_parent(embeddings[0]))) if len(embeddings) == 1 else (None, None)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _item(key: str) -> re.Match[str] | None:
    """The match of the list of layers, the layer number and the rest in a tensor's name; None outside of layers."""
    item = ITEM.fullmatch(key)
    return item if item and item[1].rpartition(".")[2] in LISTS else None


def _lists(shapes: Shapes) -> dict[str, dict[int, set[str]]]:
    """The names of tensors in each layer of each list of layers."""
    lists: dict[str, dict[int, set[str]]] = {}
    for key in shapes:
        if item := _item(key):
            lists.setdefault(item[1], {}).setdefault(int(item[2]), set()).add(item[3])
    return lists


def _gaps(prefix: str, layers: Mapping[int, object]) -> Iterator[Finding]:
    for number in sorted(set(range(max(layers))) - set(layers)):
        yield Finding(f"{prefix}.{number}", f"{prefix}.{number} is missing, {prefix}.{max(layers)} is there")


def _depth(config: dict[str, Any], prefix: str, count: int, *, main: bool) -> Iterator[Finding]:
    """Check the number of layers of the language model, and of a part with a config of its own, against the config."""
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
    """Findings on layers that are the only ones to lack a few tensors of another kind of layer."""
    first = min(layers)
    others = {name for number, names in layers.items() if number != first for name in names}
    shared = {name for name in layers[first] - others if FIRST.fullmatch(name)}
    layers = {**layers, first: layers[first] - shared}
    kinds = Counter(map(frozenset, layers.values()))
    for number, names in layers.items():
        wholes = [kind for kind in kinds if names < kind and _is_damage(kind - names)]
        if wholes and kinds[frozenset(names)] == 1 and (len(layers) == 2 or max(map(kinds.__getitem__, wholes)) > 1):
            missing = sorted(max(wholes, key=kinds.__getitem__) - names)[0]
            yield Finding(f"{prefix}.{number}.{missing}", f"{prefix}.{number} lacks {missing}, which other layers have")


def _is_damage(missing: frozenset[str]) -> bool:
    """Whether a layer lacks too few tensors to be of another kind of layer. A matrix may be several tensors."""
    modules = {name.partition(".weight")[0] if ".weight" in name else _parent(name) for name in missing}
    return len(missing) <= FEW or (len(modules) <= ALL and not any(map(_is_norm, missing)))


def _sizes(config: dict[str, Any], spec: Verbatim, embedding: str) -> Iterator[Finding]:
    """Check that the hidden size is that of the embedding, and of the norms beside the embedding."""
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
    """Check that the norms beside each other in a layer all have a bias, or none has."""
    for number, names in layers.items():
        norms = {_parent(name) for name in names if name.count(".") == 1 and _is_norm(name)}
        kinds = {kind for kind in ("weight", "bias") if any(f"{norm}.{kind}" in names for norm in norms)}
        missing = sorted(f"{norm}.{kind}" for norm in norms for kind in kinds if f"{norm}.{kind}" not in names)
        if missing:
            yield Finding(
                f"{prefix}.{number}.{missing[0]}", f"{prefix}.{number} lacks {missing[0]}, which its other norms have"
            )


def _norm(shapes: Shapes, outer: str, lists: Mapping[str, Mapping[int, set[str]]]) -> Iterator[Finding]:
    """Check that a norm follows the last layer where layers have norms, with weight and bias as these have."""
    layers = next((prefix for prefix in lists if _parent(prefix) == outer), None)
    inside = [name for names in lists.get(layers or "", {}).values() for name in names if NORM.fullmatch(name)]
    norms = dict.fromkeys(f"{_parent(key)}." for key in shapes if _is_norm(key) and _parent(_parent(key)) == outer)
    after = [norm for norm in norms if not BEFORE.fullmatch(f"{norm}weight")]
    if inside and not after:
        yield Finding(f"{outer}.norm.weight".lstrip("."), f"no norm follows the layers of {layers}")
    direct = {name for names in lists.get(layers or "", {}).values() for name in names if name.count(".") == 1}
    kinds = [kind for kind in ("weight", "bias") if any(_is_norm(name) and name.endswith(kind) for name in direct)]
    for missing in (f"{norm}{kind}" for norm in after for kind in kinds):
        if missing not in shapes:
            yield Finding(missing, f"{missing} is missing, the norms in the layers of {layers} have one")


def _is_norm(key: str) -> bool:
    """Whether a tensor is the weight or the bias of a norm."""
    module, _, kind = key.rpartition(".")
    return kind in ("weight", "bias") and bool(NORM.fullmatch(f"{module}.weight"))


def _head(config: dict[str, Any], spec: Verbatim, embedding: str) -> Iterator[Finding]:
    """Check that a model which generates text without a tied embedding has an output head."""
    names = config.get("architectures")
    causal = isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)
    if not causal or spec.tied or language(config).get("tie_word_embeddings") is not False:
        return
    rows = spec.shapes[embedding][:1]
    outside = {key: shape for key, shape in spec.shapes.items() if key != embedding and not _item(key)}
    if not any(HEAD.fullmatch(key) or shape[:1] == rows for key, shape in outside.items()):
        yield Finding("lm_head.weight", "there is no output head, and the config does not tie it to the embedding")
