"""A run resumes, and its adapters are merged, on the start that it began with, or not at all."""

from __future__ import annotations

import json
import shutil

import pytest

torch = pytest.importorskip("torch")

from formats.errors import SourceError
from formats.torch_files import saves
from tests.faults.test_source_checksums import flip
from tests.train.test_deepspeed import zero
from train.run.checkpoint import Progress, Saver
from train.run.export import export
from train.run.identity import changed_files, recorded, small_files
from train.settings.config import Save
from train.start.run_folder import RECORD

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
LORA = {"targets": ["q_proj"], "rank": 2, "alpha": 4}


@pytest.fixture
def base(model, tmp_path):
    """A tiny model of one's own."""
    folder = tmp_path / "base"
    shutil.copytree(model("llama", vocab_size=253), folder)
    return folder


def rewrite(folder, name="config.json", **values):
    """Change keys of a JSON file; returns what it was."""
    path = folder / name
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | values))
    return text


def flip_weight(folder):
    """Another bit in the last weight of a model."""
    path = folder / "model.safetensors"
    flip(path, path.stat().st_size - 1)


ENGINES = {"fsdp": [], "deepspeed": zero(2), "transformers": ["--engine", "transformers"]}


@pytest.mark.parametrize(("engine", "ranks"), [("fsdp", 2), ("deepspeed", 1), ("transformers", 1)])
def test_another_config_is_refused(settings, run, base, engine, ranks):
    """The checkpoint would fill it: the shapes are the same, and the architecture is not in the weights."""
    options = [*ENGINES[engine], "--model.path", base, "--steps.train_iters", 2]
    stopped = run(settings(), *options, "--steps.exit_interval", 1, ranks=ranks)
    assert stopped.code == 75, stopped.out
    newest, changed = stopped.save / "global_step101", {"hidden_act": "gelu", "rope_parameters": {"rope_theta": 5e5}}
    original = rewrite(base, **changed)
    assert (newest / "config.json").read_text() == original
    ran = run(settings(), *options, ranks=ranks)
    assert ran.code == 5, ran.out
    assert ran.out.count("error: ") == 1, ran.out
    assert f"{base}/config.json is not what {newest} was trained with (then | now): " in ran.out
    assert "hidden_act: 'silu' | 'gelu'" in ran.out
    assert "rope_parameters.rope_theta: 10000.0 | 500000.0" in ran.out
    assert f"hint: cp --remove-destination {newest}/config.json {base}/config.json" in ran.out
    (base / "config.json").write_text(json.dumps(json.loads(original), sort_keys=True, separators=(",", ":")))
    rewrite(base, torch_dtype="bfloat16", architectures=None, transformers_version="9.9", use_cache=False)
    done = run(settings(), *options, ranks=ranks)
    assert done.code == 0, done.out


@pytest.fixture
def adapted(settings, run, base):
    """(settings, a run of adapters that is stopped after a step)."""
    pytest.importorskip("peft")
    config = settings(lora=LORA, model={"path": str(base)}, steps={"train_iters": 2})
    stopped = run(config, "--steps.exit_interval", 1, ranks=2)
    assert stopped.code == 75, stopped.out
    return config, stopped


def test_adapters_are_not_put_on_other_weights(adapted, settings, run, base, convert, tmp_path):
    config, stopped = adapted
    newest = stopped.save / "global_step101"
    digest = json.loads((newest / RECORD).read_text())["digest"]
    assert convert("digest", base).out.split()[0] == digest
    flip_weight(base)
    for ranks in (1, 2):
        ran = run(config, ranks=ranks)
        assert ran.code == 5, ran.out
        assert ran.out.count("error: ") == 1, ran.out
        assert f"{base} no longer holds the weights that {newest} began with: final_norm differ" in ran.out
        assert f"`convert digest {base}` has to print {digest}" in ran.out
    flip_weight(base)
    for name in ("generation_config.json", "special_tokens_map.json"):
        (base / name).write_text("{}")
    done = run(config)
    assert done.code == 0, done.out
    assert (done.save / f"global_step102/{RECORD}").read_bytes() == (newest / RECORD).read_bytes()

    flip_weight(base)
    merged = run(config, "--export", tmp_path / "out")
    assert merged.code == 5, merged.out
    assert f"{base} no longer holds the weights" in merged.out
    flip_weight(base)
    original = rewrite(base, rms_norm_eps=0.5)
    merged = run(config, "--export", tmp_path / "out")
    assert merged.code == 5, merged.out
    assert "rms_norm_eps: 1e-06 | 0.5" in merged.out
    assert not list(tmp_path.glob("out*"))
    (base / "config.json").write_text(original)
    other = run(config, "--export", tmp_path / "out", "--lora.alpha", 8)
    assert other.code == 5, other.out
    assert "is another adapter (lora.alpha: 4, now 8)" in other.out
    merged = run(config, "--export", tmp_path / "out", "--optim.lr", 0.25)
    assert merged.code == 0, merged.out
    assert "note       settings that the run was not trained with have no effect: optim.lr: 0.001, now 0.25" in (
        merged.out
    )


