"""Plans: which elements are copied from where to where, proved complete before a byte is read.

A job moves one logical tensor of one layer. Its sources and its targets are both maps from the same box of
coordinates, so the plan is only a matter of putting together the leaves that hold the same tensor, and of proving that
the leaves of each side tile its box: each element comes from exactly one place and each place is written exactly once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import PurePath
from typing import Any, NamedTuple

from converters.assets.trusted import is_record
from converters.plan.parts import Copies, Part, Parts, empty, parts_of, written_parts
from formats.checkpoint import Checkpoint, OutputFile, Target
from formats.disk.safetensors import DTYPES, FLOATS, Fragment
from formats.errors import RefusedError, UnsupportedError, some
from formats.layout.leaves import Leaf
from formats.layout.placed import Placed
from formats.layout.slots import ORIGINAL, Replica
from formats.layout.tensors import EXACT
from formats.model.spec import Spec, Verbatim
from formats.optimizer import STATES

PADDING = "padding"
"""The state of a job that moves rows of vocabulary padding, for a training that is resumed with them."""
MASTERS = "fp32"
"""The optimizer state that weights are rounded from: FP32 master weights."""
UNCAST = ("F8", "C64")
"""Element types, by the start of their names, that are neither integers nor cast: 8-bit floats, complex numbers."""
SCALE = re.compile(r"(.*)[._](?:scale(?:_inv)?|SCB|absmax)")
"""The names of scales of 8-bit weights; the group is the name of the weights. The last two are bitsandbytes'."""
CASTS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


