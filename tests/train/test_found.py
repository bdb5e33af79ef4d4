"""What a stranger found: loss of work, settings that did nothing, and numbers that were silently others."""

from __future__ import annotations

import fcntl
import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from converters.assets.chat_template import load_template
from formats.errors import OutputError, RefusedError, SourceError, UsageError, VerificationError
from formats.torch_files.saves import RECORD
from tests.faults.dcp_tools import as_trained, weights
from tests.faults.dcp_tools import save as save_state
from tests.train.test_settings import write
from train.data.tokens.documents import open_documents
from train.run.checkpoint import Progress, Saver, check_same, newest, ours, read_progress, require_places
from train.run.export import check_export
from train.run.prepare import _start
from train.settings.config import Save
from train.settings.config_file import load_config
from train.settings.schedule import check_schedule
from train.start.start_weights import folder_of
from train.tools.eval_saved import Place, load_weights

PLAIN = "model: {path: m}\ndata: {train: P, seq_length: 8}\nbatch: {size: 4}\noptim: {lr: 0.1}\nsave: {path: s}\n"


@pytest.fixture
def save(tmp_path):
    """A save folder with checkpoints of steps 2 and 4."""
    for step in (2, 4):
        folder = tmp_path / f"save/global_step{step}"
        folder.mkdir(parents=True)
        (folder / ".progress").write_text(json.dumps(vars(Progress(step, 0, 4, 1, "rows", 9, 24))))
    (tmp_path / "save/latest").write_text("global_step4")
    return tmp_path / "save"


def test_a_lost_latest_does_not_start_over(save):
    assert newest(save).name == "global_step4"
    for text in (None, "", "backup"):
        (save / "backup").mkdir(exist_ok=True)
        (save / "latest").unlink(missing_ok=True)
        if text is not None:
            (save / "latest").write_text(text)
        with pytest.raises(SourceError, match="the last is global_step4"):
            newest(save)
    (save / "latest").write_text("global_step4")
    (save / "global_step4/.progress").unlink()
    with pytest.raises(SourceError, match="the last is global_step2"):
        newest(save)
    for path in save.glob("global_step*"):
        shutil.rmtree(path)
    with pytest.raises(SourceError, match="names global_step4, which is not there"):
        newest(save)


def test_a_damaged_note_ends_no_training_that_saves(save):
    damaged, latest = save / "global_step3", save / "global_step4"
    damaged.mkdir()
    (damaged / ".progress").write_text("{")
    Saver(Save(path=save, keep=1), {}, None)._forget(latest, read_progress(latest))
    assert sorted(save.glob("global_step*")) == [damaged, latest]


def test_nobody_elses_checkpoint_is_replaced(save, tmp_path):
    (save / "global_step6").mkdir()
    (save / "global_step7_good").mkdir()
    require_places(save, Progress(6, 0, 4, 1, "rows", 9, 24), 10)
    with pytest.raises(OutputError, match="global_step6 is not a checkpoint of this run"):
        require_places(save, Progress(0, 0, 4, 1, "rows", 9, 24), 6)
    (save / "global_step6").rmdir()
    (save / "global_step6").symlink_to(save / "global_step4")
    with pytest.raises(OutputError, match="global_step6 is not a checkpoint"):
        require_places(save, Progress(0, 0, 4, 1, "rows", 9, 24), 6)
    (save / "global_step6").unlink()
    with pytest.raises(OutputError, match="global_step4 is not a checkpoint of this run"):  # but of one that began at 0
        require_places(save, Progress(0, 3, 4, 1, "rows", 0, 24), 6)
    shutil.copytree(save / "global_step2", save / "global_step2_good")
    assert [path.name for path in ours(save)] == ["global_step2", "global_step4"]
    for step in (30, 100, 9, 21, 1000, 8, 11):
        shutil.copytree(save / "global_step2", save / f"global_step{step}")
    assert [int(path.name[11:]) for path in ours(save)] == [2, 4, 8, 9, 11, 21, 30, 100, 1000]


