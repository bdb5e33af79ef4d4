"""Tokenization that is killed, starved or fed with rubbish: a count or an error, and the same bytes in the end."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden/data/1_sft"
ROOT = Path(__file__).parents[2]


def corpus(path, number=4000):
    chosen = random.Random(1)
    vocabulary = "thanks not sentence lūdzu to diena paldies saule sveiki tulko upe māja house the you river"
    with path.open("w") as file:
        for place in range(number):
            if place % 97 == 5:
                file.write("{broken\n")
                continue
            turns = "".join(
                f"<<<|{role}|>>>{' '.join(chosen.choices(vocabulary.split(), k=chosen.randint(1, 60)))}<<<|{role}|>>>"
                for role in ("user", "assistant")
            )
            file.write(json.dumps({"text": turns}) + "\n\n" * (place % 50 == 0))
            file.write("\n")
    return path


def words_of(tmp_path, name, *options):
    paths = {"--vocab-file": GOLDEN / "model.model", "--output-prefix": tmp_path / name}
    usual = [str(word) for pair in paths.items() if pair[0] not in options for word in pair]
    return [
        "tokenize",
        "--input",
        str(tmp_path / "in.jsonl"),
        *usual,
        "--append-eod",
        "--workers",
        "2",
        *map(str, options),
    ]


PROGRAM = (
    "import train.data.tokens.input_ranges as i; i.RANGE = 8192\nimport train.data.tokens.tokenize as t; t.EVERY = 0\n"
)


def spawn(argv, before=""):
    """The command in a process of its own, with small ranges and a note of every one."""
    code = f"{PROGRAM}{before}\nif __name__ == '__main__':\n    from train.cli import main; main()"
    script = Path(argv[argv.index("--output-prefix") + 1]).parent / "program.py"
    script.write_text(code)
    return subprocess.Popen(
        [sys.executable, str(script), *argv], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def outputs(tmp_path, name):
    return {kind: (tmp_path / f"{name}_text_document.{kind}").read_bytes() for kind in ("bin", "idx", "json")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("expected")
    corpus(tmp_path / "in.jsonl")
    ran = spawn(words_of(tmp_path, "P"))
    _, err = ran.communicate(timeout=120)
    assert ran.returncode == 0, err
    return outputs(tmp_path, "P")


DYING = """
import atexit, multiprocessing, os, signal, sys, threading
number = 0
def count(event, args):
    global number
    if event in ("open", "os.rename", "os.remove") and "P_text_document" in str(args[0]):
        number += 1
        if number == {limit}:
            threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGKILL)).start()
if multiprocessing.parent_process() is None:
    sys.addaudithook(count)
    atexit.register(lambda: print(number))
