"""What `convert diff` prints: differences by kind of tensor, under Hugging Face's names; or each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from converters.common.progress import ranges, table
from converters.library.proving import Differences
from converters.prove.diff import Difference


def lines(found: Differences, tensors: bool) -> Iterator[str]:
    """`diff` for people.

    Args:
        found: the differences.
        tensors: whether to list every tensor.
    """
    for line in found.settings:
        yield f"setting {line}"
    if tensors:
        yield from _rows([(found.key_of(one.name), one.what, numbers([one])) for one in found.tensors])
        return
    for what, group in groupby(kinds(found), key=itemgetter(0)):
        alike = [kind for _, _, kind in group]
        every = [one for kind in alike for one in kind]
        if len(every) == found.compared > 1:
            yield f"all {len(every)} tensors: {what}{', ' * bool(numbers(every))}{numbers(every)}"
        else:
            yield from _rows([(named(found, kind), what, numbers(kind)) for kind in alike])


def kinds(found: Differences) -> Iterator[tuple[str, str, list[Difference]]]:
    """What differs, the tensor, and those of its layers that differ so; what differs alike is together."""
    alike: dict[str, dict[str, list[Difference]]] = {}
    for one in found.tensors:
        tensor = one.name.partition(".")[0] if found.keys else one.name
        alike.setdefault(one.what, {}).setdefault(tensor, []).append(one)
    for what, tensors in alike.items():
        for tensor, kind in tensors.items():
            yield what, tensor, kind


def named(found: Differences, kind: Sequence[Difference]) -> str:
    """The key of a kind of tensor, with the layers that differ."""
    layers = [int(one.name.partition(".")[2]) for one in kind if found.keys and "." in one.name]
    if not layers:
        return found.key_of(kind[0].name)
    key = found.keys[kind[0].name.partition(".")[0]].replace("{expert}", "*")
    return key.replace("{layer}", ranges(layers))


def numbers(kind: Sequence[Difference]) -> str:
    """How many elements differ, and by how much at most; empty where the elements were not compared."""
    count = sum(one.count for one in kind)
    return f"{count} elements differ by up to {max(one.largest for one in kind):g}" if count else ""


def _rows(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    if rows:
        yield table(rows, "")
