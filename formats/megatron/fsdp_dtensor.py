"""Megatron-FSDP's checkpoints (`--ckpt-format fsdp_dtensor`): a plain torch DCP under the names of the modules.

    ROOT/latest_checkpointed_iteration.txt
    ROOT/iter_0000100/.metadata                the index of the files (formats/torch_files/dcp.py)
    ROOT/iter_0000100/__{rank}_{writer}.distcp

    model.module.{key}                                                weights: the main weights, FP32 in a BF16 training
    optimizer.state.module.module[.module].{key}.{exp_avg|exp_avg_sq|step}      the second `module` wraps half precision
    optimizer.param_to_group_meta.module.module[.module].{key}.{lr|betas|…}     objects
    args, iteration, checkpoint_version, opt_param_scheduler.{max_lr|…}         objects

Keys are those of a classic checkpoint of one rank, except that gate and up have a key each, ending in `_w` and `_v`.
Ranks cut a tensor at any row; a rank that has no rows of a tensor writes nothing of the tensor.

Facts: megatron-core 0.19.2, training/checkpointing.py `preprocess_fsdp_dtensor_state_dict` and `_load_base_checkpoint`,
transformer/fsdp_dtensor_checkpoint.py `handle_swiglu_in_state_dict`, `handle_experts_in_state_dict`; 0.16.1 likewise.
Checkpoints that it saved are in tests/golden/test_megatron_fsdp.py; test_stock_fsdp.py loads written ones with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, Settings, Target, slot_dtype
from formats.errors import RefusedError, SourceError, UnsupportedError
from formats.families.family import Family
from formats.huggingface import folder as huggingface
from formats.layout.pieces import Scattered, match_pieces
from formats.layout.table import Rule
from formats.megatron import MEGATRON_FSDP as FORMAT
from formats.megatron import fsdp_dtensor_optimizer as states
from formats.megatron import names
from formats.megatron.args import flags
from formats.megatron.args.moe import INTERLEAVE, interleaves_of
from formats.megatron.args.options import DIST, FSDP_DTENSOR, Options, namespace
from formats.megatron.chained_optimizer import BUFFER
from formats.megatron.classic import FLAGS, assets_of, parameters_of, spec_of, topology_of
from formats.megatron.details import details
from formats.megatron.folders import TRACKER, locate, name_of
from formats.megatron.optimizer import Optimizer
from formats.megatron.shards import DROPS, STATE, args_of, embedding_rows, names_of, require_padding
from formats.megatron.torch_dist import EMBEDDING, MODEL, whole_slots
from formats.model.spec import ModelSpec
from formats.torch_files import dcp, dcp_writer
from formats.torch_files.archive import TorchFile
from formats.torch_files.archive_plan import packed
from formats.torch_files.archive_writer import Small, packed_plain
from formats.torch_files.dcp_metadata import DATA
from formats.torch_files.pickle_values import Namespace

NAME = FORMAT.name
OBJECTS = ("args", "checkpoint_version", "iteration")
"""Objects at the top level of Megatron's plain DCPs, each written by torch.save; torch_dist has them in one object."""
KEY = re.compile(r"model(\d*)\.module\.(.+)")
PREFIX = "model.module."
CARRIED = (*OBJECTS, *states.HEAD)
"""Objects that are carried over: args and iteration by `details`, the scheduler state by the optimizer."""
BESIDE = ("optimizer", "rng_state", "rerun_state_machine", "opt_param_scheduler")
"""Entries with tensors beside the model."""
FC1 = re.compile(r"(linear_fc1\.(?:weight|bias)(?:\{expert\})?)")
"""The part of a classic key that is followed by `_w` for gate and `_v` for up, which are one tensor there."""


def _separate_rules(rule: Rule) -> Iterator[Rule]:
    """The rows that stand for one row of the classic table: two if the row has gate and up, one for each."""
    halves = rule.pattern.apart() if FC1.search(rule.key) else (rule.pattern,)
    if len(halves) == 1:
        yield rule
        return
    for suffix, half in zip(("_w", "_v"), halves, strict=True):
        yield Rule(FC1.sub(rf"\g<1>{suffix}", rule.key), half, rule.conditions)


TABLE = tuple(half for rule in MODEL for half in _separate_rules(rule))


# --- reading ---------------------------------------------------------------------------------------------------------


