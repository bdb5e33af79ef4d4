"""Read and write FSDP checkpoints of all trainers: torch DCP folders, one dump per rank, full state dicts.

    .metadata, __0_0.distcp                       torch DCP: FSDP1, FSDP2, HSDP, TP x FSDP
    pytorch_model_fsdp_0/                         the same, of accelerate, HF Trainer and axolotl
    shard-00001-model-00001-of-00001.safetensors  torch DCP, by its Hugging Face writer
    pytorch_model_fsdp_0_rank0.bin                one dump for each rank: DTensors, sharded or flat tensors
    model_world_size_8_rank_0.pt                  the same, of verl
    pytorch_model_fsdp.bin                        a full state dict

Keys are those of Hugging Face, of torchtitan or of OLMo-core; the model may be anywhere in the saved dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, Settings, Target, slot_dtype
from formats.errors import RefusedError, SourceError, UnsupportedError, some
from formats.families.family import Family
from formats.fsdp import FSDP, native, nearby_config, olmo_core, whole_models
from formats.fsdp.contents import FULL, Listing, contents, lister, require_one_save
from formats.huggingface import folder as huggingface
from formats.huggingface import language_model, own_config
from formats.layout.pieces import Scattered, match_pieces
from formats.layout.placed import files_of
from formats.layout.slots import Slot
from formats.layout.table import Rule
from formats.layout.tensors import UNTRAINED
from formats.model import adapters
from formats.model.spec import ModelSpec, Spec, Verbatim
from formats.model.vocab_rows import EMBEDDING
from formats.optimizer import AnyGroup, Group, Lion, Muon, Optimizer, step_tensor
from formats.torch_files import dcp, dcp_writer, rank_dumps
from formats.torch_files.archive import TorchFile
from formats.torch_files.archive_plan import packed
from formats.torch_files.archive_writer import Small
from formats.torch_files.wrappers import unwrapped_keys

NAME = FSDP.name
INSIDE = ("", "pytorch_model_fsdp_0", "sharded", "actor", "policy", "model_and_optim")
"""Subfolders of the user's folder that the weights may be in."""
CONTAINERS = ("model", "state_dict", "module", "model_state_dict")
"""Names of the model in the saved dictionary, for when its keys do not tell."""
COPY = re.compile(
    r"(?:.+_)?(?:ema|swa|averaged?|teacher|target|ref(?:erence)?)(?:_(?:model|module|net|network|weights|policy))?"
)
"""Matches the names of models that are beside the one that a training changes: averages of it, teachers, references."""

FURTHER = re.compile(r"pytorch_model(?:_fsdp)?_\d+(?:_rank_?\d+)?(?:\.bin)?")
"""Matches the weights of the second and further models of a training by accelerate (1.15.0 checkpointing.py,
utils/fsdp_utils.py)."""

OPTIMIZER = "optim"
"""The name of the optimizer in the saved dictionary that is written, and the prefix of its names in others."""
GROUPS = "param_groups"
MORE: Mapping[type[AnyGroup], Mapping[str, Any]] = {
    Group: {
        "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
        "fused": None, "decoupled_weight_decay": True,
    },
    Lion: {},
    Muon: {},
}  # fmt: skip
"""Type of a parameter group: the further settings that are written, which are torch's AdamW's (torch/optim/adam.py,
2.13)."""


def detect(path: Path) -> bool:
    """Whether a folder looks like this format."""
    return any(lister(path / inside) for inside in INSIDE)


def tables() -> dict[str, tuple[Rule, ...]]:
    """The layouts with a trainer's own tensor names, by trainer and family; other layouts are Hugging Face's."""
    return {
        f"{trainer} {name}": table
        for trainer in native.TRAINERS
        for name, table in {**native.layouts(trainer), **whole_models.tables(trainer)}.items()
    }


