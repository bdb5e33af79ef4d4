"""`train fetch` of sets: the library `datasets` streams them from a Hub on loopback.

The real sets cannot be downloaded where these tests run. Each shipped recipe is run on an imitation with the columns,
subsets, splits and file formats of its source, as their pages show them (November 2026); for the sets of HiTZ only the
column `conversations` (from and value) and `conversation_id` are known.
"""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.fetching import environment, lines_of, parquet, recipe, start, there
from tests.hub.server import Fault, Hub
from tests.hub.sets import add_set, files_asked

LATXA = ("euscrawl-v1.1", "egunkaria", "booktegi", "wikipedia", "culturax", "colossal-oscar", "hplt-v1")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as running:
        yield running
    assert not running.server.broken, running.server.broken


@pytest.fixture
def env(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path / "home", HF_ENDPOINT=hub.endpoint)


def card(**configs: dict[str, str]) -> bytes:
    """A README that says which files are which split."""
    listed = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
        for name, splits in configs.items()
    ]
    return f"---\nconfigs: {json.dumps(listed)}\n---\n".encode()


def aya(count: int, start: int = 0) -> list[dict[str, str]]:
    return [
        {
            "inputs": f"Galdera {number}: zer da hau?", "targets": f"Erantzuna {number}.", "language": "Basque",
            "language_code": "eus" if number % 3 == 0 else "eng", "annotation_type": "original-annotations",
            "user_id": "u",
        }
        for number in range(start, start + count)
    ]  # fmt: skip


def add_aya(hub: Hub, train: int = 250, test: int = 60) -> str:
    return add_set(
        hub,
        "CohereForAI/aya_dataset",
        {
            "README.md": card(
                default={"train": "data/train-*", "test": "data/test-*"}, demographics={"train": "demographics/*"}
            ),
            "data/train-00000-of-00001.parquet": parquet(aya(train)),
            "data/test-00000-of-00001.parquet": parquet(aya(test, train)),
            "demographics/train.parquet": parquet([{"user_id": 1}]),
        },
    )


def ultra(count: int) -> list[dict[str, object]]:
    return [
        {
            "model_name_response_base": "m",
            "instruction": f"Instruction {number % 400}",
            "response": f"Response {number}",
            "difficulty": "easy",
            "other_tags": ["a"],
            "embedding": [random.random() for _ in range(64)],
            "score": 1.5,
            "messages": [{"content": "c", "role": "user"}],
            "safe": True,
        }
        for number in range(count)
    ]


def magpie(count: int) -> list[dict[str, object]]:
    return [
        {
            "conversation_id": f"translation_{number}" if number % 4 == 0 else f"math_{number}",
            "conversations": [{"from": "human", "value": f"q{number}"}, {"from": "gpt", "value": f"a{number}"}],
        }
        for number in range(count)
    ]


def interactions(count: int, name: str) -> list[dict[str, object]]:
    messages = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "a")]
    turns = [{"content": content, "role": role} for role, content in messages]
    return [{"id": f"{name}/{number}", "conversations": turns} for number in range(count)]


def test_aya_in_basque(hub, env, tmp_path):
    """Both splits in one file, in the order of the source: the users' pool of processes has another order each time."""
    commit = add_aya(hub)
    ran, report, sampled = there(
        env,
        ["aya-basque", tmp_path / "AYA.jsonl"],
        ["aya-basque", tmp_path / "again.jsonl", "--json"],
        ["aya-basque", tmp_path / "test.jsonl", "--split", "test"],
    )
    assert (ran.code, ran.err) == (0, "")
    expected = [record for record in aya(310) if record["language_code"] == "eus"]
    assert len(expected) == 104
    assert ran.out == (
        f"310 read, 104 kept, 206 dropped (filter 206); commit {commit}\n"
        f"Saved 104 examples to {tmp_path / 'AYA.jsonl'}\n"
    )
    text = "".join(
        json.dumps(
            {
                "conversations": [
                    {"role": "user", "content": record["inputs"]}, {"role": "assistant", "content": record["targets"]}
                ]
            },
            ensure_ascii=False,
        )
        + "\n"
        for record in expected
    )  # fmt: skip
    assert (tmp_path / "AYA.jsonl").read_text() == (tmp_path / "again.jsonl").read_text() == text
    about = json.loads(report.out)
    assert about["commit"] == commit
    assert about["parts"] == [f"{split} of CohereForAI/aya_dataset default" for split in ("train", "test")]
    assert sampled.code == 0
    assert len(lines_of(tmp_path / "test.jsonl")) == 20


