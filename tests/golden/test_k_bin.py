"""Packing as the users' GPT-NeoX does it: index arrays and rows that the real program wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from formats.errors import RefusedError
from train.data.packing.k_bin import k_bin, k_bin_indices
from train.data.tokens.indexed import open_indexed

GOLDEN = Path(__file__).parent / "data"
CASES = json.loads((GOLDEN / "4_pack/k_bin_cases.json").read_text())
K_BIN = [case for case in CASES["cases"] if case["pack_impl"] == "k_bin_packed"]
ROWS = [case for case in json.loads((GOLDEN / "4_pack/rows.json").read_text()) if case["pack_impl"] == "k_bin_packed"]


def opened(name):
    return open_indexed(GOLDEN / {"sft": "1_sft/sft_text_document", "synth": "4_pack/synth"}[name])


def lengths_of(case):
    sizes = CASES["sizes"][case["sizes"]]
    return np.array(sizes, np.int32) if isinstance(sizes, list) else np.array(opened(case["sizes"]).sizes)


@pytest.mark.parametrize("case", [case for case in K_BIN if case["error"] is None], ids=lambda case: case["key"])
def test_indices_are_those_of_the_real_program(case):
    indices = k_bin_indices(lengths_of(case), case["seq_length"], case["seed"], case["num_samples"])
    with np.load(GOLDEN / "4_pack/k_bin_cases.npz") as real:
        for name, array in zip(("doc", "sample", "shuffle"), indices, strict=True):
            np.testing.assert_array_equal(array, real[f"{case['key']}_{name}"])
            assert array.dtype == real[f"{case['key']}_{name}"].dtype


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case["key"])
def test_rows_are_those_that_the_real_program_trains(case):
    indexed, capacity = opened(case["sizes"]), case["seq_length"] + 1
    rows = k_bin(np.array(indexed.sizes), capacity, case["seed"], case["num_samples"])
    with np.load(GOLDEN / "4_pack/rows.npz") as real:
        for place, expected in zip(case["dataset_indices"], real[case["key"]], strict=True):
            documents = rows.documents[rows.offsets[place] : rows.offsets[place + 1]]
            tokens = np.concatenate([indexed[int(document)] for document in documents])
            np.testing.assert_array_equal(np.pad(tokens, (0, capacity - len(tokens))), expected)
    assert len(rows.offsets) - 1 == case["dataset_len"] + 1, "the real program never trains its last sample"


def test_documents_that_fit_no_row_do_not_hang():
    """The real program shuffles and skips for ever."""
    with pytest.raises(RefusedError, match="none of 3 documents fits a row of 65 tokens"):
        k_bin_indices(np.array([0, 70, 80], np.int32), 64, 1, 1)
