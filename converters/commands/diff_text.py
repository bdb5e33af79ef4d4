"""The text that `convert diff` prints: differences by kind of tensor, under Hugging Face's names, or of each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from converters.common.progress import table
from converters.library.proving import Differences
from converters.prove.diff import Difference
from formats.errors import ranges


def lines(result: Differences, tensors: bool) -> Iterator[str]:
    """The lines of `convert diff`.

    Args:
        result: the differences.
        tensors: whether to list every tensor.
    """
    for line in result.settings:
        yield f"setting {line}"
    if tensors:
        yield from _rows(
            [(result.key_of(difference.name), difference.what, numbers([difference])) for difference in result.tensors]
        )
        return
    for what, group in groupby(kinds(result), key=itemgetter(0)):
        alike = [kind for _, _, kind in group]
        every = [difference for kind in alike for difference in kind]
        if len(every) == result.compared > 1:
            yield f"all {len(every)} tensors: {what}{', ' * bool(numbers(every))}{numbers(every)}"
        else:
            yield from _rows([(key_of_kind(result, kind), what, numbers(kind)) for kind in alike])


def kinds(result: Differences) -> Iterator[tuple[str, str, list[Difference]]]:
    """(what differs, tensor, its differences in layers) for each kind of tensor, ordered by what differs."""
    alike: dict[str, dict[str, list[Difference]]] = {}
    for difference in result.tensors:
        tensor, _ = result.place_of(difference.name)
        alike.setdefault(difference.what, {}).setdefault(tensor, []).append(difference)
    for what, tensors in alike.items():
        for tensor, kind in tensors.items():
            yield what, tensor, kind


def key_of_kind(result: Differences, kind: Sequence[Difference]) -> str:
    """The Hugging Face key of a kind of tensor, with the layers that differ."""
    (tensor, layer), *_ = places = [result.place_of(difference.name) for difference in kind]
    if not layer:
        return result.key_of(tensor)
    return result.keys[tensor].replace("{expert}", "*").replace("{layer}", ranges(int(layer) for _, layer in places))


def numbers(kind: Sequence[Difference]) -> str:
    """How many elements differ, and by how much at most; empty where the elements were not compared."""
    count = sum(difference.count for difference in kind)
    return f"{count} elements differ by up to {max(difference.largest for difference in kind):g}" if count else ""


def _rows(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    if rows:
        yield table(rows, "")
