"""Makes token files of text, on all cores, in constant memory, and resumable.

Workers encode ranges of the input and write the tokens of each range as small files. One writer, this process, appends
these in the order of the input to `PREFIX_KEY_document.partial/` and records its progress. A killed run resumes from
the last record: later bytes are truncated, so the final bytes are those of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Waited
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from typing import Any

import numpy as np
from blake3 import blake3

from converters.common.atomic import claimed, discard, named, stoppable, sync_path, write_file
from converters.common.progress import Progress
from converters.move.sampled import samples_of
from formats.errors import Interrupted, OutputError, RefusedError, SourceError
from train.data.tokens.indexed import best_dtype, bin_path, idx_path, write_index
from train.data.tokens.input_ranges import Ranges
from train.data.tokens.records import GRAVE, REASONS
from train.data.tokens.sidecar import Facts, content_of, facts_path, facts_text, mask_path
from train.data.tokens.template_encoder import LOST, SPLIT
from train.data.tokens.workers import EXAMPLES, UNTRAINED, Job, Part, Workers

STREAMS = ("bin", "sizes", "mask")
"""The staged streams: tokens, int32 sizes of documents, and the loss mask (or the roles of role bins)."""
PARTS = "parts-"
"""Prefix of the folder for workers' files: each run has a new folder, because a worker may outlive a killed run."""
MARK = "lock"
"""Name of the file that tells the staging folder from others."""
EVERY = 5.0
"""Seconds between two records of the progress."""
AHEAD = 4
"""Number of ranges that each worker may be ahead of the writer."""

