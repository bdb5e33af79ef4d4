"""The layers of a vision tower that are megatron-core's: their names, the order of query, key and value, their stacks.

    model.visual.blocks.{layer}.attn.qkv.weight    (query key value) (head dim) hidden, in Hugging Face files
    vision_model.decoder.layers.self_attention.linear_qkv.weight    layer, (head (query key value) dim), hidden

Facts: Megatron-Bridge 0.4.2, 0.5.1 and 0.6.2, models/qwen_vl/modelling_qwen3_vl/ (vision_model.py; transformer_block.py
`Qwen3VLVisionTransformerBlock.sharded_state_dict`; transformer_config.py `get_vision_model_config`) and the names that
qwen35_vl_bridge.py maps. A checkpoint that 0.6.2 saved is in tests/golden/bridge/qwen3_5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import RefusedError, SourceError, short
from formats.layout.pattern import Axis, Pattern, Product, Term
from formats.layout.pieces import Scattered, unstack
from formats.layout.slots import ALONE, DIM, ORIGINAL, Slot
from formats.layout.table import Rule

LAYER = "{layer}"
PARTS = 3
"""Query, key and value."""


@dataclass(frozen=True)
class Layers:
    """The layers of a tower that are megatron-core's.

    Attributes:
        stack: prefix of the names of the layers in Megatron-Bridge, whose tensors are stacked.
        count: the key of the tower's config that is the number of layers.
        heads: the key that is the number of heads.
        by_head: prefix, in Hugging Face files, of the tensors whose rows are query, key and value.
        divided: by what it is called, a function from the tower's config to a size that tensor ranks divide.
        fixed: key of the tower's config: the only value that the class computes.
        modules: modules of each layer whose `_extra_state` a load requires.
        once: modules behind the layers whose `_extra_state` a load requires.
    """

    stack: str
    count: str
    heads: str
    by_head: str
    divided: Mapping[str, Callable[[Mapping[str, Any]], int]]
    fixed: Mapping[str, Any]
    modules: tuple[str, ...]
    once: tuple[str, ...]

    def states(self, tower: Mapping[str, Any]) -> Iterator[str]:
        """The `_extra_state` entries that a load requires; `tower` is the tower's config, with its defaults."""
        layers = tower[self.count]
        for module in self.modules:
            yield from (f"{self.stack}{module}._extra_state/shard_{layer}_{layers}" for layer in range(layers))
        yield from (f"{module}._extra_state/shard_0_1" for module in self.once)

    def require(self, tower: Mapping[str, Any], tp: int, name: str) -> None:
        """Refuse a tower that the class does not compute, or does not divide; `tower` is its config, with its defaults.

        Raises:
            RefusedError: the class computes it with another value, or a size does not divide over `tp`.
        """
        for key, only in self.fixed.items():
            if tower.get(key, only) != only:
                raise RefusedError(
                    f"Megatron-Bridge's {name} computes its tower with {key} = {short(only)}, and the "
                    f"vision_config has {short(tower[key])}"
                )
        for what, size in self.divided.items():
            if size(tower) % tp:
                raise RefusedError(f"{size(tower)} {what} of the tower do not divide over tp = {tp}")

    def slots(self, name: str, key: str, shape: tuple[int, ...], tower: Mapping[str, Any]) -> tuple[Slot, Slot] | None:
        """The tensor in Megatron-Bridge and in Hugging Face files; None if both have its rows in the same order.

        Args:
            name: the name in Megatron-Bridge, with the number of the layer.
            key: the name in Hugging Face files.
            shape: its shape, the same in both.
            tower: the tower's config, with its defaults.

        Raises:
            SourceError: the rows are not those of the heads.
        """
        if not prefix_of(self.by_head).match(key):
            return None
        heads = tower[self.heads]
        rows, *columns = shape
        if rows % (PARTS * heads):
            raise SourceError(f"{key} has {rows} rows, which are no query, key and value of {heads} heads")
        sizes = (PARTS, heads, rows // PARTS // heads, *columns)
        part, head, dim, *others = (f"{DIM}{i}" for i in range(len(sizes)))
        known = tuple(zip((part, head, dim, *others), sizes, strict=True))
        here, there = (
            Slot(ALONE, (name,), shape, _rule(name, order, others), (), known, None, ORIGINAL)
            for order in ((head, part, dim), (part, head, dim))
        )
        return here, there

    def stacked(self, name: str) -> tuple[str, int] | None:
        """The name of the stack with a layer's tensor, and the number of the layer; None of a tensor of no layer."""
        layer, dot, rest = name.removeprefix(self.stack).partition(".")
        return (self.stack + rest, int(layer)) if name.startswith(self.stack) and dot and layer.isdecimal() else None

    def apart(self, tensors: Mapping[str, Scattered]) -> dict[str, Scattered]:
        """The tensors of a tower by their names, with the stacks apart, each under the number of its layer."""
        single = dict[str, Scattered]()
        for name, tensor in tensors.items():
            if not name.startswith(self.stack) or self.stacked(name):
                single[name] = tensor
                continue
            rest = name.removeprefix(self.stack)
            single |= {f"{self.stack}{layer}.{rest}": part for layer, part in enumerate(unstack(tensor))}
        return single


def _rule(name: str, rows: tuple[str, ...], others: list[str]) -> Rule:
    text = f"{name}: ({' '.join(rows)}) {' '.join(others)}"
    dims: tuple[Term, ...] = (Product(tuple(map(Axis, rows))), *map(Axis, others))
    return Rule(name, Pattern(text, name, dims), frozenset())


def prefix_of(template: str) -> re.Pattern[str]:
    """The pattern of names that begin with a prefix, of whatever layer."""
    return re.compile(re.escape(template).replace(re.escape(LAYER), r"(?P<layer>\d+)"))


def renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str | None:
    """A name with its prefix replaced: the first that it begins with; None if it begins with none.

    Args:
        name: the name.
        prefixes: (prefix, new prefix), both with `{layer}` for the number of a layer.
    """
    for prefix, new in prefixes:
        found = prefix_of(prefix).match(name)
        if found:
            return new.replace(LAYER, found.groupdict().get("layer", "")) + name[found.end() :]
    return None
