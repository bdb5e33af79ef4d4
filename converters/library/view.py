"""A checkpoint in any layout, without a conversion: names, shapes, and elements that are read on access.

A view is the target of a plan that is not written. Each of its tensors is assembled from the pieces of logical tensors
that a conversion would write there, so that its bytes are those of the conversion.
"""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np

from converters.library.records import notes_of
from converters.move.blocks import Files, strided
from converters.move.casts import WORDS, Array
from converters.move.job import buffers_of, pieces_of
from converters.move.regions import region
from converters.move.replicas import Copies
from converters.move.source_checks import SourceChecks
from converters.plan.plan import PADDING, Job, Plan, repeated_leaves
from converters.plan.request import Limits
from converters.plan.state_jobs import rows_of_padding
from formats.checkpoint import Target
from formats.disk.safetensors import DTYPES
from formats.disk.threads import Threads
from formats.errors import UnsupportedError, UsageError
from formats.layout.columns import Cut
from formats.layout.leaves import Leaf
from formats.layout.placed import Placed

if TYPE_CHECKING:
    from converters.library.torch_tensor import TorchTensor

Index = SupportsIndex | slice | EllipsisType
"""An index along one axis of a tensor."""
NUMPY = {
    "F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Element type by its name in safetensors: its name in numpy."""
ML_DTYPES = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Element type by its name in safetensors: its name in the package ml_dtypes."""


class Reader:
    """Reads the tensors that a plan would write. Threads may share it.

    Args:
        plan: the plan.
        target: the target that the plan would write.
        limits: threads, memory, and the replica policy.
        unchanged: called before and after reading, and with each file that was read from; it raises if the source has
            changed since it was opened.
    """

    def __init__(self, plan: Plan, target: Target, limits: Limits, unchanged: Callable[..., None]) -> None:
        self.jobs = {job.name: job for job in plan.jobs}
        self.repeats, self.limits, self.unchanged = target.padding == "last", limits, unchanged
        self.checks = SourceChecks(plan.jobs, limits.replicas)
        self.files, self.buffers = Files(checks=self.checks, unchanged=unchanged), buffers_of(limits)
        self.files.__enter__()
        self.condition, self.reading, self.closed = threading.Condition(), 0, False
        self.begun, self.process = False, os.getpid()
        self.finalizer = weakref.finalize(self, self.files.__exit__)

    def __reduce__(self) -> str:
        raise TypeError("a view has files open, which no other process has: pickle its checkpoint, and view it there")

    def close(self) -> None:
        """Wait for threads that read, and close the files; nothing can be read afterwards.

        A process that was forked has none of these threads, and leaves the files to its end.
        """
        if os.getpid() != self.process:
            self.closed = True
            return
        with self.condition:
            self.closed = True
            self.condition.wait_for(lambda: not self.reading)
            self.finalizer()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which the files stay open.

        Raises:
            UsageError: the files were closed.
            SourceError: the source has changed since it was opened.
        """
        with self.condition:
            if self.closed:
                raise UsageError("the view is closed", "read its tensors before, or open another one")
            if not self.begun:
                self.unchanged()
                self.begun = True
            self.reading += 1
        try:
            yield
        finally:
            with self.condition:
                self.reading -= 1
                self.condition.notify_all()

    def read(self, placed: Placed, state: str, values: Array) -> None:
        """Fill flat words from a tensor of the target, or from a part of it. Vocabulary padding is left alone.

        Args:
            placed: the tensor, and with `part` the box of it to read.
            state: the optimizer state that the tensor belongs to, empty for weights.
            values: a word for each element.

        Raises:
            SourceError: a file of the source is damaged.
            VerificationError: copies of a tensor in the source differ, or a tensor that is read as a whole is not what
                the source's vitruvian.json says.
        """
        with self.opened():
            for job, leaf in self.leaves(placed, state):
                self._read(job, leaf, values)

    def _read(self, job: Job, leaf: Leaf, values: Array) -> None:
        """Copy the elements of a leaf into their places in `values`."""
        box = tuple((0, 1) if span.axis == "layer" else (span.start, span.stop) for span in leaf.spans)
        copies = Copies(job, self.files, self.limits.replicas)
        for start, shape, piece in pieces_of(job, [copies], self.files, self.buffers, box, self.limits.accepted):
            where = region(leaf, start, shape)
            strided(values, where.file, where.dims, 1)[...] = strided(piece, where.tile, where.dims, 2)
        copies.judge()

    def in_order(self, reads: Iterable[Callable[[], Array]], ahead: int) -> Iterator[Array]:
        """The results of reads in their order, while threads do up to `ahead` further ones.

        Args:
            reads: the functions to call.
            ahead: how many further results are read, and are in memory, while the caller uses one.

        Raises:
            UsageError: the process was forked since the first one was read, and has none of the threads.
        """
        running: deque[Future[Array]] = deque()
        process = os.getpid()

        def require_own() -> None:
            if os.getpid() != process:
                raise UsageError(
                    f"threads of process {process} read these tensors, and this one was forked from it",
                    "ask for the tensors after the fork, in the process that uses them",
                )

        with Threads(self.limits.threads) as pool:
            try:
                for read in reads:
                    running.append(pool.submit(read))
                    if len(running) > ahead:
                        yield running.popleft().result()
                        require_own()
                while running:
                    yield running.popleft().result()
                    require_own()
            finally:
                for future in running if os.getpid() == process else ():
                    future.cancel()

    def complete(self) -> None:
        """Compare the checksums of the source's archives that were not yet compared during reading.

        Raises:
            DamagedError: a checksum differs.
            SourceError: the source has changed since it was opened.
        """
        with self.opened():
            self.checks.complete(self.files.read_stored, self.limits.threads)
            self.unchanged()

    def leaves(self, placed: Placed, state: str) -> Iterator[tuple[Job, Leaf]]:
        """The jobs of the logical tensors that a tensor is assembled from, with the leaves of each in the tensor."""
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
    """The name of a job (`Job.name`)."""
    name = f"{state}.{tensor}" if state else tensor
    return name if layer is None else f"{name}.{layer}"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a view: its header, and its elements, which are read on access.

    Attributes:
        name: the key of the tensor in the layout.
        dtype: the element type by its name in safetensors: BF16, F32.
        shape: the sizes of the axes.
        file: the file that a conversion would write the tensor to.
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
        """Bytes of the elements."""
        return prod(self.shape) * DTYPES[self.dtype]

    @property
    def spellings(self) -> frozenset[str]:
        """The name of the tensor, and its other names in some version of the framework."""
        return frozenset((self.name, *self.placed.slot.keys))

    @property
    def ndim(self) -> int:
        """How many axes the tensor has."""
        return len(self.shape)

    def __len__(self) -> int:
        """The size along the first axis."""
        if not self.shape:
            raise TypeError(f"{self.name} has no axes")
        return self.shape[0]

    def words(self, *index: Index) -> Array:
        """The elements as unsigned integers of the same size; with an index, only the elements of that box are read.

        Raises:
            IndexError: a range has a step, a number is outside its axis, or the index has more entries than axes.
        """
        box = box_of(self.name, self.shape, index)
        low = [start for start, _ in self.placed.part.ranges] if self.placed.part else [0] * self.ndim
        cut = Cut(tuple((at + start, at + stop) for at, (start, stop) in zip(low, box.ranges, strict=True)))
        values: Array = np.zeros(prod(cut.shape), WORDS[DTYPES[self.dtype]])
        if len(values):
            self.reader.read(self.placed._replace(part=cut) if index else self.placed, self.state, values)
        return values.reshape(box.shape)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Array:
        """A box of the tensor as an array: `tensor[:10]`, `tensor[2:4, -1]`. Only these elements are read."""
        return as_numpy(self.words(*(index if isinstance(index, tuple) else (index,))), self.dtype)

    def numpy(self) -> Array:
        """The whole tensor as an array; bfloat16 and float8 are types of ml_dtypes.

        Raises:
            UnsupportedError: numpy has no such type, and ml_dtypes is not installed.
        """
        return as_numpy(self.words(), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The whole tensor, for `numpy.asarray`."""
        del copy
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def torch(self, *index: Index) -> TorchTensor:
        """The whole tensor, or a box of it, as a torch tensor on the CPU, which owns its memory."""
        from converters.library.torch_tensor import as_torch

        return as_torch(self.words(*index), self.dtype)


class Box(NamedTuple):
    """A part of a tensor: a start and a stop along each axis, and its shape without axes indexed by a number."""

    ranges: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]


def box_of(name: str, shape: tuple[int, ...], index: tuple[Index, ...]) -> Box:
    """The box that an index selects in a tensor of a shape, as numpy understands the index.

    Raises:
        IndexError: an entry is no number in its axis, no range without a step and no single `...`, or there are more
            entries than axes.
    """
    words = list(index)
    if (dots := [number for number, word in enumerate(words) if word is Ellipsis]) and len(dots) == 1:
        words[dots[0] : dots[0] + 1] = [slice(None)] * (len(shape) - len(words) + 1)
    if len(words) > len(shape):
        raise IndexError(f"{name} has {len(shape)} axes, the index {len(words)}")
    ranges, kept = list[tuple[int, int]](), list[int]()
    words += [slice(None)] * (len(shape) - len(words))
    for word, n in zip(words, shape, strict=True):
        if isinstance(word, slice):
            low, high, step = word.indices(n)
            if step != 1:
                raise IndexError(f"a range of {name} has no step: take all of it, and every {step}th element of that")
            ranges.append((low, max(low, high)))
            kept.append(max(low, high) - low)
            continue
        try:
            number = operator.index(... if isinstance(word, bool) else word)  # type: ignore[arg-type]  # is refused
        except TypeError:
            raise IndexError(f"{name} is indexed by numbers and ranges, not by {word!r}") from None
        if not -n <= number < n:
            raise IndexError(f"{name} has {n} elements along an axis, and none is {number}")
        ranges.append((number % n, number % n + 1))
    return Box(tuple(ranges), tuple(kept))


def as_numpy(words: Array, dtype: str) -> Array:
    """Words as an array of an element type.

    Raises:
        UnsupportedError: the type is one of ml_dtypes, which is not installed; or neither numpy nor ml_dtypes has it.
    """
    if dtype in NUMPY:
        return words.view(NUMPY[dtype])
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        raise UnsupportedError(
            f"numpy has no {dtype}", "pip install 'vitruvian[bf16]', or take words(), the bits, or torch()"
        ) from None
    if dtype not in ML_DTYPES:
        raise UnsupportedError(f"numpy has no {dtype}", "take words(), the bits")
    return words.view(getattr(ml_dtypes, ML_DTYPES[dtype]))


class View(Mapping[str, Tensor]):
    """The tensors of a layout by their names, in the order of its files. Nothing is written to disk."""

    def __init__(self, plan: Plan, reader: Reader, tensors: Mapping[str, tuple[str, str, Placed]]) -> None:
        self.reader = reader
        self.plan = plan
        self.held = {
            name: Tensor(name, placed.fragment.dtype, placed.fragment.shape, file, placed, state, self.reader)
            for name, (file, state, placed) in tensors.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.held:
            raise KeyError(f"{name} is none of {len(self)} tensors with names like {next(iter(self.held), '')}")
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user has to know of the tensors, a sentence each."""
        return tuple(notes_of(self.plan))

    def close(self) -> None:
        """Wait for threads that read, and close the files of the source."""
        self.reader.close()

    def __repr__(self) -> str:
        return f"View({len(self)} tensors, {sum(tensor.nbytes for tensor in self.values())} bytes)"

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, ahead: int = 0) -> Iterator[tuple[str, Array]]:
        """Name and elements of every tensor, in order. At the end the checksums of the source are compared.

        Tensors that are read as a whole, here or by name, are compared with the source's vitruvian.json.

        Args:
            ahead: how many further tensors are read, and are in memory, while the caller uses one.

        Raises:
            DamagedError: bytes that were read do not have the checksum that the source records.
            VerificationError: copies of a tensor differ, or a tensor is not what the source's vitruvian.json says.
        """
        for tensor, words in self.read_words(ahead):
            yield tensor.name, as_numpy(words, tensor.dtype)
            del words

    def read_words(self, ahead: int = 0) -> Iterator[tuple[Tensor, Array]]:
        """As `read`, with the header of each tensor, and elements as unsigned integers of the same size."""
        reads = (tensor.words for tensor in self.held.values())
        words = self.reader.in_order(reads, ahead)
        for tensor in self.held.values():
            yield tensor, next(words)  # zip would keep the words of the tensor before in memory
        self.reader.complete()


def tensors_of(target: Target) -> Iterator[tuple[Path, str, str, Placed]]:
    """(file, state, name, tensor) of all tensors of a target, in the order of its files and of the bytes in them."""
    for file in target.files:
        every = [("", placed) for placed in file.tensors]
        every += [(state, placed) for state, of_state in file.states.items() for placed in of_state]
        for state, placed in sorted(every, key=lambda entry: entry[1].fragment.offset):
            *prefix, key = placed.key.split(" ")
            chunk = next((word for word in prefix if word.startswith("model") and word != "model"), "")
            name = f"{chunk}.{key}" if chunk else key
            yield file.path, state, f"{state}.{name}" if state else name, placed
