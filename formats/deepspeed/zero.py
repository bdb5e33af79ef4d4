"""DeepSpeed checkpoints of models with Hugging Face names, as DeepSpeed, the HF Trainer and accelerate save them.

    RUN/latest, RUN/TAG/                                  engine.save_checkpoint, and accelerate's save_state
    checkpoint-N/latest, checkpoint-N/global_stepN/       HF Trainer; of stage 3 often the only weights there are
    TAG/mp_rank_00_model_states.pt                        stages 0 to 2
    TAG/zero_pp_rank_{dp}_mp_rank_00_model_states.pt      stage 3

What the partitions hold is in `partitions.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint, Details, Settings
from formats.deepspeed import ZERO, model_files, universal
from formats.deepspeed import folders as deepspeed
from formats.deepspeed import partitions as zero_partitions
from formats.disk.safetensors import FLOATS, Fragment
from formats.errors import OptionNeededError, SourceError, UnsupportedError, short, some
from formats.families.family import Family
from formats.huggingface import folder as huggingface
from formats.huggingface import text_alone
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import Scattered, in_one, scattered, spread, whole_part
from formats.layout.placed import Placed, files_of, match
from formats.layout.slots import ALONE, Slot
from formats.layout.table import Rule
from formats.model import adapters
from formats.model.spec import ModelSpec
from formats.optimizer import STATES
from formats.torch_files import saved_names
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.saves import require_same
from formats.torch_files.wrappers import unwrapped

NAME = ZERO.name
WEIGHTS = {"module": "module", "fp32-master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""What the user can ask for: its name in `optimizer.STATES`."""
TIES = ("global_steps", "global_samples", "skipped_steps")
"""What each model file says of the save that it is of (deepspeed 0.19.8, runtime/engine.py `_get_checkpoint_state`).
The partitions have Adam's step (`partitions.py`)."""
OF_RANK = (*TIES, "mp_world_size", "frozen_param_fragments")
"""What counts of the model files of stage 3 but the first, which says the rest: a thousand of them are a gigabyte."""
OF_NEOX = re.compile(r"(?:sequential\.)?(?:\d+|tied_modules)\.")
"""How the names of GPT-NeoX begin."""


def detect(path: Path) -> bool:
    """Whether a folder is DeepSpeed's."""
    return deepspeed.detect(path)


def tables() -> dict[str, tuple[Rule, ...]]:
    """None: it cuts the tensors of Hugging Face or GPT-NeoX in flat parts."""
    return {}


