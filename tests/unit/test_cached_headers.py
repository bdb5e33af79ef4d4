"""Headers that are cached are read again when their file is written again, in the same size and at the same time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from formats.deepspeed.folders import value_of
from formats.disk.stamps import noted
from formats.torch_files.dcp_metadata import read


def replaced(file: Path, new: Path) -> None:
    """Write the content of another file of the same size, and set the time back."""
    before = file.stat()
    shutil.copyfile(new, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_of_deepspeed(tmp_path):
    file, new = tmp_path / "first.pt", tmp_path / "other.pt"
    for path, step in ((file, 1), (new, 2)):
        torch.save({"step": step}, path)
    assert value_of(file) == {"step": 1}
    with noted() as stamps:
        assert value_of(file) == {"step": 1}
    assert file in stamps, "a file whose header was cached is one that must not change"
    replaced(file, new)
    assert value_of(file) == {"step": 2}


def test_of_distributed_checkpoints(tmp_path):
    for name, shape in (("run", (2, 3)), ("new", (3, 2))):
        save({"w": torch.zeros(shape)}, storage_writer=FileSystemWriter(tmp_path / name))
    file = tmp_path / "run/.metadata"
    assert read(file).tensors["w"][0] == (2, 3)
    replaced(file, tmp_path / "new/.metadata")
    assert read(file).tensors["w"][0] == (3, 2)
