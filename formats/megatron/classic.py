"""Megatron's classic checkpoints (`--ckpt-format torch`): a torch.save file for each tensor, pipeline and expert rank.

    ROOT/latest_checkpointed_iteration.txt     an iteration, or `release`
    ROOT/iter_0000100/mp_rank_{tp:02d}/model_optim_rng.pt             one pipeline stage
    ROOT/iter_0000100/mp_rank_{tp:02d}_{pp:03d}/model_optim_rng.pt    several pipeline stages
    ROOT/iter_0000100/mp_rank_{tp:02d}[_{pp:03d}]_{ep:03d}/...        several expert ranks, each with the dense tensors

Facts: megatron-core 0.16.1 and megatron/training/checkpointing.py at 0.18 and d98e8a64. The tables are in `tables.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from formats.checkpoint import ASSETS, MANIFEST, Checkpoint, OutputFile, Settings, Target, slot_dtype
from formats.disk.safetensors import Fragment
from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.families.family import Family
from formats.huggingface import folder as huggingface
from formats.layout.placed import match
from formats.layout.ranks import Files
from formats.layout.slots import Place, Slot
from formats.layout.table import Rule
from formats.megatron import MEGATRON, megatron_llm, mtp, names
from formats.megatron import optimizer as megatron_optim
from formats.megatron.args import flags, indexer, linear_attention, mla, providers, state_space
from formats.megatron.args.args import from_megatron
from formats.megatron.args.options import CORE, DIST, Options, main_dtype, namespace
from formats.megatron.chained_optimizer import Parameter, expert_groups
from formats.megatron.details import details
from formats.megatron.folders import TRACKER, locate, name_of
from formats.megatron.mesh import Mesh, require_mesh
from formats.megatron.optimizer import SHARDED, Optimizer
from formats.megatron.pipeline import Pipeline, chunks, pipeline_of
from formats.megatron.remembered import as_recorded
from formats.megatron.shards import (
    DROPS,
    TIES,
    args_of,
    check_apart,
    check_grid,
    flattened,
    folder_of,
    mesh_of,
    names_of,
    read_shards,
    require_padding,
    state_of,
    tensors_of,
)
from formats.megatron.tables import GROUPED, LEGACY, MCORE
from formats.model.spec import ModelSpec
from formats.torch_files.archive_writer import TensorEntry, archived_alike
from formats.torch_files.pickle_values import Namespace, TensorRef

NAME = MEGATRON.name
FLAGS = "megatron_flags.txt"

TABLES = {CORE: MCORE, megatron_llm.NAME: megatron_llm.TRAINED}
"""The table of each dialect that is written."""


def tables() -> dict[str, tuple[Rule, ...]]:
    """The layout tables by name."""
    return {
        NAME: MCORE,
        f"{NAME} before megatron-core": LEGACY,
        "Megatron-LLM": megatron_llm.TRAINED,
        "Megatron-LLM, converted": megatron_llm.CONVERTED,
    }


def holders(family: Family) -> dict[str, bool]:
    """Whether each dialect holds a family: megatron-core all not of Hugging Face alone, Megatron-LLM some of these."""
    return {
        NAME: not family.only_here,
        megatron_llm.NAME: not (family.only_here or megatron_llm.unsupported_reason(family)),
    }


# --- reading ---------------------------------------------------------------------------------------------------------


def detect(path: Path) -> bool:
    """Whether a folder looks like this format."""
    return (path / TRACKER).is_file() or any(path.glob("mp_rank_*"))


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a checkpoint: read the pickles of all its files, but no weights."""
    run, iteration = locate(path)
    shards = read_shards(iteration)
    first = shards[0]
    args = args_of(first.file)
    mesh, pp = mesh_of(shards, args, iteration), max(shard.pp for shard in shards) + 1
    check_grid(shards, mesh, pp, args, iteration)
    by_place, table, dialect = flattened(tensors_of(shards, mesh, pp)), MCORE, CORE
    keys = {key for tensors in by_place.values() for key in tensors}
    assets = assets_of(run, settings)
    config = huggingface.read_config(assets) if assets else None
    if megatron_llm.wrote(keys, args):
        table, dialect = megatron_llm.table(keys), megatron_llm.NAME
    elif any(key.startswith("language_model.") for key in keys):
        table, args = LEGACY, _legacy_args(args, keys, settings, first.file.path)
    padded = _padded_vocab(by_place, mesh.tp)
    if args.get("padded_vocab_size") not in (None, padded):
        claimed = short(args["padded_vocab_size"])
        raise SourceError(f"{iteration}: args say padded_vocab_size = {claimed}, its embeddings have {padded} rows")
    settled = table is LEGACY  # a legacy model was built from its args (megatron/legacy/model/language_model.py)
    spec = spec_of(args, dialect, assets, config, settings, iteration, first.file.path, padded, settled=settled)
    require_padding(spec, padded, args, iteration, settings)
    pipeline = pipeline_of(args, pp, len(first.chunks), first.file.path)
    try:
        if dialect == megatron_llm.NAME:
            megatron_llm.check_topology(spec, mesh.tp, pipeline)
        slots = slots_of(spec, table, mesh, pipeline, padded, fused=any(map(GROUPED.fullmatch, keys)))
    except (RefusedError, UnsupportedError) as error:
        kind = SourceError if isinstance(error, RefusedError) else UnsupportedError
        raise kind(f"{iteration}: {error}", error.hint) from None
    placed, dropped = match(slots, by_place, DROPS, iteration)
    check_apart(placed)
    topology = {"tp": mesh.tp, "pp": pp} | ({"vpp": pipeline.virtual} if pipeline.virtual > 1 else {})
    topology |= {"ep": mesh.ep} if mesh.ep > 1 else {}
    topology |= {"etp": mesh.etp} if mesh.etp != mesh.tp else {}
    files = tuple(shard.file.path for shard in shards)
    saved = details(first.file, args, dialect, iteration, padded, *names_of(keys), mesh.interleaves)
    return Checkpoint(
        run, iteration, NAME, spec, tuple(placed), tuple(dropped), files, topology, assets, saved, config=config,
        padded_vocab=padded, added_tokens=megatron_llm.added_tokens(args), state=state_of(shards), ties=TIES,
    )  # fmt: skip


