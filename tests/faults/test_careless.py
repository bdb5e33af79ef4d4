"""What a careless user tries: nothing of theirs is deleted, nothing is taken for granted, and hints work."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.numpy import load_file, save_file

from converters.convert import check_paths
from converters.move.journal import sealed
from converters.plan.request import Request, named_of
from formats.errors import OutputError, SourceError
from formats.huggingface.folder import read_config
from formats.registry import is_known, open_checkpoint, others_inside
from tests.chat import worlds
from tests.faults.dcp_tools import refused
from tests.models import files
from tests.optimizers import add_optimizer


def test_a_folder_where_the_work_would_be_done_is_left_alone(model, convert, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.tex").write_text("precious")
    ran = convert("hf2megatron", model(), tmp_path / "out")
    assert ran.code == 7
    assert "holds something else" in ran.err
    assert (tmp_path / "out.partial/thesis.tex").read_text() == "precious"


def test_a_name_that_is_too_long_while_the_work_is_done(model, convert, tmp_path):
    """A file system has it, and not the `.partial` behind it."""
    refused(convert("hf2megatron", model(), tmp_path / (250 * "n")), 7, "3 bytes too long a name", "a shorter one")
    assert convert("hf2megatron", model(), tmp_path / (247 * "n")).code == 0


def test_a_conversion_that_has_not_ended_is_named_where_its_output_is_read(convert, tmp_path):
    (tmp_path / "run.partial").mkdir()
    ran = convert("megatron2hf", tmp_path / "run", tmp_path / "out")
    assert (ran.code, "run.partial is that of a conversion that has not ended" in ran.err) == (3, True), ran.err


def test_averaged_norms_take_no_folder_from_others(model, convert, tmp_path):
    """Neither what is no work of ours, nor that of another process or conversion; a killed run's begins anew."""
    assert convert("hf2neox", model(), tmp_path / "run", "--tp", 2).code == 0
    argv = ["average-norms", tmp_path / "run", tmp_path / "out"]
    staging = tmp_path / "out.partial"
    staging.mkdir()
    (staging / "thesis.tex").write_text("precious")
    refused = convert(*argv, "--force")
    assert (refused.code, "holds something else" in refused.err) == (7, True)
    assert (staging / "thesis.tex").read_text() == "precious"
    (staging / "thesis.tex").unlink()
    with (staging / "journal.jsonl").open("w") as journal:
        fcntl.flock(journal, fcntl.LOCK_SH)
        assert "other processes are writing" in convert(*argv, "--force").err
        journal.write(sealed("vitruvian 3 of another one").decode())
    assert "another conversion" in convert(*argv).err
    (staging / "journal.jsonl").write_bytes(sealed("average-norms"))
    (staging / "out/global_step0").mkdir(parents=True)
    (staging / "out/global_step0/half").touch()
    assert convert(*argv).code == 0
    assert not staging.exists()
    assert "half" not in files(tmp_path / "out/global_step0")


@pytest.mark.parametrize(
    ("name", "leads", "message"),
    [
        ("tokenizer.json", "../../secret/id_rsa", "which is not in"),
        ("logs", "../../secret", "which is not in"),
        ("gone", "/nonexistent", "is a broken link"),
    ],
)
def test_averaged_norms_follow_no_link_out_of_the_run(model, convert, tmp_path, name, leads, message):
    """Neither a second name of a file of the user's, nor a copy of it; and no link is left out without a word."""
    assert convert("hf2neox", model(), tmp_path / "run", "--tp", 2).code == 0
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/id_rsa").write_text("private")
    link = tmp_path / "run/global_step0" / name
    link.unlink(missing_ok=True)
    link.symlink_to(leads)
    ran = convert("average-norms", tmp_path / "run", tmp_path / "out")
    assert (ran.code, str(link) in ran.err, message in ran.err) == (3, True, True), ran.err
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "secret/id_rsa").stat().st_nlink == 1


def test_weights_of_averaged_norms_may_be_linked(model, convert, tmp_path):
    assert convert("hf2neox", model(), tmp_path / "run", "--tp", 2).code == 0
    (tmp_path / "far").mkdir()
    for path in list((tmp_path / "run/global_step0").glob("mp_rank_*.pt")):
        path.rename(tmp_path / "far" / path.name)
        path.symlink_to(tmp_path / "far" / path.name)
    assert convert("average-norms", tmp_path / "run", tmp_path / "out").code == 0


def test_averaged_norms_are_numbers(model, convert, tmp_path):
    assert convert("hf2neox", model(), tmp_path / "run", "--tp", 2).code == 0
    path = tmp_path / "run/global_step0/mp_rank_01_model_states.pt"
    stored = torch.load(path, weights_only=False)
    next(tensor for name, tensor in stored["module"].items() if "norm" in name)[3] = float("nan")
    torch.save(stored, path)
    ran = convert("average-norms", tmp_path / "run", tmp_path / "out")
    assert (ran.code, "holds NaN or infinity" in ran.err) == (6, True), ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "named",
    ["config", "config within", "linked weights", "second of an average", "linked"],
)
def test_nothing_that_is_read_is_deleted(model, convert, tmp_path, named):
    """Whatever it is an input for, and by whatever path."""
    out = Path(shutil.copytree(model(), tmp_path / "out"))
    argv = ["hf2hf", model()]
    if named == "linked weights":
        (tmp_path / "hf").mkdir()
        shutil.copy(model() / "config.json", tmp_path / "hf")
        (tmp_path / "hf/model.safetensors").symlink_to(out / "model.safetensors")
        argv = ["hf2hf", tmp_path / "hf"]
    elif named == "second of an average":
        argv = ["average", model(), out]
    else:
        assert convert("hf2fsdp", model(), tmp_path / "run").code == 0
        for path in (tmp_path / "run").glob("*.json"):
            path.unlink()
        argv = ["fsdp2hf", tmp_path / "run"]
    base = {"config": out, "config within": out / "sub", "linked": tmp_path / "link"}.get(named)
    if named == "config within":
        shutil.copytree(model(), out / "sub")
    if named == "linked":
        (tmp_path / "link").symlink_to(out)
    options = ["--config", base] if base else []
    before = files(out)
    ran = convert(*argv, out, *options, "--force")
    assert (ran.code, "is read, and is in" in ran.err or "inside each other" in ran.err) == (7, True), ran.err
    assert files(out) == before