def test_magpie_ultra(hub, env, tmp_path):
    """The users' two files: all, and a sample of them."""
    records = ultra(1500)
    content = parquet(records, 500)
    add_set(
        hub, "argilla/magpie-ultra-v0.1", {"README.md": card(default={"train": "data/*"}), "data/t.parquet": content}
    )
    complete, drawn = there(
        env,
        ["magpie-ultra", tmp_path / "50K.jsonl"],
        ["magpie-ultra", tmp_path / "1K.jsonl", "--sample", 100, "--seed", 33],
    )
    assert "1,500 read, 400 kept, 1,100 dropped (duplicate 1,100)" in complete.out
    assert (complete.code, drawn.code) == (0, 0)
    first = {}
    for record in records:
        first.setdefault(record["instruction"], record["response"])
    turns = [[turn["content"] for turn in record["conversations"]] for record in lines_of(tmp_path / "50K.jsonl")]
    assert turns == [[prompt, reply] for prompt, reply in first.items()]
    lines = (tmp_path / "50K.jsonl").read_bytes().splitlines()
    sample = (tmp_path / "1K.jsonl").read_bytes().splitlines()
    assert len(sample) == 100
    assert [line for line in lines if line in set(sample)] == sample


@pytest.mark.parametrize("name", ["magpie-8b", "magpie-8b-filtered", "magpie-70b", "magpie-70b-filtered"])
def test_magpie(hub, env, tmp_path, name):
    from train.data.fetch.recipe_yaml import load

    (source,) = load(name).source
    add_set(hub, source, {"README.md": card(default={"train": "data/*"}), "data/t.parquet": parquet(magpie(200))})
    (ran,) = there(env, [name, tmp_path / "m.jsonl"])
    assert "200 read, 150 kept, 50 dropped (filter 50)" in ran.out
    assert lines_of(tmp_path / "m.jsonl")[0] == {
        "conversations": [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}]
    }


def test_code_act(hub, env, tmp_path):
    """The sentence of the users' script, and what it writes: `id` stays."""
    files = {
        f"data/{name}.parquet": parquet(interactions(count, name))
        for name, count in (("codeact", 71), ("general", 712))
    }
    splits = {"codeact": "data/codeact*", "general": "data/general*"}
    add_set(hub, "xingyaoww/code-act", {"README.md": card(default=splits), **files})
    (tmp_path / "none.yml").write_text("source: xingyaoww/code-act\nconversations: conversations\n")
    ran = there(
        env,
        ["codeact", tmp_path / "data/codeact.jsonl"],
        ["general", tmp_path / "data/general.jsonl"],
        [tmp_path / "none.yml", tmp_path / "none.jsonl"],
    )
    assert ran[0].out.endswith(f"Saved 71 examples to {tmp_path / 'data/codeact.jsonl'}\n")
    assert ran[1].out.endswith(f"Saved 712 examples to {tmp_path / 'data/general.jsonl'}\n")
    records = lines_of(tmp_path / "data/codeact.jsonl")
    assert [record["id"] for record in records] == [f"codeact/{number}" for number in range(71)]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [turn["role"] for turn in records[0]["conversations"]] == roles
    assert ran[2].code == 2
    assert "has 2 splits, and the recipe names none" in ran[2].err


def test_latxa_corpus(hub, env, tmp_path):
    """Seven subsets of compressed JSON lines; text that looks like a date or a number stays text."""
    files = {}
    for number, name in enumerate(LATXA):
        texts = [f"{name} lehena", "2024-01-01", "007", " "][: 4 if number == 0 else 1]
        lines = "".join(json.dumps({"doc_id": str(number), "text": text}) + "\n" for text in texts)
        files[f"{name}/train.jsonl.gz"] = gzip.compress(lines.encode())
    splits = {name: {"train": f"{name}/train.jsonl.gz"} for name in LATXA}
    add_set(hub, "HiTZ/latxa-corpus-v1.1", {"README.md": card(**splits), **files})
    (ran,) = there(env, ["latxa-corpus", tmp_path / "latxa.jsonl"])
    assert "10 read, 9 kept, 1 dropped (empty turn 1)" in ran.out, ran.err
    texts = [f"{LATXA[0]} lehena", "2024-01-01", "007", *(f"{name} lehena" for name in LATXA[1:])]
    assert lines_of(tmp_path / "latxa.jsonl") == [{"text": text} for text in texts]


