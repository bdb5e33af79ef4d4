"""Chunks are decoded once, whoever needs them, multiplied once, and gone at the end."""

from __future__ import annotations

import errno
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from converters import convert as convert_module
from converters.move import engine, scratch
from converters.move.blocks import Files
from converters.move.engine import digest_of, execute
from converters.move.journal import JOURNAL
from converters.move.scratch import Scratch
from converters.plan.plan import make_plan, needs
from converters.plan.request import Limits, Request
from converters.plan.targets import plan_huggingface
from formats.checkpoint import Settings
from formats.disk import chunks
from formats.disk.chunks import Change, Chunk, Store
from formats.disk.safetensors import Fragment, row_major
from formats.errors import OutputError
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import from_pieces, unstack
from formats.registry import open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden/maxtext"
SHARDED = GOLDEN / "llama_sharded"


def fragment(values: np.ndarray, dtype: str, factor: float = 1.0, plus: float = 0.0) -> Fragment:
    change = Change(factor, plus, "an edge") if (factor, plus) != (1.0, 0.0) else None
    chunk = Chunk(Store(Path("/none"), "zarr3", True), "x", (0,) * values.ndim, values.shape, change=change)
    return Fragment(Path("/none"), 0, dtype, values.shape, row_major(values.shape), chunk=chunk)


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """The names of the arrays whose chunks are decoded."""
    names: list[str] = []

    def counted(chunk: Chunk):
        names.append(f"{chunk.name} {chunk.start}")
        return chunks.decoded(chunk)

    monkeypatch.setattr(scratch, "decoded", counted)
    return names


def plan():
    return make_plan(open_checkpoint(SHARDED / "checkpoint", Settings(config=SHARDED)))


def test_each_chunk_is_decoded_once(decoded):
    """The matrices of all layers are in each chunk, and four chunks in a matrix."""
    expected = digest_of(plan().jobs, Limits(1))
    once = sorted(decoded)
    assert len({*once}) == len(once) > 20
    decoded.clear()
    assert digest_of(plan().jobs, Limits(4)) == expected
    assert sorted(decoded) == once


def test_processes_share_them(monkeypatch, decoded):
    expected = digest_of(plan().jobs, Limits(1))
    chunks_of_all = len(decoded)
    decoded.clear()
    monkeypatch.setattr(engine, "STARTED", (2, 1))
    monkeypatch.setattr(engine, "has_one_thread", lambda: False)
    with Files() as files:
        digests: dict[str, str] = {}
        execute(plan().jobs, files, Limits(2), done=lambda job, digest: digests.update({job.name: digest}))
        made = files.scratch.folder
        assert [path.suffix for path in made.iterdir()].count("") == chunks_of_all
    assert digests == expected
    assert not decoded, "in this process"
    assert not made.exists()


@pytest.mark.parametrize(("root", "plus"), [(8**0.5, 0.0), (1.0, -1.0), (8**0.5, -1.0)])
def test_it_is_changed_in_float64_and_rounded_once(monkeypatch, root, plus):
    import torch

    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(torch.bfloat16)
    raw = values.view(torch.int16).numpy().view(np.uint16)
    monkeypatch.setattr(scratch, "decoded", lambda _: raw)
    files, changed = Scratch(), fragment(raw, "BF16", root, plus)
    path = files.decoded(changed, changed.chunk)
    got = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.bfloat16).reshape(64, 32)
    files.close()
    assert not path.exists()
    exact = values.double() * root + plus
    nearest = exact.to(torch.bfloat16)
    neighbours = [torch.nextafter(nearest, torch.full_like(nearest, end)) for end in (-np.inf, np.inf)]
    error = (got.double() - exact).abs()
    assert all((error <= (other.double() - exact).abs()).all() for other in (nearest, *neighbours))
    assert (got.view(torch.int16) != values.view(torch.int16)).any()


def test_a_zero_that_is_only_multiplied_keeps_its_sign(monkeypatch):
    values = np.array([-0.0, 0.0, -1.0, 2.0], np.float32)
    monkeypatch.setattr(scratch, "decoded", lambda _: values)
    files, scaled = Scratch(), fragment(values, "F32", 0.5)
    got = np.fromfile(files.decoded(scaled, scaled.chunk), np.float32)
    files.close()
    assert got.tobytes() == (values * np.float32(0.5)).tobytes()


def test_no_room_for_what_is_decoded(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch, "decoded", lambda _: np.zeros((4, 4), np.float32))
    monkeypatch.setattr(scratch, "write_from", full)
    of = fragment(np.zeros((4, 4), np.float32), "F32")
    with pytest.raises(OutputError, match=r"x cannot be decoded into .*No space left") as error:
        Scratch(tmp_path).decoded(of, of.chunk)
    assert "TMPDIR" in error.value.hint