def test_adapters_without_a_record_are_noted(adapted, run, base, tmp_path):
    config, stopped = adapted
    newest = stopped.save / "global_step101"
    for name in (RECORD, saves.RECORD):  # as of a version that wrote neither
        (newest / name).unlink()
    flip_weight(base)
    done = run(config)
    assert done.code == 0, done.out
    assert f"note       {newest} does not record which weights it was trained on: {base} is taken" in done.out
    assert recorded(done.save / "global_step102") is not None
    for name in (RECORD, saves.RECORD):
        (done.save / "global_step102" / name).unlink()
    (note,) = export(done.save / "global_step102", tmp_path / "out")
    assert "does not record which weights" in note
    (newest / RECORD).write_text('{"digest": "", "tensors": {"norm": ""}}')
    with pytest.raises(SourceError, match="is no record of the weights"):
        recorded(newest)


def test_an_adapter_of_another_kind_is_refused(adapted, run):
    """What of peft's note no setting of ours says has to be what peft makes of our settings."""
    config, stopped = adapted
    newest = stopped.save / "global_step101"
    original = rewrite(newest, "adapter_config.json", lora_alpha=8)
    edited = run(config, "--lora.alpha", 8)
    assert (edited.code, "adapter_config.json is not of this step" in edited.out) == (3, True), edited.out
    (newest / "adapter_config.json").write_text(original)
    (newest / RECORD).rename(newest / "kept")
    lost = run(config)
    assert (lost.code, f"{newest / RECORD} is not there, and {newest / saves.RECORD} lists it" in lost.out) == (3, True)
    (newest / "kept").rename(newest / RECORD)
    (newest / saves.RECORD).unlink()
    rewrite(newest, "adapter_config.json", use_rslora=True)
    ran = run(config)
    assert ran.code == 5, ran.out
    assert "is another adapter (lora.rslora: True, now False)" in ran.out


def test_a_checkpoint_of_all_weights_needs_no_start(settings, run, base):
    config = settings(model={"path": str(base)}, steps={"train_iters": 2})
    reference = run(config, save="whole")
    assert reference.code == 0, reference.out
    assert run(config, "--steps.exit_interval", 1).code == 75
    flip_weight(base)
    done = run(config)
    assert done.code == 0, done.out
    assert f"note       {base} no longer holds the weights that" in done.out
    assert "nothing of them is used, the checkpoint has all weights" in done.out
    assert done.series("loss") == reference.series("loss")


def test_a_phase_begins_from_the_export_of_the_one_before(settings, run, base, tmp_path):
    """Its weights are in the checkpoint of that phase; its config is another file, and says the same."""
    first = run(settings(model={"path": str(base)}, steps={"train_iters": 1}), "--export", tmp_path / "out")
    assert first.code == 0, first.out
    second = {"train_iters": 1, "iteration_offset": 101}
    done = run(settings(model={"path": str(tmp_path / "out")}, steps=second), "--optim.lr", 0.5)
    assert done.code == 0, done.out
    assert f"weights    {done.save}/global_step101" in done.out
    assert "changed settings" not in done.out


def test_a_converted_start_is_compared_too(settings, run, base, convert):
    """Of another format, of which the folder in `save.path` is made again."""
    pytest.importorskip("peft")
    other = base.with_name("other")
    shutil.copytree(base, other)
    flip_weight(other)
    for place, number in ((base, 0), (other, 1)):
        assert convert("hf2megatron", place, base.with_name(f"m{number}"), "--tp", 2).code == 0
    config = settings(lora=LORA, model={"path": str(base.with_name("m0")), "config": str(base)})
    options = ["--steps.train_iters", 2]
    assert run(config, *options, "--steps.exit_interval", 1).code == 75
    base.with_name("m0").rename(base.with_name("kept"))
    base.with_name("m1").rename(base.with_name("m0"))
    ran = run(config, *options)
    assert ran.code == 5, ran.out
    assert "no longer holds the weights that" in ran.out
    base.with_name("m0").rename(base.with_name("m1"))
    base.with_name("kept").rename(base.with_name("m0"))
    done = run(config, *options)
    assert done.code == 0, done.out


