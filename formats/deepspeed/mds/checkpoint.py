"""Read checkpoints of Megatron-DeepSpeed: files of DeepSpeed's pipeline, with Megatron's names and arguments.

    TAG/layer_{i:02d}-model_{tp:02d}-model_states.pt    a module (`tables.py`)
    TAG/mp_rank_{mp:02d}_model_states.pt                args (a Namespace), checkpoint_version, iteration, tokens, and
                                                        in newer trees universal_checkpoint_info, with the vocabulary
    TAG/bf16_zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt
    TAG/zero/{parameter}/                               a universal checkpoint, with or without layer files beside it

Where one matrix holds query, key and value, the files do not record their order: deepspeedai's tree changed the order
on 2024-12-04 (676a482c, megatron/model/transformer.py), and `checkpoint_version` is still 3.0. So the user has to pass
the order.

Facts: megatron/checkpointing.py and transformer.py of the trees that `tables.py` names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint, Details, Settings
from formats.deepspeed import MDS, cut_again, modules, universal
from formats.deepspeed import folders as deepspeed
from formats.deepspeed.mds import bloom, optimizer
from formats.deepspeed.mds.args import of_model, require_rotation, translated
from formats.deepspeed.mds.tables import (
    EMBEDDING,
    FAMILIES,
    FIRST_LAYER,
    FIRST_LAYERS,
    OF_BIGSCIENCE,
    ORDERS,
    TABLE,
    norm_number,
    slots_of,
)
from formats.deepspeed.partitions import Partition
from formats.disk.safetensors import Fragment
from formats.errors import OptionNeededError, SourceError, UnsupportedError, short
from formats.families.family import Family
from formats.huggingface import folder as huggingface
from formats.layout.pieces import place_pieces
from formats.layout.placed import Placed, match
from formats.layout.slots import Place, Slot
from formats.layout.table import Rule
from formats.megatron.args.fields import FIELDS
from formats.megatron.args.options import CORE
from formats.megatron.classic import assets_of, spec_of
from formats.megatron.shards import args_of, iteration_of, require_padding, vocab_multiple
from formats.model.padding import require_recorded
from formats.model.spec import ModelSpec
from formats.model.values import positive_int
from formats.torch_files import saved_names
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.pickle_values import Namespace, Opaque, is_plain

NAME = MDS.name
TIES = ("iteration", "global_steps", "global_samples", "skipped_steps", "tokens")
"""Keys of a model file whose values identify the save."""
SHARED = tuple(dict.fromkeys([
    "num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "ffn_hidden_size", "padded_vocab_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "world_size", "seed", "rope_theta", "mlp_type",
    "embed_layernorm", "normalization", "layernorm_epsilon", *FIELDS,
]))  # fmt: skip
"""Arguments on which all model files must agree."""
STATE = ("optimizer", "lr_scheduler", "rng_state", "random_rng_state")
INFOS = ("universal_checkpoint_info", "checkpoint_info")
"""Keys of a model file under which trees record the vocabulary; the second is BigScience's."""
FEW = 2
"""How many layer files `detect` opens where the model file does not decide: those of the embedding and of a layer."""
DROPS = (r".*\.rotary_emb\.inv_freq",)
UNIVERSAL = "a universal checkpoint of Megatron-DeepSpeed"


@dataclass(frozen=True, kw_only=True)
class MegatronDeepSpeed(Details):
    """Facts of a save that the model's spec does not hold, and that are written again.

    Attributes:
        iteration: the iteration of the save.
        vocab_multiple: the rows of the vocabulary on each tensor-parallel rank were padded to a multiple of this.
        qkv: the order of query, key and value in the tree that wrote the checkpoint; None where several trees could
            have written the files.
        progress: the values of `optimizer.OF_FILE` and `optimizer.OF_ARGS` in the files that are plain data.
    """

    iteration: int
    vocab_multiple: int
    qkv: str | None
    progress: Mapping[str, Any]


