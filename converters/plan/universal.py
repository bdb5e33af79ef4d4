"""Plans of DeepSpeed's universal checkpoints: master weights and moments, each a conversion of its own into one folder.

From DeepSpeed's own partitions every parameter keeps the name that the training gave it; from any other optimizer a
parameter has its name in transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters.assets import files as assets
from converters.plan.parts import parts_of
from converters.plan.plan import Job, Plan, make_plan
from converters.plan.request import Request
from converters.plan.targets import require_vocab
from formats.checkpoint import Checkpoint, OutputFile, Settings, Target
from formats.deepspeed import folders as deepspeed
from formats.deepspeed import modules, universal, zero
from formats.deepspeed.mds import checkpoint as mds
from formats.deepspeed.neox import checkpoint as neox
from formats.deepspeed.neox.tables import slots_of
from formats.deepspeed.neox.writer import YML
from formats.deepspeed.neox.yml_file import dump_yml
from formats.deepspeed.optimizer import step_of
from formats.deepspeed.universal import Parameter, States
from formats.detect import signs
from formats.disk.safetensors import Fragment
from formats.errors import UnsupportedError
from formats.huggingface import folder as huggingface
from formats.layout.pieces import Scattered, match_pieces
from formats.layout.placed import files_of
from formats.layout.slots import ORIGINAL, Slot
from formats.layout.tensors import BUFFERS
from formats.model import untabled
from formats.model.spec import Verbatim
from formats.optimizer import MOMENTUM, AnyGroup, Group, Lion, Optimizer
from formats.torch_files import saved_names

UNTAKEN = "the learning rate schedule, random states and the place in the data are not carried"
"""The note on what of a training is no optimizer state."""
UNSAID = "the source has no rate, betas and weight decay"
"""The beginning of the note on an optimizer without settings."""


def is_partitioned(path: Path, tag: str | None) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed's partitions, and neither universal nor Megatron-DeepSpeed's."""
    return (
        path.is_dir()
        and deepspeed.detect(path)
        and not mds.detect(path)
        and not universal.is_universal(deepspeed.locate(path, tag)[1])
    )


def open_states(path: Path, settings: Settings) -> States:
    """Open the optimizer states of a checkpoint that is partitioned over ranks, each file once.

    Raises:
        UnsupportedError: the checkpoint is of stage 0, which keeps no names, or of another program.
    """
    signs.check(path)
    return neox.read_states(path, settings) if neox.detect(path) else _plain(path, settings)


def plan_universal(states: States, request: Request) -> Plan:
    """A plan that writes a universal checkpoint.

    Args:
        states: the states that `open_states` returned.
        request: what the user asked for.

    Raises:
        UnsupportedError: the training is one with Muon, or the loader could not cut a tensor again.
    """
    opened, model, partitions = states
    tag = opened["fp32"].home
    if MOMENTUM in opened:
        raise UnsupportedError(
            f"{tag} was trained with Muon, whose {MOMENTUM} has no place in a universal checkpoint: in stages 1 and 2 "
            "DeepSpeed would cut it where it cuts the master weights, and in 3 it leaves it out",
            "convert hf2fsdp --with-optimizer takes it",
        )
    masters = opened["fp32"]
    parameters = list(_parameters(masters, step_of(partitions, model)))
    ranks = len([path for path in tag.iterdir() if saved_names.MODEL.fullmatch(path.name)]) or 1
    frozen = _frozen(model, {parameter.name for parameter in parameters})
    head = {**model, deepspeed.OURS: {"frozen": frozen, **_known(masters)}}
    small = universal.texts(parameters, partitions[0].settings, head, ranks)
    buffers_lost = universal.left_out(model)
    notes = [f"what is no plain data is not carried: {', '.join(buffers_lost)}"] if buffers_lost else []
    if frozen:
        notes.append(
            f"{len(frozen)} parameters are frozen, such as {frozen[0]}: they have no states, and DeepSpeed restores "
            "none from a universal checkpoint"
        )
    notes += [*_not_restored([*(model.get("buffer_names") or ())]), *_not_in_stage_3(opened)]
    notes += _bound([parameter for parameter in parameters if parameter.summands])
    target = _target(request.root, tag.name, parameters, small, opened)
    if masters.run_config:
        target = replace(target, texts={**target.texts, f"{tag.name}/{YML}": dump_yml(masters.run_config)})
    elif masters.assets:
        target = replace(target, copies=assets.carried_assets(masters))
    jobs = _jobs(opened, target)
    remembered = not any(parameter.summands for parameter in parameters)  # the sum of which is read later
    return Plan(masters, masters.spec, jobs, target, tuple(notes), read_back, remembered=remembered)


