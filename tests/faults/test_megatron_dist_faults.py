"""torch_dist folders that are incomplete, damaged, or of another program: refused with a sentence, or read right."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import edit, places, refused, save
from tests.faults.test_interrupted import HERE
from tests.models import files

QKV = "decoder.layers.self_attention.linear_qkv.weight"
FC2 = "decoder.layers.mlp.linear_fc2.weight"
HEAD = "output_layer.weight"
ADAPTER = "decoder.layers.mlp.linear_fc2.adapter.linear_in.weight"


@pytest.fixture
def run(model, convert, tmp_path) -> Path:
    """A run folder whose checkpoint is cut for four ranks."""
    options = ["--format", "torch_dist", "--tp", 2, "--pp", 2]
    assert convert("hf2megatron", model("llama-tied"), tmp_path / "run", *options).code == 0
    (tmp_path / "run/release/vitruvian.json").unlink()
    return tmp_path / "run"


def resaved(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Read the checkpoint with torch, change its tensors, and write it with torch: all layers in one piece."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder = run / "release"
    about = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in about.items()
        if hasattr(entry, "size")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    change(state)
    no_data(folder)
    save(folder, state)


@pytest.mark.parametrize("path", ["run", "run/release"])
def test_stacks_in_one_piece_are_read(run, model, convert, tmp_path, path):
    resaved(run, lambda state: None)
    assert convert("megatron2hf", tmp_path / path, tmp_path / "out").code == 0
    assert files(tmp_path / "out") == files(model("llama-tied"))


def test_a_head_that_is_tied_may_be_there_and_is_compared(run, model, convert, tmp_path):
    resaved(run, lambda state: state.update({HEAD: state["embedding.word_embeddings.weight"].clone()}))
    assert convert("megatron2hf", run, tmp_path / "out").code == 0
    assert files(tmp_path / "out") == files(model("llama-tied"))
    resaved(run, lambda state: state[HEAD].mul_(2))
    refused(
        convert("megatron2hf", run, tmp_path / "other"), 6, "should share embedding.word_embeddings.weight and differs"
    )


def drop_layer(state: dict[str, Any]) -> None:
    state[FC2] = state[FC2][:3].clone()


def add_layer(state: dict[str, Any]) -> None:
    import torch

    state[FC2] = torch.cat([state[FC2], state[FC2][:1]])


def both(state: dict[str, Any]) -> None:
    state["decoder.layers.2.mlp.linear_fc2.weight"] = state[FC2][2].clone()


def flat(state: dict[str, Any]) -> None:
    state[FC2] = state[FC2].sum()


def turned(state: dict[str, Any]) -> None:
    state[FC2] = state[FC2].transpose(1, 2).contiguous()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (drop_layer, ["decoder.layers.3.mlp.linear_fc2.weight", "1 tensor is missing"]),
        (add_layer, ["decoder.layers.4.mlp.linear_fc2.weight", "1 tensor has no place in this model"]),
        (both, ["decoder.layers.2.mlp.linear_fc2.weight twice"]),
        (flat, [FC2, "is no stack of layers"]),
        (turned, ["has shape [96, 64]", "[64, 96]"]),
        (lambda state: state.pop(QKV), ["4 tensors are missing", "linear_qkv.weight"]),
        (lambda state: state.pop("embedding.word_embeddings.weight"), ["holds no embedding.word_embeddings.weight"]),
        (lambda state: state.update({"decoder.other": state[QKV]}), ["decoder.other", "1 tensor has no place"]),
        (lambda state: state.update({ADAPTER: state[FC2]}), ["linear_fc2.adapter.linear_in.weight", "have no place"]),
    ],
)
def test_tensors_of_no_model_are_refused(run, convert, tmp_path, change, parts):
    """Among them an adapter beside its base: Megatron-Bridge#1272 found no name for either, and left both out."""
    resaved(run, change)
    refused(convert("megatron2hf", run, tmp_path / "out"), 3, *parts)


def no_data(folder: Path) -> None:
    for path in (*folder.glob("*.distcp"), folder / ".metadata"):
        path.unlink()


def cut_off(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-2000])


def backend(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


def newer(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 2}))


def nameless(folder: Path) -> None:
    import torch

    torch.save({"iteration": 3, "checkpoint_version": 3.0}, folder / "common.pt")


def no_map(folder: Path) -> None:
    import torch

    torch.save([], folder / "common.pt")


