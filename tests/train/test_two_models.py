"""A folder with the weights of two models: nobody reads one of them by chance, and nobody makes one."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch")


@pytest.fixture
def both(model, settings, run, tmp_path):
    """(folder of a model with a checkpoint of a training in it, the training): as `save.path: START` left it before."""
    trained = run(settings())
    folder = tmp_path / "both"
    shutil.copytree(model("llama", vocab_size=253), folder)
    shutil.copytree(trained.save / "global_step104", folder / "global_step104")
    (folder / "latest").write_text("global_step104")
    return folder, trained


def test_a_training_does_not_save_into_a_model(model, settings, run, tmp_path):
    folder = tmp_path / "start"
    shutil.copytree(model("llama", vocab_size=253), folder)
    ran = run(settings(model={"path": str(folder)}), save="start")
    assert ran.code == 7, ran.out
    assert "holds the weights of a model, model.safetensors" in ran.out
    assert f"hint: --save.path {folder}-run" in ran.out
    assert not list(folder.glob("global_step*"))


def test_who_names_such_a_folder_is_asked_which(both, settings, run, convert, train, tmp_path):
    folder, trained = both
    message = f"{folder} holds two models: model.safetensors of Hugging Face, and global_step104"
    commands = (["inspect", folder], ["digest", folder], ["hf2megatron", folder, tmp_path / "M"])
    for argv in commands:
        ran = convert(*argv)
        assert (ran.code, message in ran.err) == (5, True), ran.err
        assert f"hint: name {folder}/global_step104; or" in ran.err
    config = settings(model={"path": str(folder)})
    ran = run(config, save="other")
    assert (ran.code, message in ran.out) == (5, True), ran.out
    assert train("plan", config).code == 5
    assert train("init", tmp_path / "run", "--from", folder, "--data", tmp_path / "none").code == 5
    (folder / "trainer_state.json").write_text("{}")  # of the Trainer of transformers, which saves one model twice
    ran = convert("hf2fsdp", folder, tmp_path / "F", "--with-optimizer")
    (folder / "trainer_state.json").unlink()
    assert (ran.code, f"hint: take {folder}/global_step104, or the weights alone" in ran.err) == (4, True), ran.err
    named = convert("digest", folder / "global_step104")
    assert named.code == 0, named.err
    first = run(settings(model={"path": str(folder / "global_step104")}), save="named")
    assert first.code == 0, first.out
    for name in ("latest", "global_step104"):
        shutil.move(folder / name, tmp_path / f"moved-{name}")
    other = run(settings(model={"path": str(folder)}), save="other")
    assert other.series("loss") == trained.series("loss")


def test_what_was_begun_there_before_comes_to_its_end(both, settings, run):
    folder, trained = both
    ran = run(settings(model={"path": str(folder)}), save="both")
    assert ran.code == 0, ran.out
    assert ran.series("loss") == trained.series("loss")[4:]
    assert not (folder / "start").exists()


@pytest.mark.parametrize(
    ("name", "other"),
    [("x/.metadata", "x"), (".metadata", ".metadata"), ("mp_rank_00/model_optim_rng.pt", "mp_rank_00/"),
     ("mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt"),
     ("iter_0000005/mp_rank_00/model_optim_rng.pt", "iter_0000005"),
     ("g/mp_rank_00_model_states.pt", "g"), ("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0"),
     ("pytorch_model_fsdp.bin", "pytorch_model_fsdp.bin"),
     ("shard-00001-model-00001-of-00001.safetensors", "shard-00001-model-00001-of-00001.safetensors"),
     ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_0.pt")],
    ids=str,
)  # fmt: skip
def test_shards_of_any_format_beside_a_model(model, convert, tmp_path, name, other):
    folder = tmp_path / "m"
    shutil.copytree(model("llama"), folder)
    assert convert("inspect", folder).code == 0
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"")
    top = name.partition("/")[0]
    if top in ("x", "g"):
        (folder / "latest").write_text(top)
    if top.startswith("iter_"):
        (folder / "latest_checkpointed_iteration.txt").write_text("5")
    ran = convert("inspect", folder)
    assert ran.code == 5, ran.err
    assert other in ran.err
    assert convert("hf2hf", folder, tmp_path / "out", "-n").code == 0  # the command says which
    (folder / "trainer_state.json").write_text("{}")  # the Trainer of transformers saves one model twice
    assert convert("inspect", folder).code == 0


def test_an_fsdp_save_beside_a_run_of_deepspeed(model, convert, tmp_path):
    """No trainer saves both, though the Trainer of transformers has a folder for either."""
    import torch

    from tests.faults.dcp_tools import weights

    folder = tmp_path / "checkpoint-4"
    assert convert("hf2fsdp", model("llama"), folder / "pytorch_model_fsdp_0").code == 0
    shutil.copy(model("llama") / "config.json", folder)
    (folder / "trainer_state.json").write_text("{}")
    assert convert("inspect", folder).code == 0
    (folder / "global_step4").mkdir()
    (folder / "latest").write_text("global_step4")
    torch.save({"module": weights(model("llama"))}, folder / "global_step4/mp_rank_00_model_states.pt")
    for argv in (["inspect", folder], ["verify", folder], ["to", "hf", folder, tmp_path / "out"]):
        ran = convert(*argv)
        message = "pytorch_model_fsdp_0/.metadata, and global_step4, which its run names as the latest"
        assert (ran.code, message in ran.err) == (5, True), ran.err
    assert convert("inspect", folder / "global_step4").code == 0


def test_a_model_in_a_run_of_nanotron(model, convert, tmp_path):
    assert convert("hf2nanotron", model("llama"), tmp_path / "run/10").code == 0
    (tmp_path / "run/latest.txt").write_text("10")
    assert convert("inspect", tmp_path / "run").code == 0
    shutil.copytree(model("llama"), tmp_path / "run", dirs_exist_ok=True)
    ran = convert("inspect", tmp_path / "run")
    assert (ran.code, "model.safetensors of Hugging Face, and 10, which its run names as the latest" in ran.err) == (
        5,
        True,
    )
