"""`k_bin_packed` of tilde-nlp's GPT-NeoX, with identical indices, to resume runs of that fork and to compare with it.

Documents in random order go into the fullest of at most 16 open bins that has room; the fullest bin is closed when a
17th is needed. All documents are taken, whatever the split specifies.

Facts: tilde-nlp/llm-gpt-neox 374a5c6 megatron/data/gpt2_dataset.py, `_build_index_mappings`: bins without tokens begin
no sample, and the last sample is never trained (`__len__` is one less). At the end it would merge bins that fit
together; there are none, or the second of them would not have been opened.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import RefusedError
from train.data.packing.packing import Lengths, Rows

OPEN = 16


class Indices(NamedTuple):
    """The arrays of the three `.npy` files of GPT-NeoX.

    Attributes:
        documents: `doc_idx`: document numbers, int64; the last element is a copy of the first.
        samples: `sample_idx`: first document of each sample, and the end; zeros in column 1, int64[s + 1, 2].
        shuffle: `shuffle_idx`: the order in which samples are trained, int64[s].
    """

    documents: NDArray[np.int64]
    samples: NDArray[np.int64]
    shuffle: NDArray[np.int64]


class _Bins:
    """Open bins, and the documents and samples of the closed bins."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: list[int] = []
        self.contents: list[list[int]] = []
        self.documents: list[int] = []
        self.samples: list[int] = []

    def put(self, document: int, length: int) -> None:
        """Place a document in the fullest bin that has room for it, the first of equally full ones."""
        room = self.capacity - length
        best, most = -1, -1
        for place, used in enumerate(self.used):
            if most < used <= room:
                best, most = place, used
        if best >= 0:
            self.used[best] += length
            self.contents[best].append(document)
            return
        if len(self.used) == OPEN:
            fullest = self.used.index(max(self.used))
            self._close([(self.used.pop(fullest), self.contents.pop(fullest))])
        self.used.append(length)
        self.contents.append([document])

    def close_all(self) -> None:
        """Close all open bins, the fullest first."""
        self._close(sorted(zip(self.used, self.contents, strict=True), key=lambda bin_: bin_[0], reverse=True))
        self.used, self.contents = [], []

    def _close(self, bins: list[tuple[int, list[int]]]) -> None:
        for used, documents in bins:
            if used:
                self.samples.append(len(self.documents))
            self.documents += documents


def k_bin_indices(lengths: Lengths, seq_length: int, seed: int, samples: int | None = None) -> Indices:
    """The three index arrays of GPT-NeoX for documents of these lengths.

    Args:
        lengths: number of tokens of each document of the file; longer ones than seq_length + 1 are skipped.
        seq_length: the training's sequence length; a row has one token more.
        seed: the training's seed.
        samples: `num_samples`, the minimum number of samples; None takes each document once.

    Raises:
        RefusedError: no document fits a row.
    """
    if not lengths[lengths <= seq_length + 1].any():
        raise RefusedError(f"none of {len(lengths)} documents fits a row of {seq_length + 1} tokens")
    random = np.random.RandomState(seed)  # the legacy generator: its sequence is part of the format
    order = np.arange(len(lengths), dtype=np.int32)
    sizes, bins = lengths.tolist(), _Bins(seq_length + 1)
    random.shuffle(order)
    needed = len(lengths) if samples is None else samples
    while len(bins.samples) < needed:
        for document in order.tolist():
            if len(bins.samples) >= needed:
                break
            if sizes[document] <= bins.capacity:
                bins.put(document, sizes[document])
        if samples is None or len(bins.samples) >= needed:
            break
        bins.close_all()
        random.shuffle(order)
    bins.close_all()
    firsts = np.array([*bins.samples, len(bins.documents)], np.int64)
    shuffle = np.arange(len(firsts) - 1, dtype=np.int64)
    random.shuffle(shuffle)
    documents = np.array([*bins.documents, bins.documents[0]], np.int64)
    return Indices(documents, np.stack([firsts, np.zeros_like(firsts)], 1), shuffle)


def k_bin(lengths: Lengths, capacity: int, seed: int, samples: int | None = None) -> Rows:
    """The rows of `k_bin_indices`, in the order in which GPT-NeoX trains them."""
    indices = k_bin_indices(lengths, capacity - 1, seed, samples)
    firsts, stops = indices.samples[:-1, 0][indices.shuffle], indices.samples[1:, 0][indices.shuffle]
    counts = stops - firsts
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    place = np.arange(offsets[-1]) + np.repeat(firsts - offsets[:-1], counts)
    return Rows(indices.documents[place].astype(np.int32), offsets)