def test_a_table_on_the_hub_keeps_its_words(hub, env, tmp_path):
    add_set(hub, "acme/pairs", {"train.csv": b"English,Latvian\nNA,null\nNone,nan\n"})
    (ran,) = there(env, ["english-latvian", tmp_path / "p.jsonl", "--source", "acme/pairs"])
    assert "2 kept, 0 dropped" in ran.out
    assert "NA<<<|user|>>><<<|assistant|>>>null" in lines_of(tmp_path / "p.jsonl")[0]["text"]


def test_a_folder_here_is_not_taken_for_a_set(hub, env, tmp_path, monkeypatch):
    """The library prefers it; then the commit that is told would be that of other data."""
    import tests.data.fetching as module

    add_aya(hub)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "CohereForAI/aya_dataset").mkdir(parents=True)
    (ran,) = there(env, ["aya-basque", "out.jsonl"])
    assert ran.code == 2
    assert "is a set of the Hub and also a folder here" in ran.err


def test_a_program_is_not_run(hub, env, tmp_path):
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    add_set(hub, "acme/script", {"script.py": trap.encode(), "README.md": b"x"})
    recipe_file = recipe(tmp_path / "r.yml", "source: acme/script\nuser: q\nassistant: a\n")
    (ran,) = there(env, [recipe_file, tmp_path / "out.jsonl"])
    assert ran.code == 4, ran.err
    assert "scripts of others are not run here" in ran.err
    assert not (tmp_path / "ran").exists()


def test_what_does_not_exist(hub, env, tmp_path):
    add_aya(hub)
    hub.store.create("datasets/acme/secret", private=True)
    recipes = {
        "set": "source: acme/nothing\nuser: q\nassistant: a\n",
        "secret": "source: acme/secret\nuser: q\nassistant: a\n",
        "config": "source: CohereForAI/aya_dataset\nconfig: defalt\nuser: inputs\nassistant: targets\nsplits: train\n",
        "field": "source: CohereForAI/aya_dataset\nconfig: default\nuser: input\nassistant: targets\nsplits: train\n",
    }
    files = [recipe(tmp_path / f"{name}.yml", text) for name, text in recipes.items()]
    out = tmp_path / "out.jsonl"
    ran = there(
        env,
        *([file, out] for file in files),
        ["aya-basque", out, "--split", "tran"],
        ["aya-basque", out, "--revision", "v9"],
    )
    assert [result.code for result in ran] == [2] * 6
    expected = (
        "acme/nothing or its revision does not exist", "does not give acme/secret to this token",
        "BuilderConfig 'defalt'", "has no field 'input': did you mean inputs?",
        "has no split 'tran': did you mean train?", "or its revision",
    )  # fmt: skip
    for result, message in zip(ran, expected, strict=True):
        assert message in result.err
        assert result.out == ""
    assert not list(tmp_path.glob("out*"))


# --- networks that fail ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_network(hub, env, tmp_path):
    out = tmp_path / "out.jsonl"
    hub.faults.append(Fault("GET /api/datasets/acme/x$", status=503, times=99))
    nowhere = env | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    unknown = env | {"HF_ENDPOINT": "http://no-such-host.invalid"}
    offline = env | {"HF_HUB_OFFLINE": "1"}
    recipe_file = recipe(tmp_path / "r.yml", "source: acme/x\nuser: q\nassistant: a\n")
    for variables, code, message in (
        (env, 8, "the Hub is not able to serve acme/x now (503"), (nowhere, 8, "acme/x cannot be reached"),
        (unknown, 8, "acme/x cannot be reached"), (offline, 2, "HF_HUB_OFFLINE is set"),
    ):  # fmt: skip
        (ran,) = there(variables, [recipe_file, out])
        assert (ran.code, ran.out) == (code, "")
        assert message in ran.err
        assert len(ran.err.splitlines()) == 2, ran.err  # the sentence and the hint
    assert not list(tmp_path.glob("out*"))


IMPATIENT = """
import time
import datasets
datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 2
time.sleep = lambda _: None
"""


