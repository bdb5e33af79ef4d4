"""Megatron-DeepSpeed: what its own code saved has its own logits, and its optimizer goes into other frameworks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import refused

HERE = Path(__file__).with_name("mds")
CASES = {
    "llama_gqa_separate_tp2": [],
    "llama_gqa_fused_tp2": [],
    "gpt_layernorm_tied_tp2": ["--gqa-layout", "grouped"],
}
"""Run: what has to be said of it."""
GPT = HERE / "gpt_layernorm_tied_tp2"


def optimizer_of(run: Path) -> list[Any]:
    """What torch reads of the optimizer states of each tensor parallel rank."""
    import torch

    files = sorted((run / "global_step3").glob("*optim_states.pt"))
    return [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]


def logits(folder: Path, ids: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(ids)).logits.numpy()


@pytest.mark.parametrize("inner", [".", "global_step3"])
@pytest.mark.parametrize("name", CASES)
def test_its_logits(convert, tmp_path, name, inner):
    import numpy as np

    out, wanted = tmp_path / "out", np.load(HERE / name / "logits.npz")
    ran = convert("zero2hf", HERE / name / inner, out, *CASES[name])
    assert ran.code == 0, ran.err
    found = logits(out, wanted["ids"])
    assert found.shape[-1] == 60, "the files know the vocabulary without its padding"
    assert np.abs(found - wanted["logits"][..., :60]).max() < 2e-6 < np.abs(found).max()


def test_the_order_is_asked_for(convert, tmp_path):
    """Where a rank has several groups in one matrix; the other order gives another model."""
    import numpy as np

    refused(convert("zero2hf", GPT, tmp_path / "out"), 3, "in one of two orders", "--gqa-layout grouped", "2024-12-04")
    assert convert("zero2hf", GPT, tmp_path / "out", "--gqa-layout", "blocked").code == 0
    wanted = np.load(GPT / "logits.npz")
    assert np.abs(logits(tmp_path / "out", wanted["ids"]) - wanted["logits"][..., :60]).max() > 1
    told = convert("inspect", HERE / "llama_gqa_separate_tp2", "--gqa-layout", "grouped").out
    assert "--gqa-layout grouped has no effect: there is one order" in told


def test_blocked_rows(convert, tmp_path):
    """The order of newer code (`last // 3`): made by torch of a run in the older one, it is the same model."""
    import shutil

    import torch

    run = shutil.copytree(GPT, tmp_path / "run")
    for layer in (2, 3):
        for path in run.glob(f"global_step3/layer_{layer:02d}-*"):
            held = torch.load(path)
            for name in ("weight", "bias"):
                key = f"self_attention.query_key_value.{name}"
                heads = held[key].reshape(2, 3, 6, *held[key].shape[1:])
                held[key] = heads.transpose(0, 1).reshape(held[key].shape).contiguous()
            torch.save(held, path)
    assert convert("diff", run, tmp_path / "run", "--gqa-layout", "blocked").code == 0
    for place, order in ((GPT, "grouped"), (run, "blocked")):
        assert convert("zero2hf", place, tmp_path / order, "--gqa-layout", order).code == 0
    assert convert("diff", tmp_path / "grouped", tmp_path / "blocked").code == 0


def test_two_stages(convert, tmp_path):
    """The same files as a pipeline of two stages on TP 2 has them: the tied embedding once more, behind the norm."""
    import shutil

    import torch

    run = shutil.copytree(GPT, tmp_path / "run")
    folder = run / "global_step3"
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    for rank in (0, 1):
        held = torch.load(folder / f"layer_01-model_0{rank}-model_states.pt")
        del held["position_embeddings.weight"]
        torch.save(held, folder / f"layer_05-model_0{rank}-model_states.pt")
        for stage in (0, 1):
            model = torch.load(GPT / f"global_step3/mp_rank_0{rank}_model_states.pt", weights_only=False)
            args = model["args"]
            args.pipeline_model_parallel_size, args.world_size, args.rank = 2, 4, stage * 2 + rank
            model["mp_world_size"] = 4
            torch.save(model, folder / f"mp_rank_0{args.rank}_model_states.pt")
    assert "megatron_deepspeed, tp 2, pp 2" in convert("inspect", run, *CASES[GPT.name]).out
    assert convert("diff", run, GPT, *CASES[GPT.name]).code == 0
    held = torch.load(folder / "layer_05-model_01-model_states.pt")
    held["word_embeddings.weight"][0] += 1
    torch.save(held, folder / "layer_05-model_01-model_states.pt")
    ran = convert("zero2hf", run, tmp_path / "out", *CASES[GPT.name])
    refused(ran, 6, "the copies of embedding are up to")


def test_numbers_of_bigscience(convert, tmp_path):
    """Its layers begin with 3, its norm comes two later, and its one matrix has one order."""
    import shutil

    import torch

    run = shutil.copytree(GPT, tmp_path / "run")
    folder = run / "global_step3"
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    for rank in (0, 1):
        for old, new in ((4, 6), (3, 4), (2, 3)):
            source = folder / f"layer_0{old}-model_0{rank}-model_states.pt"
            torch.save(torch.load(source), folder / f"layer_0{new}-model_0{rank}-model_states.pt")
        (folder / f"layer_02-model_0{rank}-model_states.pt").unlink()
    assert convert("zero2hf", run, tmp_path / "out").code == 0
    assert convert("zero2hf", GPT, tmp_path / "same", *CASES[GPT.name]).code == 0
    assert convert("diff", tmp_path / "out", tmp_path / "same").code == 0


@pytest.mark.parametrize("name", CASES)
def test_masters_and_moments(convert, tmp_path, name):
    """Of the whole run, bit for bit what torch finds in the files of its ranks; master weights round to the weights."""
    import torch
    from safetensors.torch import load_file

    ranks = optimizer_of(HERE / name)
    for weights in ("fp32-master", "exp_avg", "exp_avg_sq"):
        out = tmp_path / weights
        ran = convert("zero2hf", HERE / name, out, *CASES[name], "--weights", weights)
        assert ran.code == 0, ran.err
        held = load_file(out / "model.safetensors")
        wanted = [
            one["single_partition_of_fp32_groups"][0]
            if weights == "fp32-master"
            else one["base_optimizer_state"]["state"][0][weights]
            for one in ranks
        ]
        embedding = next(one for key, one in held.items() if key.endswith(("embed_tokens.weight", "wte.weight")))
        rows = torch.cat([flat[: 32 * 24].reshape(32, 24) for flat in wanted])
        assert embedding.equal(rows[:60])
        assert rows[:60].any()
    assert convert("verify", tmp_path / "fp32-master", HERE / name, *CASES[name], "--weights", "fp32-master").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_other_frameworks_resume_from_it(convert, tmp_path, name):
    run, words = HERE / name, ["--with-optimizer", *CASES[name]]
    told = convert("inspect", run, *CASES[name]).out
    assert "megatron_deepspeed, tp 2, pp 1, global_step3" in told
    assert "fp32, exp_avg, exp_avg_sq, step 3" in told
    assert convert("hf2fsdp", run, tmp_path / "fsdp", *words).code == 0
    assert convert("zero2universal", run, tmp_path / "universal", *CASES[name]).code == 0
    for form in ("torch_dist", "fsdp_dtensor", "torch"):
        out = tmp_path / form
        ran = convert("hf2megatron", run, out, *words, "--format", form, "--tp", 2)
        assert ran.code == 0, ran.err
        assert convert("hf2fsdp", out, tmp_path / f"{form}-fsdp", "--with-optimizer").code == 0
        assert convert("diff", tmp_path / "fsdp", tmp_path / f"{form}-fsdp").code == 0
        assert (tmp_path / f"{form}-fsdp/__0_0.distcp").read_bytes() == (tmp_path / "fsdp/__0_0.distcp").read_bytes()


def test_every_command_reads_it(convert, tmp_path):
    run = HERE / "llama_gqa_separate_tp2"
    for command in ("zero2hf", "hf2megatron", "hf2neox", "hf2fsdp"):
        assert convert(command, run, tmp_path / command).code == 0
        assert convert("verify", tmp_path / command).code == 0
    places = (run, *(tmp_path / name for name in ("zero2hf", "hf2megatron", "hf2neox", "hf2fsdp")))
    assert len({convert("digest", place).out.split()[0] for place in places}) == 1
    assert convert("verify", run).code == 0, "its own checksums"
    refused(convert("neox2hf", run, tmp_path / "out"), 2, "megatron_deepspeed", "convert zero2hf")


@pytest.mark.parametrize("name", ["rope_theta", "layernorm_epsilon", "swiglu"])
def test_ranks_agree_in_every_argument_that_changes_the_model(convert, tmp_path, name):
    run = resaved(tmp_path / "run", lambda value: setattr(value["args"], name, 777), "mp_rank_01_model_states.pt")
    refused(convert("zero2hf", run, tmp_path / "out"), 3, f"mp_rank_01_model_states.pt says {name} = 777")


def test_positions_that_are_not_known(convert, tmp_path):
    """Also beside `use_rotary_position_embeddings`."""
    run = resaved(
        tmp_path / "run", lambda value: setattr(value["args"], "position_embedding_type", "alibi"), "mp_rank*"
    )
    refused(convert("zero2hf", run, tmp_path / "out"), 4, "position_embedding_type = 'alibi' is not supported")


def test_the_optimizer_has_made_the_steps_that_the_engine_counts(convert, tmp_path):
    run = resaved(tmp_path / "run", lambda value: value.update(global_steps=4), "mp_rank*")
    words = ["zero2hf", run, tmp_path / "out", "--weights", "fp32-master"]
    refused(convert(*words), 3, "has made 3 steps", "counts 4: files of different saves", "--accept global_steps")
    ran = convert(*words, "--accept", "global_steps")
    assert ran.code == 0, ran.err
    assert "counts 4: accepted" in ran.err


def resaved(run: Path, change: Callable[[dict[str, Any]], object], pattern: str) -> Path:
    """A run of which some files were changed."""
    import torch

    shutil.copytree(HERE / "llama_gqa_separate_tp2", run)
    for file in (run / "global_step3").glob(pattern):
        value = torch.load(file, weights_only=False)
        change(value)
        torch.save(value, file)
    return run