def test_a_start_may_be_moved_and_linked(adapted, run, base, tmp_path):
    """As in the Hub's cache: the same weights at another place are the same start."""
    config, _ = adapted
    hub = tmp_path / "models--acme--tiny"
    linked = hub / "snapshots/0123abc"
    linked.mkdir(parents=True)
    base.rename(hub / "blobs")
    for path in (hub / "blobs").iterdir():
        (linked / path.name).symlink_to(f"../../blobs/{path.name}")
    moved = run(config, "--model.path", linked, "--export", tmp_path / "out", ranks=2)
    assert moved.code == 0, moved.out
    assert f"note       changed settings: model.path: {base}, now {linked}" in moved.out
    assert "no longer holds" not in moved.out
    linked.rename(hub / "snapshots/4567def")
    resumed = run(
        config, "--model.path", hub / "snapshots/4567def", "--export", tmp_path / "again"
    )  # the run is at its end
    assert resumed.code == 0, resumed.out
    assert "only names and shapes were compared" not in resumed.out
    assert (tmp_path / "again/config.json").is_file()


def test_a_checkpoint_has_the_config_of_the_model_that_was_trained(base, tmp_path):
    """Also where the start's is replaced while the model is trained."""
    saver = Saver(Save(path=tmp_path), small_files(base), None)
    original = rewrite(base, hidden_act="gelu")
    progress = Progress(1, 0, 8, 1, "rows", 0, 8)
    (tmp_path / f"{progress.name}.partial").mkdir()
    saver._publish(progress, {})
    assert (tmp_path / progress.name / "config.json").read_text() == original


def test_other_small_files_of_a_start_are_noted(base, tmp_path):
    """A resumed run saves those of its start, such as a chat template that was changed since."""
    folder = tmp_path / "global_step1"
    folder.mkdir()
    for place in (base, folder):
        (place / "chat_template.jinja").write_text("{{ messages }}")
        (place / "config.json").write_text(place.name)
    assert changed_files(folder, base) == ""
    (base / "chat_template.jinja").write_text("{{ messages[0] }}")
    message = f"{base} has other files than {folder}, which are saved from here on: chat_template.jinja"
    assert changed_files(folder, base) == message


def test_another_tokenizer_is_refused(settings, run, talker, tmp_path):
    """One token of token files that do not tell which tokenizer made them; and of a model that adapters go into."""
    pytest.importorskip("peft")
    base = tmp_path / "base"
    shutil.copytree(talker, base)
    path = base / "tokenizer.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree, ensure_ascii=False, indent=None))
    config = settings(lora=LORA, model={"path": str(base)}, steps={"train_iters": 2})
    assert run(config, "--steps.exit_interval", 1).code == 75
    path.write_text(json.dumps(tree, indent=1))
    done = run(config)
    assert done.code == 0, done.out
    pieces = tree["model"]["vocab"]
    if isinstance(pieces, dict):
        piece, other = list(pieces)[100:102]
        pieces[piece], pieces[other] = pieces[other], pieces[piece]
    else:
        pieces[100], pieces[101] = pieces[101], pieces[100]
    path.write_text(json.dumps(tree))
    message = f"{path} is not the tokenizer that {done.save}/global_step102 was trained with"
    for options in (["--export", tmp_path / "out"], ["--steps.train_iters", 4]):
        ran = run(config, *options)
        assert (ran.code, message in ran.out) == (5, True), ran.out


def test_checkpoints_of_two_models_are_not_scored_as_one(settings, run, base, data, train):
    config = settings(
        model={"path": str(base)}, steps={"train_iters": 2}, save={"every": 1}, data={"validation": {"one": str(data)}}
    )
    done = run(config)
    assert done.code == 0, done.out
    rewrite(done.save / "global_step102", hidden_act="gelu")
    (done.save / f"global_step102/{saves.RECORD}").unlink()
    for path in done.save.glob("perplexity/*.csv"):
        path.unlink()
    ran = train("eval", done.save, "--all")
    assert ran.code == 5, ran.err
    assert "hidden_act: 'silu' | 'gelu'" in ran.err


def test_an_interval_of_no_evaluations_is_refused(settings, train):
    ran = train("plan", settings(evaluate={"every": 2}))
    assert ran.code == 2
    assert "evaluate.every is 2, and data.validation names no set to evaluate" in ran.err


def test_pickled_weights_beside_others_are_noted(settings, run, base, convert):
    """transformers takes safetensors, and so do the trainer and the converter; they say so."""
    from safetensors.torch import load_file

    tensors = load_file(base / "model.safetensors")
    config = settings(model={"path": str(base)}, steps={"train_iters": 1})
    alone, digest = run(config, save="alone"), convert("digest", base).out.split()[0]
    torch.save({name: tensor + 1 for name, tensor in tensors.items()}, base / "pytorch_model.bin")
    message = f"{base} holds model.safetensors and pytorch_model.bin: the first is read"
    both = run(config)
    assert both.series("loss") == alone.series("loss")
    assert f"note       {message}" in both.out
    assert message not in alone.out
    assert convert("digest", base).out.split()[0] == digest
    assert message in convert("inspect", base).out
