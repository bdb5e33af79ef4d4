"""`train eval`: checkpoints on disk, on any number of ranks, judged against transformers and the libraries."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.conftest import GOLDEN

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
METRICS, NONE = ("--evaluate.metrics", "[rouge, bleu]"), ("--evaluate.metrics", "[]")
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@pytest.fixture(scope="module")
def trained(model, data, forks, tmp_path_factory):
    """The folder of a run with two checkpoints, the second evaluated by the training itself."""
    place = tmp_path_factory.mktemp("run")
    shutil.copytree(model("llama", vocab_size=253), place / "start")
    shutil.copyfile(GOLDEN / "model.model", place / "start/tokenizer.model")
    tree = {
        "model": {"path": str(place / "start"), "dtype": "fp32"},
        "data": {"train": [str(data)], "seq_length": 64, "validation": {"one": str(data)}},
        "batch": {"size": 8, "micro": 8},
        "optim": {"lr": 0.003},
        "steps": {"train_iters": 40, "iteration_offset": 100},
        "save": {"path": str(place / "save"), "every": 20},
        "evaluate": {"every": 40, "metrics": ["rouge", "bleu"]},
    }
    (place / "config.yml").write_text(yaml.safe_dump(tree))
    code, out = forks(["run", str(place / "config.yml")], 1)
    assert code == 0, out
    return place / "save"


@pytest.fixture
def evaluate(train, monkeypatch):
    """`evaluate(run, ...)`: `train eval` on one rank, in this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return lambda *options: train("eval", *options)


@pytest.fixture
def copy(trained, tmp_path):
    """A run of one's own, moved to another place."""
    return Path(shutil.copytree(trained, tmp_path / "moved"))