def test_where_a_run_begins(save, settings, tmp_path):
    config, _ = load_config(settings(), ["--save.path", str(save)])
    afresh, _ = load_config(settings(), ["--save.path", str(save), "--init", "finetune"])
    latest, progress = save / "global_step4", read_progress(save / "global_step4")
    fresh = replace(progress, step=0, tokens=0)
    behind = replace(fresh, offset=4, seed=7)  # the next phase: other rows, another seed
    assert _start(config, fresh) == _start(afresh, fresh) == (latest, progress)
    assert _start(config, behind) == (latest, behind)
    assert _start(afresh, behind) == (None, behind)
    for other, message in (
        (replace(fresh, offset=3), "iteration_offset: 0, now 3"),
        (replace(fresh, seed=7), "seed: 1, now 7"),
        (replace(behind, engine="deepspeed"), "written by the engine fsdp"),
    ):
        with pytest.raises(RefusedError, match=message):
            _start(config, other)
    nothing = {"save": {"path": str(tmp_path / "none")}}
    assert _start(load_config(settings(**nothing))[0], fresh) == (None, fresh)
    with pytest.raises(RefusedError, match="no checkpoint to resume from"):
        _start(load_config(settings(**nothing, init="resume"))[0], fresh)


def test_what_changes_the_next_rows_is_refused(tmp_path):
    progress = Progress(2, 0, 16, 1, "rows", 9, 32)
    check_same(progress, replace(progress, step=0, tokens=0, samples=64), tmp_path)  # no step was short
    for name in ("offset", "size", "seed", "rows"):
        with pytest.raises(RefusedError, match=f"{getattr(progress, name)}, now other"):
            check_same(progress, replace(progress, **{name: "other"}), tmp_path)
    check_same(progress, replace(progress, sidecars="new"), tmp_path)  # a save of an older version does not record them
    with pytest.raises(RefusedError, match=r"the sidecars \(PREFIX.json\) and role files .*: new, now other"):
        check_same(replace(progress, sidecars="new"), replace(progress, sidecars="other"), tmp_path)


def test_more_epochs_behind_a_short_step_are_refused(tmp_path):
    short, longer = Progress(2, 0, 16, 1, "rows", 9, 19), Progress(0, 0, 16, 1, "rows", 0, 38)
    check_same(Progress(1, 0, 16, 1, "rows", 9, 19), longer, tmp_path)  # no step was short yet
    with pytest.raises(RefusedError, match=r"the last step of which was short: 19, now 38"):
        check_same(short, longer, tmp_path)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (PLAIN + "train_batch_size: 8\n", [], r"batch\.size says 4, train_batch_size says 8"),
        (PLAIN + '"optimizer": {"type": "Adam", "params": {"lr": 5.0e-6}}\n', [], r"optim\.lr says 0\.1"),
        (PLAIN + '"optimizer": {"type": "Adam", "params": {"lr": "abc"}}\n', [], "is not a number"),
        (PLAIN + "optim: {lr: 5.0}\n", [], "optim is given twice, in lines 4 and 6"),
        (PLAIN + "lora:\n", [], "lora is empty"),
        (PLAIN, ["--save.keep", "true"], "keep is true, which is no value for it"),
        (PLAIN, ["--save.path", "s3://b/run"], "s3:/b/run is an address, and only a path of this machine is taken"),
        (PLAIN, ["--data.train", "[gcs://b/P]"], "gcs:/b/P is an address, and only a path of this machine is taken"),
        (PLAIN, ["--optim.lr", ".inf"], r"optim\.lr"),
        (PLAIN, ["--optim.betas", "[0.9, 1]"], r"optim\.betas"),
        (PLAIN, ["--seed", "-1"], "seed"),
    ],
)
def test_settings_that_contradict_or_cannot_be(tmp_path, text, options, message):
    with pytest.raises(UsageError, match=message):
        load_config(write(tmp_path, text), options)