def assets_of(run: Path, settings: Settings) -> Path | None:
    """The Hugging Face folder that belongs to the weights of a run."""
    return settings.config or (run / ASSETS if (run / ASSETS / "config.json").is_file() else None)


def spec_of(
    args: Mapping[str, Any],
    dialect: str,
    assets: Path | None,
    config: Mapping[str, Any] | None,
    settings: Settings,
    iteration: Path,
    path: Path,
    padded: int,
    *,
    settled: bool = False,
    trained: bool = False,
    config_place: str = "",
) -> ModelSpec:
    """The spec of a model, from the args of its checkpoint and the config that travels with it.

    Args:
        args: the attributes of the checkpoint's `args`.
        dialect: a key of `args.Options.dialect`.
        assets: the folder of the config, if there is one.
        config: the contents of config.json, if there is one.
        settings: the user's settings.
        iteration: the folder of the iteration.
        path: the file that holds the args, for errors.
        padded: rows of the embedding in the files.
        settled: whether the model computes what the args say, even a setting that some version ignores. A checkpoint
            that a conversion wrote (it has a manifest) always does, since nobody has trained it with such a version.
        trained: whether the args are those of a training though no parser of Megatron-LM made them.
        config_place: what to call the config in an error, where it is not the config.json of `assets`.

    Raises:
        SourceError: the vocabulary is larger than `padded`.
    """
    settled = settled or (iteration / MANIFEST).is_file()
    where = config_place or (str(assets / huggingface.CONFIG) if assets else "")
    base = huggingface.spec_at(config, where, replace(settings, vocab_size=None)) if where and config else None
    if dialect == megatron_llm.NAME:
        spec = megatron_llm.from_args(args, settings, base, assets, iteration.name == "release", str(path))
    elif provider := providers.of_args(args):
        spec = provider.spec_of(args, settings.values, base, str(path), settings.accept)
        spec = with_vocab(spec, settings, iteration)
    else:
        accept = settings.accept
        spec = from_megatron(args, settings.values, base, str(path), accept=accept, settled=settled, trained=trained)
        spec = spec if base else as_recorded(spec, args, settings.values, iteration)
        spec = with_vocab(spec, settings, iteration)
    if spec.vocab is not None and not spec.vocab <= padded:
        raise SourceError(
            f"{iteration} holds {padded} rows of embeddings, the vocabulary has {spec.vocab}",
            "correct it with --vocab-size",
        )
    return spec