def printed(ran) -> dict[str, Any]:
    """What a command printed for programs."""
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def content(run: Path) -> dict[str, bytes]:
    """Everything in a run but the results of evaluations."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.parent.name != "perplexity" and path.name != "evaluations.jsonl"
    }


def loaded(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def alone(model, tokens):
    """Logits of a document by itself, for each token but the first."""
    with torch.no_grad():
        return model(torch.tensor([tokens], dtype=torch.int64)).logits[0, :-1]


def by_hand(folder: Path, prefix: Path) -> dict[str, float]:
    """The metrics of a Hugging Face folder by transformers and the libraries, a document at a time."""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu

    from train.data.tokens.documents import open_documents
    from train.data.tokens.tokenizers import open_vocabulary

    model, documents, known = loaded(folder), open_documents(prefix), open_vocabulary(GOLDEN / "model.model")
    spoken, meant, total, tokens = [], [], 0.0, 0
    for number in range(len(documents.indexed)):
        ids = documents.indexed[number].tolist()
        places = [place for place in range(1, len(ids)) if documents.trained(number, number + 1)[place]]
        if len(ids) > 65 or not places:
            continue
        logits = alone(model, ids)
        labels = torch.tensor(ids, dtype=torch.int64)[places]
        predictions = logits[[place - 1 for place in places]]
        total += float(torch.nn.functional.cross_entropy(predictions, labels, reduction="sum"))
        tokens += len(places)
        spoken.append(known.decode(predictions.argmax(-1).tolist()))
        meant.append(known.decode(labels.tolist()))
    scorer = RougeScorer(list(ROUGE))
    scores = [scorer.score(text, other) for text, other in zip(meant, spoken, strict=True)]
    means = {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}
    return means | {"tokens": tokens, "loss": total / tokens, "bleu": corpus_bleu(spoken, [meant]).score}


def test_any_ranks_and_the_libraries_agree(trained, evaluate, data, convert, forks, tmp_path):
    """Three ranks, uneven shares, real gloo; and a Hugging Face folder made of the checkpoint."""
    single = printed(evaluate(trained, *METRICS, "--json", "--out", tmp_path / "one"))
    code, out = forks(["eval", str(trained), *METRICS, "--json", "--out", str(tmp_path / "three")], 3)
    assert code == 0, out
    three = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert single["global_step"] == three["global_step"] == 140
    assert single["sets"]["one"] == pytest.approx(three["sets"]["one"], rel=1e-6)
    assert single["sets"]["one"]["bleu"] == three["sets"]["one"]["bleu"]
    assert convert("fsdp2hf", trained / "global_step140", tmp_path / "hf").code == 0
    expected = by_hand(tmp_path / "hf", data)
    scores = single["sets"]["one"]
    assert scores["ppl"] == pytest.approx(math.exp(scores.pop("loss")))
    del scores["ppl"]
    assert scores == pytest.approx({name: value for name, value in expected.items() if name != "loss"}, rel=1e-12)
    assert scores["rouge1"] > 0.05
    assert scores["bleu"] > 0.05
    exported = printed(evaluate(trained, "--checkpoint", tmp_path / "hf", *METRICS, "--json"))
    assert exported["global_step"] is None
    assert exported["sets"]["one"] == pytest.approx(three["sets"]["one"], rel=1e-6)


def test_every_checkpoint_without_results(copy, evaluate, data):
    before = content(copy)
    written = (copy / "perplexity/140.csv").read_bytes()
    first = json.loads((copy / "evaluations.jsonl").read_text())
    ran = evaluate(copy, "--all", *NONE)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("global_step=120 one: eval_ppl=")
    assert ran.out.count("\n") == 1
    head, values = csv.reader((copy / "perplexity/120.csv").read_text().splitlines())
    assert head == ["time", "step", "one_TotalCE", "one_CE", "one_PPL"]
    assert values[1] == "120"
    assert (copy / "perplexity/140.csv").read_bytes() == written
    assert content(copy) == before
    nothing = evaluate(copy, "--all")
    assert (nothing.code, nothing.out) == (0, "")
    assert "every checkpoint of" in nothing.err
    assert evaluate(copy, "--checkpoint", 140).code == 0
    lines = [json.loads(line) for line in (copy / "evaluations.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines] == [120, 140]
    assert lines[1] == first  # what the training itself found, to the last bit


def test_other_scores_of_a_step_replace_those_of_the_training_with_a_note(copy, evaluate):
    same = evaluate(copy, "--checkpoint", 140)
    assert (same.code, "had another" in same.err) == (0, False), same.err
    other = evaluate(copy, "--checkpoint", 140, "--evaluate.max_rows", 1)
    told = f"note: {copy / 'evaluations.jsonl'} had another one_"
    assert (other.code, told in other.err) == (0, True), other.err


def test_all_of_a_run_is_each_by_itself(trained, copy, evaluate):
    (copy / "global_step100").symlink_to(trained.parent / "start")  # as train init lays it out
    alone = [printed(evaluate(copy, "--checkpoint", step, "--json", *NONE)) for step in (100, 120, 140)]
    shutil.rmtree(copy / "perplexity", ignore_errors=True)
    ran = evaluate(copy, "--all", "--json", *NONE)
    assert [json.loads(line) for line in ran.out.splitlines()] == alone
    assert alone[0]["sets"] != alone[1]["sets"]


def test_checkpoints_of_other_frameworks(trained, evaluate, convert, tmp_path):
    """A run of GPT-NeoX, all of it; one of Megatron's iterations; the very numbers of the same weights elsewhere."""
    hf, run = tmp_path / "hf", tmp_path / "neox"
    start, config = trained.parent / "start", tmp_path / "config.yml"
    assert convert("fsdp2hf", trained / "global_step120", hf).code == 0
    assert convert("hf2neox", hf, run, "--tp", 2, "--iteration", 700).code == 0
    assert convert("hf2neox", start, tmp_path / "before", "--tp", 2, "--iteration", 500).code == 0
    (tmp_path / "before/global_step500").rename(run / "global_step500")
    tree = yaml.safe_load((trained / "config.yml").read_text())
    config.write_text(yaml.safe_dump(tree | {"save": {"path": str(run)}, "model": {"path": str(run), "dtype": "fp32"}}))
    before = content(run)
    ran = evaluate(config, "--all", "--json", *NONE)
    assert ran.code == 0, ran.err
    scores = {record["global_step"]: record["sets"] for record in map(json.loads, ran.out.splitlines())}
    expected = [printed(evaluate(trained, "--checkpoint", path, "--json", *NONE))["sets"] for path in (start, hf)]
    assert scores == {500: expected[0], 700: expected[1]}
    assert content(run) == before
    for step in scores:
        assert (run / f"perplexity/{step}.csv").read_text().startswith("time,step,one_TotalCE,one_CE,one_PPL")
    assert printed(evaluate(config, "--json", *NONE))["checkpoint"] == str(run / "global_step700")
    assert convert("hf2megatron", hf, tmp_path / "mega", "--tp", 2, "--iteration", 9).code == 0
    place = tmp_path / "mega/iter_0000009"
    other = printed(evaluate(config, "--checkpoint", place, "--json", *NONE))
    assert (other["global_step"], other["sets"]) == (9, expected[1])
    assert not (run / "perplexity/9.csv").exists()


