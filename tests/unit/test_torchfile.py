"""The archives of torch.save: what torch writes is read, and what is written here torch and zipfile read."""

from __future__ import annotations

import argparse
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from formats.disk.safetensors import DTYPES, Fragment, row_major
from formats.errors import SourceError, UnsupportedError
from formats.torch_files import pickle_values
from formats.torch_files.archive import TorchFile, directories, read_torch
from formats.torch_files.archive_plan import ALIGNMENT, plan_archive
from formats.torch_files.pickle_values import STORAGES, Namespace, StorageRef, TensorRef

GIB4 = 1 << 32
TORCH = {name: getattr(torch, name) for name in pickle_values.DTYPES}


def elements(fragment: Fragment) -> list[bytes]:
    """The elements of a tensor in row-major order, each as its bytes, read without torch."""
    item, raw = DTYPES[fragment.dtype], fragment.path.read_bytes()
    offsets = sum(
        (index * stride for index, stride in zip(np.indices(fragment.shape), fragment.strides, strict=True)),
        np.zeros(fragment.shape, int),
    )
    return [raw[start : start + item] for start in (fragment.offset + offsets * item).ravel().tolist()]


def expected(tensor: torch.Tensor) -> list[bytes]:
    item, raw = tensor.element_size(), tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [raw[start : start + item] for start in range(0, len(raw), item)]


def saved(path: Path, value: Any, **options: Any) -> TorchFile:
    torch.save(value, path, **options)
    return read_torch(path)


BASE = torch.arange(120, dtype=torch.float32).reshape(4, 5, 6) - 60
VIEWS = {
    "whole": BASE,
    "transposed": BASE.transpose(0, 2),
    "permuted": BASE.permute(1, 2, 0),
    "offset": BASE[2:],
    "slice of every axis": BASE[1:3, ::2, 1:5],
    "one row": BASE[3, 4],
    "scalar": BASE[2, 3, 4],
    "0-d": torch.tensor(3.5),
    "empty": BASE[:0],
    "empty in the middle": torch.empty(3, 0, 2),
    "expanded": torch.arange(3.0)[:, None].expand(3, 4),
    "diagonal": BASE[0].diagonal(),
    "bits": torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45]),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_at_their_place(tmp_path, name, protocol):
    file = saved(tmp_path / "x.pt", {"t": VIEWS[name]}, pickle_protocol=protocol)
    fragment = file.fragment(file.value["t"], "t")
    assert fragment.shape == tuple(VIEWS[name].shape)
    assert fragment.strides == VIEWS[name].stride()
    assert elements(fragment) == expected(VIEWS[name])


@pytest.mark.parametrize("name", TORCH)
def test_every_dtype_is_read(tmp_path, name):
    raw = torch.arange(48, dtype=torch.uint8).remainder(2 if name == "bool" else 251)
    whole = raw.view(TORCH[name]).reshape(2, -1)
    file = saved(tmp_path / "x.pt", {"whole": whole, "part": whole[1, 1:]})
    for key, tensor in (("whole", whole), ("part", whole[1, 1:])):
        ref = file.value[key]
        assert ref.dtype == pickle_values.DTYPES[name]
        assert elements(file.fragment(ref, key)) == expected(tensor)


@pytest.mark.parametrize("dtype", ["complex64", "complex32"])
def test_a_dtype_without_a_place_in_the_table_is_refused(tmp_path, dtype):
    with pytest.raises((SourceError, UnsupportedError), match=r"x\.pt"):
        saved(tmp_path / "x.pt", {"t": torch.zeros(8, dtype=torch.uint8).view(getattr(torch, dtype))})


def test_a_negated_view_is_no_plain_tensor(tmp_path):
    """Its bytes have the wrong sign: torch keeps the negation beside them."""
    with pytest.raises((SourceError, UnsupportedError), match=r"x\.pt"):
        saved(tmp_path / "x.pt", {"t": torch._neg_view(torch.arange(3.0))})


def test_shared_storages_are_one_place(tmp_path):
    base = torch.arange(10.0)
    file = saved(tmp_path / "x.pt", {"a": base, "b": base[4:], "c": torch.arange(10.0)})
    a, b, c = (file.fragment(file.value[name], name) for name in "abc")
    assert b.offset == a.offset + 16
    assert c.offset not in (a.offset, b.offset)
    assert len(file.storages) == 2