def holders(_: Family) -> dict[str, bool]:
    """Every family fits an FSDP checkpoint."""
    return {NAME: True}


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open an FSDP checkpoint: its metadata and the headers of its files."""
    folder, list_tensors = next((path / inside, kind) for inside in INSIDE if (kind := lister(path / inside)))
    for place in dict.fromkeys((path, folder.parent if folder.name == INSIDE[1] else folder)):
        require_one_save(place, folder)
    listing = list_tensors(folder, settings)
    if settings.adapter == "only":
        return _read_adapter(path, folder, listing, settings)

    def known() -> Mapping[str, Any]:
        return contents(path, listing)

    assets = nearby_config.config_folder(path, folder, settings, known)
    config, uncovered, notes = huggingface.read_config(assets) if assets else None, None, tuple[str, ...]()
    base, names = config, list[str]()
    whole, tower = None, dict[str, Scattered]()
    spec: Spec
    if assets is None or config is None:
        spec = olmo_core.spec_of(next(nearby_config.configs(path, folder)), settings, known)
        tensors, dropped = _read_tensors(path, listing, settings)
    elif listing.flat is not None:
        spec, tensors, dropped = _read_flat(listing.flat, config, assets, settings)
    else:
        tensors, dropped = _read_tensors(path, listing, settings)
        names = list(tensors)
        tower = whole_models.tower_in(tensors, native.trainer_of(tensors))
        if tower:
            whole = whole_models.whole_of(config, tensors, native.TORCHTITAN, str(assets / "config.json"))
        part = language_model.select(whole.text if whole else config, tensors, settings, str(assets / "config.json"))
        spec, tensors = _spec_and_tensors(part.of(tensors), part.config, assets, settings)
        config, uncovered, notes = part.config, part.left, part.notes
    trainer = native.trainer_of(tensors)
    if base is not None:
        beside = nearby_config.own_folder(path, folder)
        own_config.require_same(beside, base, names, settings, None if whole else spec)
    if trainer:
        slots = _native_slots(spec, trainer, whole.table if whole else None)
    else:
        slots = huggingface.model_slots(spec, tensors)
    own = olmo_core.own_config(nearby_config.configs(path, folder)) if trainer == native.OLMO_CORE else None
    if own and assets and isinstance(spec, ModelSpec):
        olmo_core.require_same(own, settings, spec)
    biases = native.biases(slots, tensors, spec, settings.accept, path)
    drops = (*huggingface.drops(spec, tensors, settings), *native.DROPS, *map(re.escape, biases))
    _, pieces, without_weights = match_pieces(slots, tensors, drops, path)
    if isinstance(spec, Verbatim):
        _require_rows(tensors, spec, path)
    ranks = {"ranks": len(files_of(pieces))}
    unrecorded = () if own else native.notes(spec, trainer)
    notes = (*notes, *unrecorded, *_notes_on_a_copy(path, listing, settings))
    notes += tuple(_notes_on_others(path, folder, listing))
    unbounded = listing.unbounded and isinstance(spec, Verbatim)
    checkpoint = Checkpoint(
        path, folder, NAME, spec, pieces, (*dropped, *without_weights), listing.files, ranks, assets, config=config,
        unbounded=unbounded, left=uncovered, notes=notes,
    )  # fmt: skip
    return whole_models.join(whole, checkpoint, tower, settings) if whole else checkpoint


def _read_flat(
    files: Mapping[int, TorchFile], config: dict[str, Any], folder: Path, settings: Settings
) -> tuple[Spec, dict[str, Scattered], list[str]]:
    """The spec and tensors of FSDP1's flat parameters; names and shapes come from the family's table.

    Raises:
        UnsupportedError: no table describes the model, only a part of it is to be read, or it has experts.
    """
    if settings.only:
        raise UnsupportedError(
            "FSDP1's LOCAL_STATE_DICT records no shapes, and of a part of a model no names either",
            "save again with SHARDED_STATE_DICT",
        )
    try:
        spec = huggingface.read_spec(config, folder, settings)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"FSDP1's LOCAL_STATE_DICT records no shapes, they can only be had from a family's table: {error}",
            "save again with SHARDED_STATE_DICT",
        ) from None
    if spec.experts:
        raise UnsupportedError(
            "FSDP1's LOCAL_STATE_DICT records no shapes, and experts come fused or one by one",
            "save again with SHARDED_STATE_DICT",
        )
    shapes = {slot.keys[0]: slot.shape for slot in huggingface.model_slots(spec)}
    return spec, rank_dumps.load_flat(files, shapes, spec.tied), []


def _read_tensors(path: Path, listing: Listing, settings: Settings) -> tuple[dict[str, Scattered], list[str]]:
    """The tensors of the model by key, without the names of wrappers; and the names of all other tensors."""
    keys = _keys(path, listing, settings)
    read_keys = [key for key in keys if not any(re.fullmatch(drop, key) for drop in native.DROPS)]
    numbers = {keys[key] for key in read_keys}
    tensors = dict(zip(read_keys, listing.load([keys[key] for key in read_keys]), strict=True))
    return tensors, [".".join(names) for number, names in enumerate(listing.paths) if number not in numbers]


def _spec_and_tensors(
    tensors: dict[str, Scattered], config: dict[str, Any], folder: Path, settings: Settings
) -> tuple[Spec, dict[str, Scattered]]:
    """The spec of a model, and its tensors by the keys of its layout."""
    if native.trainer_of(tensors):
        return huggingface.read_spec(config, folder, settings), tensors
    spec = huggingface.spec_of({key: tensor.shape for key, tensor in tensors.items()}, config, folder, settings)
    outer = huggingface.outer_prefix(tensors, spec)
    return spec, {key.removeprefix(outer): tensor for key, tensor in tensors.items()}


def _read_adapter(path: Path, folder: Path, listing: Listing, settings: Settings) -> Checkpoint:
    """The adapter in the checkpoint of a training, as a checkpoint of its own with the tensor names of PEFT's files."""
    if listing.flat is not None:
        raise UnsupportedError(f"{path} holds flat parameters, which have no names", "save with SHARDED_STATE_DICT")
    keys = _keys(path, listing, settings)
    tensors = dict(zip(keys, listing.load([*keys.values()]), strict=True))
    base = _keys(path, listing, replace(settings, adapter="merged"))
    beside = {key: tensor.shape for key, tensor in zip(base, listing.load([*base.values()]), strict=True)}
    spec = adapters.spec_of({key: tensor.shape for key, tensor in tensors.items()}, beside)
    _, pieces, _ = match_pieces(huggingface.model_slots(spec), tensors, (), path)
    return Checkpoint(path, folder, NAME, spec, pieces, (), listing.files)


