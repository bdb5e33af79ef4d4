"""Read checkpoints of GPT-NeoX: DeepSpeed's files, with the names and the layouts of NeoX.

    TAG/mp_rank_{tp:02d}_model_states.pt               sequential (pipe_parallel_size 0): keys sequential.{i}.*
    TAG/layer_{i:02d}-model_{tp:02d}-model_states.pt   pipeline: the same keys without sequential.{i}.
    TAG/configs/*.yml, *.json                          the settings
    TAG/zero/{parameter}/                              a universal checkpoint

The tensors of the modules are in `tables.py`. Facts: EleutherAI/gpt-neox at ea7aefd8, megatron/checkpointing.py; the
tests have checkpoints that GPT-NeoX wrote, with its own logits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import ASSETS, Checkpoint, Details, Settings
from formats.deepspeed import NEOX, cut_again, modules, universal
from formats.deepspeed import folders as deepspeed
from formats.deepspeed.neox import checks as neox_checks
from formats.deepspeed.neox.run_keys import require_known
from formats.deepspeed.neox.tables import GPT_NEOX, LLAMA, slots_of
from formats.deepspeed.neox.yml import from_neox, is_gated
from formats.deepspeed.neox.yml_file import config_of
from formats.deepspeed.partitions import Partition
from formats.disk.safetensors import Fragment
from formats.errors import SourceError, UnsupportedError, short
from formats.families.family import Family
from formats.huggingface import folder as huggingface
from formats.layout.pieces import Scattered, place_pieces
from formats.layout.placed import Placed, match
from formats.layout.slots import Place, Slot
from formats.layout.table import Rule
from formats.model import padding
from formats.model.spec import ModelSpec
from formats.torch_files import saved_names
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.pickle_values import Namespace

NAME = NEOX.name
UNIVERSAL = "a universal checkpoint of GPT-NeoX"
DROPS = (r".*\.rotary_emb\.inv_freq", r".*\._extra_state", r".*\.attention\.(?:masked_)?bias")
STATE = ("optimizer", "lr_scheduler", "random_rng_state")
"""Entries of the training state in the model files, beside the model."""
TIES = ("iteration", "global_steps", "global_samples", "skipped_steps")
"""Entries that are equal in all model files of one save: DeepSpeed's, and `iteration` in GPT-NeoX's client state
(checkpointing.py). The layer files of a pipeline hold nothing but tensors."""


@dataclass(frozen=True, kw_only=True)
class Neox(Details):
    """The settings that a GPT-NeoX run was saved with, and that a resharded checkpoint is written with again.

    Attributes:
        iteration: the iteration in the files.
        vocab_multiple: the vocabulary is padded to a multiple of this number times the tensor parallel size.
        layered: whether each module has files of its own, as in a pipeline.
        layout: the conditions of table rows that leave a choice.
    """

    iteration: int | None
    vocab_multiple: int
    layered: bool
    layout: frozenset[str]


def tables() -> dict[str, tuple[Rule, ...]]:
    """The layout tables by name."""
    return {"neox (Llama)": LLAMA, "neox (GPT-NeoX)": GPT_NEOX}


def holders(family: Family) -> dict[str, bool]:
    """Whether the format holds a family: GPT-NeoX has a kind of model for it."""
    return {NAME: bool(family.neox)}


# --- reading ---------------------------------------------------------------------------------------------------------


def detect(path: Path) -> bool:
    """Whether a folder holds DeepSpeed's files with the names of NeoX."""
    places = [path] if deepspeed.holds(path) else deepspeed.likely(path)
    for place in places:
        layers = [child for child in sorted(place.iterdir()) if saved_names.LAYER.fullmatch(child.name)]
        models = [child for child in sorted(place.iterdir()) if saved_names.MODEL.fullmatch(child.name)]
        for file in [*models[:1], *layers[:1]]:
            try:
                value = deepspeed.value_of(file)
            except SourceError:  # `read` will raise the error
                return bool(layers) or (place / "configs").is_dir()
            if isinstance(value, Mapping) and isinstance(value.get("args"), Namespace):
                return False  # of Megatron-DeepSpeed
            if isinstance(value, Mapping) and "args" in value and value.get("module") is None:
                return True  # of a pipeline, whose tensors are in layer files
            if universal.is_universal(place) and universal.is_numbered(place):
                return True
            module = value.get("module", value) if isinstance(value, Mapping) else None
            if isinstance(module, Mapping) and any(
                re.match(r"(?:sequential\.0\.)?word_emb", str(key)) for key in module
            ):
                return True
    return False


