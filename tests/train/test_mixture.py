"""Mixtures of sets: exact, a function of seed and number, and the same on any ranks and after any interruption."""

from __future__ import annotations

import heapq
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.errors import UsageError
from train.settings.batching import Order, Sizes, make_order
from train.settings.config import Data, Steps
from train.settings.mixture import Set, turns, weights_of

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


def data(sets, **settings):
    return Data(train=["P"] * sets, seq_length=8, **settings)


def apportioned(weights, samples):
    """The sets in turn, one by one: each seat to the highest quotient (Sainte-Laguë, as elections are counted)."""
    heap = [(0.5 / weight, place, 0) for place, weight in enumerate(weights)]
    heapq.heapify(heap)
    for _ in range(samples):
        _, place, before = heapq.heappop(heap)
        yield place, before
        heapq.heappush(heap, ((before + 1.5) / weights[place], place, before + 1))


@given(WEIGHTS, st.integers(1, 300), st.integers(0, 300))
def test_sets_take_turns_as_seats_are_given(amounts, samples, further):
    weights = tuple(amount / math.fsum(amounts) for amount in amounts)
    pairs = [tuple(map(int, pair)) for pair in zip(*turns(weights, samples), strict=True)]
    assert pairs == list(apportioned(weights, samples))
    longer = [tuple(map(int, pair)) for pair in zip(*turns(weights, samples + further), strict=True)]
    assert longer[:samples] == pairs


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.5, 1.0, 2.0, 3.5])), min_size=1, max_size=5))
def test_epochs_of_each_set_are_exact(sets):
    rows, epochs = [many for many, _ in sets], [often for _, often in sets]
    if not all(round(often * many) for many, often in sets):
        with pytest.raises(UsageError, match="round to no row"):
            make_order([0, *_sums(rows)], 1, data(len(rows), epochs=epochs), Steps(), 4)
        return
    order, _ = make_order([0, *_sums(rows)], 1, data(len(rows), epochs=epochs), Steps(), 4)
    assert order.taken() == [round(often * many) for many, often in sets]
    taken = [order.row(sample) for sample in range(order.samples)]
    for first, many, often in zip([0, *_sums(rows)], rows, epochs, strict=False):
        of = [row for row in taken if first <= row < first + many]
        for epoch in range(int(often)):
            assert sorted(of[epoch * many : (epoch + 1) * many]) == list(range(first, first + many))


def _sums(values):
    return [sum(values[: place + 1]) for place in range(len(values))]


def test_any_ranks_take_the_same_rows():
    order = Order(30, 5, 24, (Set(0, 10, 0.75), Set(10, 20, 0.25)))
    alone = [order.batch(step, Sizes(8, 1, 1), 0)[0] for step in range(3)]
    for step in (2, 0, 1):  # a resumed run begins anywhere
        parts = [order.batch(step, Sizes(2, 2, 2), rank) for rank in range(2)]
        assert [row for micro in range(2) for rank in range(2) for row in parts[rank][micro]] == alone[step]
    assert sum(row < 10 for step in alone for row in step) == 18


@pytest.mark.parametrize(
    ("settings", "rows", "expected"),
    [
        ({}, [10, 30], []),
        ({"weights": [3, 1]}, [10, 30], [0.75, 0.25]),
        ({"temperature": 2}, [100, 900], [0.25, 0.75]),
        ({"weights": [1, 16], "temperature": 4}, [7, 7], [1 / 3, 2 / 3]),
        ({"epochs": [2, 1]}, [10, 20], [0.5, 0.5]),
    ],
)
def test_shares(settings, rows, expected):
    assert weights_of(data(2, **settings), rows) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        ({"weights": [1]}, {"epochs": 1}, "data.weights has 1 values, data.train 2 sets"),
        ({"weights": [1, 1], "epochs": [1, 1]}, {}, "give one of them"),
        ({"epochs": [1, 1], "temperature": 2}, {}, "give one of them"),
        ({"epochs": [1, 1]}, {"epochs": 1}, "so does steps.epochs"),
        ({"weights": [1, 1]}, {}, "one of steps.train_iters"),
    ],
)
def test_what_contradicts_itself_is_refused(settings, steps, message):
    with pytest.raises(UsageError) as failed:
        make_order([0, 10, 20], 1, data(2, **settings), Steps(**steps), 4)
    assert message in f"{failed.value} {failed.value.hint}"


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_mixture_is_trained_the_same_on_any_ranks_and_after_a_stop(settings, run, train, data):
    mixed = {"train": [str(data), str(data)], "epochs": [0.9, 0.3]}
    config = settings(data=mixed, steps={"train_iters": None, "iteration_offset": 0})
    planned = json.loads(train("plan", config, "--json").out)
    rows = planned["rows"] // 2
    assert [part["trained"] for part in planned["mixture"]] == [round(0.9 * rows), round(0.3 * rows)]
    assert "trained rows" in train("plan", config).out
    reference = run(config, save="whole")
    assert reference.code == 0, reference.out
    assert f"{round(0.9 * rows)} rows, 74." in reference.out
    assert sum(reference.series("tokens")) == pytest.approx(sum(part["tokens"] for part in planned["mixture"]), rel=0.2)
    assert run(config, "--steps.exit_interval", 3).code == 75
    other = run(config, "--data.epochs", "[0.3, 0.9]")
    assert other.code == 5, other.out
    assert "the rows of data.train" in other.out
    resumed = run(config, ranks=2)
    assert resumed.series("trained_tokens") == reference.series("trained_tokens")
    for name in ("loss", "grad_norm"):
        assert resumed.series(name) == pytest.approx(reference.series(name), abs=2e-6)