def test_settings_say_what_they_say(tmp_path):
    config, _ = load_config(
        write(tmp_path, PLAIN + "SFT_ENABLED: 'false'\nloss_mask_pairs: false\n"), ["--data.validation.my-set", "Q"]
    )
    assert config.data.loss == "all"
    assert list(config.data.validation) == ["my-set"]
    config, _ = load_config(write(tmp_path, PLAIN), ["--schedule.end", "6", "--steps.iteration_offset", "1000"])
    with pytest.raises(UsageError, match=r"schedule\.end 6 does not come after global step 1000"):
        check_schedule(config, 6)


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_save_folder_is_safe(settings, run, model, tmp_path):
    config = settings(steps={"train_iters": 2})
    (tmp_path / "save").mkdir()
    with (tmp_path / "save/.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        taken = run(config, ranks=2)
    assert (taken.code, "another process is writing" in taken.out) == (7, True), taken.out
    assert (taken.out.count("error:"), "bug:" in taken.out) == (1, False), taken.out  # one rank says so for all
    (tmp_path / "there").mkdir()
    early = run(config, "--export", tmp_path / "there")
    assert (early.code, "where the model is to be exported to, exists" in early.out) == (7, True), early.out
    assert not (early.save / "log.jsonl").exists()
    (tmp_path / "save/global_step1.partial/deep").mkdir(parents=True)
    done = run(config, "--export", tmp_path / "out")
    assert done.code == 0, done.out
    assert sorted(path.name for path in done.save.glob("global_step*")) == ["global_step102"]
    (done.save / "RESUME").write_text("")
    surplus = run(config, "--export", tmp_path / "out")
    assert surplus.code == 0, surplus.out
    assert not (done.save / "RESUME").exists()
    nothing = run(config, "--optim.lr", 1e30, "--optim.clip", 0, "--steps.train_iters", 5, save="nan")
    assert nothing.code == 6, nothing.out
    assert "this step was not saved" in nothing.out

    other = run(settings("qwen3", steps={"train_iters": 4}))
    assert (other.code, "model_type: 'llama' | 'qwen3'" in other.out) == (5, True), other.out
    (done.save / "global_step102" / RECORD).unlink()  # otherwise the config is seen to be of another save
    shutil.copy(model("qwen3", vocab_size=253) / "config.json", done.save / "global_step102")
    other = run(settings("qwen3", steps={"train_iters": 4}))
    assert other.code == 3, other.out
    assert re.search(r"global_step102 does not fill the model: rank 0 says Size mismatch .*q_proj", other.out), (
        other.out
    )
    assert "Traceback" not in other.out

    shutil.copy(model("llama", vocab_size=253) / "config.json", done.save / "global_step102")

    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    (done.save / "global_step102/.metadata").write_bytes(pickle.dumps(Hostile()))
    hostile = run(settings(steps={"train_iters": 4}))
    assert hostile.code == 3, hostile.out
    assert not (tmp_path / "executed").exists()


def test_another_template_than_that_of_the_export_is_noted(settings, talker, tmp_path):
    config, _ = load_config(settings(model={"path": str(talker)}), ["--export", str(tmp_path / "out")])
    trained = open_documents(Path(config.data.train[0]))
    assert not check_export(config, talker, [trained])  # control tokens and no template
    for template, noted in (("control", False), ("llama3", True)):
        digest = blake3(load_template(template).encode()).hexdigest()
        other = replace(trained, facts=replace(trained.facts, template=digest))
        assert ("another chat template than" in check_export(config, talker, [other])) == noted


WORKS_ALONE = """
import time
from train.distributed import world
with world(1, 0.1) as ranks:  # 6 seconds
    assert ranks.from_first(lambda: time.sleep(9) or ["found by", ranks.rank]) == ["found by", 0]
    assert ranks.sums(1) == [2]
"""


@pytest.mark.distributed
def test_the_others_wait_as_long_as_the_first_rank_works(forks, tmp_path):
    (tmp_path / "alone.py").write_text(WORKS_ALONE)
    code, out = forks([], 2, tmp_path / "alone.py")
    assert code == 0, out


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_another_start_is_converted_again(settings, run, model, convert, tmp_path):
    for number, family in enumerate(("llama", "llama-mha")):
        assert convert("hf2fsdp", model(family, vocab_size=253), tmp_path / f"fsdp{number}").code == 0
    config = settings(steps={"train_iters": 1})
    options = ["--save.path", str(tmp_path / "save")]
    first = run(config, "--model.path", tmp_path / "fsdp0", *options)
    assert first.code == 0, first.out
    digest = convert("digest", tmp_path / "save/start").out
    other = run(config, "--model.path", tmp_path / "fsdp1", "--steps.iteration_offset", 500, "--init", "finetune")
    assert other.code == 0, other.out
    assert convert("digest", tmp_path / "save/start").out != digest
    assert (
        convert("digest", tmp_path / "save/start").out.split()[0]
        == convert("digest", tmp_path / "fsdp1").out.split()[0]
    )


@pytest.fixture
def start(settings, model, convert, tmp_path):
    """(settings that start from a checkpoint of FSDP, with config and tokenizer of `cfg`; that folder)."""
    shutil.copytree(model("llama", vocab_size=253), tmp_path / "cfg")
    assert convert("hf2fsdp", tmp_path / "cfg", tmp_path / "fsdp").code == 0
    as_trained(tmp_path / "fsdp")
    options = ["--model.path", str(tmp_path / "fsdp"), "--model.config", str(tmp_path / "cfg")]
    return load_config(settings(), options)[0], tmp_path / "cfg"


def test_a_start_is_converted_once(start):
    config, _ = start
    weights = config.save.path / "start/model.safetensors"
    times = []
    for resumed in (False, True):
        assert folder_of(config, resumed)[0] == weights.parent
        times.append(weights.stat().st_mtime_ns)
    record = config.save.path / ".start"
    made_of = record.read_bytes()
    for spoiled in (weights.parent / "config.json", record):  # no folder without it; a job was killed when it was made
        spoiled.write_bytes(b"") if spoiled == record else spoiled.unlink()
        assert folder_of(config)[0] == weights.parent
        times.append(weights.stat().st_mtime_ns)
        assert record.read_bytes() == made_of
    assert times[0] == times[1] < times[2] < times[3]


def with_random_weights(config, path):
    update = {"path": path, "config": None, "init": "config"}
    return config.model_copy(update={"model": config.model.model_copy(update=update)})


@pytest.mark.parametrize("init", ["checkpoint", "config"])
def test_another_config_or_tokenizer_makes_the_start_again(start, init):
    config, base = start
    config = with_random_weights(config, base) if init == "config" else config
    made, _ = folder_of(config)
    for name, content in (("tokenizer.json", "{}"), ("chat_template.jinja", "{{ messages }}")):
        (base / name).write_text(content)
        assert folder_of(config)[0] == made
        assert (made / name).read_text() == content
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | {"dropped": 1}))
    assert folder_of(config)[0] == made
    assert json.loads((made / "config.json").read_text())["dropped"] == 1


