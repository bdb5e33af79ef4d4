"""`.metadata` that says something else than the files, or something hostile: refused, and nothing is executed."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import as_trained, edit, places, refused, save, weights
from tests.faults.test_fsdp_optim_faults import training
from tests.models import files

EMBEDDING, NORM = "model.model.embed_tokens.weight", "model.model.norm.weight"
WK, WV = (f"model.model.layers.0.self_attn.{which}_proj.weight" for which in "kv")


@pytest.fixture
def folder(model, convert, tmp_path) -> Path:
    """A DCP folder of three ranks, as a training leaves it."""
    assert convert("hf2fsdp", model("llama"), tmp_path / "checkpoint-7", "--ranks", 3, "-q").code == 0
    return as_trained(tmp_path / "checkpoint-7")


def chunk(metadata: Any, name: str, number: int) -> Any:
    return metadata.state_dict_metadata[name].chunks[number]


def about(metadata: Any, name: str) -> Any:
    return metadata.state_dict_metadata[name]


def test_rewritten_by_torch_it_is_the_same(folder, merge, model, tmp_path):
    """The edits below go through torch's classes; without one the model is what it was."""
    edit(folder, lambda metadata: None)
    assert merge(folder).code == 0
    assert files(tmp_path / "out") == files(model("llama"))


# --- pieces ----------------------------------------------------------------------------------------------------------


