"""The plan of a weighted mean of several checkpoints: of their FP32 master weights, where they have them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from converters.assets.files import carried_assets
from converters.assets.token_files import TOKENIZER_FILES
from converters.plan.agreement import APART, file_differences, setting_differences
from converters.plan.names import with_same_names
from converters.plan.opening import replicas_of
from converters.plan.output import Output, plan_output, uncompared
from converters.plan.plan import Input, Job, Plan, Term, make_plan, require_castable, without_records
from converters.plan.request import Request
from converters.plan.targets import require_vocab
from converters.plan.training_state import as_weights, training_of
from formats.checkpoint import Checkpoint
from formats.deepspeed.folders import LATEST
from formats.disk.safetensors import FLOATS
from formats.errors import RefusedError, SourceError, UnsupportedError, UsageError, count, some
from formats.huggingface import nanotron
from formats.megatron.folders import TRACKER
from formats.model.spec import Verbatim
from formats.registry import NUMBER, format_of, is_known, steps

TRACKERS = (TRACKER, LATEST, nanotron.TRACKER)
"""Files in which a run names its latest save. Not `latest_universal`, whose checkpoint may be of an earlier one."""
TOLERANCE = 1e-6
"""How far the sum of the weights may be from 1, since weights are given with a few digits."""
TO_FILES = "convert each to Hugging Face first, and average these"
"""What to do with checkpoints whose tensor names are those of memory."""
MASTERS, WEIGHTS = "FP32 master weights", "weights"
"""Names of what is averaged: the FP32 master weights of a checkpoint, or its weights."""


def weights_of(count: int, weights: Sequence[float] | None, ema: float | None) -> list[float]:
    """The weight of each checkpoint in a mean; the sum of the weights is 1.

    Args:
        count: how many there are, the oldest first.
        weights: the user's weights; None for equal ones.
        ema: the decay of an exponential mean, which begins with the first: mean = ema * mean + (1 - ema) * next.

    Raises:
        UsageError: there are fewer than two checkpoints; there is another number of weights, a weight is 0 or not
            finite, or the sum of the weights is not 1; `ema` is not between 0 and 1, or is given with `weights`.
    """
    if count < 2:
        raise UsageError(f"{count} checkpoint has no mean", "name two or more, and then OUT")
    if ema is not None:
        if weights is not None:
            raise UsageError("--ema says every weight", "leave --weights out")
        if not 0 < ema < 1:
            raise UsageError(f"--ema {ema:g} is no decay between 0 and 1", "usual ones are 0.9 to 0.999")
        return [ema ** (count - 1), *((1 - ema) * ema ** (count - 1 - i) for i in range(1, count))]
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise UsageError(
            f"--weights says {len(weights)} weights of {count} checkpoints", "one for each, in their order"
        )
    if not all(math.isfinite(number) and number for number in weights):
        spelled = ",".join(f"{weight:g}" for weight in weights)
        raise UsageError(
            f"--weights {spelled}: each has to be a finite number other than 0",
            "a checkpoint that is to have no weight is left out",
        )
    total = _sum(weights)
    if abs(total - 1) > TOLERANCE:
        raise UsageError(f"--weights are {total:.9g} in all, and those of a mean are 1", "divide each by their sum")
    return [*weights]


def _sum(weights: Sequence[float]) -> float:
    """The sum of finite numbers; infinite where a part of it is beyond float64."""
    try:
        return math.fsum(weights)
    except OverflowError:
        return math.inf


def last_of(run: Path, count: int) -> list[Path]:
    """The newest checkpoints of a run, the oldest of them first.

    Raises:
        SourceError: the run is no folder, or holds fewer checkpoints.
        RefusedError: the checkpoints count different things, such as steps and epochs; or the tracker of the run names
            another checkpoint than the newest, whose save was cut short or taken back, or which is not there.
    """
    if not run.is_dir():
        raise SourceError(f"{run} is not a folder", "name the run, in which the checkpoints are")
    named = [(int(number[0]), name) for name in steps(run) if (number := re.search(r"\d+$", name))]
    if not all(NUMBER.fullmatch(name) for _, name in named):  # a number alone may be a folder of a log
        named = [(step, name) for step, name in named if not NUMBER.fullmatch(name) or is_known(run / name)]
    names = [name for _, name in sorted(named)]
    if len(names) < count:
        raise SourceError(f"{run} holds {len(names)} checkpoints, --last asks for {count}", some(names, 6))
    first_of = {name.rstrip("0123456789"): name for name in names}
    if len(first_of) > 1:
        raise RefusedError(
            f"{run} holds {' and '.join(list(first_of.values())[:2])}, and nobody can tell which is newer",
            "name the checkpoints that are meant, each for itself",
        )
    for tracker in (run / name for name in TRACKERS if (run / name).is_file()):
        latest = re.search(r"\d+$", tracker.read_text(errors="replace").strip())
        if latest and int(latest[0]) != max(named)[0]:
            newest = "is there too" if int(latest[0]) < max(named)[0] else "is the newest that is there"
            raise RefusedError(
                f"{tracker} says that {latest[0]} is the latest checkpoint, and {names[-1]} {newest}",
                "name the checkpoints that are meant, each for itself",
            )
    return [run / name for name in names[-count:]]


def plan_average(
    sources: Sequence[Checkpoint],
    weights: Sequence[float],
    request: Request,
    to: str,
    output: Output,
    replicas: str | None,
) -> Plan:
    """A plan that writes the weighted mean of several checkpoints, with the config and the tokenizer of the first.

    Args:
        sources: the opened checkpoints of one model, of any formats.
        weights: the weight of each checkpoint (`weights_of`).
        request: what the user asked for; without a cast, the output has the element types of the sources.
        to: the target format.
        output: how the output is laid out.
        replicas: what is done with further copies of a tensor in each source; None for the default of its format.

    Raises:
        RefusedError: the checkpoints are of different models, or hold a tensor in different types.
        UnsupportedError: the output has other tensor names than a source, and no table connects them.
        UsageError: a checkpoint is named twice.
    """
    homes = [source.home.resolve() for source in sources]
    if twice := [source.home for source, home in zip(sources, homes, strict=True) if homes.count(home) > 1]:
        raise UsageError(f"{twice[0]} is named twice", "a larger --weights gives it more weight")
    for source in sources:
        require_vocab(source)
        _require_same(sources[0], source)
    planned = plan_output(sources[0], request, to, output)
    for source in sources:
        _require_names(source, planned)
    for source in sources if request.cast else ():
        require_castable(source)
    if request.cast is None:
        _require_types(sources)
    checkpoints, notes = zip(*map(_masters, sources), strict=True)
    read = [{job.name: job for job in make_plan(checkpoint, spec=planned.spec).jobs} for checkpoint in checkpoints]
    policies = [replicas_of(source, replicas) for source in sources]

    def averaged(job: Job) -> Job:
        terms = zip([replace(jobs[job.name], finite=True) for jobs in read], weights, policies, strict=True)
        edge = f"weighted mean of {len(sources)} in float64, rounded once to {job.dtype}"
        edge = edge if job.dtype in FLOATS else ""
        return replace(
            job, source_dtype=job.dtype, sources=(), replicas={}, rows=None, partial=False, twins={},
            terms=tuple(Term(*term) for term in terms), edge=edge, centred=(False, job.centred[1]),
        )  # fmt: skip

    inputs = tuple(
        Input(checkpoint, {"averaged": WEIGHTS if checkpoint is source else MASTERS, "weight": weight})
        for checkpoint, source, weight in zip(checkpoints, sources, weights, strict=True)
    )
    jobs = tuple(averaged(job) for job in planned.jobs)
    of_others = [f"{source.root}: {note}" for source in sources[1:] for note in source.notes]
    texts = (*planned.notes, *of_others, *dict.fromkeys(note for some_notes in notes for note in some_notes))
    if any(source.config for source in sources):
        texts = (*texts, f"config and tokenizer are those of {sources[0].root}", *_other_tokenizers(sources))
    pairs = zip(read, policies, strict=True)
    texts = (*texts, *{note for of_source, policy in pairs for note in uncompared(of_source.values(), policy)})
    return replace(without_records(planned), source=checkpoints[0], jobs=jobs, inputs=inputs, notes=texts)


def _require_same(first: Checkpoint, other: Checkpoint) -> None:
    """Refuse two checkpoints that are not of one model.

    Raises:
        RefusedError: the checkpoints differ in settings, in config.json, or in the names or shapes of tensors.
        UnsupportedError: one has the names of memory, the other those of files, and no table connects them.
    """
    where = f"{first.root} and {other.root} are different models"
    if changed := setting_differences(first, other):
        raise RefusedError(f"{where}, their settings differ (here | there): {some(changed, 4)}")
    if changed := file_differences(first, other):
        raise RefusedError(
            f"{first.root} and {other.root}: {APART} (here | there): {some(changed, 4)}",
            "a mean has the config of the first: if that is meant, copy it into the others",
        )
    left, right = with_same_names(first, other)
    if isinstance(left.spec, Verbatim) and isinstance(right.spec, Verbatim):
        ours, theirs = ({name: shape for name, _, shape in spec.boxes()} for spec in (left.spec, right.spec))
        odd = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if odd:
            shapes = " and ".join(
                str(list(shapes_of[odd[0]])) if odd[0] in shapes_of else "absent" for shapes_of in (ours, theirs)
            )
            raise RefusedError(
                f"{where}: {count(len(odd), 'tensor differs', 'tensors differ')} in shape, such as {odd[0]}: {shapes}"
            )
        for side, read, another in ((first, left, other), (other, right, first)):
            if read is not side:
                raise UnsupportedError(
                    f"{side.root} has the tensor names of memory and {another.root} those of files: no table connects "
                    "them",
                    TO_FILES,
                )


def _other_tokenizers(sources: Sequence[Checkpoint]) -> list[str]:
    """A note on each checkpoint whose tokenizer files differ from those of the first."""
    first, *others = [
        {name: path for name, path in carried_assets(model).items() if name in TOKENIZER_FILES} for model in sources
    ]
    odd = {
        source.root: [
            name
            for name in first.keys() & files or (first.keys() | files if first and files else ())
            if not (name in first and name in files and first[name].read_bytes() == files[name].read_bytes())
        ]
        for source, files in zip(sources[1:], others, strict=True)
    }
    return [
        f"{' and '.join(sorted(differing))} of {root} and of {sources[0].root} differ: the mean is of use only if both "
        "give the same tokens"
        for root, differing in odd.items()
        if differing
    ]


def _require_names(source: Checkpoint, planned: Plan) -> None:
    """Refuse a source without a table whose tensor names are not those of the output.

    Raises:
        UnsupportedError: some names differ.
    """
    if not isinstance(source.spec, Verbatim) or not isinstance(planned.spec, Verbatim):
        return
    if odd := sorted(source.spec.shapes.keys() ^ planned.spec.shapes.keys()):
        raise UnsupportedError(
            f"{len(odd)} tensors of {source.root} have other names in the output, such as {odd[0]}: no table connects "
            "them",
            TO_FILES,
        )


def _require_types(sources: Sequence[Checkpoint]) -> None:
    """Refuse checkpoints that hold a tensor in different element types.

    Raises:
        RefusedError: a tensor has several types, and no cast says which one the mean has.
    """
    first = sources[0].dtypes()
    for source in sources[1:]:
        for (name, layer), dtype in source.dtypes().items():
            if first.get((name, layer), dtype) != dtype:
                tensor = name if layer is None else f"{name}.{layer}"
                raise RefusedError(
                    f"{tensor} is {first[name, layer]} in {sources[0].root} and {dtype} in {source.root}",
                    "--dtype says which one the mean has",
                )


def _masters(source: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """A checkpoint with its FP32 master weights in place of its weights, if it has them; and notes for the user."""
    if set(source.dtypes().values()) == {"F32"}:
        return source, ()
    if format_of(source).training is None or not training_of(source).is_trained(source):
        return source, ()
    try:
        masters = training_of(source).states(source)[0].get("fp32")
    except (SourceError, UnsupportedError) as error:
        return source, (f"the weights of {source.root} are averaged, and not its master weights: {error}",)
    if masters is None:
        return source, ()
    return as_weights(masters, source), ()
