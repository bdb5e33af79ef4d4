"""DCP checkpoints with files that are missing, cut off, swapped or altered: each is noticed, and named."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Killed, Ran
from tests.faults.dcp_tools import as_trained, edit, places, refused, save, weights
from tests.models import files

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
EMBEDDING, NORM = "model.model.embed_tokens.weight", "model.model.norm.weight"


@pytest.fixture
def make_dcp(model: Callable[..., Path], convert: Callable[..., Ran], tmp_path: Path) -> Callable[..., Path]:
    """`make_dcp(4)`: a DCP folder of four ranks, as a training leaves it."""

    def make(ranks: int = 4, name: str = "llama", dtype: str = "float32") -> Path:
        folder = tmp_path / "checkpoint-7"
        assert convert("hf2fsdp", model(name, dtype), folder, "--ranks", ranks, "-q").code == 0
        return as_trained(folder)

    return make


def test_sound_it_is_merged(make_dcp, merge, model, tmp_path):
    """What the tests below damage is sound."""
    assert merge(make_dcp()).code == 0
    assert files(tmp_path / "out") == files(model("llama"))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
def test_missing_metadata_is_explained(make_dcp, merge, ranks):
    folder = make_dcp(ranks)
    (folder / ".metadata").unlink()
    whose = "0-3" if ranks == 4 else "0"
    refused(merge(folder), 3, folder, f"ranks {whose}", "no .metadata", "node of rank 0", "earlier checkpoint")


@pytest.mark.parametrize("lost", [{0}, {1}, {3}, {0, 2}, {0, 1, 2, 3}])
def test_missing_files_are_named_with_their_ranks(make_dcp, merge, lost):
    folder = make_dcp()
    for rank in lost:
        (folder / f"__{rank}_0.distcp").unlink()
    whose = "0-3" if len(lost) == 4 else ",".join(map(str, sorted(lost)))
    refused(merge(folder), 3, folder, f"lacks {len(lost)} of 4 files", f"__{min(lost)}_0.distcp", f"ranks {whose}\n")


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("left", [0.0, 0.3, 0.9999])
@pytest.mark.parametrize("command", ["inspect", "fsdp2hf"])
def test_a_truncated_file_is_noticed(make_dcp, merge, model, convert, rank, left, command):
    folder = make_dcp()
    file = folder / f"__{rank}_0.distcp"
    os.truncate(file, int(left * file.stat().st_size))
    argv = ("inspect", folder, "--config", model("llama"))
    refused(convert(*argv) if command == "inspect" else merge(folder), 3, file, "cut off")


def test_swapped_files_are_noticed(make_dcp, merge):
    folder = make_dcp()
    first, last = folder / "__0_0.distcp", folder / "__3_0.distcp"
    first.rename(folder / "x")
    last.rename(first)
    (folder / "x").rename(last)
    refused(merge(folder), 3, folder)


def test_a_folder_in_the_place_of_a_file_is_noticed(make_dcp, merge):
    folder = make_dcp()
    (folder / "__2_0.distcp").unlink()
    (folder / "__2_0.distcp").mkdir()
    refused(merge(folder), 3, "__2_0.distcp")


def test_an_unreadable_metadata_is_noticed(make_dcp, merge):
    folder = make_dcp()
    raw = (folder / ".metadata").read_bytes()
    for left in (0, 1, len(raw) // 2, len(raw) - 1):
        (folder / ".metadata").write_bytes(raw[:left])
        refused(merge(folder), 3, folder / ".metadata")


def test_altered_metadata_never_alters_the_model(make_dcp, merge, model, tmp_path):
    """Any one byte: refused, or the same files."""
    folder, dice = make_dcp(2), random.Random(0)
    raw = (folder / ".metadata").read_bytes()
    codes = []
    for _ in range(60):
        at, bit = dice.randrange(len(raw)), dice.randrange(8)
        (folder / ".metadata").write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
        ran = merge(folder)
        codes.append(ran.code)
        assert ran.code in (0, 3, 4, 5), f"byte {at}, bit {bit}: {ran.err}"
        if ran.code == 0:
            assert files(tmp_path / "out") == files(model("llama")), f"byte {at}, bit {bit}"
            shutil.rmtree(tmp_path / "out")
    assert codes.count(0) < 30 < len(codes)


# --- items -----------------------------------------------------------------------------------------------------------


def test_altered_heads_of_items_never_alter_the_model(make_dcp, merge, model, tmp_path):
    """An item is an archive; whatever byte of it is no weight may change: refused, or the same files."""
    folder, dice, items = make_dcp(2), random.Random(1), []
    edit(folder, lambda metadata: items.extend(places(metadata, NORM)))
    info = items[0][1]
    path, payload = folder / info.relative_path, 32 * 4
    raw = path.read_bytes()
    item = raw[info.offset : info.offset + info.length]
    head = item.index(weights(model("llama"))[NORM.removeprefix("model.")][:32].numpy().tobytes())
    heads = [at for at in range(info.length) if not head <= at < head + payload]
    codes = []
    for at in dice.sample(heads, 60):
        changed = bytearray(raw)
        changed[info.offset + at] ^= 1 << dice.randrange(8)
        path.write_bytes(changed)
        ran = merge(folder)
        codes.append(ran.code)
        assert ran.code in (0, 3, 4), f"byte {at}: {ran.err}"
        if ran.code == 0:
            assert files(tmp_path / "out") == files(model("llama")), f"byte {at} of the item"
            shutil.rmtree(tmp_path / "out")
        else:
            assert str(path) in ran.err
    assert set(codes) >= {0, 3}


@pytest.mark.parametrize("region", ["local header", "pickle", "directory", "end"])
def test_a_wiped_part_of_an_item_is_noticed(make_dcp, merge, region):
    folder, items = make_dcp(), []
    edit(folder, lambda metadata: items.extend(places(metadata, EMBEDDING)))
    info = items[1][1]
    path = folder / info.relative_path
    raw = bytearray(path.read_bytes())
    start = {"local header": 0, "pickle": 64, "directory": info.length - 300, "end": info.length - 22}[region]
    raw[info.offset + start : info.offset + start + 20] = bytes(20)
    path.write_bytes(raw)
    refused(merge(folder), 3, path, EMBEDDING)


@pytest.mark.parametrize("difference", [-1, -22, -1000, 1, 22, 1000])
def test_an_item_of_another_length_is_noticed(make_dcp, merge, difference):
    folder = make_dcp()
    edit(folder, lambda metadata: setattr(places(metadata, EMBEDDING)[1][1], "length",
                                          places(metadata, EMBEDDING)[1][1].length + difference))  # fmt: skip
    refused(merge(folder), 3, folder / "__1_0.distcp", EMBEDDING)


@pytest.mark.parametrize("distance", [-64, -1, 1, 64])
def test_an_item_at_another_place_is_noticed(make_dcp, merge, distance):
    def move(metadata):
        info = places(metadata, NORM)[1][1]
        info.offset += distance

    folder = make_dcp()
    edit(folder, move)
    refused(merge(folder), 3, folder / "__1_0.distcp", NORM)


def test_an_item_of_another_tensor_is_noticed(make_dcp, merge):
    """Two tensors whose pieces have other shapes change places."""

    def swap(metadata):
        (first, a), (second, b) = places(metadata, NORM)[0], places(metadata, EMBEDDING)[0]
        metadata.storage_data[first], metadata.storage_data[second] = b, a

    folder = make_dcp()
    edit(folder, swap)
    refused(merge(folder), 3, "__0_0.distcp", "the metadata says")


# --- zstd ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def compressed(model, tmp_path) -> Path:
    from torch.distributed.checkpoint._extension import ZStandard

    return save(tmp_path / "z", {"model": weights(model("llama"))}, _extensions=[ZStandard()])


def test_compressed_and_sound_it_is_merged(compressed, merge, model, tmp_path):
    assert merge(compressed).code == 0
    assert files(tmp_path / "out") == files(model("llama"))


@pytest.mark.parametrize("name", [NORM, EMBEDDING, "model.model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("part", ["beginning", "second half", "end"])
def test_a_damaged_stream_is_noticed(compressed, merge, name, part):
    items = []
    edit(compressed, lambda metadata: items.extend(places(metadata, name)))
    info = items[0][1]
    path = compressed / info.relative_path
    raw = bytearray(path.read_bytes())
    start, stop = {"beginning": (0, 8), "second half": (0.5, 1.0), "end": (-8, 0)}[part]
    start, stop = (int(end * info.length) if part == "second half" else end for end in (start, stop))
    low, high = info.offset + start % info.length, info.offset + (stop or info.length)
    raw[low:high] = bytes(255 - byte for byte in raw[low:high])
    path.write_bytes(raw)
    refused(merge(compressed), 3, path)


def test_a_stream_that_is_cut_off_is_noticed(compressed, merge):
    edit(compressed, lambda metadata: setattr(places(metadata, EMBEDDING)[0][1], "length",
                                              places(metadata, EMBEDDING)[0][1].length // 2))  # fmt: skip
    refused(merge(compressed), 3, "__0_0.distcp")


def test_without_the_package_zstandard_there_is_a_hint(compressed, merge, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    refused(merge(compressed), 4, "zstd", "pip install zstandard")


def test_an_unknown_encoding_is_named(compressed, merge):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.lz4/1"]

    edit(compressed, change)
    refused(merge(compressed), 4, "stream.lz4/1")


# --- interruption ----------------------------------------------------------------------------------------------------


@pytest.fixture
def merged_until(killed) -> Callable[..., Killed]:
    """fsdp2hf in a process that kills itself at the N-th write of weights; 0: it does not."""
    return lambda limit, folder, out, config: killed(-limit, "fsdp2hf", folder, out, "--config", config, "-q")


def test_killed_it_goes_on_to_the_same_bytes(make_dcp, merged_until, model, tmp_path):
    folder, out, expected = make_dcp(), tmp_path / "out", files(model("llama"))
    undisturbed = merged_until(0, folder, tmp_path / "whole", model("llama"))
    assert files(tmp_path / "whole") == expected
    writes = undisturbed.writes
    assert writes > 30
    for part in (0.2, 0.9, 0.5):
        ran = merged_until(int(writes * part), folder, out, model("llama"))
        assert ran.returncode in (-signal.SIGKILL, 0), ran.out
        assert out.exists() == (ran.returncode == 0)
        if out.exists():
            break
    assert out.exists() or merged_until(0, folder, out, model("llama")).returncode == 0
    assert files(out) == expected
    assert not (tmp_path / "out.partial").exists()


def test_killed_it_does_not_go_on_with_another_source(make_dcp, merged_until, model, tmp_path, convert):
    folder = make_dcp()
    merged_until(20, folder, tmp_path / "out", model("llama"))
    assert (tmp_path / "out.partial").is_dir()
    shutil.rmtree(folder)
    make_dcp(3)
    ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", model("llama"), "-q")
    refused(ran, 7, "another conversion")