def relocate(metadata: Any, name: str, number: int, offsets: tuple[int, ...]) -> None:
    """Say of a stored piece that it begins elsewhere."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    index, info = places(metadata, name)[number]
    chunks = about(metadata, name).chunks
    (old,) = (piece for piece in chunks if piece.offsets == index.offset)
    chunks[chunks.index(old)] = ChunkStorageMetadata(torch.Size(offsets), old.sizes)
    del metadata.storage_data[index]
    metadata.storage_data[MetadataIndex(name, torch.Size(offsets), index.index)] = info


def without(metadata: Any, name: str, number: int, *, described: bool = False, stored: bool = False) -> None:
    """Take a piece out of the metadata, or leave it in one of the two tables."""
    index, _ = places(metadata, name)[number]
    if not stored:
        del metadata.storage_data[index]
    if not described:
        about(metadata, name).chunks[:] = [
            piece for piece in about(metadata, name).chunks if piece.offsets != index.offset
        ]


@pytest.mark.parametrize("low", [70, 0, 141])
def test_overlapping_pieces_are_noticed(folder, merge, low):
    edit(folder, lambda metadata: relocate(metadata, EMBEDDING, 1, (low, 0)))
    number = {70: "[70:141, 0:64]", 0: EMBEDDING, 141: EMBEDDING}[low]
    refused(merge(folder), 3, number, EMBEDDING)


@pytest.mark.parametrize("offsets", [(72, 0), (140, 0), (71, 1), (10**6, 0)])
def test_a_piece_that_reaches_out_of_its_tensor_or_leaves_a_hole_is_noticed(folder, merge, offsets):
    edit(folder, lambda metadata: relocate(metadata, EMBEDDING, 1, offsets))
    refused(merge(folder), 3, EMBEDDING, "__1_0.distcp")


@pytest.mark.parametrize("name", [EMBEDDING, NORM])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_hole_is_noticed(folder, merge, name, number):
    edit(folder, lambda metadata: without(metadata, name, number))
    refused(merge(folder), 3, name, "are missing")


def test_all_pieces_of_a_tensor_missing_is_noticed(folder, merge):
    edit(folder, lambda metadata: [without(metadata, NORM, 0) for _ in range(3)])
    refused(merge(folder), 3, NORM)


@pytest.mark.parametrize("left", ["described", "stored"])
def test_a_piece_in_one_table_only_is_noticed(folder, merge, left):
    edit(folder, lambda metadata: without(metadata, EMBEDDING, 1, **{left: True}))
    refused(merge(folder), 3, folder, EMBEDDING)


def test_a_tensor_that_is_missing_altogether_is_noticed(folder, merge):
    def drop(metadata):
        del metadata.state_dict_metadata[NORM], metadata.planner_data[NORM]
        for index, _ in places(metadata, NORM):
            del metadata.storage_data[index]

    edit(folder, drop)
    refused(merge(folder), 3, "model.norm.weight")


def test_a_piece_of_another_size_is_noticed(folder, merge):
    import torch

    edit(folder, lambda metadata: setattr(chunk(metadata, EMBEDDING, 1), "sizes", torch.Size((70, 64))))
    refused(merge(folder), 3, EMBEDDING, "[70, 64]", "__1_0.distcp")


@pytest.mark.parametrize("shape", [(212, 64), (210, 64), (64, 211), (211 * 64,), (211, 64, 1), ()])
def test_a_tensor_of_another_shape_is_noticed(folder, merge, shape):
    import torch

    edit(folder, lambda metadata: setattr(about(metadata, EMBEDDING), "size", torch.Size(shape)))
    refused(merge(folder), 3, EMBEDDING)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "float64"])
def test_another_element_type_is_noticed(folder, merge, dtype):
    import torch

    edit(folder, lambda metadata: setattr(about(metadata, EMBEDDING).properties, "dtype", getattr(torch, dtype)))
    refused(merge(folder), 3, EMBEDDING, "F32", "__0_0.distcp")


@pytest.mark.parametrize("dtype", ["complex64", "quint8", "bits8"])
def test_an_element_type_without_a_counterpart_is_named(folder, merge, dtype):
    import torch

    edit(folder, lambda metadata: setattr(about(metadata, EMBEDDING).properties, "dtype", getattr(torch, dtype)))
    ran = merge(folder)
    assert ran.code in (3, 4)
    assert EMBEDDING in ran.err or dtype in ran.err


def test_metadata_without_paths_is_that_of_an_old_torch(folder, merge, model, tmp_path):
    """Torch before 2.0 records no planner_data; what is before a known key is the container."""
    edit(folder, lambda metadata: setattr(metadata, "planner_data", None))
    assert merge(folder).code == 0
    assert files(tmp_path / "out") == files(model("llama"))


def test_two_models_in_metadata_without_paths(merge, model, tmp_path):
    state = weights(model("llama"))
    both = save(tmp_path / "c", {"model": state, "ema": {key: value * 2 for key, value in state.items()}})
    edit(both, lambda metadata: setattr(metadata, "planner_data", None))
    refused(merge(both), 5, "several models: ", "ema", "model", "--container")
    assert merge(both, "--container", "ema").code == 0
    assert all((weights(tmp_path / "out")[key] == value * 2).all() for key, value in state.items())


def swap_paths(metadata: Any) -> None:
    paths = metadata.planner_data
    paths[WK], paths[WV] = paths[WV], paths[WK]


def share_bytes(metadata: Any) -> None:
    """Say of each piece of the one tensor that it lies where that of the other does."""
    for (key, _), (value, _) in zip(places(metadata, WK), places(metadata, WV), strict=True):
        metadata.storage_data[value] = metadata.storage_data[key]


def share_some_bytes(metadata: Any) -> None:
    info = places(metadata, WV)[1][1]
    info.length += 1


@pytest.mark.parametrize(
    ("change", "says"),
    [(swap_paths, "has the path of"), (share_bytes, "share bytes"), (share_some_bytes, "share bytes")],
)
def test_an_index_that_contradicts_itself_is_refused(folder, merge, change, says):
    """Torch loads by the key: with the paths of two keys swapped, a tensor would come out as the other one."""
    edit(folder, change)
    refused(merge(folder), 3, f"{folder / '.metadata'} contradicts itself", "self_attn.v_proj.weight", says)


def test_items_without_bytes_may_lie_anywhere(folder, merge, model, tmp_path):
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    def add(metadata):
        for offset in (0, 1):
            metadata.storage_data[MetadataIndex(f"empty {offset}")] = _StorageInfo("__0_0.distcp", offset, 0)

    edit(folder, add)
    assert merge(folder).code == 0
    assert files(tmp_path / "out") == files(model("llama"))


def test_an_entry_of_an_unknown_kind_is_refused(folder, merge):
    """What is neither a tensor nor bytes could be a tensor of a kind to come: it is not left out in silence."""

    def change(metadata):
        metadata.state_dict_metadata[NORM] = ForeignMetadata()

    edit(folder, change)
    refused(merge(folder, "--verbatim"), 3, NORM)


class ForeignMetadata:
    """Of no class that torch has."""


# --- hostile values --------------------------------------------------------------------------------------------------

ABSURD: dict[str, Callable[[Any], object]] = {
    "size 2^61": lambda m: setattr(about(m, EMBEDDING), "size", (2**61, 64)),
    "size 2^200": lambda m: setattr(about(m, EMBEDDING), "size", (2**200, 64)),
    "size and chunk 2^61": lambda m: (setattr(about(m, EMBEDDING), "size", (2**61, 2**61)),
                                      setattr(chunk(m, EMBEDDING, 0), "sizes", (2**61, 2**61))),
    "negative size": lambda m: setattr(about(m, EMBEDDING), "size", (-211, -64)),
    "size of text": lambda m: setattr(about(m, EMBEDDING), "size", ("211", "64")),
    "size of floats": lambda m: setattr(about(m, EMBEDDING), "size", (211.0, 64.0)),
    "size of booleans": lambda m: setattr(about(m, EMBEDDING), "size", (True, True)),
    "size is none": lambda m: setattr(about(m, EMBEDDING), "size", None),
    "1000 dimensions": lambda m: setattr(about(m, EMBEDDING), "size", (1,) * 1000),
    "negative chunk": lambda m: setattr(chunk(m, EMBEDDING, 0), "sizes", (-71, 64)),
    "chunk offset 2^61": lambda m: setattr(chunk(m, EMBEDDING, 0), "offsets", (2**61, 0)),
    "item at 2^61": lambda m: setattr(places(m, EMBEDDING)[0][1], "offset", 2**61),
    "item at 2^70": lambda m: setattr(places(m, EMBEDDING)[0][1], "offset", 2**70),
    "item before the file": lambda m: setattr(places(m, EMBEDDING)[0][1], "offset", -64),
    "item of 2^61 bytes": lambda m: setattr(places(m, EMBEDDING)[0][1], "length", 2**61),
    "item of 2^70 bytes": lambda m: setattr(places(m, EMBEDDING)[0][1], "length", 2**70),
    "item of no bytes": lambda m: setattr(places(m, EMBEDDING)[0][1], "length", 0),
    "item of negative length": lambda m: setattr(places(m, EMBEDDING)[0][1], "length", -1),
    "item offset of text": lambda m: setattr(places(m, EMBEDDING)[0][1], "offset", "0"),
    "path of a number": lambda m: setattr(places(m, EMBEDDING)[0][1], "relative_path", 7),
    "chunks is none": lambda m: setattr(about(m, EMBEDDING), "chunks", None),
    "chunks is a number": lambda m: setattr(about(m, EMBEDDING), "chunks", 7),
    "no properties": lambda m: setattr(about(m, EMBEDDING), "properties", None),
    "no dtype": lambda m: setattr(about(m, EMBEDDING).properties, "dtype", None),
    "storage_data is none": lambda m: setattr(m, "storage_data", None),
    "storage_data is a list": lambda m: setattr(m, "storage_data", [1, 2]),
    "state_dict_metadata is none": lambda m: setattr(m, "state_dict_metadata", None),
    "state_dict_metadata is a list": lambda m: setattr(m, "state_dict_metadata", ["x"]),
    "state_dict_metadata is empty": lambda m: setattr(m, "state_dict_metadata", {}),
    "planner_data is a number": lambda m: setattr(m, "planner_data", 7),
    "planner_data of numbers": lambda m: setattr(m, "planner_data", dict.fromkeys(m.planner_data, 7)),
    "planner_data of empty paths": lambda m: setattr(m, "planner_data", dict.fromkeys(m.planner_data, ())),
    "planner_data of one path": lambda m: setattr(m, "planner_data", dict.fromkeys(m.planner_data, ("model", "x"))),
    "planner_data for other names": lambda m: setattr(m, "planner_data", {"x": ("model", "x")}),
    "a key that is a number": lambda m: m.state_dict_metadata.update({7: about(m, EMBEDDING)}),
    "a tensor that is a number": lambda m: m.state_dict_metadata.update({"model.x": 7}),
    "transforms is a number": lambda m: setattr(places(m, EMBEDDING)[0][1], "transform_descriptors", 7),
}  # fmt: skip


@pytest.mark.parametrize("what", ABSURD)
def test_absurd_metadata_is_refused(folder, merge, what):
    """At once, with a sentence, and without the memory that it claims."""
    edit(folder, ABSURD[what])
    began = time.monotonic()
    ran = merge(folder)
    assert ran.code in (3, 4, 5), ran
    assert len(ran.err) < 1000
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/hostname", "a/../../secret", "sub/__0_0.distcp", "", ".", "..", ".metadata", "__0_0.distcp\0",
     "~/secret", "-", "a\nb", "__0_0.distcp/", "x" * 5000],
    ids=lambda name: repr(name)[:20],
)  # fmt: skip
def test_a_path_that_leads_elsewhere_is_refused(folder, merge, name):
    """Even if what lies there would fit."""
    (folder / "sub").mkdir()
    for place in (folder.parent / "secret", folder / "sub/__0_0.distcp", folder / "a"):
        place.write_bytes((folder / "__0_0.distcp").read_bytes())
    edit(folder, lambda metadata: setattr(places(metadata, NORM)[0][1], "relative_path", name))
    refused(merge(folder), 3, folder)


class Runs:
    """Unpickled by pickle, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("command", ["fsdp2hf", "inspect", "digest", "plan"])
