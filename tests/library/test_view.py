"""Views: a tensor of any layout is, byte for byte, what a conversion writes. Judges: safetensors, torch."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import vitruvian
import vitruvian.torch
from converters.move.scratch import Scratch
from formats.registry import open_checkpoint
from tests.forked import in_a_fork
from tests.golden.cases import TOPOLOGIES
from tests.optimizers import add_optimizer
from vitruvian import VitruvianError


def held_by_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, as the official reader has it, in the order of the files."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    return tensors


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def shard(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file of Megatron, by chunk and name."""
    stored = torch.load(path, weights_only=False)
    chunks = {key: value for key, value in stored.items() if key.startswith("model")}
    tensors: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors[prefix] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)

    for chunk, value in chunks.items():
        walk("" if chunk == "model" else chunk, value)
    return tensors


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run of Megatron at TP 4, PP 2."""
    out = tmp_path_factory.mktemp("run") / "run"
    vitruvian.convert(model("llama", "bfloat16"), out, to="megatron", tp=4, pp=2)
    return out


def test_tensors_of_a_run_are_those_of_its_conversion(run, model, tmp_path):
    vitruvian.convert(run, tmp_path / "hf", shard_size=100_000)
    written = held_by_safetensors(tmp_path / "hf")
    checkpoint = vitruvian.open(run)
    assert (checkpoint.format, checkpoint.family, checkpoint.topology) == (
        "megatron",
        "llama",
        {"tp": 4, "pp": 2},
    )
    names = []
    with checkpoint.as_("huggingface", shard_size=100_000) as view:
        for name, tensor in view.read(ahead=2):
            names.append(name)
            assert tensor.dtype.name == "bfloat16"
            assert np.array_equal(tensor.view(np.uint8).reshape(-1), bits(written[name]))
            assert tensor.shape == tuple(written[name].shape)
    assert names == list(written)
    assert [name for name, _ in checkpoint.tensors()] == list(held_by_safetensors(model("llama", "bfloat16")))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_rank_of_megatron_is_its_file(model, tmp_path, topology):
    """Every topology in which megatron-core is given our files, each with one of its models."""
    flags = TOPOLOGIES[topology].flags
    layout: dict[str, Any] = {
        flag[2:].replace("-", "_"): int(value) if value.isdecimal() else value
        for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }
    case = TOPOLOGIES[topology].cases[0]
    source = model(case.model, case.dtype)
    vitruvian.convert(source, tmp_path / "run", to="megatron", verify=False, **layout)
    checkpoint = vitruvian.open(source)
    folders = [path.parent for path in (tmp_path / "run").rglob("model_optim_rng.pt")]
    assert len(folders) == TOPOLOGIES[topology].ranks
    for folder in folders:
        axes = ["tp", *(axis for axis in ("pp", "ep") if layout.get(axis, 1) > 1)]
        numbers = map(int, folder.name.removeprefix("mp_rank_").split("_"))
        rank = {axis: (number, layout[axis]) for axis, number in zip(axes, numbers, strict=True)}
        view = checkpoint.as_("megatron", **{**layout, **rank})
        assert {tensor.file for tensor in view.values()} <= {f"release/{folder.name}/model_optim_rng.pt"}
        expected = shard(folder / "model_optim_rng.pt")
        assert view.keys() == expected.keys()
        for key, tensor in view.items():
            assert np.array_equal(tensor.words().reshape(-1).view(np.uint8), bits(expected[key])), key
            assert torch.equal(tensor.torch(), expected[key])


@pytest.mark.parametrize("container", ["torch_dist", "fsdp_dtensor"])
def test_a_rank_of_megatron_from_its_other_formats(model, run, tmp_path, container):
    """Their files say nothing of ranks: what a rank has in memory is asked for as of any source."""
    vitruvian.convert(run, tmp_path / "run", to="megatron", format=container)
    ranks: dict[str, Any] = {"tp": (1, 2), "pp": (1, 2)}
    view = vitruvian.open(tmp_path / "run").as_("megatron", **ranks)
    expected = vitruvian.open(model("llama", "bfloat16")).as_("megatron", **ranks)
    assert {name: tensor.words().tobytes() for name, tensor in view.items()} == {
        name: tensor.words().tobytes() for name, tensor in expected.items()
    }


@pytest.mark.parametrize("kind", ["plain", "distributed"])
def test_states_of_an_optimizer_are_those_of_a_reshard(model, tmp_path, kind):
    source = tmp_path / "run"
    vitruvian.convert(model("llama", "bfloat16"), source, to="megatron", tp=2, iteration=3)
    add_optimizer(source, kind)
    vitruvian.convert(source, tmp_path / "out", to="megatron", tp=4, with_optimizer=True, optimizer="plain")
    checkpoint = vitruvian.open(source)
    for rank in range(4):
        view = checkpoint.as_("megatron", tp=(rank, 4), with_optimizer=True, optimizer="plain")
        (file,) = {tensor.file for tensor in view.values()}
        stored = torch.load(tmp_path / "out" / file, weights_only=False)["optimizer"]
        states = stored["optimizer"]["state"]
        for state in ("exp_avg", "exp_avg_sq"):
            moments = [tensor for key, tensor in view.items() if key.startswith(f"{state}.")]
            assert len(moments) == len(states)
            assert {tuple(tensor.shape) for tensor in moments} == {tuple(of[state].shape) for of in states.values()}
            ours = sorted(tensor.words().tobytes() for tensor in moments)
            assert ours == sorted(bits(of[state]).tobytes() for of in states.values())


def test_a_box_is_a_slice(run):
    with vitruvian.open(run)["huggingface"] as view:
        for name in (
            "model.embed_tokens.weight",
            "model.layers.1.self_attn.k_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
        ):
            full = view[name].words()
            rows = full.shape[0]
            for box in (
                (slice(3, 9),),
                (slice(None), slice(5, 17)),
                (slice(rows - 1, None), slice(0, 1)),
                (slice(2, 2),),
            ):
                assert np.array_equal(view[name].words(*box), full[box])
            assert np.array_equal(view[name][1:4].view(np.uint16), full[1:4])
            for index in (3, -1, (..., 2), (np.int64(1), slice(2, 4)), (slice(-4, None), -1), (..., slice(3), 0)):
                key = index if isinstance(index, tuple) else (index,)
                assert np.array_equal(view[name].words(*key), full[index])
            assert (len(view[name]), view[name].ndim) == (rows, 2)
            assert np.array_equal(np.asarray(view[name]).view(np.uint16), full)
        for index, message in (
            (slice(0, 4, 2), "no step"),
            ((0, 0, 0), "2 axes"),
            (rows, "none is"),
            ("a", "not by 'a'"),
            (True, "not by True"),
            (None, "not by None"),
        ):
            with pytest.raises(IndexError, match=message):
                view[name][index]


def test_rows_of_a_shard_with_padding(model):
    """203 tokens, padded to 256: a slice over the last token and the padding."""
    view = vitruvian.open(model("llama", "bfloat16", vocab_size=203)).as_(
        "megatron", tp=(1, 2), make_vocab_size_divisible_by=64
    )
    embedding = view["embedding.word_embeddings.weight"]
    rows = embedding.words()
    assert rows.shape[0] == 128
    assert rows[74].any()
    assert not rows[75:].any()
    assert np.array_equal(embedding.words(slice(70, 90)), rows[70:90])


def test_fsdp_names_are_those_in_memory(model):
    from transformers import AutoModelForCausalLM

    source = model("mixtral", "bfloat16")
    names = AutoModelForCausalLM.from_pretrained(source).state_dict().keys()
    assert vitruvian.open(source)["fsdp"].keys() == set(names)


def test_what_cannot_be_asked(model, run):
    checkpoint, experts = vitruvian.open(run), vitruvian.open(model("mixtral", "bfloat16"))
    for message, ask in (
        ("names no rank", lambda: checkpoint.as_("megatron", tp=(0, 2), pp=2)),
        ("several files hold tensors of one name", lambda: checkpoint.as_("megatron", tp=2)),
        ("is not a size, or a rank", lambda: checkpoint.as_("megatron", tp=(2, 2))),
        ("no file of such an output", lambda: experts.as_("megatron", tp=(0, 2), ep=(1, 2), etp=1)),
        ("tp = 0 is not", lambda: checkpoint.as_("megatron", tp=0)),
        ("memory = '1G' is not", lambda: list(checkpoint.tensors(memory="1G"))),
        ("replicas = 'nope' is not", lambda: list(checkpoint.tensors(replicas="nope"))),
        ("allow_missing = 'x' is not", lambda: vitruvian.open(run, allow_missing="x")),
        ("path = 3 is no path", lambda: vitruvian.open(3)),
        ("there is no target", lambda: checkpoint.as_(["x"])),
        ("has no effect on the target huggingface", lambda: checkpoint.as_("huggingface", vpp=2)),
        ("has no view of such ranks", lambda: checkpoint.as_("neox", tp=(0, 2))),
        ("has no view of such ranks", lambda: checkpoint.as_("huggingface", tp=(0, 2))),
        ("has no view of such ranks", lambda: checkpoint.as_("megatron", tp=(0, 2), format="fsdp_dtensor")),
        ("in pieces, under one name", lambda: checkpoint.as_("megatron", tp=(0, 2), format="torch_dist")),
        ("a file of each layer", lambda: checkpoint.as_("neox", layout="pipeline")),
        ("there is no option color", lambda: checkpoint.as_("huggingface", color=2)),
        ("there is no target gguf", lambda: checkpoint["gguf"]),
        ("has no view", lambda: checkpoint.as_("deepspeed")),
        ("there is no option color", lambda: vitruvian.open(run, color=2)),
        ("there is no setting 'color'", lambda: vitruvian.open(run, set={"color": 2})),
        ("--container has no effect", lambda: vitruvian.open(run, container="model")),
        ("does not exist", lambda: vitruvian.open(run / "nothing")),
    ):
        with pytest.raises(VitruvianError, match=message):
            ask()


def test_a_source_that_changes_is_refused(model, tmp_path):
    """Written anew between opening and reading, between views, and while it is read."""
    source = tmp_path / "hf"
    shutil.copytree(model("llama", "bfloat16"), source)
    checkpoint = vitruvian.open(source)
    view = checkpoint["huggingface"]
    reading = view.read()
    next(reading)
    file = source / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content)
    with pytest.raises(vitruvian.SourceError, match="have changed since it was opened"):
        list(reading)
    with pytest.raises(vitruvian.SourceError, match="have changed") as error:
        _ = checkpoint["huggingface"]
    assert error.value.hint == "open it again"
    assert len(list(vitruvian.open(source).tensors())) == len(view)


def test_a_source_that_changes_and_keeps_its_size_and_time_is_refused(model, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(model("llama", "bfloat16"), source)
    checkpoint, file = vitruvian.open(source), source / "model.safetensors"
    about = file.stat()
    with file.open("r+b") as handle:
        handle.seek(-2, os.SEEK_END)
        handle.write(b"\1\1")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(vitruvian.SourceError, match="have changed since it was opened"):
        checkpoint.unchanged()


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_source_that_changes_between_two_tensors_is_refused(model, convert, tmp_path, how):
    """A trainer saves into the folder again: files that were open keep the old save, others have the new one."""
    source, other = tmp_path / "hf", tmp_path / "other"
    assert convert("hf2hf", model("llama", "float32"), source, "--shard-size", "50kB").code == 0
    (source / "vitruvian.json").unlink()
    shutil.copytree(source, other)
    view = vitruvian.open(source)["huggingface"]
    file_of = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    (first, _), *_, (last, file) = ((view[name], file) for name, file in file_of.items())
    first.numpy()
    if how == "in place":
        (source / file).write_bytes((other / file).read_bytes())
    else:
        (other / file).replace(source / file)
    for read in (last.numpy, lambda: last[:1], last.torch):
        with pytest.raises(vitruvian.SourceError, match=r"1 files of .+ have changed since it was opened"):
            read()
    first.numpy()


@pytest.mark.parametrize("command", ["hf2megatron", "hf2fsdp"])
def test_a_file_of_another_conversion_is_refused(model, convert, tmp_path, command):
    """Of the same shapes, with sound checksums: vitruvian.json alone tells."""
    moved, options = tmp_path / "hf", ("--tp", 2) if command == "hf2megatron" else ("--ranks", 2)
    shutil.copytree(model("llama", "float32"), moved)
    tensors = {name: 2 * tensor for name, tensor in load_file(moved / "model.safetensors").items()}
    save_file(tensors, moved / "model.safetensors", {"format": "pt"})
    for source, out in ((model("llama", "float32"), tmp_path / "one"), (moved, tmp_path / "two")):
        assert convert(command, source, out, *options).code == 0
    file = next(iter(sorted(path for path in (tmp_path / "two").rglob("*") if path.suffix in (".pt", ".distcp"))))
    shutil.copy(file, tmp_path / "one" / file.relative_to(tmp_path / "two"))
    checkpoint = vitruvian.open(tmp_path / "one")
    reading = [
        lambda: [*checkpoint.tensors()],
        lambda: [*checkpoint["fsdp"].read()],
        lambda: [*vitruvian.torch.iterate(checkpoint)],
        lambda: vitruvian.torch.load(LlamaForCausalLM.from_pretrained(moved), checkpoint),
        lambda: [tensor.numpy() for tensor in checkpoint["huggingface"].values()],
    ]
    for read in reading:
        with pytest.raises(vitruvian.VerificationError, match=r"differs from the vitruvian\.json of its checkpoint"):
            read()


def test_a_name_that_is_not_there_is_answered_with_one_that_is(model):
    view = vitruvian.open(model("llama", "bfloat16"))["huggingface"]
    with pytest.raises(KeyError, match=r"mlp\.up\.weight is none of 39 tensors with names like lm_head\.weight"):
        _ = view["model.layers.2.mlp.up.weight"]
    assert "lm_head" not in view
    assert view.get("lm_head") is None


def test_a_checkpoint_goes_to_other_processes_and_a_view_does_not(run):
    checkpoint = vitruvian.open(run)
    unpickled = pickle.loads(pickle.dumps(checkpoint))
    name = "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(unpickled["huggingface"][name].words(), checkpoint["huggingface"][name].words())
    for view in (checkpoint["huggingface"], checkpoint["huggingface"][name]):
        with pytest.raises(TypeError, match="pickle its checkpoint"):
            pickle.dumps(view)


def test_a_view_is_read_by_several_threads(run):
    with vitruvian.open(run)["huggingface"] as view, ThreadPoolExecutor(8) as pool:
        names = [*view] * 4
        read = list(pool.map(lambda name: view[name].words().tobytes(), names))
        assert read == [view[name].words().tobytes() for name in names]


def test_a_closed_view_reads_nothing(model, tmp_path):
    with vitruvian.open(model("llama", "bfloat16"))["huggingface"] as view:
        tensor = view["lm_head.weight"]
        assert tensor[:1].shape == (1, 64)
    with (tmp_path / "other").open("wb"), pytest.raises(vitruvian.UsageError, match="the view is closed"):
        tensor.numpy()


def test_the_current_folder_may_change(model, tmp_path, monkeypatch):
    shutil.copytree(model("llama", "bfloat16"), tmp_path / "one" / "m")
    shutil.copytree(model("llama", "float32"), tmp_path / "two" / "m")
    monkeypatch.chdir(tmp_path / "one")
    checkpoint = vitruvian.open("m")
    monkeypatch.chdir(tmp_path / "two")
    assert {tensor.dtype.name for _, tensor in checkpoint.tensors()} == {"bfloat16"}


def test_bits_without_the_types_of_ml_dtypes(model, monkeypatch):
    tensor = vitruvian.open(model("llama", "bfloat16"))["huggingface"]["lm_head.weight"]
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(vitruvian.UnsupportedError, match="numpy has no BF16") as error:
        tensor.numpy()
    assert "vitruvian[bf16]" in error.value.hint
    assert tensor.words().dtype == np.uint16


def test_damage_is_found_when_it_is_read(model, tmp_path):
    run = tmp_path / "run"
    vitruvian.convert(model("llama", "bfloat16"), run, to="megatron", tp=2)
    path = next(run.rglob("mp_rank_01/model_optim_rng.pt"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(vitruvian.DamagedError, match="mp_rank_01"):
        for _ in vitruvian.open(run).tensors():
            pass


@pytest.mark.parametrize("read", [lambda view: view["lm_head.weight"].words(), lambda view: [*view.read()]])
def test_damage_is_found_each_time_that_it_is_read(model, tmp_path, read):
    """One flipped bit in a file of torch.save, which no manifest describes."""
    folder = shutil.copytree(model("llama", "bfloat16"), tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "vitruvian.json").unlink(missing_ok=True)
    path = folder / "pytorch_model.bin"
    place = next(
        fragment.fragment for fragment in open_checkpoint(folder).fragments() if fragment.key == "lm_head.weight"
    )
    content = bytearray(path.read_bytes())
    content[place.offset + place.nbytes // 2] ^= 0x40
    path.write_bytes(content)
    view = vitruvian.open(folder)["huggingface"]
    for _ in range(3):
        with pytest.raises(vitruvian.DamagedError, match=r"pytorch_model\.bin is damaged"):
            read(view)


def test_a_fork_has_none_of_the_threads_that_read(model):
    """Tensors that its parent has begun to read are refused there; a view is read, and closed."""
    checkpoint = vitruvian.open(model("llama", "bfloat16"))
    began, closed, view = (checkpoint.tensors(), checkpoint.tensors(), checkpoint["huggingface"])
    for tensors in (began, closed):
        next(tensors)

    def read() -> int:
        with pytest.raises(vitruvian.UsageError, match=r"threads of process \d+ read these tensors"):
            next(began)
        closed.close()
        return len(view["model.norm.weight"].numpy()) + len([*checkpoint.tensors()])

    count = len([*checkpoint.tensors()])
    assert in_a_fork(read) == len(view["model.norm.weight"]) + count
    assert len([*began]) == count - 1


def test_a_fork_leaves_the_chunks_that_its_parent_has_decoded(tmp_path):
    """A view that a forked process drops or closes at its end."""
    scratch = Scratch(tmp_path)
    decoded = scratch.folder / "chunk"
    decoded.touch()
    assert in_a_fork(lambda: scratch.close() or 0) == 0
    assert decoded.exists()
    scratch.close()
    assert not decoded.exists()


def test_a_view_keeps_memory_small(tmp_path, monkeypatch):
    """Tensors of up to 128 MB: by rows the process grows by less than 64 MB at most, one by one by a tensor more."""
    import subprocess

    from tests.bench import make_model

    monkeypatch.setitem(make_model.SHAPES, "wide", (1, 4096, 64, 32, 8, 16384))
    folder, size = make_model.make("wide", tmp_path / "hf", sparse=True), 16384 * 4096 * 2
    code = (
        "import re, sys, vitruvian\n"
        "from pathlib import Path\n"  # not ru_maxrss, which begins with what the parent had
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) << 10\n"
        "checkpoint = vitruvian.open(sys.argv[1])\n"
        "view, before = checkpoint['huggingface'], peak()\n"
        "for row in range(0, 1 << 14, 1024):\n"
        "    assert view['model.embed_tokens.weight'][row:row + 8].shape == (8, 4096)\n"
        "print(peak() - before)\n"
        "for name, tensor in checkpoint.tensors():\n"
        "    del tensor\n"
        "print(peak() - before)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    by_rows, by_tensors = map(int, ran.stdout.split()[:2])
    assert by_rows < 64 << 20
    assert size / 2 < by_tensors < size + (64 << 20)