HINT = (
    "train lint names each record; a key that says nothing of the training can go: jq -c '.messages |= map(del(.KEY))' "
    "of a turn, jq -c 'del(.KEY)' of a record"
)
HINTS = {
    "both": "train lint names each record; remove one of the two: jq -c 'del(.conversations)'",
    "shapes": "name what is to be trained: --format conversations, or text, control-text, sharegpt",
}
"""Hint of a reason that aborts, where it differs from `HINT`."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A tokenization to run.

    Attributes:
        job: how records become tokens.
        parts: the ranges of the input files.
        prefix: path of the output without `.bin`.
        workers: number of processes.
        force: whether to replace an existing output.
        most_dropped: share of records that may be dropped.
        strict: whether one dropped record is an error.
        quiet: whether to show no progress.
    """

    job: Job
    parts: Ranges
    prefix: Path
    workers: int
    force: bool = False
    most_dropped: float = 0.1
    strict: bool = False
    quiet: bool = False

    @property
    def staging(self) -> Path:
        """The staging folder."""
        return self.prefix.with_name(self.prefix.name + ".partial")

    @property
    def fingerprint(self) -> str:
        """Identity of the work, for resuming: inputs with sizes, times and samples, the tokenizer, settings, versions.

        The samples tell a file from another one of its size and time (`cp -p`).
        """
        files = self.parts.files
        inputs = [
            (str(path.resolve()), about.st_size, about.st_mtime_ns, sample, number)
            for (path, number), sample in zip(files.items(), samples_of(list(files)), strict=True)
            for about in [path.stat()]
        ]
        facts = [inputs, self.job.identity]
        return blake3(json.dumps(facts).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Done:
    """The progress of a tokenization, as recorded in `done.json`.

    Attributes:
        fingerprint: fingerprint of the request.
        ranges: number of appended ranges.
        lengths: number of bytes of each stream that belong to these ranges.
        lines: number of lines so far of the file that the last range belongs to.
        counts: numbers of documents, tokens, and dropped records by reason.
        examples: some places, `FILE:LINE`, of dropped records, by reason.
    """

    fingerprint: str
    ranges: int
    lengths: dict[str, int]
    lines: int
    counts: dict[str, int]
    examples: dict[str, list[str]]


def tokenize(request: Request) -> Facts:
    """Make token files of the input.

    Returns:
        The sidecar of the token files; `counts` has documents, tokens, and dropped records by reason.

    Raises:
        OutputError: the output exists, or cannot be written.
        RefusedError: too many records are malformed.
        SourceError: no document is left.
        Interrupted: a signal came; the same call resumes.
    """
    prefix = request.prefix
    finals = {"bin": bin_path(prefix), "mask": mask_path(prefix), "json": facts_path(prefix), "idx": idx_path(prefix)}
    with staged(request, finals) as (done, _):
        return _publish(request, done, finals)


@contextmanager
def staged(request: Request, finals: Mapping[str, Path]) -> Iterator[tuple[Done, Callable[[], bool]]]:
    """Tokenize the whole input into the streams of the staging folder; the caller publishes them.

    Args:
        request: the request.
        finals: path of each file that will be published; existing files require `force`.

    Yields:
        The progress, and a function that returns whether a signal came.
    """
    staging = request.staging
    existing = [path for path in finals.values() if path.exists()]
    half = staging.is_dir() and not any(path.suffix == ".idx" for path in existing)  # killed while it published
    if existing and not (request.force or half):
        raise OutputError(f"{existing[0]} exists", "choose another --output-prefix, or replace it with --force")
    with claimed(staging, MARK), ExitStack() as stack:
        stack.enter_context(named(staging))
        done = _resumed(request)
        stopped = stack.enter_context(stoppable())
        done = _append_all(request, done, stopped)
        _require_clear(request, done)
        if request.fingerprint != done.fingerprint:
            discard(staging, MARK)
            raise SourceError("an input file changed while it was read", "run again when nothing writes to it")
        _judge(request, done)
        yield done, stopped


def _resumed(request: Request) -> Done:
    """The progress of an earlier run, or none; the streams are truncated to it."""
    path, streams = request.staging / "done.json", dict.fromkeys(STREAMS, 0)
    fresh = Done(fingerprint=request.fingerprint, ranges=0, lengths=streams, lines=0, counts={}, examples={})
    done = fresh
    if path.is_file():
        done = _read_done(path)
        if done.fingerprint != request.fingerprint:
            if not request.force:
                raise OutputError(
                    f"{request.staging} holds unfinished work of another command (or the input has changed since)",
                    f"remove {request.staging}, or start over with --force",
                )
            done = fresh
    if any(_length(request.staging / stream) < length for stream, length in done.lengths.items()):
        done = fresh  # a run was killed while it published: renamed files are no longer here
    if done is fresh:
        path.unlink(missing_ok=True)
    for stream in STREAMS:
        with (request.staging / stream).open("ab") as file:
            file.truncate(done.lengths[stream])
    for folder in request.staging.glob(f"{PARTS}*"):
        shutil.rmtree(folder, ignore_errors=True)
    return done


def _read_done(path: Path) -> Done:
    try:
        return Done(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise OutputError(f"{path} is damaged: {error}", f"remove {path.parent}, or start over with --force") from None


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _append_all(request: Request, done: Done, stopped: Callable[[], bool]) -> Done:
    """Let workers encode the remaining ranges, and append them in order."""
    parts, staging = request.parts, request.staging
    folder = Path(mkdtemp(prefix=PARTS, dir=staging))
    with ExitStack() as stack:
        progress = stack.enter_context(Progress("tokenizing", parts.nbytes, request.quiet))
        progress.advance(sum(parts.size(parts[number]) for number in range(done.ranges)))
        workers = stack.enter_context(Workers(request.job, min(request.workers, len(parts) - done.ranges)))
        files = {stream: stack.enter_context((staging / stream).open("ab")) for stream in STREAMS}
        waiting: deque[Future[Part]] = deque()
        submitted, recorded = done.ranges, monotonic()
        while done.ranges < len(parts) and _grave(done) is None:
            while submitted < len(parts) and len(waiting) < AHEAD * request.workers:
                waiting.append(workers.submit(parts[submitted], folder / str(submitted)))
                submitted += 1
            part = _first_of(waiting, stopped)
            if part is None:
                workers.kill()
                _note(request, done, files)
                raise Interrupted(
                    f"stopped after {done.ranges} of {len(parts)} ranges", "run the same command again to resume"
                )
            for stream in STREAMS:
                _move(folder / f"{done.ranges}.{stream}", files[stream])
            done = _counted(done, part, parts)
            progress.advance(parts.size(parts[done.ranges - 1]))
            if monotonic() - recorded > EVERY:
                _note(request, done, files)
                recorded = monotonic()
        _note(request, done, files)
    return done


def _first_of(waiting: deque[Future[Part]], stopped: Callable[[], bool]) -> Part | None:
    """The result of the next range, None if a signal comes first. Polls: a compressed file is one long range."""
    while not stopped():
        try:
            part = waiting[0].result(timeout=0.2)
        except Waited:
            continue
        waiting.popleft()
        return part
    return None


def _move(path: Path, file: Any) -> None:
    """Append a small file to a stream, and remove the file."""
    if path.exists():
        with path.open("rb") as part:
            shutil.copyfileobj(part, file, 1 << 20)
        path.unlink()


def _counted(done: Done, part: Part, parts: Ranges) -> Done:
    """The progress after one more range."""
    place = parts[done.ranges]
    lines = 0 if done.ranges and parts[done.ranges - 1].path != place.path else done.lines
    counts = Counter(done.counts) + Counter(part.counts)
    examples = {reason: list(places) for reason, places in done.examples.items()}
    for number, reason, detail in part.examples:
        shown = examples.setdefault(reason, [])
        if len(shown) < EXAMPLES:
            shown.append(f"{place.path}:{lines + number + 1}" + (f", {detail}" if detail else ""))
    lengths = {stream: done.lengths[stream] + part.lengths[stream] for stream in STREAMS}
    return replace(
        done, ranges=done.ranges + 1, lengths=lengths, lines=lines + part.lines, counts=dict(counts), examples=examples
    )


def _grave(done: Done) -> str | None:
    """The reason that aborts the work, None if there is none."""
    return next((reason for reason in GRAVE if done.counts.get(reason)), None)


def _require_clear(request: Request, done: Done) -> None:
    """Refuse data with even one record that specifies something about the training that is not understood.

    Raises:
        RefusedError: there is such a record.
    """
    grave = _grave(done)
    if grave is not None:
        discard(request.staging, MARK)
        raise RefusedError(
            f"{done.examples[grave][0]}: {REASONS[grave]}",
            HINTS.get(grave, HINT),
        )


def _note(request: Request, done: Done, files: dict[str, Any]) -> None:
    """Fsync the streams, then write the progress to `done.json`."""
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    write_file(request.staging / "done.json", json.dumps(asdict(done)).encode())


def _judge(request: Request, done: Done) -> None:
    """Refuse an empty result, or one with more dropped records than --max-drop-rate."""
    documents = done.counts.get("documents", 0)
    dropped = {reason: number for reason, number in done.counts.items() if reason in REASONS}
    count = sum(dropped.values())
    worst = max(dropped, key=lambda reason: dropped[reason], default="")
    shown = f", most of them because of {REASONS[worst]} ({done.examples[worst][0]})" if worst else ""
    hint = f"train lint names each of them; what is tokenized stays in {request.staging.name} for the same input"
    if not documents:
        discard(request.staging, MARK)
        hint = "train lint names each of them; --format sets the format of the records"
        raise SourceError(f"none of {count} records became a document{shown}", hint if count else "")
    if count and request.strict:
        raise RefusedError(
            f"{count} of {documents + count} records are malformed{shown}",
            f"{hint}; --strict refuses them",
        )
    if count > request.most_dropped * (documents + count):
        raise RefusedError(
            f"{count} of {documents + count} records are malformed, a larger share than "
            f"{request.most_dropped:g}{shown}",
            f"{hint}; --max-drop-rate is the share that may be dropped",
        )


def _publish(request: Request, done: Done, finals: dict[str, Path]) -> Facts:
    """Write the index and the sidecar, and rename all files to their final paths, the index last."""
    job, staging = request.job, request.staging
    sizes = np.memmap(staging / "sizes", "<i4", "r")
    write_index(staging / "idx", best_dtype(job.vocabulary), sizes)
    counts = {"documents": len(sizes), "tokens": done.counts["tokens"]}
    facts = write_facts(request, done, counts, ("bin", "mask"))
    old_mask = finals.pop("mask") if job.template is None and not facts.masked else None
    put_in_place(staging, finals, [old_mask] if old_mask else [])
    return facts


def write_facts(request: Request, done: Done, counts: Mapping[str, int], streams: Iterable[str]) -> Facts:
    """Write the sidecar into the staging folder.

    Args:
        request: the request.
        done: its progress, with the counts of dropped records.
        counts: the counts of what was written.
        streams: names of the staged files of tokens and of masks, or roles.
    """
    job = request.job
    names = (*LOST, SPLIT, UNTRAINED, *REASONS)
    counts = dict(counts) | {name: number for name, number in done.counts.items() if name in names}
    masked = job.template is None and UNTRAINED in counts
    facts = Facts(
        tokenizer=job.digest,
        vocabulary=job.vocabulary,
        control=dict(job.control),
        eod=job.eod,
        template=job.template_digest,
        counts=counts,
        names=job.names,
        masked=masked,
        plain=job.form == "text",
        content=content_of([_hashed(request.staging / stream) for stream in streams]),
    )
    write_file(request.staging / "json", facts_text(facts).encode())
    return facts


def _hashed(path: Path) -> str:
    """BLAKE3 of a whole file, read a piece at a time: the pages of a memory map would count as memory."""
    hashed = blake3()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hashed.update(piece)
    return hashed.hexdigest()


def put_in_place(staging: Path, finals: Mapping[str, Path], stale: Iterable[Path] = ()) -> None:
    """Publish files of the staging folder, and discard it.

    Args:
        staging: the staging folder.
        finals: final path by name in the folder; indexes are last, and the last one makes the output valid.
        stale: files of an earlier run that are deleted with its index.
    """
    indexes = [path for path in finals.values() if path.suffix == ".idx"]
    for path in (*reversed(indexes), *stale):
        path.unlink(missing_ok=True)  # an old index must never describe new tokens
    for name, path in finals.items():
        (staging / name).rename(path)
    sync_path(next(iter(finals.values())).parent)
    discard(staging, MARK)