class Term(NamedTuple):
    """A summand of a tensor that is computed from several.

    Attributes:
        job: the job that reads the summand, and writes nothing.
        factor: the factor that the summand is multiplied by.
        policy: what is done with further copies of the summand (`Limits.replicas`).
    """

    job: Job
    factor: float = 1.0
    policy: str = "verify"


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms that the rows of a matrix are rescaled to: DoRA's magnitudes.

    Attributes:
        wanted: the norm of each row.
        parts: where the elements of the tensor are in the matrix.
        columns: how many elements each row has.
        transposed: whether the matrix is stored column by column.
    """

    wanted: Fragment
    parts: tuple[Part, ...]
    columns: int
    transposed: bool

    def __len__(self) -> int:
        """How many rows there are."""
        return self.wanted.shape[0]


class Recorded(NamedTuple):
    """The digest that the manifest of a source records of a tensor, and the name that it is recorded under."""

    name: str
    digest: str


@dataclass(frozen=True)
class Job:
    """One logical tensor of one layer: where its elements come from and where they go.

    `shape` is the box, in the canonical order of the tensor's axes. `replicas` are further copies in the source; when
    the job is `partial` they are summands. `rows` is how many rows the source has when the target has more: the new
    rows become the mean of those, or copies of the `last` one. `twins` are its copies in the element type that FP32
    master weights are rounded to. `state` is the optimizer state that moves, such as `exp_avg`; empty for weights.
    `centred` tells of source and target whether they store the tensor minus one. A tensor that is computed from several
    has `terms` in place of sources; its rows are rescaled to `norms`, and `edge` names the computation. `key` is the
    name of the tensor in the source's files; with `shared`, of the physical tensor that has others too. `moment` is the
    optimizer state that the source gives in place of its weights (`--weights exp_avg`), if it is one. If it is to be
    `finite`, NaN and infinity are refused. What a job reads is compared with what is `recorded` of it.
    """

    tensor: str
    layer: int | None
    shape: tuple[int, ...]
    source_dtype: str
    dtype: str
    sources: Sequence[Part]
    replicas: Mapping[Replica, Sequence[Part]]
    targets: Sequence[Part]
    rows: int | None = None
    partial: bool = False
    twins: Mapping[Replica, Sequence[Part]] = field(default_factory=dict)
    last: bool = False
    state: str = ""
    centred: tuple[bool, bool] = (False, False)
    terms: tuple[Term, ...] = ()
    norms: tuple[Norms, ...] = ()
    edge: str = ""
    key: str = ""
    shared: bool = False
    moment: str = ""
    finite: bool = False
    recorded: Recorded | None = None

    @property
    def made(self) -> Job:
        """The job with its parts as tuples, for its execution, which iterates over them several times."""
        each = self.replicas, self.twins
        replicas, twins = ({copy: tuple(parts) for copy, parts in copies.items()} for copies in each)
        terms = tuple(term._replace(job=term.job.made) for term in self.terms)
        sources, targets = tuple(self.sources), tuple(self.targets)
        return replace(self, sources=sources, replicas=replicas, targets=targets, twins=twins, terms=terms)

    @property
    def less_one(self) -> tuple[bool, bool]:
        """Whether source and target store the values minus one: weights and master weights may, moments do not."""
        return self.centred if self.state in ("", MASTERS) else (False, False)

    @property
    def shift(self) -> int:
        """The number that is added to values of the source to get those of the target, or of the tensor without one."""
        source, target = self.less_one
        return int(source) - int(target)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the tensor's axes."""
        return tuple(span.axis for span in self.reads[0].sources[0].leaf.spans)

    @property
    def reads(self) -> tuple[Job, ...]:
        """The jobs that read the sources: those of the terms, or, without terms, this job."""
        return tuple(term.job for term in self.terms) or (self,)

    @property
    def name(self) -> str:
        """Name of the logical tensor, with the state before and the layer after a dot."""
        name = f"{self.state}.{self.tensor}" if self.state else self.tensor
        return name if self.layer is None else f"{name}.{self.layer}"

    @property
    def stored_as(self) -> str:
        """The key in the source's files, with the optimizer state where the key lacks it; without a key, the name."""
        if not self.key:
            return self.name
        return self.key if self.state in self.key else f"{self.state} of {self.key}"

    @property
    def label(self) -> str:
        """What to call it in an error: by its key in the source, where it has one; a state, with its name."""
        if not self.key:
            return self.name
        key = f"{self.tensor} in {self.key}" if self.shared else self.key
        return key if self.state in key else f"{self.state} of {key}"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as it is written."""
        return prod(self.shape) * DTYPES[self.dtype]

    @property
    def edges(self) -> tuple[str, ...]:
        """The named changes of value between source and target."""
        cast = [] if self.source_dtype == self.dtype else [f"cast {self.source_dtype} to {self.dtype}"]
        fragments = [part.fragment for part in self.sources]
        each = [piece for fragment in fragments for piece in (fragment, *(inner for _, inner in fragment.pieces))]
        coded = sorted({f"{piece.scales.method} to {piece.dtype}" for piece in each if piece.scales})
        changed = sorted({piece.chunk.change.edge for piece in each if piece.chunk and piece.chunk.change})
        rounded = ["quantize to FP8 by blocks"] * any(fragment.coded for fragment in fragments)
        kind = "last" if self.last else "mean"
        grow = [] if self.rows is None else [f"{kind} of {self.rows} rows as {self.shape[0] - self.rows} new rows"]
        added = [f"sum over {1 + len(self.replicas)} ranks"] if self.partial and self.replicas else []
        summed = [edge for term in self.terms for edge in term.job.edges] + ([self.edge] if self.edge else [])
        plus = any(term.job.less_one[0] for term in self.terms) or self.shift > 0
        moved = ["add 1 to a norm that is stored minus 1"] if plus and self.targets else []
        moved += ["subtract 1 from a norm"] if self.shift < 0 and self.targets else []
        decoded = [*(f"dequantize {method}" for method in coded), *changed]
        return (*decoded, *rounded, *added, *cast, *moved, *grow, *summed)


class Input(NamedTuple):
    """One of several checkpoints that an output is computed from.

    Attributes:
        checkpoint: the checkpoint that is read.
        record_entries: further entries for record and manifest, such as the weight of the checkpoint.
    """

    checkpoint: Checkpoint
    record_entries: Mapping[str, Any]

    @property
    def record(self) -> dict[str, Any]:
        """The manifest's entry for the checkpoint. Folders move: only the folder's name is kept."""
        checkpoint = self.checkpoint
        return {
            "name": checkpoint.home.name,
            "format": checkpoint.format,
            "topology": dict(checkpoint.topology),
            **self.record_entries,
        }


@dataclass(frozen=True)
class Plan:
    """All jobs of a conversion; without a target, those of reading the source once.

    `spec` is that of the output; `notes` are messages for the user. `plan_of_output` makes from the plan one that reads
    the output, where no reader of a checkpoint would read all of it; such an output has no manifest, unless it is
    `remembered`: when it is read later, its tensors have the names of the plan. `output_jobs` gives the jobs that read
    what an output holds besides the weights. `inputs` are all sources, where there are several; the first of them is
    `source`.
    """

    source: Checkpoint
    spec: Spec
    jobs: tuple[Job, ...]
    target: Target | None = None
    notes: tuple[str, ...] = ()
    plan_of_output: Callable[[Plan], Plan] | None = None
    output_jobs: Callable[[Checkpoint], Iterable[Job]] | None = None
    inputs: tuple[Input, ...] = ()
    remembered: bool = False

    @property
    def reads(self) -> tuple[Job, ...]:
        """The jobs that read sources."""
        return tuple(read for job in self.jobs for read in job.reads)

    @property
    def sources(self) -> tuple[Checkpoint, ...]:
        """All checkpoints that are read."""
        return tuple(source.checkpoint for source in self.inputs) or (self.source,)

    @property
    def nbytes(self) -> int:
        """Bytes of all logical tensors, each counted once."""
        return sum(job.nbytes for job in self.jobs)

    @property
    def blocks(self) -> int:
        """How many strided blocks are read and written."""
        return sum(len(job.sources) for job in self.reads) + sum(len(job.targets) for job in self.jobs)

    @property
    def edges(self) -> dict[str, int]:
        """Each named change of value, and how many tensors it applies to."""
        counts: dict[str, int] = {}
        for job in self.jobs:
            for edge in job.edges:
                counts[edge] = counts.get(edge, 0) + 1
        return counts


def make_plan(
    source: Checkpoint, target: Target | None = None, cast: str | None = None, spec: Spec | None = None
) -> Plan:
    """Join a source and a target on their logical tensors.

    Args:
        source: the opened checkpoint.
        target: the files to write; without it the plan only reads.
        cast: the element type to which floating point tensors are cast.
        spec: the spec of the output, when its vocabulary has grown.

    Raises:
        RefusedError: a side does not cover a tensor, or covers it twice.
        UnsupportedError: a cast would change 8-bit weights with scales, or an element type that has no cast.
    """
    source_parts, twins = parts_of(source.tensors), parts_of(source.twins)
    partial, centred = (_with_condition(source.tensors, condition) for condition in ("partial", "centred"))
    held_there = list(target.tensors) if target else []
    wanted, less_one = written_parts(held_there), _with_condition(held_there, "centred")
    repeated = _repeated(target) if target and target.padding == "last" else {}
    dtypes = source.dtypes()
    if cast:
        require_castable(source)
    jobs = []
    padded = source.padded_vocab
    moment = next((state for state in STATES[1:] if state == source.settings.weights), "")
    shapes = {(tensor, layer): shape for tensor, layer, shape in (spec or source.spec).boxes(padded)}
    for tensor, layer, held_shape in source.spec.boxes(padded):
        if tensor in source.without:
            continue
        shape = shapes[tensor, layer]
        name = tensor if layer is None else f"{tensor}.{layer}"
        nothing: Copies = {} if prod(shape) else {ORIGINAL: Parts(tensor)}
        sources = source_parts.get((tensor, layer), nothing)
        written = wanted.get((tensor, layer), Parts(tensor))
        if ORIGINAL not in sources or (target and prod(shape) and not written):
            raise RefusedError(f"nothing {'writes' if ORIGINAL in sources else 'holds'} {name}")
        module = {copy: parts for copy, parts in twins.get((tensor, layer), {}).items() if parts}
        for side, copies in (("source", sources), ("module", module)):
            for copy, parts in copies.items():
                parts.prove(held_shape, f"{name} in the {side}{f' ({copy})' if copy else ''}")
        if written:
            written.prove_copies(shape, f"{name} in the target")
        written.extra = tuple(repeated.get((tensor, layer), ()))
        dtype = dtypes[tensor, layer]
        jobs.append(
            Job(
                tensor, layer, shape, dtype, cast_dtype(dtype, cast, tensor), sources[ORIGINAL],
                {copy: parts for copy, parts in sources.items() if copy},
                written,
                held_shape[0] if held_shape != shape else None,
                (tensor, layer) in partial,
                module,
                bool(target and target.padding == "last"),
                centred=((tensor, layer) in centred, (tensor, layer) in less_one),
                key=sources[ORIGINAL].key,
                shared=sources[ORIGINAL].shared,
                moment=moment,
            )
        )  # fmt: skip
    if target:
        _prove_filled(target)
    return Plan(source, spec or source.spec, tuple(jobs), target)


def _with_condition(tensors: Iterable[Placed], condition: str) -> set[tuple[str, int | None]]:
    """The (tensor, layer) of physical tensors whose table lines have a condition."""
    return {
        (name, placed.slot.layer)
        for placed in tensors
        if condition in placed.slot.rule.conditions
        for name in placed.slot.rule.pattern.tensors
    }


def require_castable(source: Checkpoint) -> None:
    """Refuse to cast quantized weights: a cast takes the tensors one by one, and would only round the scales.

    Raises:
        UnsupportedError: there are such weights, or element types that are neither integers nor cast.
    """
    dtypes = {placed.key: placed.fragment.dtype for placed in source.tensors}
    odd = [key for key, dtype in dtypes.items() if dtype not in FLOATS]
    small = {key for key in odd if DTYPES[dtypes[key]] == 1 and dtypes[key] != "BOOL"}
    uncastable = ""
    for key in dtypes if small else ():
        scaled = SCALE.fullmatch(key)
        if scaled and not small.isdisjoint((scaled[1], f"{scaled[1]}.weight")):
            uncastable = f"weights of 8 bits with scales, such as {key}"
            break
    uncast = [key for key in odd if dtypes[key].startswith(UNCAST)]
    if not uncastable and uncast:
        uncastable = f"{uncast[0]} as {dtypes[uncast[0]]}, and a cast is between {some([*FLOATS], 4)}"
    if (
        not uncastable
        and odd
        and (source.config or {}).get("quantization_config")
        and isinstance(source.spec, Verbatim)
    ):
        uncastable = f"quantized weights, as its quantization_config says, such as {odd[0]}"
    if uncastable:
        raise UnsupportedError(f"{source.root} holds {uncastable}", "leave --dtype out")


def cast_dtype(dtype: str, cast: str | None, tensor: str = "") -> str:
    """The element type of a tensor after a cast, which leaves integers alone, and tensors that no framework rounds."""
    exact = tensor in EXACT or tensor.endswith(".e_score_correction_bias")  # of a model without a table
    return CASTS[cast] if cast and dtype in FLOATS and not exact else dtype


def cast_dtypes(source: Checkpoint, cast: str | None) -> dict[tuple[str, int | None], str]:
    """The element type of each logical tensor of a checkpoint after a cast."""
    return {name: cast_dtype(dtype, cast, name[0]) for name, dtype in source.dtypes().items()}


def padding_leaves(placed: Placed, stop: int | None = None) -> Iterator[Leaf]:
    """The leaves of vocabulary padding in a tensor: of the rows after the last token, up to `stop`."""
    sizes = dict(placed.slot.sizes)
    if not placed.slot.rule.pattern.filled:
        return
    vocab, total = sizes["vocab"], sizes["vocab"] + sizes["padding"]
    stop = total if stop is None else stop
    sizes |= {"vocab": stop, "padding": total - stop}
    for leaf in placed._replace(slot=placed.slot._replace(sizes=tuple(sizes.items()))).leaves():
        rows = leaf.spans[0]
        low, high = max(rows.start, vocab), min(rows.stop, stop)
        if low < high:
            spans = (rows._replace(start=low, stop=high), *leaf.spans[1:])
            yield Leaf(leaf.tensor, spans, leaf.base + (low - rows.start) * rows.stride)


def _repeated(target: Target) -> dict[tuple[str, int | None], list[Part]]:
    """The parts of vocabulary padding by (tensor, layer): each row is a copy of the last token's row."""
    by_tensor: dict[tuple[str, int | None], list[Part]] = {}
    for placed in (tensor for alike in target.tensors for tensor in alike.each()):
        for leaf in repeated_leaves(placed):
            by_tensor.setdefault((leaf.tensor, placed.slot.layer), []).append(Part(leaf, placed.fragment))
    return by_tensor


