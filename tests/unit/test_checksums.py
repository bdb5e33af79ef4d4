"""CRC-32 of pieces in any order, against zlib over the whole."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from converters.move.crc32 import MANY, SMALL, Checksums, sizes_of
from formats.checkpoint import OutputFile
from formats.disk.safetensors import Fragment
from formats.torch_files import crc32
from formats.torch_files.saves import RECORD, is_bound


def sums(size: int) -> tuple[Checksums, Fragment]:
    file = OutputFile(Path("f"), size, (), {"s": (64, size)}, lambda _: ())
    return Checksums(sizes_of([file])), Fragment(Path("f"), 64, "U8", (size,), (1,))


@given(st.binary(min_size=1, max_size=300), st.integers(0, 100), st.data())
def test_pieces_in_any_order_with_holes_of_zeros(content, zeros, data):
    whole = bytearray(zeros) + content + bytearray(data.draw(st.integers(0, 100)))
    known, fragment = sums(len(whole))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(content)))) | {0, len(content)})
    pieces = list(pairwise(cuts))
    random.Random(0).shuffle(pieces)
    for low, high in pieces:
        known.add(fragment, zeros + low, memoryview(content)[low:high])
    assert known.get(Path("f"), 64) == zlib.crc32(whole)


@given(st.integers(0, 2**32 - 1), st.integers(0, 5000))
def test_shift_is_what_zero_bytes_do(register, count):
    assert crc32.shift(register, count) == zlib.crc32(bytes(count), register ^ 0xFFFFFFFF) ^ 0xFFFFFFFF


def test_many_small_pieces_are_left_to_a_second_reading():
    known, fragment = sums(SMALL * (MANY + 1))
    for number in range(MANY + 1):
        known.add(fragment, number, memoryview(b"x"))
    assert known.get(Path("f"), 64) is None


def test_an_empty_storage_has_the_sum_of_nothing():
    known, _ = sums(0)
    assert known.get(Path("f"), 64) == 0


@given(st.binary(min_size=60, max_size=60), st.integers(0, 9), st.integers(0, 50), st.integers(1, 60))
def test_a_second_reading_ends_where_the_storage_does(content, offset, nbytes, step):
    with TemporaryFile() as file, patch.object(crc32, "STEP", step):
        file.write(content)
        file.flush()
        assert crc32.crc_of(file.fileno(), offset, nbytes, Path("f")) == zlib.crc32(content[offset : offset + nbytes])


def test_what_is_written_twice_is_left_to_a_second_reading():
    known, fragment = sums(SMALL * 2)
    known.add(fragment, 0, memoryview(b"x"))
    known.forget(fragment)
    known.add(fragment, 0, memoryview(b"y"))
    assert known.get(Path("f"), 64) is None


def test_files_that_may_be_edited_after_a_save_are_not_in_its_record(tmp_path):
    kept = ["config.json", "model.safetensors", "mp_rank_00_model_states.pt"]
    edited = [
        "tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.json", "merges.txt", "added_tokens.json",
        "special_tokens_map.json", "chat_template.jinja", "generation_config.json",
    ]  # fmt: skip
    for name in (*kept, *edited, RECORD):
        (tmp_path / name).touch()
    assert sorted(path.name for path in tmp_path.iterdir() if is_bound(path)) == kept