@pytest.mark.parametrize("option", ["chat_template", "tokenizer", "family"])
def test_a_file_that_an_option_names_is_not_deleted(model, tmp_path, option):
    out = Path(shutil.copytree(model(), tmp_path / "out"))
    (out / "mine").touch()
    request = Request(out, force=True, named=named_of({option: out / "mine", "dtype": "keep"}))
    with pytest.raises(OutputError, match="mine is read, and is in"):
        check_paths(open_checkpoint(model()), request)


@pytest.mark.parametrize("force", [False, True])
def test_only_checkpoints_are_replaced(model, convert, tmp_path, force):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("precious")
    ran = convert("hf2megatron", model(), tmp_path / "out", *(["--force"] if force else []))
    assert ran.code == 7
    assert ("is no checkpoint" in ran.err) == force
    assert (tmp_path / "out/thesis.tex").read_text() == "precious"
    assert convert("hf2megatron", model(), tmp_path / "m").code == 0
    assert convert("hf2megatron", model(), tmp_path / "m", "--tp", 2, "--force").code == 0


@pytest.mark.parametrize(
    ("mine", "named"),
    [
        (["thesis.txt"], "thesis.txt"),
        (["src/train.py", "src/notes/today.md"], "src/notes/today.md, src/train.py"),
        ([".git/HEAD", ".git/config"], ".git"),
        (["release/mp_rank_00/notes.txt"], "release/mp_rank_00/notes.txt"),
        (["data.json", "a.csv", "b.csv", "c.csv", "tokens.bin"], "a.csv, b.csv, c.csv, data.json and 1 more"),
        (["figure.png", "paper.pdf", "model.py"], "figure.png, model.py, paper.pdf"),
    ],
)
def test_what_no_checkpoint_has_is_not_deleted_with_one(model, convert, tmp_path, mine, named):
    out = tmp_path / "m"
    assert convert("hf2megatron", model(), out).code == 0
    for name in mine:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("precious")
    before = files(out)
    for options in ((), ("-n",)):
        ran = convert("hf2megatron", model(), out, "--force", *options)
        assert (ran.code, f"{out} holds what no checkpoint has: {named}\n" in ran.err) == (7, True), ran.err
    assert files(out) == before
    for name in mine:
        (out / name).unlink()
    assert convert("hf2megatron", model(), out, "--force").code == (7 if ".git/HEAD" in mine else 0)


RUN = """
README.md LICENSE.txt NOTICE USE_POLICY.md .gitattributes config.json generation_config.json vitruvian.json
configuration_deepseek.py modeling_deepseek.py tokenizer.json tokenizer.model tokenizer_config.json vocab.json
merges.txt special_tokens_map.json added_tokens.json chat_template.jinja chat_template.json
additional_chat_templates/tool_use.jinja custom_generate/generate.py preprocessor_config.json
model-00001-of-00002.safetensors
model.safetensors.index.json pytorch_model.bin adapter_config.json adapter_model.safetensors
original/consolidated.00.pth original/params.json training_args.bin trainer_state.json scheduler.pt
optimizer.pt optimizer.bin scheduler.bin rng_state_0.pth random_states_0.pkl scaler.pt latest zero_to_fp32.py
global_step5/mp_rank_00_model_states.pt sampler.bin
global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt optimizer_0/.metadata optimizer_0/__0_0.distcp
pytorch_model_fsdp_0/__1_0.distcp all_results.json eval_results.json train_results.json train_params.yaml
configs/run.yml runs/Jan01_host/events.out.tfevents.1700000000.host.1.0 logs/rank0.log
wandb/run-1/files/anything.xyz slurm-12345.out slurm-12345_0.err nohup.out log.jsonl metrics.csv plot.png
ds_config.json .cache/huggingface/download/x.lock latest_checkpointed_iteration.txt megatron_flags.txt
progress.txt evaluation_results.json family.toml tf_model.h5 .progress .files .start
1/mp_rank_00/distrib_optim.pt zero/model.norm.weight/exp_avg.pt latest_universal
"""
"""What trainers and the Hub leave in a folder."""


def test_what_a_training_leaves_goes_with_a_checkpoint(model, convert, tmp_path):
    from converters.assets.replaceable import foreign

    out = tmp_path / "m"
    assert convert("hf2hf", model(), out).code == 0
    for name in RUN.split():
        if not (out / name).exists():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).touch()
    assert foreign(out) == []


