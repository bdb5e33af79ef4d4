"""Plans for LoRA adapters: from a training checkpoint to PEFT's files or into the base, and to Megatron-Bridge."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import groupby
from math import isclose, prod
from pathlib import Path
from typing import Any

from converters.plan.merging import NAME, fitted, opened, plan_merge
from converters.plan.plan import Input, Job, Plan, cast_dtypes, make_plan
from converters.plan.request import Request
from formats.checkpoint import Checkpoint, Settings, Target, slot_dtype
from formats.disk.safetensors import Fragment, row_major
from formats.errors import SourceError, UnsupportedError, UsageError, short, some
from formats.huggingface import adapter as peft
from formats.huggingface import folder as huggingface
from formats.huggingface import lora_config
from formats.layout.placed import Placed, match
from formats.layout.slots import ALONE
from formats.megatron import DIST
from formats.megatron import lora_writer as bridge
from formats.megatron.args import providers
from formats.megatron.args.options import DIST as DIALECT
from formats.megatron.args.options import Options
from formats.model import adapters, lora
from formats.model.adapters import AdapterSpec, is_of_adapter
from formats.model.lora import LoraSpec
from formats.model.spec import ModelSpec, Verbatim
from formats.registry import format_of

PACKED = ("qweight", "weight_packed", "W_q")
"""Tensors of a quantized linear layer in place of `weight`: of GPTQ and AWQ, compressed-tensors, HQQ."""


def plan_adapted(source: Checkpoint, request: Request, planned: Callable[[Checkpoint], Plan]) -> Plan:
    """The plan of a conversion with `--adapter`: of the adapter alone, or of the base with the adapter merged into it.

    Args:
        source: the opened checkpoint: the adapter alone if `settings.adapter` is `only`, else the base.
        request: what the user asked for.
        planned: makes the plan of the base without the adapter.

    Raises:
        SourceError: there is no adapter_config.json, or no base that the adapter could be merged into.
        UnsupportedError: the adapter is no LoRA that can be merged.
    """
    if source.settings.adapter == "only":
        return _plan_alone(source, request)
    alone = format_of(source).reader.read(source.root, replace(source.settings, adapter="only"))
    if not source.tensors:
        raise SourceError(f"{source.root} holds no base, only an adapter", lora.ALONE_FIRST)
    alone = replace(alone, settings=source.settings)
    dropped = tuple(name for name in source.dropped if not is_of_adapter(name))
    return plan_merge(replace(source, dropped=dropped), _saved(alone), request, planned)


def _config(source: Checkpoint) -> dict[str, Any]:
    """The settings of an adapter: from the adapter_config.json beside a checkpoint, or Megatron-Bridge's run config."""
    own = source.run_config.get("peft")
    if own and isinstance(source.spec, LoraSpec):
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": own.get("dim"),
                "lora_alpha": own.get("alpha"), "lora_dropout": own.get("dropout", 0.0)}  # fmt: skip
    else:
        named = [source.settings.config] if source.settings.config else []
        settings = lora_config.read_config([source.root, source.home, source.root.parent, *named])
    if isinstance(source.spec, LoraSpec):
        if settings.get("r") != source.spec.rank or type(settings.get("lora_alpha")) not in (int, float):
            raise SourceError(
                f"{source.home} holds a LoRA of rank {source.spec.rank}, its settings say {short(settings.get('r'))} "
                f"and alpha {short(settings.get('lora_alpha'))}"
            )
        settings = {**settings, **lora.targets(source.spec)}
    return settings


def _saved(alone: Checkpoint) -> peft.Saved:
    """The adapter of a training checkpoint in the form of a PEFT folder: the fragments of each tensor joined.

    Biases that were trained with it are in the base, so that its settings name none.
    """
    tensors = {}
    counted = (tensor for tensor in alone.fragments() if not tensor.slot.replica)
    for key, pieces in groupby(counted, key=lambda tensor: tensor.key):
        tensors[key] = _joined([*pieces])
    return peft.Saved(alone.root, {**_config(alone), "bias": "none"}, tensors, alone.files)


