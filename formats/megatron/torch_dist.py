"""Megatron's distributed checkpoints (`--ckpt-format torch_dist`): torch DCP with unsharded tensors, as on one rank.

    ROOT/latest_checkpointed_iteration.txt     an iteration, or `release`
    ROOT/iter_0000100/common.pt                args, iteration and all else that is not a tensor, up to 0.18;
                                               from 0.19 on in the DCP (formats/megatron/common_state.py)
    ROOT/iter_0000100/.metadata                where each tensor is in the files (formats/torch_files/dcp.py)
    ROOT/iter_0000100/__{rank}_{writer}.distcp
    ROOT/iter_0000100/metadata.json            the backend; written last

Layers are stacked, `decoder.layers.mlp.linear_fc2.weight` [layers, hidden, ffn], or, where a model mixes kinds of
layers, numbered as in a classic checkpoint. Names are those of Transformer Engine, also for local layers.

Facts: megatron-core 0.16.1, dist_checkpointing/ and transformer/transformer_block.py; real saves and loads are in
tests/golden/test_megatron_dist.py, of 0.19.2 in tests/golden/test_stock_dist.py. megatron/training/checkpointing.py at
0032978f for the fields of common.pt that a training reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, Settings, Target, slot_dtype
from formats.disk.json_file import read_json
from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.families.family import Family
from formats.huggingface import folder as huggingface
from formats.layout.columns import Cut
from formats.layout.pattern import splits
from formats.layout.pieces import Scattered, match_pieces, unstack
from formats.layout.slots import Slot
from formats.layout.table import MTP, Rule, rules
from formats.megatron import DIST as FORMAT
from formats.megatron import common_state, extra_states, lora, mtp, muon, vision_language
from formats.megatron import optimizer as megatron_optim
from formats.megatron.args import (
    flags,
    linear_attention,
    providers,
    run_config,
    state_space,
    stated_twice,
    whole_config,
)
from formats.megatron.args.moe import INTERLEAVE, interleaves_of
from formats.megatron.args.options import DIST, Options, main_dtype, namespace
from formats.megatron.chained_optimizer import BUFFER, CHAINED, expert_groups
from formats.megatron.classic import FLAGS, assets_of, spec_of, topology_of
from formats.megatron.common_state import ABOUT, BACKEND, VERSION
from formats.megatron.details import details
from formats.megatron.extra_states import LAYERS
from formats.megatron.folders import TRACKER, locate, name_of
from formats.megatron.mesh import Mesh
from formats.megatron.optimizer import PREFIX, Optimizer
from formats.megatron.pipeline import Chunk, chunks
from formats.megatron.shards import DROPS, STATE, args_of, embedding_rows, require_alone, require_padding
from formats.megatron.tables import BRIDGE, DECODER, HEAD, MCORE
from formats.model.spec import ModelSpec
from formats.model.values import MOST_LAYERS
from formats.torch_files import dcp, dcp_writer
from formats.torch_files.archive_plan import packed
from formats.torch_files.archive_writer import packed_plain
from formats.torch_files.dcp_metadata import DATA
from formats.torch_files.pickle_values import Namespace

NAME = FORMAT.name
EMBEDDING = "embedding.word_embeddings.weight"
LIGHTNING = "module."
"""The prefix of each name in NeMo 2, whose model is in a Lightning module."""
OPTIMIZER = re.compile(CHAINED + r"optimizer\..*")
GATED = ("linear_fc1.weight", "linear_fc1.bias")

STACKED = rules("""
decoder.layers.{layer}.{pre_mlp_layernorm.weight|mlp.linear_fc1.layer_norm_weight}    post_norm: hidden    sparse
decoder.layers.{layer}.pre_mlp_layernorm.weight                 pre_norm: hidden    sparse
decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight    expert/ep (expert_gate: expert_ffn/etp | expert_up: expert_ffn/etp)%interleave hidden    sparse
decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight    expert_up: expert/ep expert_ffn/etp hidden    sparse plain
decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight    latent_expert_up: expert/ep expert_ffn/etp expert_latent    sparse
decoder.layers.{layer}.mlp.experts.experts.linear_fc2.weight    latent_expert_down: expert/ep expert_latent expert_ffn/etp    sparse
decoder.layers.{layer}.mlp.experts.experts.linear_fc1.bias      expert/ep (expert_gate_bias: expert_ffn/etp | expert_up_bias: expert_ffn/etp)%interleave    sparse
decoder.layers.{layer}.mlp.experts.experts.linear_fc2.weight    expert_down: expert/ep hidden expert_ffn/etp    sparse
decoder.layers.{layer}.mlp.experts.experts.linear_fc2.bias      expert_down_bias: expert/ep hidden    sparse
""")
"""Stacked experts, and the norm before them under its names in Transformer Engine and in local layers."""
APART = re.compile(r".*(?:\.mlp\.experts\.|\{layer\}\.pre_mlp_layernorm\.|\.in_proj\.weight|\.conv1d\.|\.\{conv1d\.).*")
INPUTS = (*linear_attention.SPLIT, *state_space.SPLIT)


def _once(table: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return a table without the copy of the embedding in the pipeline stage that has the MTP layers."""
    return tuple(rule for rule in table if "predicting" not in rule.conditions)


