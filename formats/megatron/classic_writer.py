"""Writing Megatron's classic checkpoints: the files of each rank, with what a run keeps to train on.

Facts: megatron-core 0.16.1; the order of a model's parameters is that of transformer_layer.py, attention.py, mlp.py and
moe_layer.py. Training loads what is written in tests/golden.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from formats.checkpoint import OutputFile, Target, slot_dtype
from formats.errors import RefusedError, UnsupportedError
from formats.families import family_named
from formats.layout.table import Slot
from formats.megatron import megatron_llm
from formats.megatron import optimizer as megatron_optim
from formats.megatron.args import flags, mla
from formats.megatron.args.args import CORE, DIST, Options, main_dtype, namespace
from formats.megatron.chained_optimizer import Parameter, spread
from formats.megatron.classic import MCORE, chunk_key, require_tp, slots_of
from formats.megatron.mesh import require_mesh
from formats.megatron.optimizer import SHARDED, Optimizer
from formats.megatron.pipeline import Pipeline
from formats.megatron.shards import TRACKER, folder_of, name_of
from formats.model.spec import ModelSpec
from formats.torch_files.archive_writer import Held, archived
from formats.torch_files.pickle_values import Namespace, TensorRef

FLAGS = "megatron_flags.txt"
TABLES = {CORE: MCORE, megatron_llm.NAME: megatron_llm.TRAINED}
"""What is written, by dialect."""
MODULES = (
    "input_layernorm", "self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv",
    "self_attention.linear_q_proj", "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "self_attention.kv_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1",
    "mlp.linear_fc2", "mlp.router", "mlp.experts", "mlp.shared_experts",
)  # fmt: skip
"""Of a layer, in the order in which the model has them (transformer_layer.py, attention.py, mlp.py, moe_layer.py)."""
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.|linear_fc([12])\.\w+?(\d+)$)")
"""A module for each expert, or one for the first matrices (and biases) of all and one for the second ones: there each
expert's come together (transformer_engine/pytorch/module/grouped_linear.py, `weight0`, `bias0`, `weight1`, ...)."""


def write(
    root: Path,
    spec: ModelSpec,
    dtypes: Mapping[tuple[str, int | None], str],
    options: Options,
    *,
    args: Mapping[str, Any] | None = None,
    iteration: int | None = None,
    optimizer: Optimizer | None = None,
) -> Target:
    """Lay out a run folder with one checkpoint.

    Args:
        root: the run folder.
        spec: the model; its true vocabulary must be known.
        dtypes: the element type of each logical tensor.
        options: topology and dialect.
        args: those of the checkpoint that is resharded; what does not concern model and topology is kept.
        iteration: its iteration; None for a release.
        optimizer: what the run keeps to train on.
    """
    pipeline, padded = topology_of(spec, options)
    llm = options.dialect == megatron_llm.NAME
    folder = name_of(iteration)
    spelled = megatron_llm.namespace if llm else namespace
    merged = spelled(spec, dtypes.values(), options, padded, args or {}, iteration)
    merged |= optimizer.args() if optimizer else {}
    by_file: dict[str, list[Slot]] = {}
    wanted = slots_of(spec, TABLES[options.dialect], options.mesh, pipeline, padded)
    for slot in wanted:
        by_file.setdefault(slot.place.file, []).append(slot)
    files, kinds = [], spread(wanted, options.mesh.ep) if optimizer else frozenset[bool]()
    for stage, (rank, tp, ep) in product(range(options.pp), options.mesh.files()):
        name = folder_of(tp, stage, ep, options.pp, options.mesh)
        path = root / folder / name / "model_optim_rng.pt"
        head = {"args": Namespace({**merged, "rank": stage * options.mesh.ranks + rank}), "checkpoint_version": 3.0}
        head["iteration"] = merged["iteration"]
        parameters = parameters_of(by_file.get(name, []), options)  # a stage may be empty
        files.append(_file(path, head, parameters, dtypes, options, optimizer, kinds))
        if optimizer and optimizer.distributed:
            beside, dtype, first = path.with_name(SHARDED), main_dtype(dtypes.values()), rank < options.tp
            files.append(megatron_optim.sharded_file(beside, optimizer, parameters, dtype, kinds, first=first))
    told = megatron_llm.flags(merged) if llm else flags.flags(merged, options.version, options.accepted)
    texts = {
        TRACKER: (str(iteration) if iteration is not None else "release").encode(),
        FLAGS: told.encode(),
    }
    return Target(tuple(files), texts, {}, folder, padding="last" if llm else "zeros")


