"""`convert watch`: each complete checkpoint once, whoever is killed; what is kept, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

import vitruvian
from converters.library import watch_log, watching
from formats.detect import commits
from tests.faults.watch_storm import converted, storm


@pytest.fixture
def run(model, tmp_path):
    """A training of three checkpoints, the last of which is not complete."""
    for step in (1, 2, 3):
        if step == 1:
            vitruvian.convert(model("llama", "bfloat16"), tmp_path / "run" / "step-1", to="fsdp")
        else:
            shutil.copytree(tmp_path / "run" / "step-1", tmp_path / "run" / f"step-{step}")
    (tmp_path / "run" / "step-3" / ".metadata").unlink()
    return tmp_path / "run"


def lines(out):
    records = [json.loads(line) for line in (out / ".watch/log.jsonl").read_text().splitlines()]
    return [(record.get("checkpoint", ""), record["state"]) for record in records]


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_two_watchers_that_are_killed_convert_each_checkpoint_once(tmp_path):
    """`make watch-storm` does it with 200."""
    counts = storm(tmp_path, 5, 4, 0.3)
    assert counts["killed"] >= 2
    assert counts["converted"] >= 3


def test_what_is_complete_is_converted_once_and_kept_by_rule(convert, run, tmp_path):
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--to", "hf", "--once")
    ran = convert(*argv, "-n")
    assert ran.out.splitlines() == ["step-1: to be converted", "step-2: to be converted", "step-3: not complete"]
    assert not out.exists()
    ran = convert(*argv)
    assert (ran.code, len(ran.out.splitlines())) == (75, 2), ran.err
    assert vitruvian.verify(out / "step-2", run / "step-2").equal
    shutil.copy(run / "step-1" / ".metadata", run / "step-3")
    ran = convert(*argv, "--keep", "1", "--keep-every", "2")
    assert (ran.code, ran.out.count("digest")) == (75, 1)
    assert sorted(path.name for path in out.iterdir()) == [".watch", "step-2", "step-3"]
    assert [path.name for path in (out / ".watch").iterdir()] == ["log.jsonl"]
    ran = convert(*argv, "--idle", "0")
    assert (ran.code, ran.out) == (0, "")
    assert lines(out)[-1] == ("step-1", "removed")


def test_what_the_user_has_put_into_a_model_is_not_deleted(convert, run, tmp_path):
    """`--keep` deletes what `--force` would."""
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    convert(*argv)
    (out / "step-1/notes.txt").write_text("mine")
    (out / "step-1/evals").mkdir()
    (out / "step-1/evals/mmlu.json").write_text("{}")
    for step in (3, 4):
        shutil.copytree(run / "step-2", run / f"step-{step}", dirs_exist_ok=True)
    ran = convert(*argv, "--keep", "1")
    text = f"note: {out}/step-1 holds what no checkpoint has: evals/mmlu.json, notes.txt; --keep leaves it"
    assert (ran.code, ran.err.count(text), ran.out.count(f"{out}/step-2: deleted")) == (75, 1, 1), ran.err
    assert (out / "step-1/notes.txt").read_text() == "mine"
    assert sorted(path.name for path in out.iterdir()) == [".watch", "step-1", "step-4"]
    assert vitruvian.verify(out / "step-1", run / "step-1").equal
    ran = convert(*argv, "--keep", "1")
    assert (ran.out, ran.err) == ("", ""), "it is said once"


def test_a_model_inside_a_model_is_not_deleted(convert, run, tmp_path):
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    convert(*argv)
    shutil.copytree(out / "step-2", out / "step-1/sft")
    shutil.copytree(run / "step-2", run / "step-3", dirs_exist_ok=True)
    ran = convert(*argv, "--keep", "1")
    text = f"note: {out}/step-1 holds another checkpoint: sft; --keep leaves it, delete it yourself"
    assert (ran.code, ran.err.count(text), ran.out.count(f"{out}/step-2: deleted")) == (75, 1, 1), ran.err
    assert vitruvian.verify(out / "step-1/sft", run / "step-2").equal
    assert vitruvian.verify(out / "step-1", run / "step-1").equal


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("adapter_model.safetensors", "holds the weights of an adapter: adapter_model.safetensors"),
        ("model.safetensors", "has weights that are newer than its vitruvian.json: model.safetensors"),
    ],
)
def test_weights_that_the_user_has_saved_into_a_model_are_not_deleted(convert, run, tmp_path, name, text):
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    convert(*argv)
    (out / "step-1" / name).write_bytes(b"mine")
    shutil.copytree(run / "step-2", run / "step-3", dirs_exist_ok=True)
    ran = convert(*argv, "--keep", "1")
    assert (ran.code, ran.out.count(f"{out}/step-2: deleted")) == (75, 1), ran.err
    assert f"note: {out}/step-1 {text}; --keep leaves it" in ran.err
    assert (out / "step-1" / name).read_bytes() == b"mine"


def test_weights_that_are_a_broken_link_end_no_watch(convert, run, tmp_path):
    """A user has moved them to another disk, and this is not there."""
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    convert(*argv)
    (out / "step-1/model.safetensors").unlink()
    (out / "step-1/model.safetensors").symlink_to(tmp_path / "gone")
    ran = convert(*argv, "--keep", "1")
    text = f"{out}/step-1 has weights that are newer than its vitruvian.json: model.safetensors"
    assert (ran.code, text in ran.err) == (75, True), ran.err
    assert (out / "step-1").is_dir()


def test_a_folder_in_the_place_of_the_unfinished_one_is_not_deleted(convert, run, tmp_path):
    """`convert` refuses it too: only a folder with a journal is that of a conversion."""
    other = tmp_path / "out/step-1.partial/thesis.txt"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    ran = convert("watch", run, "--out", tmp_path / "out", "--once")
    assert (ran.code, other.read_text()) == (75, "mine")
    assert f"{other.parent} is needed for the work and holds something else" in ran.err
    assert (tmp_path / "out/step-2").is_dir()


def test_a_model_that_was_moved_away_is_not_counted(convert, run, tmp_path):
    """The newest of those that are there are kept: not the log's, which would leave none."""
    out = tmp_path / "out"
    shutil.copytree(run / "step-2", run / "step-3", dirs_exist_ok=True)
    argv = ("watch", run, "--out", out, "--once")
    convert(*argv)
    (out / "step-3").rename(tmp_path / "best")
    ran = convert(*argv, "--keep", "1")
    assert (ran.code, ran.out) == (75, f"{out}/step-1: deleted, as --keep says\n"), ran.err
    assert sorted(path.name for path in out.iterdir()) == [".watch", "step-2"]
    assert convert(*argv, "--keep", "1").out == "", "nor is one converted again"