@pytest.mark.parametrize("init", ["checkpoint", "config"])
def test_a_folder_of_ones_own_does_not_give_way_to_the_start(start, init):
    """Nor do the files that are put into the start afterwards."""
    config, base = start
    config = with_random_weights(config, base) if init == "config" else config
    own, note = config.save.path / "start", config.save.path / "start/notes.txt"
    shutil.copytree(base, own)
    with pytest.raises(OutputError, match=r"start exists and was not made by this run, as there is no .*/\.start"):
        folder_of(config)
    assert (own / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    shutil.rmtree(own)
    own.mkdir()  # an empty one is nobody's
    assert folder_of(config)[0] == own
    note.write_text("mine")
    assert folder_of(config)[0] == own
    (base / "tokenizer.json").write_text("{}")
    with pytest.raises(OutputError, match=r"which has to be made again, holds what no checkpoint has: notes\.txt"):
        folder_of(config)
    note.unlink()
    assert folder_of(config)[0] == own


def test_random_weights_do_not_get_the_manifest_of_others(start, convert):
    config, base = start
    assert convert("hf2hf", base, base.with_name("other")).code == 0
    assert (base.with_name("other") / "vitruvian.json").is_file()
    folder, _ = folder_of(with_random_weights(config, base.with_name("other")))
    verified = convert("digest", folder)
    assert verified.code == 0, verified.err
    assert not (folder / "vitruvian.json").exists()


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_what_the_conversion_of_a_start_and_an_export_notes_is_told(settings, run, model, tmp_path):
    """Here that the only model of a checkpoint is an average, and that a file does not go along."""
    base = tmp_path / "base"
    shutil.copytree(model("llama", vocab_size=253), base)
    (base / "mine.txt").write_text("mine")
    save_state(tmp_path / "fsdp", {"ema": weights(base)})
    config = settings(model={"path": str(tmp_path / "fsdp"), "config": str(base)}, steps={"train_iters": 1})
    ran = run(config)
    assert ran.code == 0, ran.out
    assert "note       all weights here are under 'ema', the name of a model beside the one" in ran.out
    ran = run(settings(model={"path": str(base)}, steps={"train_iters": 1}), "--export", tmp_path / "out", save="plain")
    assert ran.code == 0, ran.out
    assert "note: mine.txt in" in ran.out


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_export_of_adapters_touches_nothing_beside_it(settings, run, tmp_path):
    pytest.importorskip("peft")
    own = tmp_path / "models/out.adapter"
    own.mkdir(parents=True)
    (own / "adapter_model.safetensors").write_text("mine")
    ran = run(settings(lora={"rank": 2}, steps={"train_iters": 1}), "--export", tmp_path / "models/out")
    assert ran.code == 0, ran.out
    assert (own / "adapter_model.safetensors").read_text() == "mine"
    assert sorted(path.name for path in own.parent.iterdir()) == ["out", "out.adapter"]


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_head_that_the_config_ties_to_another_embedding_is_refused(settings, run, model, alone, tmp_path):
    """transformers would not tie it (modeling_utils.py `tie_weights` of 5.23)."""
    base = tmp_path / "base"
    shutil.copytree(model("llama", vocab_size=253), base)
    tied = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(tied))
    ran = run(settings(model={"path": str(base)}, steps={"train_iters": 1}), ranks=2)
    assert ran.code == 6, ran.out
    assert "the output head should share model.embed_tokens.weight and differs from it by up to" in ran.out
    assert f'"tie_word_embeddings": false in {base}/config.json keeps both' in ran.out
    with pytest.raises(VerificationError, match="should share"):  # nor is it evaluated
        load_weights(Place(base, None), None, alone)


