"""torch_dist of megatron-core 0.19, whose arguments are in the DCP: damaged, half copied, or made to harm."""

from __future__ import annotations

import io
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.megatron.common_state import OBJECT
from tests.faults.dcp_tools import edit, refused

REAL = Path(__file__).parents[1] / "golden/megatron_0192/dp_reshardable"
VOCAB = ("--vocab-size", 28)
DATA, TRACKER = "__0_0.distcp", "latest_checkpointed_iteration.txt"
ITERATION = "iter_0000003"


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of real Megatron-LM 0.19.2."""
    return shutil.copytree(REAL, tmp_path / "run")


def place(metadata: Any) -> Any:
    """Where the common state is stored."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn == OBJECT)


def replace(folder: Path, content: bytes) -> None:
    """Put another object in the place of the common state, at the end of the file."""
    data = folder / DATA
    start = data.stat().st_size
    with data.open("ab") as file:
        file.write(content)

    def change(metadata: Any) -> None:
        place(metadata).offset, place(metadata).length = start, len(content)

    edit(folder, change)


def saved(value: object) -> bytes:
    """What torch.save writes of a value."""
    import torch

    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def second_model(folder: Path) -> None:
    import torch

    replace(folder, saved([{"args": Namespace(), "ema": {"weight": torch.ones(2)}}]))


class Harm:
    """A pickle of it would run a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


def forget(folder: Path) -> None:
    def change(metadata: Any) -> None:
        del metadata.state_dict_metadata[OBJECT]
        del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == OBJECT)]

    edit(folder, change)


def cut_common(folder: Path) -> None:
    def change(metadata: Any) -> None:
        place(metadata).length -= 100

    edit(folder, change)


def cut(name: str, share: float) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return change


def gone(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def both(folder: Path) -> None:
    (folder / "common.pt").write_bytes(saved({"iteration": 2}))


def encoded(folder: Path) -> None:
    edit(folder, lambda metadata: setattr(place(metadata), "transform_descriptors", ["other"]))


@pytest.mark.parametrize(
    ("change", "code", "parts"),
    [
        (gone(DATA), 3, ["lacks 1 of 1 files", DATA]),
        (cut(DATA, 0.05), 3, [f"{DATA} is cut off"]),
        (cut(".metadata", 0.5), 3, [".metadata"]),
        (cut(".metadata", 0), 3, [".metadata"]),
        (gone(".metadata"), 3, ["the data of ranks 0 but no .metadata: the save never finished"]),
        (
            gone("metadata.json"),
            3,
            ["holds no metadata.json, which megatron-core writes last: the save never finished"],
        ),
        (gone("metadata.json", ".metadata"), 3, ["holds no metadata.json"]),
        (gone("metadata.json", ".metadata", DATA), 3, ["holds no mp_rank folder"]),
        (cut("metadata.json", 0.5), 3, ["metadata.json"]),
        (forget, 3, ["holds neither common.pt nor common_state/shard_0_1", "take an earlier iteration"]),
        (cut_common, 3, [f"{DATA}: common_state/shard_0_1 is not a sound torch.save archive"]),
        (encoded, 4, ["common_state/shard_0_1 encoded as other"]),
        (both, 3, ["common.pt and, in .metadata, common_state/shard_0_1", "remove"]),
        (lambda folder: replace(folder, b"\0" * 500), 3, ["common_state/shard_0_1"]),
        (lambda folder: replace(folder, saved({"args": 1})), 3, ["common_state/shard_0_1 holds no map of names"]),
        (lambda folder: replace(folder, saved([{}, {}])), 3, ["common_state/shard_0_1 holds no map of names"]),
        (lambda folder: replace(folder, saved([[]])), 3, ["common_state/shard_0_1 holds no map of names"]),
        (lambda folder: replace(folder, saved([Harm()])), 3, ["common_state/shard_0_1 holds no map of names"]),
        (lambda folder: replace(folder, saved([{"args": Harm()}])), 3, [f"{DATA} holds no args"]),
        (lambda folder: replace(folder, saved([{"iteration": 3}])), 3, [f"{DATA} holds no args"]),
        (second_model, 5, ["holds tensors under 'ema' beside its model"]),
        (lambda folder: (folder.parent / TRACKER).write_text("4"), 3, ["names iter_0000004, which does not exist"]),
        (lambda folder: (folder.parent / TRACKER).write_text("soon"), 3, ["neither an iteration nor `release`"]),
    ],
)
def test_what_is_wrong_is_said(run, convert, tmp_path, monkeypatch, change, code, parts):
    monkeypatch.chdir(tmp_path)
    change(run / ITERATION)
    for argv in (["inspect", run], ["megatron2hf", run, "out", *VOCAB], ["reshard", run, "out", *VOCAB]):
        refused(convert(*argv), code, *parts)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "harmed").exists()


def test_an_iteration_is_named_itself(run, convert):
    """Without a tracker, or with a wrong one beside it."""
    (run / TRACKER).write_text("4")
    assert convert("digest", run / ITERATION, *VOCAB).code == 0
    (run / TRACKER).unlink()
    assert convert("digest", run / ITERATION, *VOCAB).code == 0
    refused(convert("digest", run, *VOCAB), 3, "holds no latest_checkpointed_iteration.txt", run / ITERATION)


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_a_flipped_bit_is_found(run, convert, share):
    data = run / ITERATION / DATA
    content = bytearray(data.read_bytes())
    content[int(len(content) * share)] ^= 4
    data.write_bytes(content)
    assert convert("verify", run).code in (3, 6)
