"""Files of two saves in one folder, of frameworks that leave no record of a save: what their own files say tells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.dcp_tools import refused

GOLDEN = Path(__file__).parents[1] / "golden"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""What the engine of DeepSpeed says of a save in each model file."""


def of_another_save(path: Path, name: str) -> str:
    """A file with another number under a name, and what is said of it."""
    import torch

    stored = torch.load(path, weights_only=False)
    assert name in stored
    torch.save(stored | {name: 7}, path)
    return f"{path} is of {name} 7, "


@pytest.mark.parametrize("name", ["consumed_train_samples", "consumed_valid_samples"])
def test_megatron_ranks_of_one_iteration_and_two_runs(model, convert, tmp_path, name):
    """As where a run began again at iteration 0 with another batch size."""
    import torch

    assert convert("hf2megatron", model("llama"), tmp_path / "run", "--tp", 2, "--iteration", 100).code == 0
    paths = sorted((tmp_path / "run").glob("iter_0000100/*/model_optim_rng.pt"))
    for path, samples in zip(paths, (1600, 3200), strict=True):
        stored = torch.load(path, weights_only=False)
        setattr(stored["args"], name, samples)
        torch.save(stored, path)
    ran = convert("megatron2hf", tmp_path / "run", tmp_path / "out")
    refused(ran, 3, f"{paths[1]} is of {name} 3200, {paths[0]} of 1600: files of different saves", "hint:")


@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_megatron_files_of_another_iteration_than_their_folder(model, convert, tmp_path, kind):
    import torch

    run, out = tmp_path / "run", tmp_path / "out"
    assert convert("hf2megatron", model("llama"), run, "--format", kind, "--iteration", 100).code == 0
    path = next(run.glob("iter_0000100/common.pt" if kind == "torch_dist" else "iter_*/*/model_optim_rng.pt"))
    stored = torch.load(path, weights_only=False)
    torch.save(stored | {"iteration": 9}, path)
    message = f"{path} is of iteration 9, its folder of 100: files of different saves"
    for command in ("reshard", "megatron2hf"):
        refused(convert(command, run, out), 3, message, "has to be iter_0000009")
    del stored["iteration"]
    torch.save(stored, path)
    ran = convert("reshard", run, out)
    assert (ran.code, (out / "iter_0000100").is_dir()) == (0, True), ran.err
    renamed = shutil.copytree(run / "iter_0000100", tmp_path / "kept")
    torch.save(stored | {"iteration": 9}, renamed / path.relative_to(run / "iter_0000100"))
    assert convert("megatron2hf", renamed, tmp_path / "hf").code == 0, "a folder whose name says no iteration"


@pytest.mark.parametrize("name", ["iteration", *COUNTERS])
def test_neox_ranks(convert, tmp_path, name):
    """Of files that GPT-NeoX wrote: one of two ranks is made that of another step."""
    run = shutil.copytree(GOLDEN / "neox/llama-mha-tp2", tmp_path / "run")
    message = of_another_save(next(run.glob("*/mp_rank_01_model_states.pt")), name)
    ran = convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101, "--gqa-layout", "blocked")
    refused(ran, 3, message, "files of different saves")


@pytest.mark.parametrize("name", ["iteration", *COUNTERS, "tokens"])
def test_megatron_deepspeed_ranks(convert, tmp_path, name):
    run = shutil.copytree(GOLDEN / "mds/llama_gqa_separate_tp2", tmp_path / "run")
    message = of_another_save(next(run.glob("*/mp_rank_01_model_states.pt")), name)
    refused(convert("zero2hf", run, tmp_path / "out"), 3, message, "files of different saves")


@pytest.mark.parametrize("name", COUNTERS)
def test_ranks_of_stage_3(convert, tmp_path, name):
    run = shutil.copytree(GOLDEN / "peft/in_zero3/checkpoint", tmp_path / "run")
    message = of_another_save(next(run.glob("*/zero_pp_rank_1_mp_rank_00_model_states.pt")), name)
    refused(convert("zero2hf", run, tmp_path / "out", "--adapter", "only"), 3, message, "files of different saves")


