"""Packing: exact partitions, no row over capacity, as few rows as plain best-fit decreasing, and the same each time."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import UsageError
from train.data.packing.k_bin import k_bin
from train.data.packing.packing import best_fit, concatenated, longest_first, next_fit

lengths = st.lists(st.integers(1, 64), min_size=1, max_size=300).map(lambda sizes: np.array(sizes, np.int32))
seeds = st.integers(0, 2**32 - 1)


def rows_of_textbook(sizes, capacity):
    """Rows that best-fit decreasing needs, one document at a time."""
    free, rows = [], 0
    for length in sorted(sizes.tolist(), reverse=True):
        place = bisect_left(free, length)
        if place < len(free):
            left = free.pop(place) - length
        else:
            left, rows = capacity - length, rows + 1
        insort(free, left)
    return rows


def require_partition(rows, sizes, capacity):
    assert rows.offsets[0] == 0
    assert rows.offsets[-1] == len(rows.documents) == len(sizes)
    assert (np.diff(rows.offsets) > 0).all()
    assert np.array_equal(np.sort(rows.documents), np.arange(len(sizes)))
    assert np.add.reduceat(sizes[rows.documents], rows.offsets[:-1]).max() <= capacity


@pytest.mark.parametrize("pack", [best_fit, next_fit, k_bin])
@given(sizes=lengths, seed=seeds)
def test_every_packing_is_an_exact_partition(pack, sizes, seed):
    rows = pack(sizes, 64, seed)
    require_partition(rows, sizes, 64)
    repeated = pack(sizes, 64, seed)
    assert np.array_equal(rows.documents, repeated.documents)
    assert np.array_equal(rows.offsets, repeated.offsets)


@given(sizes=lengths, seed=seeds)
def test_best_fit_needs_the_rows_of_the_textbook(sizes, seed):
    assert len(best_fit(sizes, 64, seed).offsets) - 1 == rows_of_textbook(sizes, 64)


def rows_of_megatron_llm(sizes, capacity):
    """The rule of `pack_docs`, one document at a time: (document, tokens) of each row."""
    rows, used = [], 0
    for document in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        length = int(sizes[document])
        if used and used + 1 + length <= capacity:
            rows[-1].append((document, length))
            used += 1 + length
        elif length < capacity:
            rows.append([(document, length)])
            used = length
        else:
            rows.append([(document, capacity)])
    return rows


@given(sizes=lengths, capacity=st.integers(1, 70))
def test_longest_first_is_what_megatron_llm_does(sizes, capacity):
    rows = longest_first(sizes, capacity)
    pieces = list(zip(rows.documents.tolist(), rows.lengths.tolist(), strict=True))
    assert [pieces[first:stop] for first, stop in pairwise(rows.offsets)] == rows_of_megatron_llm(sizes, capacity)


@settings(deadline=None, max_examples=10)
@given(seed=seeds, capacity=st.sampled_from([97, 8193, 70_000]))
def test_many_documents(seed, capacity):
    random = np.random.default_rng(seed)
    sizes = np.clip(random.lognormal(4, 1.2, 20_000), 1, capacity).astype(np.int32)
    rows = best_fit(sizes, capacity, seed)
    require_partition(rows, sizes, capacity)
    assert len(rows.offsets) - 1 == rows_of_textbook(sizes, capacity)
    if capacity > 10 * sizes.mean():
        assert len(rows.offsets) - 1 <= -(-int(sizes.sum()) // capacity) + 1


def test_documents_of_equal_length_are_shuffled():
    sizes = np.full(1000, 10, np.int32)
    first, second = best_fit(sizes, 100, 1), best_fit(sizes, 100, 2)
    assert not np.array_equal(first.documents, second.documents)
    assert not np.array_equal(first.documents, np.sort(first.documents))


@given(sizes=lengths, seed=seeds, capacity=st.integers(2, 80))
def test_concatenation_has_every_label_once(sizes, seed, capacity):
    """The rows laid behind each other, without the token that each shares with the one before, are the documents."""
    rows = concatenated(sizes, capacity, seed)
    texts = [np.arange(length) + 1000 * number for number, length in enumerate(sizes.tolist())]
    parts = zip(rows.documents.tolist(), rows.begins.tolist(), rows.lengths.tolist(), strict=True)
    pieces = [texts[document][low : low + many] for document, low, many in parts]
    assert min(map(len, pieces)) > 0
    cuts = pairwise(rows.offsets)
    joined = [np.concatenate(pieces[low:high]) for low, high in cuts]
    assert all(len(row) == capacity for row in joined[:-1])
    assert len(joined[-1]) <= capacity
    for before, after in pairwise(joined):
        assert before[-1] == after[0]
    tokens = np.concatenate([joined[0], *(row[1:] for row in joined[1:])])
    order = list(dict.fromkeys(rows.documents.tolist()))
    assert np.array_equal(tokens, np.concatenate([texts[document] for document in order]))
    assert sorted(order) == list(range(len(sizes)))


@pytest.mark.parametrize("sizes", [[0, 3], [3, 65]])
def test_documents_that_do_not_fit_are_refused(sizes):
    with pytest.raises(UsageError, match="do not fit rows of 64"):
        best_fit(np.array(sizes, np.int32), 64, 1)