"""
"""The process is killed `delay` seconds after it has opened, renamed and removed `limit` files of its output."""


@pytest.mark.slow
def test_killed_at_any_moment_and_run_again(tmp_path, expected):
    corpus(tmp_path / "in.jsonl")
    whole = spawn(words_of(tmp_path, "P"), DYING.format(limit=0, delay=0))
    out, err = whole.communicate(timeout=120)
    assert (whole.returncode, outputs(tmp_path, "P")) == (0, expected), err
    for path in tmp_path.glob("P_text_document*"):
        path.unlink()
    chosen, killed = random.Random(5), 0
    for _ in range(12):
        dying = DYING.format(limit=chosen.randint(1, int(out.split()[-1]) // 4), delay=chosen.uniform(0, 0.01))
        ran = spawn(words_of(tmp_path, "P"), dying)
        _, err = ran.communicate(timeout=120)
        assert ran.returncode in (-signal.SIGKILL, 0), err
        killed += ran.returncode != 0
        if (tmp_path / "P_text_document.idx").exists():
            break
    else:
        assert spawn(words_of(tmp_path, "P")).wait(timeout=120) == 0
    assert killed > 1
    assert outputs(tmp_path, "P") == expected


@pytest.mark.slow
def test_a_worker_that_outlives_a_killed_run_writes_into_no_other(tmp_path, expected):
    """It has taken a range from the pipe and opens its files only while the next run has the same range ready."""
    corpus(tmp_path / "in.jsonl")
    slow = "import time\nimport train.data.tokens.workers as w\nencode = w.encode_range\n"
    slow += f"def later(*a):\n    open({str(tmp_path / 'taken')!r}, 'w').close()\n    time.sleep(3)\n"
    slow += "    return encode(*a)\n"
    killed = spawn(words_of(tmp_path, "P"), f"{slow}w.encode_range = later\n")
    for _ in range(600):
        if (tmp_path / "taken").exists():
            break
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    wait = "import time\nfirst = t._first_of\ndef later(*a):\n    t._first_of = first\n    time.sleep(5)\n"
    wait += "    return first(*a)\n"
    ran = spawn(words_of(tmp_path, "P"), f"{wait}t._first_of = later\n")
    _, err = ran.communicate(timeout=120)
    assert ran.returncode == 0, err
    assert outputs(tmp_path, "P") == expected


@pytest.mark.slow
@pytest.mark.parametrize(("send", "number"), [(os.kill, signal.SIGTERM), (os.killpg, signal.SIGUSR1)])
def test_a_signal_stops_it_and_the_same_command_goes_on(tmp_path, expected, send, number):
    """To it alone, or to its workers too, as Slurm and timeout do."""
    corpus(tmp_path / "in.jsonl")
    slow = "import time\nmove = t._move\ndef later(*a):\n    time.sleep(0.05)\n    move(*a)\nt._move = later\n"
    if send is os.killpg:  # so that the writer waits for workers
        slow = "import time\nimport train.data.tokens.workers as w\nencode = w.encode_range\n"
        slow += "def later(*a):\n    time.sleep(0.2)\n    return encode(*a)\nw.encode_range = later\n"
    ran = spawn(words_of(tmp_path, "P"), slow)
    done = tmp_path / "P_text_document.partial/done.json"
    for _ in range(600):
        if done.exists():
            break
        time.sleep(0.05)
    send(ran.pid, number)
    _, err = ran.communicate(timeout=60)
    assert ran.returncode == 75, err
    assert "run the same command again" in err
    assert json.loads(done.read_text())["ranges"] > 0
    resumed = spawn(words_of(tmp_path, "P"))
    _, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert outputs(tmp_path, "P") == expected


def test_no_room_is_told_and_a_later_run_goes_on(tmp_path, expected):
    corpus(tmp_path / "in.jsonl")

    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    argv = words_of(tmp_path, "P")
    script = f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{PROGRAM}"
    (tmp_path / "program.py").write_text(script + "if __name__ == '__main__':\n    from train.cli import main; main()")
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), *argv], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, preexec_fn=small, check=False,
    )  # fmt: skip
    assert ran.returncode == 7, ran.stderr
    assert f"error: {tmp_path / 'P_text_document.partial'}: File too large" in ran.stderr
    assert not (tmp_path / "P_text_document.idx").exists()
    resumed = spawn(argv)
    _, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert outputs(tmp_path, "P") == expected


def test_a_worker_that_dies_is_an_error_and_the_work_is_kept(tmp_path, expected):
    corpus(tmp_path / "in.jsonl")
    die = "import os\nimport train.data.tokens.workers as w\nreal = w.encode_range\ndef dies(job, encode, part, out):\n"
    die += "    if part.begin == 40960: os._exit(9)\n    return real(job, encode, part, out)\nw.encode_range = dies\n"
    ran = spawn(words_of(tmp_path, "P"), die)
    _, err = ran.communicate(timeout=60)
    assert ran.returncode == 3, err
    assert "a worker died on" in err
    assert "bytes 40960 to 49152" in err
    resumed = spawn(words_of(tmp_path, "P"))
    assert resumed.wait(timeout=120) == 0
    assert outputs(tmp_path, "P") == expected


def test_dropped_records_are_counted_with_their_lines(train, tmp_path):
    good = '{"text": "<<<|user|>>>a<<<|user|>>><<<|assistant|>>>b<<<|assistant|>>>"}'
    bad = {
        "json": "{broken",
        "object": "null",
        "field": '{"txt": "a"}',
        "type": '{"text": 5}',
        "odd": '{"text": "<<<|user|>>>a<<<|user|>>><<<|assistant|>>>b"}',
        "pair": '{"text": "<<<|user|>>>a<<<|assistant|>>>"}',
        "outside": '{"text": "hm <<<|user|>>>a<<<|user|>>><<<|assistant|>>>b<<<|assistant|>>>"}',
        "empty turn": '{"text": "<<<|user|>>> <<<|user|>>><<<|assistant|>>>b<<<|assistant|>>>"}',
        "role": '{"text": "<<<|usr|>>>a<<<|usr|>>><<<|assistant|>>>b<<<|assistant|>>>"}',
        "no reply": '{"text": "<<<|user|>>>a<<<|user|>>>"}',
        "no marker": '{"text": "plain"}',
        "empty": '{"text": " "}',
        "keys": '{"conversations": [{"from": "human", "value": "a"}]}',
    }
    lines = [good, *(line for reason, line in bad.items() if reason != "keys"), good]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    ran = train(*words_of(tmp_path, "P", "--max-drop-rate", 1, "--json"))
    assert ran.code == 0, ran.err
    counts = json.loads(ran.out)
    assert counts["documents"] == 2
    assert {reason: counts.get(reason) for reason in bad if reason != "keys"} == {
        reason: 1 for reason in bad if reason != "keys"
    }
    refused = train(*words_of(tmp_path, "Q", "--max-drop-rate", 0.5))
    assert refused.code == 5
    assert "12 of 14 records are malformed" in refused.err
    assert f"{tmp_path / 'in.jsonl'}:" in refused.err
    strict = train(*words_of(tmp_path, "R", "--strict"))
    assert strict.code == 5
    linted = train("lint", tmp_path / "in.jsonl", "--json")
    assert linted.code == 6
    assert json.loads(linted.out)["malformed"] == 12
    (tmp_path / "in.jsonl").write_text(bad["keys"] + "\n")
    none = train(*words_of(tmp_path, "S", "--format", "conversations"))
    assert none.code == 3
    assert "sharegpt" in none.err
    assert not list(tmp_path.glob("S*"))


def test_a_run_killed_while_it_publishes_is_finished_by_the_next(tmp_path, expected):
    """Between its renames: what was renamed is gone from the folder of the work."""
    corpus(tmp_path / "in.jsonl")
    die = "import os, signal\nfrom pathlib import Path\nreal = Path.rename\ndef rename(path, to):\n    real(path, to)\n"
    die += "    if str(to).endswith('document.bin'): os.kill(os.getpid(), signal.SIGKILL)\nPath.rename = rename\n"
    ran = spawn(words_of(tmp_path, "P"), die)
    assert ran.wait(timeout=120) == -signal.SIGKILL
    assert (tmp_path / "P_text_document.bin").exists()
    resumed = spawn(words_of(tmp_path, "P"))
    _, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert outputs(tmp_path, "P") == expected


def test_input_that_changes_is_noticed(tmp_path):
    corpus(tmp_path / "in.jsonl")
    grow = "move = t._move\ndef later(path, file):\n    move(path, file)\n"
    grow += "    open(IN, 'a').write('\\n')\nt._move = later\n"
    ran = spawn(words_of(tmp_path, "P"), f"IN = {str(tmp_path / 'in.jsonl')!r}\n{grow}")
    _, err = ran.communicate(timeout=120)
    assert ran.returncode == 3, err
    assert "an input file changed while it was read" in err
    assert not list(tmp_path.glob("P_*"))


def test_control_c_ends_at_once(tmp_path):
    """To the whole group, as a terminal sends it, while processes start; and inside a range that takes long."""
    import gzip

    corpus(tmp_path / "in.jsonl", 400)
    text = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(text * 200, 1))
    argv = words_of(tmp_path, "P")
    argv[2] += ".gz"
    for seconds in (0.0, 2.0):
        ran = spawn(argv)
        latest = time.monotonic() + 30
        while not Path(f"/proc/{ran.pid}/task/{ran.pid}/children").read_text() and time.monotonic() < latest:
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(ran.pid, signal.SIGINT)
        began = time.monotonic()
        _, err = ran.communicate(timeout=60)
        assert ran.returncode == 75, err
        assert "Traceback" not in err
        assert time.monotonic() - began < 10


def test_the_output_is_never_overwritten_unasked(train, tmp_path):
    corpus(tmp_path / "in.jsonl", 20)
    assert train(*words_of(tmp_path, "P")).code == 0
    before = outputs(tmp_path, "P")
    refused = train(*words_of(tmp_path, "P"))
    assert refused.code == 7
    assert "--force" in refused.err
    corpus(tmp_path / "in.jsonl", 30)
    assert train(*words_of(tmp_path, "P", "--force")).code == 0
    assert outputs(tmp_path, "P")["bin"] != before["bin"]


def test_other_work_in_the_same_place_is_refused(train, tmp_path):
    corpus(tmp_path / "in.jsonl", 20)
    staging = tmp_path / "P_text_document.partial"
    staging.mkdir()
    (staging / "notes.txt").write_text("the user's own")
    for options in ([], ["--force"]):
        refused = train(*words_of(tmp_path, "P", *options))
        assert (refused.code, f"{staging} is needed for the work and holds something else" in refused.err) == (7, True)
    (staging / "notes.txt").rename(staging / "lock")
    note = {"fingerprint": "x", "ranges": 1, "lengths": {"bin": 0, "sizes": 0, "mask": 0}, "lines": 0}
    (staging / "done.json").write_text(json.dumps(note | {"counts": {}, "examples": {}}))
    refused = train(*words_of(tmp_path, "P"))
    assert refused.code == 7
    assert "unfinished work of another command" in refused.err
    assert train(*words_of(tmp_path, "P", "--force")).code == 0


def _other_bytes(path, monkeypatch):
    """As `cp -p` of another file leaves them: of the same size and time."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"diena", b"dienu"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def _other_version(path, monkeypatch):
    monkeypatch.setattr("train.data.tokens.workers.version", lambda name: "0.0.1")


