"""ROUGE and BLEU: what the libraries say of the whole set, however it is divided; predictions beside the loss."""

from __future__ import annotations

import builtins
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from formats.errors import RefusedError, UnsupportedError
from tests.train.conftest import GOLDEN
from train.data.rows import IGNORED, open_rows
from train.model.trainee import summed_loss
from train.run.evaluate import Score, line_of
from train.run.metrics import ROUGE, open_judge
from train.settings.config import Data

MODEL = GOLDEN / "model.model"


@pytest.fixture
def rows(data):
    return open_rows(Data(train=[data], seq_length=64), [data], 1)


@pytest.fixture
def judge(rows):
    return open_judge(["rouge", "bleu"], MODEL, {"one": rows})


def guessed(flat, random):
    """Labels of which some are other tokens: most n-grams are right, and some are not."""
    predicted = np.where(flat.labels == IGNORED, 3, flat.labels)
    wrong = random.random(len(predicted)) < 0.1
    predicted[wrong] = random.integers(0, 253, int(wrong.sum()))
    return predicted


def test_the_sums_of_any_shares_are_the_libraries_on_the_whole_set(rows, judge):
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu
    from sentencepiece import SentencePieceProcessor

    random, shares = np.random.default_rng(0), [judge.nothing for _ in range(3)]
    spoken, meant = [], []
    processor = SentencePieceProcessor(model_file=str(MODEL))
    drop = {number for number in range(253) if processor.id_to_piece(number).startswith("<|")}
    for number in range(len(rows)):
        flat = rows.flat([number])
        predicted = guessed(flat, random)
        shares[number % 3] += judge.sums(flat, predicted)
        for begin, stop in zip(flat.cu_seqlens, flat.cu_seqlens[1:], strict=False):
            places = [place for place in range(begin, stop) if flat.labels[place] != IGNORED]
            texts = [[int(tokens[place]) for place in places] for tokens in (predicted, flat.labels)]
            both = [processor.decode([token for token in ids if token not in drop]) for ids in texts]
            spoken.append(both[0])
            meant.append(both[1])
    scores = judge.scores(sum(shares).tolist())
    scorer = RougeScorer(list(ROUGE))
    for name in ROUGE:
        mean = np.mean([scorer.score(text, other)[name].fmeasure for text, other in zip(meant, spoken, strict=True)])
        assert scores[name] == pytest.approx(mean, rel=1e-12)
        assert 0.3 < scores[name] < 0.99
    assert scores["bleu"] == corpus_bleu(spoken, [meant]).score
    assert 20 < scores["bleu"] < 99
    alone = [judge.scores(share.tolist())["bleu"] for share in shares]
    assert abs(np.mean(alone) - scores["bleu"]) > 1e-6  # a mean of ranks is something else


def test_perfect_and_hopeless_predictions(rows, judge):
    flat = rows.flat([0])
    perfect = judge.scores(judge.sums(flat, flat.labels.copy()).tolist())
    assert perfect == pytest.approx(dict.fromkeys(ROUGE, 1.0) | {"bleu": 100.0})
    control = np.full(len(flat.labels), rows.documents[0].control["user"])
    assert set(judge.scores(judge.sums(flat, control).tolist()).values()) == {0.0}
    behind = np.full(len(flat.labels), 10_000)  # a padded vocabulary
    assert set(judge.scores(judge.sums(flat, behind).tolist()).values()) == {0.0}
    assert judge.sums(rows.flat([]), np.zeros(1, np.int64)).tolist() == judge.nothing.tolist()


def test_predictions_are_those_of_the_whole_logits(monkeypatch):
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 50), torch.randn(100, 16)
    labels, predicted = torch.randint(0, 50, (100,)), torch.zeros(100, dtype=torch.int64)
    plain = summed_loss(hidden, labels, head)
    most = 0

    def counted(states):
        nonlocal most
        most = max(most, len(states))
        return head(states)

    monkeypatch.setattr("train.model.trainee.CHUNK", 7)
    assert summed_loss(hidden, labels, counted, predicted).item() == pytest.approx(plain.item(), rel=1e-6)
    assert torch.equal(predicted, head(hidden).argmax(-1))
    assert most == 7


def test_only_what_is_asked_for(rows):
    assert open_judge([], MODEL, {"one": rows}) is None
    judge, flat = open_judge(["bleu"], MODEL, {"one": rows}), rows.flat([0])
    assert judge.scores(judge.sums(flat, flat.labels.copy()).tolist()) == pytest.approx({"bleu": 100.0})


def test_files_that_do_not_tell_their_tokenizer_are_judged(rows):
    silent = replace(rows, documents=[replace(document, facts=None) for document in rows.documents])
    assert open_judge(["bleu"], MODEL, {"one": silent}).vocabulary.path == MODEL


def test_a_missing_library_and_another_tokenizer_are_named(rows, tmp_path, monkeypatch):
    import sentencepiece as spm

    words = tmp_path / "words.txt"
    words.write_text("\n".join(f"word {number} of another text" for number in range(500)))
    spm.SentencePieceTrainer.train(
        input=str(words), model_prefix=str(tmp_path / "tokenizer"), vocab_size=60, minloglevel=2
    )
    with pytest.raises(RefusedError, match="validation set one was made with another tokenizer than"):
        open_judge(["rouge"], tmp_path, {"one": rows})
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("sacrebleu"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UnsupportedError, match="sacrebleu") as caught:
        open_judge(["bleu"], MODEL, {"one": rows})
    assert caught.value.hint == "pip install 'vitruvian[eval]'"


def test_the_line_has_the_names_of_the_users_logs():
    texts = {"rouge1": 0.9, "rouge2": 0.8, "rougeL": 0.85, "rougeLsum": 0.86, "bleu": 80.5}
    assert line_of(980, {"one": Score(1.2, 100, texts)}) == (
        "global_step=980 one: eval_ppl=1.01207 eval_epoch_loss=0.012 eval_rouge1=0.9 eval_rouge2=0.8 eval_rougeL=0.85 "
        "eval_rougeLsum=0.86 eval_bleu=80.5"
    )
