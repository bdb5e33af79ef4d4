"""The two layouts of GPT-NeoX's fused query, key and value with grouped queries, which have the same shapes.

    blocked   all queries, then all keys, then all values of a rank: EleutherAI/gpt-neox#1315 (2024-11-13) and later
    grouped   after each query head an equal share of the rows of keys and of values: f36aed7f (2024-02-22) to #1315

In the grouped layout, row y of the keys is row y % c of share y // c, where a share has c = head_dim * groups / heads
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from formats.disk.handle import opened
from formats.disk.safetensors import DTYPES, Fragment, read_into
from formats.errors import OptionNeededError, RefusedError
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import Scattered, from_pieces, whole_part
from formats.model.spec import ModelSpec

QKV = "attention.query_key_value.weight"
PROBED = 4
"""The number of layers whose rows are read to choose a layout."""
MOST, LEAST = 0.5, 0.1
"""In each probed layer the right layout explains at least `MOST` of the variance of the rows' lengths, the other layout
at most `LEAST`. The rows of a head are alike, so that a test of significance would call every layout significant."""
Tensors = Mapping[str, Mapping[str, Fragment]]


def choose(spec: ModelSpec, by_file: Tensors, tp: int, layout: str, old: bool) -> tuple[str, list[str]]:
    """The layout of a checkpoint as a condition of table rows, and notes for the user on it.

    Args:
        spec: the model.
        by_file: the tensors of each file.
        tp: tensor parallel size.
        layout: the user's choice: `auto`, `blocked` or `grouped`.
        old: whether the tensors have the names from before September 2024.

    Raises:
        OptionNeededError: names and weights do not determine the layout, or contradict each other.
    """
    order_of = {"blocked": "gqa", "grouped": "grouped"}
    if spec.head_dim * spec.kv_heads % spec.heads:  # a head's share is no whole number of rows: older code fails
        return order_of["blocked" if layout == "auto" else layout], []
    seen, why = _seen(spec, by_file, tp)
    if layout != "auto":
        doubt = f"query, key and value are read as {layout}, as --gqa-layout says, though their rows look {seen}"
        return order_of[layout], [] if seen in (None, layout) else [doubt]
    if old and seen != "blocked":
        return order_of["grouped"], [
            "query, key and value are read as grouped: w1, w2, w3 are from before September 2024"
        ]
    if seen is None or old:
        looks = "the names are from before that, the rows look like after it" if old else f"the rows do not tell{why}"
        raise OptionNeededError(
            "heads share keys, and the order of query, key and value is one of two of the same shape: NeoX changed it "
            f"on 2024-11-13, and {looks}",
            "add --gqa-layout blocked for a training with newer code, or grouped with older code",
            gqa_layout="blocked",
        )
    return order_of[seen], [f"query, key and value are read as {seen}, which is what their rows look like{why}"]


def _blocks(spec: ModelSpec, tp: int) -> Iterator[tuple[str, int, int, int]]:
    """(tensor, row in the tensor, row in the file, number of rows) of each block of rows of a rank, if grouped."""
    heads, dim = spec.heads // tp, spec.head_dim
    share = dim * spec.kv_heads // spec.heads
    for head in range(heads):
        start = head * (dim + 2 * share)
        yield "query", head * dim, start, dim
        yield "key", head * share, start + dim, share
        yield "value", head * share, start + dim + share, share


def split(
    spec: ModelSpec, by_file: Tensors, parts: Mapping[tuple[str, str], Scattered], tp: int
) -> tuple[dict[str, dict[str, Fragment]], dict[tuple[str, str], Scattered]]:
    """Split each fused tensor of a grouped checkpoint into query, key and value, under the keys of the table for them.

    Args:
        spec: the model.
        by_file: the tensors of each file.
        parts: the tensors that are in pieces, by file and key.
        tp: tensor parallel size.

    Returns:
        `by_file` and `parts` with the split tensors.

    Raises:
        RefusedError: the share of a head is no whole number of rows.
    """
    if spec.head_dim * spec.kv_heads % spec.heads:
        raise RefusedError(f"{spec.heads} heads of {spec.head_dim} rows cannot share {spec.kv_heads} groups in rows")
    tensors = {file: dict(fragments) for file, fragments in by_file.items()}
    pieces = dict(parts)
    rows = {"query": spec.heads, "key": spec.kv_heads, "value": spec.kv_heads}
    for file, fragments in by_file.items():
        for key in [key for key in fragments if key.endswith(QKV)]:
            whole = tensors[file].pop(key)
            copies = (
                pieces.pop((file, key)).copies if (file, key) in pieces else ((Piece(whole_part(whole.shape), whole),),)
            )
            flat = [list(_flat(copy, spec.hidden)) for copy in copies]
            for tensor, heads in rows.items():
                shape = (heads // tp * spec.head_dim, spec.hidden)
                mine = [tensor_parts[1:] for tensor_parts in _blocks(spec, tp) if tensor_parts[0] == tensor]
                cut = [piece for copy in flat for piece in _rows(copy, mine, spec.hidden)]
                tensor_parts = from_pieces(f"{key}:{tensor}", shape, whole.dtype, cut)
                pieces[file, f"{key}:{tensor}"] = tensor_parts
                tensors[file][f"{key}:{tensor}"] = tensor_parts.whole
    return tensors, pieces


def _flat(copy: Sequence[Piece], width: int) -> Iterator[tuple[int, int, Fragment]]:
    """(start, stop, fragment) of each piece of a matrix, as intervals of its elements.

    Raises:
        RefusedError: a piece is not stored row by row.
    """
    for part, fragment in copy:
        if part.flat:
            yield *part.ranges[0], fragment
        elif fragment.row_major and part.ranges[1] == (0, width):
            (low, high), _ = part.ranges
            yield low * width, high * width, fragment._replace(shape=((high - low) * width,), strides=(1,))
        else:
            raise RefusedError(f"{fragment.path}: a fused projection that is not stored row by row")


def _rows(flat: list[tuple[int, int, Fragment]], blocks: list[tuple[int, int, int]], width: int) -> Iterator[Piece]:
    """The pieces of a matrix that consists of some blocks of rows of another matrix.

    Args:
        flat: (start, stop, fragment) of the other matrix, in elements.
        blocks: (row in the matrix, row in the other matrix, number of rows).
        width: elements of a row.
    """
    for row, at, count in blocks:
        for low, high, fragment in flat:
            begin, end = max(low, at * width), min(high, (at + count) * width)
            if begin < end:
                shifted = begin + (row - at) * width
                offset = fragment.offset + (begin - low) * DTYPES[fragment.dtype]
                piece = fragment._replace(offset=offset, shape=(end - begin,))
                yield Piece(Cut(((shifted, shifted + end - begin),), flat=True), piece)


# --- the layout of some weights --------------------------------------------------------------------------------------


def _seen(spec: ModelSpec, by_file: Tensors, tp: int) -> tuple[str | None, str]:
    """The layout that the weights have, None if there is doubt, and the figures that support it, as text.

    Queries, keys and values have rows of different length in a trained model. Of the two ways to sort the rows into
    three classes, the right one explains most of the variance of their lengths, and the other next to none; and
    which class has the longest rows, and which the shortest, is the same in all layers.
    """
    grouped = np.zeros((spec.heads + 2 * spec.kv_heads) * spec.head_dim // tp, np.int64)
    for tensor, _, at, count in _blocks(spec, tp):
        grouped[at : at + count] = ("query", "key", "value").index(tensor)
    sizes = [spec.heads * spec.head_dim // tp, *[spec.kv_heads * spec.head_dim // tp] * 2]
    orders = {"blocked": np.repeat(np.arange(3), sizes), "grouped": grouped}
    fused = [fragment for fragments in by_file.values() for key, fragment in fragments.items() if key.endswith(QKV)]
    shares: dict[str, list[float]] = {order: [] for order in orders}
    ranks: dict[str, set[tuple[int, ...]]] = {order: set() for order in orders}
    for fragment in fused[:: max(1, len(fused) // PROBED)][:PROBED]:
        if fragment.shape != (len(grouped), spec.hidden) or not fragment.row_major:
            return None, ""
        lengths = np.log(_lengths(fragment) + 1e-30)
        for order, classes in orders.items():
            means = np.array([lengths[classes == kind].mean() for kind in range(3)])
            ranks[order].add(tuple(np.argsort(means)))
            shares[order].append(float(np.var(means[classes]) / max(np.var(lengths), 1e-30)))
    if not fused:
        return None, ""
    explained = ", ".join(f"{order} explains {min(share):.0%} to {max(share):.0%}" for order, share in shares.items())
    why = f" (of the variance of their lengths {explained})"
    for order, other in (("blocked", "grouped"), ("grouped", "blocked")):
        decisive = min(shares[order]) >= MOST and max(shares[other]) <= LEAST
        if decisive and len(ranks[order]) == 1:
            return order, why
    return None, why


def _lengths(fragment: Fragment) -> np.ndarray:
    """The Euclidean length of each row of a matrix, read row by row."""
    rows, width = fragment.shape
    item = DTYPES[fragment.dtype]
    row, lengths = bytearray(width * item), np.zeros(rows)
    with opened(fragment.path) as handle:
        for index in range(rows):
            read_into(handle, memoryview(row), fragment.offset + index * width * item, fragment.path)
            lengths[index] = np.linalg.norm(_float(row, fragment.dtype))
    return lengths


def _float(raw: bytearray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": np.float32, "F16": np.float16, "F64": np.float64}[dtype]).astype(np.float32)
