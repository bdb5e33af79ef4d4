"""Reading the optimizer of a Megatron run, classic or torch_dist: where each state of each parameter lies.

The layouts are those of the weights: a state is a checkpoint of its own, with the same slots and other fragments.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

from formats import dcp, megatron_dist
from formats.archived import Small, plain
from formats.checkpoint import Checkpoint
from formats.errors import SourceError, UnsupportedError, short
from formats.layout import Cut, Placed, match
from formats.megatron import trained
from formats.megatron_args import CORE, DIST
from formats.megatron_experts import Mesh
from formats.megatron_optim import (
    PREFIX,
    RESHARDABLE,
    SHARDED,
    STATES,
    Optimizer,
    Parameter,
    decays,
    starts,
    stored_name,
)
from formats.megatron_shards import DROPS, Shard, read_shards, tensors_of
from formats.pickles import DTYPES as TYPES
from formats.pickles import TensorRef
from formats.scattered import spread
from formats.spec import ModelSpec
from formats.storage import DTYPES, Fragment, row_major
from formats.torchfile import TorchFile, read_torch

HEAD = ("opt_param_scheduler", "lr_scheduler", "num_floating_point_operations_so_far")
"""Entries beside the optimizer that are the same on all ranks, and travel on with it."""
BUCKETS, GROUP = "dp_reshardable", "optimizer.distributed.dp_group_idx_"
BUCKET = rf"{re.escape(GROUP)}(\d+)\.gbuf_idx_(\d+)\.dtype_\([^()]*\)\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)"
"""What training saves by default: the name of a bucket, by rank, chunk of the model, number and state."""
OBJECT = GROUP + "{}.{}/shard_0_1"
HALF = ("BF16", "F16")
NAMES = {name: dtype for dtype, name in reversed([*TYPES.items()])}
"""Element types as torch calls them."""
Found = dict[str, dict[str, dict[str, Fragment]]]
"""Tensors by state, file and chunk, and key."""
_DAMAGE = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def read(source: Checkpoint) -> Optimizer:
    """The optimizer of an opened checkpoint.

    Raises:
        SourceError: there is none, or it is damaged or incomplete.
        UnsupportedError: it is not Adam's, or kept in a way that cannot be cut again.
    """
    args = source.extra["args"]
    legacy = any(placed.key.startswith("language_model.") for placed in source.tensors)
    if source.extra["dialect"] not in (CORE, DIST) or legacy:
        raise UnsupportedError(f"{source.home}: of optimizers those of megatron-core are read, not of models before it")
    if "optimizer" not in source.extra["state"] or source.extra["folder"] == "release":
        what = "is a release, of which Megatron loads" if source.extra["folder"] == "release" else "holds"
        raise SourceError(f"{source.home} {what} no optimizer", "reshard the weights without --with-optimizer")
    if cast(ModelSpec, source.spec).experts:
        raise UnsupportedError(
            f"{source.home}: optimizers of experts are not taken along", "reshard the weights without --with-optimizer"
        )
    if args.get("apply_wd_to_qk_layernorm"):
        raise UnsupportedError(f"{source.home}: weight decay of query and key norms (apply_wd_to_qk_layernorm)")
    optimizer = (_dist if source.format == megatron_dist.NAME else _classic)(source)
    half = {dtype for dtype in source.dtypes().values() if dtype in HALF}
    if half and set(source.dtypes().values()) != half:
        raise UnsupportedError(f"{source.home} trains parameters of several types, {', '.join(sorted(half))} and F32")
    missing = {"exp_avg", "exp_avg_sq", *(["fp32"] if half or optimizer.distributed else [])} - set(optimizer.states)
    if missing:
        raise SourceError(f"{source.home} holds no {' and no '.join(sorted(missing))}: its optimizer is not Adam's")
    return optimizer


def _as_checkpoints(source: Checkpoint, states: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """The states, masters to be compared with the weights."""
    return {
        state: replace(one, twins=source.tensors if state == "fp32" else ()) for state, one in states.items() if one
    }


def _matched(source: Checkpoint, found: Mapping[str, Mapping[str, Fragment]], state: str) -> list[Placed]:
    """Pair the tensors of a state with the slots of the weights, each of which is there once, in pieces or not."""
    slots = {(one.slot.file, one.slot.keys): one.slot for one in reversed(source.tensors)}
    try:
        return match(slots.values(), found, DROPS, source.home)[0]
    except SourceError as error:
        raise SourceError(f"{state} of its optimizer: {error}") from None


def _groups(file: TorchFile, groups: Any) -> list[dict[str, Any]]:
    """The parameter groups, without their parameters.

    Raises:
        UnsupportedError: more than weight decay tells two of them apart.
    """
    found = [plain(file, {name: one for name, one in group.items() if name != "params"}, "a group") for group in groups]
    if len({bool(group["wd_mult"]) for group in found}) < len(found) or any(g["is_expert_parallel"] for g in found):
        raise UnsupportedError(
            f"{file.path} holds {len(found)} groups of parameters, not one with weight decay and one without"
        )
    return sorted(found, key=lambda group: not group["wd_mult"])


def _grads(args: Mapping[str, Any], dtype: str) -> str:
    """The type in which gradients are reduced (megatron/training/arguments.py `validate_args`)."""
    reduced = args.get("accumulate_allreduce_grads_in_fp32", dtype == "BF16")
    return "float32" if reduced else NAMES[dtype]


# --- torch_dist ------------------------------------------------------------------------------------------------------


def _dist(source: Checkpoint) -> Optimizer:
    file = read_torch(source.home / megatron_dist.COMMON)
    outer, about = (
        held if isinstance(held := file.value.get(name), Mapping) else {} for name in ("optimizer", "content_metadata")
    )
    kind = about.get("distrib_optim_sharding_type") or outer.get("param_state_sharding_type")
    head = {name: plain(file, file.value[name], name) for name in HEAD if name in file.value}
    if kind == BUCKETS:
        return _in_buckets(source, head)
    if kind not in (None, RESHARDABLE):
        raise UnsupportedError(
            f"{source.home} keeps its optimizer as {short(kind)}, which is not known",
            "save once more with --dist-ckpt-optim-fully-reshardable",
        )
    try:
        inner = outer.get("optimizer", outer)
        groups = _groups(file, inner["param_groups"])
        step = inner.get("state", {}).get("common_step")
    except _DAMAGE:
        raise SourceError(f"{file.path} holds no optimizer of a kind that is known") from None
    entries: dict[str, list[dcp.Entry]] = {}
    for one in dcp.entries(source.home):
        if found := re.fullmatch(rf"{re.escape(PREFIX)}(\w+)\.(.+)", one.name):
            entries.setdefault(found[1], []).append(replace(one, name=found[2]))
    names = {stored_name(state, kind is not None): state for state in STATES}
    if set(entries) - set(names):
        raise UnsupportedError(f"{source.home}: the optimizer keeps {', '.join(sorted(set(entries) - set(names)))}")
    states = {}
    for name, listed in entries.items():
        tensors = megatron_dist.tensors_in(source.home, listed)
        placed = _matched(source, {"": {key: one.whole for key, one in tensors.items()}}, names[name])
        pieces = tuple(piece for one in placed for piece in spread(one, tensors[one.key]))
        states[names[name]] = replace(source, tensors=pieces)
    return Optimizer(
        _as_checkpoints(source, {state: states[state] for state in STATES if state in states}),
        groups,
        kind is not None,
        None if step is None else plain(file, step, "the step"),
        plain(file, outer.get("grad_scaler"), "grad_scaler"),
        head,
        _grads(source.extra["args"], next(iter(source.dtypes().values()))),
    )


def _in_buckets(source: Checkpoint, head: Mapping[str, Any]) -> Optimizer:
    """A distributed optimizer as its ranks hold it: in buckets, which are those of `distrib_optim.pt` cut to pieces."""
    entries: dict[tuple[int, int, str], dict[int, dcp.Entry]] = {}
    for one in dcp.entries(source.home):
        if found := re.fullmatch(BUCKET, one.name):
            buckets = entries.setdefault((int(found[1]), int(found[2]), found[4]), {})
            if int(found[3]) in buckets:
                raise UnsupportedError(f"{source.home} holds {one.name} of several element types")
            buckets[int(found[3])] = one
    args, path = source.extra["args"], source.home / megatron_dist.COMMON
    placed: dict[str, list[Placed]] = {state: [] for state in STATES}
    ranks = trained(cast(ModelSpec, source.spec), args, source.extra["norm"], source.extra["padded_vocab"], path)
    names = [OBJECT.format(rank, name) for rank in range(len(ranks)) for name in ("optimizer", "grad_scaler")]
    settings, heads = dcp.read_objects(source.home, names), list[Any]()
    for rank, every in enumerate(ranks):
        chunks: dict[str, list[Parameter]] = {}
        for parameter in every:
            chunks.setdefault(parameter.chunk, []).append(parameter)
        for number, parameters in enumerate(chunks.values()):
            for state in STATES:
                buckets = entries.pop((rank, number, stored_name(state, distributed=True)), {})
                placed[state] += _cut(source, parameters, [buckets[order] for order in sorted(buckets)])
        heads.append(_settings(source, settings, rank))
        if heads[-1] != heads[0]:
            raise SourceError(f"{source.home}: the ranks 0 and {rank} have optimizers of different steps or settings")
    if entries or not heads[0][0]:
        raise SourceError(
            f"{source.home} holds an optimizer of other ranks than the {len(ranks)} that its args tell of"
        )
    states = {state: replace(source, tensors=tuple(every)) for state, every in placed.items()}
    grads = _grads(args, next(iter(source.dtypes().values())))
    return Optimizer(_as_checkpoints(source, states), heads[0][0], True, None, heads[0][1], head, grads)


def _settings(source: Checkpoint, held: Mapping[str, TorchFile], rank: int) -> tuple[list[dict[str, Any]], Any]:
    """The parameter groups of a rank, and its scaler of losses."""
    group, scaler = (held.get(OBJECT.format(rank, name)) for name in ("optimizer", "grad_scaler"))
    try:
        groups = _groups(group, group.value[0]["param_groups"]) if group else []
        return groups, plain(scaler, scaler.value[0], "grad_scaler") if scaler else None
    except _DAMAGE:
        raise SourceError(f"{source.home} holds no settings of the optimizer on rank {rank} that are known") from None


def _cut(source: Checkpoint, parameters: Sequence[Parameter], buckets: Sequence[dcp.Entry]) -> Iterator[Placed]:
    """Where each parameter of a chunk lies in its buckets, which together are the buffer."""
    sizes = [(one.key, one.slot.shape) for one in parameters]
    total, held = sum(prod(shape) for _, shape in sizes), sum(prod(one.shape) for one in buckets)
    places = list(starts(sizes))
    if total != held:
        raise SourceError(f"{source.home}: buckets of the optimizer hold {held} elements, the model has {total} there")
    pieces, first = list[tuple[int, Fragment]](), 0
    for tensor in dcp.load(buckets):
        pieces += [(first + piece.part.ranges[0][0], piece.fragment) for piece in tensor.copies[0]]
        first += tensor.shape[0]
    pieces.sort(key=lambda piece: piece[0])
    for number, at in places:
        one, end = parameters[number], at + prod(sizes[number][1])
        for begin, flat in pieces[bisect(pieces, at, key=lambda piece: piece[0]) - 1 :]:
            low, high = max(at, begin), min(end, begin + flat.shape[0])
            if begin >= end:
                break
            offset = flat.offset + (low - begin) * DTYPES[flat.dtype]
            part = flat._replace(offset=offset, shape=(high - low,), strides=(1,))
            yield Placed(one.key, one.slot, part, Cut(((low - at, high - at),), flat=True))


# --- classic ---------------------------------------------------------------------------------------------------------


def _classic(source: Checkpoint) -> Optimizer:
    found: Found = {}
    heads = []
    mesh = Mesh(source.topology["tp"], 1, source.topology["tp"])
    for shard in read_shards(source.home):
        chunks = {
            place: {key: one for key, one in tensors.items() if not any(re.fullmatch(drop, key) for drop in DROPS)}
            for place, tensors in tensors_of([shard], mesh, source.topology["pp"]).items()
        }
        try:
            heads.append(_shard(shard, chunks, found))
        except _DAMAGE:
            raise SourceError(f"{shard.file.path} holds no optimizer of a kind that is known") from None
        if heads[-1] != heads[0]:
            first = source.home / next(iter(source.files))
            raise SourceError(f"{shard.file.path} and {first} have optimizers of different steps or settings")
    states = {}
    for state in STATES:
        if state in found:
            states[state] = replace(source, tensors=tuple(_matched(source, found[state], state)))
    groups, distributed, step, scaler, head = heads[0]
    grads = _grads(source.extra["args"], next(iter(source.dtypes().values())))
    return Optimizer(_as_checkpoints(source, states), groups, distributed, step, scaler, head, grads)


def _shard(shard: Shard, chunks: Mapping[str, Mapping[str, Fragment]], found: Found) -> tuple[Any, ...]:
    """Add the states of a rank's file to those that were found.

    Returns:
        What all ranks have in common: groups, whether it is distributed, step, scaler, and what lies beside it.
    """
    file = shard.file
    outer = file.value["optimizer"]
    if not isinstance(outer, Mapping):
        raise UnsupportedError(f"{file.path} holds several optimizers, one is supported")
    inner = outer.get("optimizer", outer)
    groups, distributed = _groups(file, inner["param_groups"]), "state" not in inner
    steps: set[Small] = set()
    held = _sharded(file, chunks) if distributed else _plain(file, outer, inner, chunks, steps)
    for state, place, key, fragment in held:
        found.setdefault(state, {}).setdefault(place, {})[key] = fragment
    if len(steps) > 1:
        raise UnsupportedError(f"{file.path}: its parameters have made different numbers of steps")
    head = {name: plain(file, file.value[name], name) for name in HEAD if name in file.value}
    scaler = plain(file, outer.get("grad_scaler"), "grad_scaler")
    return groups, distributed, next(iter(steps), None), scaler, head


def _plain(
    file: TorchFile,
    outer: Mapping[str, Any],
    inner: Mapping[str, Any],
    chunks: Mapping[str, Mapping[str, Fragment]],
    steps: set[Small],
) -> Iterator[tuple[str, str, str, Fragment]]:
    """State, file and chunk, key and place of what torch's Adam keeps; its steps are added to `steps`."""
    every = [(place, key, one.shape) for place, tensors in chunks.items() for key, one in tensors.items()]
    masters = outer.get("fp32_from_fp16_params")
    for order, group in enumerate(inner["param_groups"]):
        members = [(place, key) for place, key, shape in every if decays(key, shape) == bool(group["wd_mult"])]
        lengths = {len(group["params"]), *([len(masters[order])] if masters is not None else [])}
        if lengths != {len(members)}:
            held = " and ".join(map(str, sorted(lengths - {len(members)})))
            raise SourceError(
                f"{file.path}: a group of its optimizer has {held} parameters, its model has {len(members)} of them",
                "some of them may be frozen, which is not supported",
            )
        for number, (index, (place, key)) in enumerate(zip(group["params"], members, strict=True)):
            kept = dict(inner["state"].get(index) or {})
            if "step" in kept:
                steps.add(plain(file, kept.pop("step"), "the step"))
            if masters is not None:
                kept["fp32"] = masters[order][number]
            if missing := {"exp_avg", "exp_avg_sq"} - set(kept):
                raise SourceError(f"{file.path} holds no {' and no '.join(sorted(missing))} of {key}")
            if more := set(kept) - set(STATES):
                raise UnsupportedError(f"{file.path}: the optimizer keeps {short(next(iter(more)))} of {key}")
            for state, ref in kept.items():
                if not isinstance(ref, TensorRef):
                    raise SourceError(f"{file.path} holds {state} of {key} as {short(ref)}")
                yield state, place, key, file.fragment(ref, f"{state} of {key}")