def _joined(pieces: list[Placed]) -> Fragment:
    """The fragment of a tensor whose pieces are intervals of its elements.

    Raises:
        UnsupportedError: a piece is no such interval, or not row-major.
    """
    shape, places = pieces[0].slot.shape, []
    for key, _, fragment, part, *_ in pieces:
        start = 0
        if part is not None and part.flat:
            start = part.ranges[0][0]
        elif part is not None and part.ranges:
            if any(bounds != (0, size) for bounds, size in zip(part.ranges[1:], shape[1:], strict=True)):
                raise UnsupportedError(f"{fragment.path} holds some columns of {key}", "take --adapter only first")
            start = part.ranges[0][0] * prod(shape[1:])
        if not fragment.row_major:
            strides = f"with the strides {list(fragment.strides)}, not row-major"
            raise UnsupportedError(f"{fragment.path} holds {key} {strides}", "take --adapter only first")
        places.append((start, fragment))
    first = pieces[0].fragment
    return Fragment(first.path, 0, first.dtype, shape, row_major(shape), pieces=tuple(places))


def _plan_alone(source: Checkpoint, request: Request) -> Plan:
    """A plan that writes a folder which PeftModel.from_pretrained loads.

    Raises:
        SourceError: the adapter is not complete, contradicts its config or does not fit its base.
        UnsupportedError: a tensor of the adapter is in the base.
    """
    config = _config(source)
    if config.get("bias") not in (None, "none") and isinstance(source.spec, AdapterSpec) and _may_hold(source.spec):
        raise UnsupportedError(
            f"the adapter in {source.root} was trained with bias = {config['bias']}, and its biases are in the base",
            "--adapter merged has them"
            if source.spec.holds_base
            else "take a checkpoint with the base, with --adapter merged; or save the adapter in its training with "
            "PEFT: model.save_pretrained(OUT)",
        )
    outline = _outline(source, config)
    base = _base(source, outline)
    adapter, _, _ = fitted(outline, base)
    if unexplained := peft.unexplained(adapter):
        raise SourceError(
            f"{source.root} holds {len(unexplained)} tensors of no LoRA that its {lora_config.CONFIG} does not name: "
            f"{some(unexplained, 3)}",
            f"take {lora_config.CONFIG} from the same save",
        )
    names = dict.fromkeys(outline.tensors, peft.WEIGHTS)
    written = huggingface.write(
        request.root, source.spec, cast_dtypes(source, request.cast), 1 << 60, {"weight_map": names}
    )
    text = json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n"
    target = Target(written.files, {lora_config.CONFIG: text.encode()}, {})
    return _finite(make_plan(source, target, request.cast), lambda plan: _read_back(plan, base))


def _may_hold(spec: AdapterSpec) -> bool:
    """Whether biases may be in the base beside an adapter: not if it is whole and has none."""
    return bool(spec.base) and (not spec.holds_base or any(key.endswith(peft.BIAS) for key in spec.base))


def _finite(plan: Plan, plan_of_output: Callable[[Plan], Plan]) -> Plan:
    """The plan of an adapter, in which NaN and infinity are refused as in a merge; and the plan of its output."""
    jobs = tuple(replace(job, finite=True) for job in plan.jobs)
    return replace(plan, jobs=jobs, plan_of_output=plan_of_output)


def _outline(source: Checkpoint, config: dict[str, Any]) -> peft.Saved:
    """The adapter as it will be in PEFT's files: names, types and shapes, without places in files."""
    dtypes = source.dtypes()
    tensors = {
        slot.keys[0]: Fragment(source.home, 0, slot_dtype(slot, dtypes), slot.shape, row_major(slot.shape))
        for slot in huggingface.model_slots(source.spec)
    }
    return peft.Saved(source.root, config, tensors, source.files)


def _base(source: Checkpoint, outline: peft.Saved) -> Checkpoint:
    """The base that an adapter is compared with, of which names and shapes count.

    It is the base beside the adapter, or the model in the folder of --config. Where there is neither, it is taken to
    have the modules that the adapter has.

    Raises:
        UnsupportedError: there is neither, and the adapter has LoRA of parameters, whose names only the base tells.
    """
    spec, folder = source.spec, source.settings.config
    bare = replace(source, tensors=(), twins=(), dropped=(), assets=None, config=None)
    if isinstance(spec, LoraSpec):
        return replace(bare, spec=spec.base)
    if isinstance(spec, AdapterSpec) and spec.holds_base:
        quantized = _quantized(spec.base, own := _own_shapes(outline, spec.base))
        if folder is not None and not quantized:
            return format_of(source).reader.read(source.root, replace(source.settings, adapter="merged"))
        return replace(bare, spec=adapters.spec_of({**spec.base, **{key: own[key] for key in quantized}}, {}))
    if folder is not None and huggingface.detect(folder):
        config = huggingface.read_config(folder)
        shapes = {key: fragment.shape for key, fragment in huggingface.read_files(folder).items()}
        described = huggingface.spec_of(shapes, config, folder, Settings())
        return replace(bare, root=folder, home=folder, spec=described, assets=folder, config=config)
    if outline.config.get("target_parameters"):
        raise UnsupportedError(
            f"{source.root} holds no base, and LoRA of target_parameters", "--config BASE, with the weights of the base"
        )
    return replace(bare, spec=adapters.spec_of(_own_shapes(outline, ()), {}))