def test_a_state_dict_as_megatron_saves_it(tmp_path):
    layer = torch.nn.Linear(3, 2)
    args = argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16, lr=1e-4, name="é", window=(3, -1), none=None)
    value = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": layer.state_dict(),
        "parameter": layer.weight,
        "shape": torch.Size([2, 3]),
        "rng_state": [{"numpy": np.random.default_rng(0).bit_generator.state, "bytes": b"\x00\xff", "np": np.ones(3)}],
        "buffer": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "set": {1, 2},
    }
    file = saved(tmp_path / "x.pt", value)
    stored = file.value
    assert isinstance(stored["args"], Namespace)
    assert vars(stored["args"]) == vars(args) | {"params_dtype": pickle_values.Dtype("bfloat16")}
    assert list(stored["model"]) == ["weight", "bias"]
    assert elements(file.fragment(stored["model"]["weight"], "w")) == expected(layer.weight)
    assert elements(file.fragment(stored["parameter"], "p")) == expected(layer.weight)
    assert elements(file.fragment(stored["buffer"], "b")) == expected(torch.ones(2))
    assert (stored["iteration"], stored["shape"], stored["set"]) == (7, (2, 3), {1, 2})
    assert stored["rng_state"][0]["bytes"] == b"\x00\xff"
    assert repr(stored["rng_state"][0]["np"]).startswith("<numpy")


def test_a_state_dict_with_metadata_keeps_its_methods(tmp_path):
    """Module.state_dict sets `_metadata` on its OrderedDict, and a pickle can set any attribute the same way."""
    state = torch.nn.Linear(1, 1).state_dict()
    state.get = 5
    stored = saved(tmp_path / "x.pt", {"model": state}).value["model"]
    assert [key for key, _ in stored.items()] == ["weight", "bias"]


@pytest.mark.parametrize("protocol", [2, 4])
def test_files_from_before_torch_1_6_are_refused(tmp_path, protocol):
    with pytest.raises(UnsupportedError, match=r"x\.pt is a pickle without a zip archive, as torch saved before"):
        saved(tmp_path / "x.pt", {"t": BASE}, _use_new_zipfile_serialization=False, pickle_protocol=protocol)


def test_a_big_endian_file_is_refused(tmp_path):
    saved(tmp_path / "x.pt", {"t": BASE})
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for member in old.infolist():
            new.writestr(member.filename, b"big" if member.filename.endswith("byteorder") else old.read(member))
    with pytest.raises(UnsupportedError, match=r"y\.pt: written on a big-endian machine"):
        read_torch(tmp_path / "y.pt")


# --- writing ---------------------------------------------------------------------------------------------------------


def ref(dtype: str, key: str, shape: tuple[int, ...]) -> TensorRef:
    numel = int(np.prod(shape, dtype=int))
    return TensorRef(StorageRef(dtype, key, numel), 0, shape, row_major(shape), dtype)


def write(path: Path, value: Any, storages: Mapping[str, bytes]) -> None:
    archive = plan_archive(value, {key: len(content) for key, content in storages.items()})
    with path.open("wb") as file:
        file.truncate(archive.size)
        for name, (offset, nbytes) in archive.storages().items():
            content = storages[name.removeprefix("archive/data/")]
            assert (offset % ALIGNMENT, nbytes) == (0, len(content)), name
            file.seek(offset)
            file.write(content)
        sums = {f"archive/data/{key}": zlib.crc32(content) for key, content in storages.items()}
        for offset, content in archive.headers(sums):
            file.seek(offset)
            file.write(content)
    assert path.stat().st_size == archive.size


def load(path: Path, **options: Any) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, **options)


WRITABLE = [name for name, dtype in pickle_values.DTYPES.items() if dtype in STORAGES.values()]


@pytest.mark.parametrize("options", [{"weights_only": True, "mmap": True}, {"weights_only": True},
                                     {"weights_only": False}, {"weights_only": False, "mmap": True}],
                         ids=str)  # fmt: skip