@pytest.mark.parametrize("command", ["hf2hf", "hf2megatron", "hf2fsdp", "hf2neox", "zero2universal"])
def test_what_we_write_can_be_replaced(model, convert, tmp_path, command):
    from converters.assets.replaceable import reason_to_keep

    source = model()
    if command == "zero2universal":
        convert("hf2megatron", source, tmp_path / "run", "--iteration", 3)
        source = add_optimizer(tmp_path / "run", "plain")
    assert convert(command, source, tmp_path / "out").code == 0
    assert reason_to_keep(tmp_path / "out") == ""


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("key", "value"), [("eos_token_id", 211), ("eos_token_id", [1, 10**6]), ("forced_eos_token_id", 211)]
)
def test_an_end_of_text_that_no_model_generates_is_told(model, convert, tmp_path, name, key, value):
    run = Path(shutil.copytree(model(), tmp_path / "hf"))
    settings = json.loads((run / name).read_text()) if (run / name).exists() else {}
    (run / name).write_text(json.dumps(settings | {key: value}))
    last = value if isinstance(value, int) else value[-1]
    ran = convert("hf2hf", run, tmp_path / "out")
    assert (ran.code, f"note: {name} names token {last}, the vocabulary has 211" in ran.err) == (0, True), ran.err
    ran = convert("push", tmp_path / "out", "org/name", "-n")
    assert (ran.code, f"{key} of {name} is {last}, the embedding has 211 rows" in ran.err) == (5, True), ran.err


@pytest.mark.parametrize("keep", [0.5, 0])
def test_a_tokenizer_that_is_cut_off_is_told(model, convert, tmp_path, keep):
    run = Path(shutil.copytree(model(), tmp_path / "hf"))
    path = run / "tokenizer.json"
    worlds.tokenizer("<image>").save(str(path))
    assert "cut off" not in convert("hf2hf", run, tmp_path / "whole").err
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    ran = convert("hf2hf", run, tmp_path / "out")
    assert (ran.code, f"note: {path} is cut off: it does not end as a JSON object does" in ran.err) == (0, True), (
        ran.err
    )


@pytest.mark.parametrize(("name", "there"), [("config.json", False), ("tokenizer_config.json", False), ("x", True)])
def test_code_that_a_config_names_and_that_is_not_there_is_told(model, convert, tmp_path, name, there):
    run = Path(shutil.copytree(model(), tmp_path / "hf"))
    name = "config.json" if there else name
    settings = json.loads((run / name).read_text()) if (run / name).exists() else {}
    named = {"AutoModel": "there.One", "AutoTokenizer": [None, "mine.Two"], "AutoConfig": "org/name--far.Three"}
    (run / name).write_text(json.dumps(settings | {"auto_map": named}))
    for code in ("there.py", *(["mine.py"] if there else [])):
        (run / code).write_text("")
    ran = convert("hf2hf", run, tmp_path / "out")
    message = f"auto_map of {name} names code in 'mine.py', which is not there"
    assert (ran.code, message in ran.err, "there.py" in ran.err or "far" in ran.err) == (0, not there, False), ran.err
    assert (message in convert("push", tmp_path / "out", "org/name", "-n").err) != there
    assert (tmp_path / "out/there.py").is_file()


@pytest.mark.parametrize("options", [(), ("--verbatim",)])
def test_a_model_with_code_of_its_own_is_told(model, convert, tmp_path, options):
    """Its model type has a table, and with trust_remote_code transformers would run the other code."""
    run = Path(shutil.copytree(model(), tmp_path / "hf"))
    config = json.loads((run / "config.json").read_text())
    named = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel", "AutoModel": "org/name--far.Base"}
    (run / "config.json").write_text(json.dumps(config | {"auto_map": named}))
    (run / "mine.py").write_text("")
    for command in ("hf2hf", "hf2megatron"):
        ran = convert(command, run, tmp_path / command, *options)
        told = f"auto_map of {run / 'config.json'} names mine.MyModel, org/name--far.Base, which trust_remote_code runs"
        assert ran.err.count(told) == (not options), ran.err
        assert ("transformers' LlamaForCausalLM" in ran.err) == (not options)
    assert convert("hf2hf", model(), tmp_path / "plain").err == ""


def test_a_training_is_not_replaced(model, convert, tmp_path):
    """Neither one that began in an output of ours, nor one of another program, whose `latest` names its newest."""
    run = tmp_path / "m"
    argv = ("hf2megatron", model(), run, "--force")
    assert convert(*argv).code == 0
    shutil.copytree(run / "release", run / "iter_0000100")
    ran = convert(*argv)
    assert (ran.code, "holds 2 checkpoints: iter_0000100, release" in ran.err) == (7, True)
    assert convert("hf2fsdp", model(), tmp_path / "run/global_step2").code == 0
    shutil.copytree(tmp_path / "run/global_step2", tmp_path / "run/global_step4")
    (tmp_path / "run/latest").write_text("global_step4")
    before = files(tmp_path / "run")
    ran = convert("hf2megatron", model(), tmp_path / "run", "--force")
    assert (ran.code, "is no checkpoint" in ran.err) == (7, True)
    assert files(tmp_path / "run") == before
    ran = convert("digest", tmp_path / "run")
    assert (ran.code, f"hint: name one: {tmp_path}/run/global_step4" in ran.err) == (3, True)


GOLDEN = Path(__file__).parents[1] / "golden"


