"""Sound files that are not what the user, the config or the other ranks say: refused, with a hint that helps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ran
from tests.faults.dcp_tools import as_trained, refused, save, weights, with_config
from tests.models import files


@pytest.fixture
def folder(model, convert, tmp_path) -> Path:
    """A DCP folder of two ranks, as a training leaves it, without a config."""
    assert convert("hf2fsdp", model("llama"), tmp_path / "run/checkpoint-7", "--ranks", 2, "-q").code == 0
    return as_trained(tmp_path / "run/checkpoint-7")


@pytest.fixture
def merge(convert, tmp_path) -> Callable[..., Ran]:
    """`merge(folder, ...)`: fsdp2hf; an output that it refuses is not there."""

    def run(folder: Path, *options: object) -> Ran:
        ran = convert("fsdp2hf", folder, tmp_path / "out", "-q", *options)
        assert (tmp_path / "out").exists() == (ran.code == 0)
        return ran

    return run


# --- the config ------------------------------------------------------------------------------------------------------


def test_without_a_config_there_is_a_hint(folder, merge):
    refused(merge(folder), 3, folder, "no config.json", "--config BASE")


@pytest.mark.parametrize("command", ["digest", "plan"])
def test_every_command_says_so(folder, convert, command):
    ran = convert(command, folder, *(["--to", "huggingface"] if command == "plan" else []))
    refused(ran, 3, "--config BASE")
    assert ran.out == ""


def test_a_model_that_was_saved_as_one_object_is_named(model, merge, convert, tmp_path):
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    saved = {"model": load_file(model("llama") / "model.safetensors")}
    dcp.save(saved, checkpoint_id=tmp_path / "c", planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    for ran in (merge(tmp_path / "c", "--config", model("llama")), convert("inspect", tmp_path / "c")):
        refused(ran, 4, tmp_path / "c", "no tensors, only pickled objects: model", "flatten_state_dict=True")


@pytest.mark.parametrize("place", [".", "huggingface", ".."])
def test_a_config_that_the_trainer_left_is_found(folder, merge, model, tmp_path, place):
    (folder / place).mkdir(exist_ok=True)
    shutil.copy(model("llama") / "config.json", folder / place)
    assert merge(folder).code == 0
    assert (tmp_path / "out/config.json").read_bytes() == (model("llama") / "config.json").read_bytes()


def test_the_model_of_train_params_is_found(folder, merge, model, tmp_path):
    """llama-cookbook writes every value as text."""
    (folder / "train_params.yaml").write_text(f"lr: '0.1'\nmodel_name: {model('llama')}\nseed: '1'\n")
    assert merge(folder).code == 0
    assert files(tmp_path / "out") == files(model("llama"))


def test_a_model_of_train_params_that_is_not_here_is_named(folder, merge):
    (folder / "train_params.yaml").write_text("model_name: meta-llama/Llama-3.1-8B\n")
    refused(merge(folder), 3, "--config", "meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 128}, {"intermediate_size": 128}, {"num_hidden_layers": 3}, {"num_hidden_layers": 5},
     {"vocab_size": 400}, {"vocab_size": 200}, {"num_key_value_heads": 8}, {"num_attention_heads": 16}],
    ids=str,
)  # fmt: skip
def test_the_config_of_another_model_is_noticed(folder, merge, model, tmp_path, changes):
    ran = merge(folder, "--config", with_config(tmp_path / "other", model("llama"), **changes))
    refused(ran, 3, folder, "model.")


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama-mqa"])
def test_the_config_of_another_family_is_noticed(folder, merge, model, name):
    refused(merge(folder, "--config", model(name)), 3, folder, "model.layers.")


def test_the_config_of_a_twin_family_is_believed(folder, merge, model, tmp_path):
    """Mistral's tensors are those of Llama: nothing tells."""
    assert merge(folder, "--config", model("mistral", sliding_window=None, head_dim=8)).code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "mistral"


def test_a_config_without_a_class_will_do(folder, merge, model, tmp_path):
    base = with_config(tmp_path / "base", model("llama"), architectures=None)
    assert merge(folder, "--config", base).code == 0
    assert (tmp_path / "out/config.json").read_bytes() == (base / "config.json").read_bytes()


