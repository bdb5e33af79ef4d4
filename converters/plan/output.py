"""The layout options of every target, by the names of their flags, and the plan that they give.

The default of an option means: as in the source where that is of the same format, else the target's default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from converters.plan.request import Request
from formats.deepspeed import MDS, NEOX
from formats.errors import OptionNeededError, UsageError, some
from formats.megatron import DIST, MEGATRON, MEGATRON_FSDP
from formats.registry import format_of

if TYPE_CHECKING:
    from converters.plan.plan import Job, Plan
    from formats.checkpoint import Checkpoint
    from formats.deepspeed.universal import States
    from formats.megatron.args.options import Options

HUGGINGFACE, MEGATRON_RUN, FSDP, GPT_NEOX, UNIVERSAL = "huggingface", "megatron", "fsdp", "neox", "deepspeed"
MISTRAL, MEGATRON_DEEPSPEED, NANOTRON = "mistral", "megatron-deepspeed", "nanotron"
"""The targets that can be written."""
OF_MEGATRON = (MEGATRON.name, DIST.name, MEGATRON_FSDP.name)
"""The formats of Megatron as a source."""
DIALECTS = {"torch": "megatron-core", "torch_dist": "torch_dist", "fsdp_dtensor": "fsdp_dtensor",
            "megatron-llm": "megatron-llm"}  # fmt: skip
"""`format` of a Megatron folder: the dialect that its files are written in."""
OF_CORE, OF_LLM = ("torch", "torch_dist", "fsdp_dtensor"), ("megatron-llm",)
OF_DIALECTS = {"norm": OF_CORE, "experts": OF_CORE, "glu_interleave": OF_CORE, "megatron_version": OF_CORE,
               "with_optimizer": OF_CORE, "true_vocab_size": OF_LLM, "for_trainer": ("torch_dist",),
               "archive": ("torch_dist", "fsdp_dtensor")}  # fmt: skip
"""Option: the values of `format` of Megatron that it is for; options that are for all of them are absent."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """The options of every target, each named as its flag.

    Attributes:
        tp: tensor parallel size.
        pp: pipeline parallel size.
        vpp: Megatron: virtual pipeline chunks of each stage.
        first_stage_layers: Megatron: layers of the first pipeline stage; the others share the rest evenly.
        last_stage_layers: Megatron: layers of the last pipeline stage.
        pp_layout: Megatron: the stages as in `--pipeline-model-parallel-layout`.
        ep: Megatron: ranks over which experts are spread; None for 1.
        etp: Megatron: tensor parallel size of an expert; None for `tp`.
        norm: Megatron: names of the norms, `te` or `local`.
        experts: Megatron: names of the experts, `te` or `local`.
        glu_interleave: Megatron: in each expert so many rows of gate, then of up, and so on; 0 for all of gate first.
        megatron_version: the Megatron-LM that its flags are for; None for the newest that computes the model.
        make_vocab_size_divisible_by: the vocabulary is padded to a multiple of this times `tp`.
        format: Megatron: `torch`, `torch_dist`, `fsdp_dtensor` or `megatron-llm`.
        archive: Megatron: all tensors in one data file; `format` is torch_dist if it is not given.
        for_trainer: Megatron: `bridge` for what Megatron-Bridge expects beside torch_dist.
        true_vocab_size: Megatron-LLM: vocabulary size of its training, without padding.
        iteration: the iteration that is written; None for a release of Megatron, and 0 of DeepSpeed's frameworks.
        layout: GPT-NeoX: `sequential` or `pipeline`.
        qkv: Megatron-DeepSpeed: the layout of query, key and value in the code that loads them: `grouped`, `blocked` or
            `separate`.
        ranks: FSDP: how many data files.
        names: FSDP: `huggingface`, or a trainer for its own names, `torchtitan` or `olmo-core`; None for the first.
        with_optimizer: FP32 master weights, moments and step too.
        optimizer: Megatron: the optimizer that is written, `plain` or `distributed`.
        consumed_samples: Megatron, Megatron-DeepSpeed: samples after which schedule and data resume; None for what
            the source records.
        lr: Megatron: the largest learning rate of the training that resumes; None leaves it to the schedule.
        min_lr: Megatron: with `lr` the smallest; None for 0.
        shard_size: Hugging Face: bytes of a safetensors file; None for 5 GB, or, from Megatron, for the files that the
            model had in Hugging Face.
        chat_template: Hugging Face: chatml, llama3, control, or a jinja file.
        quantize: Hugging Face, from Hugging Face: `fp8-block`.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    pp_layout: str | None = None
    ep: int | None = None
    etp: int | None = None
    norm: str | None = None
    experts: str | None = None
    glu_interleave: int | None = None
    megatron_version: str | None = None
    make_vocab_size_divisible_by: int | None = None
    format: str | None = None
    archive: bool = False
    for_trainer: str | None = None
    true_vocab_size: int | None = None
    iteration: int | None = None
    layout: str | None = None
    qkv: str | None = None
    ranks: int = 1
    names: str | None = None
    with_optimizer: bool = False
    optimizer: str | None = None
    consumed_samples: int | None = None
    lr: float | None = None
    min_lr: float | None = None
    shard_size: int | None = None
    chat_template: str | None = None
    quantize: str | None = None


