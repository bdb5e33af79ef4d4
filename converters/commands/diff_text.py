"""What `convert diff` prints: differences by kind of tensor, under Hugging Face's names; or each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        yield from _rows([(found.key_of(one.name), one.what, _numbers([one])) for one in found.tensors])
        return
    alike: dict[str, dict[str, list[Difference]]] = {}
    for one in found.tensors:
        alike.setdefault(one.what, {}).setdefault(one.name.partition(".")[0] if found.keys else one.name, []).append(
            one
        )
    for what, kinds in alike.items():
        every = [one for kind in kinds.values() for one in kind]
        if len(every) == found.compared > 1:
            yield f"all {len(every)} tensors: {what}{', ' * bool(_numbers(every))}{_numbers(every)}"
        else:
            yield from _rows([(_named(found, kind), what, _numbers(kind)) for kind in kinds.values()])


def _named(found: Differences, kind: Sequence[Difference]) -> str:
    """The key of a kind of tensor, with the layers that differ."""
    layers = [int(one.name.partition(".")[2]) for one in kind if found.keys and "." in one.name]
    if not layers:
        return found.key_of(kind[0].name)
    key = found.keys[kind[0].name.partition(".")[0]].replace("{expert}", "*")
    return key.replace("{layer}", ranges(layers))


def _numbers(kind: Sequence[Difference]) -> str:
    count = sum(one.count for one in kind)
    return f"{count} elements differ by up to {max(one.largest for one in kind):g}" if count else ""


def _rows(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    if rows:
        yield table(rows, "")