@pytest.mark.slow
def test_a_network_that_goes_away_leaves_nothing(hub, env, tmp_path, monkeypatch):
    """In the middle of a file: the library asks again and again, for minutes, which the test shortens."""
    import tests.data.fetching as module

    lines = "".join(json.dumps({"q": f"{number}" * 200, "a": "y"}) + "\n" for number in range(10000))
    add_set(hub, "acme/long", {"a.jsonl": lines.encode(), "b.jsonl": lines.encode()})
    recipe_file = recipe(tmp_path / "r.yml", "source: acme/long\nuser: q\nassistant: a\n")
    monkeypatch.setattr(module, "MANY", IMPATIENT + module.MANY)
    add_set(hub, "acme/table", {"a.parquet": parquet(aya(250)), "b.parquet": parquet(aya(250))})
    table = recipe(tmp_path / "t.yml", "source: acme/table\nuser: inputs\nassistant: targets\n")
    hub.faults.append(Fault("GET /datasets/acme/.*/resolve/.*/b[.]", drop_after=0, times=9999))
    for ran in there(env, [recipe_file, tmp_path / "out.jsonl"], [table, tmp_path / "out.jsonl"]):
        assert ran.code == 8, ran.err
        assert "cannot be reached" in ran.err
        assert not list(tmp_path.glob("out*"))
    hub.faults.clear()
    (ran,) = there(env, [recipe_file, tmp_path / "out.jsonl"])
    assert "Saved 20000 examples" in ran.out


def test_one_commit_is_read_though_the_set_changes(hub, env, tmp_path):
    """A set that is changed between two splits is still read as it was."""
    first = add_aya(hub)
    (ran,) = there(env, ["aya-basque", tmp_path / "one.jsonl", "--json"])
    second = add_aya(hub, 30, 6)
    (old, new) = there(
        env,
        ["aya-basque", tmp_path / "old.jsonl", "--json", "--revision", first],
        ["aya-basque", tmp_path / "new.jsonl"],
    )
    assert json.loads(ran.out)["commit"] == json.loads(old.out)["commit"] == first != second
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "old.jsonl").read_bytes()
    assert f"commit {second}" in new.out
    assert all(first in path or second in path for path, _ in hub.asked("GET /datasets/"))


def test_interrupted(hub, env, tmp_path):
    import threading

    add_aya(hub)
    stuck = threading.Event()
    hub.faults.append(Fault("GET /datasets/CohereForAI/aya_dataset/resolve/.*/test", stall=(0, stuck), times=9))
    for number in (15, 2):
        process = start(env, "aya-basque", tmp_path / "AYA.jsonl")
        began, requests = time.monotonic(), len(hub.log)
        while time.monotonic() - began < 60 and not any("/data/train" in request[1] for request in hub.log[requests:]):
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 75, err
        assert out == ""
        assert err.splitlines()[-1] == "error: interrupted"
        assert "Traceback" not in err
    stuck.set()
    assert not list(tmp_path.glob("AYA*"))


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_copy_is_read_where_there_is_no_network(hub, env, tmp_path):
    """The set itself, which `datasets` loads as it would from the Hub; a second run asks for nothing."""
    import subprocess
    import sys

    commit = add_aya(hub)
    copy = tmp_path / "shared/aya"
    (ran,) = there(env, ["aya-basque", tmp_path / "one.jsonl", "--cache", copy])
    assert f"commit {commit}" in ran.out, ran.err
    files = sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())
    assert files == [
        ".gitattributes", ".vitruvian.json", "README.md", "data/test-00000-of-00001.parquet",
        "data/train-00000-of-00001.parquet", "demographics/train.parquet",
    ][1:]  # fmt: skip
    requests = len(hub.log)
    offline = env | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "other")}
    again, direct = there(
        offline,
        ["aya-basque", tmp_path / "two.jsonl", "--cache", copy],
        ["aya-basque", tmp_path / "three.jsonl", "--source", copy],
    )
    assert (again.code, direct.code) == (0, 0), again.err + direct.err
    assert len(hub.log) == requests
    assert len({(tmp_path / f"{name}.jsonl").read_bytes() for name in ("one", "two", "three")}) == 1
    code = f"from datasets import load_dataset; print({{k: len(v) for k, v in load_dataset({str(copy)!r}).items()}})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=offline, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "{'train': 250, 'test': 60}\n", done.stderr


