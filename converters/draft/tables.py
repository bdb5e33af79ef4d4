"""Draft the table of a family from tiny models: a row for each name of a tensor, or why none could be guessed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from converters.draft import computed
from converters.draft.probes import BY_HAND, SIZES, Model, Probe
from converters.draft.roles import patterns, roles_of
from formats.errors import UnsupportedError
from formats.layout.tensors import TENSORS

ROUTED = re.compile(r"(?:expert|router|shared)_|router")
"""Tensors of layers with experts."""
OF_MLP = re.compile(r"(?:gate|up|down)(?:_bias)?")
"""Tensors of an MLP that all tokens pass."""
QUERIES = {"query_down": "compressed", "query_latent_norm": "compressed", "query_up": "compressed",
           "latent_query": "uncompressed"}  # fmt: skip
BIAS = {"query_bias": "qkv_bias", "key_bias": "qkv_bias", "value_bias": "qkv_bias", "output_bias": "output_bias",
        "gate_bias": "mlp_bias", "up_bias": "mlp_bias", "down_bias": "mlp_bias"}  # fmt: skip
"""Bias: its condition where a config key turns it on."""
TIED = ("tied", "optional")
"""The conditions of an output head that is a copy of the embedding."""
OF_RUNS = {"tie_word_embeddings", "use_cache", "is_decoder", "output_router_logits"}
"""Config keys that change no tensor, or only what every table leaves open."""
NOT_SEEN = "in this order by its name; nothing here can see it: read its class, and compare logits in Megatron"

PART_BY_NEIGHBOURS = "adjacent elements of a part of each head rotate, an order that no pattern has"


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        key: name of the tensor, with `{layer}` and `{expert}` in it.
        pattern: the layout of the tensor; empty where it could not be guessed.
        conditions: when a model has the tensor.
        doubt: what is not certain, or what could not be guessed.
    """

    key: str
    pattern: str
    conditions: tuple[str, ...] = ()
    doubt: str = ""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The logical tensors in the pattern."""
        return tuple(re.findall(r"(\w+):", self.pattern))


@dataclass(frozen=True)
class Drafted:
    """A table, and the config keys that its rows depend on.

    Attributes:
        rows: the rows, in the order of the parameters.
        biases: config key: the conditions that it turns on, and its default.
        fixed: config keys that change which tensors there are in a way that a table cannot express.
    """

    rows: tuple[Row, ...]
    biases: Mapping[str, tuple[str, bool]]
    fixed: tuple[str, ...]


def template(name: str) -> str:
    """The name of a tensor with `{layer}` and `{expert}` in place of its numbers."""
    once = re.sub(r"(?<=\.)\d+(?=\.)", "{layer}", name, count=1)
    return re.sub(r"(?<=\.)\d+(?=\.)", "{expert}", once, count=1)


def drafted(model: Model) -> Drafted:
    """The drafted table of a model.

    Raises:
        UnsupportedError: the class cannot be built or run with the sizes of a tiny model, or its layers are of kinds
            that no line tells apart.
    """
    fixed, biases, extra = list[str](), dict[str, tuple[str, bool]](), dict[str, Any]()
    full, choices = model.untied, dict[str, str]()
    for key, (off, on) in _switches(model).items():
        try:
            without, with_it = (_names(model.probe(**{**full, key: value})) for value in (off, on))
        except UnsupportedError:  # its class supports only one value
            fixed.append(key)
            continue
        added, removed = with_it - without, without - with_it
        conditions = {BIAS.get(tensor, "") for name in added for tensor in next(iter(roles_of(name)), ("",))}
        if key == model.keys.get("query_rank"):
            extra = {key: off}
        elif added and not removed and "" not in conditions:
            biases[key], full = (" ".join(sorted(conditions)), bool(model.defaults[key])), {**full, key: True}
            choices |= {name: BIAS[roles_of(name)[0][0]] for name in added}
        elif added or removed:
            fixed.append(key)
    asked = _Asked(model, full)
    probes = [model.probe(number, **full) for number in (0, 1)]
    rows = list(_rows(probes, asked))
    _require_one_kind(rows, probes[0].memory, model.architecture)
    if extra:
        known = {row.key for row in rows}
        others = _rows([model.probe(number, **{**full, **extra}) for number in (0, 1)], asked)
        at = next((i for i, row in enumerate(rows) if "query_down" in row.tensors), len(rows))
        rows[at:at] = [row for row in others if row.key not in known]
    moe = any("router" in row.tensors for row in rows)
    rows = [_conditioned(row, moe=moe, bias=choices.get(row.key, "")) for row in rows]
    heads = [row for row in rows if row.tensors == ("head",)]
    tied = [
        replace(row, pattern=row.pattern.replace("head:", "embedding:"), conditions=(*TIED, *row.conditions[1:]))
        for row in heads
    ]
    return Drafted((*rows, *tied), biases, tuple(fixed))


def _require_one_kind(rows: Sequence[Row], memory: Iterable[str], architecture: str) -> None:
    """Refuse a model whose layers have one logical tensor under several names, each name in layers of its own.

    Raises:
        UnsupportedError: it is such a model: which layers are of which kind, no line of a draft can say.
    """
    layers: dict[str, set[str]] = {}
    for name in memory:
        layers.setdefault(template(name), set()).update(re.findall(r"(?<=\.)\d+(?=\.)", name)[:1])
    in_layers = [row for row in rows if row.tensors and layers.get(row.key)]
    for one, other in combinations(in_layers, 2):
        if one.tensors == other.tensors and layers[one.key].isdisjoint(layers[other.key]):
            raise UnsupportedError(
                f"layers of {architecture} are of several kinds: {' and '.join(one.tensors)} is {one.key} in some and "
                f"{other.key} in others, and a draft has one line for all",
                BY_HAND,
            )


def _switches(model: Model) -> dict[str, tuple[Any, Any]]:
    """Config keys that may change which tensors there are: their values without and with these tensors."""
    switches: dict[str, tuple[Any, Any]] = {
        key: (False, True) for key, value in model.defaults.items() if type(value) is bool and key not in OF_RUNS
    }
    if rank := model.keys.get("query_rank"):
        switches[rank] = (None, SIZES["query_rank"][0])
    return switches


def _names(probe: Probe) -> set[str]:
    return {template(name) for name in probe.memory}


def _conditioned(row: Row, *, moe: bool, bias: str) -> Row:
    """A row with the conditions that follow from its tensors, before those of its name."""
    tensors, conditions = row.tensors, list[str]()
    if tensors == ("head",):
        conditions.append("untied")
    conditions += sorted({QUERIES[tensor] for tensor in tensors if tensor in QUERIES})
    if moe and any(ROUTED.match(tensor) for tensor in tensors):
        conditions.append("sparse")
    elif moe and tensors and all(OF_MLP.fullmatch(tensor) for tensor in tensors):
        conditions.append("dense")
    return replace(row, conditions=(*conditions, *([bias] if bias else []), *row.conditions))


class _Asked:
    """Answers of `computed` on a model, each computed once."""

    def __init__(self, model: Model, changes: Mapping[str, Any]) -> None:
        self.model, self.changes = model, changes

    @cached_property
    def whole(self) -> Any:
        return computed.tiny_model(self.model, **self.changes)

    @cached_property
    def one_layer(self) -> Any:
        return computed.tiny_model(self.model, **self.changes, **{self.model.keys["layers"]: 1})

    @cached_property
    def rotates(self) -> bool:
        return getattr(self.whole.config, "rope_parameters", None) is not None

    @cached_property
    def norms(self) -> dict[str, str]:
        return computed.norms(self.whole)

    @cached_property
    def rotation(self) -> computed.Rotation | None:
        return computed.rotation(self.whole)


def _rows(probes: Sequence[Probe], asked: _Asked) -> Iterator[Row]:
    """A row for each name of a tensor in memory and in files."""
    first = probes[0]
    hub = first.hub
    from_memory: dict[str, list[str]] = {}
    for name, answer in hub.items():
        for piece in answer["pieces"] or ():
            from_memory.setdefault(template(piece.name), []).append(name)
    alike = {template(name) for name in first.memory if name in hub and tuple(hub[name]["shape"]) == first.memory[name]}
    done: set[str] = set()
    for name in first.memory:
        key = template(name)
        if key in done:
            continue
        done.add(key)
        row = _row(key, name, [probe.memory for probe in probes], probes, asked)
        if key in alike:
            yield row
            continue
        for other in from_memory.get(key, ()):
            if template(other) not in done:
                done.add(template(other))
                yield replace(_saved(other, row, probes), conditions=("separate",))
        yield replace(row, conditions=("fused",))


def _saved(name: str, row: Row, probes: Sequence[Probe]) -> Row:
    """The row of a tensor in files that is a part of a tensor in memory, whose row is `row`."""
    key, tensors = template(name), row.tensors
    piece = probes[0].hub[name]["pieces"][0]
    shapes = [tuple(probe.hub[name]["shape"]) for probe in probes]
    if len(tensors) > 1:
        starts = {axis: low for axis, (low, _) in enumerate(piece.source_box)}
        dim = next(i for i, text in enumerate(_dims(row.pattern)) if ":" in text)
        tensors = (tensors[int(starts[dim] > 0)],)
    sizes = [probe.sizes for probe in probes]
    pattern = next(patterns(tensors, shapes, sizes, key, turned=probes[0].input_major), "")
    return Row(key, pattern, doubt="" if pattern else _unknown(shapes[0], sizes[0]))


def _row(
    key: str, name: str, memories: Sequence[Mapping[str, tuple[int, ...]]], probes: Sequence[Probe], asked: _Asked
) -> Row:
    """The row of a tensor in memory."""
    shapes, sizes = [entry.get(name, ()) for entry in memories], [entry.sizes for entry in probes]
    roles = roles_of(key)
    stem, _, kind = key.rpartition(".")
    if stem in asked.norms and computed.NORM.search(stem.rpartition(".")[2]):
        norm = asked.norms[stem] + ("_bias" if kind == "bias" else "")
        roles = [(norm,)] if norm in TENSORS else []
    for tensors in roles:
        for pattern in patterns(tensors, shapes, sizes, key, turned=probes[0].input_major):
            if len(tensors) == 1:
                return _turned(Row(key, pattern), asked)
            if len(tensors) == 3 and computed.is_order(pattern, sizes[0], asked.one_layer, name):
                return _turned(Row(key, pattern), asked)
            if len(tensors) == 2:
                return _gated(Row(key, pattern), name, asked)
    return Row(key, "", doubt=_unknown(shapes[0], sizes[0]))


def _gated(row: Row, name: str, asked: _Asked) -> Row:
    """A row of gate and up with the order of the two filled in, or marked as doubtful."""
    dim = next(i for i, text in enumerate(_dims(row.pattern)) if ":" in text)
    order = computed.gated_order(asked.whole, name, dim)
    if order is None:
        return replace(row, doubt=NOT_SEEN)
    alternating, gate_first = order
    joined, (first, second) = _dims(row.pattern)[dim], row.tensors if gate_first else row.tensors[::-1]
    (axes,) = {part.partition(": ")[2] for part in joined[1:-1].split(" | ")}
    lies = f"({axes} ({first}: | {second}:))" if alternating else f"({first}: {axes} | {second}: {axes})"
    return replace(row, pattern=row.pattern.replace(joined, lies))


def _turned(row: Row, asked: _Asked) -> Row:
    """A row with the order of rotary pairs in heads filled in, or marked as doubtful."""
    if "half pair" not in row.pattern or not asked.rotates:
        return row
    if asked.rotation is None:
        return replace(row, doubt=NOT_SEEN)
    if asked.rotation.neighbours and asked.rotation.part:
        return replace(row, doubt=PART_BY_NEIGHBOURS)
    order = "pair half" if asked.rotation.neighbours else "half pair"
    return replace(row, pattern=row.pattern.replace("half pair", order))


def _dims(pattern: str) -> list[str]:
    """The texts of the dimensions of a pattern."""
    return re.findall(r"\((?:[^()]|\([^()]*\))*\)|\w+", pattern)


def _unknown(shape: Sequence[int], sizes: Mapping[str, int]) -> str:
    """The doubt on a tensor that was not guessed: for each dimension the axes that have its size."""
    named = [" or ".join(axis for axis, size in sizes.items() if size == dim and size > 2) or str(dim) for dim in shape]
    return f"not guessed: [{', '.join(named)}] in the tiny model"