class _Model(NamedTuple):
    """The model of a checkpoint.

    Attributes:
        spec: the settings.
        yml: the merged yml.
        arguments: the keys of the yml, and of that saved with the weights where the user names another.
        assets: the folder of config.json, if there is one.
        config: the contents of config.json.
        padded: rows of the embedding.
        qkv: the condition of table rows for query, key and value: `mha`, `gqa` or `grouped`.
        mlp: the condition of table rows for gate and up: `fused` or `separate`.
        notes: messages for the user.
    """

    spec: ModelSpec
    yml: Mapping[str, Any]
    arguments: tuple[str, ...]
    assets: Path | None
    config: Mapping[str, Any] | None
    padded: int
    qkv: str
    mlp: str
    notes: list[str]


class _Opened(NamedTuple):
    """The opened files of a checkpoint, for its weights and its optimizer states alike.

    `tensors` has the tensors of each file; it is empty for a universal checkpoint without weights beside it, whose
    master weights are `masters`. `layered`: each module has files of its own, as in a pipeline.
    """

    run: Path
    tag: Path
    models: Mapping[int, TorchFile]
    tensors: Mapping[str, Mapping[str, Fragment]]
    masters: cut_again.Parts | None
    tp: int
    layered: bool
    model: _Model
    slots: list[Slot]
    settings: Settings


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a checkpoint: read the pickles of its files, but no weights."""
    opened = _open(path, settings)
    if settings.weights in (None, "module") and opened.tensors:
        pieces, dropped = _place(opened, opened.tensors, {})
        return _checkpoint(opened, pieces, dropped)
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
    bare = universal.is_universal(tag) and not _has_weights(tag, models)
    by_file: dict[str, dict[str, Fragment]] = {}
    masters = None
    if bare:
        modules.require_ranks(models, TIES)
        tp, layered = _topology(tag, models, settings)
        masters = _parts(tag, models, "fp32", tp)
        joined = _of_masters(masters, layered=layered)
    else:
        by_file, tp = modules.tensors(tag, models, TIES, _key_of)
        joined, layered = _of_files(by_file, tp), modules.is_layered(by_file)
    neox_checks.require_own_seeds(models, tp)
    model = _describe(run, tag, models, joined, tp, layered, settings)
    padded = -(-model.padded // tp) * tp  # a universal checkpoint may have no padding: then the vocabulary is whole
    slots = list(slots_of(model.spec, tp, padded, {model.qkv, model.mlp}, layered=layered))
    if not bare:
        modules.require_files(tag, slots, by_file, model.spec.layers)
    return _Opened(run, tag, models, by_file, masters, tp, layered, model, slots, settings)


class _Joined(NamedTuple):
    """The tensors of a model, of all ranks: the number of rows by key, and the tensors of each file of a rank."""

    rows: Mapping[str, int]
    by_file: Mapping[str, Mapping[str, Fragment]]


def _of_files(by_file: Mapping[str, Mapping[str, Fragment]], tp: int) -> _Joined:
    each = (pair for tensors in by_file.values() for pair in tensors.items())
    return _Joined({key: (fragment.shape or (0,))[0] * tp for key, fragment in each}, by_file)


def _has_weights(tag: Path, models: Mapping[int, TorchFile]) -> bool:
    """Whether there are weights beside a universal checkpoint: layer files, or modules in its model files."""
    layered = any(saved_names.LAYER.fullmatch(path.name) for path in tag.iterdir())
    return layered or all(isinstance(file.value, Mapping) and file.value.get("module") for file in models.values())


def _topology(tag: Path, models: Mapping[int, TorchFile], settings: Settings) -> tuple[int, bool]:
    """The tensor parallel size of the training of a universal checkpoint, and whether it is a pipeline's.

    Raises:
        SourceError: the tensor parallel size, of a pipeline 1 if neither its files nor its yml say it, does not divide
            the number of ranks.
    """
    layered = not any(name.startswith("sequential.") for name in universal.names(tag))
    args, tp = models[0].value.get("args"), len(models)
    if layered:
        noted = args.get("model_parallel_size") if isinstance(args, Mapping) else None
        tp = noted or config_of(tag, settings.config)[0].get("model_parallel_size", 1)
    if type(tp) is not int or tp < 1 or len(models) % tp:
        raise SourceError(f"{models[0].path} is one of {len(models)} ranks, with model_parallel_size {short(tp)}")
    return tp, layered


def _of_masters(masters: cut_again.Parts, *, layered: bool) -> _Joined:
    """The tensors of a universal checkpoint."""
    rows = {key: sum((part.shape or (0,))[0] for part in each.parts) for key, each in masters.items()}
    by_file: dict[str, dict[str, Fragment]] = {}
    for key, each in masters.items():
        for rank, part in enumerate(each.parts):
            file = modules.file_of(int(key.partition(".")[0]), rank, layered=layered)
            if len(part.copies[0]) == 1:
                by_file.setdefault(file, {})[key] = part.copies[0][0].fragment
    return _Joined(rows, by_file)


def _parts(tag: Path, models: Mapping[int, TorchFile], state: str, tp: int) -> cut_again.Parts:
    """A state of each trained parameter of a universal checkpoint, cut for the ranks of the training."""
    trained = {name for group in modules.of_all_stages(models)["param_shapes"] for name in group}
    skip = universal.copies(tag, trained, models[0].value.get("module") or ())
    return cut_again.parts(tag, models, state, tp, lambda name: modules.key_of(name, 0, tag)[1], skip)


def _of_universal(opened: _Opened, state: str) -> Checkpoint:
    """A state in a universal checkpoint; FP32 master weights with the module beside them to compare them with."""
    model, layered = opened.model, opened.layered
    if model.qkv == "grouped":
        raise UnsupportedError(
            f"{opened.tag} is a universal checkpoint with the queries, keys and values of code from before 2024-11-13, "
            "which are not read of it",
            "convert the checkpoint that it was made of: convert neox2hf",
        )
    known = opened.masters if state == "fp32" else None
    parts = _parts(opened.tag, opened.models, state, opened.tp) if known is None else known
    whole = list(slots_of(model.spec, 1, model.padded, {model.qkv, model.mlp}, layered=layered))
    ours = cut_again.is_ours(opened.models)
    pieces, dropped = cut_again.placed(parts, whole, opened.slots, DROPS, opened.tag, ours=ours)
    twins = _place(opened, opened.tensors, {})[0] if state == "fp32" and opened.tensors else ()
    return _checkpoint(opened, pieces, dropped, twins)


def _of_state(opened: _Opened, partitions: Mapping[int, list[Partition]], state: str) -> Checkpoint:
    """A state of the optimizer as a checkpoint; FP32 master weights with the module to compare them with."""
    parts = modules.masters(opened.models, opened.tp, partitions, state, 0, layered=opened.layered)
    whole = {file: {key: tensor.whole for (at, key), tensor in parts.items() if at == file} for file, _ in parts}
    pieces, dropped = _place(opened, whole, parts)
    twins = _place(opened, opened.tensors, {})[0] if state == "fp32" else ()
    return _checkpoint(opened, pieces, dropped, twins)


def _checkpoint(
    opened: _Opened, pieces: tuple[Placed, ...], dropped: tuple[str, ...], twins: tuple[Placed, ...] = ()
) -> Checkpoint:
    model, head, tp = opened.model, opened.models[0].value, opened.tp
    iteration = head.get("iteration")
    details = Neox(
        fresh="finetune: true",
        kind="" if opened.tensors else UNIVERSAL,
        shown={"iteration": iteration, "folder": opened.tag.name, "padded_vocab": model.padded},
        arguments=model.arguments,
        iteration=iteration,
        vocab_multiple=model.yml.get("make_vocab_size_divisible_by", 128),
        layered=opened.layered,
        layout=frozenset({model.qkv, model.mlp}),
    )
    topology = {"tp": tp} | ({"pp": len(opened.models) // tp} if opened.layered else {})
    files = tuple(sorted({piece.fragment.path for piece in pieces}))
    return Checkpoint(
        opened.run, opened.tag, NAME, model.spec, pieces, dropped, files, topology, model.assets, details, twins,
        tuple(model.notes), settings=opened.settings, config=model.config, run_config=model.yml,
        padded_vocab=model.padded, state=tuple(name for name in STATE if head.get(name)), ties=TIES,
    )  # fmt: skip


def _place(
    opened: _Opened, tensors: Mapping[str, Mapping[str, Fragment]], parts: Mapping[tuple[str, str], Scattered]
) -> tuple[tuple[Placed, ...], tuple[str, ...]]:
    """The pieces of each tensor of the layout, and the keys that were dropped.

    Args:
        opened: the checkpoint.
        tensors: the tensors of each file.
        parts: the tensors that are in pieces, by file and key.
    """
    if opened.model.qkv == "grouped":
        from formats.deepspeed.neox import gqa_order

        tensors, parts = gqa_order.split(opened.model.spec, tensors, parts, opened.tp)
    placed, dropped = match(
        opened.slots, {Place(file): of_file for file, of_file in tensors.items()}, DROPS, opened.tag
    )
    pieces = (
        piece
        for placed_tensor in placed
        for piece in (
            place_pieces(placed_tensor, parts[placed_tensor.slot.place.file, placed_tensor.key])
            if (placed_tensor.slot.place.file, placed_tensor.key) in parts
            else [placed_tensor]
        )
    )
    return tuple(pieces), tuple(dropped)


def _describe(
    run: Path,
    tag: Path,
    models: Mapping[int, TorchFile],
    joined: _Joined,
    tp: int,
    layered: bool,
    settings: Settings,
) -> _Model:
    """The model of a checkpoint, from its yml, its shapes, and the config.json that may travel with it.

    Raises:
        SourceError: yml and files do not belong together, or the vocabulary has more tokens than the embedding rows.
        RefusedError: the vocabulary is too small for the rows of the embedding, or is another than a conversion
            recorded; or yml and config contradict each other.
    """
    yml, where = config_of(tag, settings.config)
    neox_checks.require_same_model(models, yml, settings, where, tp)
    accepted, arguments = require_known(yml, where, settings.accept), tuple(yml)
    assets = next(
        (folder for folder in (settings.config, run / ASSETS) if folder and (folder / "config.json").is_file()), None
    )
    config = huggingface.read_config(assets) if assets else None
    base = huggingface.read_spec(config, assets, Settings()) if assets and config is not None else None
    known = models[0].value.get(deepspeed.OURS)
    known = known if isinstance(known, Mapping) else {}
    if type(known.get("vocab")) is int and "vocab" not in settings.values:
        padding.require_recorded(known["vocab"], settings.vocab_size, base and base.vocab, models[0].path)
    vocab = settings.vocab_size or (base.vocab if base else known.get("vocab"))
    keys = joined.rows.keys()
    padded = _rows(joined, r"word_embeddings\.weight")
    old = any(key.endswith("mlp.w1.weight") for key in keys)
    inner = _rows(joined, r"mlp\.(?:linear1|dense_h_to_4h|w1)\.weight")
    biases = neox_checks.require_same_biases(keys, yml, where, tag)
    ffn, family = inner // 2 if is_gated(yml) and not old else inner, base.family if base else known.get("family")

    def described(config: Mapping[str, Any], name: str) -> ModelSpec:
        return from_neox({**config, "model_parallel_size": tp}, settings.values, ffn, biases, vocab, name, family)

    spec = described(yml, where)
    if settings.config not in (None, assets):
        remarks, keys_of_saved = neox_checks.require_same_yml(spec, described, tag, settings, where)
        accepted, arguments = [*dict.fromkeys(accepted + remarks)], (*arguments, *keys_of_saved)
    if spec.vocab is not None and spec.vocab > padded:
        raise SourceError(
            f"{tag} holds {padded} rows of embeddings, the vocabulary has {spec.vocab}", "correct it with --vocab-size"
        )
    padding.require_rows(spec.vocab, padded, _unit(yml, models[0], tp, padded), tag, settings.values)
    if base:
        neox_checks.require_same_config(spec, base, settings, where)
    notes = accepted + neox_checks.require_same_topology(models, yml, where, tp, layered=layered)
    qkv = "mha"
    if spec.kv_heads != spec.heads:
        if known.get("gqa_layout") == "blocked":
            qkv = "gqa"
            if settings.gqa_layout == "grouped":
                notes.append("--gqa-layout grouped has no effect: the files say that they are blocked")
        else:
            from formats.deepspeed.neox import gqa_order

            qkv, remarks = gqa_order.choose(spec, joined.by_file, tp, settings.gqa_layout, old)
            notes += remarks
    elif settings.gqa_layout != "auto":
        notes.append(f"--gqa-layout {settings.gqa_layout} has no effect: no heads share keys")
    return _Model(spec, yml, arguments, assets, config, padded, qkv, "separate" if old else "fused", notes)


def _key_of(key: str, path: Path) -> str:
    """A key without its prefix `sequential.`.

    Raises:
        SourceError: the key has no such prefix.
    """
    if not key.startswith("sequential."):
        raise SourceError(f"{path} holds {key}, which is no name of GPT-NeoX")
    return key.removeprefix("sequential.")


def _rows(joined: _Joined, key: str) -> int:
    """The number of rows of the first tensor whose key ends with `key`, a regular expression.

    Raises:
        SourceError: there is no such tensor.
    """
    rows = next((rows for name, rows in joined.rows.items() if rows and re.search(rf"\.{key}$", name)), None)
    if rows is None:
        raise SourceError(f"no file holds a tensor {key.replace(chr(92), '')}")
    return rows


def _unit(config: Mapping[str, Any], model: TorchFile, tp: int, padded: int) -> int:
    """The number of rows that the padded vocabulary is a multiple of; all rows if that is not known."""
    args = model.value.get("args")
    noted = args.get("make_vocab_size_divisible_by") if isinstance(args, Mapping) else None
    return padding.unit_of(noted or config.get("make_vocab_size_divisible_by", 128), tp, padded)