def test_copies_are_never_mixed(hub, env, tmp_path):
    add_aya(hub)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("x")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/.vitruvian.json").write_text("{")
    ran = there(
        env,
        ["aya-basque", tmp_path / "1.jsonl", "--cache", tmp_path / "copy"],
        ["codeact", tmp_path / "2.jsonl", "--cache", tmp_path / "copy"],
        ["aya-basque", tmp_path / "3.jsonl", "--cache", tmp_path / "copy", "--revision", "v2"],
        ["aya-basque", tmp_path / "4.jsonl", "--cache", tmp_path / "full"],
        ["aya-basque", tmp_path / "5.jsonl", "--cache", tmp_path / "odd"],
        ["aya-basque", tmp_path / "6.jsonl", "--cache", tmp_path / "full/thesis.tex"],
    )
    assert [result.code for result in ran] == [0, 7, 7, 7, 3, 7]
    assert "is a copy of CohereForAI/aya_dataset at its newest commit" in ran[1].err


def test_an_interrupted_copy_goes_on_at_its_commit(hub, env, tmp_path):
    first = add_aya(hub)
    copy = tmp_path / "copy"
    hub.faults.append(Fault("GET /datasets/.*/resolve/.*/data/test", status=403, times=99))
    (ran,) = there(env, ["aya-basque", tmp_path / "1.jsonl", "--cache", copy])
    assert ran.code == 2, ran.err
    assert json.loads((copy / ".vitruvian.json").read_text())["complete"] is False
    assert not (tmp_path / "1.jsonl").exists()
    hub.faults.clear()
    add_aya(hub, 30, 6)
    before = len(files_asked(hub))
    (ran,) = there(env, ["aya-basque", tmp_path / "1.jsonl", "--cache", copy])
    assert f"commit {first}" in ran.out, ran.err
    assert "data/train-00000-of-00001.parquet" not in files_asked(hub)[before:]


def test_a_copy_with_another_byte_is_not_taken(hub, env, tmp_path):
    add_aya(hub)
    repo = hub.store.repos["datasets/CohereForAI/aya_dataset"]
    entry = repo.commits[repo.refs["main"]]["data/test-00000-of-00001.parquet"]
    path = hub.store.path(entry)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (ran,) = there(env, ["aya-basque", tmp_path / "1.jsonl", "--cache", tmp_path / "copy"])
    assert ran.code == 6, ran.err
    assert "does not have the hash that the Hub gives" in ran.err
    assert not (tmp_path / "1.jsonl").exists()


# --- folders ---------------------------------------------------------------------------------------------------------


def test_folders(tmp_path):
    """As `datasets` reads them: named splits, and what save_to_disk left."""
    from datasets import Dataset, DatasetDict

    folder = tmp_path / "folder"
    (folder / "data").mkdir(parents=True)
    for split, count in (("train", 30), ("test", 6)):
        (folder / f"data/{split}-00000.parquet").write_bytes(parquet(aya(count)))
    DatasetDict({"train": Dataset.from_list(aya(30)), "test": Dataset.from_list(aya(6))}).save_to_disk(
        tmp_path / "saved"
    )
    Dataset.from_list(aya(30)).save_to_disk(tmp_path / "one")
    recipe_file = recipe(tmp_path / "r.yml", "source: ./x\nuser: inputs\nassistant: targets\n")
    env = environment(tmp_path / "home", HF_HUB_OFFLINE="1")
    ran = there(
        env,
        ["aya-basque", tmp_path / "1.jsonl", "--source", folder],
        [recipe_file, tmp_path / "2.jsonl", "--source", tmp_path / "saved", "--split", "test", "--split", "train"],
        [recipe_file, tmp_path / "3.jsonl", "--source", tmp_path / "one"],
        [recipe_file, tmp_path / "4.jsonl", "--source", tmp_path / "saved"],
        [recipe_file, tmp_path / "5.jsonl", "--source", tmp_path / "saved", "--split", "dev"],
        [recipe_file, tmp_path / "6.jsonl", "--source", tmp_path / "hub/empty"],
    )
    assert [result.code for result in ran] == [0, 0, 0, 2, 2, 2], [result.err for result in ran]
    assert len(lines_of(tmp_path / "1.jsonl")) == 12
    assert len(lines_of(tmp_path / "2.jsonl")) == 36
    assert lines_of(tmp_path / "2.jsonl")[6:] == lines_of(tmp_path / "3.jsonl")
    assert "has 2 splits" in ran[3].err
    assert "has no split 'dev'" in ran[4].err