def holders(_: Family) -> dict[str, bool]:
    """It holds every family."""
    return {NAME: True}


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a checkpoint: the pickles of its files, none of the weights."""
    run, tag = deepspeed.locate(path, settings.tag)
    models = _models(tag)
    whole = universal.is_universal(tag)
    third = bool(saved_names.MODEL_OF_STAGE_3.fullmatch(models[0].path.name))
    modules = model_files.module(models[0])
    bare = third or (whole and all(fragment.shape == (0,) for fragment in modules.values()))
    wanted = settings.weights or ("fp32-master" if bare else "module")
    notes = []
    if wanted == "module" and bare:
        kind = "a universal checkpoint" if whole else "of stage 3"
        raise OptionNeededError(f"{tag} is {kind}, whose model files hold no weights", "add --weights fp32-master")
    notes += zero_partitions.require_one_step(models[0], *_steps(tag), settings.accept)
    notes += model_files.left_out(models[0])
    if wanted == "module":
        tensors = dict(_module(models[0], modules))
    elif whole:
        tensors = dict(_universal(tag, models[0], WEIGHTS[wanted]))
    else:
        tensors = dict(_states(tag, models, modules, WEIGHTS[wanted]))
    tensors |= _aliases(models[0].value, tensors)
    keys = _keys(tensors, tag, settings.adapter)
    assets, part = _part(path, run, tag, settings, keys)
    keys = part.of(keys)
    shapes, config = {key: tensors[name].shape for key, name in keys.items()}, part.config or None
    spec = huggingface.spec_of(shapes, part.config, assets, settings) if assets else adapters.spec_of(shapes)
    slots, drops = huggingface.model_slots(spec, keys), huggingface.drops(spec, keys, settings)
    if whole and wanted != "module":
        _require_trained(tag, models[0].value, slots if isinstance(spec, ModelSpec) else None, keys.keys())
    placed, dropped = match(slots, {ALONE: {key: tensors[name].whole for key, name in keys.items()}}, drops, tag)
    pieces = _spread(placed, keys, tensors)
    twins = _twins(placed, keys, modules) if wanted == "fp32-master" and not bare else ()
    if settings.weights is None and bare and settings.adapter is None:
        notes.append(_no_module({one.fragment.dtype for one in placed}))
    state = models[0].value
    topology = {"dp": state.get("dp_world_size", 1)}
    details = Details(shown={"iteration": state.get("global_steps"), "folder": tag.name})
    files = tuple(sorted(files_of(pieces)))
    proof = None
    if WEIGHTS[wanted] in ("exp_avg", "exp_avg_sq") and not bare:
        proof = read(path, replace(settings, weights="fp32-master"))
    left = tuple(dropped)
    return Checkpoint(
        run, tag, NAME, spec, pieces, left, files, topology, assets, details, twins, tuple(notes), proof,
        settings=settings, config=config, ties=TIES, left=part.left,
    )  # fmt: skip


def _part(
    path: Path, run: Path, tag: Path, settings: Settings, keys: Collection[str]
) -> tuple[Path | None, text_alone.Alone]:
    """The folder of the config, and what is read of the model; an adapter alone has no config."""
    if settings.adapter == "only":
        return None, text_alone.Alone({}, {key: key for key in keys})
    assets = _config_folder(path, run, tag, settings)
    return assets, text_alone.alone(huggingface.read_config(assets), keys, settings, str(assets / "config.json"))


def _spread(placed: Sequence[Placed], keys: Mapping[str, str], tensors: Mapping[str, Scattered]) -> tuple[Placed, ...]:
    return tuple(piece for one in placed for piece in spread(one, tensors[keys[one.key]]))


def _models(tag: Path) -> list[TorchFile]:
    """The model file, or in stage 3 that of each data parallel rank.

    Raises:
        SourceError: one is missing, or files of several topologies are there.
        UnsupportedError: the model is cut over several model parallel ranks, and nothing tells how.
    """
    deepspeed.require_no_experts(tag)
    if universal.is_universal(tag):
        return [_file(path) for path in sorted(tag.iterdir()) if deepspeed.is_model(path.name)][:1]
    shards: dict[int, Path] = {}
    for path in sorted(tag.iterdir()):
        name = saved_names.MODEL_OF_STAGE_3.fullmatch(path.name)
        if name and int(name[2]):
            raise UnsupportedError(f"{path} is of a second model parallel rank, whose layout is not known")
        if name and shards.setdefault(int(name[1]), path) is not path:
            raise SourceError(f"{tag} holds two files of rank {int(name[1])}: {shards[int(name[1])].name}, {path.name}")
    if not shards:
        files = deepspeed.model_files(tag)
        if len(files) > 1:
            raise UnsupportedError(
                f"{tag} holds {len(files)} model parallel ranks of a model whose layout is not known",
                "`convert neox2hf` knows that of GPT-NeoX; what DeepSpeed's own tensor parallelism cuts, it gathers",
            )
        return [_require_alone(_file(files[0]))]
    if any(saved_names.MODEL.fullmatch(path.name) for path in tag.iterdir()):
        raise SourceError(f"{tag} holds model files of stage 3 and of another stage", "remove those that are older")
    first = min(shards)
    opened = {first: _file(shards[first])}
    opened |= {rank: _rank(path, opened[first]) for rank, path in sorted(shards.items()) if rank != first}
    world = opened[first].value.get("dp_world_size")
    count = world if isinstance(world, int) else max(opened) + 1
    if count > deepspeed.MOST_RANKS:
        raise SourceError(f"{opened[first].path} claims {count} data parallel ranks")
    require_same({file.path: file.value.get for file in opened.values()}, TIES)
    lost = sorted(set(range(count)) - set(opened))
    if lost or len(opened) > count:
        names = ", ".join(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in lost[:4])
        raise SourceError(
            f"{tag} is of {count} data parallel ranks, {len(opened)} are there"
            + (f"; it lacks {names}" if lost else ""),
            "copy them from their nodes" if lost else "remove the files of another run",
        )
    return [_require_alone(file) for file in opened.values()]


def _require_alone(file: TorchFile) -> TorchFile:
    """A model of one model parallel rank."""
    world = file.value.get("mp_world_size", 1)
    if world not in (1, None):
        raise UnsupportedError(
            f"{file.path} is one of {short(world)} model parallel ranks of a model whose layout is not known"
        )
    return file


def _file(path: Path) -> TorchFile:
    file = read_torch(path)
    if not isinstance(file.value, Mapping):
        raise SourceError(f"{path} holds no model states of DeepSpeed")
    experts = file.value.get("num_experts")  # of each MoE layer: engine.py `_save_moe_checkpoint`, 0.19.8
    if experts or "ds_autoep_layers" in file.value:
        said = f"num_experts = {short(experts)}" if experts else "ds_autoep_layers"
        raise UnsupportedError(
            f"{path} is of a model with DeepSpeed's MoE layers (it has {said}): not supported", deepspeed.WITH_EXPERTS
        )
    return file


def _rank(path: Path, first: TorchFile) -> TorchFile:
    """What a further rank of stage 3 says, which lays out the same parameters in the same order as the first."""
    file = _file(path)
    if "param_shapes" in file.value:
        here, there = ([list(group.items()) for group in model_files.param_shapes(one)] for one in (file, first))
        if here != there:
            pairs = zip(chain(*here), chain(*there), strict=False)
            (ours, _), (theirs, _) = next((pair for pair in pairs if pair[0] != pair[1]), (("nothing", ()),) * 2)
            raise SourceError(
                f"{path} and {first.path} lay out different parameters, first {short(ours)} and {short(theirs)}: files "
                "of different runs",
                "copy the files of one save from all nodes",
            )
    kept = {name: file.value[name] for name in OF_RANK if name in file.value}
    return replace(file, value=kept, storages=file.storages if kept.get("frozen_param_fragments") else {})


def _module(file: TorchFile, modules: Mapping[str, Fragment]) -> Iterator[tuple[str, Scattered]]:
    """The 16-bit weights, buffers included. An empty placeholder of stage 3 is none."""
    shapes = {name: shape for group in _groups(file) for name, shape in group.items()}
    for name, fragment in modules.items():
        if fragment.shape != (0,) or shapes.get(name, (0,)) == (0,):
            yield name, in_one(name, fragment)


def _groups(file: TorchFile) -> Sequence[Mapping[str, tuple[int, ...]]]:
    return model_files.param_shapes(file) if file.value.get("param_shapes") is not None else ()


def _states(
    tag: Path, models: Sequence[TorchFile], modules: Mapping[str, Fragment], state: str
) -> Iterator[tuple[str, Scattered]]:
    """What the optimizer keeps of each parameter; and what it keeps nothing of, as the model has it."""
    first = models[0]
    if first.value.get("optimizer") is not None:
        tensors = dict(model_files.whole(first, state, _trained(first, modules)))
    else:
        partitions = zero_partitions.open_partitions(tag, 0, sorted({"fp32", state}))
        _require_same_stage(first, partitions)
        model_files.require_of_module(first, model_files.param_shapes(first), modules)
        if partitions[0].stage == 3 and len(partitions) != len(models):
            raise SourceError(f"{tag} holds {len(models)} model files and {len(partitions)} files of optimizer states")
        tensors = dict(zero_partitions.load(partitions, model_files.param_shapes(first), state))
        tensors |= dict(model_files.frozen(models if partitions[0].stage == 3 else models[:1]))
    others = {name: one for name, one in modules.items() if name not in tensors}
    aliases = _shared(first.value)
    untrained = [*(first.value.get("frozen_param_shapes") or ()), *(_trained(first, others).keys() - aliases.keys())]
    if untrained and state != "fp32":
        names = some(sorted({*map(str, untrained)}), 3)
        raise UnsupportedError(
            f"{tag} has no {state} of frozen parameters: {names}", "--weights module or fp32-master has all tensors"
        )
    yield from tensors.items()
    yield from ((name, one) for name, one in _module(first, others) if name not in aliases)


def _universal(tag: Path, model: TorchFile, state: str) -> Iterator[tuple[str, Scattered]]:
    """What is in a universal checkpoint. Those that DeepSpeed makes of stage 3 are flat: the model has the shapes."""
    shapes = {name: shape for group in _groups(model) for name, shape in group.items()}
    for name, file, ref in universal.tensors(tag, state):
        if OF_NEOX.match(name):
            raise UnsupportedError(
                f"{tag} is a universal checkpoint with the names of GPT-NeoX, such as {short(name)}, which is not read",
                "convert the checkpoint that it was made of: convert neox2hf",
            )
        fragment = file.fragment(ref, name)
        shape = shapes.get(name, fragment.shape)
        if prod(shape) != prod(fragment.shape):
            raise SourceError(f"{file.path} holds {prod(fragment.shape)} elements, its model has {list(shape)}")
        if shape != fragment.shape and len(fragment.shape) != 1:
            raise SourceError(f"{file.path} holds {list(fragment.shape)}, its model has {list(shape)}")
        if state == "fp32" and fragment.dtype != "F32":
            raise SourceError(f"{file.path} holds {fragment.dtype}, a master is F32")
        if fragment.dtype not in FLOATS:
            raise SourceError(f"{file.path} holds {state} of {short(name)} as {fragment.dtype}, which is no float")
        part = whole_part(shape) if shape == fragment.shape else Cut(((0, prod(shape)),), flat=True)
        yield name, scattered(name, shape, fragment.dtype, [Piece(part, fragment)])


class Training(NamedTuple):
    """What a training keeps of every parameter that it trains, by DeepSpeed's name; every file is read once.

    Attributes:
        states: each of `optimizer.STATES`.
        module: the tensors that the model computes with; in stage 3 empty ones, or none.
        model: what the first model file says.
        shapes: the parameters of each flat group.
        partitions: what each rank holds; none of a universal checkpoint.
    """

    states: Mapping[str, Mapping[str, Scattered]]
    module: Mapping[str, Fragment]
    model: Mapping[str, Any]
    shapes: Sequence[Mapping[str, tuple[int, ...]]]
    partitions: Sequence[zero_partitions.Partition]


def _require_trained(tag: Path, model: Mapping[str, Any], slots: Sequence[Slot] | None, keys: Collection[str]) -> None:
    """A universal checkpoint holds what was trained, and nothing else.

    Args:
        tag: its folder.
        model: what its model file says.
        slots: what the model consists of; without them the model file has to say what it leaves out.
        keys: what there is.

    Raises:
        SourceError: something was not trained.
    """
    marked = model.get(deepspeed.OURS)
    lists = [
        model.get("frozen_param_shapes"),
        model.get("buffer_names"),
        *(marked.values() if isinstance(marked, dict) else ()),
    ]
    wanted = {unwrapped(str(name)) for names in lists if isinstance(names, list | dict) for name in names}
    if slots is not None:
        needed = [slot for slot in slots if "optional" not in slot.rule.conditions]
        wanted = {slot.keys[0] for slot in needed if not any(key in keys for key in slot.keys)}
    lost = sorted(wanted.difference(keys))
    if lost:
        raise SourceError(
            f"{tag} is a universal checkpoint, which holds no parameters that were not trained: it lacks "
            f"{some(lost, 8)}",
            "convert the checkpoint that it was made of: convert zero2hf",
        )


def trained(tag: Path, accept: Collection[str] = ()) -> Training:
    """Open the optimizer states of a checkpoint; `accept` are the deviations that the user names.

    Raises:
        SourceError: its files are damaged, missing, or of different saves.
        UnsupportedError: it is of stage 0, which keeps no names.
    """
    first = _models(tag)[0]
    if first.value.get("optimizer") is not None:
        raise UnsupportedError(f"{tag} is of stage 0, whose optimizer keeps no names", "train a step with stage 1")
    zero_partitions.require_one_step(first, *_steps(tag), accept)
    shapes = model_files.param_shapes(first)
    if universal.is_universal(tag):
        states = {state: dict(_universal(tag, first, state)) for state in STATES}
        return Training(states, model_files.module(first), first.value, shapes, ())
    partitions = zero_partitions.open_partitions(tag, 0, STATES)
    _require_same_stage(first, partitions)
    zero_partitions.require_trained(partitions)
    states = {state: dict(zero_partitions.load(partitions, shapes, state)) for state in STATES}
    module = model_files.module(first)
    model_files.require_of_module(first, shapes, module)
    module = {} if partitions[0].stage == 3 else module
    return Training(states, module, first.value, shapes, partitions)


def states_of(source: Checkpoint, training: Training) -> dict[str, Checkpoint]:
    """The optimizer states of an opened checkpoint, each as a checkpoint of its own.

    Args:
        source: the checkpoint.
        training: what `trained` gave of its `home`.

    Raises:
        UnsupportedError: a tensor of the model is not trained.
    """
    checkpoints = {}
    for state, each in training.states.items():
        tensors = {**each, **_aliases(training.model, each)}
        keys = _keys(tensors, source.home)
        slots = huggingface.model_slots(source.spec, keys)
        needed = [slot for slot in slots if "optional" not in slot.rule.conditions]
        lost = [slot.keys[0] for slot in needed if not any(key in keys for key in slot.keys)]
        if lost:
            raise UnsupportedError(
                f"{source.home} holds no {state} of {len(lost)} tensors, such as {lost[0]}: they were not trained",
                "an optimizer moves with a model that is trained as a whole; convert the weights alone",
            )
        whole = {key: tensors[name].whole for key, name in keys.items()}
        placed, dropped = match(
            slots, {ALONE: whole}, huggingface.drops(source.spec, keys, source.settings), source.home
        )
        pieces = _spread(placed, keys, tensors)
        checkpoints[state] = replace(
            source,
            tensors=pieces,
            dropped=tuple(dropped),
            files=tuple(sorted(files_of(pieces))),
            twins=_twins(placed, keys, training.module) if state == "fp32" else (),
            notes=(),
            proof=None,
        )
    return checkpoints


def _steps(tag: Path) -> tuple[Path | None, Collection[float]]:
    """The steps that an optimizer has made, and the file that says it."""
    if universal.is_universal(tag):
        path, made = universal.first_step(tag)
        return path, () if made is None else (made,)
    file = next((path for path in sorted(tag.iterdir()) if saved_names.OPTIM.fullmatch(path.name)), None)
    return file, () if file is None else zero_partitions.steps_in(read_torch(file))


def _require_same_stage(model: TorchFile, partitions: Sequence[zero_partitions.Partition]) -> None:
    third = bool(saved_names.MODEL_OF_STAGE_3.fullmatch(model.path.name))
    if third is not (partitions[0].stage == 3):
        other = "is" if third else "is not"
        raise SourceError(f"{partitions[0].path} is of stage {partitions[0].stage}, {model.path} {other} of stage 3")


def _trained(file: TorchFile, modules: Mapping[str, Fragment]) -> dict[str, Fragment]:
    """The tensors of the module that are parameters, each once."""
    skipped = {*(file.value.get("buffer_names") or ()), *(file.value.get("shared_params") or ())}
    return {name: one for name, one in modules.items() if name not in skipped}


def _shared(model: Mapping[str, Any]) -> dict[str, str]:
    """The owner of each parameter that has two names, by the other one. Only the first rank's file knows."""
    aliases = model.get("shared_params") or {}
    return {str(alias): str(owner) for alias, owner in aliases.items()}