def test_a_model_in_the_place_of_one_is_not_deleted(model, convert, run, tmp_path):
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    convert(*argv)
    (out / "step-1").rename(tmp_path / "first")
    vitruvian.convert(model("qwen3", "bfloat16"), out / "step-1")
    ran = convert(*argv, "--keep", "1")
    assert (ran.code, ran.out) == (75, ""), ran.err
    assert sorted(path.name for path in out.iterdir()) == [".watch", "step-1", "step-2"]


def test_what_a_killed_watch_left_of_a_model_is_deleted(convert, run, tmp_path):
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    convert(*argv)
    (out / "step-1").rename(out / ".watch/step-1.old")
    ran = convert(*argv, "--keep", "1")
    assert (ran.code, ran.out) == (75, ""), ran.err
    assert sorted(path.name for path in out.iterdir()) == [".watch", "step-2"]
    assert [path.name for path in (out / ".watch").iterdir()] == ["log.jsonl"]


def test_a_model_of_an_earlier_save_is_told(model, convert, tmp_path):
    """Not `converted`, which it was: the checkpoint is another one now."""
    run, out = tmp_path / "run", tmp_path / "out"
    folder = run / "checkpoint-5"
    argv = ("watch", run, "--out", out, "--once")
    text = f"saved again since it was converted; move {out}/checkpoint-5 away to convert it again"
    for name in ("llama", "qwen3"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model(name, "bfloat16"), folder)
        (folder / "trainer_state.json").write_text("{}")
        ran = convert(*argv)
        assert (ran.code, text in ran.err) == (75, name == "qwen3"), ran.err
    assert convert(*argv).err == "", "it is said once for each save"
    assert convert(*argv, "-n").out == f"checkpoint-5: {text}\n"
    (out / "checkpoint-5").rename(tmp_path / "old")
    assert "digest" in convert(*argv).out
    assert vitruvian.verify(out / "checkpoint-5", folder).equal
    assert convert(*argv, "-n").out == "checkpoint-5: converted\n"


