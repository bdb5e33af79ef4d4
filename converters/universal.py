"""Plans of DeepSpeed's universal checkpoints: masters and moments, each a conversion of its own into one folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters.convert import Request
from converters.plan import Job, Plan, make_plan
from formats import deepspeed, neox, universal, verbatim, zero, zero_partitions
from formats.checkpoint import Checkpoint, Settings, Target
from formats.errors import SourceError, UnsupportedError
from formats.layout import Slot, match
from formats.pickles import Opaque
from formats.scattered import Scattered, spread
from formats.spec import ModelSpec, Verbatim
from formats.storage import Fragment
from formats.universal import Parameter, States

WHY = "DeepSpeed's own names"


def open_states(path: Path, settings: Settings) -> States:
    """Open the optimizer states of a checkpoint, each file once.

    Raises:
        UnsupportedError: the checkpoint is of stage 0, which keeps no names.
    """
    if not path.is_dir() or not deepspeed.detect(path):
        raise SourceError(f"{path} is no checkpoint of DeepSpeed", "name the folder with `latest`, or a global_stepN")
    if universal.is_universal(deepspeed.locate(path, settings.tag)[1]):
        raise UnsupportedError(f"{path} is a universal checkpoint already")
    return neox.read_states(path, settings) if neox.detect(path) else _plain(path, settings)


def plan_universal(states: States, request: Request) -> Plan:
    """A plan that writes a universal checkpoint.

    Args:
        states: what `open_states` gave.
        request: what the user asked for.

    Raises:
        UnsupportedError: the loader could not cut a tensor again.
    """
    opened, model, partitions = states
    tag = opened[0].home
    parameters = list(_parameters(opened[0], zero_partitions.step_of(partitions)))
    place = request.root / tag.name
    plans = [
        make_plan(one, Target(universal.files(place, parameters, state), {}, {}))
        for one, state in zip(opened, zero_partitions.STATES, strict=True)
    ]
    ranks = len([path for path in tag.iterdir() if deepspeed.MODEL.fullmatch(path.name)]) or 1
    frozen = _frozen(model, {one.name for one in parameters})
    small = universal.texts(parameters, partitions[0].settings, {**model, deepspeed.OURS: {"frozen": frozen}}, ranks)
    texts = {f"{tag.name}/{name}": content for name, content in small.items()}
    texts[universal.LATEST] = tag.name.encode()
    files = tuple(file for plan in plans if plan.target for file in plan.target.files)
    named = zip(plans, zero_partitions.STATES, strict=True)
    jobs = tuple(_named(job, state) for plan, state in named for job in plan.jobs)
    lost = universal.left_out(model)
    notes = [f"what is no plain data stays behind: {', '.join(lost)}"] if lost else []
    if frozen:
        notes.append(
            f"{len(frozen)} parameters are frozen, such as {frozen[0]}: they have no states, and DeepSpeed restores "
            "none from a universal checkpoint"
        )
    return Plan(opened[0], opened[0].spec, jobs, Target(files, texts, {}, tag.name), tuple(notes), read_back)


def _frozen(model: Mapping[str, Any], trained: set[str]) -> list[str]:
    """The parameters of a plain model that no optimizer group holds."""
    module = model.get("module")
    others = {*trained, *(model.get("buffer_names") or ()), *(model.get("shared_params") or ())}
    return [str(name) for name in module if name not in others] if isinstance(module, Mapping) and module else []


def _named(job: Job, state: str) -> Job:
    return job if state == "fp32" else replace(job, tensor=f"{state}.{job.tensor}")


def read_back(plan: Plan) -> Plan:
    """The same plan, read from what was written."""
    for file in plan.target.files if plan.target else ():
        universal.unchanged(file)
    jobs = [
        replace(job, sources=job.targets, replicas={}, targets=(), source_dtype=job.dtype, partial=False, twins=())
        for job in plan.jobs
    ]
    return replace(plan, jobs=tuple(jobs), target=None)


# --- the source ------------------------------------------------------------------------------------------------------


def _plain(path: Path, settings: Settings) -> States:
    """The states of a model with names of its own."""
    run, tag = deepspeed.locate(path, settings.tag)
    held = zero.trained(tag)
    opened = [
        _state(run, tag, tensors, held.module if state == "fp32" else {}) for state, tensors in held.states.items()
    ]
    return States(opened, held.model, held.partitions)


def _state(run: Path, tag: Path, tensors: Mapping[str, Scattered], module: Mapping[str, Fragment]) -> Checkpoint:
    """One of the states, to be compared with what is in the module."""
    spec = Verbatim("deepspeed", {name: one.shape for name, one in tensors.items()}, tied=False, vocab=None, why=WHY)
    whole = {name: one.whole for name, one in tensors.items()}
    placed, _ = match(verbatim.slots(spec), {"": whole}, (), tag)
    pieces = tuple(piece for one in placed for piece in spread(one, tensors[one.key]))
    files = tuple(sorted({piece.fragment.path for piece in pieces}))
    twins = tuple(one._replace(fragment=module[one.key]) for one in placed if one.key in module)
    return Checkpoint(run, tag, zero.NAME, spec, pieces, (), files, twins=twins)


def _parameters(source: Checkpoint, step: float) -> Iterator[Parameter]:
    """Every trained parameter, whole, under the name that the training gave it."""
    if isinstance(source.spec, Verbatim):
        yield from (Parameter(slot.keys[0], slot, {}, step) for slot in verbatim.slots(source.spec))
        return
    spec, layered = source.spec, source.extra["layered"]
    rows = spec.vocab if spec.vocab is not None else source.extra["padded_vocab"]
    layout = {"mha" if spec.kv_heads == spec.heads else source.extra["gqa"], source.extra["mlp"]}
    for slot in neox.slots_of(spec, 1, rows, layout, layered=layered):
        if "partial" in slot.rule.conditions and source.topology["tp"] > 1:
            raise UnsupportedError(
                f"{slot.keys[0]} is a sum over tensor parallel ranks, which a universal checkpoint cannot say",
                "its loader would give the whole of it to each rank",
            )
        key = slot.keys[0] if layered else f"sequential.{slot.keys[0]}"
        if layered and spec.tied:
            key = key.replace("0.word_embeddings", "tied_modules.embed.word_embeddings")
        yield Parameter(key, slot, _cut(slot, spec), step)


def _cut(slot: Slot, spec: ModelSpec) -> dict[str, Any]:
    """How the loader cuts a tensor again (deepspeed/checkpoint/universal_checkpoint.py:236, 0.19.8)."""
    if "tp" not in slot.rule.pattern.meshes:
        return {}
    if slot.rule.pattern.tensors[0] in ("embedding", "head"):
        return {"cat_dim": 0, "vocab_tensor": True}
    if "fused" in slot.rule.conditions:
        return {"cat_dim": 0, "param_n_sub_params": 2}
    if "gqa" in slot.rule.conditions:
        rows = (spec.heads * spec.head_dim, *[spec.kv_heads * spec.head_dim] * 2)
        state = {"patterns": [], "shape": (rows, spec.hidden), "partition_dim": 0}
        shape = Opaque("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", state=state)
        return {"cat_dim": 0, "sub_param_shape": shape}
    return {"cat_dim": 1 if slot.rule.pattern.tensors[0] in ("output", "down") else 0}
