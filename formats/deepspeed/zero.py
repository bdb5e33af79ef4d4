"""Read DeepSpeed checkpoints of models with Hugging Face names, as DeepSpeed, the HF Trainer and accelerate save them.

    RUN/latest, RUN/TAG/                                  engine.save_checkpoint, and accelerate's save_state
    checkpoint-N/latest, checkpoint-N/global_stepN/       HF Trainer; in stage 3 often the only weights
    TAG/mp_rank_00_model_states.pt                        stages 0 to 2
    TAG/zero_pp_rank_{dp}_mp_rank_00_model_states.pt      stage 3

The partitions are described in `partitions.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint, Details, Settings
from formats.deepspeed import ZERO, frozen_parts, model_files, universal
from formats.deepspeed import folders as deepspeed
from formats.deepspeed import partitions as zero_partitions
from formats.deepspeed.steps import require_one_step, steps_in
from formats.disk.safetensors import Fragment
from formats.errors import OptionNeededError, SourceError, UnsupportedError, some
from formats.families.family import Family
from formats.huggingface import folder as huggingface
from formats.huggingface import language_model, own_config
from formats.layout.pieces import Scattered, match_pieces, single_piece
from formats.layout.placed import Placed, files_of
from formats.layout.slots import Slot
from formats.layout.table import Rule
from formats.layout.tensors import BUFFERS
from formats.model import adapters
from formats.model.spec import ModelSpec, Spec, Verbatim
from formats.optimizer import MOMENTUM, STATES
from formats.torch_files import saved_names
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.wrappers import unwrapped, unwrapped_keys

NAME = ZERO.name
WEIGHTS = {"module": "module", "fp32-master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""The name in `optimizer.STATES` by value of `--weights`."""
UNIVERSAL = "a universal checkpoint of DeepSpeed"
HINT = "add --config BASE, the model that the training began with"
UNNAMED = "it has no config.json, which --config BASE supplies"
OF_MODEL = ("vocab_size", "values", "verbatim", "allow_missing", "drop", "adapter", "only")
"""Fields of `Settings` that say something of the model."""


def detect(path: Path) -> bool:
    """Whether a folder is a DeepSpeed checkpoint or run."""
    return deepspeed.detect(path)


def tables() -> dict[str, tuple[Rule, ...]]:
    """No tables: ZeRO cuts the tensors of Hugging Face or GPT-NeoX into flat parts."""
    return {}


