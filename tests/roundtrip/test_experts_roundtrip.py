"""Mixtures of experts: every file comes back byte for byte, from the names of the Hub and from those in memory."""

from __future__ import annotations

import pytest

from tests.faults.dcp_tools import save
from tests.models import EXPERTS, FEW, FUSED_HERE, LINEAR, files


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXPERTS, *FUSED_HERE])
def test_names_in_memory_become_those_of_the_hub(model, convert, tmp_path, name):
    """What transformers holds in memory is fused; what it writes is not. Our FSDP folder loads into the model."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    source = model(name, "bfloat16")
    state = AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    folder = save(tmp_path / "memory", {"model": state})
    ran = convert("fsdp2hf", folder, tmp_path / "back", "--config", source)
    assert ran.code == 0, ran.err
    assert "under its own name" not in ran.err
    weights = "model.safetensors"
    assert (tmp_path / "back" / weights).read_bytes() == (source / weights).read_bytes()
    ran = convert("hf2fsdp", source, tmp_path / "fsdp", "--ranks", 3)
    assert ran.code == 0, ran.err
    empty = {
        key: torch.zeros_like(value) for key, value in state.items() if key != "lm_head.weight" or "tied" not in name
    }
    dcp.load({"model": empty}, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    assert all(torch.equal(value, state[key]) for key, value in empty.items())
    assert convert("fsdp2hf", tmp_path / "fsdp", tmp_path / "again").code == 0
    assert files(tmp_path / "again") == files(source)
    digests = {convert("digest", place, *config).out.split()[0] for place, config in (
        (source, []), (folder, ["--config", source]), (tmp_path / "fsdp", []))}  # fmt: skip
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FEW if name in EXPERTS])
def test_every_line_comes_back_from_expert_ranks(model, convert, tmp_path, name):
    """Every family comes back in `test_chain.py`."""
    source = model(name, "bfloat16", shard="100KB")
    topologies = ["--tp 1", "--tp 2 --pp 2 --ep 2 --norm local", "--ep 4 --experts local", "--tp 2 --ep 2 --etp 1"]
    if name.startswith("gpt_oss"):  # experts with biases are whole on their ranks
        topologies = [f"{topology} --etp 1" for topology in topologies]
    # of latents the local names mean other shapes, and linear attention has none
    if name in LINEAR or name.startswith("deepseek"):
        topologies = [topology.replace("--norm local", "--experts local") for topology in topologies]
    for number, topology in enumerate(topologies):
        first, second, back = (tmp_path / f"{number} {step}" for step in ("one", "two", "back"))
        ran = convert("hf2megatron", source, first, *topology.split())
        assert ran.code == 0, ran.err
        ran = convert("reshard", first, second, *topologies[number - 1].split())
        assert ran.code == 0, ran.err
        assert convert("megatron2hf", second, back).code == 0
        assert files(back) == files(source)


def test_a_layer_that_shallower_models_leave_behind_is_one_of_a_deeper_model(model, convert, tmp_path):
    """Of GLM-4.5 the 47th layer is a weight, of GLM-4.5-Air it predicts a second token: the index keeps its place."""
    source = model("glm4_moe", "bfloat16", shard="1MB", num_hidden_layers=48, first_k_dense_replace=47)
    assert "model.layers.46.input_layernorm.weight" in (source / "model.safetensors.index.json").read_text()
    assert convert("hf2megatron", source, tmp_path / "m").code == 0
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)


def test_what_deepspeed_saves_of_fused_experts_is_read(model, convert, tmp_path):
    """Its module is the state dict, of which transformers 5 fuses the experts."""
    import torch
    from transformers import AutoModelForCausalLM

    source, tag = model("qwen3_moe-tied", "bfloat16"), tmp_path / "run/global_step1"
    state = AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    tag.mkdir(parents=True)
    saved = {"module": state, "dp_world_size": 1, "mp_world_size": 1, "global_steps": 1, "ds_version": "0.19.8"}
    torch.save({**saved, "buffer_names": [], "shared_params": {}}, tag / "mp_rank_00_model_states.pt")
    assert convert("zero2hf", tag, tmp_path / "back", "--config", source).code == 0
    assert files(tmp_path / "back") == files(source)


@pytest.mark.parametrize("changes", [{}, {"v_head_dim": 5}], ids=["table", "verbatim"])
def test_the_bias_of_a_router_is_not_rounded(model, convert, tmp_path, changes):
    """transformers keeps it in float32, in a model that no table describes too."""
    from safetensors.torch import load_file

    source = model("deepseek_v3", "float32", **changes)
    ran = convert("hf2hf", source, tmp_path / "out", "--dtype", "bf16")
    assert ran.code == 0, ran.err
    assert ("no table" in ran.err) == bool(changes)
    stored, out = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    kept = {name for name, value in out.items() if value.dtype == stored[name].dtype}
    assert kept == {name for name in stored if name.endswith("e_score_correction_bias")} != set()
