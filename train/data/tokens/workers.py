"""Worker processes that encode ranges of the input as tokens.

Each worker has a pipe to this process and ends when the pipe is closed, also if this process is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from converters.common.atomic import STOPS
from formats.disk.threads import Threads
from formats.errors import SourceError
from train.data.tokens.encode import CHATML, ROLE_NUMBERS, Encoder, control_encoder, role_encoder
from train.data.tokens.indexed import best_dtype
from train.data.tokens.input_ranges import Range, values
from train.data.tokens.records import GRAVE, Malformed, Reader, Record, reader
from train.data.tokens.shapes import FIELDS
from train.data.tokens.template_encoder import TemplateEncoder
from train.data.tokens.tokenizers import Fast, open_vocabulary

BATCH = 1 << 20
"""Number of characters that are encoded at a time."""
EXAMPLES = 5
"""Maximum number of dropped records of a batch that are reported with their lines."""


MADE_BY = ("vitruvian", "tokenizers", "sentencepiece", "jinja2")
"""Packages whose versions determine the tokens of a text."""
UNTRAINED = "untrained_replies"
"""Key of the counts: number of replies that their records exclude from the training."""
Dropped = tuple[int, str, str]
"""Line number of a dropped record, the reason, and the part of the record at fault."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """How records become tokens.

    Attributes:
        tokenizer: path of the tokenizer's file.
        digest: BLAKE3 of that file.
        vocabulary: number of tokens of the tokenizer.
        names: BLAKE3 of the names of the tokens.
        form: the format of the records, one of `shapes.FORMS`.
        key: name of the field with text.
        control: id of the control token of each role.
        eod: id of the end-of-document token, None to append none.
        eod_token: name of that token.
        template: the text of a chat template, None for control tokens.
        date: the date that the template takes for today, as YYYY-MM-DD; None if it does not ask.
        named: the tokens that the template may write as `bos_token` and `eos_token`, by kind.
        special: id by name of the special tokens of role bins, None for other files.
        ftfy: the version of ftfy that repairs texts, None without it.
        auto: whether the format was detected from the first records, not given.
    """

    tokenizer: Path
    digest: str
    vocabulary: int
    names: str
    form: str
    key: str
    control: dict[str, int]
    eod: int | None = None
    eod_token: str | None = None
    template: str | None = None
    date: str | None = None
    named: dict[str, str] = field(default_factory=dict)
    special: dict[str, int] | None = None
    ftfy: str | None = None
    auto: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that records may have; empty if a chat template checks roles."""
        if self.template is not None:
            return ()
        return tuple(self.control if self.special is None else ROLE_NUMBERS)

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the tokens, for comparison: settings but the path of the tokenizer's file, and versions."""
        versions = {name: version(name) for name in MADE_BY}
        return asdict(self) | {"tokenizer": "", "masked": self.masked, "versions": versions}

    @property
    def masked(self) -> bool:
        """Whether a mask is needed beside control tokens: flags of turns may exclude replies from the training."""
        return self.template is None and self.special is None and self.form in ("conversations", "sharegpt", "mixed")

    @property
    def template_digest(self) -> str | None:
        """BLAKE3 of the chat template."""
        return None if self.template is None else blake3(self.template.encode()).hexdigest()


class Part(NamedTuple):
    """The result of encoding a range.

    Attributes:
        lines: number of lines.
        counts: numbers of documents, tokens, and dropped records by reason.
        lengths: number of bytes of each file that was written.
        examples: (line in the range from 0, reason, part of the record) of the first dropped records.
    """

    lines: int
    counts: dict[str, int]
    lengths: dict[str, int]
    examples: list[Dropped]


def encoder(job: Job) -> Encoder:
    """A function that encodes records for a job."""
    vocabulary = open_vocabulary(job.tokenizer, [*(job.special or ()), *([job.eod_token] if job.eod_token else ())])
    if job.special is not None:
        return role_encoder(vocabulary, *(job.special[token] for token in CHATML))
    if job.template is None:
        return control_encoder(vocabulary, job.control, job.eod, job.masked)
    assert isinstance(vocabulary, Fast)  # checked by the command
    return TemplateEncoder(vocabulary, job.template, job.eod, job.date)


