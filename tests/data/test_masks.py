"""Masks against a reference that reads one token after another, as the rules are written."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from train.data.tokens.loss_masks import fork_mask, label_mask

CONTROL = {"user": 7, "assistant": 8, "system": 6}
documents = st.lists(
    st.lists(st.sampled_from([3, 6, 7, 8, 20, 21, 22]), min_size=1, max_size=30), min_size=1, max_size=8
)


def slow(document, loss):
    """One document, token by token."""
    trained, replies = [], []
    for place, token in enumerate(document):
        role = next((role for role, number in CONTROL.items() if number == token), None)
        opens = role is not None and document[: place + 1].count(token) % 2 == 1
        # every role is counted by itself: a turn that another role's marker interrupts goes on
        masked = any(
            document[: place + 1].count(CONTROL[other]) % 2 == 1 or token == CONTROL[other]
            for other in ("user", "system")
        )
        if role == "assistant" and opens:
            replies.append(place)
        trained.append(not masked and not (role == "assistant" and opens) and place > 0)
    if loss == "all":
        return [place > 0 for place in range(len(document))]
    if loss == "last_turn" and replies:
        return [bit and place > replies[-1] for place, bit in enumerate(trained)]
    return trained


@given(sequences=documents, loss=st.sampled_from(["assistant", "last_turn", "all"]))
def test_masks_are_those_of_the_slow_reference(sequences, loss):
    tokens, sizes = np.concatenate(sequences), np.array([len(ids) for ids in sequences])
    expected = [bit for document in sequences for bit in slow(document, loss)]
    assert label_mask(tokens, sizes, CONTROL, None, loss).tolist() == expected


@given(sequences=documents, loss=st.sampled_from(["assistant", "last_turn"]))
def test_a_document_has_the_mask_that_it_has_alone(sequences, loss):
    tokens, sizes = np.concatenate(sequences), np.array([len(ids) for ids in sequences])
    alone = [label_mask(np.array(ids), np.array([len(ids)]), CONTROL, None, loss) for ids in sequences]
    assert np.array_equal(label_mask(tokens, sizes, CONTROL, None, loss), np.concatenate(alone))


@given(sequences=documents, bits=st.data())
def test_stored_masks(sequences, bits):
    tokens, sizes = np.concatenate(sequences), np.array([len(ids) for ids in sequences])
    stored = np.array(bits.draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens))), np.uint8)
    firsts = np.cumsum(sizes) - sizes
    for loss, bit in (("assistant", 1), ("last_turn", 2)):
        mask = label_mask(tokens, sizes, {}, stored, loss)
        assert not mask[firsts].any()
        rest = np.delete(np.arange(len(tokens)), firsts)
        assert np.array_equal(mask[rest], (stored[rest] & bit) != 0)


@given(pairs=documents)
def test_each_pair_of_the_fork_is_masked_by_itself(pairs):
    rows = np.array([[7, 8, *pair, *[20] * 30][:30] for pair in pairs])
    both = fork_mask(rows, [7, 8, 6, 6], [21], [22])
    parts = [fork_mask(rows, [7, 8]), fork_mask(rows, [6, 6]), fork_mask(rows, (), [21]), fork_mask(rows, (), (), [22])]
    assert np.array_equal(both, np.logical_and.reduce(parts))