def detect(path: Path) -> bool:
    """Whether a folder looks like this format."""
    try:
        folder = locate(path)[1]
        if not dcp.names(folder, *OBJECTS):
            return False
    except SourceError:  # another reader will raise the error
        return False
    try:
        entries, objects = dcp.contents(folder)
    except SourceError:  # `read` will raise the error
        return dcp.names(folder, PREFIX)
    return set(OBJECTS) <= set(objects) and any(KEY.match(entry.name) for entry in entries)


def tables() -> dict[str, tuple[Rule, ...]]:
    """The layout table by name."""
    return {NAME: TABLE}


def holders(family: Family) -> dict[str, bool]:
    """Whether the format holds a family: all but those of Hugging Face alone, with linear attention or state spaces."""
    return {NAME: not family.only_here and not {"recurrent", "state"} & family.traits}


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a checkpoint: read its metadata, its args, and the places of the model's tensors, but no weights."""
    run, folder = locate(path)
    entries, objects = dcp.contents(folder)
    common = _common(folder)
    args = args_of(common)
    tensors = _tensors(folder, entries)
    padded = embedding_rows(tensors, EMBEDDING, folder)
    assets = assets_of(run, settings)
    config = huggingface.read_config(assets) if assets else None
    spec = spec_of(args, DIST, assets, config, settings, folder, common.path, padded)
    require_padding(spec, padded, args, folder, settings)
    interleaves = interleaves_of(args, str(common.path))
    _require_known(args, spec, interleaves, str(common.path))
    slots = whole_slots(spec, _table(spec, tensors), padded, interleaves)
    _, pieces, dropped = match_pieces(slots, tensors, DROPS, folder)
    others = [entry.name for entry in entries if not KEY.match(entry.name)]
    files = {path for entry in entries for path in entry.items.files}
    writers = {rank[1] for file in files if (rank := DATA.fullmatch(file.name))}
    sections = {name.partition(".")[0] for name in (*others, *objects)}
    return Checkpoint(
        run,
        folder,
        NAME,
        spec,
        pieces,
        (*dropped, *(name for name in (*others, *objects) if name.partition(".")[0] not in CARRIED)),
        tuple(dict.fromkeys([*dcp.metadata_files(folder), *sorted(files)])),
        {"ranks": len(writers)},
        assets,
        details(common, args, FSDP_DTENSOR, folder, padded, *names_of(tensors), interleaves),
        config=config,
        padded_vocab=padded,
        state=tuple(name for name in STATE if name in sections),
    )


def _common(folder: Path) -> TorchFile:
    """The objects `OBJECTS` of a checkpoint as one file whose value is a dict."""
    objects = dcp.read_objects(folder, OBJECTS)
    return TorchFile(folder / dcp.METADATA, {name: file.value for name, file in objects.items()}, {})


def _tensors(folder: Path, entries: Sequence[dcp.Entry]) -> dict[str, Scattered]:
    """The model's tensors by key.

    Raises:
        RefusedError: the folder holds a tensor that belongs neither to the model nor to its training state.
        UnsupportedError: the model has several virtual pipeline chunks.
    """
    mine: dict[str, dcp.Entry] = {}
    for entry in entries:
        if key := KEY.fullmatch(entry.name):
            if key[1]:
                raise UnsupportedError(f"{folder} holds {entry.name}: virtual pipeline chunks are not supported")
            mine[key[2]] = entry
        elif entry.name.partition(".")[0] not in BESIDE and prod(entry.shape) > 1:
            raise RefusedError(f"{folder} holds {entry.name} beside its model: nothing says if it is wanted")
    return dict(zip(mine, dcp.load(mine.values()), strict=True))


def _table(spec: ModelSpec, keys: Iterable[str]) -> list[Rule]:
    """The rows of the table for a model: without a gate those of the classic table; copies only if `keys` has them."""
    present, table = set(keys), MODEL if "plain" in spec.conditions else TABLE
    return [rule for rule in table if "copy" not in rule.conditions or rule.key in present]


