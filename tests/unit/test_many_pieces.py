"""Checkpoints of many ranks: how often files are read and synced, how many are open and held. No clock is asked."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from time import sleep

from converters.move.blocks import Files, finish_files
from formats.checkpoint import OutputFile
from formats.deepspeed import model_files
from formats.disk.safetensors import Fragment
from formats.torch_files import dcp_items, dcp_metadata, dcp_writer

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_only_what_was_written_is_synced(tmp_path, monkeypatch):
    """Four times a second all is forced to disk; a thousand files, most of them finished, are not asked each time."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(bytes(4))
    with Files() as files:
        opened = []
        for path in paths:
            with files.open(path, writable=True) as fd:
                opened.append(fd)
        files.sync()
        synced.clear()
        first, second, last = opened
        for path, seen in ((paths[0], [first]), (None, []), (paths[1], [second]), (paths[0], [first]), (None, [])):
            if path:
                files.write(Fragment(path, 0, "U8", (4,), (1,)), 0, memoryview(b"abcd"))
            files.sync()
            assert synced == seen
            synced.clear()
        finish_files([OutputFile(path, 4, (), {}, lambda _: []) for path in paths], files, 1)
        files.sync()
        assert sorted(synced) == sorted([first, second, last]), "another process may have written what is in them"


def test_more_ranks_than_the_usual_limit_of_open_files(model, convert, tmp_path):
    """It is 1024 nearly everywhere, and may be raised."""
    assert convert("hf2fsdp", model("llama"), tmp_path / "out", "--ranks", 60).code == 0
    digest = [sys.executable, "-c", "from converters.cli import main; main()", "digest", str(tmp_path / "out")]
    command = ["bash", "-c", 'ulimit -Sn 48; exec "$@"', "digest", *digest]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENV, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[0] == convert("digest", model("llama")).out.split()[0]


def test_metadata_is_read_once(model, convert, tmp_path):
    """Of a large run it is hundreds of megabytes: it is not parsed again to look for an optimizer."""
    assert convert("hf2fsdp", model("llama"), tmp_path / "out", "--ranks", 2).code == 0
    dcp_metadata._read.cache_clear()
    assert convert("inspect", tmp_path / "out").code == 0
    assert dcp_metadata._read.cache_info().misses == 1


def test_pieces_that_are_alike_are_laid_out_once(model, convert, tmp_path, monkeypatch):
    """Half of the memory of a plan for many ranks were archives that say the same."""
    plan, seen = dcp_writer.plan_archive, []
    monkeypatch.setattr(dcp_writer, "plan_archive", lambda ref, sizes: (seen.append(ref), plan(ref, sizes))[1])
    dcp_writer._archive.cache_clear()
    assert convert("hf2fsdp", model("llama"), tmp_path / "out", "--ranks", 32, "-n").code == 0
    assert 0 < len(seen) == len(set(seen)) < 20


def test_threads_compare_all_items_of_a_kind_with_the_same_one(model, convert, tmp_path, monkeypatch):
    """Each file is read by a thread of its own: whichever is first, the others wait for it."""
    assert convert("hf2fsdp", model("llama"), tmp_path / "out", "--ranks", 8).code == 0
    kinds, kind_of = [], dcp_items._kind

    def slow(expected, row, fd):
        kinds.append(int(expected.kind[row]))
        sleep(0.02)
        return kind_of(expected, row, fd)

    monkeypatch.setattr(dcp_items, "_kind", slow)
    assert convert("digest", tmp_path / "out").code == 0
    assert kinds
    assert sorted(kinds) == sorted(set(kinds))


def test_the_model_files_of_stage_3_are_not_held_together(tmp_path):
    """Each rank has one, and all say the same of every parameter."""
    import torch

    names = [f"model.layers.{number}.weight" for number in range(400)]
    header = {
        "param_shapes": [dict.fromkeys(names, (8, 8))],
        "dp_world_size": 12,
        "mp_world_size": 1,
        "global_steps": 1,
    }
    for rank in range(12):
        module = {name: torch.empty(0) for name in names}
        torch.save({"module": module, **header}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    tracemalloc.start()
    try:
        files = model_files.files_of_ranks(tmp_path)
        twelve = tracemalloc.get_traced_memory()[0]
        del files[1:]
        single = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert twelve < 2 * single