@pytest.mark.parametrize("change", [_other_bytes, _other_version])
def test_work_on_another_input_or_by_another_version_is_not_gone_on_with(train, tmp_path, monkeypatch, change):
    corpus(tmp_path / "in.jsonl", 20)
    assert train(*words_of(tmp_path, "P", "--strict")).code == 5  # what is tokenized stays
    change(tmp_path / "in.jsonl", monkeypatch)
    refused = train(*words_of(tmp_path, "P"))
    assert refused.code == 7
    assert "unfinished work of another command (or the input has changed since)" in refused.err
    assert train(*words_of(tmp_path, "P", "--force")).code == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--eod", "<|assistant|>"], 2, "<|assistant|> opens and closes turns"),
        (["--jsonl-keys", "a/b"], 2, "cannot hold a slash"),
        (["--eod", "<|nobody|>"], 2, "no control token <|nobody|>"),
        (["--eod", "<|pad|>"], 2, "is the padding token"),
        (["--control-tokens", "user=8,assistant=7"], 2, "<|user|> is given as 8"),
        (["--control-tokens", "user"], 2, "is not a list such as user=7"),
        (["--tokenizer-type", "HFTokenizer"], 2, "is not a file for HFTokenizer"),
        (["--chat-template", "chatml"], 2, "has no effect on records of the format control-text"),
        (["--vocab-file", str(GOLDEN / "sft.jsonl")], 3, "is not a SentencePiece model"),
        (["--vocab-file", "nowhere.model"], 3, "nowhere.model is not there"),
        (["--output-prefix", "nowhere/P"], 2, "mkdir -p nowhere"),
    ],
)
def test_wrong_words(train, tmp_path, options, code, message):
    corpus(tmp_path / "in.jsonl", 20)
    ran = train(*words_of(tmp_path, "P", *options))
    assert ran.code == code
    assert message in ran.err