def holders(_: Family) -> dict[str, bool]:
    """The format holds every family."""
    return {NAME: True}


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a checkpoint: read the pickles of its files, but no weights."""
    run, tag = deepspeed.locate(path, settings.tag)
    models, whole = model_files.files_of_ranks(tag), universal.is_universal(tag)
    first = models[0]
    if whole:
        universal.require_plain(tag)
    modules = model_files.module(first)
    third = bool(saved_names.MODEL_OF_STAGE_3.fullmatch(first.path.name))
    bare = third or (whole and all(fragment.shape == (0,) for fragment in modules.values()))
    source = settings.weights or ("fp32-master" if bare else "module")
    state = WEIGHTS[source]
    if source == "module" and bare:
        kind = "a universal checkpoint" if whole else "of stage 3"
        raise OptionNeededError(f"{tag} is {kind}, whose model files hold no weights", "add --weights fp32-master")
    counted, steps = _steps(tag, settings.accept)
    notes = require_one_step(first, counted, steps, settings.accept)
    notes += [*model_files.renamed(first, tag), *model_files.left_out(first)]
    if source == "module":
        tensors = dict(_module(first, modules))
    elif whole:
        tensors = dict(_of_universal(tag, first, modules, state))
    else:
        tensors = dict(_states(tag, models, modules, state))
    assets = _config_folder(path, run, tag, settings, needed=not whole)
    unnamed = assets is None and settings.adapter is None
    tensors |= {} if unnamed else _aliases(first.value, tensors)
    keys = _keys(tensors, tag, settings.adapter, unnamed=unnamed)
    part = _part(assets, settings, keys)
    names, keys, notes = [*keys], part.of(keys), [*notes, *part.notes]
    shapes, config = {key: tensors[name].shape for key, name in keys.items()}, part.config or None
    beside = _keys(tensors, tag, "merged", unnamed=unnamed) if settings.adapter == "only" else {}
    spec, outer = _spec(shapes, part.config, assets, settings, {key: tensors[own].shape for key, own in beside.items()})
    keys = {key.removeprefix(outer): name for key, name in keys.items()}
    if third and settings.adapter != "only":
        notes += _frozen_notes(first, tensors, assets, outer)
    if assets is not None:
        own_config.require_same(own_folder(path, run, tag), huggingface.read_config(assets), names, settings, spec)
    slots, drops = huggingface.model_slots(spec, keys), huggingface.drops(spec, keys, settings)
    slots, without = _without_buffers(slots, keys) if whole and settings.without_buffers else (slots, frozenset[str]())
    if whole and source != "module" and not unnamed:
        of_model = slots if isinstance(spec, ModelSpec) else None
        universal.require_trained(
            tag, first.value, of_model, keys, adapter=settings.adapter == "only", buffers=not settings.without_buffers
        )
    placed, pieces, dropped = match_pieces(slots, {key: tensors[name] for key, name in keys.items()}, drops, tag)
    twins = _twins(placed, keys, modules) if source == "fp32-master" and not bare else ()
    if settings.weights is None and bare and settings.adapter is None:
        notes.append(model_files.no_module({tensor.fragment.dtype for tensor in placed}))
    shown = {"iteration": first.value.get("global_steps"), "folder": tag.name}
    files = tuple(sorted(files_of(pieces)))
    moments = state in STATES[1:]
    proof = read(path, replace(settings, weights="fp32-master")) if moments and not bare else None
    return Checkpoint(
        run, tag, NAME, spec, pieces, tuple(dropped), files, {"dp": first.value.get("dp_world_size", 1)}, assets,
        Details(kind=UNIVERSAL if whole else "", shown=shown), twins, tuple(notes), proof, without=without,
        settings=settings, config=config, ties=model_files.TIES if steps or not bare else (), left=part.left,
    )  # fmt: skip


def _frozen_notes(first: TorchFile, tensors: Mapping[str, Scattered], base: Path | None, outer: str) -> list[str]:
    """The notes on the frozen parameters of stage 3, without the prefix `outer`; see `frozen_parts.require_own`."""
    frozen = first.value.get("frozen_param_shapes") or ()
    return frozen_parts.require_own({unwrapped(name).removeprefix(outer): tensors[name] for name in frozen}, base)


def _without_buffers(slots: Sequence[Slot], keys: Collection[str]) -> tuple[list[Slot], frozenset[str]]:
    """The slots without those of absent buffers, and the names of these."""
    absent = [slot for slot in slots if BUFFERS.issuperset(slot.rule.pattern.tensors) and {*keys}.isdisjoint(slot.keys)]
    names = frozenset(name for slot in absent for name in slot.rule.pattern.tensors)
    return [slot for slot in slots if slot not in absent], names


def _part(assets: Path | None, settings: Settings, keys: Collection[str]) -> language_model.Selection:
    """The part of the model to read: all of an adapter alone, and of a checkpoint without a config."""
    if assets is None:
        return language_model.Selection({}, {key: key for key in keys})
    return language_model.select(huggingface.read_config(assets), keys, settings, str(assets / "config.json"))


def _spec(
    shapes: Mapping[str, tuple[int, ...]],
    config: dict[str, Any],
    assets: Path | None,
    settings: Settings,
    beside: Mapping[str, tuple[int, ...]],
) -> tuple[Spec, str]:
    """The spec of a model with given tensors, of an adapter alone, or of a universal checkpoint without a config.

    With it the prefix that a module around the model adds to all keys; see `huggingface.outer_prefix`.

    Args:
        shapes: the shapes by Hugging Face keys, in the order of the model.
        config: the parsed config.json.
        assets: the folder of config.json.
        settings: the user's settings.
        beside: the shapes of the base's tensors, of an adapter alone.
    """
    if assets is None:
        return (adapters.spec_of(shapes, beside) if settings.adapter else unnamed_spec(shapes)), ""
    spec = huggingface.spec_of(shapes, config, assets, settings)
    if outer := huggingface.outer_prefix(shapes, spec):
        shapes = {key.removeprefix(outer): shape for key, shape in shapes.items()}
        spec = huggingface.spec_of(shapes, config, assets, settings)
    return spec, outer


def unnamed_spec(shapes: Mapping[str, tuple[int, ...]]) -> Verbatim:
    """The spec of a universal checkpoint whose tensors have the names that the training gave them."""
    return Verbatim("deepspeed", shapes, tied=False, vocab=None, why=UNNAMED)


def _module(file: TorchFile, modules: Mapping[str, Fragment]) -> Iterator[tuple[str, Scattered]]:
    """The 16-bit weights of the module, buffers included, without the empty placeholders of stage 3."""
    shapes = _shapes(file)
    for name, fragment in modules.items():
        if fragment.shape != (0,) or shapes.get(name, (0,)) == (0,):
            yield name, single_piece(name, fragment)


def _shapes(file: TorchFile) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, as far as a model file records them."""
    groups = model_files.param_shapes(file) if file.value.get("param_shapes") is not None else ()
    return {name: shape for group in groups for name, shape in group.items()}