NEOX_OPTIONS = {"tp", "pp", "make_vocab_size_divisible_by", "iteration", "layout"}
MDS_OPTIONS = {"tp", "pp", "make_vocab_size_divisible_by", "iteration", "qkv", "with_optimizer", "consumed_samples"}
FSDP_OPTIONS = {"ranks", "with_optimizer", "names"}
HUGGINGFACE_OPTIONS = {"shard_size", "chat_template", "quantize"}
MEGATRON_OPTIONS = {field.name for field in fields(Output)} - {"layout", "qkv", "ranks", "names"} - HUGGINGFACE_OPTIONS
RESUMED = ("consumed_samples", "lr", "min_lr")
"""Options that a source in Megatron's format records itself."""
DEFAULTS = {field.name: field.default for field in fields(Output)}


def flag_of(name: str) -> str:
    """The name of an option's flag on the command line, without the leading dashes."""
    return name.removesuffix("_trainer").replace("_", "-")


def require_target(to: object) -> None:
    """Refuse what is no name of a target.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(to, str) or to not in TARGETS:
        raise UsageError(f"there is no target {to}", f"one of {', '.join(TARGETS)}")


def plan_output(source: Checkpoint | States, request: Request, to: str, output: Output) -> Plan:
    """The plan of a conversion.

    Args:
        source: the opened checkpoint; the states of a training of DeepSpeed, for the target `deepspeed`.
        request: the output folder, and the cast.
        to: the target: `huggingface`, `megatron`, `fsdp`, `neox`, `deepspeed`, `mistral`, `megatron-deepspeed` or
            `nanotron`.
        output: how it is laid out.

    Raises:
        UsageError: there is no such target, or an option has no effect on it.
        RefusedError: something would be lost, guessed or duplicated.
        UnsupportedError: the source holds something that has no layout in the target.
    """
    from formats.checkpoint import Checkpoint

    require_target(to)
    known, planned = TARGETS[to]
    odd = [name for name, default in DEFAULTS.items() if name not in known and getattr(output, name) != default]
    if odd:
        flags = some([f"--{flag_of(name)}" for name in odd], 4)
        raise UsageError(f"{flags} {'has' if len(odd) == 1 else 'have'} no effect on the target {to}", "leave it out")
    if isinstance(source, Checkpoint) and source.settings.only and (output.with_optimizer or to == UNIVERSAL):
        raise UsageError(f"--only {source.settings.only} is for weights alone", "an optimizer moves with a whole model")
    if isinstance(source, Checkpoint):
        require_config(source)
    if isinstance(source, Checkpoint) and source.settings.adapter is not None:
        from converters.plan.adapted import plan_adapted

        if source.settings.adapter == "only":
            _require_alone(source, to, output)
        return plan_adapted(source, request, lambda base: planned(base, request, output))
    plan = planned(source, request, output)
    return replace(plan, notes=(*plan.notes, *uncompared(plan.jobs, request.limits.replicas)))


def uncompared(jobs: Iterable[Job], replicas: str) -> list[str]:
    """A note on FP32 master weights that a replica policy takes without a comparison with the weights, if there are.

    Those in the file of the weights have no names, and are compared in any case.
    """
    from formats.layout.slots import ORIGINAL

    masters = (read for job in jobs for read in job.reads if read.twins) if replicas == "first" else ()
    taken = any(read.twins[ORIGINAL][0].fragment.path != read.sources[0].fragment.path for read in masters)
    return ["--replicas first: the FP32 master weights are not compared with the weights"] * taken


def _require_alone(source: Checkpoint, to: str, output: Output) -> None:
    """Refuse another target than PEFT's folder for an adapter alone, and options that have no effect on it.

    Raises:
        UsageError: it is one.
    """
    if to != HUGGINGFACE:
        raise UsageError(f"an adapter alone is not written as {to}", "leave --adapter only out")
    given = [name for name in sorted(HUGGINGFACE_OPTIONS) if getattr(output, name) != DEFAULTS[name]]
    if odd := [*map(flag_of, given), *["verbatim"] * source.settings.verbatim]:
        raise UsageError(f"--{odd[0]} has no effect on an adapter alone", "leave it out")


def require_config(source: Checkpoint) -> None:
    """Refuse a model without table and config, which `inspect`, `digest` and `verify` alone can read.

    Raises:
        OptionNeededError: it is such a model.
    """
    from formats.model.adapters import is_of_adapter
    from formats.model.spec import Verbatim

    unknown = source.assets is None and source.config is None
    if isinstance(source.spec, Verbatim) and unknown and source.settings.adapter is None:
        of_lora = any(map(is_of_adapter, source.spec.shapes))
        raise OptionNeededError(
            f"{source.root} has no config.json" + " and holds a LoRA" * of_lora,
            "take it with --adapter only, with the adapter_config.json of its training in the folder"
            if of_lora
            else "add --config BASE, the model that the training began with",
        )


def _huggingface(source: Checkpoint, request: Request, output: Output) -> Plan:
    from converters.plan.targets import SHARD_SIZE, plan_huggingface

    size = output.shard_size or (None if source.format in OF_MEGATRON else SHARD_SIZE)
    return plan_huggingface(source, request, size, output.chat_template, output.quantize)


def _fsdp(source: Checkpoint, request: Request, output: Output) -> Plan:
    trainer = None if output.names == HUGGINGFACE else output.names
    if output.with_optimizer:
        from formats.fsdp.native import TRAINERS

        if trainer and not TRAINERS[trainer].optimizer:
            raise UsageError(f"--names {trainer} is for weights alone", "leave --with-optimizer out")
        _require_no_cast(request)
        from converters.plan.training_state import plan_fsdp_run

        return plan_fsdp_run(source, request, output.ranks, trainer)
    from converters.plan.targets import plan_fsdp

    return plan_fsdp(source, request, output.ranks, trainer=trainer)


def _require_no_cast(request: Request) -> None:
    """Refuse a cast: the optimizer state is not cast, so that the weights, or its master weights, may not be either."""
    if request.cast:
        raise UsageError(f"--with-optimizer excludes --dtype {request.cast}", "leave one of them out")


def _neox(source: Checkpoint, request: Request, output: Output) -> Plan:
    from converters.plan.targets import plan_neox
    from formats.deepspeed.neox.checkpoint import Neox
    from formats.deepspeed.neox.writer import Options

    layout, multiple, iteration = output.layout, output.make_vocab_size_divisible_by, output.iteration
    config: Mapping[str, Any] = {}
    if format_of(source) is NEOX:
        saved, config = source.details_of(Neox), source.run_config
        layout = layout or ("pipeline" if saved.layered else "sequential" if output.pp == 1 else None)
        multiple = multiple or saved.vocab_multiple
        iteration = saved.iteration if iteration is None else iteration
    if layout == "sequential" and output.pp > 1:
        raise UsageError(f"--layout sequential has no stages, --pp says {output.pp}", "leave one of them out")
    stages = output.pp if layout == "pipeline" or output.pp > 1 else 0
    return plan_neox(source, request, Options(output.tp, stages, multiple or 128, iteration or 0, config))


def _megatron_deepspeed(source: Checkpoint, request: Request, output: Output) -> Plan:
    from converters.plan.targets import plan_mds
    from formats.deepspeed.mds.checkpoint import MegatronDeepSpeed
    from formats.deepspeed.mds.writer import Options

    qkv, multiple, iteration = output.qkv, output.make_vocab_size_divisible_by, output.iteration
    if format_of(source) is MDS:
        saved = source.details_of(MegatronDeepSpeed)
        qkv, multiple = qkv or saved.qkv, multiple or saved.vocab_multiple
        iteration = saved.iteration if iteration is None else iteration
    options = Options(output.tp, output.pp, qkv, multiple or 128, iteration or 0)
    if not output.with_optimizer:
        _require_resumed(output)
        return plan_mds(source, request, options)
    from converters.plan.training_state import plan_mds_run

    return plan_mds_run(source, request, options, iteration, output.consumed_samples)


def _deepspeed(source: Checkpoint | States, request: Request, _: Output) -> Plan:
    from converters.plan.names import as_trained
    from converters.plan.training_state import optimizer_of
    from converters.plan.universal import plan_of_optimizer, plan_universal
    from formats.deepspeed.universal import States

    if request.cast:
        raise UsageError("a universal checkpoint holds float32 alone", "leave --dtype out")
    if isinstance(source, States):
        return plan_universal(source, request)
    return plan_of_optimizer(as_trained(source), optimizer_of(source), request)


def _mistral(source: Checkpoint, request: Request, _: Output) -> Plan:
    from converters.plan.targets import plan_mistral

    return plan_mistral(source, request)


def _nanotron(source: Checkpoint, request: Request, output: Output) -> Plan:
    multiple = output.make_vocab_size_divisible_by or 1
    if output.with_optimizer:
        from converters.plan.training_state import plan_nanotron_run
        from formats.huggingface.nanotron.optimizer_writer import Topology

        return plan_nanotron_run(source, request, multiple, Topology(output.tp, output.pp))
    for name in ("tp", "pp"):
        if getattr(output, name) != 1:
            raise UsageError(
                f"--{name} is for a training that is resumed: any topology loads the weights", "add --with-optimizer"
            )
    from converters.plan.targets import plan_nanotron

    return plan_nanotron(source, request, multiple)


def _megatron(source: Checkpoint, request: Request, output: Output) -> Plan:
    from converters.plan.targets import plan_megatron

    resharded = source.format in OF_MEGATRON
    options = _megatron_options(source, output)
    iteration = _iteration(source) if resharded and output.iteration is None else output.iteration
    if output.for_trainer:
        if output.with_optimizer:
            raise UsageError(f"--for {output.for_trainer} is for weights alone", "leave --with-optimizer out")
        iteration = iteration or 0  # each folder of Megatron-Bridge has an iteration
    if not output.with_optimizer:
        _require_resumed(output)
        return plan_megatron(source, request, options, iteration, output.true_vocab_size)
    from converters.plan.training_state import plan_resumed, plan_run
    from formats.megatron.args.options import FSDP_DTENSOR

    kind = output.optimizer
    if options.dialect == FSDP_DTENSOR:
        if kind == "plain":
            raise UsageError("Megatron-FSDP has the distributed optimizer alone", "leave --optimizer plain out")
        kind = "distributed"
    if resharded:
        if set(source.dtypes().values()) != {"F32"}:
            _require_no_cast(request)
        for name in RESUMED:
            if getattr(output, name) is not None:
                raise UsageError(f"--{flag_of(name)} is for a training of another framework", "leave it out")
        return plan_run(source, request, options, iteration, kind)
    if output.min_lr is not None and output.lr is None:
        raise UsageError("--min-lr is the smallest learning rate beside the largest", "add --lr")
    rates = None if output.lr is None else (output.lr, output.min_lr or 0.0)
    return plan_resumed(source, request, options, iteration, output.consumed_samples, kind or "plain", rates)


def _require_resumed(output: Output) -> None:
    """Nothing is said of a training that is resumed, where none is."""
    for name in ("optimizer", *RESUMED):
        if getattr(output, name) is not None:
            raise UsageError(f"--{flag_of(name)} is for a training that is resumed", "add --with-optimizer")


def _iteration(source: Checkpoint) -> int | None:
    """The iteration that a run of Megatron was read from, None for a release."""
    from formats.megatron.details import Megatron

    return None if source.home.name == "release" else source.details_of(Megatron).iteration


def _megatron_options(source: Checkpoint, output: Output) -> Options:
    """The options of Megatron's writer. A pipeline layout determines the number of virtual chunks."""
    from formats.megatron.args.options import Options
    from formats.megatron.details import Megatron
    from formats.megatron.pipeline import virtual_chunks

    saved = source.details if isinstance(source.details, Megatron) else None
    ends, layout = (output.first_stage_layers, output.last_stage_layers), output.pp_layout
    if layout is not None and ends != (None, None):
        raise UsageError("--pp-layout says how many layers each stage has", "leave --first/last-stage-layers out")
    if output.pp == 1 and (layout is not None or ends != (None, None)):
        raise UsageError("one pipeline stage holds all layers", "add --pp")
    kind = output.format or (saved.dialect if saved else "torch")
    if output.archive and output.format is None and kind not in OF_DIALECTS["archive"]:
        kind = "torch_dist"
    dialect = DIALECTS.get(kind, kind)
    for name, kinds in OF_DIALECTS.items():
        if getattr(output, name) not in (None, False) and dialect not in map(DIALECTS.get, kinds):
            hint = f"it is for Megatron folders of the format {' and '.join(kinds)}: leave it out"
            raise UsageError(f"--{flag_of(name)} has no effect on the format {dialect}", hint)
    interleaves = {**saved.interleaves} if saved else {}
    if output.glu_interleave is not None:
        interleaves["interleave"] = output.glu_interleave
    return Options(
        output.tp,
        output.pp,
        output.vpp if layout is None or output.vpp > 1 else virtual_chunks(layout, output.pp),
        output.norm or (saved.norm if saved else "te"),
        output.make_vocab_size_divisible_by or (saved.vocab_multiple if saved else 128),
        dialect,
        *ends,
        layout,
        output.ep or 1,
        output.etp,
        output.experts or (saved.experts if saved else None),
        interleaves.get("interleave", 0),
        interleaves.get("shared_interleave", 0),
        version=output.megatron_version,
        accepted=source.settings.accept,
        trainer=output.for_trainer,
        archive=output.archive,
    )


TARGETS: Mapping[str, tuple[set[str], Callable[..., Plan]]] = {
    HUGGINGFACE: (HUGGINGFACE_OPTIONS, _huggingface),
    MEGATRON_RUN: (MEGATRON_OPTIONS, _megatron),
    FSDP: (FSDP_OPTIONS, _fsdp),
    GPT_NEOX: (NEOX_OPTIONS, _neox),
    UNIVERSAL: (set(), _deepspeed),
    MISTRAL: (set(), _mistral),
    NANOTRON: ({"make_vocab_size_divisible_by", "tp", "pp", "with_optimizer"}, _nanotron),
    MEGATRON_DEEPSPEED: (MDS_OPTIONS, _megatron_deepspeed),
}
"""Target: the options that have an effect on it, and the function that makes its plan."""