def test_room_for_what_is_decoded(monkeypatch, tmp_path):
    """Beside the output, on the same disk; of a conversion that is resumed nobody knows what is left to decode."""
    source, request = open_checkpoint(SHARDED / "checkpoint", Settings(config=SHARDED)), Request(tmp_path / "out")
    planned = plan_huggingface(source, request, 10**9)
    with Files() as files:
        for job in plan().jobs:
            for part in job.sources:
                files.scratch.decoded(part.fragment, part.fragment.chunk)
        on_disk = sum(path.stat().st_size for path in files.scratch.folder.iterdir())
    asked: list[int] = []
    monkeypatch.setattr(convert_module, "require_space", lambda place, nbytes, *_: asked.append(nbytes))
    convert_module.check_room(planned, request)
    request.staging.mkdir()
    (request.staging / JOURNAL).touch()
    convert_module.check_room(planned, request)
    output = needs(planned.target)[0]
    assert asked == [output + on_disk, output]
    assert on_disk > 100_000


def test_different_chunks_are_decoded_at_the_same_time(monkeypatch, tmp_path):
    """Each of two waits for the other."""
    both = Barrier(2, timeout=60)

    def together(chunk: Chunk) -> np.ndarray:
        both.wait()
        return np.arange(16, dtype=np.float32)

    monkeypatch.setattr(scratch, "decoded", together)
    of = fragment(np.zeros(16, np.float32), "F32")
    chunk = of.chunk._replace(name="y")
    own = Scratch(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        paths = [*pool.map(lambda each: own.decoded(of, each), [of.chunk, chunk])]
    assert len({*paths}) == 2
    own.close()


def test_threads_wait_for_one_that_decodes(monkeypatch, tmp_path):
    calls: list[int] = []

    def slow(_):
        calls.append(1)
        return np.arange(16, dtype=np.float32)

    monkeypatch.setattr(scratch, "decoded", slow)
    of = fragment(np.zeros(16, np.float32), "F32")
    first, second = Scratch(tmp_path), Scratch(folder=tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    third = Scratch(folder=tmp_path / "shared")
    with ThreadPoolExecutor(8) as pool:
        paths = [*pool.map(lambda number: (second, third)[number % 2].decoded(of, of.chunk), range(16))]
    assert len({*paths}) == len(calls) == 1
    second.close()
    assert paths[0].exists(), "what another has made it deletes"
    first.close()
    shutil.rmtree(tmp_path / "shared")


@pytest.mark.parametrize("outer", range(3))
def test_any_dimension_is_the_outermost_of_what_is_decoded(outer):
    """Its strides say where in the file each element of the array is."""
    chunk = Chunk(Store(Path("/none"), "zarr3", True), "x", (0, 0, 0), (2, 3, 4), outer)
    values = np.arange(24).reshape(2, 3, 4)
    stored = np.ascontiguousarray(values.transpose(chunk.order)).reshape(-1)
    assert chunk.order[0] == outer
    assert np.array_equal(np.ndarray((2, 3, 4), stored.dtype, stored, 0, [8 * n for n in chunk.strides]), values)
    assert Chunk(Store(Path("/none"), "zarr3", True), "x", (), ()).strides == ()


def test_threads_make_one_folder(monkeypatch, tmp_path):
    made = scratch.tempfile.mkdtemp

    def slow(**given):
        time.sleep(0.05)
        return made(**given)

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", slow)
    own = Scratch(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(lambda _: own.folder, range(8))}) == 1
    own.close()
    assert not [*tmp_path.iterdir()]


def test_layers_along_any_dimension():
    whole = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    pieces = [
        Piece(Cut(((0, 2), (0, 3), (low, low + 2))), Fragment(Path("f"), 48 * low // 2, "F32", (2, 3, 2), (6, 2, 1)))
        for low in (0, 2)
    ]
    parts = [*unstack(from_pieces("x", whole.shape, "F32", pieces), 1)]
    assert [part.shape for part in parts] == [(2, 4)] * 3
    for layer, part in enumerate(parts):
        for piece, file in zip(part.copies[0], np.split(whole, 2, axis=2), strict=True):
            stored = file.copy().reshape(-1)
            first = piece.fragment.offset % 48 // 4
            strides = [4 * stride for stride in piece.fragment.strides]
            assert np.array_equal(
                np.ndarray(piece.fragment.shape, np.float32, stored, 4 * first, strides), file[:, layer, :]
            )


def test_what_a_killed_run_has_left_is_deleted(tmp_path):
    (tmp_path / "decoded-x").mkdir()
    (tmp_path / "decoded-x/chunk").write_bytes(b"1")
    (tmp_path / "journal.jsonl").touch()
    scratch.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