def with_vocab(spec: ModelSpec, settings: Settings, iteration: Path) -> ModelSpec:
    """A spec with the true vocabulary size that the user gave, if any.

    Raises:
        RefusedError: the checkpoint records another vocabulary size.
    """
    if settings.vocab_size is not None:
        if spec.vocab not in (None, settings.vocab_size):
            raise RefusedError(
                f"--vocab-size {settings.vocab_size} contradicts {iteration}, whose vocabulary is {spec.vocab}",
                f"leave it out, or override it with --set vocab={settings.vocab_size}",
            )
        spec = replace(spec, vocab=settings.vocab_size)
    return spec


def _legacy_args(args: dict[str, Any], keys: set[str], settings: Settings, path: Path) -> dict[str, Any]:
    """The args of a model before megatron-core, which ignored `rotary_base` and always used 10000.

    megatron/legacy/model/language_model.py:390 at 0.18, megatron/model/language_model.py:372 in 2023-10.

    Raises:
        UnsupportedError: the model is older than 2023-09, or has experts.
        RefusedError: `rotary_base` is another number, and the user has not set rope_theta.
    """
    if any(key.startswith("language_model.transformer.") or key.endswith(".final_layernorm.weight") for key in keys):
        raise UnsupportedError(f"{path}: its names are those of Megatron-LM before 2023-09, which had no RMSNorm")
    if args.get("num_experts") is not None:
        raise UnsupportedError(f"{path}: experts of Megatron-LM's own models (SwitchMLP) are not supported")
    if args.get("rotary_base") not in (None, 10000) and "rope_theta" not in settings.values:
        raise RefusedError(
            f"{path}: args say rotary_base {args['rotary_base']}, but Megatron-LM's own models ignored it and used "
            "10000",
            "--set rope_theta=10000, or the other value if your fork heeded it",
        )
    return args | {"rotary_base": 10000}


def _padded_vocab(by_place: Mapping[Place, Mapping[str, Fragment]], tp: int) -> int:
    for tensors in by_place.values():
        for key, fragment in tensors.items():
            if key.endswith("embedding.word_embeddings.weight") and fragment.shape:
                return fragment.shape[0] * tp
    raise SourceError("no file holds the word embeddings")


def _chunk_key(virtual: int, pipeline: Pipeline) -> str:
    return f"model{virtual}" if pipeline.virtual > 1 else "model"


def _require_tp(spec: ModelSpec, tp: int) -> None:
    """Refuse a tensor parallel size over which attention heads or key/value groups do not divide.

    Raises:
        RefusedError: they do not divide; a group may be copied to several ranks.
    """

    def divides(ranks: int) -> bool:
        return not (spec.heads % ranks or (spec.kv_heads % ranks and ranks % spec.kv_heads))

    if not divides(tp):
        sizes = ", ".join(str(ranks) for ranks in range(1, spec.heads + 1) if divides(ranks))
        raise RefusedError(
            f"{spec.heads} heads in {spec.kv_heads} key/value groups do not divide over tp = {tp}",
            f"--tp may be {sizes}",
        )


