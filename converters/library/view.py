"""A checkpoint in any layout, without a conversion: names, shapes, and elements that are read when they are asked for.

A view is the target of a plan that nobody writes. Each of its tensors is put together from the pieces of logical
tensors that a conversion would write there, so that its bytes are those of the conversion.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from converters.move.blocks import Files, strided
from converters.move.casts import WORDS, Array
from converters.move.engine import buffers_of, pieces_of
from converters.move.regions import region
from converters.move.replicas import Copies
from converters.move.source_checks import SourceChecks
from converters.plan.plan import PADDING, Job, Plan, repeated_leaves
from converters.plan.request import Limits
from converters.plan.training_state import rows_of_padding
from formats.checkpoint import Target
from formats.disk.safetensors import DTYPES
from formats.layout.leaves import Leaf
from formats.layout.table import Cut, Placed

if TYPE_CHECKING:
    from converters.library.torch_tensor import TorchTensor

NUMPY = {
    "F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""The types of numpy itself."""
ML_DTYPES = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Those of the package ml_dtypes."""


class Reader:
    """Reads what a plan would write. Threads may share it."""

    def __init__(self, plan: Plan, target: Target, limits: Limits) -> None:
        self.jobs = {job.name: job for job in plan.jobs}
        self.repeats, self.limits = target.padding == "last", limits
        self.checks = SourceChecks(plan.jobs, limits.replicas)
        self.files, self.buffers = Files(checks=self.checks), buffers_of(limits)
        self.files.__enter__()
        self.close = weakref.finalize(self, self.files.__exit__)
        """Closes the files; nothing can be read afterwards."""

    def read(self, placed: Placed, state: str, values: Array) -> None:
        """Fill flat words from a tensor of the target, or from a part of it. Vocabulary padding is left alone.

        Args:
            placed: which tensor, and with `part` which box of it.
            state: the state of an optimizer that it belongs to, empty for the weights.
            values: a word for each element.

        Raises:
            SourceError: a file of the source is damaged.
            VerificationError: copies of a tensor in it differ.
        """
        for job, leaf in self._leaves(placed, state):
            box = tuple((0, 1) if span.axis == "layer" else (span.start, span.stop) for span in leaf.spans)
            copies = Copies(job, self.files, self.limits.replicas)
            for start, shape, piece in pieces_of(job, copies, self.files, self.buffers, box):
                where = region(leaf, start, shape)
                strided(values, where.file, where.dims, 1)[...] = strided(piece, where.tile, where.dims, 2)
            copies.judge()

    def complete(self) -> None:
        """Compare the checksums of the source's archives, as far as that was not done when they were read.

        Raises:
            DamagedError: one differs.
        """
        self.checks.complete(self.files.read_stored, self.limits.threads)

    def _leaves(self, placed: Placed, state: str) -> Iterator[tuple[Job, Leaf]]:
        """The logical tensors that a tensor is put together from, and where their elements are in it."""
        layer = placed.slot.layer
        for leaf in (*placed.leaves(), *(repeated_leaves(placed) if self.repeats else ())):
            if leaf.numel:
                yield self.jobs[job_name(leaf.tensor, layer, state)], leaf
        for tensor in placed.slot.rule.pattern.tensors:
            padding = self.jobs.get(job_name(tensor, None, f"{state}.{PADDING}".strip(".")))
            if padding is not None:
                vocab = dict(placed.slot.sizes)["vocab"]
                for leaf in rows_of_padding(placed, range(vocab, vocab + padding.shape[0])):
                    yield padding, leaf


def job_name(tensor: str, layer: int | None, state: str) -> str:
    """What `Job.name` says."""
    name = f"{state}.{tensor}" if state else tensor
    return name if layer is None else f"{name}.{layer}"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a view: its header, and its elements when they are asked for.

    Attributes:
        name: its key in the layout.
        dtype: its element type, as safetensors calls it: BF16, F32.
        shape: its sizes.
        file: the file that a conversion would write it to.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    placed: Placed = field(repr=False)
    state: str = field(repr=False)
    reader: Reader = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * DTYPES[self.dtype]

    def words(self, *ranges: slice) -> Array:
        """Its elements as unsigned integers of the same size; with ranges, those of a box along the first axes.

        Raises:
            IndexError: a range has a step, or there are more ranges than axes.
        """
        if len(ranges) > len(self.shape):
            raise IndexError(f"{self.name} has {len(self.shape)} axes")
        if any(one.step not in (None, 1) for one in ranges):
            raise IndexError("a range of a tensor has no step")
        asked = [one.indices(n)[:2] for one, n in zip(ranges, self.shape, strict=False)]
        first = [low for low, _ in self.placed.part.ranges] if self.placed.part else [0] * len(self.shape)
        box = (*asked, *((0, n) for n in self.shape[len(ranges) :]))
        cut = Cut(tuple((at + low, at + max(low, high)) for at, (low, high) in zip(first, box, strict=True)))
        values: Array = np.zeros(prod(cut.shape), WORDS[DTYPES[self.dtype]])
        if len(values):
            self.reader.read(self.placed._replace(part=cut) if ranges else self.placed, self.state, values)
        return values.reshape(cut.shape)

    def __getitem__(self, ranges: slice | tuple[slice, ...]) -> Array:
        """A box of it as an array: `tensor[:10]`, `tensor[2:4, 8:16]`. Only these elements are read."""
        return as_numpy(self.words(*(ranges if isinstance(ranges, tuple) else (ranges,))), self.dtype)

    def numpy(self) -> Array:
        """All of it as an array: bfloat16 and float8 in the types of ml_dtypes if that is installed, else as bits."""
        return as_numpy(self.words(), self.dtype)

    def torch(self, *ranges: slice) -> TorchTensor:
        """All of it, or a box, as a tensor of torch on the CPU, which owns its memory."""
        from converters.library.torch_tensor import as_torch

        return as_torch(self.words(*ranges), self.dtype)


def as_numpy(words: Array, dtype: str) -> Array:
    """Bits as an array of their type: that of numpy or of ml_dtypes; as they are where neither has it."""
    if dtype in NUMPY:
        return words.view(NUMPY[dtype])
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        return words
    return words.view(getattr(ml_dtypes, ML_DTYPES[dtype])) if dtype in ML_DTYPES else words


class View(Mapping[str, Tensor]):
    """The tensors of a layout by their names, in the order of its files. Reading one changes nothing on disk."""

    def __init__(self, plan: Plan, limits: Limits, tensors: Mapping[str, tuple[str, str, Placed]]) -> None:
        assert plan.target is not None
        self.reader = Reader(plan, plan.target, limits)
        self.plan = plan
        self.held = {
            name: Tensor(name, one.fragment.dtype, one.fragment.shape, file, one, state, self.reader)
            for name, (file, state, one) in tensors.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    @property
    def notes(self) -> tuple[str, ...]:
        """What its plan notes."""
        return self.plan.notes

    def close(self) -> None:
        """Close the files of the source."""
        self.reader.close()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, ahead: int = 0) -> Iterator[tuple[str, Array]]:
        """Name and elements of every tensor, in order. At the end the checksums of the source are compared.

        Args:
            ahead: how many further tensors are read, and are in memory, while the caller uses one.

        Raises:
            DamagedError: what was read has not the checksum that the source keeps of it.
        """
        for tensor, words in self.read_words(ahead):
            yield tensor.name, as_numpy(words, tensor.dtype)
            del words

    def read_words(self, ahead: int = 0) -> Iterator[tuple[Tensor, Array]]:
        """The same, each with its header, as unsigned integers of the size of an element."""
        running: deque[tuple[Tensor, Future[Array]]] = deque()

        def first() -> tuple[Tensor, Array]:
            tensor, future = running.popleft()
            return tensor, future.result()

        with ThreadPoolExecutor(self.reader.limits.threads) as pool:
            try:
                for tensor in self.held.values():
                    running.append((tensor, pool.submit(tensor.words)))
                    if len(running) > ahead:
                        yield first()
                while running:
                    yield first()
            finally:
                for _, future in running:
                    future.cancel()
        self.reader.complete()


def tensors_of(target: Target) -> Iterator[tuple[Path, str, str, Placed]]:
    """(file, state, name, tensor) of all that a target holds, in the order of its files and of the bytes in them."""
    for file in target.files:
        every = [("", placed) for placed in file.tensors]
        every += [(state, placed) for state, held in file.states.items() for placed in held]
        for state, placed in sorted(every, key=lambda one: one[1].fragment.offset):
            chunk, _, key = placed.key.rpartition(" ")
            name = key if chunk in ("", "model") else f"{chunk}.{key}"
            yield file.path, state, f"{state}.{name}" if state else name, placed