def _keys(path: Path, listing: Listing, settings: Settings) -> dict[str, int]:
    """The number in the listing of each tensor that is read, by its key without the names of wrappers."""
    container = _container(listing.paths, settings.container, path)
    keys: dict[str, int] = {}
    depth = len(container)
    joined = {
        number: ".".join(names[depth:])
        for number, names in enumerate(listing.paths)
        if names[:depth] == container and (depth or len(names) == 1)
    }
    known = unwrapped_keys([*joined.values()])
    for number, name in joined.items():
        key = known[name]
        if key in keys:
            raise SourceError(f"{path} holds {key} twice: {name} and {'.'.join(listing.paths[keys[key]])}")
        keys[key] = number
    return adapters.select(keys, settings.adapter, path)


def _container(paths: Sequence[tuple[str, ...]], wanted: str | None, where: Path) -> tuple[str, ...]:
    """The path of the model in the saved dictionary.

    Raises:
        RefusedError: several parts could be the model, or no part has the name that the user gave.
    """
    containers = list(dict.fromkeys(path[:-1] for path in paths))
    if wanted is not None:
        named = [container for container in containers if ".".join(container) == wanted]
        if not named:
            raise RefusedError(f"{where} holds no {wanted!r}", f"it holds {_names(containers)}")
        return named[0]
    embedded = {path[:-1] for path in paths if EMBEDDING.fullmatch(path[-1])}
    models = [
        container
        for container in containers
        if container in embedded and not any(part.startswith(OPTIMIZER) for part in container)
    ]
    models = models or [
        container for container in containers if container and container[-1] in CONTAINERS
    ]  # where no key tells
    models = models or [container for container in containers if not container] or containers
    if len(models) != 1:
        raise RefusedError(f"{where} could hold several models: {_names(models)}", "name one with --container")
    return models[0]


