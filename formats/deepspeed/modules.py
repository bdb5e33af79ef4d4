"""The modules of a pipeline by their numbers: the tensors in each file, and what the optimizer keeps of each.

    TAG/layer_{i:02d}-model_{tp:02d}-model_states.pt    the tensors of module i on a tensor parallel rank
    TAG/mp_rank_{mp:02d}_model_states.pt                all modules of a rank, where they are not a pipeline's

GPT-NeoX and Megatron-DeepSpeed save so. Facts: deepspeed/runtime/pipe/module.py, 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from formats.checkpoint import Checkpoint, Settings
from formats.deepspeed import folders as deepspeed
from formats.deepspeed import model_files, universal
from formats.deepspeed import partitions as zero_partitions
from formats.deepspeed.partitions import Partition
from formats.deepspeed.steps import require_one_step
from formats.disk.safetensors import Fragment
from formats.errors import RefusedError, SourceError, UnsupportedError, ranges, short, some
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
TIED = re.compile(r"tied_modules\.embed\.")
"""What the optimizer of a pipeline calls the embedding that two stages have."""
SHARED = "word_embeddings.weight"
"""What they keep alike of it (`tied_weight_attr`). The last stage has positions of its own, which nothing uses."""


def file_of(index: int, rank: int, *, layered: bool = True) -> str:
    """The file of a module of the model."""
    return f"layer_{index:02d}-model_{rank:02d}-model_states.pt" if layered else deepspeed.model_name(rank)


def numbered(table: Iterable[Rule], norm: int) -> list[Rule]:
    """A table with numbers of modules in its keys: `{norm}` is the last norm, and `{head}` comes after it."""
    names = {"{norm}": str(norm), "{head}": str(norm + 1)}
    return [replace(rule, key=re.sub(r"\{(?:norm|head)\}", lambda match: names[match[0]], rule.key)) for rule in table]


def require_whole_heads(spec: ModelSpec, tp: int) -> None:
    """Each rank has some groups of heads.

    Raises:
        RefusedError: they do not divide.
    """
    if spec.heads % tp or spec.kv_heads % tp:
        raise RefusedError(f"{spec.heads} heads in {spec.kv_heads} key/value groups do not divide over tp = {tp}")


def require_files(tag: Path, slots: Iterable[Slot], files: Collection[str], layers: int) -> None:
    """The files of all tensors of a model of so many layers are there.

    Raises:
        SourceError: some are not.
    """
    if lost := sorted({slot.place.file for slot in slots}.difference(files)):
        numbers = sorted({int(name[1]) for file in files if (name := saved_names.LAYER.fullmatch(file))})
        there = f", of a model of {layers} layers: the files there are number {ranges(numbers)}" if numbers else ""
        hint = "copy the files of all ranks into one folder; if all are there, num_layers is that of another model"
        raise SourceError(f"{tag} lacks {some(lost, 4)}{there}", hint)


def tensors(
    tag: Path,
    models: Mapping[int, TorchFile],
    ties: Sequence[str],
    key_of: Callable[[str, Path], str],
) -> tuple[dict[str, dict[str, Fragment]], int]:
    """The tensors of each file by key, the number of the module in front, and the tensor parallel size.

    Args:
        tag: the folder.
        models: the file of each model parallel rank.
        ties: what each of these says of the save.
        key_of: a key in a file of all modules, with the number in front.

    Raises:
        SourceError: a file is missing, or of another topology.
    """
    layers = {path.name: path for path in sorted(tag.iterdir()) if saved_names.LAYER.fullmatch(path.name)}
    if not layers and models[0].value.get("module") is None:
        raise SourceError(f"{tag} is a pipeline's, and lacks its layer_*-model_* files", "copy them from their nodes")
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


def is_layered(files: Iterable[str]) -> bool:
    """Whether files are those of a pipeline's modules."""
    return any(file.startswith("layer_") for file in files)


OfState = Callable[[Partitions, str], Checkpoint]
"""What the optimizer keeps under one of `optimizer.STATES`, as a checkpoint."""


def kept(tag: Path, models: Mapping[int, TorchFile], settings: Settings, of_state: OfState) -> Checkpoint:
    """What `--weights` asks for of an optimizer; moments with the master weights that prove whose they are."""
    state = str(settings.weights).replace("fp32-master", "fp32")
    partitions, notes = _partitions(tag, models, sorted({"fp32", state}), settings)
    proof = None if state == "fp32" else of_state(partitions, "fp32")
    source = of_state(partitions, state)
    return replace(source, proof=proof, notes=(*source.notes, *notes))


def states_of(tag: Path, models: Mapping[int, TorchFile], settings: Settings, of_state: OfState) -> universal.States:
    """Every state of an optimizer; each file is read once.

    Raises:
        SourceError: a parameter was never trained.
    """
    partitions, _ = _partitions(tag, models, None, settings)
    every = [partition for of_rank in partitions.values() for partition in of_rank]
    zero_partitions.require_trained(every)
    if any(MOMENTUM in partition.groups for partition in every):
        raise UnsupportedError(f"{tag} was trained with Muon, which is read of models with Hugging Face names alone")
    opened = {state: of_state(partitions, state) for state in every[0].groups}
    return universal.States(opened, models[0].value, every)


def _partitions(
    tag: Path, models: Mapping[int, TorchFile], states: Sequence[str] | None, settings: Settings
) -> tuple[dict[int, list[Partition]], list[str]]:
    """The partitions of each model parallel rank, and what the user should know of their steps."""
    by_rank = {rank: zero_partitions.open_partitions(tag, rank, states) for rank in models}
    zero_partitions.require_same_save([partition for of_rank in by_rank.values() for partition in of_rank])
    first = by_rank[0][0]
    return by_rank, require_one_step(models[0], first.path, {*first.steps}, settings.accept)


def masters(
    models: Mapping[int, TorchFile],
    tp: int,
    partitions: Partitions,
    state: str,
    embedding: int,
    *,
    layered: bool = True,
) -> dict[tuple[str, str], Scattered]:
    """What the optimizer keeps of each parameter, by the file and the key that the parameter itself has.

    A pipeline keeps what its first and last stage share twice: the second is a further copy.

    Args:
        models: the file of each model parallel rank.
        tp: tensor parallel size.
        partitions: the partitions of each model parallel rank.
        state: one of `optimizer.STATES`.
        embedding: the number of the module that embeds.
        layered: whether each module has files of its own.
    """
    tensors: dict[tuple[str, str], Scattered] = {}
    for rank, file in models.items():
        for name, tensor in zero_partitions.load(partitions[rank], model_files.param_shapes(file), state):
            key = TIED.sub(f"{embedding}.", name.removeprefix("sequential."))
            index = key.partition(".")[0]
            if not index.isdigit():
                raise UnsupportedError(f"{file.path}: the parameter {short(name)} has no number of a module")
            place = (file_of(int(index), rank % tp, layered=layered), key)
            if place not in tensors:
                tensors[place] = tensor
            elif key.endswith(SHARED):
                tensors[place] = tensor._replace(copies=tensors[place].copies + tensor.copies)
    return tensors
