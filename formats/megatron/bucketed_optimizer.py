"""Read a distributed optimizer in buckets (`dp_reshardable`): the flat buffers of each model-parallel rank, in pieces.

    optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_{chunk}.dtype_(…).bucket_idx_{n}.{param|exp_avg|exp_avg_sq}
    optimizer.distributed.dp_group_idx_{rank}.{optimizer|grad_scaler}

The buckets of a chunk are the buffer of `distrib_optim.pt`, cut to pieces. In each bucket a parameter begins at a
multiple of 64 elements; the bucket ends with its last parameter, or, where the embedding has a bucket of its own, is
padded to that alignment. Ranks are model-parallel ranks: tensor ranks count fastest, then pipeline stages; in the
optimizer of experts on several ranks, expert-tensor ranks count fastest, then expert ranks, then stages.

Facts: megatron-core 0.16.1 and 0.19.2, which write the same: optimizer/distrib_optimizer.py
`sharded_param_state_dp_reshardable`, distributed/param_and_grad_buffer.py `_does_param_require_new_bucket`.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, cast

from formats.checkpoint import Checkpoint
from formats.disk.safetensors import DTYPES, Fragment
from formats.errors import SourceError, UnsupportedError
from formats.layout.columns import Cut
from formats.layout.placed import Placed
from formats.layout.slots import Slot
from formats.megatron import chained_optimizer, muon
from formats.megatron.args.moe import interleaves_of
from formats.megatron.args.options import Options
from formats.megatron.chained_optimizer import CHAINED, Parameter, same_scaler, shared_groups
from formats.megatron.classic import parameters_of, slots_of
from formats.megatron.details import Megatron
from formats.megatron.mesh import Mesh
from formats.megatron.optimizer import ALIGNMENT, stored_name
from formats.megatron.pipeline import pipeline_of
from formats.megatron.shards import folder_of
from formats.megatron.tables import MCORE
from formats.model.spec import ModelSpec
from formats.model.values import positive_int
from formats.optimizer import STATES
from formats.torch_files import dcp
from formats.torch_files.unpickle import DAMAGE

NAME, GROUP = "dp_reshardable", "optimizer.distributed.dp_group_idx_"
BUCKET = CHAINED + (rf"{re.escape(GROUP)}(\d+)\.gbuf_idx_(\d+)\.dtype_\([^()]*\)\.bucket_idx_(\d+)\.(\w+)")
"""The name of a bucket; its groups are optimizer, rank, chunk of the model, number of the bucket, and state."""
NAMES = {stored_name(state, distributed=True) for state in STATES}
OBJECT = "{}.{}/shard_0_1"
Settings = tuple[list[dict[str, Any]], Any]
"""The parameter groups, and the state of the loss scaler."""


def read(source: Checkpoint) -> tuple[dict[str, list[Placed]], Settings]:
    """The states of each parameter that Adam trains, and the settings that all ranks agree on.

    Raises:
        SourceError: a bucket is missing or left over, or the settings of two ranks differ.
        UnsupportedError: the parameters are spread over the ranks in a way that is not known, a state is not Adam's, or
            a bucket has several element types.
    """
    entries: dict[tuple[int, int, int, str], dict[int, dcp.Entry]] = {}
    for entry in dcp.entries(source.home):
        if named := re.fullmatch(BUCKET, entry.name):
            if named[5] not in NAMES:
                raise UnsupportedError(f"{source.home}: the optimizer keeps {named[5]}, and Adam does not")
            buckets = entries.setdefault((int(named[1] or 0), int(named[2]), int(named[3]), named[5]), {})
            if int(named[4]) in buckets:
                raise UnsupportedError(f"{source.home} holds {entry.name} of several element types")
            buckets[int(named[4])] = entry
    every = _trained(source)
    placed: dict[str, list[Placed]] = {state: [] for state in STATES}
    for optimizer, ranks in every.items():
        for rank, of_rank in enumerate(ranks):
            chunks: dict[str, list[Parameter]] = {}
            for parameter in of_rank:
                chunks.setdefault(parameter.chunk, []).append(parameter)
            for number, parameters in enumerate(chunks.values()):
                for state in STATES:
                    buckets = entries.pop((optimizer, rank, number, stored_name(state, distributed=True)), {})
                    placed[state] += _cut(source, parameters, [buckets[order] for order in sorted(buckets)])
    settings = _settings(source, {number: len(ranks) for number, ranks in every.items()})
    if entries or not settings[0]:
        count = " and ".join(str(len(ranks)) for ranks in every.values())
        raise SourceError(f"{source.home} holds an optimizer of other ranks than the {count} that its args tell of")
    return placed, settings


def _trained(source: Checkpoint) -> dict[int, list[list[Parameter]]]:
    """The parameters that Adam trains on each rank, in model order, by the number of that Adam among all optimizers."""
    spec, details, path = cast(ModelSpec, source.spec), source.details_of(Megatron), source.home
    args = details.args
    tp, pp, virtual = (
        positive_int(args.get(f"{axis}_model_parallel_size") or 1, axis, str(path))
        for axis in ("tensor", "pipeline", "virtual_pipeline")
    )
    etp = positive_int(args.get("expert_tensor_parallel_size") or tp, "etp", str(path)) if spec.experts else tp
    several = chained_optimizer.is_spread(args)
    if spec.experts and (args.get("moe_use_legacy_grouped_gemm") or (etp != tp and not several)):
        what = "moe_use_legacy_grouped_gemm" if etp == tp else f"expert_tensor_parallel_size = {etp} beside {tp}"
        raise UnsupportedError(
            f"{source.home}: buckets of experts with {what}", "save once more with --dist-ckpt-optim-fully-reshardable"
        )
    pipeline, options = pipeline_of(args, pp, virtual, path), Options(norm=details.norm, experts=details.experts)

    def of(mesh: Mesh) -> list[list[list[Parameter]]]:
        by_file: dict[str, list[Slot]] = {}
        for slot in slots_of(spec, MCORE, mesh, pipeline, source.padded_vocab or 0):
            by_file.setdefault(slot.place.file, []).append(slot)
        files = [folder_of(tensor, stage, ep, pp, mesh) for stage in range(pp) for _, tensor, ep in mesh.files()]
        ranks = [parameters_of(by_file.get(file, []), options) for file in files]
        shares = [chained_optimizer.shares(parameters, {True} if several else ()) for parameters in ranks]
        return [list(share) for share in zip(*shares, strict=True)]

    interleaves = interleaves_of(args, str(path)).values()
    dense = of(Mesh(tp, 1, tp, *interleaves))
    if muon.is_used(args):
        return {1: [[parameter for parameter in rank if not muon.trains(parameter.slot)] for rank in dense[0]]}
    if several:
        return {0: dense[0], 1: of(Mesh(etp, args["expert_model_parallel_size"], etp, *interleaves))[1]}
    return {0: dense[0]}


def _settings(source: Checkpoint, ranks: Mapping[int, int]) -> Settings:
    """The settings that all ranks of all optimizers agree on, given the number of ranks by number of the optimizer.

    Raises:
        SourceError: a rank has no known settings, or two ranks have different ones.
    """
    prefixes = {number: "" if [*ranks] == [0] else f"chained_{number}." for number in ranks}
    every = [
        [f"{prefixes[number]}{GROUP}{rank % count}" for number, count in ranks.items()]
        for rank in range(max(ranks.values()))
    ]
    names = [
        OBJECT.format(index, name) for numbers in every for index in numbers for name in ("optimizer", "grad_scaler")
    ]
    objects = dcp.read_objects(source.home, names)
    settings: list[Settings] = []
    for rank, numbers in enumerate(every):
        metadata, scalers = (
            [objects.get(OBJECT.format(index, name)) for index in numbers] for name in ("optimizer", "grad_scaler")
        )
        try:
            groups = (
                shared_groups([(index, index.value[0]["param_groups"]) for index in metadata if index])
                if all(metadata)
                else []
            )
            settings.append((groups, same_scaler([(index, index.value[0] if index else None) for index in scalers])))
        except DAMAGE:
            what = f"{source.home} holds no settings of the optimizer on rank {rank} that are known"
            raise SourceError(what) from None
        if settings[-1] != settings[0]:
            raise SourceError(f"{source.home}: the ranks 0 and {rank} have optimizers of different steps or settings")
    return settings[0]


def _places(sizes: Sequence[int], buckets: Sequence[int]) -> list[tuple[int, int]] | None:
    """Number and first element of each parameter in the concatenated buckets; None if their sizes do not fit.

    Args:
        sizes: elements of each parameter, in the order of the model.
        buckets: elements of each bucket.
    """
    places, base, number, at = list[tuple[int, int]](), 0, len(sizes), 0
    for bucket in buckets:
        at = 0
        while number and (begin := -(-at // ALIGNMENT) * ALIGNMENT) + sizes[number - 1] <= bucket:
            number -= 1
            places.append((number, base + begin))
            at = begin + sizes[number]
        if bucket not in (at, -(-at // ALIGNMENT) * ALIGNMENT):
            return None
        base += bucket
    return None if number else places


def _cut(source: Checkpoint, parameters: Sequence[Parameter], buckets: Sequence[dcp.Entry]) -> Iterator[Placed]:
    """The fragments of each parameter of a chunk in the buckets, which together are the buffer of the chunk.

    Raises:
        SourceError: the buckets hold other parameters.
    """
    sizes = [prod(parameter.slot.shape) for parameter in parameters]
    places = _places(sizes, [prod(parameter.shape) for parameter in buckets])
    if places is None:
        count = sum(prod(parameter.shape) for parameter in buckets)
        raise SourceError(
            f"{source.home}: buckets of the optimizer hold {count} elements, the model has {sum(sizes)} there"
        )
    pieces, first = list[tuple[int, Fragment]](), 0
    for tensor in dcp.load(buckets):
        pieces += [(first + piece.part.ranges[0][0], piece.fragment) for piece in tensor.copies[0]]
        first += tensor.shape[0]
    pieces.sort(key=lambda piece: piece[0])
    for number, at in places:
        parameter, end = parameters[number], at + sizes[number]
        for begin, flat in pieces[bisect(pieces, at, key=lambda piece: piece[0]) - 1 :]:
            low, high = max(at, begin), min(end, begin + flat.shape[0])
            if begin >= end:
                break
            offset = flat.offset + (low - begin) * DTYPES[flat.dtype]
            part = flat._replace(offset=offset, shape=(high - low,))
            yield Placed(parameter.key, parameter.slot, part, Cut(((low - at, high - at),), flat=True))