def _notes_on_a_copy(path: Path, listing: Listing, settings: Settings) -> Iterator[str]:
    """Note that all tensors are, by their names, of a model beside the trained one, which the user did not choose."""
    if listing.flat is not None or settings.container is not None:
        return
    container = _container(listing.paths, None, path)
    names = (".".join(names).split(".") for names in listing.paths if names[:-1] == container)
    for shared in takewhile(lambda parts: len({*parts}) == 1, zip(*names, strict=False)):
        if COPY.fullmatch(shared[0]):
            yield (
                f"all weights here are under {shared[0]!r}, the name of a model beside the one that is trained, such "
                "as an average or a teacher: they are taken for the model"
            )
            return


def _notes_on_others(path: Path, folder: Path, listing: Listing) -> Iterator[str]:
    """Note that weights of another checkpoint, or of a training's further models, are beside those in `folder`."""
    files = [file for file in folder.iterdir() if file.suffix == ".safetensors" or file.name == FULL]
    files += [file for file in path.iterdir() if FURTHER.fullmatch(file.name)]
    if others := sorted(str(file.relative_to(path)) for file in files if file not in (folder, *listing.files)):
        verb = "is" if len(others) == 1 else "are"
        yield f"{some(others, 3)} in {path} {verb} not read: weights of another checkpoint"


def _names(containers: Iterable[tuple[str, ...]]) -> str:
    return some([".".join(container) or "the top level" for container in containers], 8)


def _native_slots(spec: Spec, trainer: str, table: Sequence[Rule] | None = None) -> list[Slot]:
    """The physical tensors of a model under the keys of a trainer; by its family's table, unless another is given."""
    if table is not None and isinstance(spec, ModelSpec):
        return spec.slots_in(table, spec.sizes())
    layouts = native.layouts(trainer)
    if isinstance(spec, Verbatim) and spec.family in layouts:
        raise UnsupportedError(f"no table describes this {spec.family} with the names of {trainer}: {spec.why}")
    if not isinstance(spec, ModelSpec) or spec.family not in layouts:
        raise UnsupportedError(
            f"{native.TRAINERS[trainer].sign} is a name of {trainer}, whose {spec.family} has no table",
            f"there are {', '.join(layouts)}",
        )
    return spec.slots_in(layouts[spec.family], spec.sizes())


def _require_rows(tensors: Mapping[str, Scattered], spec: Verbatim, where: Path) -> None:
    """Refuse a model without a table whose embedding lacks its last rows, which only the vocabulary size shows.

    Raises:
        SourceError: the embedding has fewer rows than the vocabulary.
    """
    for key, tensor in tensors.items():
        if EMBEDDING.fullmatch(key) and tensor.shape and spec.vocab is not None and tensor.shape[0] < spec.vocab:
            raise SourceError(
                f"{where}: {key} has {tensor.shape[0]} rows, the vocabulary {spec.vocab}",
                "the last rank's file may be missing; a smaller vocabulary is right with --set vocab=N",
            )


# --- writing ---------------------------------------------------------------------------------------------------------