def job_reader(job: Job) -> Reader:
    """A function that reads records for a job."""
    return reader(job.form, job.roles, job.key, any_turns=job.special is not None, template=job.template, auto=job.auto)


def encode_range(job: Job, encode: Encoder, part: Range, out: Path) -> Part:
    """Encode a range and write its tokens to `OUT.bin`, `OUT.sizes` and, where there is a mask, `OUT.mask`."""
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
            left = (len(record.left_out) for place, record in enumerate(batch.records) if place not in gone)
            counts[UNTRAINED] += sum(left)
            counts.update(encoded.counts)
            lengths["bin"] += tokens.write(encoded.ids.astype(dtype).data)
            lengths["sizes"] += sizes.write(np.array(encoded.sizes, "<i4").data)
            if encoded.mask is not None:
                lengths["mask"] += masks.write(encoded.mask.data)
            lines = batch.lines
    return Part(lines, dict(+counts), dict(lengths), examples)


def _shown(dropped: list[Dropped]) -> list[Dropped]:
    """The first dropped records, and the first for each reason that aborts the work."""
    ordered = sorted(dropped)
    grave = {reason: drop for drop in reversed(ordered) if (reason := drop[1]) in GRAVE}
    return sorted({*ordered[:EXAMPLES], *grave.values()})


class _Batch(NamedTuple):
    """Records to encode together: their lines, the dropped records among them, and the number of lines read so far."""

    records: list[Record]
    numbers: list[int]
    dropped: list[Dropped]
    lines: int


def _batches(job: Job, part: Range) -> Iterator[_Batch]:
    read = job_reader(job)
    records: list[Record] = []
    numbers: list[int] = []
    dropped: list[Dropped] = []
    characters, number = 0, -1
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
        characters += sum(map(len, record.contents)) + len(record.contents)
        if characters >= BATCH:
            yield _Batch(records, numbers, dropped, number + 1)
            records, numbers, dropped, characters = [], [], [], 0
    yield _Batch(records, numbers, dropped, number + 1)


def _mended(value: Any, names: Iterable[str] = ()) -> Any:
    """A value whose text ftfy has repaired; of a list or a mapping all texts, or those of the fields `names`."""
    from ftfy import fix_text

    match value:
        case str():
            return fix_text(value)
        case list():
            return [_mended(item) for item in value]
        case dict():
            return value | {name: _mended(value[name]) for name in names or value if name in value}
    return value


def _require_parent() -> None:
    """Exit if the writer was killed: the rest of a long range is not needed."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise SystemExit


def _work(pipe: Connection, job: Job) -> None:
    """The main function of a process: encode ranges from the pipe until it is closed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        encode = encoder(job)
        while True:
            part, out = pipe.recv()
            try:
                pipe.send(encode_range(job, encode, part, out))
            except Exception as error:  # noqa: BLE001  # any error is raised again by the writer
                pipe.send(error)
    except (EOFError, BrokenPipeError):
        return


class Workers:
    """Worker processes that encode ranges; a thread of this process waits for each."""

    def __init__(self, job: Job, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.idle: SimpleQueue[Connection] = SimpleQueue()
        self.pipes: list[Connection] = []
        self.processes = []
        resource_tracker.ensure_running()  # its start unblocks these signals again (Python 3.10 to 3.13)
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # inherited: only the writer gets these signals
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
            self.idle.put(ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self.threads = Threads(max(1, number))
        self.before: Any = None

    def __enter__(self) -> Workers:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # a dead worker has to raise here, not kill this process
            self.before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return self

    def kill(self) -> None:
        """Kill all processes; their pending results fail."""
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
        result: Part = answer
        return result

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
