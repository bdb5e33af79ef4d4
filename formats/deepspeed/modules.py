"""Checkpoints whose modules have numbers: the tensors in each file, and the optimizer states of each tensor.

    TAG/layer_{i:02d}-model_{tp:02d}-model_states.pt    pipeline: the tensors of module i on a tensor parallel rank
    TAG/mp_rank_{mp:02d}_model_states.pt                no pipeline: all modules of a rank

GPT-NeoX and Megatron-DeepSpeed save so. Facts: deepspeed/runtime/pipe/module.py, 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, Settings
from formats.deepspeed import folders as deepspeed
from formats.deepspeed import model_files, universal
from formats.deepspeed import partitions as zero_partitions
from formats.deepspeed.partitions import Partition
from formats.deepspeed.steps import require_one_step
from formats.disk.safetensors import Fragment
from formats.errors import OptionNeededError, RefusedError, SourceError, UnsupportedError, ranges, short, some
from formats.layout.pieces import Scattered
from formats.layout.slots import Slot
from formats.layout.table import Rule
from formats.model.spec import ModelSpec
from formats.optimizer import MOMENTUM
from formats.torch_files import saved_names
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.saves import require_same

Partitions = Mapping[int, list[Partition]]
"""The partitions of each model parallel rank."""
TIED = "tied_modules.embed."
"""The prefix that the optimizer of a pipeline has for the embedding module, which two stages share."""
SHARED = "word_embeddings.weight"
"""The tensor of that module which both stages keep equal (`tied_weight_attr`). The last stage has positions of its own,
which nothing uses."""


def file_of(index: int, rank: int, *, layered: bool = True) -> str:
    """The name of the file that holds a module.

    Args:
        index: the number of the module.
        rank: the tensor parallel rank.
        layered: whether each module has files of its own.
    """
    return f"layer_{index:02d}-model_{rank:02d}-model_states.pt" if layered else deepspeed.model_name(rank)


def with_module_numbers(table: Iterable[Rule], norm: int) -> list[Rule]:
    """A table with the numbers of modules in its keys: `{norm}`, the last norm, is `norm`, and `{head}` the next."""
    names = {"{norm}": str(norm), "{head}": str(norm + 1)}
    return [replace(rule, key=re.sub(r"\{(?:norm|head)\}", lambda match: names[match[0]], rule.key)) for rule in table]


def require_whole_heads(spec: ModelSpec, tp: int) -> None:
    """Refuse a tensor parallel size over which attention heads or key/value groups do not divide.

    Raises:
        RefusedError: they do not divide.
    """
    if spec.heads % tp or spec.kv_heads % tp:
        raise RefusedError(f"{spec.heads} heads in {spec.kv_heads} key/value groups do not divide over tp = {tp}")


def require_files(tag: Path, slots: Iterable[Slot], files: Collection[str], layers: int) -> None:
    """Refuse a folder that lacks files of the tensors of a model.

    Args:
        tag: the folder, for errors.
        slots: the tensors of the model.
        files: the names of the files that are there.
        layers: the number of layers of the model, for errors.

    Raises:
        SourceError: a file is missing.
    """
    if missing := sorted({slot.place.file for slot in slots}.difference(files)):
        numbers = sorted({int(name[1]) for file in files if (name := saved_names.LAYER.fullmatch(file))})
        numbers_note = (
            f", of a model of {layers} layers: the files there are number {ranges(numbers)}" if numbers else ""
        )
        hint = "copy the files of all ranks into one folder; if all are there, num_layers is that of another model"
        raise SourceError(f"{tag} lacks {some(missing, 4)}{numbers_note}", hint)


def tensors(
    tag: Path,
    models: Mapping[int, TorchFile],
    ties: Sequence[str],
    key_of: Callable[[str, Path], str],
) -> tuple[dict[str, dict[str, Fragment]], int]:
    """The tensors of each file by key, which begins with the number of the module; and the tensor parallel size.

    Args:
        tag: the folder.
        models: the model file of each model parallel rank.
        ties: the entries that are equal in all model files of one save.
        key_of: returns, for a key in a file of all modules, the key that begins with the number of the module.

    Raises:
        SourceError: a file is missing, or of another topology or save.
    """
    layers = {path.name: path for path in sorted(tag.iterdir()) if saved_names.LAYER.fullmatch(path.name)}
    if not layers and models[0].value.get("module") is None:
        raise SourceError(f"{tag} is a pipeline's, and lacks its layer_*-model_* files", "copy them from their nodes")
    require_ranks(models, ties)
    if not layers:
        modules = {file.path: model_files.module(file) for file in models.values()}
        by_file = {
            path.name: {key_of(key, path): tensor for key, tensor in every.items()} for path, every in modules.items()
        }
        return by_file, len(models)
    whole_models = [file.path.name for file in models.values() if file.value.get("module") is not None]
    if whole_models:
        raise SourceError(
            f"{tag} holds the layers of a pipeline, and a whole module in {whole_models[0]}: files of two saves",
            "remove those that are older",
        )
    by_file, ranks = {}, set[int]()
    for name, path in layers.items():
        file = read_torch(path)
        place = saved_names.LAYER.fullmatch(name)
        assert place is not None
        ranks.add(int(place[2]))
        by_file[name] = {
            f"{int(place[1])}.{key}": tensor
            for key, tensor in model_files.module(replace(file, value={"module": file.value})).items()
        }
    tp = max(ranks) + 1
    if len(models) % tp:
        raise SourceError(f"{tag} holds layers of {tp} tensor parallel ranks, but {len(models)} mp_rank files")
    return by_file, tp


def require_ranks(models: Mapping[int, TorchFile], ties: Sequence[str]) -> None:
    """Refuse model files of several topologies or saves. Args as for `tensors`.

    Raises:
        SourceError: a rank's file is missing, or of another topology or save.
    """
    for file in models.values():
        if not isinstance(file.value, Mapping):
            raise SourceError(f"{file.path} holds no model states")
        world = file.value.get("mp_world_size", len(models))
        if world != len(models):
            raise SourceError(
                f"{file.path} is one of {short(world)} model parallel ranks, {len(models)} are there",
                "ranks are missing, or files of another topology are beside them",
            )
    require_same({file.path: file.value.get for file in models.values()}, ties)


def is_layered(files: Iterable[str]) -> bool:
    """Whether each module has files of its own, as in a pipeline, by the names of the files."""
    return any(file.startswith("layer_") for file in files)


StateReader = Callable[[Partitions, str], Checkpoint]
"""A function that returns one of `optimizer.STATES` as a checkpoint."""


def requested(
    tag: Path,
    models: Mapping[int, TorchFile],
    settings: Settings,
    of_universal: Callable[[str], Checkpoint],
    of_state: StateReader,
    *,
    bare: bool,
) -> Checkpoint:
    """The optimizer state that `--weights` names, of a universal checkpoint or of partitions.

    Args:
        tag: the folder of the checkpoint.
        models: the model files, by rank.
        settings: the user's settings.
        of_universal: returns a state of a universal checkpoint.
        of_state: returns a state of partitions.
        bare: whether there are no weights beside the optimizer.
    """
    if universal.is_universal(tag):
        return _requested_universal_state(tag, models[0], settings, of_universal, bare=bare)
    return _requested_state(tag, models, settings, of_state)


def every_state(
    tag: Path,
    models: Mapping[int, TorchFile],
    settings: Settings,
    of_universal: Callable[[str], Checkpoint],
    of_state: StateReader,
) -> universal.States:
    """All states of an optimizer, each file read once. Args as for `requested`, errors as of `_states_of`."""
    if not universal.is_universal(tag):
        return _states_of(tag, models, settings, of_state)
    names = universal.states(tag)
    _require_step_of_universal(tag, models[0], settings)
    model = of_all_stages(models)
    return universal.States({state: of_universal(state) for state in names}, model, ())


def _requested_state(
    tag: Path, models: Mapping[int, TorchFile], settings: Settings, of_state: StateReader
) -> Checkpoint:
    """The optimizer state that `--weights` names; a moment with the FP32 master weights that prove its parameters."""
    state = str(settings.weights).replace("fp32-master", "fp32")
    partitions, notes = _partitions(tag, models, sorted({"fp32", state}), settings)
    zero_partitions.require_of_all([each for of_rank in partitions.values() for each in of_rank], state, tag)
    proof = None if state == "fp32" else of_state(partitions, "fp32")
    source = of_state(partitions, state)
    return replace(source, proof=proof, notes=(*source.notes, *notes))


def _requested_universal_state(
    tag: Path, model: TorchFile, settings: Settings, of_state: Callable[[str], Checkpoint], *, bare: bool
) -> Checkpoint:
    """The same of a universal checkpoint; without weights beside it (`bare`) the masters by default.

    Raises:
        OptionNeededError: the weights of the module are asked for, and there are none.
    """
    if settings.weights == "module":
        raise OptionNeededError(
            f"{tag} is a universal checkpoint, beside which there are no weights", "add --weights fp32-master"
        )
    state = (settings.weights or "fp32-master").replace("fp32-master", "fp32")
    notes = _require_step_of_universal(tag, model, settings)
    source = of_state(state)
    if settings.weights is None:
        notes.append(model_files.no_module({tensor.fragment.dtype for tensor in source.tensors}))
    proof = None if bare or state == "fp32" else of_state("fp32")
    return replace(source, proof=proof, notes=(*source.notes, *notes))


def of_all_stages(models: Mapping[int, TorchFile]) -> dict[str, Any]:
    """The content of the first model file, whose `param_shapes` have the parameters of all pipeline stages."""
    groups: list[dict[str, tuple[int, ...]]] = []
    for file in models.values():
        for number, group in enumerate(model_files.param_shapes(file)):
            groups += [{}] * (number == len(groups))
            groups[number] = groups[number] | group
    return {**models[0].value, "param_shapes": groups}


def _require_step_of_universal(tag: Path, model: TorchFile, settings: Settings) -> list[str]:
    """What the user should know of the steps of a universal checkpoint; see `require_one_step`."""
    return require_one_step(model, *universal.steps(tag, settings.accept), settings.accept)


def _states_of(
    tag: Path, models: Mapping[int, TorchFile], settings: Settings, of_state: StateReader
) -> universal.States:
    """All states of an optimizer; each file is read once.

    Raises:
        SourceError: a parameter was never trained.
        UnsupportedError: the run was trained with Muon, or keeps more than Adam's states.
    """
    partitions, _ = _partitions(tag, models, None, settings)
    every = [partition for of_rank in partitions.values() for partition in of_rank]
    zero_partitions.require_trained(every)
    if any(MOMENTUM in partition.groups for partition in every):
        raise UnsupportedError(f"{tag} was trained with Muon, which is read of models with Hugging Face names alone")
    opened = {state: of_state(partitions, state) for state in every[0].groups}
    known = all(file.value.get("param_shapes") is not None for file in models.values())
    return universal.States(opened, of_all_stages(models) if known else models[0].value, every)


def _partitions(
    tag: Path, models: Mapping[int, TorchFile], states: Sequence[str] | None, settings: Settings
) -> tuple[dict[int, list[Partition]], list[str]]:
    """The partitions of each model parallel rank, and notes for the user on their steps."""
    by_rank = {rank: zero_partitions.open_partitions(tag, rank, states) for rank in models}
    zero_partitions.require_same_save([partition for of_rank in by_rank.values() for partition in of_rank])
    first = by_rank[0][0]
    return by_rank, require_one_step(models[0], first.path, {*first.steps}, settings.accept)


def key_of(name: str, embedding: int, where: Path) -> tuple[int, str]:
    """The number of a parameter's module, and its key with that in front.

    Args:
        name: what the optimizer calls it.
        embedding: the number of the module that embeds.
        where: what to call its file in an error.

    Raises:
        UnsupportedError: the name has no number.
    """
    key = name.removeprefix("sequential.")
    key = f"{embedding}.{key.removeprefix(TIED)}" if key.startswith(TIED) else key
    index = key.partition(".")[0]
    if not index.isdigit():
        raise UnsupportedError(f"{where}: the parameter {short(name)} has no number of a module")
    return int(index), key


def name_of(key: str, embedding: int, *, tied: bool) -> str:
    """What the optimizer of a pipeline calls a parameter with such a key, the other way round."""
    return re.sub(rf"^{embedding}\.", TIED, key) if tied else key


def masters(
    models: Mapping[int, TorchFile],
    tp: int,
    partitions: Partitions,
    state: str,
    embedding: int,
    *,
    layered: bool = True,
) -> dict[tuple[str, str], Scattered]:
    """An optimizer state of each parameter, by the file and the key of the parameter's weights.

    A pipeline stores the state of a tensor that its first and last stage share twice: the second is a further copy.

    Args:
        models: the model file of each model parallel rank.
        tp: tensor parallel size.
        partitions: the partitions of each model parallel rank.
        state: one of `optimizer.STATES`.
        embedding: the number of the embedding module.
        layered: whether each module has files of its own.

    Raises:
        UnsupportedError: the name of a parameter does not begin with the number of a module.
    """
    tensors: dict[tuple[str, str], Scattered] = {}
    for rank, file in models.items():
        for name, tensor in zero_partitions.load(partitions[rank], model_files.param_shapes(file), state):
            index, key = key_of(name, embedding, file.path)
            place = (file_of(index, rank % tp, layered=layered), key)
            if place not in tensors:
                tensors[place] = tensor
            elif key.endswith(SHARED):
                tensors[place] = tensor._replace(copies=tensors[place].copies + tensor.copies)
    return tensors
