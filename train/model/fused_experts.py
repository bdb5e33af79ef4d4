"""Experts of a layer: one by one in the Hub's files, one tensor in the memory of transformers 5.

The table of the family says which belong together: its lines that are `separate`, and those that are `fused`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from formats.families import find_family


class Fused:
    """What gives a tensor [experts, rows, …] when it is sliced: of each expert its slices, one upon the other."""

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self.parts = parts

    def get_shape(self) -> list[int]:
        """The shape of the whole."""
        one = [part.get_shape() for part in self.parts[0]]
        return [len(self.parts), sum(shape[0] for shape in one), *one[0][1:]]

    def __getitem__(self, where: Any) -> torch.Tensor:
        """A box of it, some experts, or all with `...`; a rank reads what lies in its box."""
        whole = [slice(0, size) for size in self.get_shape()]
        said = [] if where is ... else [where] if isinstance(where, slice) else list(where)
        experts, *inside = said + whole[len(said) :]
        return torch.stack([_rows(parts, *inside) for parts in self.parts[experts]])


def _rows(parts: Sequence[Any], rows: slice, *rest: slice) -> torch.Tensor:
    found, first = [], 0
    for part in parts:
        size = part.get_shape()[0]
        low, high = max(rows.start, first) - first, min(rows.stop, first + size) - first
        if low < high:
            box = (slice(low, high), *rest)
            found.append(part[box])
        first += size
    return torch.cat(found)


def keys_of(name: str, config: Mapping[str, Any], experts: int) -> list[list[str]]:
    """The keys of the Hub's files that make a tensor in memory: of each expert those that lie one upon the other.

    Args:
        name: in memory.
        config: of the model, with its `model_type`.
        experts: how many a layer has.

    Returns:
        One list with one key for what only has another name; nothing for what has the same.
    """
    family = find_family(config)
    table = family.tensors if family else ()
    for rule in (rule for rule in table if "fused" in rule.conditions):
        found = re.fullmatch(re.escape(rule.key).replace(r"\{layer\}", r"(\d+)"), name)
        if found:
            apart = [one for one in table if "separate" in one.conditions]
            parts = rule.pattern.tensors
            lines = [one for one in apart if one.pattern.tensors == parts] or [
                next(one for one in apart if one.pattern.tensors == (part,)) for part in parts
            ]
            keys = [one.key.replace("{layer}", found[1]) for one in lines]
            numbers = range(experts if lines[0].of_expert else 1)
            return [[key.replace("{expert}", str(number)) for key in keys] for number in numbers]
    return []