def write(
    root: Path,
    spec: Spec,
    dtypes: Mapping[tuple[str, int | None], str],
    ranks: int,
    optimizer: Optimizer | None = None,
    *,
    trainer: str | None = None,
    whole: whole_models.Written | None = None,
) -> Target:
    """Lay out a DCP folder that `dcp.load({"model": state_dict}, checkpoint_id=root)` reads on any number of ranks.

    With an optimizer it holds `{"model": …, "optim": …}` of torch's `get_state_dict`, which `set_state_dict` loads.
    Experts are fused, as transformers 5 holds them in memory.

    Args:
        root: the folder that the files are written to.
        spec: the model.
        dtypes: the element type of each logical tensor.
        ranks: the number of data files.
        optimizer: the moments, step and groups to write beside the weights, which are its FP32 master weights.
        trainer: the trainer whose own tensor names and prefix are used; None for the names of Hugging Face.
        whole: the model under the trainer's names, if it is one of images.
    """
    slots: Sequence[Slot]
    if whole:
        slots, dtypes = whole.slots, whole.dtypes(dtypes)
    else:
        slots = _native_slots(spec, trainer) if trainer else huggingface.model_slots(spec, memory=True)
    container = native.TRAINERS[trainer].container if trainer else (dcp_writer.CONTAINER,)
    paths: dict[str, dcp_writer.Keys] = {
        ".".join((*container, slot.keys[0])): (*container, slot.keys[0]) for slot in slots
    }
    stored = [dcp_writer.whole_slot(slot, name) for slot, name in zip(slots, paths, strict=True)]
    settings: dict[dcp_writer.Keys, bytes | Small] = {}
    if optimizer is not None:
        own = [slot for slot in slots if not (slot.replica or UNTRAINED.intersection(slot.rule.pattern.tensors))]
        # without a table, a further name of a parameter is a tensor of its own, and has no states
        trained = [slot for slot in own if any(optimizer.has(state, slot) for state in optimizer.dtypes)]
        for slot in trained:
            for state, of in optimizer.dtypes.items():
                if not optimizer.has(state, slot):
                    continue
                path = _states(slot, state, flat=bool(trainer))
                paths[".".join(path)] = path
                stored.append(dcp_writer.whole_slot(slot, ".".join(path), state, slot_dtype(slot, of)))
        settings = _settings(optimizer, trained, flat=bool(trainer))
        paths |= {".".join(map(str, path)): path for path in settings}
    objects = {".".join(map(str, path)): value for path, value in settings.items()}
    files, metadata = dcp_writer.layout(root, dcp_writer.by_rows(stored, ranks), dtypes, paths, objects)
    return Target(tuple(whole.files(files) if whole else files), {dcp.METADATA: metadata}, {})


def _states(slot: Slot, state: str, *, flat: bool) -> tuple[str, ...]:
    """The path of a parameter's state in torch's `get_optimizer_state_dict`, flattened or not."""
    path = ("state", slot.keys[0], state)
    return (OPTIMIZER, ".".join(path)) if flat else (OPTIMIZER, *path)


def _settings(optimizer: Optimizer, trained: Iterable[Slot], *, flat: bool) -> dict[dcp_writer.Keys, bytes | Small]:
    """The steps, and the parameter groups if they are known, by their paths in torch's `get_optimizer_state_dict`.

    Flattened, each parameter is a group of its own, with `initial_lr`, the learning rate that a schedule begins with
    (OLMo-core 3.0.0 optim/config.py, which replaces it by the rate of the training).

    Raises:
        UnsupportedError: a tensor would have to be in several parameter groups.
    """
    step = None if optimizer.step is None else step_tensor(optimizer.step)
    members: dict[AnyGroup, list[str]] = {group: [] for group in optimizer.groups.values()}
    by_keys: dict[dcp_writer.Keys, bytes | Small] = {}
    for slot in trained:
        groups = {optimizer.groups[name, slot.layer] for name in slot.rule.pattern.tensors if optimizer.groups}
        if len(groups) > 1:
            raise UnsupportedError(f"{slot.keys[0]} would have to be in {len(groups)} groups of the optimizer")
        for group in groups:
            members[group].append(slot.keys[0])
        if step is not None and not any(isinstance(group, Muon) for group in groups):
            by_keys[_states(slot, "step", flat=flat)] = step
    for number, (group, keys) in enumerate(members.items()):
        settings = {name: packed(value) for name, value in {**group._asdict(), **MORE[type(group)]}.items()}
        if flat:
            settings["initial_lr"] = packed(group.lr)
            by_keys |= {
                (OPTIMIZER, f"{GROUPS}.{key}.{name}"): value for key in keys for name, value in settings.items()
            }
        else:
            settings["params"] = packed(keys)
            by_keys |= {(OPTIMIZER, GROUPS, number, name): value for name, value in settings.items()}
    return by_keys
