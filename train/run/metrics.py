"""ROUGE and BLEU of what a model would have said, exact on any number of ranks.

What is compared: at every trained label of a document, the token that the model finds likeliest given the true tokens
before it. Those tokens, decoded without control tokens, are the prediction; the labels, decoded likewise, are the
reference. Nothing is generated: one forward gives both this and the loss. It is what the users of ControlLLM read as
`eval_rouge1` … `eval_bleu` (linkedin/ControlLLM 7657b9f, `log_causallm_samples` of
src/controlllm/utils/custom_llama_recipes/eval_utils.py), except for three things:

* an example is a document, theirs is a row of the batch, whatever is packed into it;
* ROUGE is the mean over examples, theirs the middle of a bootstrap of 1000 samples of them;
* BLEU is computed of the counts of all ranks, theirs may be a mean of each rank's.

Facts: rouge-score 0.1.2 without stemming, where a word is made of a-z and 0-9 only: other letters separate words.
sacrebleu 2.6.0 with its defaults (13a, exponential smoothing). ROUGE is between 0 and 1, BLEU between 0 and 100.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import RefusedError, UnsupportedError
from train.data.rows import IGNORED, Flat, Rows
from train.data.tokens.tokenizers import FILES, Vocabulary, made_with, open_vocabulary

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
ORDER = 4
"""Longest n-gram of BLEU."""


@dataclass(frozen=True)
class Judge:
    """Compares texts.

    Attributes:
        vocabulary: the tokenizer.
        rouge: a RougeScorer, None if nobody wants it.
        bleu: a BLEU of sacrebleu, None likewise.
    """

    vocabulary: Vocabulary
    rouge: Any
    bleu: Any

    @property
    def nothing(self) -> NDArray[np.float64]:
        """The sums of no texts."""
        return np.zeros(1 + len(ROUGE) + 2 + 2 * ORDER)

    def sums(self, flat: Flat, predicted: NDArray[np.int64]) -> NDArray[np.float64]:
        """What is added up over rows and ranks.

        Args:
            flat: rows; a document without trained labels is no example.
            predicted: the likeliest token at each place, int64[n].

        Returns:
            Examples; the sum of each of `ROUGE`; then for BLEU lengths of predictions and references, and for each
            order n-grams that are right, and n-grams.
        """
        found = self.nothing
        for begin, stop in pairwise(flat.cu_seqlens.tolist()):
            labels, guesses = flat.labels[begin:stop], predicted[begin:stop]
            trained = labels != IGNORED
            if trained.any():
                found += self._compared(self.text(labels[trained].tolist()), self.text(guesses[trained].tolist()))
        return found

    def text(self, ids: Iterable[int]) -> str:
        """Tokens as text; control tokens, and what lies behind the vocabulary, are left out."""
        known = self.vocabulary
        return known.decode([one for one in ids if one < known.size and not known.special[one]])

    def _compared(self, reference: str, prediction: str) -> NDArray[np.float64]:
        found = self.nothing
        found[0] = 1
        if self.rouge is not None:
            scores = self.rouge.score(reference, prediction)
            found[1 : 1 + len(ROUGE)] = [scores[name].fmeasure for name in ROUGE]
        if self.bleu is not None:
            one = self.bleu.corpus_score([prediction], [[reference]])
            found[1 + len(ROUGE) :] = [one.sys_len, one.ref_len, *one.counts, *one.totals]
        return found

    def scores(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics of a whole set, by the names that the users' logs have."""
        found: dict[str, float] = {}
        examples, counts = max(1.0, sums[0]), [int(one) for one in sums[1 + len(ROUGE) :]]
        if self.rouge is not None:
            found |= {name: one / examples for name, one in zip(ROUGE, sums[1:], strict=False)}
        if self.bleu is not None:
            right, all_of = counts[2 : 2 + ORDER], counts[2 + ORDER :]
            score = self.bleu.compute_bleu(right, all_of, counts[0], counts[1], smooth_method=self.bleu.smooth_method)
            found["bleu"] = score.score
        return found


def open_judge(metrics: Sequence[str], path: Path, sets: Mapping[str, Rows]) -> Judge | None:
    """Whoever computes the metrics that are asked for, None if there are none.

    Args:
        metrics: `rouge`, `bleu`.
        path: the tokenizer's file, or a folder; of several files there the one that made the sets.
        sets: what will be judged.

    Raises:
        UnsupportedError: a library is missing.
        RefusedError: a set was made with another tokenizer.
    """
    if not metrics:
        return None
    files = [path / name for name in FILES if (path / name).is_file()] if path.is_dir() else []
    known = [open_vocabulary(one) for one in files or [path]]
    told = [(name, one.facts) for name, rows in sets.items() for one in rows.documents if one.facts]
    vocabulary = next((one for one in known if all(made_with(facts, one) for _, facts in told)), known[0])
    for name, facts in told:
        if not made_with(facts, vocabulary):
            raise RefusedError(
                f"the validation set {name} was made with another tokenizer than {vocabulary.path}",
                "name the file that it was made with: --evaluate.tokenizer FILE",
            )
    try:
        if "rouge" in metrics:
            from rouge_score.rouge_scorer import RougeScorer
        if "bleu" in metrics:
            from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise UnsupportedError(f"evaluate.metrics needs a library: {error}", "pip install '.[eval]'") from None
    rouge = RougeScorer(list(ROUGE)) if "rouge" in metrics else None
    return Judge(vocabulary, rouge, BLEU(max_ngram_order=ORDER) if "bleu" in metrics else None)