def _require_known(args: Mapping[str, Any], spec: ModelSpec, interleaves: Mapping[str, int], where: str) -> None:
    """Refuse a checkpoint in which two ranks use equal keys, or in which stored halves are not gate and up.

    Raises:
        UnsupportedError: there are several pipeline stages, each of which numbers its layers from 0; or several expert
            ranks with biases, whose experts are numbered from 0 too (`handle_experts_in_state_dict` renames weights
            alone); or gate and up are interleaved; or there is linear attention or a state space, whose inputs are cut
            part by part or not, depending on the version (`handle_gdn_in_state_dict`, which the saver of 0.19.2 does
            not call).
    """
    mixer = "linear attention" if spec.recurrent_layers else "a state space" if spec.state_layers else ""
    if mixer:
        raise UnsupportedError(
            f"{where}: {mixer} is not supported in fsdp_dtensor: its inputs are cut otherwise in each version",
            "--format torch or torch_dist",
        )
    stages, experts = (args.get(f"{axis}_model_parallel_size") for axis in ("pipeline", "expert"))
    if stages not in (None, 1):
        raise UnsupportedError(f"{where}: {stages} pipeline stages, whose layers megatron-core saves under equal names")
    if experts not in (None, 1) and "expert_down_bias" in spec.tensors:
        raise UnsupportedError(
            f"{where}: biases of experts on {experts} ranks, which megatron-core saves under equal names"
        )
    for name, size in interleaves.items():
        if size:
            raise UnsupportedError(
                f"{where}: {INTERLEAVE[name]} = {size}: the halves that fsdp_dtensor stores are not gate and up"
            )


def notes(optimizer: Optimizer | None) -> tuple[str, ...]:
    """The messages for the user on a checkpoint that is written with or without an optimizer."""
    alone = (
        "Megatron-LM 0.19.2 starts no training in half precision from the weights of fsdp_dtensor alone (`reload_model_"
        "params` is not implemented); 0.16.1 does, and both resume from them with the optimizer"
    )
    return () if optimizer else (alone,)


# --- writing ---------------------------------------------------------------------------------------------------------


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
    """Lay out a run folder with one checkpoint, which any number of ranks can load.

    The arguments are those of `classic.write`; the FP32 master weights of `optimizer` are the weights.

    Raises:
        RefusedError: there are pipeline stages, megatron-core has no such topology, or the model has a gate and would
            resume a training in float32.
        UnsupportedError: the model has no layout in fsdp_dtensor (`_require_known`).
    """
    if options.pp > 1:
        raise RefusedError("fsdp_dtensor has no pipeline stages: megatron-core saves their layers under equal names")
    _, padded = topology_of(spec, options)
    merged = namespace(spec, dtypes.values(), options, padded, args or {}, iteration)
    merged |= optimizer.args() if optimizer else {}
    _require_known(merged, spec, options.mesh.interleaves, "--format fsdp_dtensor")
    if optimizer and not (merged["bf16"] or merged["fp16"]) and "plain" not in spec.conditions:
        raise RefusedError(
            "megatron-core saves and loads no model with a gate that Megatron-FSDP trains in float32",
            "--dtype bf16, of which the float32 weights are the master weights",
        )
    folder = name_of(iteration)
    table = names.of_version(_table(spec, ()), flags.choose_version(merged, options.version, options.accepted)[0])
    parameters = parameters_of(whole_slots(spec, table, padded, options.mesh.interleaves), options)
    stored = [dcp_writer.whole_slot(slot, f"{PREFIX}{key}") for _, key, slot in parameters]
    objects: dict[str, bytes | Small] = {
        "args": packed_plain(Namespace({**merged, "rank": 0})),
        "checkpoint_version": packed(3.0),
        "iteration": packed(merged["iteration"]),
    }
    if optimizer:
        prefix = states.prefix_of(merged)
        moved = [(key, slot) for _, key, slot in parameters if not BUFFER.fullmatch(key)]
        for state, of in optimizer.dtypes.items():
            stored += [
                dcp_writer.whole_slot(slot, f"{states.STATES}{prefix}{key}.{state}", state, slot_dtype(slot, of))
                for key, slot in moved
            ]
        objects |= states.objects(optimizer, moved, merged)
    ranks = dcp_writer.by_rows(stored, 1 if options.archive else options.mesh.ranks)
    files, metadata = dcp_writer.layout(root / folder, ranks, dtypes, objects=objects)
    texts = {
        f"{folder}/{dcp.METADATA}": metadata,
        TRACKER: (str(iteration) if iteration is not None else "release").encode(),
        FLAGS: flags.flags(merged, options.version, options.accepted).encode(),
    }
    return Target(tuple(files), texts, {}, folder)