MODEL = _once(MCORE)
LAYERED = (*(rule for rule in DECODER if not APART.fullmatch(rule.key)), *STACKED, *INPUTS)
TABLE = (*LAYERED, *BRIDGE, *_once(mtp.rules_of(LAYERED, mtp.BLOCK)), *HEAD)
"""The tensors of a model, each layer separately. They are those of a classic checkpoint, except `STACKED` and `INPUTS`,
the inputs of linear attention and of state spaces."""

HALVES = rules("""
decoder.layers.{layer}.mlp.linear_fc1.weight_w    gate: ffn hidden    dense
decoder.layers.{layer}.mlp.linear_fc1.weight_v    up: ffn hidden    dense
decoder.layers.{layer}.mlp.linear_fc1.bias_w      gate_bias: ffn    dense
decoder.layers.{layer}.mlp.linear_fc1.bias_v      up_bias: ffn    dense
decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight_w    expert_gate: expert_ffn hidden    sparse
decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight_v    expert_up: expert_ffn hidden    sparse
decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.bias_w      expert_gate_bias: expert_ffn    sparse
decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.bias_v      expert_up_bias: expert_ffn    sparse
decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc2.weight      expert_down: hidden expert_ffn    sparse
decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc2.bias        expert_down_bias: hidden    sparse
decoder.layers.{layer}.mlp.shared_experts.linear_fc1.weight_w    shared_gate: shared_ffn hidden    sparse
decoder.layers.{layer}.mlp.shared_experts.linear_fc1.weight_v    shared_up: shared_ffn hidden    sparse
""")
SPLIT = (*HALVES, *(rule for rule in mtp.rules_of(HALVES, mtp.BLOCK) if rule not in (*mtp.BEFORE, *mtp.BEHIND)))
"""linear_fc1 (transformer/mlp.py:300) and experts as saved with `singleton_local_shards`; all else is in `TABLE`."""


# --- reading ---------------------------------------------------------------------------------------------------------


def detect(path: Path) -> bool:
    """Whether a folder looks like this format."""
    try:
        run, folder = locate(path)
    except SourceError:
        return False
    if common_state.is_held(folder):
        return True
    return dcp.is_dcp(folder) and any(file.is_file() for file in (folder / BACKEND, run / TRACKER))


def tables() -> dict[str, tuple[Rule, ...]]:
    """The tensor layouts of the format, by name."""
    return {NAME: TABLE, f"{NAME}, gate and up apart": SPLIT}