def test_torch_reads_what_is_written(tmp_path, options):
    tensors, storages = {}, {}
    for i, name in enumerate(WRITABLE):
        count = (0, 1, 7, 64)[i % 4] * 8
        tensors[name] = torch.arange(count, dtype=torch.uint8).remainder(2).view(TORCH[name]).reshape(2, -1)
        storages[str(i)] = b"".join(expected(tensors[name]))
    refs = OrderedDict(
        (name, ref(pickle_values.DTYPES[name], str(i), tuple(tensors[name].shape))) for i, name in enumerate(WRITABLE)
    )
    args = Namespace(
        {
            "layers": 2,
            "big": 1 << 80,
            "text": "é🦙",
            "window": (1, 0),
            "dtype": pickle_values.Dtype("bfloat16"),
            "none": None,
        }
    )
    write(tmp_path / "x.pt", {"args": args, "model": refs, "iteration": 5}, storages)
    loaded = load(tmp_path / "x.pt", **options)
    assert vars(loaded["args"]) == vars(args) | {"dtype": torch.bfloat16}
    assert loaded["iteration"] == 5
    assert list(loaded["model"]) == WRITABLE
    for name, tensor in tensors.items():
        assert loaded["model"][name].dtype == tensor.dtype
        assert loaded["model"][name].shape == tensor.shape
        assert expected(loaded["model"][name]) == expected(tensor), name
    again = read_torch(tmp_path / "x.pt")
    assert {name: elements(again.fragment(again.value["model"][name], name)) for name in WRITABLE} == {
        name: expected(tensor) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("sizes", [[], [0], [1, 63, 64, 65], [4096] * 40], ids=len)
def test_zipfile_reads_what_is_written(tmp_path, sizes):
    storages = {str(i): bytes((i + j) % 256 for j in range(size)) for i, size in enumerate(sizes)}
    write(tmp_path / "x.pt", {"x": 1}, storages)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        for key, content in storages.items():
            assert archive.read(f"archive/data/{key}") == content
        assert archive.read("archive/byteorder") == b"little"
        assert archive.read("archive/version") == b"3\n"
        assert all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
    raw = (tmp_path / "x.pt").read_bytes()
    for member in archive.infolist():
        names, extra = struct.unpack_from("<HH", raw, member.header_offset + 26)
        assert (member.header_offset + 30 + names + extra) % ALIGNMENT == 0, member.filename


def test_a_wrong_checksum_is_seen_by_zipfile(tmp_path):
    write(tmp_path / "x.pt", {}, {"0": b"content"})
    raw = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(raw.replace(b"content", b"cOntent"))
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() == "archive/data/0"


def write_sparse(path: Path, value: Any, sizes: Mapping[str, int]) -> None:
    """An archive whose storages are holes, but for some bytes at both ends."""
    archive = plan_archive(value, sizes)
    with path.open("wb") as file:
        file.truncate(archive.size)
        for name, (offset, nbytes) in archive.storages().items():
            for at, content in zip((offset, offset + nbytes - 4), ENDS[name.rpartition("/")[2]], strict=True):
                file.seek(at)
                file.write(content)
        for offset, content in archive.headers({f"archive/data/{key}": checksum(key, sizes[key]) for key in sizes}):
            file.seek(offset)
            file.write(content)
    assert path.stat().st_size == archive.size


def checksum(key: str, size: int) -> int:
    """The right one of a small storage; any for a large one, whose zeros would take seconds to read."""
    first, last = ENDS[key]
    return zlib.crc32(first + bytes(size - 8) + last) if size < 100 else 0x12345678


ENDS = {"0": (b"abcd", b"efgh"), "1": (b"ijkl", b"mnop"), "2": (b"qrst", b"uvwx")}


@pytest.mark.parametrize(
    "sizes",
    [(GIB4 + 100, 8, 12), (8, GIB4 - 1, 8), (GIB4 - 2, 8, 8), (GIB4, 8, 8), (GIB4 // 2, GIB4 // 2, 9),
     (8, 8, GIB4 + 1), (GIB4 - 960, 8, 8)],
    ids=["over", "the mark itself", "just below", "exactly 4 GiB", "offsets", "last", "directory"],
)  # fmt: skip
def test_past_4_gib(tmp_path, sizes):
    path = tmp_path / "x.pt"
    named = {str(i): size for i, size in enumerate(sizes)}
    write_sparse(path, {key: ref("U8", key, (size,)) for key, size in named.items()}, named)
    assert path.stat().st_blocks * 512 < 1 << 20, "this file system has no holes"
    theirs, ours = torch.load(path, mmap=True, weights_only=True), read_torch(path)
    with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
        for key, size in named.items():
            assert theirs[key].numel() == size
            assert (bytes(theirs[key][:4].tolist()), bytes(theirs[key][-4:].tolist())) == ENDS[key]
            fragment = ours.fragment(ours.value[key], key)
            raw.seek(fragment.offset)
            assert (fragment.nbytes, raw.read(4)) == (size, ENDS[key][0])
            member = archive.getinfo(f"archive/data/{key}")
            assert (member.file_size, member.compress_size, member.CRC) == (size, size, checksum(key, size))
            with archive.open(member) as inside:
                assert inside.read(4) == ENDS[key][0]


def test_more_members_than_a_plain_directory_can_count(tmp_path):
    storages = {str(i): b"" for i in range(65536)}
    write(tmp_path / "x.pt", {}, storages)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert len(archive.infolist()) == 65536 + 5
    assert set(read_torch(tmp_path / "x.pt").storages) == set(storages)
    assert torch.load(tmp_path / "x.pt", weights_only=True) == {}


@pytest.mark.parametrize("members", [0, 3])
def test_directories_are_those_that_zipfile_finds(tmp_path, members):
    """Of torch's archives, which have the records of large files too, and of plain ones; here back to back."""
    import io
    import zipfile

    import torch

    ends, raw = [], b""
    for number in range(3):
        stream = io.BytesIO()
        torch.save([torch.full((5,), float(number))] * (1 + members), stream)
        plain = io.BytesIO()
        with zipfile.ZipFile(plain, "w") as archive:
            archive.writestr("a/data.pkl", bytes([number]))
        for buffer in (stream, plain):
            with zipfile.ZipFile(buffer) as archive:
                ends.append(buffer.getvalue()[archive.start_dir :])
            raw += buffer.getvalue()
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(raw)
    with path.open("rb") as file:
        assert list(directories(file.fileno(), path)) == ends[::-1]