def slots_of(
    spec: ModelSpec,
    table: Iterable[Any],
    mesh: Mesh,
    pipeline: Pipeline,
    padded_vocab: int,
    *,
    fused: bool = False,
    first: bool = False,
) -> list[Slot]:
    """The slot of every physical tensor of a topology; the file of its place is the name of a rank's folder.

    Args:
        spec: the model.
        table: the layout table of the dialect.
        mesh: how the tensors of a pipeline stage are cut.
        pipeline: how layers are cut into stages.
        padded_vocab: rows of the embedding.
        fused: whether all experts of a layer are in one matrix (`GROUPED`).
        first: whether to return the slots of the first rank of each stage alone.

    Raises:
        RefusedError: the model cannot be cut so.
    """
    _require_tp(spec, mesh.tp)
    require_mesh(mesh, spec, classic=True)
    placed, parts = list[Slot](), chunks(pipeline, spec.layers)
    mtp.require_pipeline(spec, pipeline, parts)
    for chunk in parts:
        conditions = {"fused" if fused else "separate"}
        conditions |= {"first"} if chunk.first else set()
        conditions |= {"last"} if chunk.last else set()
        chunk_rules = [rule for rule in table if not (chunk.first and "copy" in rule.conditions)]
        for rank, tp, ep in islice(mesh.files(), 1 if first else None):
            placed += spec.slots_in(
                chunk_rules,
                spec.sizes(padded_vocab) | mesh.interleaves,
                conditions,
                place=Place(folder_of(tp, chunk.stage, ep, pipeline.stages, mesh), _chunk_key(chunk.virtual, pipeline)),
                layers=mtp.layers_of(spec, chunk.layers, last=chunk.last),
                **mesh.of(rank, spec.experts or 0),
            )
    return placed


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
    """Lay out a run folder with one checkpoint.

    Args:
        root: the run folder.
        spec: the model; its true vocabulary must be known.
        dtypes: the element type of each logical tensor.
        options: topology and dialect.
        args: the args of the checkpoint that is resharded; those that do not concern model and topology are kept.
        iteration: the iteration of the written checkpoint; None for a release.
        optimizer: the optimizer state that the run resumes with; None for the weights alone.
    """
    pipeline, padded = topology_of(spec, options)
    llm = options.dialect == megatron_llm.NAME
    folder = name_of(iteration)
    spelled = megatron_llm.namespace if llm else namespace
    merged = spelled(spec, dtypes.values(), options, padded, args or {}, iteration)
    merged |= optimizer.args() if optimizer else {}
    table = TABLES[options.dialect]
    if not llm:
        table = names.of_version(table, flags.choose_version(merged, options.version, options.accepted)[0])
    mesh, by_file = options.mesh, dict[str, list[Slot]]()
    slots = slots_of(spec, table, mesh, pipeline, padded, first=True)
    for slot in slots:
        by_file.setdefault(slot.place.file, []).append(slot)
    kinds = expert_groups(slots, mesh.ep) if optimizer else frozenset[bool]()
    numbers, ranks, files = list(mesh.files()), mesh.together(spec.experts or 0), list[OutputFile]()
    for stage in range(options.pp):
        places = tuple(folder_of(tp, stage, ep, options.pp, mesh) for _, tp, ep in numbers)
        paths = tuple(root / folder / place / "model_optim_rng.pt" for place in places)
        parameters = parameters_of(by_file.get(places[0], []), options)  # a stage may be empty
        heads = [{**merged, "rank": stage * mesh.ranks + rank} for rank, _, _ in numbers]
        alike = _files(Files(ranks, places, paths), heads, parameters, dtypes, options, optimizer, kinds)
        for file, (rank, _, _) in zip(alike, numbers, strict=True):
            files.append(file)
            if optimizer and optimizer.distributed:
                beside, dtype, first = file.path.with_name(SHARDED), main_dtype(dtypes.values()), rank < options.tp
                own = [each._replace(slot=placed.slot) for each, placed in zip(parameters, file.tensors, strict=True)]
                files.append(megatron_optim.sharded_file(beside, optimizer, own, dtype, kinds, first=first))
    flags_text = megatron_llm.flags(merged) if llm else flags.flags(merged, options.version, options.accepted)
    texts = {
        TRACKER: (str(iteration) if iteration is not None else "release").encode(),
        FLAGS: flags_text.encode(),
    }
    return Target(tuple(files), texts, {}, folder, padding="last" if llm else "zeros")


