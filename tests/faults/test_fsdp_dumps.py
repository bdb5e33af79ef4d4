"""Dumps and safetensors shards of single ranks, of which some are missing, doubled or altered."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import refused, weights
from tests.models import files

RANKS = 4
VERL, ACCELERATE = "model_world_size_4_rank_{}.pt", "pytorch_model_fsdp_0_rank{}.bin"
SHARD = "shard-{:05d}-model-00001-of-00001.safetensors"


@contextmanager
def rank_of_none(rank: int) -> Iterator[None]:
    """A process group of four ranks, of which three do not exist: enough to make DTensors."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def all_dumps(model, tmp_path_factory) -> Path:
    """The dump of each of four ranks: DTensors cut along their first dimension."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    folder, state = tmp_path_factory.mktemp("dumps"), weights(model("llama"))
    for rank in range(RANKS):
        with rank_of_none(rank):
            mesh = init_device_mesh("cpu", (RANKS,))
            dump = {}
            for key, tensor in state.items():
                parts = [*tensor.chunk(RANKS), *[tensor[:0]] * RANKS]
                dump[key] = DTensor.from_local(
                    parts[rank].clone(), mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
            torch.save(dump, folder / str(rank))
    return folder


@pytest.fixture(params=[VERL, ACCELERATE], ids=["verl", "accelerate"])
def dumps(request, all_dumps, tmp_path) -> tuple[Path, str]:
    """A folder with the dumps, and how they are named."""
    (tmp_path / "c").mkdir()
    for rank in range(RANKS):
        shutil.copy(all_dumps / str(rank), tmp_path / "c" / request.param.format(rank))
    return tmp_path / "c", request.param


def test_all_of_them_are_the_model(dumps, merge, model, tmp_path):
    assert merge(dumps[0]).code == 0
    assert files(tmp_path / "out") == files(model("llama"))


@pytest.mark.parametrize("lost", [{0}, {1}, {3}, {1, 2}, {2, 3}, {1, 2, 3}])
def test_missing_ranks_are_named(dumps, merge, lost):
    folder, name = dumps
    for rank in lost:
        (folder / name.format(rank)).unlink()
    ran = merge(folder)
    refused(ran, 3, folder)
    if name == VERL or max(lost) < 3:
        assert f"rank {', '.join(map(str, sorted(lost)))}" in ran.err, "the name says how many there are"
    else:
        assert "missing" in ran.err


def swap(first: Path, second: Path) -> None:
    """Give two files each other's names."""
    other = first.with_suffix(".other")
    first.rename(other)
    second.rename(first)
    other.rename(second)


