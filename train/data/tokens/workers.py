"""Processes that turn ranges of the input into tokens.

Each has a pipe to this process and ends when the pipe does, also if this process is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from converters.common.atomic import STOPS
from formats.errors import SourceError
from train.data.tokens.encode import CHATML, ROLE_NUMBERS, Encoder, TemplateEncoder, control_encoder, role_encoder
from train.data.tokens.indexed import best_dtype
from train.data.tokens.input_ranges import Range, values
from train.data.tokens.records import GRAVE, Malformed, Reader, Record, reader
from train.data.tokens.shapes import FIELDS
from train.data.tokens.tokenizers import Fast, open_vocabulary

BATCH = 1 << 20
"""Characters that are encoded at a time."""
EXAMPLES = 5
"""Dropped records of a batch whose lines are told."""


UNTRAINED = "untrained_replies"
"""In the counts: replies that their records leave out of the training."""
ALTERED = "altered_documents"
"""In the counts: documents in which the chat template leaves out or changes a message."""
Dropped = tuple[int, str, str]
"""Line of a dropped record, the reason, and what of the record it is."""


@dataclass(frozen=True)
class Job:
    """How records become tokens.

    Attributes:
        tokenizer: its file.
        digest: BLAKE3 of that file.
        vocabulary: how many tokens it has.
        names: BLAKE3 of their names.
        form: the format of the records, one of `shapes.FORMS`.
        key: the field that holds text.
        control: role to the id of its control token.
        eod: what ends a document, None for nothing.
        eod_token: its name.
        template: the text of a chat template, None for control tokens.
        special: name to id of the special tokens that role bins are made with, None for other files.
        ftfy: the version of ftfy that mends texts, None if they stay as they are.
        auto: whether the format is that of the first record, and nobody named it.
    """

    tokenizer: Path
    digest: str
    vocabulary: int
    names: str
    form: str
    key: str
    control: dict[str, int]
    eod: int | None
    eod_token: str | None
    template: str | None
    special: dict[str, int] | None = None
    ftfy: str | None = None
    auto: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that records may have; none if a chat template judges them."""
        if self.template is not None:
            return ()
        return tuple(self.control if self.special is None else ROLE_NUMBERS)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it the same job, whatever the tokenizer's file is called."""
        return asdict(self) | {"tokenizer": "", "masked": self.masked}

    @property
    def masked(self) -> bool:
        """Whether control tokens alone may not tell what is trained: a turn can say of itself that it is not."""
        return self.template is None and self.special is None and self.form in ("conversations", "sharegpt", "mixed")

    @property
    def template_digest(self) -> str | None:
        """BLAKE3 of the chat template."""
        return None if self.template is None else blake3(self.template.encode()).hexdigest()


class Part(NamedTuple):
    """What became of a range.

    Attributes:
        lines: how many it has.
        counts: documents, tokens, and dropped records by reason.
        lengths: bytes of each file that was written.
        examples: (line in the range from 0, reason, what of the record it is) of the first dropped records.
    """

    lines: int
    counts: dict[str, int]
    lengths: dict[str, int]
    examples: list[Dropped]


def encoder(job: Job) -> Encoder:
    """The function that encodes records for a job."""
    vocabulary = open_vocabulary(job.tokenizer, [*(job.special or ()), *([job.eod_token] if job.eod_token else ())])
    if job.special is not None:
        return role_encoder(vocabulary, *(job.special[token] for token in CHATML))
    if job.template is None:
        return control_encoder(vocabulary, job.control, job.eod, job.masked)
    assert isinstance(vocabulary, Fast)  # the command has seen to it
    return TemplateEncoder(vocabulary, job.template, job.eod)


def job_reader(job: Job) -> Reader:
    """The function that reads records for a job."""
    return reader(job.form, job.roles, job.key, any_turns=job.special is not None, template=job.template, auto=job.auto)


def encode_range(job: Job, encode: Encoder, part: Range, out: Path) -> Part:
    """Encode a range and leave its tokens in `OUT.bin`, `OUT.sizes` and, where there is a mask, `OUT.mask`."""
    dtype, lines = best_dtype(job.vocabulary), 0
    counts, lengths = Counter[str](), Counter[str](bin=0, sizes=0, mask=0)
    examples: list[Dropped] = []
    with ExitStack() as stack:
        tokens, sizes, masks = (stack.enter_context(Path(f"{out}.{name}").open("wb")) for name in lengths)
        for batch in _batches(job, part):
            _require_parent()
            encoded = encode(batch.records)
            dropped = batch.dropped + [(batch.numbers[place], reason, "") for place, reason in encoded.refused]
            examples += _shown(dropped)
            counts.update(reason for _, reason, _ in dropped)
            counts.update(documents=len(encoded.sizes), tokens=len(encoded.ids))
            gone = {place for place, _ in encoded.refused}
            left = (len(one.left_out) for place, one in enumerate(batch.records) if place not in gone)
            counts[UNTRAINED] += sum(left)
            counts[ALTERED] += encoded.altered
            lengths["bin"] += tokens.write(encoded.ids.astype(dtype).data)
            lengths["sizes"] += sizes.write(np.array(encoded.sizes, "<i4").data)
            if encoded.mask is not None:
                lengths["mask"] += masks.write(encoded.mask.data)
            lines = batch.lines
    return Part(lines, dict(+counts), dict(lengths), examples)