def test_a_config_with_an_fsdp_class_is_understood(folder, merge, model, tmp_path):
    """FSDP1 puts its name before that of the class: the output has to load all the same."""
    from transformers import AutoModelForCausalLM

    base = with_config(tmp_path / "base", model("llama"), architectures=["FSDPLlamaForCausalLM"])
    assert merge(folder, "--config", base).code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"architectures": ["LlamaForCausalLM"]}', '{"model_type": 7}'])
def test_a_config_that_says_nothing_is_refused(folder, merge, tmp_path, text):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(text)
    ran = merge(folder, "--config", tmp_path / "base")
    assert ran.code in (3, 4), ran
    assert "base/config.json" in ran.err


def test_a_config_that_is_not_there_is_a_wrong_call(folder, merge, tmp_path):
    refused(merge(folder, "--config", tmp_path / "nowhere"), 2, "--config", "nowhere")


# --- which folder, which part ----------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(folder) -> Path:
    """A run's folder with the checkpoints 7, 10 and 100, and one without weights."""
    for number in (10, 100):
        shutil.copytree(folder, folder.parent / f"checkpoint-{number}")
    (folder.parent / "checkpoint-1000").mkdir()
    return folder.parent


def test_every_checkpoint_of_a_run_is_merged_the_newest_first(run_folder, convert, model, tmp_path):
    ran = convert("fsdp2hf", run_folder, tmp_path / "out", "--config", model("llama"), "-q")
    assert ran.code == 0, ran.err
    positions = [ran.out.index(f"out/checkpoint-{number}:") for number in (100, 10, 7)]
    assert positions == sorted(positions)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint-7", "checkpoint-10", "checkpoint-100"}
    assert all(files(path) == files(model("llama")) for path in (tmp_path / "out").iterdir())


def test_a_run_that_was_interrupted_between_two_checkpoints_goes_on(run_folder, convert, model, tmp_path):
    """The same command again does what is left."""
    argv = ("fsdp2hf", run_folder, tmp_path / "out", "--config", model("llama"), "-q")
    assert convert(*argv).code == 0
    shutil.rmtree(tmp_path / "out/checkpoint-7")
    ran = convert(*argv)
    assert ran.code == 0, ran.err
    assert files(tmp_path / "out/checkpoint-7") == files(model("llama"))


def test_the_final_weights_of_a_run_are_not_passed_over(run_folder, convert, model, tmp_path):
    """axolotl leaves OUT/pytorch_model_fsdp_0 beside OUT/checkpoint-N, and merges the former."""
    from safetensors.torch import load_file

    final = {key: value + 1 for key, value in weights(model("llama")).items()}
    save(run_folder / "pytorch_model_fsdp_0", {"model": final})
    ran = convert("fsdp2hf", run_folder, tmp_path / "out", "--config", model("llama"), "-q")
    merged = [load_file(path) for path in (tmp_path / "out").rglob("model.safetensors")]
    assert ran.code != 0 or any(
        (tensors["model.norm.weight"] == final["model.norm.weight"]).all() for tensors in merged
    )


def test_a_command_that_reads_one_checkpoint_names_the_newest(run_folder, convert, model):
    ran = convert("digest", run_folder, "--config", model("llama"))
    refused(ran, 3, run_folder, "checkpoint-100\n")
    assert ran.out == ""


@pytest.mark.parametrize("command", ["fsdp2hf", "inspect", "digest"])
def test_a_source_that_is_not_there_is_a_bad_source(convert, model, tmp_path, command):
    options = (tmp_path / "out",) if command == "fsdp2hf" else ()
    ran = convert(command, tmp_path / "nowhere", *options, "--config", model("llama"))
    refused(ran, 3, tmp_path / "nowhere", "does not exist")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("inside", ["pytorch_model_fsdp_0", "actor"])
def test_weights_inside_a_checkpoint_are_found(folder, merge, model, tmp_path, inside):
    outer = tmp_path / "outer/checkpoint-7"
    (outer / "optimizer_0").mkdir(parents=True)
    folder.rename(outer / inside)
    assert merge(outer, "--config", model("llama")).code == 0
    assert files(tmp_path / "out") == files(model("llama"))


def test_an_optimizer_is_no_model(merge, model, tmp_path):
    import torch

    state = {
        f"optimizer.state.{key}.exp_avg": torch.zeros(tensor.shape) for key, tensor in weights(model("llama")).items()
    }
    folder = save(tmp_path / "optimizer_0", {"optimizer": state})
    ran = merge(folder, "--config", model("llama"))
    assert ran.code in (3, 5), ran
    assert str(folder) in ran.err