def plan_of_optimizer(source: Checkpoint, optimizer: Optimizer, request: Request) -> Plan:
    """A plan that writes a universal checkpoint for a training of the model as transformers has it.

    Args:
        source: the opened checkpoint, of any format.
        optimizer: the optimizer of the checkpoint.
        request: what the user asked for.

    Raises:
        RefusedError: the vocabulary is unknown.
        UnsupportedError: a parameter of transformers was trained in several parameter groups.
    """
    require_vocab(source)
    why = "a universal checkpoint is read back with Adam's moments or Lion's"
    optimizer.require_only((Group, Lion), source.root, why)
    step = optimizer.updates(source.home)
    slots = huggingface.model_slots(source.spec, memory=True)
    untrained = BUFFERS | (optimizer.states["exp_avg"].without & (source.buffers or frozenset()))
    buffers = [slot.keys[0] for slot in slots if untrained.intersection(slot.rule.pattern.tensors)]
    groups = _grouped([slot for slot in slots if slot.keys[0] not in buffers], optimizer, step)
    parameters = [each for group in groups.values() for each in group]
    most = 2 if optimizer.groups else len(parameters)  # groups of the training, which loads no states of further ones
    group_names = [*groups] * (1 if len(groups) > 1 else most)  # the loader passes over what it has no group for
    settings = [{**_settings(group), "params": [number]} for number, group in enumerate(group_names)]
    model = _model(step, optimizer.samples, groups.values()) | {"buffer_names": buffers}
    small = universal.texts(parameters, settings, model, 1)
    opened = {"fp32": source, **optimizer.states}
    opened = {state: replace(checkpoint, without=untrained) for state, checkpoint in opened.items()}
    target = _target(request.root, f"global_step{step}", parameters, small, opened)
    jobs = _jobs(opened, target)
    copies = assets.own_family(source.spec)
    if source.assets:
        target = replace(target, texts={**target.texts, "config.json": assets.config_text(source, None)})
        copies |= {name: path for name, path in assets.carried_assets(source).items() if name != "config.json"}
    files = tuple(dict.fromkeys(path for each in opened.values() for path in (*each.files, *files_of(each.tensors))))
    described = "; ".join(f"{_settings_text(group)} ({len(members)} parameters)" for group, members in groups.items())
    order = f"DeepSpeed goes by the order of the training's parameter groups, which has to be: {described}"
    target = replace(target, copies=copies)
    unsaid = [] if optimizer.groups else [f"{UNSAID}: DeepSpeed trains on with those of the training that loads it"]
    notes = (*optimizer.notes, order, *unsaid, UNTAKEN, *_not_restored(buffers), *_not_in_stage_3(opened))
    read = replace(source, files=files, dropped=())
    return Plan(read, source.spec, jobs, target, notes, read_back, remembered=True)


def _known(masters: Checkpoint) -> dict[str, Any]:
    """What a reader of GPT-NeoX's names asks for, and the yml does not say; as in the files of `neox.writer`."""
    spec = masters.spec
    if isinstance(spec, Verbatim):
        return {}
    if "grouped" in masters.details_of(neox.Neox).layout:
        raise UnsupportedError(
            f"{masters.home} has query, key and value in the order of code from before 2024-11-13, of which a "
            "universal checkpoint is not written",
            "convert reshard writes it in the order of newer code, the weights alone",
        )
    return {"gqa_layout": "blocked", "vocab": spec.vocab, "family": spec.family}


def _not_restored(buffers: Sequence[str]) -> list[str]:
    """The note on buffers, which are no parameters; none without buffers."""
    if not buffers:
        return []
    return [
        f"{len(buffers)} buffers are not in it, such as {buffers[0]}: DeepSpeed restores none from a universal "
        "checkpoint; begin with a model that has those of this checkpoint"
    ]