def test_what_was_finished_before_a_kill_is_not_done_again(convert, run, tmp_path):
    """Between a model in its place and the line that says so; and a line that was cut short."""
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    shutil.rmtree(run / "step-2")
    convert(*argv)
    log, place = out / ".watch/log.jsonl", (out / "step-1").stat().st_ino
    content = log.read_text()
    log.write_text(content[:-20])
    assert convert(*argv).code == 75
    assert (out / "step-1").stat().st_ino == place
    digest = vitruvian.digest(run / "step-1").digest
    assert converted(out) == {"step-1": [digest]}
    # saved anew: a model is never replaced, one that was moved away is made again
    (run / "step-1" / ".metadata").touch()
    assert convert(*argv).out == ""
    (out / "step-1").rename(tmp_path / "old")
    assert convert(*argv).out.count(digest) == 1


def test_what_was_begun_and_is_gone_is_ended(convert, run, tmp_path):
    """Killed at work, and the training has deleted the checkpoint since; and killed after it."""
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    convert(*argv)
    log = out / ".watch/log.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"converted"' not in line))
    (out / "step-1.partial").mkdir()
    (out / "step-1.partial/journal.jsonl").touch()
    (out / "step-1").rename(out / "step-1.partial/out")
    for step in (1, 2):
        shutil.rmtree(run / f"step-{step}")
    assert convert(*argv).code == 75
    assert lines(out)[-2:] == [("step-1", "gone"), ("step-2", "converted")]
    assert sorted(path.name for path in out.iterdir()) == [".watch", "step-2"]


@pytest.mark.parametrize("is_there", [True, False])
def test_what_was_begun_and_is_not_kept_is_ended(convert, run, tmp_path, is_there):
    """By a watcher that was killed while its conversion went on, or was stopped by a time limit together with it."""
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    step_2 = (run / "step-2").rename(tmp_path / "step-2")
    convert(*argv)
    log = out / ".watch/log.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"converted"' not in line))
    if not is_there:
        shutil.rmtree(out / "step-1")
        (out / "step-1.partial").mkdir()
        record = json.loads(log.read_text().splitlines()[-1]) | {"state": "again", "error": "stopped", "exit_code": 75}
        log.write_text(log.read_text() + json.dumps(record) + "\n")
    step_2.rename(run / "step-2")
    ran = convert(*argv, "--keep", "1", "--idle", "0")
    assert ran.code == 0, ran.err
    assert sorted(path.name for path in out.iterdir()) == [".watch", "step-2"]


def test_a_checkpoint_that_another_watcher_has_is_left_to_it(run, tmp_path):
    watch = watch_log.Watch(run, tmp_path / "out")
    watch_log.begin(watch)
    saved = commits.complete(run)[0]
    with watch_log.claimed(watch, saved.folder.name) as mine, watch_log.claimed(watch, saved.folder.name) as other:
        assert mine is not None
        assert other is None
        assert watching._convert(watch, saved, watching.Stop()) is None