def _sharded(
    beside: TorchFile, chunks: Mapping[str, Mapping[str, Fragment]]
) -> Iterator[tuple[str, str, str, Fragment]]:
    """The same of a distributed optimizer, whose states lie in a file of their own."""
    path = beside.path.with_name(SHARDED)
    if not path.is_file():
        raise SourceError(f"{path.parent} holds no {SHARDED}, which {beside.path.name} says there is")
    file = read_torch(path)
    buffers = [file.value[number] for number in range(len(chunks))]
    if len(buffers) in file.value or any(len(buffer) != 1 for buffer in buffers):
        raise UnsupportedError(f"{path} holds more than one buffer for each chunk of the model")
    for (place, tensors), buffer in zip(chunks.items(), buffers, strict=True):
        (kept,) = buffer.values()
        sizes = [(key, one.shape) for key, one in tensors.items()]
        places, total = list(starts(sizes)), sum(prod(shape) for _, shape in sizes)
        for state in STATES:
            flat = file.fragment(kept[stored_name(state, distributed=True)], state)
            if flat.shape != (total,) or not flat.row_major:
                raise SourceError(f"{path} holds {list(flat.shape)} elements of {state}, its model has {total}")
            for number, at in places:
                key, shape = sizes[number]
                offset = flat.offset + at * DTYPES[flat.dtype]
                yield state, place, key, flat._replace(offset=offset, shape=shape, strides=row_major(shape))