@pytest.mark.parametrize("where", ["whole", "storage_meta", "planner_data", "dtype", "key", "chunk", "per rank"])
def test_a_hostile_metadata_executes_nothing(folder, convert, model, tmp_path, where, command):
    bomb = Runs(f"touch {tmp_path / 'executed'}")
    path = folder / ".metadata"
    if where in ("whole", "per rank"):
        path.write_bytes(pickle.dumps(bomb))
    else:
        metadata = pickle.loads(path.read_bytes())
        if where == "storage_meta":
            metadata.storage_meta = bomb
        elif where == "planner_data":
            metadata.planner_data[EMBEDDING] = bomb
        elif where == "dtype":
            about(metadata, EMBEDDING).properties.dtype = bomb
        elif where == "key":
            metadata.state_dict_metadata["x"] = bomb
        else:
            about(metadata, EMBEDDING).chunks[0] = bomb
        path.write_bytes(pickle.dumps(metadata))
    if where == "per rank":
        path.rename(folder / "__0.metadata")
    options = {"fsdp2hf": (tmp_path / "out", "-q"), "plan": ("--to", "huggingface")}.get(command, ())
    ran = convert(command, folder, *options, "--config", model("llama"))
    assert not (tmp_path / "executed").exists()
    allowed = {"storage_meta": {0}, "key": {0, 3}, "dtype": {3, 4}}.get(where, {3})
    assert ran.code in allowed, ran