def test_what_fails_is_told_and_does_not_stop_the_others(convert, run, tmp_path):
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    (out / "step-2").mkdir(parents=True)
    next((run / "step-1").glob("*.distcp")).write_bytes(b"cut short")
    shutil.copy(run / "step-2" / ".metadata", run / "step-3")
    ran = convert(*argv)
    assert (ran.code, ran.out.count("digest")) == (75, 1)
    assert "note: step-1: " in ran.err
    assert f"note: step-2: {out}/step-2 exists, and {out}/.watch/log.jsonl has no line of it: move it" in ran.err
    ran = convert(*argv, "--idle", "0")  # what cannot be read is looked at twice, as it may be half deleted
    assert (ran.code, ran.err.count("note: ")) == (3, 1)
    assert "2 checkpoints were not converted: step-1" in ran.err
    ran = convert(*argv, "--idle", "0")
    assert (ran.code, ran.err.count("note: ")) == (3, 0)
    shutil.rmtree(run / "step-1")
    shutil.copytree(run / "step-3", run / "step-1")  # saved again
    assert convert(*argv).out.count("digest") == 1


def test_without_idle_time_a_watch_is_over_at_once(tmp_path, monkeypatch):
    """Also within the millisecond of the last line."""
    watch = watch_log.Watch(tmp_path, tmp_path / "out", idle=0)
    monkeypatch.setattr(watch_log.time, "time", lambda: 1795698657.3777)
    watch_log.begin(watch)
    assert watching.is_over(watch, watch_log.records(watch))


def test_a_line_of_the_log_that_is_damaged_is_named(convert, tmp_path):
    """In the middle: one at the end is of a writer that was killed."""
    out = tmp_path / "out"
    (tmp_path / "run").mkdir()
    argv = ("watch", tmp_path / "run", "--out", out, "--once")
    assert convert(*argv).code == 75
    log = out / ".watch/log.jsonl"
    first = log.read_bytes()
    for line in (b'{"state": "beg', b"\0\0\0\0", b"[]", b'{"time": 1, "state": "began", "checkpoint": "a"}', b"\xff"):
        log.write_bytes(first + line + b"\n" + first)
        for options in ([], ["-n"]):
            ran = convert(*argv, *options)
            assert (ran.code, f"line 2 of {log} is damaged" in ran.err) == (7, True), (line, ran.err)
    for rest in (b"\0\0\0\0", b"garbage", b'{"state": "beg'):  # without an end
        for start, number in ((first, 2), (b"", 1)):
            log.write_bytes(start + rest)
            ran = convert(*argv)
            assert (ran.code, f"line {number} of {log} is damaged" in ran.err) == (7, True), (rest, ran.err)
            assert log.read_bytes() == start + rest
    for size in (len(first) - 10, 3):
        log.write_bytes(first + first[:size])
        assert convert(*argv).code == 75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--idle", "nan"], "nan is not a finite number"),
        (["--every", "nan"], "nan is not a finite number"),
        (["--every", "inf"], "inf is not a finite number"),
        (["--out", "RUN/step-1"], "is in RUN/step-1, a checkpoint of the training"),
        (["--out", "RUN/step-1/models"], "is in RUN/step-1, a checkpoint of the training"),
    ],
)
@pytest.mark.parametrize("submitted", [False, True])
def test_what_no_watch_can_be_asked_for(convert, run, tmp_path, options, message, submitted):
    options = [word.replace("RUN", str(run)) for word in options]
    before, out = ["submit", "--site", "local", "-n"] * submitted, [] if "--out" in options else ["--out", tmp_path]
    ran = convert(*before, "watch", run, *out, *options, *["-n"] * (not submitted))
    assert (ran.code, message.replace("RUN", str(run)) in ran.err) == (2, True), ran.err
    assert convert("watch", run, "--out", run / "models", "-n").code == 0


def test_a_model_whose_lines_are_lost_is_left_alone_until_it_is_moved_away(convert, run, tmp_path):
    """A log that a copy has cut in half, say: nobody knows what the model was made of."""
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    convert(*argv)
    log, place = out / ".watch/log.jsonl", (out / "step-1").stat().st_ino
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    ran = convert(*argv)
    assert (ran.code, ran.out, ran.err.count("has no line of it: move it away")) == (75, "", 2)
    assert (convert(*argv).err, (out / "step-1").stat().st_ino) == ("", place)
    (out / "step-1").rename(tmp_path / "old")
    assert convert(*argv).out.count("digest") == 1
    assert convert(*argv, "--idle", "0").code == 7, "the other one is still in the way"