def _shown(dropped: list[Dropped]) -> list[Dropped]:
    """The first dropped records, and the first for each of the reasons that end the work."""
    ordered = sorted(dropped)
    grave = {reason: one for one in reversed(ordered) if (reason := one[1]) in GRAVE}
    return sorted({*ordered[:EXAMPLES], *grave.values()})


class _Batch(NamedTuple):
    """Records to encode at a time: each with its line, the lines dropped among them, and the lines read so far."""

    records: list[Record]
    numbers: list[int]
    dropped: list[Dropped]
    lines: int


def _batches(job: Job, part: Range) -> Iterator[_Batch]:
    read = job_reader(job)
    records: list[Record] = []
    numbers: list[int] = []
    dropped: list[Dropped] = []
    held, number = 0, -1
    for number, value in enumerate(values(part, job.key)):
        if value is None:
            continue
        try:
            if isinstance(value, Malformed):
                raise value
            record = read(_mended(value, (job.key, *FIELDS)) if job.ftfy else value)
        except Malformed as error:
            dropped.append((number, error.reason, error.detail))
            continue
        records.append(record)
        numbers.append(number)
        held += sum(map(len, record.contents)) + len(record.contents)
        if held >= BATCH:
            yield _Batch(records, numbers, dropped, number + 1)
            records, numbers, dropped, held = [], [], [], 0
    yield _Batch(records, numbers, dropped, number + 1)


def _mended(value: Any, names: Iterable[str] = ()) -> Any:
    """What ftfy makes of a text, of each in a list or a mapping, or of some fields of a record."""
    from ftfy import fix_text

    match value:
        case str():
            return fix_text(value)
        case list():
            return [_mended(one) for one in value]
        case dict():
            return value | {name: _mended(value[name]) for name in names or value if name in value}
    return value


def _require_parent() -> None:
    """End here if the writer was killed: nobody wants the rest of a long range."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise SystemExit


def _work(pipe: Connection, job: Job) -> None:
    """What a process does: take ranges from the pipe until it ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        encode = encoder(job)
        while True:
            part, out = pipe.recv()
            try:
                pipe.send(encode_range(job, encode, part, out))
            except Exception as error:  # noqa: BLE001  # whatever it is, the writer raises it
                pipe.send(error)
    except (EOFError, BrokenPipeError):
        return


class Workers:
    """Processes that encode ranges, each driven by a thread of this process."""

    def __init__(self, job: Job, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.idle: SimpleQueue[Connection] = SimpleQueue()
        self.pipes: list[Connection] = []
        self.processes = []
        resource_tracker.ensure_running()  # its start lets these signals through again (Python 3.10 to 3.13)
        held = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # processes inherit it: the writer alone hears of them
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
            self.idle.put(ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        self.threads = ThreadPoolExecutor(max(1, number))
        self.before: Any = None

    def __enter__(self) -> Workers:
        if threading.current_thread() is threading.main_thread():  # a dead worker is an error here, not our end
            self.before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return self

    def kill(self) -> None:
        """End all processes, whatever they do; what they were asked for fails."""
        for process in self.processes:
            process.kill()

    def submit(self, part: Range, out: Path) -> Future[Part]:
        """Encode a range as soon as a process is idle."""
        return self.threads.submit(self._ask, part, out)

    def _ask(self, part: Range, out: Path) -> Part:
        pipe = self.idle.get()
        try:
            pipe.send((part, out))
            answer = pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise SourceError(
                f"a worker died on {part.path}, bytes {part.begin} to {part.stop}: killed, or out of memory",
                "run the same command again with fewer --workers",
            ) from None
        finally:
            self.idle.put(pipe)
        if isinstance(answer, BaseException):
            raise answer
        found: Part = answer
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.threads.shutdown(cancel_futures=True)
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join()
        if self.before is not None:
            signal.signal(signal.SIGPIPE, self.before)