def _own_shapes(outline: peft.Saved, parameters: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The shapes that an adapter's tensors tell of the base: of what it replaces, and of each module with a LoRA."""
    adapter = peft.parse(outline, [*parameters])
    shapes = {key: fragment.shape for key, fragment in adapter.whole.items()}
    for module, matrices in adapter.added.items():
        shape = (matrices.left.shape[0], matrices.right.shape[1])
        if module not in parameters:
            shapes[f"{module}.weight"] = shape[::-1] if matrices.embedding else shape
    return shapes


def _quantized(base: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The weights with a LoRA that a base holds quantized, so that their shapes are not those of its tensors.

    bitsandbytes packs 4 bits in one column, of bytes or wider elements (bitsandbytes 0.50.2 backends/default/ops.py
    `quantize_4bit`); others have tensors of other names in the module (`PACKED`).
    """
    modules = {key.rpartition(".")[0] for key in base if key.rpartition(".")[2] in PACKED}
    return [
        key
        for key, shape in own.items()
        if (base[key][1:] == (1,) != shape[1:] if key in base else key.rpartition(".")[0] in modules)
    ]


def _read_back(plan: Plan, base: Checkpoint) -> Plan:
    """A plan that reads the written adapter with `peft.read`, once it is compared with its base."""
    assert plan.target is not None
    root: Path = plan.target.files[0].path.parent
    saved = peft.read(root)
    fitted(saved, base)
    tensors = saved.tensors
    slots = {slot.keys[0]: slot for slot in huggingface.model_slots(plan.spec)}
    placed = tuple(Placed(key, slots[key], fragment) for key, fragment in tensors.items())
    jobs: tuple[Job, ...] = make_plan(replace(plan.source, tensors=placed, twins=(), spec=plan.spec)).jobs
    return replace(plan, jobs=jobs)


def plan_bridge(base: Checkpoint, saved: peft.Saved, request: Request, kind: str, tp: int, iteration: int) -> Plan:
    """A plan that writes an adapter of PEFT as one of Megatron-Bridge, to train it further there.

    Args:
        base: the opened base model, of any format.
        saved: the adapter.
        request: what the user asked for.
        kind: `canonical`, an adapter for each of query, key and value, gate and up; or `fused`, where they have one
            lora_A, which has to be alike in all of them.
        tp: tensor parallel size of the training.
        iteration: the iteration in the name of the folder.

    Raises:
        SourceError: the adapter is not complete, or does not fit the base.
        UnsupportedError: Megatron-Bridge has no such adapter.
        UsageError: `fused` with a replica policy that would make one lora_A of several that differ.
    """
    if kind == "fused" and request.limits.replicas != "verify":
        raise UsageError(f"--replicas {request.limits.replicas} would change the LoRA", "--lora canonical keeps it")
    if isinstance(base.spec, Verbatim):
        raise UnsupportedError(f"{base.root} has no Megatron layout: {base.spec.why}", "see `convert formats`")
    providers.of_spec(base.spec, "bridge", None)
    adapter, _ = opened(saved, base)
    model = replace(base.spec, mtp_layers=0)
    known = {re.escape(key.removesuffix(".weight")).replace(r"\{layer\}", r"\d+"): names
             for key, names in lora.modules(model).items()}  # fmt: skip
    by_name = {
        name: next((names for key, names in known.items() if re.fullmatch(key, name.removesuffix(".weight"))), ())
        for name in adapter.added
    }
    odd = [*adapter.whole, *(name for name, names in by_name.items() if not names)]
    odd += [f"DoRA of {name}" for name, matrices in adapter.added.items() if matrices.magnitude is not None]
    if odd:
        raise UnsupportedError(
            f"{saved.root} has what no LoRA of Megatron-Bridge has here: {some(odd, 3)}",
            bridge.MERGED,
        )
    rank, expert_rank, alpha = _ranks(adapter, by_name, model)
    adapted = {name for names in by_name.values() for name in names}
    spec = lora.spec_of(
        model,
        rank,
        tuple(name for name in lora.MATRICES if name in adapted),
        shared=kind == "fused",
        expert_rank=expert_rank,
        shards=tp if kind == "canonical" else 0,
    )
    expected = lora.slots(spec)
    if absent := [slot.keys[0] for slot in expected if saved.tensors.keys().isdisjoint(slot.keys)]:
        modules = dict.fromkeys(key.removeprefix(peft.ROOT).rpartition(".lora_")[0] for key in absent)
        raise UnsupportedError(
            f"{saved.root} has no LoRA of {some([*modules], 3)}: for Megatron-Bridge a matrix has one in every layer",
            bridge.MERGED,
        )
    placed, _ = match(expected, {ALONE: saved.tensors}, (), saved.root)
    source = Checkpoint(saved.root, saved.root, NAME, spec, tuple(placed), (), saved.files, settings=base.settings)
    dtypes = {*cast_dtypes(source, request.cast).values()}
    if len(dtypes) > 1:
        raise UnsupportedError(f"{saved.root} holds {' and '.join(sorted(dtypes))}", "cast all of them with --dtype")
    options = Options(tp=tp, etp=1 if model.experts else None, dialect=DIALECT, trainer="bridge")
    target = bridge.write(request.root, spec, dtypes.pop(), alpha, options, iteration)
    plan = _finite(make_plan(source, target, request.cast), lambda plan: _bridge_back(plan, base.assets))
    notes = (*plan.notes, *filter(None, [peft.unmatched_note(adapter)]))
    return replace(plan, inputs=(Input(source, {}), Input(base, {})), notes=notes)


def _ranks(adapter: peft.Adapter, by_name: Mapping[str, tuple[str, ...]], model: ModelSpec) -> tuple[int, int, float]:
    """The rank of an adapter for Megatron-Bridge, that of its experts (0 if it has none), and its alpha.

    Raises:
        UnsupportedError: Bridge has no such ranks and scales in one adapter.
    """
    scales = {True: set[tuple[int, float]](), False: set[tuple[int, float]]()}
    for name, matrices in adapter.added.items():
        scales[{*by_name[name]} <= lora.OF_EXPERTS].add((matrices.rank, matrices.scale))
    if any(len(pairs) > 1 for pairs in scales.values()):
        count = len(scales[True] | scales[False])
        raise UnsupportedError(f"{adapter.root} has {count} ranks and scales, Megatron-Bridge has one of each")
    ((expert_rank, expert_scale),) = scales[True] or {(0, 0.0)}
    ((rank, scale),) = scales[False] or scales[True]
    usual = {rank} if rank % (model.top_k or 1) else {rank, rank // (model.top_k or 1)}
    one_alpha = isclose(expert_scale * expert_rank, scale * rank)
    if expert_rank and not (one_alpha and expert_rank in usual):
        raise UnsupportedError(
            f"{adapter.root} has rank {rank} and alpha {scale * rank:g}, for experts {expert_rank} and "
            f"{expert_scale * expert_rank:g}: Megatron-Bridge has one alpha, and for experts the same rank or that "
            f"divided by the {model.top_k} experts of a token",
            bridge.MERGED,
        )
    return rank, expert_rank, scale * rank


def _bridge_back(plan: Plan, config: Path | None) -> Plan:
    """A plan that reads the written adapter with the reader of Megatron's adapters, without zeros that fill it up."""
    assert plan.target is not None
    settings = Settings(adapter="only", config=config)
    tensors = DIST.reader.read(plan.target.files[0].path.parent, settings).tensors
    own = {*plan.spec.tensors} if isinstance(plan.spec, LoraSpec) else set[str]()
    placed = tuple(tensor for tensor in tensors if {*tensor.slot.rule.pattern.tensors} <= own)
    return replace(plan, jobs=make_plan(replace(plan.source, tensors=placed, twins=())).jobs)