class _Opened(NamedTuple):
    """The opened files of a checkpoint, before it is decided whether weights or optimizer states are read.

    `tensors` has the tensors of each layer file; it is empty for a universal checkpoint without layer files.
    """

    run: Path
    tag: Path
    models: Mapping[int, TorchFile]
    tensors: Mapping[str, Mapping[str, Fragment]]
    first_layer: int
    tp: int
    spec: ModelSpec
    padded: int
    vocab_multiple: int
    qkv: str
    assets: Path | None
    config: Mapping[str, Any] | None
    slots: list[Slot]
    settings: Settings
    notes: tuple[str, ...]


def tables() -> dict[str, tuple[Rule, ...]]:
    """The tensor layout of the format, by name."""
    return {NAME: TABLE}


def holders(family: Family) -> dict[str, bool]:
    """Whether the format can hold models of a family: one that Megatron-DeepSpeed itself has trained for the tests."""
    return {NAME: family.name in FAMILIES}


def detect(path: Path) -> bool:
    """Whether a folder looks like Megatron-DeepSpeed's: DeepSpeed's files with Megatron's args or layers.

    The args are a Namespace, where GPT-NeoX has a dict.
    """
    for tag in [path] if deepspeed.holds(path) else deepspeed.likely(path):
        names = sorted(tag.iterdir())
        models = [file for file in names if deepspeed.is_model(file.name)]
        layers = [file for file in names if saved_names.LAYER.fullmatch(file.name)]
        for file in [*models[:1], *layers[:FEW]]:
            try:
                value = deepspeed.value_of(file)
            except (SourceError, UnsupportedError):  # which a reader reports
                continue
            state = value if isinstance(value, Mapping) else {}
            args = state.get("args")
            if args is not None:
                return isinstance(args, Namespace) and {"num_layers", "padded_vocab_size"} <= vars(args).keys()
            if any(str(key).startswith("self_attention.") for key in state):
                return True
    return False


# --- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a checkpoint: read the pickles of its files, but no weights."""
    opened = _open(path, settings)
    if settings.weights in (None, "module") and opened.tensors:
        return _checkpoint(opened, _placed(opened))
    readers = partial(_of_universal, opened), partial(_of_state, opened)
    return modules.requested(opened.tag, opened.models, settings, *readers, bare=not opened.tensors)


def read_states(path: Path, settings: Settings) -> universal.States:
    """Open the optimizer states; every file is read once."""
    opened = _open(path, settings)
    readers = partial(_of_universal, opened), partial(_of_state, opened)
    return modules.every_state(opened.tag, opened.models, settings, *readers)