def _states(
    tag: Path, models: Sequence[TorchFile], modules: Mapping[str, Fragment], state: str
) -> Iterator[tuple[str, Scattered]]:
    """A state of each parameter, and the tensors of the module that have no state, such as buffers.

    Raises:
        SourceError: files are missing, or not of one save.
        UnsupportedError: a moment is asked for, and parameters are frozen.
    """
    first = models[0]
    if first.value.get("optimizer") is not None:
        tensors = dict(model_files.unpartitioned_states(first, state, _trained(first, modules)))
    else:
        partitions = zero_partitions.open_partitions(tag, 0, sorted({"fp32", state}))
        zero_partitions.require_of_all(partitions, state, tag)
        _require_same_stage(first, partitions)
        model_files.require_of_module(first, model_files.param_shapes(first), modules)
        if partitions[0].stage == 3:
            zero_partitions.require_same_settings(partitions)  # no module proves that they are of one save
            if len(partitions) != len(models):
                counts = f"{len(models)} model files and {len(partitions)} files of optimizer states"
                raise SourceError(f"{tag} holds {counts}")
        tensors = dict(zero_partitions.load(partitions, model_files.param_shapes(first), state))
        tensors |= model_files.frozen(models if partitions[0].stage == 3 else models[:1])
    yield from _with_others(tag, first, modules, tensors, state, first.value.get("frozen_param_shapes") or ())


def _of_universal(
    tag: Path, first: TorchFile, modules: Mapping[str, Fragment], state: str
) -> Iterator[tuple[str, Scattered]]:
    """The same of a universal checkpoint; of what was not trained the module in its model file, if there is one."""
    tensors = dict(universal.tensors(tag, _shapes(first), state, _copies(tag, first)))
    yield from _with_others(tag, first, modules, tensors, state, ())


def _copies(tag: Path, first: TorchFile) -> set[str]:
    """The names in a universal checkpoint that are no trained parameters; see `universal.copies`."""
    return universal.copies(tag, _shapes(first), {*model_files.module(first), *_shared(first.value)})


def _with_others(
    tag: Path,
    first: TorchFile,
    modules: Mapping[str, Fragment],
    tensors: Mapping[str, Scattered],
    state: str,
    frozen: Collection[str],
) -> Iterator[tuple[str, Scattered]]:
    """The tensors of a state, and those of the module that have no state."""
    others = {name: tensor for name, tensor in modules.items() if name not in tensors}
    aliases = _shared(first.value)
    untrained = [*frozen, *(_trained(first, others).keys() - aliases.keys())]
    if untrained and state != "fp32":
        names = some(sorted({*map(str, untrained)}), 3)
        raise UnsupportedError(
            f"{tag} has no {state} of frozen parameters: {names}", "--weights module or fp32-master has all tensors"
        )
    yield from tensors.items()
    yield from ((name, tensor) for name, tensor in _module(first, others) if name not in aliases)


class Training(NamedTuple):
    """The optimizer states of every trained parameter, by DeepSpeed's name; every file is read once.

    Attributes:
        states: the tensors of each state of `optimizer.STATES` that the optimizer has, by name.
        module: the tensors of the module; in stage 3 empty tensors, or none.
        model: the contents of the first model file.
        shapes: name and shape of the parameters of each flat group.
        partitions: the partition of each rank; empty for a universal checkpoint.
        ties: what the files of one save have in common (`Checkpoint.ties`).
    """

    states: Mapping[str, Mapping[str, Scattered]]
    module: Mapping[str, Fragment]
    model: Mapping[str, Any]
    shapes: Sequence[Mapping[str, tuple[int, ...]]]
    partitions: Sequence[zero_partitions.Partition]
    ties: tuple[str, ...] = model_files.TIES


