"""Plans for trainings that are resumed: weights, FP32 master weights and moments, all converted into one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from converters.plan.names import as_trained
from converters.plan.plan import MASTERS, Job, Plan, cast_dtypes, make_plan
from converters.plan.request import Request
from converters.plan.state_jobs import state_jobs, tensors_of
from converters.plan.targets import in_tables, megatron_spec, plan_fsdp, plan_mds, plan_megatron, plan_nanotron
from converters.plan.universal import UNSAID, UNTAKEN
from formats.checkpoint import Checkpoint, Target
from formats.deepspeed.mds import optimizer as mds_optimizer
from formats.deepspeed.mds import writer as mds_writer
from formats.deepspeed.mds.checkpoint import MegatronDeepSpeed
from formats.detect.rivals import tracked
from formats.errors import UnsupportedError, UsageError, VerificationError
from formats.format import Training
from formats.fsdp import FSDP
from formats.huggingface.nanotron.optimizer_writer import Topology
from formats.layout.placed import Placed, files_of
from formats.layout.tensors import UNTRAINED
from formats.megatron import muon, optimizer_reader, portable_optimizer
from formats.megatron.args.options import DIST, FSDP_DTENSOR, Options, main_dtype
from formats.megatron.details import Megatron
from formats.megatron.optimizer import Optimizer as Native
from formats.megatron.optimizer import of_kind
from formats.megatron.torch_dist import OPTIMIZER
from formats.model.spec import Verbatim
from formats.optimizer import MOMENTUM, AnyGroup, Group, Muon, Optimizer
from formats.registry import format_of, is_known


def training_of(source: Checkpoint) -> Training:
    """The reader of optimizers in the format of a checkpoint.

    Raises:
        UnsupportedError: optimizers of its format are not read.
    """
    training = format_of(source).training
    if training is None:
        run = tracked(source.root, is_known)
        raise UnsupportedError(
            f"{source.root} is a checkpoint of the format {source.format}, of which no optimizer is read",
            f"take {run or 'the checkpoint of a training'}, or the weights alone, without --with-optimizer",
        )
    return training


def optimizer_of(source: Checkpoint) -> Optimizer:
    """The optimizer of a checkpoint of any format.

    Raises:
        SourceError: the checkpoint holds no optimizer, or an incomplete one.
        UnsupportedError: optimizers of its format are not read.
    """
    return training_of(source).read(as_trained(source))


def with_parameters(source: Checkpoint, names: Set[str]) -> Checkpoint:
    """An FSDP checkpoint that was written here without further names of its parameters, whose states have `names`.

    For models without a table alone; for other checkpoints `as_trained` names the parameters.
    """
    spec = source.spec
    if source.format != FSDP.name or not isinstance(spec, Verbatim):
        return source
    shapes = {name: shape for name, shape in spec.shapes.items() if name in names}
    tensors = tuple(item for item in source.tensors if not names.isdisjoint(item.slot.rule.pattern.tensors))
    return replace(source, tensors=tensors, spec=replace(spec, shapes=shapes))


def plan_fsdp_run(source: Checkpoint, request: Request, ranks: int, trainer: str | None = None) -> Plan:
    """A plan that writes a DCP folder with the optimizer of the source. FP32 master weights become the weights.

    Args:
        source: the opened checkpoint.
        request: what the user asked for.
        ranks: how many data files.
        trainer: the trainer whose own names the tensors get; None for those of Hugging Face.

    Raises:
        SourceError: the source holds no optimizer, or an incomplete one.
        UnsupportedError: the optimizer has no layout in the target.
    """
    optimizer = optimizer_of(source)
    masters = optimizer.states.get("fp32")
    moments = replace(
        optimizer, states={state: state_of for state, state_of in optimizer.states.items() if state != "fp32"}
    )
    weights = replace(source if masters is None else as_weights(masters, source), dropped=(), state=())
    asked = request if masters is None else replace(request, cast="fp32")
    plan = plan_fsdp(weights, asked, ranks, moments, trainer=trainer)
    regrouped = _regrouped(optimizer, plan.target, isinstance(source.details, Megatron), False)
    notes = [*optimizer.notes, UNTAKEN, *regrouped]
    if masters:
        notes.append("FSDP trains the weights themselves: they are written from the FP32 master weights")
    if isinstance(source.details, Megatron):
        notes += muon.notes(source.details.args, 1)
    if MOMENTUM in optimizer.states:
        order = dict.fromkeys("muon" if isinstance(group, Muon) else "adamw" for group in optimizer.groups.values())
        notes.append(f"it loads into get_state_dict(model, [{', '.join(order)}]), the optimizers in this order")
    if not optimizer.groups:
        notes.append(f"{UNSAID}: set_optimizer_state_dict of torch asks for them")

    jobs = state_jobs(source, moments.states, target=plan.target)
    same = _reader_of_same(optimizer.step, optimizer.groups)
    names = {name for state in moments.states.values() for name, _ in state.dtypes()}
    return _with_states(plan, moments.states, jobs, notes, lambda written: same(with_parameters(written, names)))


def plan_run(
    source: Checkpoint, request: Request, options: Options, iteration: int | None, kind: str | None = None
) -> Plan:
    """A plan that writes a run of Megatron with the optimizer of a run of Megatron.

    Args:
        source: the opened checkpoint.
        request: what the user asked for.
        options: topology and dialect.
        iteration: the iteration to write; None for a release.
        kind: the optimizer that is written, `plain` or `distributed`; None for that of the source.

    Raises:
        SourceError: the source holds no optimizer, or an incomplete one.
        UnsupportedError: the optimizer has no layout in the target.
    """
    stored = optimizer_reader.read(source)
    optimizer = stored if kind is None else of_kind(stored, source, distributed=kind == "distributed")
    weights = source
    if request.cast and "fp32" not in optimizer.states:
        optimizer = replace(optimizer, states={"fp32": _trained(source), **optimizer.states})
    if options.dialect == FSDP_DTENSOR:
        weights, optimizer, request, options = _for_fsdp(source, optimizer, request, options)
    _require_torch_dist(source, optimizer, options, request.cast)
    plan = plan_megatron(weights, request, options, iteration, optimizer=optimizer)
    padded, multiple = source.padded_vocab or 0, options.vocab_multiple * options.tp
    rows = min(padded, -(-(source.spec.vocab or 0) // multiple) * multiple)
    notes = ["rng_state is not carried: it is that of other ranks"] if "rng_state" in source.state else []
    if rows < padded:
        notes.append(f"{padded - rows} rows of vocabulary padding have no place in the new topology")
    notes += muon.notes(source.details_of(Megatron).args, options.tp)
    proof = None if "fp32" in optimizer.states or weights is not source else stored.states.get("fp32")
    return _resumed(plan, optimizer, rows, notes, proof, request.cast)


def plan_resumed(
    source: Checkpoint,
    request: Request,
    options: Options,
    iteration: int | None = None,
    samples: int | None = None,
    kind: str = "plain",
    rates: tuple[float, float] | None = None,
) -> Plan:
    """A plan that writes a run of Megatron with the optimizer of a training in another framework.

    Args:
        source: the opened checkpoint.
        request: what the user asked for; its cast is that of the weights.
        options: topology and dialect.
        iteration: the iteration to write; None for the number of updates.
        samples: how many samples the model was trained on; None for what the source records.
        kind: the optimizer that is written, `plain` or `distributed`.
        rates: the largest and the smallest learning rate of the training that resumes.

    Raises:
        SourceError: the source holds no optimizer, or an incomplete one.
        UnsupportedError: the model or the optimizer has no layout in the target.
        UsageError: the training cannot resume without its rates.
    """
    megatron_spec(source, options)
    stored = optimizer_of(source)
    weights, states = _split(source, stored, request.cast)
    stored = replace(stored, states=states, samples=stored.samples if samples is None else samples)
    optimizer, notes = portable_optimizer.native(source, stored, rates)
    optimizer = of_kind(optimizer, weights, distributed=kind == "distributed")
    args = {"consumed_train_samples": stored.samples or 0}
    weights = replace(weights, dropped=())
    if options.dialect == FSDP_DTENSOR:
        weights, optimizer, request, options = _for_fsdp(weights, optimizer, request, options)
        notes.append(
            "Megatron-FSDP takes the largest and the smallest rate of its schedule from the checkpoint, "
            f"{optimizer.groups[0]['lr']:g} and 0, whatever --lr and --min-lr say"
        )
    _require_torch_dist(source, optimizer, options, request.cast)
    plan = plan_megatron(weights, request, options, iteration or stored.step, optimizer=optimizer, args=args)
    return _resumed(plan, optimizer, 0, [*notes, *_regrouped(optimizer, plan.target, False, True)])


def plan_nanotron_run(source: Checkpoint, request: Request, vocab_multiple: int, topology: Topology) -> Plan:
    """A plan that writes a checkpoint of nanotron with the optimizer of the source.

    Args:
        source: the opened checkpoint.
        request: what the user asked for; its cast is that of the weights.
        vocab_multiple: the rows of the vocabulary on each tensor-parallel rank are padded to a multiple of this.
        topology: the parallel sizes of the training that resumes.

    Raises:
        SourceError: the source holds no optimizer, or an incomplete one.
        UnsupportedError: the optimizer has no layout in the target.
        UsageError: the output folder is named after another step, which readers refuse.
    """
    stored = optimizer_of(source)
    name, step = request.place.name, str(stored.updates(source.home))
    if name.isdecimal() and name != step:
        raise UsageError(
            f"{request.out} is named as step {name} of nanotron, and this is step {step}", f"name it {step}"
        )
    weights, states = _split(source, stored, request.cast)
    optimizer = replace(stored, states=states)
    plan = plan_nanotron(replace(weights, dropped=(), state=()), request, vocab_multiple, optimizer, topology)
    sums = "true" if MASTERS in states else "false"
    notes = [
        *stored.notes,
        UNTAKEN,
        f"nanotron resumes at tp {topology.tp}, pp {topology.pp} with accumulate_grad_in_fp32: {sums} and "
        "zero_stage: 0; its schedule begins anew, at the rate of each parameter in the checkpoint",
    ]
    jobs = state_jobs(source, states, target=plan.target)
    return _with_states(plan, states, jobs, notes, _reader_of_same(optimizer.step, optimizer.groups))


def plan_mds_run(
    source: Checkpoint,
    request: Request,
    options: mds_writer.Options,
    iteration: int | None = None,
    samples: int | None = None,
) -> Plan:
    """A plan that writes a run of Megatron-DeepSpeed with the optimizer of a training in any framework.

    Args:
        source: the opened checkpoint.
        request: what the user asked for; its cast is that of the weights.
        options: topology, and the order of query, key and value of the code that will load the checkpoint.
        iteration: the iteration to write; None for the number of updates.
        samples: how many samples the model was trained on; None for what the source records.

    Raises:
        SourceError: the source holds no optimizer, or an incomplete one.
        UnsupportedError: the model or the optimizer has no layout in the target.
        UsageError: the optimizer has made more updates than there were iterations.
    """
    in_tables(source, "Megatron-DeepSpeed")
    stored = optimizer_of(source)
    stored.require_only((Group,), source.root, "Megatron-DeepSpeed trains with Adam alone")
    matrices, vectors = portable_optimizer.sides(source, stored)
    groups, step = (matrices, vectors._replace(weight_decay=0.0)), stored.updates(source.home)
    weights, states = _split(source, stored, request.cast)
    states = {"fp32": _trained(weights), **states}
    saved = source.details.progress if isinstance(source.details, MegatronDeepSpeed) else {}
    counted = saved.get(mds_optimizer.SAMPLES, stored.samples) if samples is None else samples
    progress = {name: value for name, value in saved.items() if samples is None or name not in mds_optimizer.OF_FILE}
    progress |= {} if counted is None else {mds_optimizer.SAMPLES: counted}
    notes = [*stored.notes, *portable_optimizer.decayed_vectors(vectors)]
    if mds_optimizer.SCHEDULER not in progress:
        notes.append("the schedule of the training is that of its command line, at the samples that it has seen")
    if counted is None:
        notes.append(f"{portable_optimizer.NO_SAMPLES} (--consumed-samples N)")
    notes += [f"{name} is not carried: it is that of other ranks" for name in source.state if "rng_state" in name]
    options = replace(options, iteration=step if iteration is None else iteration)
    resumed = mds_optimizer.Resumed(tuple(states), groups, step, progress)
    plan = plan_mds(replace(weights, dropped=()), request, options, resumed)
    target = plan.target
    assert target is not None
    jobs = (
        replace(job, state=state)
        for state, of_state in states.items()
        for job in make_plan(of_state, tensors_of(target, state), "fp32").jobs
    )
    return _with_states(plan, states, jobs, notes, _reader_of_same(step, {*groups}))


def _regrouped(optimizer: Optimizer | Native, target: Target | None, *in_megatron: bool) -> list[str]:
    """Return the note on parameters that are one matrix to Muon in the source and several in the target, or vice versa.

    Args:
        optimizer: the optimizer of the source.
        target: the files to write.
        in_megatron: whether the source is Megatron's, and whether the target is.
    """
    momentum = optimizer.states.get(MOMENTUM)
    if momentum is None or target is None:
        return []
    written = [item for file in target.files for item in file.states.get(MOMENTUM, ())]
    sides = zip((momentum.tensors, written), in_megatron, strict=True)
    before, after = ({frozenset(_matrix(item, separate)) for item in items} for items, separate in sides)
    fused = sorted({" and ".join(sorted(names)) for names in before ^ after if len(names) > 1})
    if not fused:
        return []
    return [
        f"to Muon {', '.join(fused)} are one matrix on one side, and apart on the other: its steps differ from here on"
    ]


def _matrix(item: Placed, in_megatron: bool) -> tuple[str, ...]:
    """The logical tensors of a parameter that Muon orthogonalizes together with the first of them."""
    tensors = item.slot.rule.pattern.tensors
    return tensors[:1] if in_megatron and muon.APART.issuperset(tensors) else tensors


def _require_torch_dist(source: Checkpoint, optimizer: Native, options: Options, cast: str | None) -> None:
    """Refuse to write Muon's momentum in a form that Megatron is not known to load.

    Raises:
        UnsupportedError: the dialect is not torch_dist, experts are on several ranks, or FP32 weights would be trained
            by the layer-wise Muon, which Megatron has in BF16 alone.
    """
    weights = {dtype for (name, _), dtype in cast_dtypes(source, cast).items() if name not in UNTRAINED}
    if optimizer.muon is not None and optimizer.distributed and "F32" in weights:
        raise UnsupportedError("Megatron's layer-wise Muon trains in bf16 alone", "--optimizer plain, or --dtype bf16")
    if optimizer.muon is not None and options.dialect != DIST:
        raise UnsupportedError(
            f"{source.root} trains its matrices with Muon, whose {MOMENTUM} is written to torch_dist alone",
            "--format torch_dist",
        )
    if optimizer.muon is not None and options.mesh.ep > 1:
        raise UnsupportedError("Muon of experts that are on several ranks is not written", "--ep 1")


def _split(source: Checkpoint, optimizer: Optimizer, cast: str | None) -> tuple[Checkpoint, dict[str, Checkpoint]]:
    """Return the checkpoint to write weights from, and the states, with master weights only if weights are rounded."""
    states = dict(optimizer.states)
    masters = states.pop("fp32", None)
    weights = {dtype for (name, _), dtype in cast_dtypes(source, cast).items() if name not in UNTRAINED}
    if weights == {"F32"}:
        return (source if masters is None else as_weights(masters, source)), states
    if masters is None and set(source.dtypes().values()) == {"F32"}:
        masters = _trained(source)
    if masters is None:
        raise UnsupportedError(
            f"{source.root} was trained without FP32 master weights, which an optimizer there has of such weights",
            "--dtype fp32 takes the weights themselves, and resumes in float32",
        )
    return source, {"fp32": masters, **states}


def _for_fsdp(
    source: Checkpoint, optimizer: Native, request: Request, options: Options
) -> tuple[Checkpoint, Native, Request, Options]:
    """Source, optimizer, request and options for Megatron-FSDP, which saves FP32 master weights as the weights.

    Its arguments specify the element type that master weights are rounded to.
    """
    states = dict(optimizer.states)
    masters = states.pop("fp32", None)
    rounded = [dtype for (name, _), dtype in cast_dtypes(source, request.cast).items() if name not in UNTRAINED]
    return (
        source if masters is None else as_weights(masters, source),
        replace(optimizer, states=states),
        replace(request, cast=None),
        replace(options, computed=main_dtype(rounded)),
    )


def _trained(source: Checkpoint) -> Checkpoint:
    """A checkpoint with the trained parameters alone, as an optimizer holds them."""
    return replace(source, tensors=_parts_of(source, UNTRAINED, within=False), without=UNTRAINED)


def as_weights(masters: Checkpoint, source: Checkpoint) -> Checkpoint:
    """A checkpoint with FP32 master weights in place of the weights; tensors that nothing trains stay as they are."""
    others = UNTRAINED | masters.without
    tensors = (*masters.tensors, *_parts_of(source, others, within=True))
    files = tuple(dict.fromkeys([*source.files, *files_of(masters.tensors)]))
    twins = masters.twins or _parts_of(source, others, within=False)
    return replace(source, files=files, tensors=tensors, twins=twins)


def _parts_of(source: Checkpoint, names: Set[str], *, within: bool) -> tuple[Placed, ...]:
    """The tensors of a model that hold logical tensors among `names` (`within`), or all others."""
    return tuple(
        placed for placed in source.tensors if within is not names.isdisjoint(placed.slot.rule.pattern.tensors)
    )


def _resumed(
    plan: Plan, optimizer: Native, rows: int, notes: Sequence[str], proof: Checkpoint | None = None,
    cast: str | None = None,
) -> Plan:  # fmt: skip
    """A plan of the weights with the jobs of the optimizer; `proof` is the master weights that it does not carry.

    Raises:
        UnsupportedError: FP32 master weights would not round to the weights, since those are stored minus one.
    """
    shifted = next((job.name for job in plan.jobs if job.shift and job.dtype != "F32"), None)
    if shifted and MASTERS in optimizer.states:
        raise UnsupportedError(
            f"Megatron stores {shifted} less one, where its FP32 master weights do not round to the weights of "
            f"{plan.source.root}",
            "take the weights alone, without --with-optimizer, or --dtype fp32",
        )
    jobs = state_jobs(plan.source, optimizer.states, rows, plan.target, cast)
    resumed = _with_states(
        plan, optimizer.states, jobs, notes, lambda written: optimizer_reader.read(written).states, rows
    )
    dropped = tuple(name for name in plan.source.dropped if not OPTIMIZER.fullmatch(name))
    return replace(resumed, source=replace(resumed.source, dropped=dropped, proof=proof))


def _with_states(
    plan: Plan,
    states: Mapping[str, Checkpoint],
    jobs: Iterable[Job],
    notes: Iterable[str],
    read: Callable[[Checkpoint], Mapping[str, Checkpoint]],
    rows: int = 0,
) -> Plan:
    """A plan of the weights, with the jobs of the optimizer states, which are read back from the output.

    Args:
        plan: the plan of the weights.
        states: the states of the source.
        jobs: their jobs.
        notes: the notes on them.
        read: returns the states of the output.
        rows: the rows of the vocabulary that are carried, padding among them; 0 for those of the tokens.
    """

    def more(written: Checkpoint) -> Iterator[Job]:
        read_back = read(written)
        return state_jobs(written, {state: read_back[state] for state in states}, rows)

    paths = (path for state in states.values() for path in files_of(state.tensors))
    source = replace(plan.source, files=tuple(dict.fromkeys([*plan.source.files, *paths])), state=())
    return replace(plan, source=source, jobs=(*plan.jobs, *jobs), notes=(*plan.notes, *notes), output_jobs=more)


def _reader_of_same(
    step: int | None, groups: Mapping[tuple[str, int | None], AnyGroup] | set[Group]
) -> Callable[[Checkpoint], Mapping[str, Checkpoint]]:
    """A function that returns the optimizer states of a checkpoint.

    Args:
        step: the step that the optimizer must have (VerificationError).
        groups: the groups that it must have: by parameter, or only the set of them.
    """

    def read(written: Checkpoint) -> Mapping[str, Checkpoint]:
        optimizer = optimizer_of(written)
        written_groups = {*optimizer.groups.values()} if isinstance(groups, set) else optimizer.groups
        if (optimizer.step, written_groups) != (step, groups):
            raise VerificationError("step or groups of the optimizer do not read back as written")
        return optimizer.states

    return read