def holders(family: Family) -> dict[str, bool]:
    """Whether the format can hold models of a family: any that Megatron can hold (`Family.only_here`)."""
    return {NAME: not family.only_here}


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a checkpoint: read its metadata, its arguments and the headers of the model's tensors, but no weights."""
    run, folder = locate(path)
    _require_whole(folder)
    entries, objects = dcp.contents(folder)
    common = common_state.read(folder)
    require_alone(common)
    config_path = run_config.place(run, folder)
    if config_path and "args" in common.value and not run_config.names_class(config_path):
        config_path = None
    config_file = run_config.load(config_path) if config_path else None
    adapted = settings.adapter is not None
    fields = run_config.args_of(config_file, settings.values, adapter=adapted) if config_file else Namespace({})
    saved_config = None if "args" in common.value else config_file
    if saved_config:
        saved = {**common.value, "args": fields}
        common = replace(common, path=saved_config.path, value=saved)
        entries = [replace(entry, name=entry.name.removeprefix(LIGHTNING)) for entry in entries]
    args = args_of(common)
    vision = run_config.vision_of(saved_config, (entry.name for entry in entries)) if saved_config else None
    if vision:
        entries, beside = vision_language.split_entries(entries)
    weights = [entry for entry in entries if not OPTIMIZER.fullmatch(entry.name)]
    if config_file and not saved_config:
        stated_twice.require_same(args, vars(fields), (common.path, config_file.path), settings)
    if adapted:
        adapters = tensors_in(folder, [entry for entry in weights if lora.ADAPTER in entry.name])
        peft = config_file.adapter if config_file else {}
        return lora.read(run, folder, common, args, peft, adapters, [entry.name for entry in entries], settings)
    tensors = tensors_in(folder, weights)
    padded = embedding_rows(tensors, EMBEDDING, folder)
    if saved_config:
        run_config.require_rows(saved_config, padded, settings.values)
    assets = assets_of(run, settings)
    config = named_config = huggingface.read_config(assets) if assets else None
    if vision and named_config is None and not settings.only:
        named_config = whole_config.of_fields(*vision)
    config_place = vision_language.config_place(vision[0], assets, common.path) if vision else ""
    if vision and named_config:
        config = vision_language.text_config(*vision, named_config, tensors, str(common.path), config_place)
    spec = spec_of(
        args,
        DIST,
        assets,
        config,
        settings,
        folder,
        common.path,
        padded,
        trained=saved_config is not None,
        config_place=config_place,
    )
    require_padding(spec, padded, args, folder, settings)
    interleaves, table = interleaves_of(args, str(common.path)), _table(tensors)
    _require_interleaves(interleaves, args, split=any(rule in SPLIT for rule in table), where=str(common.path))
    _, placed, dropped = match_pieces(whole_slots(spec, table, padded, interleaves), tensors, DROPS, folder)
    names = [*(entry.name for entry in entries), *objects]
    sections = {*common.value, *(re.split(r"[./]", name)[0] for name in names)}
    files = {path for entry in entries for path in entry.items.files}
    writers = {rank[1] for file in files if (rank := DATA.fullmatch(file.name))}
    norm = "local" if args.get("transformer_impl") == "local" else "te"
    experts = "local" if args.get("moe_grouped_gemm") is False else None
    checkpoint = Checkpoint(
        run,
        folder,
        NAME,
        spec,
        placed,
        (*dropped, *(name for name in names if OPTIMIZER.fullmatch(name)), *objects),
        tuple(dict.fromkeys([common.path, *dcp.metadata_files(folder), *sorted(files)])),
        {"ranks": len(writers)},
        assets,
        details(common, args, DIST, folder, padded, norm, experts, interleaves),
        config=config,
        padded_vocab=padded,
        state=tuple(name for name in STATE if name in sections),
    )
    return (
        vision_language.join(*vision, checkpoint, tensors_in(folder, beside), named_config, config_place, settings)
        if vision
        else checkpoint
    )