def test_texts_that_nobody_tokenized(copy, evaluate, tmp_path):
    """Perplexity without a begin token, as transformers computes it of each text."""
    from train.data.tokens.tokenizers import open_vocabulary

    texts = {"eu": ["saule upe diena", "the house and the river"], "en": ["translate not you", "a", "sun thanks a"]}
    folder = tmp_path / "tests"
    folder.mkdir()
    for name, lines in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    start = Path(yaml.safe_load((copy / "config.yml").read_text())["model"]["path"])
    ran = evaluate(copy, "--checkpoint", start, "--ppl", folder, "--json", *NONE)
    assert ran.code == 0, ran.err
    model, known = loaded(start), open_vocabulary(GOLDEN / "model.model")
    for name, lines in texts.items():
        total, tokens = 0.0, 0
        for ids in known.encode(lines):
            if len(ids) > 1:
                labels = torch.tensor(ids[1:], dtype=torch.int64)
                total += float(torch.nn.functional.cross_entropy(alone(model, ids.tolist()), labels, reduction="sum"))
                tokens += len(labels)
        scores = json.loads(ran.out)["sets"][name]
        assert scores == pytest.approx(
            {"tokens": tokens, "loss": total / tokens, "ppl": math.exp(total / tokens)}, rel=1e-6
        )
    assert not list(copy.glob("texts.*"))
    assert not list(copy.glob("perplexity/tests"))
    assert evaluate(copy, "--ppl", folder, *NONE).code == 0
    assert (copy / "perplexity/tests/140.csv").read_text().startswith("time,step,en_TotalCE,en_CE,en_PPL,eu_TotalCE")
    (folder / "en.jsonl").write_text('{"text": ""}\n{"text": "a house"}\n')
    refused = evaluate(copy, "--ppl", folder)
    assert refused.code == 5
    assert "1 of 2 records are malformed" in refused.err
    assert not list(copy.glob("texts.*"))


def test_some_rows_are_spread_over_the_set(trained, evaluate, tmp_path):
    scores = [
        printed(evaluate(trained, "--json", "--out", tmp_path, "--evaluate.max_rows", most))["sets"]["one"]
        for most in (7, 1000)
    ]
    evaluation = json.loads((trained / "evaluations.jsonl").read_text().splitlines()[0])
    assert scores[1]["loss"] == evaluation["one_loss"]
    short = evaluate(trained, "--out", tmp_path, "--data.seq_length", 20)
    assert re.search(r"note: one: \d+ documents with \d+ tokens are longer than a row: left out", short.err)
    assert 7 / 59 * 0.6 < scores[0]["tokens"] / scores[1]["tokens"] < 7 / 59 * 1.4


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--checkpoint", 7], 2, "global_step7 is not there"),
        (["--checkpoint", "perplexity"], 3, "is not a checkpoint of a known format; it contains"),
        (["--checkpoint", 120, "--all"], 2, "exclude each other"),
        (["--data.validation", "{}"], 2, "data.validation names no set"),
        (["--evaluate.metrics", "[blue]"], 2, "evaluate.metrics.0 is 'blue'"),
        (["--checkpoint", "START", "--out", "x"], 2, "has no global step"),
        (["--checkpoint", "OTHER"], 2, "is a checkpoint of another run"),
    ],
)
def test_what_cannot_be_evaluated(trained, copy, evaluate, options, code, message):
    places = {"START": trained.parent / "start", "OTHER": trained / "global_step120"}
    ran = evaluate(copy, *(places.get(word, word) for word in options))
    assert ran.code == code, ran.err
    assert message in ran.err


def test_the_folder_of_train_init_knows_where_its_checkpoints_are(copy, evaluate, tmp_path):
    tree = yaml.safe_load((copy / "config.yml").read_text())
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yml").write_text(yaml.safe_dump(tree | {"save": {"path": str(copy)}}))
    assert evaluate(tmp_path / "run", "--checkpoint", 7).err.startswith(f"error: {copy}/global_step7 is not there")


def test_a_folder_without_settings_is_no_run(evaluate, tmp_path):
    ran = evaluate(tmp_path)
    assert ran.code == 3
    assert "has no config.yml" in ran.err
