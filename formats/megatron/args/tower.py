"""The layers of a vision tower that are megatron-core's: their names, the order of query, key and value, their stacks.

    model.visual.blocks.{layer}.attn.qkv.weight    (query key value) (head dim) hidden, in Hugging Face files
    vision_model.decoder.layers.self_attention.linear_qkv.weight    layer, (head (query key value) dim), hidden
    vision_model.decoder.deepstack_merger_list.linear_fc1.weight    merger, rows, columns

Facts: Megatron-Bridge 0.4.2, 0.5.1 and 0.6.2, models/qwen_vl/modelling_qwen3_vl/ (vision_model.py; transformer_block.py
`Qwen3VLVisionTransformerBlock.sharded_state_dict`; transformer_config.py `get_vision_model_config`) and the names that
qwen3_vl_bridge.py and qwen35_vl_bridge.py map. Checkpoints that 0.6.2 saved are in tests/golden/bridge/qwen3_5 and
qwen3_vl_0.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from formats.errors import RefusedError, SourceError, short
from formats.huggingface.whole_model import prefix_of
from formats.layout.pattern import Axis, Pattern, Product, Term
from formats.layout.pieces import Scattered, unstack
from formats.layout.slots import ALONE, DIM, ORIGINAL, Slot
from formats.layout.table import Rule

PARTS = 3
"""Query, key and value."""


Tower = Mapping[str, Any]
"""The config of a tower, completed with the defaults of its class."""


class Stack(NamedTuple):
    """Modules of a tower of one kind, whose tensors are stacked.

    Attributes:
        prefix: prefix of their names in Megatron-Bridge.
        count: the number of modules.
        parts: parts of each module whose `_extra_state` a load requires.
    """

    prefix: str
    count: Callable[[Tower], int]
    parts: tuple[str, ...]

    def of(self, name: str) -> tuple[str, int] | None:
        """The name of the stack with a tensor, and the number of the tensor's module; None of any other tensor."""
        number, dot, rest = name.removeprefix(self.prefix).partition(".")
        return (
            (self.prefix + rest, int(number)) if name.startswith(self.prefix) and dot and number.isdecimal() else None
        )

    def states(self, tower: Tower) -> Iterator[str]:
        """The `_extra_state` entries that a load requires."""
        count = self.count(tower)
        for part in self.parts:
            yield from (f"{self.prefix}{part}._extra_state/shard_{number}_{count}" for number in range(count))


@dataclass(frozen=True)
class Layers:
    """The layers of a tower that are megatron-core's.

    Attributes:
        stacks: the layers, and what else is stacked.
        heads: the key of the tower's config that is the number of heads.
        by_head: prefix, in Hugging Face files, of the tensors whose rows are query, key and value.
        divided: by what it is called, a function from the tower's config to a size that tensor ranks divide.
        fixed: key of the tower's config: the only value that the class computes.
        once: modules behind the layers whose `_extra_state` a load requires.
    """

    stacks: tuple[Stack, ...]
    heads: str
    by_head: str
    divided: Mapping[str, Callable[[Tower], int]]
    fixed: Mapping[str, Any]
    once: tuple[str, ...]

    def states(self, tower: Tower) -> Iterator[str]:
        """The `_extra_state` entries that a load requires."""
        for stack in self.stacks:
            yield from stack.states(tower)
        yield from (f"{module}._extra_state/shard_0_1" for module in self.once)

    def require(self, tower: Tower, tp: int, name: str) -> None:
        """Refuse a tower that the class does not compute, or does not divide.

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

    def slots(self, name: str, key: str, shape: tuple[int, ...], tower: Tower) -> tuple[Slot, Slot] | None:
        """The tensor in Megatron-Bridge and in Hugging Face files; None if both have its rows in the same order.

        Args:
            name: the name in Megatron-Bridge, with the number of the layer.
            key: the name in Hugging Face files.
            shape: its shape, the same in both.
            tower: the tower's config.

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

    def stacked(self, name: str, tower: Tower) -> tuple[str, int, int] | None:
        """The name of the stack with a tensor, the number of the tensor's module, and the number of modules.

        None of a tensor that is in no stack.
        """
        found = ((stack, stack.of(name)) for stack in self.stacks)
        return next(((*of, stack.count(tower)) for stack, of in found if of), None)

    def apart(self, tensors: Mapping[str, Scattered]) -> dict[str, Scattered]:
        """The tensors of a tower by their names, with the stacks apart, each under the number of its module."""
        single = dict[str, Scattered]()
        for name, tensor in tensors.items():
            stack = next((stack for stack in self.stacks if name.startswith(stack.prefix)), None)
            if stack is None or stack.of(name):
                single[name] = tensor
                continue
            rest = name.removeprefix(stack.prefix)
            single |= {f"{stack.prefix}{number}.{rest}": part for number, part in enumerate(unstack(tensor))}
        return single


def _rule(name: str, rows: tuple[str, ...], others: list[str]) -> Rule:
    text = f"{name}: ({' '.join(rows)}) {' '.join(others)}"
    dims: tuple[Term, ...] = (Product(tuple(map(Axis, rows))), *map(Axis, others))
    return Rule(name, Pattern(text, name, dims), frozenset())
