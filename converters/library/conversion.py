"""Plans and conversions: the engine of the commands, with typed results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.common.hub_names import WRITTEN, place_of
from converters.common.manifest import total
from converters.common.progress import size
from converters.convert import check_paths, check_room, run, run_share
from converters.library.options import (
    Conversion,
    Place,
    Planning,
    Reading,
    Target,
    absolute,
    cast_of,
    checked,
    known_family,
    limits_of,
    output_of,
    path_of,
    settings_of,
)
from converters.library.records import plan_record
from converters.move.journal import Share
from converters.move.source_checks import Verdict
from converters.plan import plan as plans
from converters.plan.opening import open_only, open_training, replicas_of, source_of
from converters.plan.output import UNIVERSAL, plan_output
from converters.plan.request import Request, named_of
from converters.prove import digest, sources
from formats.disk.handle import is_remote
from formats.errors import UsageError
from formats.torch_files import saves

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from formats.checkpoint import Checkpoint


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        out: the folder that was written.
        tensors: how many logical tensors were written, optimizer states among them.
        nbytes: bytes of these tensors.
        seconds: the duration of the conversion.
        digest: the hash of the weights, of a model with a table the same in every format and topology.
        verified: whether the output was read back and compared.
        source_checksums: which checksums of the source were compared: `checked` is `verified` or says why not.
        mixed: which mixture of files of several saves could not be detected; empty if every one could.
        averaged: tensors whose copies differed and were averaged: how far apart the copies were.
        notes: further messages for the user.
    """

    out: Path
    tensors: int
    nbytes: int
    seconds: float
    digest: str
    verified: bool
    source_checksums: Verdict
    mixed: str = ""
    averaged: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record that `convert --json` prints."""
        return {
            "digest": self.digest, "verified": self.verified, "source_checksums": self.source_checksums.record(),
            "out": str(self.out), "tensors": self.tensors, "bytes": self.nbytes, "seconds": round(self.seconds, 3),
            "averaged": self.averaged, "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True)
class Part:
    """The result of one of several processes of a conversion; the call without `part` finishes the conversion.

    Attributes:
        part: the part, such as `2/8`.
        out: the folder of the finished conversion.
        tensors: how many logical tensors the part has.
        nbytes: bytes of these tensors.
        seconds: the duration of the part.
        averaged: tensors whose copies differed and were averaged: how far apart the copies were.
        notes: further messages for the user.
    """

    part: str
    out: Path
    tensors: int
    nbytes: int
    seconds: float
    averaged: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record that `convert --part --json` prints."""
        return {
            "part": self.part, "out": str(self.out), "tensors": self.tensors, "bytes": self.nbytes,
            "seconds": round(self.seconds, 3), "averaged": self.averaged, "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The plan of a conversion: that every element has one source and one place was proved when the plan was made."""

    plan: plans.Plan = field(repr=False)

    def __repr__(self) -> str:
        source, written = self.record["source"], self.record.get("target")
        into = f"{len(written['files'])} files of {size(written['bytes'])}" if written else "nothing"
        return f"Plan({self.record['jobs']} tensors of {source['format']}, into {into})"

    @cached_property
    def record(self) -> dict[str, Any]:
        """The record that `convert plan --json` prints."""
        return plan_record(self.plan)

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user before the conversion."""
        return tuple(self.record["notes"])

    @property
    def nbytes(self) -> int:
        """Bytes of all logical tensors."""
        return self.plan.nbytes

    @property
    def files(self) -> dict[str, int]:
        """The weight files that would be written, and their sizes in bytes."""
        sizes: dict[str, int] = self.record["target"]["files"]
        return sizes

    @property
    def changes(self) -> dict[str, int]:
        """Each named change of value, such as a cast, and how many tensors it applies to. Empty: all bits are kept."""
        return self.plan.edges

    def to_dict(self) -> dict[str, Any]:
        """The same as `record`."""
        return self.record


def carry_out(
    planned: plans.Plan, request: Request, share: Share | None = None, notes: Sequence[str] = ()
) -> Converted | Part:
    """Run a plan, or a share of it. Raises as `converters.convert.run` and `run_share`."""
    began, averaged, verdicts = time.monotonic(), dict[str, float](), list[Verdict]()

    def drifted(job: plans.Job, distance: float) -> None:
        averaged[job.name] = distance

    if share is not None:
        jobs = run_share(planned, share, request, drifted)
        nbytes, seconds = sum(job.nbytes for job in jobs), time.monotonic() - began
        return Part(str(share), request.out, len(jobs), nbytes, seconds, averaged, tuple(notes))
    if is_remote(request.out):
        from converters.delivery.deliver import deliver

        digests = deliver(planned, request, drifted, verdicts.append)
    else:
        digests = run(planned, request, drifted, verdicts.append)
    paths = {part.fragment.path for job in planned.reads for part in job.sources if part.fragment.member}
    read = [(source, paths & {*source.files}) for source in planned.sources]
    return Converted(
        request.out,
        len(digests),
        planned.nbytes,
        time.monotonic() - began,
        total(digest.of_weights(planned, digests)),
        request.verify,
        verdicts[0],
        "; ".join(dict.fromkeys(filter(None, (saves.untied(source.home, used, source.ties) for source, used in read)))),
        averaged,
        tuple(notes),
    )


def check(planned: plans.Plan, request: Request) -> None:
    """Check what would stop a conversion, before a byte of the weights is read.

    Raises:
        OutputError: OUT exists, or is in the source, or there is no room for it.
        VerificationError: the source contradicts its manifest.
    """
    if is_remote(request.out):
        from converters.delivery import deliver

        deliver.check(planned, request)
        return
    assert planned.target is not None
    for source in planned.sources:
        check_paths(source, request, planned.target.copies.values())
    sources.check_manifests(planned)
    check_room(planned, request)


def plan(src: Place, *, to: Target = "huggingface", **options: Unpack[Planning]) -> Plan:
    """Plan a conversion without running it. Only headers are read, no weights.

    Args:
        src: the folder of the source.
        to: the target format.
        options: by the flags of the commands: `tp=4`, `dtype="bf16"`, `config="BASE"`.

    Raises:
        VitruvianError: as `convert`, except errors of the output and of the weights.
    """
    stated = checked(options, Planning.__optional_keys__)
    with known_family(stated) as family:
        return Plan(_planned(path_of(src, "src"), Path("/OUT"), to, stated, family)[0])


def convert(src: Place, out: Place, *, to: Target = "huggingface", **options: Unpack[Conversion]) -> Converted:
    """Convert a checkpoint. OUT is complete or absent; the same call resumes an interrupted conversion.

    Args:
        src: the folder of the source, in any format; or `ORG/NAME`, `hf://…`, `s3://…` and the like.
        out: the folder that is written; or `hf://ORG/NAME`, `s3://…`, which is visible when it is complete.
        to: `huggingface`, `megatron`, `fsdp`, `neox`, `deepspeed` (a universal checkpoint), `megatron-deepspeed`,
            `nanotron`, or `mistral` (consolidated.safetensors and params.json).
        options: by the flags of the commands: `tp=4`, `dtype="bf16"`, `config="BASE"`, `force=True`. `progress` is
            called with the name of the step, bytes done and bytes in all; `memory` is in bytes.

    Raises:
        UsageError: options contradict each other, or have no effect here.
        SourceError: the source cannot be read, is damaged or incomplete.
        UnsupportedError: the source holds something that has no layout in the target.
        RefusedError: something would be lost, guessed or duplicated.
        VerificationError: copies of a tensor differ, or the output does not read back as planned.
        OutputError: OUT exists, or there is no room.
        Interrupted: a signal came.
    """
    done = _convert(path_of(src, "src"), path_of(out, "out", WRITTEN), None, to, options)
    assert isinstance(done, Converted)
    return done


def convert_part(
    src: Place, out: Place, part: tuple[int, int], *, to: Target = "huggingface", **options: Unpack[Conversion]
) -> Part:
    """Do the I-th of N parts (I, N) of a conversion, beside other processes on any nodes; `convert` then finishes.

    Args:
        src: the source, as in `convert`.
        out: the folder of the finished conversion.
        part: the part, from (1, N) to (N, N).
        to: the target format.
        options: by the flags of the commands.

    Raises:
        UsageError: there is no such part. Else as `convert`.
    """
    numbers = list(part) if isinstance(part, tuple | list) else []
    if [type(number) for number in numbers] != [int, int] or not 1 <= numbers[0] <= numbers[1]:
        raise UsageError(f"part = {part!r} is none such as (1, 8) or (8, 8)")
    done = _convert(path_of(src, "src"), path_of(out, "out", WRITTEN), Share(*part), to, options)
    assert isinstance(done, Part)
    return done


def _convert(src: Path, out: Path, share: Share | None, to: str, options: Mapping[str, Any]) -> Converted | Part:
    stated = checked(options, Conversion.__optional_keys__)
    with known_family(stated) as family:
        planned, request = _planned(src, out, to, stated, family)
        return carry_out(planned, request, share, plan_record(planned)["notes"])


def _planned(src: Path, out: Path, to: str, options: Mapping[str, Any], family: Any) -> tuple[plans.Plan, Request]:
    """The plan of a conversion, and its request."""
    reading = {name: value for name, value in options.items() if name in Reading.__optional_keys__}
    settings = settings_of(reading)
    opened = (open_training if to == UNIVERSAL else open_only)(src, settings, family)
    request = request_from(out, options, source_of(opened))
    return plan_output(opened, request, to, output_of(options)), request


def request_from(out: Path, options: Mapping[str, Any], source: Checkpoint) -> Request:
    """The request that the options of `Conversion` make, for an opened source."""
    return Request(
        absolute(place_of(out)),
        cast_of(options),
        limits_of(options, replicas_of(source, options.get("replicas"))),
        force=options.get("force", False),
        verify=options.get("verify", True),
        stripes=options.get("stripes", True),
        quiet=True,
        tell=options.get("progress"),
        named=named_of(options),
    )