def test_a_watch_waits_for_room(convert, run, tmp_path):
    """Not even a claim, then no model, has room: no checkpoint is given up for that."""
    place = tmp_path / "small"
    place.mkdir()
    argv = ("watch", run, "--out", place / "out", "--once")
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=4", "none", place]
    if (mounted := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        ran = convert(*argv)
        assert (ran.code, "No space left on device" in ran.err) == (75, True), ran.err
        subprocess.run(["mount", "-o", "remount,nr_inodes=12", place], check=True)
        ran = convert(*argv)
        assert (ran.code, ran.err.count("files and folders")) == (75, 2), ran.err
        subprocess.run(["mount", "-o", "remount,nr_inodes=100", place], check=True)
        assert convert(*argv).out.count("digest") == 2
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_run_that_is_deleted_ends_the_watch(convert, run, tmp_path):
    argv = ("watch", run, "--out", tmp_path / "out", "--once")
    assert convert("watch", run, "--out", run, "--once").code == 2
    convert(*argv)
    shutil.rmtree(run)
    ran = convert(*argv)
    assert (ran.code, "is not a folder" in ran.err) == (3, True)
    assert vitruvian.verify(tmp_path / "out/step-2").equal


def test_an_error_of_the_options_ends_the_watch(convert, run, tmp_path):
    out = tmp_path / "out"
    argv = ("watch", run, "--out", out, "--once")
    assert convert(*argv, "--tag", "x").code == 2
    ran = convert(*argv, "--weights", "module")
    assert (ran.code, ran.out, "--weights has no effect" in ran.err) == (2, "", True), ran.err
    assert convert(*argv, "--keep-every", "2").code == 2
    assert convert("watch", tmp_path / "nothing", "--out", out).code == 3
    assert convert(*argv).code == 75  # the log was one of a command that was wrong
    assert convert(*argv, "-j", 3, "--memory", "32MiB").code == 75, "as on a node with more cores"
    ran = convert(*argv, "--dtype", "fp32")
    assert (ran.code, "is of another watch" in ran.err) == (2, True)


def test_a_checkpoint_that_is_being_saved_anew_is_left_out(model, convert, tmp_path):
    """The sign of the save before is still there: half of the weights are of each."""
    source, run, out = model("llama", "bfloat16"), tmp_path / "run", tmp_path / "out"
    folder = run / "checkpoint-5"
    shutil.copytree(source, folder)
    sign = folder / "trainer_state.json"
    sign.write_text("{}")
    long_ago = sign.stat().st_mtime - 3600
    os.utime(sign, (long_ago, long_ago))
    argv = ("watch", run, "--out", out, "--once")
    ran = convert(*argv)
    assert (ran.code, "model.safetensors was written after trainer_state.json" in ran.err) == (75, True), ran.err
    assert convert(*argv).err == "", "it is said once"
    assert "touch " in convert(*argv, "-n").out
    assert convert(*argv, "--idle", "0").code == 3
    sign.touch()
    assert convert(*argv).code == 75
    assert vitruvian.verify(out / "checkpoint-5", source).equal


def test_a_save_is_known_by_all_of_its_files(model, convert, tmp_path):
    """Its first file may be one that somebody has put there."""
    run, out = tmp_path / "run", tmp_path / "out"
    folder = run / "checkpoint-5"
    shutil.copytree(model("llama", "bfloat16"), folder)
    (folder / "a note").write_text("ours")
    (folder / "trainer_state.json").write_text("{}")
    argv = ("watch", run, "--out", out, "--once")
    assert convert(*argv).code == 75
    shutil.rmtree(out / "checkpoint-5")
    assert "no longer in" in convert(*argv, "-n").out
    assert convert(*argv).out == ""
    shutil.copyfile(model("llama-tied", "bfloat16") / "config.json", folder / "config.json")
    shutil.copyfile(model("llama-tied", "bfloat16") / "model.safetensors", folder / "model.safetensors")
    (folder / "trainer_state.json").touch()
    assert "digest" in convert(*argv).out
    assert vitruvian.verify(out / "checkpoint-5", model("llama-tied", "bfloat16")).equal
