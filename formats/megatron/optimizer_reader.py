"""Read the optimizer of a Megatron run: find the fragments of each state of each parameter.

The layouts are those of the weights: a state is a checkpoint of its own, with the same slots and other fragments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from formats.disk.safetensors import DTYPES, Fragment, row_major
from formats.errors import SourceError, UnsupportedError, short
from formats.layout.pieces import place_pieces
from formats.layout.placed import Placed, match
from formats.layout.slots import ALONE, Place, Slot
from formats.layout.tensors import BUFFERS
from formats.megatron import bucketed_optimizer, common_state, fsdp_dtensor_optimizer, muon, torch_dist, weight_decay
from formats.megatron.args.options import CORE, DIST, FSDP_DTENSOR
from formats.megatron.chained_optimizer import (
    CHAINED,
    decays,
    entries,
    groups_of,
    is_spread,
    repeated,
    same_scaler,
    shared_groups,
    tensors_by_optimizer,
)
from formats.megatron.details import Megatron
from formats.megatron.optimizer import OTHERS, PREFIX, RESHARDABLE, SHARDED, Optimizer, starts, stored_name
from formats.megatron.optimizer_numbers import require_numbers
from formats.megatron.shards import DROPS, Shard, flattened, mesh_of, read_shards, tensors_of
from formats.model.spec import Verbatim
from formats.optimizer import CARRIED, MOMENTUM, STATES, require_states
from formats.torch_files import dcp
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.archive_writer import Small, plain
from formats.torch_files.pickle_values import DTYPES as TYPES
from formats.torch_files.pickle_values import TensorRef
from formats.torch_files.unpickle import DAMAGE

HEAD = ("opt_param_scheduler", "lr_scheduler", "num_floating_point_operations_so_far")
"""Entries beside the optimizer that are the same on all ranks, and are carried over with it."""
HALF = ("BF16", "F16")
REMAINDER = "I16"
"""The element type in which Transformer Engine's Adam keeps what BF16 weights lack of their FP32 master weights."""
NAMES = {name: dtype for dtype, name in reversed([*TYPES.items()])}
"""torch's name of each element type."""
Chunks = Mapping[Place, Mapping[str, Fragment]]
"""Tensors by place and key."""
StateFragments = dict[str, dict[Place, dict[str, Fragment]]]
"""Tensors by state, place and key."""


def read(source: Checkpoint) -> Optimizer:
    """The optimizer of an opened checkpoint.

    Raises:
        SourceError: the checkpoint has no optimizer, or a damaged or incomplete one.
        UnsupportedError: the optimizer is neither Adam nor Muon beside Adam, or is stored in a way that is not known.
    """
    details, released = source.details_of(Megatron), source.home.name == "release"
    args = details.args
    if details.dialect == CORE and any(path.with_name(SHARDED).is_file() for path in source.files):
        for path in source.files:
            _require_sharded(path)
    legacy = any(placed.key.startswith("language_model.") for placed in source.tensors)
    if isinstance(source.spec, Verbatim):
        raise UnsupportedError(
            f"{source.home}: the optimizer of a model of images is not read",
            "take the weights alone, without --with-optimizer",
        )
    if details.dialect not in READERS or legacy:
        raise UnsupportedError(f"{source.home}: of optimizers those of megatron-core are read, not of models before it")
    if (kind := args.get("optimizer")) not in (None, "adam") and not (muon.is_used(args) and details.dialect == DIST):
        what = "which is read in torch_dist alone" if muon.is_used(args) else "only Adam's and Muon's are read"
        what += f": {OTHERS[str(kind)]}" if str(kind) in OTHERS else ""
        raise UnsupportedError(
            f"{source.home}: its optimizer is {short(kind)} (args say so), {what}",
            "reshard the weights without --with-optimizer",
        )
    if "optimizer" not in source.state or released:
        what = "is a release, of which Megatron loads" if released else "holds"
        raise SourceError(f"{source.home} {what} no optimizer", "reshard the weights without --with-optimizer")
    weight_decay.require_by_shape(source)
    optimizer = READERS[details.dialect](source)
    for item in optimizer.states["fp32"].tensors if "fp32" in optimizer.states else ():
        if item.fragment.dtype == REMAINDER:
            raise UnsupportedError(
                f"{item.fragment.path} holds the FP32 master weights of {item.key} as {REMAINDER}, their lower halves "
                "(store_param_remainders of --use-precision-aware-optimizer), which are not read",
                "convert the weights without --with-optimizer",
            )
    for group in optimizer.groups:
        require_states(group, str(source.home))
    require_numbers(optimizer, str(source.home))
    dtypes = {dtype for (name, _), dtype in source.dtypes().items() if name not in BUFFERS}
    half = dtypes.intersection(HALF)
    if half and dtypes != half:
        raise UnsupportedError(f"{source.home} trains parameters of several types, {', '.join(sorted(half))} and F32")
    states = {"exp_avg", "exp_avg_sq", *(["fp32"] if half or optimizer.distributed else [])}
    kind = "Adam's" if optimizer.muon is None else "Muon's beside Adam's"
    states |= set() if optimizer.muon is None else {MOMENTUM}
    if missing := states - set(optimizer.states):
        raise SourceError(f"{source.home} holds no {' and no '.join(sorted(missing))}: its optimizer is not {kind}")
    return optimizer