def trained(tag: Path, accept: Collection[str] = ()) -> Training:
    """Open the optimizer states of a checkpoint; `accept` are the deviations that the user accepts.

    Raises:
        SourceError: files are damaged, missing, or of different saves.
        UnsupportedError: the checkpoint is of stage 0, which stores no names.
    """
    first = model_files.files_of_ranks(tag)[0]
    if first.value.get("optimizer") is not None:
        raise UnsupportedError(f"{tag} is of stage 0, whose optimizer keeps no names", "train a step with stage 1")
    counted, steps = _steps(tag, accept)
    require_one_step(first, counted, steps, accept)
    shapes = model_files.param_shapes(first)
    if universal.is_universal(tag):
        module, skip = model_files.module(first), _copies(tag, first)
        states = {state: dict(universal.tensors(tag, _shapes(first), state, skip)) for state in universal.states(tag)}
        return Training(states, module, first.value, shapes, ())
    partitions = zero_partitions.open_partitions(tag, 0)
    _require_same_stage(first, partitions)
    zero_partitions.require_trained(partitions)
    states = {state: dict(zero_partitions.load(partitions, shapes, state)) for state in partitions[0].groups}
    module = model_files.module(first)
    model_files.require_of_module(first, shapes, module)
    if partitions[0].stage == 3:
        return Training(states, {}, first.value, shapes, partitions, model_files.TIES if steps else ())
    return Training(states, module, first.value, shapes, partitions)


def states_of(source: Checkpoint, training: Training) -> dict[str, Checkpoint]:
    """The optimizer states of an opened checkpoint, each as a checkpoint of its own.

    Args:
        source: the checkpoint.
        training: the result of `trained` for the folder `source.home`.

    Raises:
        UnsupportedError: a tensor of the model is not trained.
    """
    trained_names = [unwrapped(name) for group in training.shapes for name in group]
    outer = huggingface.outer_prefix(trained_names, source.spec)
    buffer_names = {unwrapped(name).removeprefix(outer) for name in training.model.get("buffer_names") or ()}
    checkpoints, known = {}, source.spec.shapes if isinstance(source.spec, Verbatim) else {}
    for state, each in training.states.items():
        unnamed = source.assets is None and source.settings.adapter is None
        aliases = _aliases(training.model, each)  # without a config those that its module holds
        tensors = {**each, **{name: aliases[name] for name in aliases if not unnamed or name in known}}
        keys = _keys(tensors, source.home, unnamed=unnamed)
        keys = {key.removeprefix(outer): name for key, name in keys.items()}
        every = huggingface.model_slots(source.spec, keys)
        buffers = buffer_names - keys.keys()
        of_buffers = (slot.rule.pattern.tensors for slot in every if not buffers.isdisjoint(slot.keys))
        without = source.without.union(*of_buffers)
        slots = [slot for slot in every if without.isdisjoint(slot.rule.pattern.tensors)]
        if MOMENTUM in training.states and state != "fp32":
            slots, others = _of_some(slots, keys, source.home)
            without |= others
        if lost := universal.lacking(slots, keys):
            raise UnsupportedError(
                f"{source.home} holds no {state} of {len(lost)} tensors, such as {lost[0]}: they were not trained",
                "an optimizer moves with a model that is trained as a whole; convert the weights alone",
            )
        drops = huggingface.drops(source.spec, keys, source.settings)
        by_key = {key: tensors[name] for key, name in keys.items()}
        placed, pieces, dropped = match_pieces(slots, by_key, drops, source.home)
        checkpoints[state] = replace(
            source,
            tensors=pieces,
            dropped=tuple(dropped),
            files=tuple(sorted(files_of(pieces))),
            twins=_twins(placed, keys, training.module) if state == "fp32" else (),
            without=without,
            notes=(),
            proof=None,
        )
    return checkpoints


def _of_some(slots: Sequence[Slot], keys: Mapping[str, str], where: Path) -> tuple[list[Slot], frozenset[str]]:
    """The slots that have a state in a training with Muon, and the names of the logical tensors without the state.

    Args:
        slots: the slots of the model.
        keys: the keys that have the state.
        where: the folder, for errors.

    Raises:
        UnsupportedError: a tensor has the state in some layers alone.
    """
    parts = {True: list[Slot](), False: list[Slot]()}
    for slot in slots:
        parts[not keys.keys().isdisjoint(slot.keys)].append(slot)
    some_of, others = ({name for slot in part for name in slot.rule.pattern.tensors} for part in parts.values())
    if shared := sorted(some_of & others):
        raise UnsupportedError(f"{where} trains {shared[0]} with Muon in some layers, and not in others")
    return parts[True], frozenset(others)