def _put(model, convert, what, place):
    """A checkpoint of some kind in a folder."""
    if "/" in what:
        shutil.copytree(GOLDEN / what, place)
    elif what == "universal":
        run = place.parents[1] / "run"
        assert convert("hf2megatron", model(), run, "--iteration", 3).code == 0
        assert convert("zero2universal", add_optimizer(run, "plain"), place).code == 0
    elif "2" in what:
        assert convert(what, model(), place).code == 0
    else:
        shutil.copytree(model(), place)
    if what == "adapter":
        (place / "config.json").unlink()
        (place / "model.safetensors").rename(place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("out", "inside", "name"),
    [
        ("hf2hf", "huggingface", "sft"),
        ("hf2hf", "huggingface", "runs/best/of/all"),
        ("hf2hf", "huggingface", "checkpoint-3"),
        ("hf2hf", "adapter", "lora"),
        ("hf2hf", "hf2megatron", "megatron"),
        ("hf2hf", "hf2fsdp", "actor"),
        ("hf2hf", "neox/llama-fp32-tp2", "neox"),
        ("hf2hf", "universal", "universal"),
        ("hf2hf", "nanotron/llama_tp2", "nanotron"),
        ("hf2hf", "maxtext/gemma2/checkpoint", "items"),
        ("hf2hf", "mistral/dense", "mistral"),
        ("hf2megatron", "huggingface", "sft"),
        ("hf2megatron", "huggingface", "release/sft"),
        ("hf2neox", "huggingface", "global_step0/sft"),
        ("hf2fsdp", "hf2fsdp", "ema"),
    ],
)
def test_a_checkpoint_inside_another_is_not_deleted_with_it(model, convert, tmp_path, out, inside, name):
    """Whatever its folder is called, and however deep it is."""
    place = tmp_path / "m"
    assert convert(out, model(), place).code == 0
    _put(model, convert, inside, place / name)
    before = files(place)
    ran = convert(out, model(), place, "--force")
    assert (ran.code, f"{place} holds another checkpoint: {name}\n" in ran.err) == (7, True), ran.err
    assert files(place) == before
    shutil.rmtree(place / name)
    assert convert(out, model(), place, "--force").code == 0


def test_all_checkpoints_inside_are_counted_and_links_are_not(model, convert, tmp_path):
    out = Path(shutil.copytree(model(), tmp_path / "m"))
    (out / "link").symlink_to(model())
    for name in "abcde":
        shutil.copytree(model(), out / name)
    ran = convert("hf2hf", model(), out, "--force")
    assert (ran.code, f"{out} holds 5 other checkpoints: a, b, c, d and 1 more\n" in ran.err) == (7, True), ran.err


@pytest.mark.parametrize(
    "file",
    ["flax_model.msgpack", "tf_model.h5", "diffusion_pytorch_model.safetensors", "consolidated.00.pth", "m-Q4_K_M.gguf",
     "lit_model.pth", "last.ckpt", "model.pt", "hf_model_0001_0.pt", "model.onnx", "model-00001-of-00002.safetensors",
     "pytorch_model-00001-of-00002.bin", "adapter_model.safetensors", "model.fp16.safetensors"],
)  # fmt: skip
@pytest.mark.parametrize("folder", ["sft", "wandb/deep/sft"])
def test_a_model_that_no_reader_knows_is_not_deleted_with_another(model, convert, tmp_path, file, folder):
    out = Path(shutil.copytree(model(), tmp_path / "m"))
    (out / folder).mkdir(parents=True)
    shutil.copy(model() / "model.safetensors", out / folder / file)
    refused(convert("hf2hf", model(), out, "--force"), 7, f"holds another checkpoint: {folder}")
    assert (out / folder / file).is_file()


def test_texts_beside_the_events_of_a_training_are_kept(model, convert, tmp_path):
    out = Path(shutil.copytree(model(), tmp_path / "m"))
    (out / "runs/Nov28_host").mkdir(parents=True)
    (out / "runs/Nov28_host/events.out.tfevents.1.host").touch()
    (out / "runs/thesis.txt").touch()
    refused(convert("hf2hf", model(), out, "--force"), 7, "holds what no checkpoint has: runs/thesis.txt")
    (out / "runs/thesis.txt").unlink()
    assert convert("hf2hf", model(), out, "--force").code == 0


def test_weights_in_the_folder_for_the_way_back_are_a_model(model, convert, tmp_path):
    out = tmp_path / "m"
    assert convert("hf2megatron", model(), out).code == 0
    shutil.copy(model() / "model.safetensors", out / "huggingface")
    refused(convert("hf2megatron", model(), out, "--force"), 7, "holds another checkpoint: huggingface")


@pytest.mark.parametrize("saved_at_once", [True, False])
def test_the_shards_of_the_trainer_are_those_of_its_model(model, tmp_path, saved_at_once):
    """As `transformers` saves both into one folder, for which its `trainer_state.json` stands."""
    out = Path(shutil.copytree(model(), tmp_path / "checkpoint-5"))
    (out / "latest").write_text("global_step5")
    shards = ("global_step5/mp_rank_00_model_states.pt", "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata")
    for name in (*shards, *(["trainer_state.json"] if saved_at_once else [])):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).touch()
    parts = sorted(Path(name).parent.name for name in shards)
    assert others_inside(out) == ([] if saved_at_once else parts)


def test_no_part_of_a_checkpoint_is_another_one():
    """Of the programs whose files are here."""
    nested = ("maxtext/*/checkpoint", "nanotron/*", "nanotron/optimizer/*", "neox/*", "mds/*", "bridge/*", "verl/*/*",
              "megatron_lm/*/*", "megatron_llm/*/trained", "megatron_0192/*", "old_torch/llama/*", "olmo_core/*/step*",
              "peft/*/checkpoint", "torchtitan/*/step-1")  # fmt: skip
    for pattern in nested:
        checkpoints = [*filter(is_known, GOLDEN.glob(pattern))]
        assert checkpoints, pattern
        assert {path: others for path in checkpoints if (others := others_inside(path))} == {}