def test_numbers_go_through_a_file_of_settings_as_they_are():
    import yaml

    from train.tools.init_folder import text_of

    for value in (1.25e-5, 1e-5, 8e-6, 1e-8, 0.1, 3.0, 1e30):
        text = "\n".join(text_of({"optim.lr": value}))
        assert yaml.safe_load(text)["optim"]["lr"] == value


def test_documents_that_are_left_out_are_told(settings, train):
    planned = train("plan", settings(data={"seq_length": 15}))
    assert "documents with" in planned.err
    assert "are longer than a row: left out" in planned.err
    assert "longer than a row" not in train("plan", settings(data={"seq_length": 15, "packing": "packed"})).err


@pytest.mark.distributed
def test_random_weights_are_those_of_transformers(model, settings, run, train, convert, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_bytes((model("llama", vocab_size=253) / "config.json").read_bytes())
    options = ["--model.path", tmp_path / "bare", "--model.init", "config", "--seed", 7]
    planned = json.loads(train("plan", settings(), *options, "--json").out)
    assert planned["parameters"] == 155840
    torch.manual_seed(7)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "bare"), dtype=torch.float32)
    plain.save_pretrained(tmp_path / "plain")
    stopped = run(settings(), *options, "--steps.exit_interval", 4, ranks=2)
    digests = [convert("digest", path).out.split()[0] for path in (tmp_path / "plain", stopped.save / "start")]
    assert digests[0] == digests[1]
    done = run(settings(), *options)
    assert done.code == 0, done.out
    losses = done.series("loss")
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    lacking = run(settings(), "--model.path", tmp_path, "--model.init", "config", save="none")
    assert lacking.code == 3
    assert "has no config.json, which model.init config needs" in lacking.out