def _steps(tag: Path, accept: Collection[str]) -> tuple[Path | None, Collection[float]]:
    """The file that records the steps of the optimizer, and the steps; None and empty without such a file."""
    if universal.is_universal(tag):
        return universal.steps(tag, accept)
    file = next((path for path in sorted(tag.iterdir()) if saved_names.OPTIM.fullmatch(path.name)), None)
    return file, () if file is None else steps_in(read_torch(file))


def _require_same_stage(model: TorchFile, partitions: Sequence[zero_partitions.Partition]) -> None:
    third = bool(saved_names.MODEL_OF_STAGE_3.fullmatch(model.path.name))
    if third is not (partitions[0].stage == 3):
        other = "is" if third else "is not"
        raise SourceError(f"{partitions[0].path} is of stage {partitions[0].stage}, {model.path} {other} of stage 3")


def _trained(file: TorchFile, modules: Mapping[str, Fragment]) -> dict[str, Fragment]:
    """The tensors of the module that are parameters, without buffers and second names of shared parameters."""
    skipped = {*(file.value.get("buffer_names") or ()), *(file.value.get("shared_params") or ())}
    return {name: fragment for name, fragment in modules.items() if name not in skipped}


def _shared(model: Mapping[str, Any]) -> dict[str, str]:
    """The first name of each parameter with two names, by its second name. Only the first rank's file records it."""
    aliases = model.get("shared_params") or {}
    return {str(alias): str(owner) for alias, owner in aliases.items()}


def _aliases(model: Mapping[str, Any], tensors: Mapping[str, Scattered]) -> dict[str, Scattered]:
    """The shared parameters in `tensors` under their second names."""
    shared = _shared(model)
    return {alias: tensors[owner] for alias, owner in shared.items() if owner in tensors and alias not in tensors}


def _keys(tensors: Mapping[str, Scattered], tag: Path, adapter: str | None = None, *, unnamed: bool) -> dict[str, str]:
    """The name of each tensor by its Hugging Face key, which is the name without the prefixes of wrappers.

    Without a config (`unnamed`) each key is the name.

    Raises:
        SourceError: two names have the same key.
    """
    keys: dict[str, str] = {}
    for name, key in ({name: name for name in tensors} if unnamed else unwrapped_keys(tensors)).items():
        if key in keys:
            raise SourceError(f"{tag} holds {key} twice: {name} and {keys[key]}")
        keys[key] = name
    return keys if unnamed else adapters.select(keys, adapter, tag)


def _config_folder(path: Path, run: Path, tag: Path, settings: Settings, *, needed: bool) -> Path | None:
    """The folder with the config.json that belongs to the weights; None of an adapter alone.

    None also where a config is not `needed`, is not there or not wanted (`own_names`), and no setting speaks of the
    model.

    Raises:
        OptionNeededError: there is no config.json.
    """
    if settings.adapter == "only":
        return None
    names = [name for name in OF_MODEL if not (settings.own_names and name == "verbatim")]
    stated = needed or any(getattr(settings, name) not in (None, False, (), {}) for name in names)
    found = settings.config or (None if settings.own_names and not stated else own_folder(path, run, tag))
    if found is None and stated:
        raise OptionNeededError(f"{path} has no config.json", HINT)
    return found


def own_folder(path: Path, run: Path, tag: Path) -> Path | None:
    """The folder of the config.json beside the weights, None if there is none."""
    return next((place for place in (path, run, tag, tag.parent) if (place / "config.json").is_file()), None)


def _twins(placed: Sequence[Placed], keys: Mapping[str, str], modules: Mapping[str, Fragment]) -> tuple[Placed, ...]:
    """The module's tensors to compare with tensors read from elsewhere: master weights, or copies of frozen tensors."""
    pairs = [(tensor, modules.get(keys[tensor.key])) for tensor in placed if not tensor.slot.replica]
    return tuple(
        tensor._replace(fragment=own)
        for tensor, own in pairs
        if own is not None and own.shape == tensor.slot.shape and own != tensor.fragment
    )