def _not_in_stage_3(states: Collection[str]) -> list[str]:
    """The note on an optimizer without second moments (runtime/zero/stage3.py:3665, 0.19.8)."""
    return [] if "exp_avg_sq" in states else ["DeepSpeed loads it in stages 1 and 2: in 3 it asks for exp_avg_sq"]


def _bound(summed: Sequence[Parameter]) -> list[str]:
    """The note on parameters that are sums over tensor-parallel ranks."""
    if not summed:
        return []
    first, ranks = summed[0].name, len(summed[0].summands)
    return [
        f"{len(summed)} parameters are sums over tensor parallel ranks, such as {first}: DeepSpeed loads it at "
        f"model_parallel_size {ranks} alone, each rank with its own summands, and stops at any other"
    ]


def _grouped(slots: Iterable[Slot], optimizer: Optimizer, step: int) -> dict[AnyGroup | None, list[Parameter]]:
    """The parameters of each group, in the order of the groups; None is the group of which no setting is known.

    Raises:
        UnsupportedError: a parameter of transformers was trained in several groups.
    """
    by_group: dict[AnyGroup | None, list[Parameter]] = {group: [] for group in optimizer.groups.values()}
    for slot in slots:
        treated = {optimizer.groups.get((name, slot.layer)) for name in slot.rule.pattern.tensors}
        if len(treated) > 1:
            raise UnsupportedError(f"{slot.keys[0]} is one parameter here, and was trained in {len(treated)} groups")
        if not slot.replica:
            by_group.setdefault(treated.pop(), []).append(Parameter(slot.keys[0], slot, {}, step))
    return by_group


def _settings(group: AnyGroup | None) -> dict[str, Any]:
    """The settings of a parameter group in a file. Settings that it leaves out stay as the training has them."""
    return {**group._asdict(), **({"amsgrad": False} if isinstance(group, Group) else {})} if group else {}


def _settings_text(group: AnyGroup | None) -> str:
    """The settings of a parameter group as text for the user."""
    return (
        ", ".join(f"{name} {value}" for name, value in group._asdict().items()) if group else "as the training has it"
    )


def _model(step: int, samples: int | None, groups: Iterable[Sequence[Parameter]]) -> dict[str, Any]:
    """The contents of a model file. The scheduler's keys are those of torch's schedulers and of DeepSpeed's own."""
    state: dict[str, Any] = {
        "param_shapes": [{parameter.name: parameter.slot.shape for parameter in group} for group in groups],
        "global_steps": step,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "lr_scheduler": {
            "last_epoch": step,
            "_step_count": step + 1,
            "lr_lambdas": [],
            "last_batch_iteration": step - 1,
        },
        deepspeed.OURS: {"frozen": []},
    }
    return state if samples is None else state | {"global_samples": samples}


def _target(
    root: Path, tag: str, parameters: Sequence[Parameter], small: Mapping[str, bytes], states: Collection[str]
) -> Target:
    """The files of every state, and the small files."""
    files = tuple(file for state in states for file in universal.files(root / tag, parameters, state))
    texts = {f"{tag}/{name}": content for name, content in small.items()}
    return Target(files, {**texts, universal.LATEST: tag.encode()}, {}, tag)


def _jobs(opened: Mapping[str, Checkpoint], target: Target) -> tuple[Job, ...]:
    """The jobs of each state. The jobs of FP32 master weights are those of weights (an empty state)."""
    state_jobs = list[Job]()
    for state, checkpoint in opened.items():
        files = tuple(file for file in target.files if file.path.stem == state)
        jobs = make_plan(checkpoint, replace(target, files=files), "fp32").jobs
        summands = (each for job in jobs for each in _summand_jobs(job, checkpoint, files))
        state_jobs += (replace(job, state="" if state == "fp32" else state) for job in summands)
    return tuple(state_jobs)