def _require_whole(folder: Path) -> None:
    """Refuse a folder whose save did not finish, that another backend saved, or that holds a second save.

    Raises:
        RefusedError: ranks of a classic save are in the folder too.
        SourceError: the save was interrupted, or not all files were copied.
        UnsupportedError: the backend is not torch_dist, or of a version that no release of megatron-core writes.
    """
    path = folder / BACKEND
    if not path.is_file():
        raise SourceError(
            f"{folder} holds no {BACKEND}, which megatron-core writes last: the save never finished, or not all of it "
            "was copied",
            "take an earlier iteration",
        )
    if ranks := sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        raise RefusedError(f"{folder} holds two saves, of torch_dist and {ranks[0]}", f"move either out of {folder}")
    about = {VERSION: ABOUT[VERSION], **read_json(path)}  # without one it is the first (core.py)
    for key in ("sharded_backend", VERSION):
        if about.get(key) != ABOUT[key]:
            raise UnsupportedError(f"{path}: {key} = {short(about.get(key))} is not supported, only {ABOUT[key]!r}")


def tensors_in(folder: Path, entries: Sequence[dcp.Entry]) -> dict[str, Scattered]:
    """Return the model's tensors by key, stacked tensors split into layers.

    Raises:
        SourceError: a tensor has an impossible number of layers, or a key is there twice.
    """
    tensors: dict[str, Scattered] = {}
    for entry, tensor in zip(entries, dcp.load(entries), strict=True):
        for key, layer_tensor in _layers(folder, entry.name, tensor):
            if key in tensors:
                raise SourceError(f"{folder} holds {key} twice")
            tensors[key] = layer_tensor
    return tensors


def _layers(folder: Path, name: str, tensor: Scattered) -> Iterator[tuple[str, Scattered]]:
    rest = name.removeprefix(LAYERS)
    if rest == name or rest[:1].isdigit():
        yield name, tensor
    elif not tensor.shape or not 0 < tensor.shape[0] < MOST_LAYERS:
        raise SourceError(f"{folder}: {short(name)} {list(tensor.shape)} is no stack of layers")
    else:
        yield from ((f"{LAYERS}{layer}.{rest}", part) for layer, part in enumerate(unstack(tensor)))