def _open(path: Path, settings: Settings) -> _Opened:
    run, tag = deepspeed.locate(path, settings.tag)
    models = {rank: read_torch(file) for rank, file in deepspeed.model_files(tag).items()}
    for file in models.values():
        if isinstance(file.value, Mapping) and file.value.get("module") is not None:
            raise UnsupportedError(
                f"{file.path} holds the whole model, as a training with --no-pipeline-parallel saves it",
                "its repository has tools/convert_checkpoint/deepspeed_to_transformers.py",
            )
    bare = universal.is_universal(tag) and not any(
        map(saved_names.LAYER.fullmatch, (path.name for path in tag.iterdir()))
    )
    if bare:
        modules.require_ranks(models, TIES)
    by_file, tp = ({}, None) if bare else modules.tensors(tag, models, TIES, lambda key, _: key)
    args = _same_args(models)
    first = models[0]
    tp = tp or positive_int(args.get("tensor_model_parallel_size"), "tensor_model_parallel_size", str(first.path))
    _require_topology(models, args, tp)
    padded = positive_int(args.get("padded_vocab_size"), "padded_vocab_size", str(first.path))
    keys = {key for tensors in by_file.values() for key in tensors}
    if bare:
        keys = {_key_of(tag, name) for name in universal.names(tag)}
    else:
        _require_rows(by_file, tp, padded, tag, first.path)
    assets = assets_of(run, settings)
    config = huggingface.read_config(assets) if assets else None
    known = _with_vocab(settings, first, config)
    rotated = require_rotation(args, str(first.path), settings.accept)
    if bloom.holds(args):
        base = huggingface.read_spec(config, assets, replace(settings, vocab_size=None)) if assets and config else None
        spec = bloom.from_args(of_model(args), known, base, tag, str(first.path))
    else:
        spec = spec_of(
            translated(args, str(first.path)), CORE, assets, config, known, tag, first.path, padded, settled=True
        )
    require_padding(spec, padded, args, tag, settings)
    if spec.family not in FAMILIES:
        raise UnsupportedError(
            f"{first.path}: its arguments are those of a {spec.family}, and Megatron-DeepSpeed is read of "
            f"{', '.join(FAMILIES)}"
        )
    first_layer = _first_layer(keys, spec)
    qkv, notes = _order(keys, spec, tp, settings, _ours(first), first_layer)
    slots, notes = list(slots_of(spec, tp, padded, {qkv}, first_layer)), (*rotated, *notes)
    if not bare:
        modules.require_files(tag, slots, by_file, spec.layers)
    multiple = vocab_multiple(args, first.path)
    return _Opened(
        run, tag, models, by_file, first_layer, tp, spec, padded, multiple, qkv, assets, config, slots, settings, notes
    )  # fmt: skip


def _require_rows(by_file: Mapping[str, Mapping[str, Fragment]], tp: int, padded: int, tag: Path, model: Path) -> None:
    """Refuse layer files whose embedding has other rows than the arguments in the model file say.

    Raises:
        SourceError: the rows differ, or there is no embedding.
    """
    rows = by_file.get(modules.file_of(EMBEDDING, 0), {}).get(f"{EMBEDDING}.word_embeddings.weight")
    if rows is None or not rows.shape:
        raise SourceError(f"{tag} holds no word_embeddings.weight in {modules.file_of(EMBEDDING, 0)}")
    if padded != rows.shape[0] * tp:
        raise SourceError(f"{model} says padded_vocab_size = {padded}, its embeddings have {rows.shape[0] * tp} rows")


def _ours(file: TorchFile) -> Mapping[str, Any]:
    """Return the record that a conversion of this project wrote into a model file; empty for files of a training."""
    ours = file.value.get(deepspeed.OURS)
    return ours if isinstance(ours, Mapping) else {}


def _with_vocab(settings: Settings, file: TorchFile, config: Mapping[str, Any] | None) -> Settings:
    """Return the settings, with the vocabulary size that the files record, unless the user or a config decides it.

    Raises:
        RefusedError: the user gave another size, or a config that has fewer tokens.
    """
    infos = (info for name in INFOS if isinstance(info := file.value.get(name), Mapping))
    vocab = next(
        (info["original_vocab_size"] for info in infos if "original_vocab_size" in info), _ours(file).get("vocab")
    )
    if vocab is None or "vocab" in settings.values:
        return settings
    recorded = positive_int(vocab, "original_vocab_size", str(file.path))
    if settings.vocab_size is None and config is None:
        return replace(settings, vocab_size=recorded)
    require_recorded(recorded, settings.vocab_size, (config or {}).get("vocab_size"), file.path)
    return settings


def _same_args(models: Mapping[int, TorchFile]) -> dict[str, Any]:
    """Return the arguments of the first model file, after comparing those that all ranks share (`SHARED`).

    Raises:
        SourceError: a file has no arguments, or files are of different models.
    """
    args = args_of(models[0])
    for file in models.values():
        other = args_of(file)
        for name in SHARED:
            if not _equal(other.get(name), args.get(name)):
                raise SourceError(
                    f"{file.path} says {name} = {short(other.get(name))}, {models[0].path} {short(args.get(name))}: "
                    "they are of different models"
                )
    return args