def _summand_jobs(job: Job, source: Checkpoint, files: Sequence[OutputFile]) -> Iterator[Job]:
    """The jobs of a sum over ranks, one for each rank, which gets its own summand again; any other job as it is."""
    if not (job.partial and job.replicas):
        yield job
        return
    place = job.tensor, job.layer
    targets = parts_of(tensor for file in files for tensor in file.tensors)[place]
    twins = parts_of(source.twins).get(place, {})
    alone = replace(job, replicas={}, partial=False)
    for copy, parts in {ORIGINAL: job.sources, **job.replicas}.items():
        tensor = f"{job.tensor} of {copy}" if copy else job.tensor
        key = f"{job.key} of {copy}" if copy else job.key
        module = {ORIGINAL: twins[copy]} if copy in twins else {}
        yield replace(alone, tensor=tensor, key=key, sources=parts, targets=targets[copy], twins=module)


def _frozen(model: Mapping[str, Any], trained: set[str]) -> list[str]:
    """The parameters of a plain model that no optimizer group holds."""
    module = model.get("module")
    others = {*trained, *(model.get("buffer_names") or ()), *(model.get("shared_params") or ())}
    return [str(name) for name in module if name not in others] if isinstance(module, Mapping) and module else []


def read_back(plan: Plan) -> Plan:
    """The plan that reads the written output: the targets of each job are its sources."""
    for file in plan.target.files if plan.target else ():
        universal.unchanged(file)
    jobs = [
        replace(
            job, sources=job.targets, replicas={}, targets=(), source_dtype=job.dtype, partial=False, twins={},
            centred=(job.centred[1], job.centred[1]),
        )
        for job in plan.jobs
    ]  # fmt: skip
    return replace(plan, jobs=tuple(jobs), target=None)


# --- the source ------------------------------------------------------------------------------------------------------


def _plain(path: Path, settings: Settings) -> States:
    """The optimizer states of a training whose parameters have the names of its own model."""
    run, tag = deepspeed.locate(path, settings.tag)
    states = zero.trained(tag, settings.accept)
    opened = {
        state: _state(run, tag, tensors, states.module if state == "fp32" else {}, states.ties)
        for state, tensors in states.states.items()
    }
    opened["fp32"] = replace(opened["fp32"], assets=zero.own_folder(path, run, tag))
    return States(opened, states.model, states.partitions)


def _state(
    run: Path, tag: Path, tensors: Mapping[str, Scattered], module: Mapping[str, Fragment], ties: tuple[str, ...]
) -> Checkpoint:
    """The checkpoint of one optimizer state, with the tensors of `module` as twins to compare it with."""
    spec = zero.unnamed_spec({name: tensor.shape for name, tensor in tensors.items()})
    placed, pieces, _ = match_pieces(untabled.slots(spec), tensors, (), tag)
    files = tuple(sorted(files_of(pieces)))
    twins = tuple(tensor._replace(fragment=module[tensor.key]) for tensor in placed if tensor.key in module)
    return Checkpoint(run, tag, zero.NAME, spec, pieces, (), files, twins=twins, ties=ties)


def _parameters(source: Checkpoint, step: float) -> Iterator[Parameter]:
    """Every trained parameter, whole, under the name that the training gave it."""
    if isinstance(source.spec, Verbatim):
        yield from (Parameter(slot.keys[0], slot, {}, step) for slot in untabled.slots(source.spec))
        return
    spec, saved = source.spec, source.details_of(neox.Neox)
    rows, layered = spec.vocab if spec.vocab is not None else source.padded_vocab or 0, saved.layered
    summands: dict[str, tuple[Slot, ...]] = {}
    for slot in slots_of(spec, source.topology["tp"], source.padded_vocab or 0, saved.layout, layered=layered):
        if "partial" in slot.rule.conditions:
            summands[slot.keys[0]] = (*summands.get(slot.keys[0], ()), slot)
    for slot in slots_of(spec, 1, rows, saved.layout, layered=layered):
        of_ranks = summands.get(slot.keys[0], ())
        key = slot.keys[0] if layered else f"sequential.{slot.keys[0]}"
        key = modules.name_of(key, 0, tied=layered and spec.tied)
        yield Parameter(key, slot, universal.cut_of(slot), step, of_ranks if len(of_ranks) > 1 else ())
