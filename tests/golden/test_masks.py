"""Loss masks: the users' own functions ran on 30 rows; ours differs from them where they are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from train.data.tokens.documents import open_documents
from train.data.tokens.loss_masks import fork_mask, label_mask, megatron_llm_mask

GOLDEN = Path(__file__).parent / "data"
TOLD = json.loads((GOLDEN / "5_masks/masks.json").read_text())
CONTROL = {"user": 7, "assistant": 8}
EOD = 3
PAD = 2
"""What that Megatron-LLM run calls padding is its `</s>` too: one that an answer spells is not trained from."""


@pytest.fixture(scope="module")
def real():
    with np.load(GOLDEN / "5_masks/masks.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("setting", TOLD["settings"])
def test_the_forks_masks(real, setting):
    options = TOLD["settings"][setting]
    mask = fork_mask(
        real["rows"], options.get("loss_mask_pairs", ()), options.get("loss_mask_alternating_individual", ()),
        options.get("loss_mask_individual", ()), EOD if options.get("eod_mask_loss") else None,
    )  # fmt: skip
    np.testing.assert_array_equal(mask[:, 1:], real[setting].astype(bool))
    assert not mask[:, 0].any()


def test_ours_is_the_forks_on_well_formed_documents(real):
    """Rows of whole, well-formed documents: equal but for the first token of a document, which is no label here."""
    compared = 0
    for row, kinds, theirs in zip(real["rows"], TOLD["row_documents"], real["A_pairs77_alt8"], strict=True):
        if set(kinds) != {"ok"}:
            continue
        ends = np.flatnonzero(row == EOD) + 1
        sizes = np.diff(ends, prepend=0)
        ours = label_mask(row[: ends[-1]], sizes, CONTROL)
        firsts = ends - sizes
        expected = theirs[: ends[-1] - 1].astype(bool).copy()
        expected[firsts[1:] - 1] = False
        np.testing.assert_array_equal(ours[1:], expected)
        compared += 1
    assert compared >= 5


def test_an_unclosed_document_does_not_reach_the_next():
    """The fork counts along the row: it trains the opening marker and masks the closing one of what follows."""
    row = np.array([7, 40, 7, 8, 50, 3, 7, 22, 7, 8, 32, 33, 8, 3])
    assert fork_mask(row[None], [7, 7], [8])[0, 6:].astype(int).tolist() == [0, 0, 0, 1, 1, 1, 0, 1]
    assert label_mask(row, np.array([6, 8]), CONTROL)[6:].astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_worked_example():
    row = np.array([7, 101, 102, 7, 8, 55, 56, 8, 3, 7, 103, 7, 8, 57, 8, 3, 0, 0, 0])
    fork = fork_mask(row[None], [7, 7], [8])[0, 1:].astype(int).tolist()
    assert fork == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1], "it trains padding"
    ours = label_mask(row[:16], np.array([9, 7]), CONTROL)[1:].astype(int).tolist()
    assert ours == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]


def test_megatron_llms_masks():
    """Theirs is taken at the input token; ours at the label, so that a reply is trained from its first token on."""
    documents = open_documents(GOLDEN / "7_megatron_llm/pack256-text")
    with np.load(GOLDEN / "7_megatron_llm/batches.npz") as real:
        for theirs, number in zip(real["p256__loss_mask"], (2, 3, 4), strict=True):
            roles, size = np.array(documents.roles[number]), int(documents.indexed.sizes[number])
            mask = megatron_llm_mask(roles)
            mask[1:] &= documents.indexed[number][:-1] != PAD
            np.testing.assert_array_equal(mask[1:], theirs[: size - 1].astype(bool))
            np.testing.assert_array_equal(documents.trained(number, number + 1)[1:], roles[1:] == 2)
