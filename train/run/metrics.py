"""ROUGE and BLEU of teacher-forced predictions, exact on any number of ranks.

At every trained label of a document the prediction is the most likely token given the true tokens before it. These
tokens, decoded without control tokens, are the prediction; the labels, decoded likewise, are the reference. Nothing is
generated: one forward pass gives both this and the loss. ControlLLM reports it as `eval_rouge1` … `eval_bleu`
(linkedin/ControlLLM 7657b9f, `log_causallm_samples` of src/controlllm/utils/custom_llama_recipes/eval_utils.py), with
three differences:

* our example is a document, theirs is a row of the batch, whatever is packed into it;
* our ROUGE is the mean over examples, theirs the middle of a bootstrap of 1000 samples of them;
* our BLEU is computed from the counts of all ranks, theirs may be a mean of each rank's BLEU.

Facts: rouge-score 0.1.2 without stemming; a word consists of a-z and 0-9 only, other letters separate words.
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
    """Compares predicted texts with reference texts by ROUGE and BLEU.

    Attributes:
        vocabulary: the tokenizer.
        rouge: a RougeScorer of rouge-score, None without ROUGE.
        bleu: a BLEU of sacrebleu, None without BLEU.
    """

    vocabulary: Vocabulary
    rouge: Any
    bleu: Any

    @property
    def nothing(self) -> NDArray[np.float64]:
        """The sums of zero examples, all zero: float64[1 + len(ROUGE) + 2 + 2 * ORDER]."""
        return np.zeros(1 + len(ROUGE) + 2 + 2 * ORDER)

    def sums(self, flat: Flat, predicted: NDArray[np.int64]) -> NDArray[np.float64]:
        """The sums of some rows, which are added up over rows and ranks.

        Args:
            flat: rows; a document without trained labels is not an example.
            predicted: the most likely token at each position, int64[n].

        Returns:
            Number of examples; the sum of each of `ROUGE`; then for BLEU the lengths of predictions and references, and
            for each order the matching n-grams, and all n-grams.
        """
        totals = self.nothing
        for begin, stop in pairwise(flat.cu_seqlens.tolist()):
            labels, guesses = flat.labels[begin:stop], predicted[begin:stop]
            trained = labels != IGNORED
            if trained.any():
                totals += self._compared(self.text(labels[trained].tolist()), self.text(guesses[trained].tolist()))
        return totals

    def text(self, ids: Iterable[int]) -> str:
        """Tokens as text, without control tokens and ids beyond the vocabulary."""
        known = self.vocabulary
        return known.decode([token for token in ids if token < known.size and not known.special[token]])

    def _compared(self, reference: str, prediction: str) -> NDArray[np.float64]:
        counted = self.nothing
        counted[0] = 1
        if self.rouge is not None:
            scores = self.rouge.score(reference, prediction)
            counted[1 : 1 + len(ROUGE)] = [scores[name].fmeasure for name in ROUGE]
        if self.bleu is not None:
            score = self.bleu.corpus_score([prediction], [[reference]])
            counted[1 + len(ROUGE) :] = [score.sys_len, score.ref_len, *score.counts, *score.totals]
        return counted

    def scores(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics of a whole set, by ControlLLM's names."""
        metrics_of: dict[str, float] = {}
        examples, counts = max(1.0, sums[0]), [int(count) for count in sums[1 + len(ROUGE) :]]
        if self.rouge is not None:
            metrics_of |= {name: total / examples for name, total in zip(ROUGE, sums[1:], strict=False)}
        if self.bleu is not None:
            right, all_of = counts[2 : 2 + ORDER], counts[2 + ORDER :]
            score = self.bleu.compute_bleu(right, all_of, counts[0], counts[1], smooth_method=self.bleu.smooth_method)
            metrics_of["bleu"] = score.score
        return metrics_of


def open_judge(metrics: Sequence[str], path: Path, sets: Mapping[str, Rows]) -> Judge | None:
    """A `Judge` of the metrics, None if there are no metrics.

    Args:
        metrics: `rouge`, `bleu`.
        path: the tokenizer's file, or a folder; if it has several, the one that made the sets.
        sets: the validation sets.

    Raises:
        UnsupportedError: a library is missing.
        RefusedError: a set was made with another tokenizer.
    """
    if not metrics:
        return None
    files = [path / name for name in FILES if (path / name).is_file()] if path.is_dir() else []
    known = [open_vocabulary(file) for file in files or [path]]
    sidecars = [
        (name, documents.facts) for name, rows in sets.items() for documents in rows.documents if documents.facts
    ]
    vocabulary = next(
        (vocabulary for vocabulary in known if all(made_with(facts, vocabulary) for _, facts in sidecars)), known[0]
    )
    for name, facts in sidecars:
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
        raise UnsupportedError(f"evaluate.metrics needs a library: {error}", "pip install 'vitruvian[eval]'") from None
    rouge = RougeScorer(list(ROUGE)) if "rouge" in metrics else None
    return Judge(vocabulary, rouge, BLEU(max_ngram_order=ORDER) if "bleu" in metrics else None)