def _table(keys: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Return the layout of a checkpoint with these keys: with gate and up apart (`SPLIT`) if a key shows that."""
    table = [rule for rule in TABLE if "copy" not in rule.conditions or rule.key in keys]
    if any(key.endswith(f"{GATED[0]}_w") for key in keys):
        table = [rule for rule in table if not rule.key.endswith(GATED) and "ep" not in rule.splits] + [*SPLIT]
    return tuple(table)


def _require_interleaves(interleaves: Mapping[str, int], args: Mapping[str, Any], *, split: bool, where: str) -> None:
    """Refuse interleaved gate and up that are sharded over ranks or stored apart.

    Raises:
        UnsupportedError: megatron-core stores the first and the second half of each rank's shard as if they were gate
            and up (transformer/mlp.py `apply_swiglu_sharded_factory`, 0.19.2), so that no rank of another topology,
            nor a reader, finds the rows of either.
    """
    tp = args.get("tensor_model_parallel_size") or 1
    sizes = {"interleave": args.get("expert_tensor_parallel_size") or tp, "shared_interleave": tp}
    for name, size in sizes.items():
        if interleaves[name] and (split or size != 1):
            raise UnsupportedError(
                f"{where}: {INTERLEAVE[name]} = {interleaves[name]} with a tensor parallel size of {size} is not supported in "
                "torch_dist: the halves that it stores are not gate and up",
                "save with --ckpt-format torch",
            )


def whole_slots(spec: ModelSpec, table: Sequence[Rule], padded: int, interleaves: Mapping[str, int]) -> list[Slot]:
    """Return every tensor of the model unsharded, each layer separately."""
    conditions, layers = ("first", "last", "separate"), mtp.layers_of(spec, range(spec.layers))
    sizes = {**spec.sizes(padded), **interleaves}
    return spec.slots_in(table, sizes, conditions, layers=layers, **Mesh().of(0, spec.experts or 0))


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
    model: vision_language.VisionLanguageModel | None = None,
) -> Target:
    """Lay out a run folder with one checkpoint, whose layers are stacked, or numbered where they differ in kind.

    The checkpoint loads in any topology; with an optimizer either at ep = 1 only, or at any ep > 1 only, where experts
    have an optimizer of their own. It is cut for the topology in `options`, whose ranks read only their own parts.
    Arguments are those of `classic.write`; with `model`, a vision-language model, they describe its language model.
    """
    dtypes = model.dtypes(dtypes) if model else dtypes
    provider = providers.of_spec(spec, options.trainer, options.version)
    if model is None:
        providers.require_tower(provider, spec)
    options = replace(options, norm="te", experts=None) if provider or model else options
    pipeline, padded = topology_of(spec, options, options.trainer)
    folder = name_of(iteration)
    parts = chunks(pipeline, spec.layers)
    if model:
        padded = model.padded(options.tp, sum(len(chunk.layers) for chunk in parts if chunk.stage == 0))
    mtp.require_pipeline(spec, pipeline, parts)
    ranks: list[list[dcp_writer.SlotPart]] = [[] for _ in range(options.mesh.ranks * options.pp)]
    slots = whole_slots(spec, _table({}), padded, options.mesh.interleaves)
    for slot in slots:
        stage = _stage(slot, parts)
        for rank, cut in _cuts(slot, options.mesh):
            ranks[stage * options.mesh.ranks + rank].append(_stored(slot, cut, spec, options.norm))
    if optimizer:
        ranks = [[*stored, *_states_of(optimizer, stored)] for stored in ranks]
    ranks = model.stored(ranks) if model else ranks
    ranks = [[*chain.from_iterable(ranks)]] if options.archive else ranks
    states = extra_states.names(spec, options.norm)
    extra = dict.fromkeys(model.states(states) if model else states, packed([None]))
    files, metadata = dcp_writer.layout(root / folder, ranks, dtypes, objects=extra)
    kinds = expert_groups(slots, options.mesh.ep) if optimizer else frozenset[bool]()
    if optimizer and kinds:
        _require_experts(optimizer, spec, parts)
    kept, about = megatron_optim.common(optimizer, kinds) if optimizer else ({}, {"singleton_local_shards": False})
    common = {"checkpoint_version": 3.0, "iteration": iteration or 0, **kept, "content_metadata": about}
    flags_text, further = dict[str, bytes](), model.fields() if model else {}
    if provider:
        dtype = main_dtype(dtypes.values())
        beside = run_config.written_of(provider, spec, args or {}, options, dtype, iteration or 0, further)
    elif model:
        merged = namespace(spec, dtypes.values(), options, padded, args or {}, iteration)
        beside = run_config.written(merged, merged["iteration"], further=further, own=model.vision.arguments)
    else:
        merged = namespace(spec, dtypes.values(), options, padded, args or {}, iteration)
        _require_interleaves(options.mesh.interleaves, merged, split=False, where=f"tp = {options.tp}")
        merged |= optimizer.args() if optimizer else {}
        common = {"args": Namespace({**merged, "rank": 0}), **common}
        flags_text = {FLAGS: flags.flags(merged, options.version, options.accepted).encode()}
        beside = run_config.written(merged, merged["iteration"]) if options.trainer else {}
    texts = {
        f"{folder}/{dcp.METADATA}": metadata,
        f"{folder}/{common_state.FILE}": packed_plain(common),
        f"{folder}/{BACKEND}": json.dumps(ABOUT).encode(),
        TRACKER: (str(iteration) if iteration is not None else "release").encode(),
        **flags_text,
        **{name if name.startswith("latest") else f"{folder}/{name}": text for name, text in beside.items()},
    }
    return Target(tuple(model.written(files) if model else files), texts, {}, folder)


def _require_experts(optimizer: Optimizer, spec: ModelSpec, parts: Sequence[Chunk]) -> None:
    """Refuse a pipeline stage without experts, where experts have a plain optimizer with FP32 master weights.

    Raises:
        RefusedError: a stage has none, where megatron-core looks for the list of master weights (optimizer.py:884).
    """
    holding = {chunk.stage for chunk in parts if not spec.sparse_layers.isdisjoint(chunk.layers)}
    without = sorted({chunk.stage for chunk in parts} - holding)
    if without and not optimizer.distributed and "fp32" in optimizer.states:
        raise RefusedError(
            f"stage {without[0]} has no experts: megatron-core cannot load their plain optimizer there out of torch_dist",
            "--format torch, or --optimizer distributed",
        )


def _stage(slot: Slot, parts: Sequence[Chunk]) -> int:
    """The pipeline stage that holds a tensor."""
    if slot.layer is not None and MTP not in slot.rule.conditions:
        return next(chunk.stage for chunk in parts if slot.layer in chunk.layers)
    return parts[0 if "first" in slot.rule.conditions else -1].stage


def _cuts(slot: Slot, mesh: Mesh) -> Iterator[tuple[int, Cut]]:
    """Yield (rank in the pipeline stage, part) of a tensor; a rank has two parts of a fused gate and up."""
    sizes = {"tp": mesh.tp, "ep": mesh.ep, "etp": mesh.etp}
    choices: list[list[tuple[str, int, tuple[int, int]]]] = []
    for rows, term in zip(slot.shape, slot.rule.pattern.dims, strict=True):
        runs = splits(term)
        axis, ranks = (runs[0], sizes[runs[0]]) if runs else ("", 1)
        count = max(len(runs), 1) * ranks
        if rows % count:
            raise RefusedError(f"{rows} rows of {slot.keys[0]} do not divide over {axis} = {ranks}")
        step = rows // count
        choices.append([(axis, number % ranks, (number * step, (number + 1) * step)) for number in range(count)])
    for choice in product(*choices):
        at = {axis: rank for axis, rank, _ in choice}
        yield at.get("tp", 0) + at.get("ep", 0) * mesh.etp + at.get("etp", 0), Cut(tuple(box for _, _, box in choice))


def _stored(slot: Slot, cut: Cut, spec: ModelSpec, norm: str) -> dcp_writer.SlotPart:
    """Return a part to store, under the name of its stack, or of its layer where layers differ in kind or are MTP's."""
    latent = spec.latent_rank is not None  # whose local layers rename nothing
    key = slot.keys[-1 if norm == "local" and ("sparse" in slot.rule.conditions) is not latent else 0]
    if slot.layer is None or spec.mixed or MTP in slot.rule.conditions:
        return dcp_writer.SlotPart(slot, cut, key, slot.shape, cut.ranges)
    name = key.replace(f"{LAYERS}{slot.layer}.", LAYERS)
    box = ((slot.layer, slot.layer + 1), *cut.ranges)
    return dcp_writer.SlotPart(slot, cut, name, (spec.layers, *slot.shape), box)


def _states_of(optimizer: Optimizer, weights: Sequence[dcp_writer.SlotPart]) -> Iterator[dcp_writer.SlotPart]:
    """Yield the optimizer states of the parameters whose parts a rank holds."""
    for state, dtypes in optimizer.dtypes.items():
        for weight in weights:
            slot, several = weight.slot, optimizer.muon is not None
            if BUFFER.fullmatch(slot.keys[0]) or (several and not muon.has_state(state, slot, dtypes)):
                continue
            by_muon = several and muon.trains(slot)
            name = megatron_optim.stored_name(state, optimizer.distributed and not by_muon)
            yield weight._replace(name=f"{PREFIX}{name}.{weight.name}", state=state, dtype=slot_dtype(slot, dtypes))