def _equal(first: Any, second: Any) -> bool:
    """Whether two values are equal; members of an enum are compared by class and arguments."""
    enums = [(value.module, value.name, value.args) for value in (first, second) if isinstance(value, Opaque)]
    return first == second or (len(enums) == 2 and enums[0] == enums[1])


def _require_topology(models: Mapping[int, TorchFile], args: Mapping[str, Any], tp: int) -> None:
    """Refuse files whose number or names contradict the parallel sizes and ranks in the arguments.

    Raises:
        SourceError: the parallel sizes differ, or a file was written by another rank than its name has.
    """
    pp = len(models) // tp
    for name, size in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        if args.get(name) not in (None, size):
            raise SourceError(f"{models[0].path} says {name} = {short(args[name])}, the files are of {size} ranks")
    for rank, file in models.items():
        own_rank, world = args_of(file).get("rank"), args.get("world_size")
        if type(own_rank) is not int or type(world) is not int or world < pp or world % pp:
            continue
        if own_rank % tp != rank % tp or own_rank // (world // pp) != rank // tp:
            raise SourceError(
                f"{file.path} was saved by rank {own_rank}, which belongs elsewhere: files are mixed up",
                "copy the files of all ranks again, each under its own name",
            )


def _first_layer(keys: Collection[str], spec: ModelSpec) -> int:
    """Return the number of the first layer, 2 or 3 depending on the tree: the one that fits the numbers in `keys` best.

    A family that BigScience's tree alone trains has the number of that tree.
    """
    numbers = {int(key.partition(".")[0]) for key in keys}

    def odd(first: int) -> int:
        norm = norm_number(first, spec.layers)
        return len(numbers ^ {EMBEDDING, *range(first, first + spec.layers), norm, norm + 1})

    own = FAMILIES[spec.family]
    return own if own == OF_BIGSCIENCE else min(FIRST_LAYERS, key=odd)


def _order(
    keys: Collection[str], spec: ModelSpec, tp: int, settings: Settings, ours: Mapping[str, Any], first_layer: int
) -> tuple[str, tuple[str, ...]]:
    """Return the order of query, key and value (one of `tables.ORDERS`), and notes for the user.

    Raises:
        OptionNeededError: query, key and value are in one matrix, and neither files nor user specify the order.
    """
    layout = settings.gqa_layout
    known = {
        "separate": any(key.endswith(".self_attention.query.weight") for key in keys),
        "blocked": ours.get("qkv") == "blocked",
        # BigScience's tree has one order; with one group on each rank both orders are the same
        "grouped": (ours.get("qkv") == "grouped" or first_layer != FIRST_LAYER or spec.kv_heads == tp != spec.heads),
    }
    for order, holds in known.items():
        if holds:
            return order, () if layout == "auto" else (f"--gqa-layout {layout} has no effect: there is one order",)
    if layout == "auto":
        raise OptionNeededError(
            "query, key and value are in one of two orders, and the files of Megatron-DeepSpeed do not say which",
            "--gqa-layout grouped for a training with code from before 2024-12-04 (group by group: its queries, key, "
            "value), blocked for newer code of deepspeedai (all queries, all keys, all values of a rank)",
            gqa_layout="grouped",
        )
    return layout, ()


def _tree(opened: _Opened) -> str | None:
    """Return the order of query, key and value in the tree that wrote a checkpoint, also where sizes make orders equal.

    None where neither files nor user specify it.
    """
    asked, ours = opened.settings.gqa_layout, _ours(opened.models[0]).get("qkv")
    if opened.qkv == "separate":
        return opened.qkv
    return ours if ours in ORDERS else None if asked == "auto" else asked