def topology_of(spec: ModelSpec, options: Options) -> tuple[Pipeline, int]:
    """The pipeline that is to be written, and its padded vocabulary.

    Raises:
        UnsupportedError: the family has no layout of Megatron.
        RefusedError: megatron-core has no such topology.
    """
    if reason := family_named(spec.family).only_here:
        raise UnsupportedError(f"a {spec.family} has no Megatron layout: {reason}", "see `convert formats`")
    if options.dialect == megatron_llm.NAME:
        megatron_llm.check_spec(spec)
        megatron_llm.check_topology(spec, options.tp, options.pipeline)
    require_mesh(options.mesh, spec, classic=options.dialect != DIST)
    if options.interleave and "local" in (options.norm, options.experts):
        raise RefusedError(
            f"Megatron's local layers do not interleave gate and up: --glu-interleave {options.interleave}",
            "--norm te and --experts te, or leave --glu-interleave out",
        )
    if options.vpp > 1 and options.pp == 1:
        raise RefusedError("virtual pipeline chunks need a pipeline: megatron-core refuses vpp > 1 with pp = 1")
    require_tp(spec, options.tp)
    mla.require_names(spec, options.norm, options.tp if options.dialect == CORE else 1)
    unit = options.vocab_multiple * options.tp
    return options.pipeline, -(-(spec.vocab or 0) // unit) * unit


def in_order(parameters: Iterable[Parameter]) -> list[Parameter]:
    """The parameters of a file in the order in which the model has them."""

    def place(one: Parameter) -> tuple[int, ...]:
        chunk, found = int(one.chunk[5:] or 0), re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", one.key)
        if found is None:
            return chunk, -1 if "first" in one.slot.rule.conditions else 1_000_000
        rank = next((n for n, module in enumerate(MODULES) if found[2].startswith(module)), len(MODULES))
        expert = EXPERT.match(found[2])
        return chunk, int(found[1]), rank, *(int(number or 0) for number in (expert.groups() if expert else ()))

    return sorted(parameters, key=place)


def parameters_of(wanted: Iterable[Slot], options: Options) -> list[Parameter]:
    """What a rank's file holds, in the order of the model."""

    def key_of(slot: Slot) -> str:
        names = options.norm if slot.expert is None else options.experts or options.norm
        return slot.keys[0] if names == "te" else slot.keys[-1]

    return in_order(Parameter(slot.place.chunk, key_of(slot), slot) for slot in wanted)


def _file(
    path: Path,
    head: Mapping[str, Any],
    parameters: Sequence[Parameter],
    dtypes: Mapping[tuple[str, int | None], str],
    options: Options,
    optimizer: Optimizer | None,
    kinds: Collection[bool],
) -> OutputFile:
    held: list[Held] = [
        (f"{chunk} {key}", slot, slot.shape, slot_dtype(slot, dtypes)) for chunk, key, slot in parameters
    ]
    states = megatron_optim.held(optimizer, parameters) if optimizer and not optimizer.distributed else {}

    def value(refs: Mapping[str, TensorRef]) -> dict[str, Any]:
        empty = [chunk_key(number, options.pipeline) for number in range(options.vpp)]
        models: dict[str, Any] = {chunk: OrderedDict() for chunk in empty}  # a chunk may hold no layer
        for chunk, key, _ in parameters:
            ref = refs[f"{chunk} {key}"]
            *outer, last = megatron_llm.place(key) if options.dialect == megatron_llm.NAME else (key,)
            inner = models[chunk]
            for part in outer:
                inner = inner.setdefault(part, OrderedDict())
            inner[last] = ref
        if not optimizer:
            return {**head, **models}
        return {
            **head,
            **models,
            **optimizer.head,
            "optimizer": megatron_optim.entry(optimizer, parameters, refs, kinds),
        }

    return archived(path, held, value, states=states)