def test_a_hostile_item_executes_nothing(model, merge, tmp_path):
    """Nor does the pickle in an item, whatever it says the tensor is."""
    import torch

    folder = save(tmp_path / "c", {"model": weights(model("llama"))})
    items = []
    edit(folder, lambda metadata: items.extend(places(metadata, NORM)))
    torch.save(Runs(f"touch {tmp_path / 'executed'}"), folder / "bomb")

    def point(metadata):
        info = places(metadata, NORM)[0][1]
        info.relative_path, info.offset, info.length = "bomb", 0, (folder / "bomb").stat().st_size

    edit(folder, point)
    ran = merge(folder)
    assert not (tmp_path / "executed").exists()
    refused(ran, 4, "bomb", NORM, "no plain tensor")


def test_a_file_that_is_cut_within_an_object_is_refused(convert, model, tmp_path):
    """`_extra_state` of Transformer Engine is no tensor, and the last in its file. torch refuses to load it then."""
    run = tmp_path / "run"
    assert convert("hf2megatron", model("llama"), run, "--format", "torch_dist", "--norm", "te", "-q").code == 0
    file = run / "release" / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 16)
    for argv in (["megatron2hf", run, tmp_path / "out"], ["verify", run]):
        refused(convert(*argv), 3, f"{file} is cut off")


def test_an_optimizer_in_a_folder_of_its_own_is_whole_or_not_verified(convert, model, tmp_path):
    """As the Trainer of transformers and accelerate save it."""
    source, saved = training(model("llama", num_hidden_layers=1))
    save(tmp_path / "checkpoint-3/pytorch_model_fsdp_0", {"model": saved["model"]})
    save(tmp_path / "checkpoint-3/optimizer_0", {"optimizer": saved["optim"]})
    ran = convert("verify", tmp_path / "checkpoint-3", "--config", source)
    counted = "only the pieces of the optimizer were counted; a conversion with it sees more"
    assert (ran.code, f"was not looked at: {counted}" in ran.err) == (0, True), ran.err
    file = tmp_path / "checkpoint-3/optimizer_0/__0_0.distcp"
    file.unlink()
    ran = convert("verify", tmp_path / "checkpoint-3", "--config", source)
    refused(ran, 3, f"{file.parent} lacks 1 of 1 files", file.name)
