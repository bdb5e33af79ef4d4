"""Experts of a layer: separate tensors in the Hub's files, one fused tensor in the memory of transformers 5.

The family's table specifies which tensors belong together: its rows `separate` and its rows `fused`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from formats.families import find_family
from formats.layout.table import MTP


class Fused:
    """A lazy tensor [experts, rows, …]: slicing it reads the tensors of each expert and concatenates their rows.

    With `apart` the tensor is not one of experts, and is [rows, …].
    """

    def __init__(self, parts: Sequence[Sequence[Any]], *, apart: bool = False) -> None:
        self.parts, self.apart = parts, apart

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        shapes = [part.get_shape() for part in self.parts[0]]
        rows = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        return rows if self.apart else [len(self.parts), *rows]

    def __getitem__(self, where: Any) -> torch.Tensor:
        """Read a box, a range of experts, or everything with `...`; nothing outside the box is read."""
        whole = [slice(0, size) for size in self.get_shape()]
        indices = [] if where is ... else [where] if isinstance(where, slice) else list(where)
        experts, *inside = [slice(None)] * self.apart + indices + whole[len(indices) :]
        if self.apart:
            return _rows(self.parts[0], *inside)
        return torch.stack([_rows(parts, *inside) for parts in self.parts[experts]])


def _rows(parts: Sequence[Any], rows: slice, *rest: slice) -> torch.Tensor:
    rows_read, first = [], 0
    for part in parts:
        size = part.get_shape()[0]
        low, high = max(rows.start, first) - first, min(rows.stop, first + size) - first
        if low < high:
            box = (slice(low, high), *rest)
            rows_read.append(part[box])
        first += size
    return torch.cat(rows_read)


def keys_of(name: str, config: Mapping[str, Any], experts: int) -> list[list[str]]:
    """The keys in the Hub's files that make up a tensor in memory: a list per expert, whose rows are concatenated.

    Args:
        name: name of the tensor in memory.
        config: config of the model, with its `model_type`.
        experts: number of experts of a layer.

    Returns:
        One list with one key for a tensor that is only renamed; an empty list for a tensor that keeps its name.
    """
    family = find_family(config)
    table = [rule for rule in family.tensors if MTP not in rule.conditions] if family else []
    for rule in (rule for rule in table if "fused" in rule.conditions):
        match = re.fullmatch(re.escape(rule.key).replace(r"\{layer\}", r"(\d+)"), name)
        if match:
            separate = [row for row in table if "separate" in row.conditions]
            parts = rule.pattern.tensors
            lines = [row for row in separate if row.pattern.tensors == parts] or [
                next(row for row in separate if row.pattern.tensors == (part,)) for part in parts
            ]
            keys = [row.key.replace("{layer}", match[1]) for row in lines]
            numbers = range(experts if lines[0].of_expert else 1)
            return [[key.replace("{expert}", str(number)) for key in keys] for number in numbers]
    return []