def hole(folder: Path) -> None:
    def change(metadata: Any) -> None:
        index, _ = places(metadata, FC2)[3]
        chunks = metadata.state_dict_metadata[FC2].chunks
        chunks.remove(next(chunk for chunk in chunks if chunk.offsets == index.offset))
        del metadata.storage_data[index]

    edit(folder, change)


@pytest.mark.parametrize(
    ("change", "code", "parts"),
    [
        (lambda folder: (folder / "__2_0.distcp").unlink(), 3, ["lacks 1 of 4 files", "__2_0.distcp"]),
        (cut_off, 3, ["__1_0.distcp is cut off"]),
        (hole, 3, [FC2, "are missing"]),
        (lambda folder: (folder / ".metadata").unlink(), 3, ["ranks 0-3 but no .metadata: the save never finished"]),
        (no_data, 3, ["holds no data and no .metadata"]),
        (lambda folder: (folder / "metadata.json").unlink(), 3, ["no metadata.json, which megatron-core writes last"]),
        (lambda folder: (folder / "common.pt").unlink(), 3, ["common.pt"]),
        (nameless, 3, ["common.pt holds no args"]),
        (no_map, 3, ["common.pt holds no map"]),
        (backend, 4, ["metadata.json: sharded_backend = 'zarr' is not supported, only 'torch_dist'"]),
        (newer, 4, ["metadata.json: sharded_backend_version = 2 is not supported, only 1"]),
    ],
)
def test_damage_is_refused(run, convert, tmp_path, change, code, parts):
    change(run / "release")
    refused(convert("megatron2hf", run, tmp_path / "out"), code, *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["run", "run/release"])
def test_without_its_small_files_it_is_still_megatrons(run, convert, tmp_path, path):
    for name in ("common.pt", "metadata.json"):
        (run / "release" / name).unlink()
    refused(
        convert("megatron2hf", tmp_path / path, tmp_path / "out"), 3, "no metadata.json", "not all of it was copied"
    )


def test_the_metadata_of_older_megatron_core_is_read(run, convert, monkeypatch):
    """Up to 0.15 it is of a class of its own, with a field more."""
    import torch.distributed.checkpoint.metadata as torch_metadata

    class MCoreMetadata(torch_metadata.Metadata):
        """Stands for that class."""

    path, digest = run / "release/.metadata", convert("digest", run).out.split()[0]
    metadata = pickle.loads(path.read_bytes())
    older = MCoreMetadata(**vars(metadata))
    older.mcore_data = {QKV: {"nd_reformulated_orig_global_shape": (4, 128, 64)}}
    MCoreMetadata.__module__, MCoreMetadata.__qualname__ = torch_metadata.__name__, "MCoreMetadata"
    monkeypatch.setattr(torch_metadata, "MCoreMetadata", MCoreMetadata, raising=False)
    path.write_bytes(pickle.dumps(older))
    assert b"MCoreMetadata" in path.read_bytes()
    assert convert("digest", run).out.split()[0] == digest


def test_an_iteration_of_each_format_is_found_by_itself(run, model, convert, tmp_path):
    """The tracker decides, or the folder that is named."""
    assert convert("hf2megatron", model("llama-tied", "bfloat16"), tmp_path / "classic", "--iteration", 5).code == 0
    shutil.move(tmp_path / "classic/iter_0000005", run)
    assert "megatron_dist, ranks 4, release" in convert("inspect", run).out
    assert "megatron, tp 1, pp 1, iter_0000005" in convert("inspect", run / "iter_0000005").out
    (run / "latest_checkpointed_iteration.txt").write_text("5\n")
    assert "megatron, tp 1, pp 1, iter_0000005" in convert("inspect", run).out
    assert "megatron_dist, ranks 4, release" in convert("inspect", run / "release").out


@pytest.mark.parametrize("part", range(2))
def test_killed_it_goes_on_to_the_same_bytes(killed, model, convert, tmp_path, part):
    source, out = model("llama-tied"), tmp_path / "out"
    options = ["--format", "torch_dist", "--tp", 2, "--pp", 2]
    assert convert("hf2megatron", source, tmp_path / "whole", *options).code == 0
    limit = -random.Random(part).randint(1 + 40 * part, 40 + 40 * part)
    ran = killed(limit, source, out, 2, 2, "torch_dist", script=HERE / "killed_at.py")
    assert ran.returncode == -signal.SIGKILL, ran.out
    assert not out.exists()
    assert convert("hf2megatron", source, out, *options).code == 0
    assert files(out) == files(tmp_path / "whole")
