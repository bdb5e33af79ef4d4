"""The engine on tensors that are larger than its buffers: right values, few calls, bounded memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import vitruvian
from converters.move.engine import in_order
from formats.errors import VerificationError
from tests.models import MODELS

CASTS = [("bfloat16", "fp32"), ("float32", "bf16"), ("float16", "fp32"), ("float32", "keep"), ("bfloat16", "keep")]


@pytest.mark.parametrize(("dtype", "cast"), CASTS)
@pytest.mark.parametrize("topology", [("--tp", 2), ("--tp", 4, "--pp", 2)])
def test_large_tensors_move_in_large_pieces(model, convert, tmp_path, monkeypatch, dtype, cast, topology):
    """Each tile of a cast has to fit the buffers on both sides: one that does not is written element by element."""
    source = model("llama", dtype, vocab_size=20011, hidden_size=128, intermediate_size=512)
    calls = 0
    write = os.pwrite

    def counted(*args):
        nonlocal calls
        calls += 1
        return write(*args)

    monkeypatch.setattr(os, "pwrite", counted)
    out, back = tmp_path / "m", tmp_path / "h"
    assert convert("hf2megatron", source, out, *topology, "--dtype", cast, "--memory", "1MiB").code == 0
    assert convert("megatron2hf", out, back, "--memory", "700kB", "-j", 3).code == 0
    megabytes = sum(path.stat().st_size for path in back.rglob("*.safetensors")) / 1e6
    assert calls < 300 + 60 * megabytes
    before, after = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    for name, tensor in before.items():
        assert after[name].equal(tensor.to(after[name].dtype)), name


@pytest.mark.parametrize("name", [name for name in MODELS if "-" not in name])
@pytest.mark.parametrize("command", ["hf2hf", "hf2fsdp"])
def test_no_model_is_written_element_by_element(model, convert, tmp_path, monkeypatch, name, command):
    source, sizes, write = model(name, "bfloat16"), [], os.pwrite

    def counted(fd, piece, at):
        sizes.append(len(piece))
        return write(fd, piece, at)

    monkeypatch.setattr(os, "pwrite", counted)
    assert convert(command, source, tmp_path / "out", "--no-verify").code == 0
    assert len(sizes) < 200 + sum(sizes) / 32


def test_threads_that_write_between_each_other(model, convert, tmp_path):
    """Gate and up of GPT-OSS alternate: none of both loses what the other has written, however they meet."""
    source = model("gpt_oss", "bfloat16", hidden_size=96, intermediate_size=160, num_local_experts=8)
    content = (source / "model.safetensors").read_bytes()
    for number in range(3):
        options = ["-j", 8, "--memory", "1500KB"]
        assert convert("hf2hf", source, tmp_path / f"h{number}", "--no-verify", *options).code == 0
        assert (tmp_path / f"h{number}/model.safetensors").read_bytes() == content
    assert convert("hf2fsdp", source, tmp_path / "f", "--ranks", 3, *options).code == 0
    assert convert("verify", tmp_path / "f").code == 0


def test_the_largest_first_and_the_files_by_turns(model):
    plan = vitruvian.plan(model("llama", "bfloat16"), to="megatron", tp=2, pp=2).plan
    ordered = in_order(plan.jobs)
    assert [job.nbytes for job in ordered] == sorted((job.nbytes for job in plan.jobs), reverse=True)
    assert {job.name for job in ordered} == {job.name for job in plan.jobs}
    gates = [job for job in ordered if job.tensor == "gate"]
    stages = [str(job.targets[0].fragment.path)[-25:] for job in gates]
    assert [job.layer for job in gates] == [0, 2, 1, 3], stages


def test_more_memory_than_the_machine_has_is_refused(model, convert, tmp_path, monkeypatch):
    empty = np.empty

    def refusing(shape: Any, *args: Any, **options: Any) -> Any:
        if isinstance(shape, int) and shape > 10**11:
            raise MemoryError
        return empty(shape, *args, **options)

    monkeypatch.setattr(np, "empty", refusing)
    ran = convert("hf2megatron", model("llama"), tmp_path / "out", "-j", 2, "--memory", "1TB")
    assert ran.code == 2
    assert "memory is short: there are no " in ran.err
    assert "buffers of a thread" in ran.err
    assert "raise -j" not in ran.err
    assert not (tmp_path / "out").exists()


def test_threads_and_memory_do_not_change_the_output(model, convert, tmp_path):
    from tests.models import files

    source = model("llama", "bfloat16", vocab_size=20011, hidden_size=128, intermediate_size=512)
    seen = []
    for number, options in enumerate([("-j", 1), ("-j", 7), ("--memory", "300kB"), ("--memory", "200MB", "-j", 2)]):
        assert convert("hf2megatron", source, tmp_path / str(number), "--tp", 2, "--pp", 2, *options).code == 0
        seen.append(files(tmp_path / str(number)))
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_a_tensor_without_elements_is_one(model, convert, tmp_path):
    import torch
    from safetensors.torch import save_file

    source = Path(shutil.copytree(model("llama"), tmp_path / "source"))
    tensors = load_file(source / "model.safetensors") | {"empty": torch.empty(0, 4), "scalar": torch.tensor(1.5)}
    tensors["empty.last"] = torch.empty(2, 0, 3, dtype=torch.int8)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert (
        convert("hf2fsdp", source, tmp_path / "dcp", "--ranks", 2, "--verbatim", "--allow-missing", "[se]*").code == 0
    )
    assert convert("fsdp2hf", tmp_path / "dcp", tmp_path / "out", "--verbatim", "--allow-missing", "[se]*").code == 0
    again = load_file(tmp_path / "out/model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(again[name].equal(tensor) for name, tensor in tensors.items())


def settled(folder: Path, copies: np.ndarray, policy: str, *, partial: bool = False) -> np.ndarray:
    """What the engine makes of the copies of a norm."""
    from converters.move.blocks import Files
    from converters.move.engine import execute
    from converters.plan.parts import Part
    from converters.plan.plan import Job
    from converters.plan.request import Limits
    from formats.disk.safetensors import Fragment
    from formats.layout.leaves import Leaf, Span

    count, size = copies.shape
    copies.tofile(folder / "copies")
    np.zeros(size, np.float32).tofile(folder / "result")
    leaf = Leaf("final_norm", (Span("hidden", 0, size, 1),), 0)
    parts = [
        (Part(leaf, Fragment(folder / "copies", 4 * size * index, "F32", (size,), (1,))),) for index in range(count)
    ]
    target = Part(leaf, Fragment(folder / "result", 0, "F32", (size,), (1,)))
    others = {f"tp rank {index}": parts[index] for index in range(1, count)}
    job = Job("final_norm", None, (size,), "F32", "F32", parts[0], others, (target,), partial=partial)
    with Files() as files:
        execute([job], files, Limits(1, 3 << 20, policy), done=lambda *_: None)
    return np.fromfile(folder / "result", np.float32)


@pytest.mark.parametrize("partial", [False, True], ids=["mean", "sum"])
def test_copies_are_added_up_one_by_one(tmp_path, partial):
    """A thousand ranks need no more memory than two."""
    import tracemalloc

    copies = np.random.default_rng(0).normal(size=(40, 1 << 18)).astype(np.float32)
    tracemalloc.start()
    result = settled(tmp_path, copies, "mean", partial=partial)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20
    expected = copies.cumsum(0, dtype=np.float32)[-1] / np.float32(1 if partial else len(copies))
    assert np.array_equal(result, expected)


@pytest.mark.parametrize("hidden", [64, 4096])
@pytest.mark.parametrize("weight", [1.0, 0.03])
def test_a_sign_that_differs_between_copies_of_a_norm(tmp_path, hidden, weight):
    """Averaged only where it may be noise of the first steps: the mean of 1 and -1 would be a weight of 0."""
    copies = np.full((2, hidden), weight, np.float32)
    copies[1, 3] *= -1
    with pytest.raises(VerificationError, match=f"up to {2 * weight:g} apart, too far for a norm that drifted"):
        settled(tmp_path, copies, "drift")
    copies *= 0.01 / weight
    assert np.array_equal(settled(tmp_path, copies, "drift"), copies.mean(0))
