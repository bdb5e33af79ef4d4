"""Files of torch that are no zip archives, or compressed as a whole: refused by name, in every format."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zstandard

from tests.faults.dcp_tools import refused

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = {
    "neox2hf": "neox/llama-gqa-tp2", "zero2hf": "mds/gpt_blocked_tp2", "megatron2hf": "megatron_lm/mcore/tp2pp2_bf16",
    "fsdp2hf": "old_torch/llama/ranks_fsdp2_2.4.1",
}  # fmt: skip
"""Command: a checkpoint of the real framework."""


def plain(path: Path) -> None:
    """Save a file again as torch did before its version 1.6."""
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)


def packed(compress: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(compress(path.read_bytes())) and None


KINDS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "pickle": (plain, "is a pickle without a zip archive", "load it with torch and save it again"),
    "zstd": (packed(zstandard.compress), "is compressed as a whole, with zstd", "decompress it with zstd"),
    "gzip": (packed(gzip.compress), "is compressed as a whole, with gzip", "decompress it with gzip"),
    "xz": (packed(lzma.compress), "is compressed as a whole, with xz", "decompress it with xz"),
    "bzip2": (packed(bz2.compress), "is compressed as a whole, with bzip2", "decompress it with bzip2"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", RUNS)
def test_it_is_refused(convert, tmp_path, command, kind):
    """Not called cut off, and not taken for no checkpoint at all."""
    make, what, way = KINDS[kind]
    run = shutil.copytree(GOLDEN / RUNS[command], tmp_path / "run")
    every = sorted(run.rglob("*.pt"))
    for path in every:
        make(path)
    for argv in ([command, run, tmp_path / "out"], ["inspect", run]):
        ran = convert(*argv)
        refused(ran, 4, what, way)
        assert any(str(path) in ran.err for path in every)
    assert not (tmp_path / "out").exists()