def test_an_output_that_came_into_being_meanwhile_is_kept(model, convert, tmp_path, monkeypatch):
    from converters import convert as module

    finish = module.finish_files

    def late(*args):
        (tmp_path / "out").mkdir()
        (tmp_path / "out/thesis.tex").write_text("precious")
        finish(*args)

    monkeypatch.setattr(module, "finish_files", late)
    assert convert("hf2megatron", model(), tmp_path / "out").code == 7
    assert (tmp_path / "out/thesis.tex").read_text() == "precious"


def test_a_link_to_the_output_stays_a_link(model, convert, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    assert convert("hf2megatron", model(), tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert convert("verify", tmp_path / "scratch", model()).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "scratch"]


@pytest.mark.parametrize("out", [".", "/", "x" * 300])
def test_places_that_cannot_be_an_output(model, convert, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    assert convert("hf2megatron", model(), out).code == 7
    assert list(tmp_path.iterdir()) == []


def test_a_refused_cast_leaves_room_for_its_hint(model, convert, tmp_path):
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    shutil.copytree(model(), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    ran = convert("hf2megatron", source, tmp_path / "out", "--dtype", "fp16")
    assert ran.code == 5
    assert "model.norm.weight holds 1e+06, which is too large for F16" in ran.err
    assert convert("hf2megatron", source, tmp_path / "out", "--dtype", "bf16").code == 0


def test_settings_are_verified_too(model, convert, tmp_path):
    convert("hf2megatron", model(), tmp_path / "m")
    convert("megatron2hf", tmp_path / "m", tmp_path / "h")
    assert convert("verify", tmp_path / "h").code == 0
    config = tmp_path / "h/config.json"
    config.write_text(config.read_text().replace("10000.0", "77777.0"))
    for argv in ([tmp_path / "h"], [tmp_path / "h", tmp_path / "m"]):
        ran = convert("verify", *argv)
        assert ran.code == 6
        assert "rope_theta: 77777.0 | 10000.0" in ran.err


def test_a_vocabulary_that_contradicts_the_checkpoint_is_refused(model, convert, tmp_path):
    convert("hf2megatron", model(), tmp_path / "m")
    ran = convert("megatron2hf", tmp_path / "m", tmp_path / "h", "--vocab-size", 100)
    assert ran.code == 5
    assert "--vocab-size 100 contradicts" in ran.err
    assert "vocabulary is 211" in ran.err
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "h", "--vocab-size", 211).code == 0


def test_virtual_chunks_need_a_pipeline(model, convert, tmp_path):
    ran = convert("hf2megatron", model(), tmp_path / "m", "--vpp", 2)
    assert ran.code == 5
    assert "virtual pipeline chunks need a pipeline" in ran.err


def test_an_adapter_is_not_not_carried_in_silence(model, convert, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(model(), source)
    (source / "adapter_config.json").write_text("{}")
    assert convert("hf2megatron", source, tmp_path / "m").code == 4


def test_optimizer_and_padding_that_stay_behind_are_said(model, convert, tmp_path):
    import torch

    convert("hf2megatron", model(), tmp_path / "m", "--iteration", 9)
    path = tmp_path / "m/iter_0000009/mp_rank_00/model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    torch.save(stored | {"optimizer": {"state": {}}, "rng_state": [1]}, path)
    for argv in (
        ["inspect", tmp_path / "m"],
        ["plan", tmp_path / "m", "--to", "megatron"],
        ["reshard", tmp_path / "m", tmp_path / "r"],
    ):
        ran = convert(*argv)
        assert "only the weights are converted, not optimizer, rng_state" in ran.out + ran.err
    assert "45 rows of vocabulary padding" in convert("plan", tmp_path / "m", "--to", "huggingface").out
    flags = (tmp_path / "r/megatron_flags.txt").read_text()
    assert "--no-load-optim" in flags


def test_an_iteration_moved_away_from_its_run_stands_alone(model, convert, tmp_path):
    convert("hf2megatron", model(), tmp_path / "m", "--iteration", 9)
    shutil.copytree(tmp_path / "m/iter_0000009", tmp_path / "away/iter_0000009")
    assert convert("megatron2hf", tmp_path / "away/iter_0000009", tmp_path / "away/h", "--config", model()).code == 0
    assert files(tmp_path / "away/h") == files(model())
    ran = convert("inspect", tmp_path / "away")
    assert ran.code == 3
    assert "iter_0000009" in ran.err


def test_a_closed_pipe_is_no_error(model):
    code = "import sys; sys.argv[0] = 'convert'; from converters.cli import main; main()"
    command = f'{sys.executable} -c "{code}" plan {model()} --to megatron --blocks | head -1'
    root = Path(__file__).parents[2]
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=root, env=os.environ, check=False)
    assert ran.stdout.startswith("read ")
    assert ran.stderr == ""


def test_json_is_json_with_every_option(model, convert):
    facts = json.loads(convert("plan", model(), "--to", "megatron", "--json", "--blocks").out)
    assert len(facts["list"]) > 39


def test_a_pointer_of_git_lfs_is_named(model, convert, tmp_path):
    hf = shutil.copytree(model(), tmp_path / "hf")
    (hf / "model.safetensors").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064}\nsize 9\n")
    ran = convert("inspect", hf)
    assert (ran.code, ran.err.partition("hint: ")[2]) == (3, "it is a pointer of Git LFS: git lfs pull\n")


def test_names_without_the_prefix_of_the_model(model, convert, tmp_path):
    """So sentence-transformers saves an embedding model, under the class of the causal one."""
    hf = shutil.copytree(model("llama-tied"), tmp_path / "hf")
    weights = load_file(hf / "model.safetensors")
    save_file({key.removeprefix("model."): tensor for key, tensor in weights.items()}, hf / "model.safetensors")
    ran = convert("hf2hf", hf, tmp_path / "out")
    assert (ran.code, "hint: the names lack `model.`" in ran.err) == (3, True)
    assert convert("hf2hf", hf, tmp_path / "out", "--verbatim").code == 0
    weights.popitem()
    save_file(weights, hf / "model.safetensors")
    assert "hint:" not in convert("inspect", hf).err


def test_a_config_that_gives_a_key_twice_is_refused(model, convert, tmp_path):
    """transformers takes the last of them, and says nothing."""
    source = tmp_path / "source"
    shutil.copytree(model(), source)
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace("{", '{"rms_norm_eps": 0.5,', 1))
    ran = convert("hf2megatron", source, tmp_path / "out")
    assert ran.code == 3
    assert "config.json is not valid JSON: 'rms_norm_eps' appears twice" in ran.err


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_config_that_transformers_cannot_read_is_refused(model, convert, tmp_path, encoding):
    source = tmp_path / "source"
    shutil.copytree(model(), source)
    config = (source / "config.json").read_text()
    (source / "config.json").write_bytes(config.encode(encoding))
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 3
    assert "config.json is not valid JSON" in ran.err