def topology_of(spec: ModelSpec, options: Options, trainer: str | None = None) -> tuple[Pipeline, int]:
    """The pipeline to write, and the rows of the padded vocabulary.

    Args:
        spec: the model.
        options: topology and dialect.
        trainer: the trainer that the checkpoint is for (`--for`), which may have models that Megatron-LM has not.

    Raises:
        UnsupportedError: the family has no layout of Megatron.
        RefusedError: megatron-core has no such topology.
    """
    provider = providers.of_spec(spec, trainer, options.version)
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
    _require_tp(spec, options.tp)
    indexer.require_topology(spec, options.norm)
    mla.require_names(spec, options.norm, options.tp if options.dialect == CORE else 1)
    mtp.require_attention(spec)
    linear_attention.require_topology(spec, options.norm, options.tp)
    state_space.require_topology(spec, options.norm, options.tp, options.vpp)
    if provider:
        return options.pipeline, provider.padded(spec, options.tp)
    unit = options.vocab_multiple * options.tp
    return options.pipeline, -(-(spec.vocab or 0) // unit) * unit


def parameters_of(slots: Iterable[Slot], options: Options) -> list[Parameter]:
    """The parameters of a rank's file, in the order of the model, under the names that the options choose."""

    def key_of(slot: Slot) -> str:
        names = options.norm if slot.expert is None else options.experts or options.norm
        return slot.keys[0] if names == "te" else slot.keys[-1]

    return megatron_optim.in_order(Parameter(slot.place.chunk, key_of(slot), slot) for slot in slots)


def _files(
    files: Files,
    args: Sequence[Mapping[str, Any]],
    parameters: Sequence[Parameter],
    dtypes: Mapping[tuple[str, int | None], str],
    options: Options,
    optimizer: Optimizer | None,
    kinds: Collection[bool],
) -> list[OutputFile]:
    """The files of the ranks of a stage, given the args of each rank and the parameters of the first."""
    tensors: list[TensorEntry] = [
        (f"{chunk} {key}", slot, slot.shape, slot_dtype(slot, dtypes)) for chunk, key, slot in parameters
    ]
    states = megatron_optim.plain_tensors(optimizer, parameters) if optimizer and not optimizer.distributed else {}

    def value(refs: Mapping[str, TensorRef], rank: int) -> dict[str, Any]:
        empty = [_chunk_key(number, options.pipeline) for number in range(options.vpp)]
        models: dict[str, Any] = {chunk: OrderedDict() for chunk in empty}  # a chunk may hold no tensors
        for chunk, key, _ in parameters:
            ref = refs[f"{chunk} {key}"]
            *outer, last = megatron_llm.place(key) if options.dialect == megatron_llm.NAME else (key,)
            inner = models[chunk]
            for part in outer:
                inner = inner.setdefault(part, OrderedDict())
            inner[last] = ref
        head = {"args": Namespace(args[rank]), "checkpoint_version": 3.0, "iteration": args[rank]["iteration"]}
        if not optimizer:
            return {**head, **models}
        return {
            **head,
            **models,
            **optimizer.head,
            "optimizer": megatron_optim.entry(optimizer, parameters, refs, kinds),
        }

    return archived_alike(files, tensors, value, states)