def test_neox_partitions_of_one_tensor_rank(convert, tmp_path):
    """All data ranks of one tensor parallel rank agree; those of the other are of another step."""
    import torch

    run = shutil.copytree(GOLDEN / "neox/llama-tp2-dp2", tmp_path / "run")
    paths = sorted(run.glob("*/*_mp_rank_01_optim_states.pt"))
    for path in paths:
        stored = torch.load(path, weights_only=False)
        for state in stored["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] -= 2
        torch.save(stored, path)
    for argv in (
        ["neox2hf", run, tmp_path / "out", "--weights", "fp32-master"],
        ["zero2universal", run, tmp_path / "u"],
    ):
        ran = convert(*argv, "--vocab-size", 101, "--gqa-layout", "blocked")
        refused(ran, 3, f"{paths[0]} is of step 4.0, ", "of 6.0: files of different saves")


def test_partitions_of_an_optimizer_that_counts_no_steps(convert, tmp_path):
    """Learning rates that differ are of different steps; if they agree, nothing ties the partitions to each other."""
    import torch

    run = shutil.copytree(GOLDEN / "peft/in_zero3/checkpoint", tmp_path / "run")
    settings = json.loads((GOLDEN / "peft/in_zero3/lora_config.json").read_text())["peft"]
    (run / "adapter_config.json").write_text(json.dumps(settings))
    nothing = "nothing ties .pt files to each other"
    paths = sorted(run.glob("*/*_optim_states.pt"))
    ran = convert("zero2hf", run, tmp_path / "counted", "--adapter", "only")
    assert (ran.code, nothing in ran.out) == (0, False), ran.err
    for path, rate in ((paths[0], 0.5), (paths[1], 0.25), (paths[1], 0.5)):
        stored = torch.load(path, weights_only=False)
        inner = stored["optimizer_state_dict"]["optimizer_state_dict"]
        for state in inner["state"].values():
            state.pop("step", None)
        for group in inner["param_groups"]:
            group["lr"] = rate
        torch.save(stored, path)
        ran = convert("zero2hf", run, tmp_path / "out", "--adapter", "only")
        if rate == 0.25:
            refused(ran, 3, f"{path} has lr = 0.25 in group 0", "files of different runs or saves")
    assert (ran.code, nothing in ran.out) == (0, True), ran.err
    for path in paths:  # without a count of steps a Lion's are carried, and no Adam's
        stored = torch.load(path, weights_only=False)
        inner = stored["optimizer_state_dict"]["optimizer_state_dict"]
        for state in inner["state"].values():
            del state["exp_avg_sq"]
        for group in inner["param_groups"]:
            del group["eps"]
        torch.save(stored, path)
    ran = convert("zero2universal", run, tmp_path / "universal")
    assert (ran.code, nothing in ran.out) == (0, True), ran.err


@pytest.mark.parametrize("name", ["shard-00001-model-00001-of-00001.safetensors", "pytorch_model_fsdp.bin"])
def test_weights_of_another_checkpoint_beside_those_of_dcp_are_told(model, convert, tmp_path, name):
    assert convert("hf2fsdp", model(), tmp_path / "run").code == 0
    assert "not read" not in convert("fsdp2hf", tmp_path / "run", tmp_path / "alone").err
    shutil.copy(model() / "model.safetensors", tmp_path / "run" / name)
    ran = convert("fsdp2hf", tmp_path / "run", tmp_path / "out")
    assert (ran.code, f"{name} in {tmp_path / 'run'} is not read" in ran.err) == (0, True), ran.err


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_1/.metadata", "pytorch_model_fsdp_1.bin", "pytorch_model_1.bin"])
def test_the_second_model_of_a_training_by_accelerate_is_told(model, convert, tmp_path, name):
    run = tmp_path / "checkpoint-3"
    assert convert("hf2fsdp", model(), run / "pytorch_model_fsdp_0").code == 0
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(b"another model")
    ran = convert("fsdp2hf", run, tmp_path / "out", "--config", model())
    told = f"{name.partition('/')[0]} in {run} is not read: weights of another checkpoint"
    assert (ran.code, told in ran.err) == (0, True), ran.err


@pytest.mark.parametrize("command", ["fsdp2hf", "hf2hf"])
def test_a_command_that_names_the_format_tells_of_the_other_model(model, convert, tmp_path, command):
    run = Path(shutil.copytree(model(), tmp_path / "checkpoint-3"))
    assert convert("hf2fsdp", model(), run / "pytorch_model_fsdp_0").code == 0
    beside = f"{run} holds two models: model.safetensors of Hugging Face, and pytorch_model_fsdp_0/.metadata"
    refused(convert("to", "hf", run, tmp_path / "out"), 5, beside)
    ran = convert(command, run, tmp_path / "out")
    assert (ran.code, f"note: {beside}: what is read" in ran.err) == (0, True), ran.err
    (run / "trainer_state.json").write_text("{}")  # one model, as transformers saves it
    assert "two models" not in convert(command, run, tmp_path / "one").err


@pytest.mark.parametrize(
    "names",
    [
        ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"),
        ("optimizer.bin", "optimizer_0_rank0.bin"),
        ("pytorch_model_fsdp_rank0.bin", "optimizer_0"),
        ("pytorch_model_fsdp_0_rank0.bin", "optimizer_0"),
        ("pytorch_model_rank0.bin", "optimizer_0"),
        ("model_world_size_1_rank_0.pt", "optimizer_0"),
        ("optim_world_size_1_rank_0.pt",),
        ("optimizer.bin",),
        (".metadata", "optimizer_0"),
        ("shard-00001-model-00001-of-00001.safetensors",),
    ],
)
def test_two_saves_in_one_folder(model, convert, tmp_path, names):
    """A model in the folder of accelerate, with files beside it that no trainer saves together with it."""
    run = tmp_path / "checkpoint-3"
    assert convert("hf2fsdp", model(), run / "pytorch_model_fsdp_0").code == 0
    shutil.copy(model() / "config.json", run)
    assert convert("fsdp2hf", run, tmp_path / "alone").code == 0
    for name in names:
        if not (run / name).exists():
            (run / name).write_bytes(b"of another save")
    for folder in (run, run / "pytorch_model_fsdp_0"):
        ran = convert("fsdp2hf", folder, tmp_path / "out")
        refused(ran, 5, "which no trainer saves together: they are of two saves", *names)


@pytest.mark.parametrize(
    ("weights", "optimizer"),
    [
        ("pytorch_model_fsdp.bin", "optimizer_0"),
        ("pytorch_model_fsdp.bin", "optimizer_0_rank0.bin"),
        ("pytorch_model_fsdp_rank0.bin", "optimizer.bin"),
        ("pytorch_model_fsdp_rank0.bin", "optim_world_size_1_rank_0.pt"),
        ("pytorch_model_fsdp_0_rank0.bin", "optimizer_0"),
        ("pytorch_model_rank0.bin", "optimizer_0_rank0.bin"),
        ("model_world_size_1_rank_0.pt", "optimizer_0"),
        ("model_world_size_1_rank_0.pt", "optimizer_0_rank0.bin"),
        ("shard-00001-model-00001-of-00001.safetensors", "optimizer_0"),
        ("model.safetensors", "optimizer_0"),
        (".metadata", "optimizer_0"),
        (".metadata", "optimizer.bin"),
        (".metadata", "optim_world_size_1_rank_0.pt"),
        (".metadata", "model_world_size_1_rank_0.pt"),
    ],
)
def test_the_weights_of_one_trainer_and_the_optimizer_of_another(tmp_path, weights, optimizer):
    from formats.errors import RefusedError
    from formats.fsdp.contents import require_one_save

    (tmp_path / weights).write_bytes(b"weights")
    require_one_save(tmp_path, tmp_path)
    (tmp_path / optimizer).write_bytes(b"of another save")
    with pytest.raises(RefusedError, match="no trainer saves together"):
        require_one_save(tmp_path, tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        (
            "pytorch_model_fsdp_0",
            "optimizer_0",
            "optimizer_1",
            "pytorch_model_fsdp_1",
            "model.safetensors",
            "config.json",
        ),
        ("pytorch_model_fsdp.bin", "optimizer.bin", "model.safetensors", "config.json"),
        ("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin", "optimizer_0", "config.json"),
        ("pytorch_model_fsdp_0_rank0.bin", "optimizer_0_rank0.bin", "trainer_state.json"),
        ("pytorch_model_rank0.bin", "optimizer.bin"),
        ("pytorch_model_rank0.bin", "optimizer_0"),
        ("model_world_size_1_rank_0.pt", "optim_world_size_1_rank_0.pt", "extra_state_world_size_1_rank_0.pt"),
        ("model.safetensors", "optimizer.bin"),
        (".metadata", "__0_0.distcp", "meta.pt", "model.safetensors"),
    ],
)
def test_what_a_trainer_saves_together_is_one_save(tmp_path, names):
    from formats.errors import RefusedError
    from formats.fsdp.contents import require_one_save

    for name in names:
        (tmp_path / name).write_bytes(b"of one save")
    require_one_save(tmp_path, tmp_path)
    other = "optimizer_0" if "world_size" in names[0] else "model_world_size_1_rank_0.pt"
    (tmp_path / other).write_bytes(b"of another")
    with pytest.raises(RefusedError, match=f"holds .*{other}.*, which no trainer saves together"):
        require_one_save(tmp_path, tmp_path)


def test_two_formats_of_megatron_in_one_iteration(model, convert, tmp_path):
    for name, kind in (("run", "torch_dist"), ("other", "torch")):
        flags = ("--format", kind, "--iteration", 3)
        assert convert("hf2megatron", model(), tmp_path / name, *flags).code == 0
    shutil.copytree(tmp_path / "other/iter_0000003", tmp_path / "run/iter_0000003", dirs_exist_ok=True)
    for command in ("megatron2hf", "reshard"):
        ran = convert(command, tmp_path / "run", tmp_path / "out")
        refused(ran, 5, "holds two saves, of torch_dist and ", "mp_rank_00/model_optim_rng.pt", "move either out of")