@pytest.mark.parametrize("command", ["hf2hf", "hf2megatron"])
def test_weights_that_are_integers_are_refused(model, convert, tmp_path, command):
    """A header that calls a norm I32; transformers would load what the bytes are as integers."""
    source = tmp_path / "source"
    shutil.copytree(model(), source)
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].view("int32")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    ran = convert(command, source, tmp_path / "out")
    assert ran.code == 4
    assert "model.norm.weight" in ran.err
    assert "is I32, and the weights of a llama are floating point numbers" in ran.err
    if command == "hf2hf":
        assert convert(command, source, tmp_path / "out", "--verbatim").code == 0


def test_a_mistral_whose_layer_types_say_that_none_has_a_window_is_refused(model, convert, tmp_path):
    """AutoConfig takes a Mistral with `layer_types` for a Ministral, MistralForCausalLM does not look at them."""
    source = tmp_path / "source"
    shutil.copytree(model("mistral"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"layer_types": ["full_attention"] * 4}))
    ran = convert("hf2megatron", source, tmp_path / "out")
    assert ran.code == 3
    assert "layer_types, by which no layer has a window, and sliding_window = 8 for all of them" in ran.err
    (source / "config.json").write_text(
        json.dumps(config | {"layer_types": ["full_attention"] * 4, "sliding_window": None})
    )
    assert convert("hf2megatron", source, tmp_path / "out").code == 0


@pytest.mark.parametrize("setting", ["sliding_window=8", "experts=4", "nope_layers=[1]", "rotary_fraction=0.5"])
@pytest.mark.parametrize("command", ["hf2hf", "hf2fsdp"])
def test_a_setting_that_the_family_has_not_is_refused(model, convert, tmp_path, command, setting):
    """Not dropped, with the model carried under its own names."""
    ran = convert(command, model(), tmp_path / "out", "--set", setting)
    assert ran.code == 4
    assert f"--set {setting.partition('=')[0]} would have no effect" in ran.err