def test_two_models_are_ambiguous(merge, model, tmp_path):
    state = weights(model("llama"))
    twice = {key: value * 2 for key, value in state.items()}
    folder = save(tmp_path / "c", {"actor": state, "critic": twice})
    options = ("--config", model("llama"))
    refused(merge(folder, *options), 5, folder, "several models", "actor", "critic", "--container")
    refused(merge(folder, *options, "--container", "reference"), 5, "reference", "actor", "critic")
    assert merge(folder, *options, "--container", "critic").code == 0
    merged = weights(tmp_path / "out")
    assert all((merged[key] == value).all() for key, value in twice.items())


def test_a_dump_that_holds_a_key_twice_is_refused(merge, model, tmp_path):
    """Once with the name that torch.compile gives it, and once without."""
    state = weights(model("llama"))
    state["_orig_mod.model.norm.weight"] = state["model.norm.weight"] * 2
    refused(merge(save(tmp_path / "c", {"model": state}), "--config", model("llama")), 3, "model.norm.weight", "twice")


@pytest.mark.parametrize("options", [(), ("--verbatim",)])
def test_an_adapter_is_no_model(merge, model, tmp_path, options):
    import torch

    state: dict[str, Any] = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        state |= {f"{name}A.default.weight": torch.randn(4, 64), f"{name}B.default.weight": torch.randn(64, 4)}
    folder = save(tmp_path / "c", {"model": state})
    refused(merge(folder, "--config", model("llama"), *options), 4, "PEFT adapter", "lora_A", "--adapter merged")


def test_a_model_with_an_adapter_in_it_is_refused(merge, model, tmp_path):
    import torch

    state = {f"base_model.model.{key}": value for key, value in weights(model("llama")).items()}
    state["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"] = torch.randn(4, 64)
    folder = save(tmp_path / "c", {"model": state})
    refused(merge(folder, "--config", model("llama"), "--verbatim"), 4, "PEFT adapter")


@pytest.mark.parametrize("extra", ["model.layers.4.mlp.up_proj.weight", "model.layers.0.mlp.experts", "score.weight"])
def test_a_tensor_that_the_family_does_not_have_is_noticed(merge, model, tmp_path, extra):
    import torch

    folder = save(tmp_path / "c", {"model": weights(model("llama")) | {extra: torch.randn(4, 4)}})
    refused(merge(folder, "--config", model("llama")), 3, extra)


# --- tied ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def diverged(model, tmp_path) -> Path:
    """The config says tied, but the head was trained away from the embedding."""
    state = weights(model("llama-tied"))
    head = state["model.embed_tokens.weight"].clone()
    head[3, 5] += 1
    return save(tmp_path / "c", {"model": state | {"lm_head.weight": head}})


@pytest.mark.parametrize("options", [(), ("--verbatim",)])
def test_a_head_that_is_tied_in_name_only_is_noticed(diverged, merge, model, options):
    ran = merge(diverged, "--config", model("llama-tied"), *options)
    refused(ran, 6, "should share model.embed_tokens.weight", "--set tied=false")


@pytest.mark.parametrize("options", [(), ("--verbatim",)])
def test_it_can_be_untied(diverged, merge, model, tmp_path, options):
    from transformers import AutoModelForCausalLM

    assert merge(diverged, "--config", model("llama-tied"), "--set", "tied=false", *options).code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    apart = loaded.lm_head.weight - loaded.model.embed_tokens.weight
    assert apart.count_nonzero() == 1
    assert abs(apart[3, 5] - 1) < 1e-5


def test_a_head_without_an_embedding_of_its_own_is_tied(merge, model, tmp_path):
    """Equal copies under both names: one of them is left out, as transformers does."""
    state = weights(model("llama-tied"))
    folder = save(tmp_path / "c", {"model": state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}})
    assert merge(folder, "--config", model("llama-tied")).code == 0
    assert files(tmp_path / "out") == files(model("llama-tied"))


def test_an_untied_model_without_its_head_is_noticed(merge, model, tmp_path):
    state = weights(model("llama"))
    del state["lm_head.weight"]
    folder = save(tmp_path / "c", {"model": state})
    refused(merge(folder, "--config", model("llama")), 3, "lm_head.weight")