@pytest.mark.parametrize("dim", [0, 1])
def test_an_adapter_that_is_cut_into_columns_is_not_merged(model, convert, tmp_path, dim):
    """It is added to rows that lie one after another in a file; alone it comes out of any cut."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    base, folder, place = model("llama", num_hidden_layers=1), tmp_path / "c", "model.layers.0.self_attn.q_proj"
    folder.mkdir()
    state = weights(base)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    state[f"{place}.base_layer.weight"] = state.pop(f"{place}.weight")
    state = {f"base_model.model.{key}": tensor for key, tensor in state.items()}
    state[f"base_model.model.{place}.lora_A.default.weight"] = torch.randn(4, 64)
    state[f"base_model.model.{place}.lora_B.default.weight"] = torch.randn(64, 4)
    for rank in range(RANKS):
        with rank_of_none(rank):
            mesh, dump = init_device_mesh("cpu", (RANKS,)), {}
            for key, tensor in state.items():
                cut = dim if "lora_" in key else 0
                part = [*tensor.chunk(RANKS, cut), *[tensor[:0]] * RANKS][rank].clone()
                shape = {"shape": tensor.shape, "stride": tensor.stride()}
                dump[key] = DTensor.from_local(part, mesh, [Shard(cut)], run_check=False, **shape)
            torch.save(dump, folder / VERL.format(rank))
    options = ("--config", base, "--adapter")
    assert convert("fsdp2hf", folder, tmp_path / "alone", *options, "only").code == 0
    ran = convert("fsdp2hf", folder, tmp_path / "out", *options, "merged")
    if dim:
        refused(ran, 4, "holds some columns of", "lora_A", "--adapter only first")
    else:
        assert ran.code == 0, ran.err


@pytest.mark.parametrize(("first", "second"), [(0, 1), (2, 3)])
def test_swapped_ranks_are_noticed(dumps, merge, first, second):
    """The mesh of their DTensors says which rank they are of, whatever the files were called."""
    folder, name = dumps
    swap(folder / name.format(first), folder / name.format(second))
    refused(merge(folder), 3, name.format(first), "was saved by another rank", f"rank {first} at [{first}]", "mixed up")


@pytest.mark.parametrize("how", [swap, shutil.copy], ids=["swapped", "copied over"])
def test_flat_pieces_of_another_rank_are_noticed(flat, merge, how):
    """Nothing in them says their rank but the name that torch.save left in the archive."""
    first, second = (flat / f"pytorch_model_fsdp_rank{rank}.bin" for rank in (0, 1))
    how(first, second)
    named = "pytorch_model_fsdp_rank0" if how is shutil.copy else "pytorch_model_fsdp_rank1"
    wrong = second if how is shutil.copy else first
    refused(merge(flat), 3, f"{wrong} was saved as '{named}': files are mixed up")


def test_a_rank_in_the_place_of_the_last_is_noticed(dumps, merge):
    folder, name = dumps
    shutil.copy(folder / name.format(0), folder / name.format(3))
    ran = merge(folder)
    assert ran.code in (3, 4)
    assert name.format(3) in ran.err


def test_dumps_of_two_worlds_are_noticed(all_dumps, merge, tmp_path):
    """A run that went on with another number of ranks wrote into the same folder."""
    (tmp_path / "c").mkdir()
    for rank in range(RANKS):
        shutil.copy(all_dumps / str(rank), tmp_path / "c" / VERL.format(rank))
    for rank in range(2):
        shutil.copy(all_dumps / str(rank), tmp_path / "c" / f"model_world_size_2_rank_{rank}.pt")
    refused(merge(tmp_path / "c"), 3, tmp_path / "c", "world_size_2")


@pytest.mark.parametrize("left", [0.0, 0.5, 0.9999])
def test_a_truncated_dump_is_noticed(dumps, merge, left):
    folder, name = dumps
    file = folder / name.format(2)
    os.truncate(file, int(left * file.stat().st_size))
    refused(merge(folder), 3, file)


def test_a_hostile_dump_executes_nothing(dumps, merge, tmp_path):
    import torch

    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    folder, name = dumps
    torch.save({"model.norm.weight": Runs()}, folder / name.format(1))
    ran = merge(folder)
    assert not (tmp_path / "executed").exists()
    assert ran.code in (3, 4), ran
    (folder / name.format(1)).write_bytes(pickle.dumps(Runs()))
    assert merge(folder).code in (3, 4)
    assert not (tmp_path / "executed").exists()


def test_ranks_that_hold_other_tensors_are_noticed(dumps, merge):
    """Rank 2 is of another model, with one tensor."""
    import torch

    folder, name = dumps
    torch.save({"model.norm.weight": torch.ones(65)}, folder / name.format(2))
    refused(merge(folder), 3, name.format(3), "missing")


# --- flat parameters -------------------------------------------------------------------------------------------------


@pytest.fixture
def flat(model, tmp_path) -> Path:
    """What FSDP1's LOCAL_STATE_DICT leaves with use_orig_params: the interval of each parameter that a rank holds."""
    import torch

    folder = tmp_path / "c"
    folder.mkdir()
    for rank in range(RANKS):
        dump: dict[str, Any] = {"_flat_param": torch.zeros(0)}
        for key, tensor in weights(model("llama")).items():
            step = -(-tensor.numel() // RANKS)
            dump[key] = tensor.flatten()[rank * step : (rank + 1) * step].clone()
        torch.save(dump, folder / f"pytorch_model_fsdp_rank{rank}.bin")
    return folder


def test_flat_pieces_are_the_model(flat, merge, model, tmp_path):
    ran = merge(flat)
    assert ran.code == 0, ran.err
    assert files(tmp_path / "out") == files(model("llama"))


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_missing_rank_of_flat_pieces_is_noticed(flat, merge, lost):
    (flat / f"pytorch_model_fsdp_rank{lost}.bin").unlink()
    refused(merge(flat), 3, flat, "missing" if lost == 3 else f"rank {lost}")


def test_a_flat_piece_with_gaps_is_refused(flat, merge):
    """What torch.save leaves of a view: its storage is twice as long."""
    import torch

    path = flat / f"pytorch_model_fsdp_rank{RANKS - 1}.bin"
    dump = torch.load(path)
    key = next(key for key, piece in dump.items() if piece.numel() > 1)
    dump[key] = dump[key].repeat_interleave(2)[::2]
    torch.save(dump, path)
    refused(merge(flat), 3, path, key, "in a flat piece with gaps: strides (2,)")


def test_flat_pieces_of_a_model_without_a_table_are_refused(flat, merge):
    assert merge(flat, "--verbatim").code in (0, 4)


# --- DCP's own safetensors -------------------------------------------------------------------------------------------


@pytest.fixture
def shards(model, tmp_path) -> Path:
    """One file for each of four ranks, as torch's HuggingFaceStorageWriter leaves them."""
    from safetensors.torch import save_file

    folder = tmp_path / "c"
    folder.mkdir()
    for rank in range(RANKS):
        shard, offsets = {}, {}
        for key, tensor in weights(model("llama")).items():
            step = -(-len(tensor) // RANKS)
            shard[key] = tensor[rank * step : (rank + 1) * step].clone()
            offsets[key] = {"saved_offsets": [rank * step, *[0] * (tensor.dim() - 1)]}
        write_shard(folder / SHARD.format(rank + 1), shard, offsets, save_file)
    return folder


def write_shard(path: Path, shard: dict[str, Any], offsets: dict[str, Any], save_file: Callable[..., None]) -> None:
    about = {"DCP_VERSION": "1.0", "format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    save_file(shard, path, metadata=about)


def test_all_shards_are_the_model(shards, merge, model, tmp_path):
    assert merge(shards).code == 0
    assert files(tmp_path / "out") == files(model("llama"))


@pytest.mark.parametrize("options", [(), ("--verbatim",)])
@pytest.mark.parametrize("lost", [{1}, {2}, {4}, {1, 2}, {3, 4}, {2, 3, 4}])
def test_missing_shards_are_noticed(shards, merge, lost, options):
    """torch fills the gap with zeros, or makes the tensors shorter; the other files do not say that one is gone."""
    for number in lost:
        (shards / SHARD.format(number)).unlink()
    refused(merge(shards, *options), 3, shards)


def test_a_shard_twice_is_noticed(shards, merge):
    shutil.copy(shards / SHARD.format(1), shards / SHARD.format(2))
    refused(merge(shards), 3, shards)


@pytest.mark.parametrize(
    "info",
    ["", "{", "[]", "{}", '{"model.norm.weight": 7}', '{"model.norm.weight": {"saved_offsets": [-1]}}',
     '{"model.norm.weight": {"saved_offsets": ["0"]}}', '{"model.norm.weight": {"saved_offsets": [0, 0]}}'],
)  # fmt: skip
def test_shards_that_do_not_say_what_they_hold_are_refused(shards, merge, model, info):
    from safetensors.torch import load_file, save_file

    path = shards / SHARD.format(2)
    save_file(load_file(path), path, metadata={"DCP_SHARDING_INFO": info})
    refused(merge(shards), 3, path)


@pytest.mark.parametrize("start", [17, 15, 2**40])
def test_shards_that_overlap_or_leave_holes_are_noticed(shards, merge, start):
    from safetensors.torch import load_file, save_file

    path = shards / SHARD.format(2)
    shard = load_file(path)
    offsets = {key: {"saved_offsets": [len(value) if value.dim() else 0, *[0] * (value.dim() - 1)]}
               for key, value in shard.items()}  # fmt: skip
    offsets["model.norm.weight"] = {"saved_offsets": [start]}
    write_shard(path, shard, offsets, save_file)
    refused(merge(shards), 3, "model.norm.weight")