def test_verify_names_the_setting_with_which_a_table_describes_the_model_no_longer(model, convert, tmp_path):
    assert convert("hf2hf", model(), tmp_path / "out").code == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    (tmp_path / "out/config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    ran = convert("verify", tmp_path / "out")
    assert ran.code == 6
    assert "a table described when vitruvian.json was written, and none does now" in ran.err
    assert "hidden_act = 'gelu' is not supported" in ran.err


def test_a_source_that_is_not_what_its_manifest_says(model, convert, tmp_path):
    """A bit of a weight: sound to every reader, and seen before anything is published."""
    out = tmp_path / "hf"
    assert convert("hf2hf", model("llama"), out).code == 0
    content = bytearray((out / "model.safetensors").read_bytes())
    content[-9] ^= 64
    (out / "model.safetensors").write_bytes(content)
    ran = convert("hf2megatron", out, tmp_path / "run")
    assert (ran.code, "1 tensor differs from its vitruvian.json" in ran.err) == (6, True), ran.err
    assert not (tmp_path / "run").exists()


def test_a_manifest_says_what_it_was_made_of(model, convert, tmp_path):
    assert convert("hf2megatron", model(), tmp_path / "run", "--tp", 2, "--pp", 2).code == 0
    assert convert("megatron2hf", tmp_path / "run", tmp_path / "out").code == 0
    source = json.loads((tmp_path / "out/vitruvian.json").read_text())["source"]
    assert (source["format"], source["topology"]["tp"], source["topology"]["pp"]) == ("megatron", 2, 2)


@pytest.mark.parametrize("what", ["digest", "blake3", "name"])
def test_a_manifest_that_contradicts_itself(model, convert, tmp_path, what):
    """Its line of the whole and those of the tensors are of one model, or somebody has edited one of them."""
    out = tmp_path / "out"
    assert convert("hf2fsdp", model(), out).code == 0
    manifest = json.loads((out / "vitruvian.json").read_text())
    first = min(manifest["tensors"])
    if what == "digest":
        manifest["digest"] = manifest["digest"][::-1]
    elif what == "blake3":
        manifest["tensors"][first]["blake3"] = manifest["digest"]
    else:
        manifest["tensors"]["another"] = manifest["tensors"].pop(first)
    (out / "vitruvian.json").write_text(json.dumps(manifest))
    for argv in (["verify", out], ["fsdp2hf", out, tmp_path / "hf"]):
        ran = convert(*argv)
        assert (ran.code, "vitruvian.json contradicts itself: its digest '" in ran.err) == (3, True), ran.err


def test_weights_in_files_that_are_not_read_are_told(model, convert, tmp_path):
    """They may be tensors of the model, with other values."""
    source = shutil.copytree(model("llama"), tmp_path / "source")
    shutil.copy(source / "model.safetensors", source / "model-00001-of-00002.safetensors")
    ran = convert("hf2hf", source, tmp_path / "out", "-n")
    message = f"in {source} are not read, nor does transformers: the model is in other files"
    assert (ran.code, f"model-00001-of-00002.safetensors {message}" in ran.out + ran.err) == (0, True), ran


def test_the_model_in_other_forms_is_named(model, convert, tmp_path):
    source = shutil.copytree(model("llama"), tmp_path / "source")
    for name in ("model-Q4_K_M.gguf", "tf_model.h5"):
        (source / name).write_bytes(b"weights")
    ran = convert("hf2hf", source, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert f"model-Q4_K_M.gguf, tf_model.h5 in {source} are not read" in ran.err
    assert not (tmp_path / "out/model-Q4_K_M.gguf").exists()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_config_that_is_no_file_is_named(convert, tmp_path, make):
    """Not the index, which is there."""
    (tmp_path / "hf").mkdir()
    for name in ("model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        (tmp_path / "hf" / name).write_bytes(b"weights")
    make(tmp_path / "hf/config.json")
    refused(convert("hf2hf", tmp_path / "hf", tmp_path / "out"), 3, "hf/config.json is not a regular file")


@pytest.mark.parametrize("name", ["model-{:05}-of-00002.safetensors", "pytorch_model-{:05}-of-00002.bin"])
def test_shards_without_their_index(convert, tmp_path, name):
    (tmp_path / "hf").mkdir()
    for number in (1, 2):
        (tmp_path / "hf" / name.format(number)).write_bytes(b"weights")
    (tmp_path / "hf/config.json").write_text("{}")
    index = name.replace("-{:05}-of-00002", "") + ".index.json"
    refused(convert("hf2hf", tmp_path / "hf", tmp_path / "out"), 3, f"shards of a model without their index, {index}")


@pytest.mark.parametrize(
    ("key", "value", "content"),
    [
        ("configuration_files", ["config.4.0.json"], "settings"),
        ("transformers_weights", "other.safetensors", "weights"),
    ],
)
def test_a_config_that_names_other_files_than_are_read_is_refused(model, convert, tmp_path, key, value, content):
    """transformers 5.23 reads those instead; config.json and model.safetensors were converted, exit code 0."""
    shutil.copytree(model(), tmp_path / "src")
    config = json.loads((tmp_path / "src/config.json").read_text())
    (tmp_path / "src/config.json").write_text(json.dumps(config | {key: value}))
    for command in ("hf2megatron", "hf2hf"):
        refused(convert(command, tmp_path / "src", tmp_path / "out"), 4, f"says {key} = ", f"reads its {content} there")
    (tmp_path / "src/config.json").write_text(json.dumps(config | {key: [] if content == "settings" else None}))
    assert convert("hf2hf", tmp_path / "src", tmp_path / "out").code == 0


def changed_config(source: Path, to: Path, **changes) -> Path:
    """A folder with the config.json of `source`, but for some keys."""
    to.mkdir()
    (to / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | changes))
    return to


@pytest.fixture
def trained(model, convert, tmp_path):
    """A checkpoint of a training, with the config.json that the trainer left beside its weights."""
    assert convert("hf2fsdp", model(), tmp_path / "checkpoint").code == 0
    return tmp_path / "checkpoint"


ROPE = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
"""Another base of the rotary embedding than the tiny models have."""
SETS = "leave --config out, correct one of them, or decide with --set NAME=VALUE"


@pytest.mark.parametrize(
    ("changes", "said", "ways"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}, "heads: 8 | 4; kv_heads: 4 | 2", SETS),
        (ROPE, "rope_theta: ", SETS),
        ({"rms_norm_eps": 1e-3}, "norm_epsilon: 1e-06 | 0.001", SETS),
        ({"hidden_act": "gelu"}, "hidden_act: 'silu' | 'gelu'", "leave --config out, or correct one of them\n"),
    ],
)
def test_a_config_that_contradicts_the_one_beside_the_weights_is_refused(
    model, convert, tmp_path, trained, changes, said, ways
):
    """Its shapes are the same: one of the two was taken without a word, and logits were those of another model."""
    base = changed_config(model(), tmp_path / "base", **changes)
    for command, source in (("hf2hf", model()), ("hf2megatron", model()), ("fsdp2hf", trained)):
        ran = convert(command, source, tmp_path / "out", "--config", base)
        said_of = "base/config.json contradict each other ("
        refused(ran, 5, said_of, said, ways)


def test_what_the_user_set_is_in_neither_config(model, convert, tmp_path, trained):
    base = changed_config(model(), tmp_path / "base", **ROPE)
    assert convert("fsdp2hf", trained, tmp_path / "out", "--config", base, "--set", "rope_theta=500000").code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"]["rope_theta"] == 5e5


