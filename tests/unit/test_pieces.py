"""Pieces as columns: what is read of metadata at once is what the machine makes of it object by object."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from torch import Size, bfloat16
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from converters.move.descriptors import Descriptors
from formats.errors import SourceError
from formats.layout.columns import Columns, boxes, tile
from formats.layout.pieces import from_pieces
from formats.torch_files import dcp_metadata
from formats.torch_files.rows import Reader, Rows
from formats.torch_files.unpickle import loads

RANKS, ROWS = 40, 300


def metadata(*, twice: bool = False, lost: int | None = None) -> Metadata:
    """Of two matrices and a vector. `twice`: chunk and index share an offset; `lost`: one more than is described."""
    tensors, stored = {}, {}
    for number, (name, width) in enumerate({"a": (70000,), "b": (5,), "norm": ()}.items()):
        chunks = []
        for rank in range(RANKS):
            offset = Size((rank * ROWS, *[0] * len(width)))
            chunks.append(ChunkStorageMetadata(offset, Size((ROWS, *width))))
            index = MetadataIndex(name, offset, rank)
            if twice:
                object.__setattr__(index, "offset", offset)
            stored[index] = _StorageInfo(f"__{rank}_0.distcp", number << 33, 1000 + number)
            if rank == lost:
                further = MetadataIndex(name, Size((offset[0] + 1, *offset[1:])), rank)
                stored[further] = _StorageInfo(f"__{rank}_1.distcp", number, 1)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=bfloat16), Size((RANKS * ROWS, *width)), chunks)
    return Metadata(tensors, {name: (name,) for name in tensors}, stored)


@pytest.mark.parametrize("twice", [False, True])
def test_columns_are_what_the_objects_say(tmp_path, twice):
    """With an offset that two objects share, rows are made into objects after all."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata(twice=twice)))
    columns = dcp_metadata.read(tmp_path / ".metadata")
    assert columns.planner["b"] == ("b",)
    for number, (name, width) in enumerate({"a": (70000,), "b": (5,), "norm": ()}.items()):
        items = columns.items[name]
        for rank in range(RANKS):
            box = ((rank * ROWS, (rank + 1) * ROWS), *((0, n) for n in width))
            assert items.item(rank) == (box, tmp_path / f"__{rank}_0.distcp", number << 33, 1000 + number, ())


def test_nearly_all_of_it_is_read_as_rows():
    rows = Reader(
        {dcp_metadata.CHUNK: dcp_metadata.CHUNK, dcp_metadata.EXTENT: dcp_metadata.INDEX}, dcp_metadata.FIELDS
    )
    state = loads(pickle.dumps(metadata()), "metadata", rows).state
    assert sum(not isinstance(key, Rows) for key in state["storage_data"]) <= 3
    chunks = state["state_dict_metadata"]["a"].state["chunks"]
    assert sum(not isinstance(chunk, Rows) for chunk in chunks) <= 2


def test_a_piece_that_is_not_described_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata(lost=3)))
    with pytest.raises(SourceError, match=r"stores a piece of .* that it does not describe"):
        dcp_metadata.read(tmp_path / ".metadata")


@pytest.mark.parametrize(
    ("ranges", "message"),
    [([(0, 3), (4, 8)], "1 of the 8 elements"), ([(0, 4), (3, 7)], "overlap"), ([(0, 4), (4, 9)], "outside")],
)
def test_columns_that_do_not_tile_a_tensor_are_refused(ranges, message):
    """As pieces are that are objects."""
    cuts = boxes(np.array(ranges, np.int64)[:, None])
    columns = Columns("F32", cuts, [Path("a")], np.zeros(2, np.int32), np.zeros(2, np.int64), None)
    with pytest.raises(SourceError, match=message):
        from_pieces("w", (8,), "F32", columns)


@pytest.mark.parametrize(
    "ranges", [[[(0, 3)], [(3, 8)]], [[(4, 8)], [(0, 4)]], [[(0, 2), (0, 3)], [(0, 2), (3, 4)], [(2, 5), (0, 4)]]]
)
def test_columns_that_tile_a_tensor_are_seen_to_do_so_at_once(ranges):
    """Without a look at each pair: a tensor may have a million pieces."""
    cuts = boxes(np.array(ranges, np.int64))
    assert tile(cuts, tuple(max(stop for _, stop in axis) for axis in zip(*ranges, strict=True)))


def test_files_are_closed_and_opened_again(tmp_path):
    """Of 60 files 8 are open at a time; what threads read through them is their own."""
    for number in range(60):
        (tmp_path / str(number)).write_bytes(bytes([number]))
    files = Descriptors()
    files.most = 8

    def read(number: int) -> bool:
        with files.open(tmp_path / str(number % 60)) as fd:
            return os.pread(fd, 1, 0) == bytes([number % 60])  # two threads may have the same file open

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(200)))
    assert len(files.held) <= 8
    with ExitStack() as used:
        for number in range(20):
            used.enter_context(files.open(tmp_path / str(number), writable=True))
        assert len(files.held) >= 20, "none that is used is closed"
    assert read(59)
    assert len(files.held) <= 8
    files.close()
