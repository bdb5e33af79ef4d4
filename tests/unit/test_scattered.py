"""Tensors in pieces: what makes a copy, and what makes none."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.disk.safetensors import Fragment
from formats.errors import SourceError
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import from_pieces


def piece(start: int, stop: int, file: str, dtype: str = "F32") -> Piece:
    return Piece(Cut(((start, stop),)), Fragment(Path(file), 0, dtype, (stop - start,), (1,)))


def test_a_part_that_is_there_once_belongs_to_every_copy():
    tensor = from_pieces("w", (4,), "F32", [piece(0, 3, "a"), piece(3, 4, "b"), piece(0, 3, "c"), piece(0, 3, "d")])
    files = [[part.fragment.path.name for part in copy] for copy in tensor.copies]
    assert files == [["a", "b"], ["c", "b"], ["d", "b"]]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece(0, 3, "a"), piece(3, 4, "b", "BF16")], "b holds w as BF16, it should be F32"),
        ([piece(0, 3, "a")], "1 of the 4 elements of w .* are missing"),
        ([piece(0, 3, "a"), piece(2, 4, "b")], "overlap in a, b"),
        ([piece(0, 3, "a"), piece(3, 5, "b")], r"\[3:5\] outside of it in a, b"),
        ([], "4 of the 4 elements"),
    ],
)
def test_pieces_that_make_no_tensor_are_refused(pieces, message):
    with pytest.raises(SourceError, match=message):
        from_pieces("w", (4,), "F32", pieces)