def test_what_no_logit_depends_on_may_differ_from_the_config_beside_the_weights(model, convert, tmp_path, trained):
    """As trainers change it: dtype, cache, names and versions, the greatest length, tokens."""
    idle = {
        "torch_dtype": "float16", "use_cache": False, "_name_or_path": "elsewhere", "transformers_version": "4.40.0",
        "eos_token_id": 7,
    }  # fmt: skip
    base = changed_config(model(), tmp_path / "base", **idle)
    assert convert("hf2hf", model(), tmp_path / "copy", "--config", base, "--verbatim").code == 0
    longer = changed_config(model(), tmp_path / "longer", **idle, max_position_embeddings=4096)
    assert convert("fsdp2hf", trained, tmp_path / "out", "--config", longer).code == 0


def test_two_configs_of_a_model_without_a_table_are_compared_in_the_keys_of_both(model, convert, tmp_path, trained):
    same = changed_config(model(), tmp_path / "same")
    config = json.loads((same / "config.json").read_text())
    del config["rms_norm_eps"]
    (same / "config.json").write_text(json.dumps(config | {"a_default": 3}))
    assert convert("fsdp2hf", trained, tmp_path / "out", "--config", same, "--verbatim").code == 0
    other = changed_config(model(), tmp_path / "other", **ROPE)
    ran = convert("fsdp2hf", trained, tmp_path / "no", "--config", other, "--verbatim")
    refused(ran, 5, "contradict each other (checkpoint | other): rope_parameters.rope_theta: 10000.0 | 500000.0")


def test_a_longest_text_that_a_rotary_scaling_computes_with(model, convert, tmp_path):
    """Without `original_max_position_embeddings` it is that length too."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    own = changed_config(model(), tmp_path / "own", rope_parameters={"rope_theta": 1e4, **scaling})
    shutil.copy(model() / "model.safetensors", own)
    assert convert("hf2fsdp", own, tmp_path / "checkpoint").code == 0
    length = json.loads((own / "config.json").read_text())["max_position_embeddings"]
    base = changed_config(own, tmp_path / "base", max_position_embeddings=4 * length)
    for command, source in (("fsdp2hf", tmp_path / "checkpoint"), ("hf2hf", own)):
        ran = convert(command, source, tmp_path / "no", "--config", base)
        refused(ran, 5, "contradict each other", "rope_scaling: ", f"original_max_position_embeddings': {length}")


@pytest.mark.parametrize("options", [[], ["--verbatim"]])
def test_a_key_that_transformers_reads_of_every_model_and_that_only_one_config_has(
    model, convert, tmp_path, trained, options
):
    """The class of no Llama knows the key, and the cache of `generate` reads it; then no table describes the model."""
    base = changed_config(model(), tmp_path / "base", sliding_window=8)
    ran = convert("fsdp2hf", trained, tmp_path / "no", "--config", base, *options)
    refused(ran, 5, "contradict each other (checkpoint | base): sliding_window: None | 8")


@pytest.mark.parametrize("options", [[], ["--verbatim"]])
def test_a_config_of_another_type_that_no_table_describes(model, convert, tmp_path, trained, options):
    config = json.loads((trained / "config.json").read_text())
    (trained / "config.json").write_text(json.dumps(config | {"model_type": "stablelm"}))
    ran = convert("fsdp2hf", trained, tmp_path / "out", "--config", model(), *options)
    refused(ran, 5, f"contradict each other (checkpoint | {model().name}): model_type: 'stablelm' | 'llama'")


@pytest.mark.parametrize("length", [3, 5])
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_layer_types_of_another_number_of_layers(model, convert, tmp_path, name, length):
    """transformers 5.23 loads no such model: "`num_hidden_layers` (4) must be equal to the number of `layer_types`"."""
    types = json.loads((model(name) / "config.json").read_text())["layer_types"]
    base = changed_config(model(name), tmp_path / "base", layer_types=(types * 2)[:length])
    source = shutil.copytree(model(name), tmp_path / "source")
    shutil.copy(base / "config.json", source)
    said = f"num_hidden_layers = 4, and layer_types of {length} layers"
    for argv in ((source, tmp_path / "out"), (model(name), tmp_path / "out", "--config", base)):
        refused(convert("hf2hf", *argv), 3, said)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("exaone_moe", "mlp_layer_types"),
        ("deepseek_v32", "mlp_layer_types"),
        ("zamba", "layers_block_type"),
        ("laguna", "num_attention_heads_per_layer"),
    ],
)
def test_a_list_of_another_number_of_layers(tmp_path, kind, key, change):
    config = {**transformers.CONFIG_MAPPING[kind](num_hidden_layers=6).to_dict(), "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path)[key] == config[key]
    config[key] = (config[key] * 2)[: 6 + change]
    with pytest.raises(StrictDataclassClassValidationError, match=r"must (be )?equal (to the num|num_hidden_layers)"):
        transformers.CONFIG_MAPPING[kind].from_dict(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=f"num_hidden_layers = 6, and {key} of {6 + change} layers"):
        read_config(tmp_path)


def test_a_list_that_tells_the_number_of_layers(tmp_path):
    """Nemotron-H has as many layers as the list has, whatever `num_hidden_layers` is."""
    config = transformers.NemotronHConfig().to_dict() | {"num_hidden_layers": 52}
    assert transformers.NemotronHConfig(**config).num_hidden_layers == len(config["layers_block_type"]) == 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(read_config(tmp_path)["layers_block_type"]) == 4