def _as_checkpoints(source: Checkpoint, states: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """The states, each without the tensors that it lacks; FP32 master weights with the weights to compare them with."""
    return {
        state: replace(
            checkpoint,
            twins=source.tensors if state == "fp32" else (),
            without=BUFFERS | (_names(source) - _names(checkpoint)),
        )
        for state, checkpoint in states.items()
        if checkpoint
    }


def _names(source: Checkpoint) -> frozenset[str]:
    """The names of the logical tensors of which a checkpoint holds at least a part."""
    return frozenset(name for item in source.tensors for name in item.slot.rule.pattern.tensors)


def _matched(
    source: Checkpoint, chunks: Chunks, state: str, *, once: bool = False, holds: Callable[[Slot], bool] | None = None
) -> list[Placed]:
    """Pair the tensors of a state with the slots of the weights, taking each slot once.

    Args:
        source: the checkpoint.
        chunks: the tensors of the state.
        state: the name of the state, for errors.
        once: whether of dense tensors on several data ranks only the first rank holds the state.
        holds: whether a slot has the state; None if all slots have it.

    Raises:
        SourceError: a tensor of the state is missing or left over.
    """
    slots = {
        (placed.slot.place, placed.slot.keys): placed.slot
        for placed in reversed(source.tensors)
        if not BUFFERS.intersection(placed.slot.rule.pattern.tensors)
        and not (once and repeated(placed.slot))
        and (holds is None or holds(placed.slot))
    }
    try:
        return match(slots.values(), flattened(chunks), DROPS, source.home)[0]
    except SourceError as error:
        raise SourceError(f"{state} of its optimizer: {error}") from None


def _grads(args: Mapping[str, Any], dtype: str) -> str:
    """The type in which gradients are reduced, as torch names it (megatron/training/arguments.py `validate_args`)."""
    reduced = args.get("accumulate_allreduce_grads_in_fp32", dtype == "BF16")
    return "float32" if reduced else NAMES[dtype]


# --- torch_dist ------------------------------------------------------------------------------------------------------


def _dist(source: Checkpoint) -> Optimizer:
    file = common_state.read(source.home)
    args = source.details_of(Megatron).args
    outers = entries(file, args)
    by_muon, group = muon.is_used(args), None
    try:
        if by_muon:
            muon.require_known(args, str(source.home))
            first = outers.pop(0)
            (group,) = groups_of(file, first.get("optimizer", first)["param_groups"])
        metadata = saved if isinstance(saved := file.value.get("content_metadata"), Mapping) else {}
        kind = None if by_muon else metadata.get("distrib_optim_sharding_type")
        kind = kind or outers[0].get("param_state_sharding_type")
        head = {name: plain(file, file.value[name], name) for name in HEAD if name in file.value}
        grads = _grads(args, next(iter(source.dtypes().values())))
        entries_by_state, step, states = _listed(source), None, dict[str, list[Placed]]()
        if kind == bucketed_optimizer.NAME:
            states, (groups, scaler) = bucketed_optimizer.read(source)
        elif kind not in (None, RESHARDABLE):
            raise UnsupportedError(
                f"{source.home} keeps its optimizer as {short(kind)}, which is not known",
                "save once more with --dist-ckpt-optim-fully-reshardable",
            )
        else:
            inners = [outer.get("optimizer", outer) for outer in outers]
            groups = shared_groups([(file, inner["param_groups"]) for inner in inners])
            scaler = same_scaler([(file, outer.get("grad_scaler")) for outer in outers])
            saved = [inner.get("state", {}).get("common_step") for inner in inners]
            steps = {plain(file, step, "the step") for step in saved if step is not None}
            if len(steps) > 1:
                raise UnsupportedError(f"{file.path}: its parameters have made different numbers of steps")
            step = next(iter(steps), None)
    except DAMAGE:
        raise SourceError(f"{file.path} holds no optimizer of a kind that is known") from None
    stored = _stored(distributed=kind is not None, by_muon=by_muon)
    if set(entries_by_state) - set(stored):
        raise UnsupportedError(
            f"{source.home}: the optimizer keeps {', '.join(sorted(set(entries_by_state) - set(stored)))}"
        )
    for name, pieces in entries_by_state.items():
        state, holds = stored[name]
        states.setdefault(state, []).extend(_in_pieces(source, pieces, state, holds))
    checkpoints = {state: replace(source, tensors=tuple(states[state])) for state in CARRIED if state in states}
    states_of = _as_checkpoints(source, checkpoints)
    return Optimizer(states_of, groups, kind is not None, step, scaler, head, grads, group)


def _stored(*, distributed: bool, by_muon: bool) -> dict[str, tuple[str, Callable[[Slot], bool]]]:
    """By the name of a state in torch_dist: the state, and the test which slots have it under that name."""
    if not by_muon:
        return {stored_name(state, distributed): (state, _anything) for state in STATES}

    def others(slot: Slot) -> bool:
        return not muon.trains(slot)

    names = {state: (state, muon.trains if of else others) for state, of in muon.SHARES.items()}
    if not distributed:
        return {**names, stored_name("fp32", False): ("fp32", _anything)}
    return {**names, stored_name("fp32", False): ("fp32", muon.trains), stored_name("fp32", True): ("fp32", others)}


def _anything(_: Slot) -> bool:
    """True: the test for a state that all parameters have."""
    return True


def _listed(source: Checkpoint) -> dict[str, list[dcp.Entry]]:
    """The entries of each state in a torch_dist checkpoint, by the name of the state there."""
    entries: dict[str, list[dcp.Entry]] = {}
    for item in dcp.entries(source.home):
        if named := re.fullmatch(rf"{CHAINED}{re.escape(PREFIX)}(\w+)\.(.+)", item.name):
            entries.setdefault(named[2], []).append(replace(item, name=named[3]))
    return entries


def _in_pieces(
    source: Checkpoint, entries: Sequence[dcp.Entry], state: str, holds: Callable[[Slot], bool]
) -> Iterator[Placed]:
    """The fragments of a state of a torch_dist checkpoint, paired with the slots of the weights."""
    tensors = torch_dist.tensors_in(source.home, entries)
    placed = _matched(source, {ALONE: {key: item.whole for key, item in tensors.items()}}, state, holds=holds)
    return (piece for item in placed for piece in place_pieces(item, tensors[item.key]))


def masters(source: Checkpoint) -> tuple[Mapping[str, Checkpoint], tuple[str, ...]]:
    """The FP32 master weights of a training with several optimizers, such as SOAP and Adam; and names of other states.

    In torch_dist each optimizer stores the master weights of its parameters under their names (megatron-core 0.19.2,
    layer_wise_optimizer.py). Both results are empty if the only optimizer is Adam, or if one is distributed.
    """
    details = source.details_of(Megatron)
    if details.args.get("optimizer") in (None, "adam") or details.dialect != DIST:
        return {}, ()
    entries = _listed(source)
    masters = entries.pop(stored_name("fp32", distributed=False), None)
    buckets = any(re.fullmatch(bucketed_optimizer.BUCKET, item.name) for item in dcp.entries(source.home))
    if not masters or buckets or stored_name("fp32", distributed=True) in entries:
        return {}, ()
    states = {"fp32": replace(source, tensors=tuple(_in_pieces(source, masters, "fp32", _anything)))}
    return _as_checkpoints(source, states), tuple(sorted(entries))


def _fsdp(source: Checkpoint) -> Optimizer:
    half = "BF16" if source.details_of(Megatron).args.get("bf16") else "F32"
    return fsdp_dtensor_optimizer.read(source, _grads(source.details_of(Megatron).args, half))


# --- classic ---------------------------------------------------------------------------------------------------------


def _classic(source: Checkpoint) -> Optimizer:
    by_state: StateFragments = {}
    heads = []
    shards, args = read_shards(source.home), source.details_of(Megatron).args
    mesh = mesh_of(shards, args, source.home)
    for shard in shards:
        chunks = {
            place: {
                key: fragment for key, fragment in tensors.items() if not any(re.fullmatch(drop, key) for drop in DROPS)
            }
            for place, tensors in tensors_of([shard], mesh, source.topology["pp"]).items()
        }
        try:
            heads.append(
                _shard(
                    shard, tensors_by_optimizer(chunks, several=is_spread(args)), entries(shard.file, args), by_state
                )
            )
        except DAMAGE:
            raise SourceError(f"{shard.file.path} holds no optimizer of a kind that is known") from None
        if heads[-1] != heads[0]:
            first = source.home / next(iter(source.files))
            raise SourceError(f"{shard.file.path} and {first} have optimizers of different steps or settings")
    groups, distributed, step, scaler, head = heads[0]
    states = {}
    for state in STATES:
        if state in by_state:
            tensors = _matched(source, by_state[state], state, once=distributed and is_spread(args))
            states[state] = replace(source, tensors=tuple(tensors))
    grads = _grads(args, next(iter(source.dtypes().values())))
    return Optimizer(_as_checkpoints(source, states), groups, distributed, step, scaler, head, grads)


def _shard(
    shard: Shard, shares: Sequence[Chunks], outers: Sequence[Mapping[Any, Any]], by_state: StateFragments
) -> tuple[Any, ...]:
    """Add the optimizer states in a rank's file to `by_state`.

    Args:
        shard: the file.
        shares: the parameters of each optimizer in the file.
        outers: the entry of each optimizer in the file.
        by_state: the states of all files so far.

    Returns:
        The settings that all ranks have in common: groups, whether the optimizer is distributed, step, loss scaler, and
        the entries `HEAD` beside the optimizer.
    """
    file = shard.file
    inners = [outer.get("optimizer", outer) for outer in outers]
    groups, distributed = shared_groups([(file, inner["param_groups"]) for inner in inners]), "state" not in inners[0]
    steps: set[Small] = set()
    if distributed:
        states = _sharded(file, shares)
    else:
        states = chain.from_iterable(
            _plain(file, outer, share, steps) for outer, share in zip(outers, shares, strict=True)
        )
    for state, place, key, fragment in states:
        by_state.setdefault(state, {}).setdefault(place, {})[key] = fragment
    if len(steps) > 1:
        raise UnsupportedError(f"{file.path}: its parameters have made different numbers of steps")
    head = {name: plain(file, file.value[name], name) for name in HEAD if name in file.value}
    scaler = same_scaler([(file, outer.get("grad_scaler")) for outer in outers])
    return groups, distributed, next(iter(steps), None), scaler, head


def _plain(
    file: TorchFile, outer: Mapping[Any, Any], chunks: Chunks, steps: set[Small]
) -> Iterator[tuple[str, Place, str, Fragment]]:
    """State, place, key and fragment of each tensor of a plain optimizer; the steps in it are added to `steps`."""
    inner = outer.get("optimizer", outer)
    every = [(place, key, fragment.shape) for place, tensors in chunks.items() for key, fragment in tensors.items()]
    masters = outer.get("fp32_from_fp16_params")
    for order, group in enumerate(inner["param_groups"]):
        members = [(place, key) for place, key, shape in every if decays(key, shape) == bool(group["wd_mult"])]
        lengths = {len(group["params"]), *([len(masters[order])] if masters is not None else [])}
        if lengths != {len(members)}:
            counts = " and ".join(map(str, sorted(lengths - {len(members)})))
            raise SourceError(
                f"{file.path}: a group of its optimizer has {counts} parameters, its model has {len(members)} of them",
                "some of them may be frozen, which is not supported",
            )
        for number, (index, (place, key)) in enumerate(zip(group["params"], members, strict=True)):
            states = dict(inner["state"].get(index) or {})
            if "step" in states:
                steps.add(plain(file, states.pop("step"), "the step"))
            if masters is not None:
                states["fp32"] = masters[order][number]
            if missing := {"exp_avg", "exp_avg_sq"} - set(states):
                raise SourceError(f"{file.path} holds no {' and no '.join(sorted(missing))} of {key}")
            if extra := set(states) - set(STATES):
                raise UnsupportedError(f"{file.path}: the optimizer keeps {short(next(iter(extra)))} of {key}")
            for state, ref in states.items():
                if not isinstance(ref, TensorRef):
                    raise SourceError(f"{file.path} holds {state} of {key} as {short(ref)}")
                yield state, place, key, file.fragment(ref, f"{state} of {key}")


def _require_sharded(beside: Path) -> Path:
    """The file of a distributed optimizer beside a rank's file (SourceError: it is missing)."""
    path = beside.with_name(SHARDED)
    if not path.is_file():
        raise SourceError(f"{path.parent} holds no {SHARDED}, which {beside.name} says there is")
    return path


def _sharded(beside: TorchFile, shares: Sequence[Chunks]) -> Iterator[tuple[str, Place, str, Fragment]]:
    """State, place, key and fragment of each tensor of a distributed optimizer, whose states are in a separate file."""
    path = _require_sharded(beside.path)
    file = read_torch(path)
    every = file.value if isinstance(file.value, list) else [file.value]
    if len(every) != len(shares):
        raise UnsupportedError(f"{path} holds {len(every)} optimizers, {beside.path.name} {len(shares)}")
    for buffers, share in zip(every, shares, strict=True):
        if buffers is not None:
            yield from _buffers(file, buffers, {place: tensors for place, tensors in share.items() if tensors})


def _buffers(file: TorchFile, every: Mapping[Any, Any], chunks: Chunks) -> Iterator[tuple[str, Place, str, Fragment]]:
    buffers = [every[number] for number in range(len(chunks))]
    if len(buffers) in every or any(len(buffer) != 1 for buffer in buffers):
        raise UnsupportedError(f"{file.path} holds more than one buffer for each chunk of the model")
    for (place, tensors), buffer in zip(chunks.items(), buffers, strict=True):
        (states,) = buffer.values()
        sizes = [(key, item.shape) for key, item in tensors.items()]
        names = {stored_name(state, distributed=True) for state in STATES}
        if extra := [name for name, item in states.items() if isinstance(item, TensorRef) and name not in names]:
            raise UnsupportedError(f"{file.path}: the optimizer keeps {short(extra[0])}, and Adam does not")
        places, total = list(starts(sizes)), sum(prod(shape) for _, shape in sizes)
        for state in STATES:
            flat = file.fragment(states[stored_name(state, distributed=True)], state)
            if flat.shape != (total,) or not flat.row_major:
                raise SourceError(f"{file.path} holds {list(flat.shape)} elements of {state}, its model has {total}")
            for number, at in places:
                key, shape = sizes[number]
                offset = flat.offset + at * DTYPES[flat.dtype]
                yield state, place, key, flat._replace(offset=offset, shape=shape, strides=row_major(shape))


READERS = {CORE: _classic, DIST: _dist, FSDP_DTENSOR: _fsdp}
"""The function that reads an optimizer, by dialect."""