def _aliases(model: Mapping[str, Any], tensors: Mapping[str, Scattered]) -> dict[str, Scattered]:
    """What is there under another name than the model file's."""
    shared = _shared(model).items()
    return {alias: tensors[owner] for alias, owner in shared if owner in tensors and alias not in tensors}


def _keys(tensors: Mapping[str, Scattered], tag: Path, adapter: str | None = None) -> dict[str, str]:
    """The name of each tensor by its Hugging Face key, without what wrappers put before it."""
    keys: dict[str, str] = {}
    for name in tensors:
        key = unwrapped(name)
        if key in keys:
            raise SourceError(f"{tag} holds {key} twice: {name} and {keys[key]}")
        keys[key] = name
    return adapters.chosen(keys, adapter, tag)


def _config_folder(path: Path, run: Path, tag: Path, settings: Settings) -> Path:
    """The folder with the config.json that belongs to the weights.

    Raises:
        SourceError: there is none.
    """
    if settings.config is not None:
        return settings.config
    for place in (path, run, tag, tag.parent):
        if (place / "config.json").is_file():
            return place
    raise OptionNeededError(f"{path} has no config.json", "add --config BASE, the model that the training began with")


def _no_module(dtypes: Collection[str]) -> str:
    """What weights are taken where a checkpoint has master weights alone; DeepSpeed can keep these in 16 bits too."""
    text = "it holds no module: these are the {} master weights"
    if "F32" in dtypes:
        return text.format("float32") + "; --dtype bf16 rounds them as DeepSpeed does"
    return text.format(" and ".join(sorted(dtypes)))


def _twins(placed: Sequence[Placed], keys: Mapping[str, str], modules: Mapping[str, Fragment]) -> tuple[Placed, ...]:
    """The module's own tensors, where the optimizer has a master weight of them, or the file a copy of a frozen one."""
    pairs = [(one, modules.get(keys[one.key])) for one in placed if not one.slot.replica]
    return tuple(
        one._replace(fragment=own)
        for one, own in pairs
        if own is not None and own.shape == one.slot.shape and own != one.fragment
    )