def repeated_leaves(placed: Placed) -> Iterator[Leaf]:
    """The leaves of vocabulary padding in a tensor: each row is a copy of the last token's row."""
    last = dict(placed.slot.sizes)["vocab"]
    for leaf in padding_leaves(placed):
        rows = leaf.spans[0]
        spans = (rows._replace(start=last - 1, stop=last), *leaf.spans[1:])
        for row in range(rows.size):
            yield Leaf(leaf.tensor, spans, leaf.base + row * rows.stride)


def _prove_filled(target: Target) -> None:
    """Refuse a target with an element that belongs neither to a leaf nor to a named fill."""
    for placed in target.tensors:
        left = empty(placed)
        if left and not placed.slot.rule.pattern.filled:
            raise RefusedError(f"{left} elements of {placed.key} have no source")


def without_records(plan: Plan) -> Plan:
    """A plan that computes weights: the records of a source (`is_record`) are of others, and are not carried."""
    assert plan.target is not None
    copies = {name: path for name, path in plan.target.copies.items() if not is_record(PurePath(name).name)}
    return replace(plan, target=replace(plan.target, copies=copies))


def name_in(file: OutputFile) -> str:
    """The path of a weight file in the output."""
    return str(file.path).split(".partial/out/")[-1]


def needs(target: Target) -> tuple[int, int]:
    """Bytes of an output, and how many files and folders it has, with manifest, journal and the journal's folder."""
    nbytes = sum(file.size for file in target.files) + sum(path.stat().st_size for path in target.copies.values())
    names = {*map(name_in, target.files), *target.texts, *target.copies}
    folders = {str(parent) for name in names for parent in PurePath(name).parents}
    return nbytes + sum(map(len, target.texts.values())), len(names) + len(folders) + 3


def fill_count(target: Target) -> int:
    """How many elements of the target are fill (vocabulary padding)."""
    return sum(map(empty, target.tensors))