def _of_state(opened: _Opened, partitions: Mapping[int, list[Partition]], state: str) -> Checkpoint:
    """Return an optimizer state as a checkpoint; the weights are the twins of FP32 master weights, to be compared."""
    parts = modules.masters(opened.models, opened.tp, partitions, state, EMBEDDING)
    held_whole = {
        Place(file): {key: part.whole for (at, key), part in parts.items() if at == file} for file, _ in parts
    }
    placed, dropped = match(opened.slots, held_whole, DROPS, opened.tag)
    pieces = tuple(piece for each in placed for piece in place_pieces(each, parts[each.slot.place.file, each.key]))
    twins = _placed(opened)[0] if state == "fp32" else ()
    return _checkpoint(opened, (pieces, tuple(dropped)), twins)


def _placed(opened: _Opened) -> tuple[tuple[Placed, ...], tuple[str, ...]]:
    placed, dropped = match(
        opened.slots, {Place(file): fragments for file, fragments in opened.tensors.items()}, DROPS, opened.tag
    )
    return tuple(placed), tuple(dropped)


def _of_universal(opened: _Opened, state: str) -> Checkpoint:
    """Return an optimizer state of a universal checkpoint; layer files beside it are the twins of the masters."""
    key_of = partial(_key_of, opened.tag)
    parts = cut_again.parts(opened.tag, opened.models, state, opened.tp, key_of)
    embedding, spec = parts.get(f"{EMBEDDING}.word_embeddings.weight"), opened.spec
    rows = embedding.shape[0] if embedding and len(embedding.parts) == 1 and embedding.shape else opened.padded
    if rows < (spec.vocab or 0):
        raise SourceError(
            f"{opened.tag} holds {rows} rows of embeddings, the vocabulary has {spec.vocab}",
            "correct it with --vocab-size",
        )
    whole_slots = list(slots_of(spec, 1, rows, {opened.qkv}, opened.first_layer))
    ours = cut_again.is_ours(opened.models)
    placed = cut_again.placed(parts, whole_slots, opened.slots, DROPS, opened.tag, ours=ours)
    twins = _placed(opened)[0] if state == "fp32" and opened.tensors else ()
    return _checkpoint(opened, placed, twins, rows)


def _key_of(tag: Path, name: str) -> str:
    """Return the key of a parameter of the optimizer."""
    return modules.key_of(name, EMBEDDING, tag)[1]


def _progress(file: TorchFile) -> dict[str, Any]:
    """Return the progress of the training that a model file records in plain data (`OF_FILE`, `OF_ARGS`)."""
    args = vars(file.value["args"])
    entries = [(name, file.value.get(name)) for name in optimizer.OF_FILE]
    entries += [(name, args.get(name)) for name in optimizer.OF_ARGS]
    return {name: value for name, value in entries if value is not None and is_plain(value)}


def _checkpoint(
    opened: _Opened,
    placed: tuple[tuple[Placed, ...], tuple[str, ...]],
    twins: tuple[Placed, ...] = (),
    rows: int | None = None,
) -> Checkpoint:
    """Return a checkpoint of placed tensors, whose embedding has `rows` rows; None for those of the arguments."""
    pieces, dropped = placed
    rows = opened.padded if rows is None else rows
    state, tp = opened.models[0].value, opened.tp
    iteration = iteration_of(opened.models[0])
    shown = {"iteration": iteration, "folder": opened.tag.name, "padded_vocab": rows}
    details = MegatronDeepSpeed(
        kind="" if opened.tensors else UNIVERSAL,
        fresh="--finetune",
        shown=shown,
        arguments=tuple(args_of(opened.models[0])),
        iteration=iteration,
        vocab_multiple=opened.vocab_multiple,
        qkv=_tree(opened),
        progress=_progress(opened.models[0]),
    )
    files = tuple(sorted({piece.fragment.path for piece in pieces}))
    return Checkpoint(
        opened.run, opened.tag, NAME, opened.spec, pieces, dropped, files, {"tp": tp, "pp": len(opened.models) // tp},
        opened.assets, details, twins, opened.notes, settings=opened.settings,
        config=opened.config, padded_vocab=rows,
        state=tuple(name for name in STATE if state.get(name)), ties=TIES,
    )  # fmt: skip
