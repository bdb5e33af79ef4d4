"""Read the optimizer of FSDP trainings: the moments, step and settings of each parameter.

    optim.state.{key}.{step|exp_avg|exp_avg_sq}         torch's get_optimizer_state_dict, in a container of any name
    optim.state.{key}.momentum_buffer                   the same of torch.optim.Muon, beside an AdamW of all else
    optim.state.{key}.exp_avg                           the same of a Lion, which need not count its steps
    optim.param_groups.{number}.{lr|betas|…|params}     the settings; up to torch 2.3 those of all groups in one object
    optimizer.param_groups.{key}.{lr|betas|…}           the same flattened, as torchtitan has it
    optim.{key}.{step|exp_avg|exp_avg_sq}               `train run` before it took torch's names; without settings
    optimizer_0/, optimizer.bin, optimizer_0_rank0.bin  accelerate's, beside the model's
    optim_world_size_2_rank_0.pt                        verl's, whose numbers `numbered` replaces by names

Keys are those of the model. FSDP trains the parameters of the model itself: where the model is float32, its weights are
the FP32 master weights.

Facts: torch 2.13.0, distributed/checkpoint/state_dict.py and distributed/fsdp/_optim_utils.py; accelerate 1.15.0,
utils/fsdp_utils.py; tests/golden/test_fsdp_optim.py has files that they wrote, and checks that they load them again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint
from formats.errors import SourceError, UnsupportedError, some
from formats.fsdp import checkpoint as fsdp
from formats.fsdp import native, nearby_config, numbered, olmo_core, optimizer_owner, trainer_step
from formats.fsdp.contents import lister
from formats.layout.pieces import Scattered, place_pieces
from formats.layout.placed import Placed, match
from formats.layout.slots import ALONE, Slot
from formats.layout.tensors import UNTRAINED
from formats.model.spec import Verbatim
from formats.optimizer import (
    CARRIED,
    DECOUPLED,
    MOMENTS,
    MOMENTUM,
    NAMES,
    AnyGroup,
    Group,
    Lion,
    Muon,
    Optimizer,
    group_of,
    number_of,
    refusal_hint,
    states_by,
    whose,
)
from formats.torch_files import dcp, rank_dumps
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.archive_writer import plain, small_of
from formats.torch_files.pickle_values import Opaque, TensorRef
from formats.torch_files.rank_dumps import FlatPart
from formats.torch_files.saved_names import MODEL_DUMP, OPTIM_DUMP
from formats.torch_files.wrappers import unwrapped

KNOWN = {"step", *(name for names in MOMENTS.values() for name in names)}
STATE = re.compile(r"(?:(?P<container>.*?)\.)?state\.(?P<key>.+)\.(?P<state>\w+)")
OWN = re.compile(r"(?P<container>optim)\.(?P<key>.+)\.(?P<state>step|exp_avg|exp_avg_sq)")
FOLDER, FULL = "optimizer_0", "optimizer.bin"
FROZEN = "is it frozen, or has it made no step yet? an optimizer moves with a model that is trained as a whole"
UNTOLD = (
    "of a buffer, or a second name of a parameter, a transformers that knows the model tells "
    "(pip install 'vitruvian[transformers]', and no --verbatim); otherwise: "
)


class Listing(NamedTuple):
    """Files that may hold an optimizer: the names of their tensors, paths joined by dots, and how values are read."""

    where: Path
    names: Sequence[str]
    load: Callable[[Sequence[int]], Iterable[Scattered]]
    objects: Callable[[str], Mapping[str, Any]]
    """Returns the values that are no tensors, by name, for the names that begin with a prefix."""


class OptimizerEntries(NamedTuple):
    """An optimizer in a listing: its container, and the numbers of its tensors by state and key."""

    listing: Listing
    container: str
    states: Mapping[str, Mapping[str, int]]


# --- finding it ------------------------------------------------------------------------------------------------------


def parts(path: Path) -> list[Path]:
    """The folders of weights and optimizer (`Format.folders`)."""
    return [next(path / inside for inside in fsdp.INSIDE if lister(path / inside)), path / FOLDER]


def is_trained(source: Checkpoint) -> bool:
    """Whether there are optimizer states besides the weights."""
    return find(source) is not None


def find(source: Checkpoint) -> OptimizerEntries | None:
    """Find the optimizer of an opened FSDP checkpoint; None when there is none.

    Raises:
        SourceError: the optimizer holds a state of a parameter twice, or is of other ranks than the model.
        UnsupportedError: there are several optimizers.
    """
    home = source.home
    outer = home.parent if home.name == fsdp.INSIDE[1] else home
    names = [path.name for path in outer.iterdir()]
    if source.dropped and dcp.is_dcp(home):  # without dropped names it holds only the model
        optimizer = _optimizer_entries(_dcp(home, {name.removeprefix(".") for name in source.dropped}))
        if optimizer is not None:
            return optimizer
    if dcp.is_dcp(outer / FOLDER):
        return _optimizer_entries(_dcp(outer / FOLDER))
    if any(map(OPTIM_DUMP.fullmatch, names)):
        files = rank_dumps.open_ranks(outer, OPTIM_DUMP)
        if len(files) != (models := sum(map(bool, map(MODEL_DUMP.fullmatch, names)))):
            counts = f"{len(files)} dumps of an optimizer and {models} of its model"
            raise SourceError(f"{outer} holds {counts}", "copy the dumps of all ranks")
        if numbered.is_numbered(files):
            files = numbered.with_parameter_names(files, rank_dumps.open_ranks(outer), tied=source.spec.tied)
        return _optimizer_entries(_files(outer, files))
    return _optimizer_entries(_files(outer, {0: read_torch(outer / FULL)})) if FULL in names else None


def _dcp(folder: Path, names: set[str] | None = None) -> Listing:
    entries, others = dcp.contents(folder)
    tensors = [entry for entry in entries if names is None or entry.name in names]

    def objects(prefix: str) -> Mapping[str, Any]:
        files = dcp.read_objects(folder, [name for name in others if name.startswith(prefix)])
        return {name: plain(file, file.value, name) for name, file in files.items()}

    return Listing(
        folder, [entry_of.name for entry_of in tensors], lambda some: dcp.load([tensors[i] for i in some]), objects
    )


def _files(folder: Path, files: Mapping[int, TorchFile]) -> Listing:
    paths = list(dict.fromkeys(path for file in files.values() for path, _ in rank_dumps.leaves(file.value)))

    def objects(prefix: str) -> Mapping[str, Any]:
        ranks = []
        for file in files.values():
            values = {name: value_of for name, value_of in _objects(file.value) if name.startswith(prefix)}
            ranks.append({name: plain(file, value_of, name) for name, value_of in values.items()})
            if ranks[-1] != ranks[0]:
                raise SourceError(
                    f"{file.path} and {next(iter(files.values())).path} have optimizers of other settings"
                )
        return ranks[0]

    names = [".".join(path) for path in paths]
    return Listing(folder, names, lambda some: rank_dumps.load(files, [paths[i] for i in some]), objects)


def _objects(value: Any, outer: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested dictionaries that are no tensors, whole or a rank's part, by their paths joined by dots."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        name = f"{outer}{key}"
        if isinstance(inner, Mapping):
            yield from _objects(inner, f"{name}.")
        elif not isinstance(inner, TensorRef | Opaque | FlatPart):
            yield name, inner


def _optimizer_entries(listing: Listing) -> OptimizerEntries | None:
    """The optimizer among the tensors of a listing; None if there is none."""
    for known in (STATE, OWN):
        containers: dict[str, dict[str, dict[str, int]]] = {}
        for number, name in enumerate(listing.names):
            if parts := known.fullmatch(name):
                states = containers.setdefault(parts["container"] or "", {})
                keys, key = states.setdefault(parts["state"], {}), unwrapped(parts["key"])
                if key in keys:
                    raise SourceError(f"{listing.where} holds {parts['state']} of {key} twice in its optimizer")
                keys[key] = number
        adam = {name: states for name, states in containers.items() if "exp_avg" in states} or containers
        if len(adam) > 1:
            raise UnsupportedError(f"{listing.where} holds several optimizers: {', '.join(sorted(adam))}")
        for container, states in adam.items():
            return OptimizerEntries(listing, f"{container}." if container else "", states)
    return None


# --- reading it ------------------------------------------------------------------------------------------------------


def read(source: Checkpoint) -> Optimizer:
    """The optimizer of an opened FSDP checkpoint.

    Raises:
        SourceError: there is no optimizer, it is damaged or incomplete, or it has made other steps than the trainer
            counts (`trainer_step`).
        UnsupportedError: the optimizer is not Adam, Lion or Muon, is saved in an unknown way, is of a model of images
            under a trainer's own names, or of another model than the one in the chosen container (`optimizer_owner`).
    """
    optimizer = find(source)
    if optimizer is None:
        raise SourceError(f"{source.root} holds no optimizer", "convert the weights without --with-optimizer")
    trainer = native.trainer_of({item.key for item in source.tensors})
    if trainer and isinstance(source.spec, Verbatim):
        raise UnsupportedError(
            f"{source.root}: the optimizer of a model of images under {trainer}'s names is not read",
            "convert the weights without --with-optimizer",
        )
    optimizer_owner.require_own(source, optimizer.container.removesuffix("."), optimizer.listing.where)
    _require_known(optimizer)
    moved = {key for keys in optimizer.states.values() for key in keys}
    buffers = (source.buffers or frozenset()) - moved
    untrained = UNTRAINED | buffers
    trained = [item.slot for item in source.tensors if not untrained.intersection(item.slot.rule.pattern.tensors)]
    lost = UNTOLD * (isinstance(source.spec, Verbatim) and source.buffers is None) + FROZEN
    states: dict[str, Checkpoint] = {}
    by_kind: dict[type[AnyGroup], dict[str, Placed]] = {}
    for kind, slots in _by_kind(optimizer, trained).items():
        names = {name for slot in slots for name in slot.rule.pattern.tensors}
        without = untrained.union(name for slot in trained for name in slot.rule.pattern.tensors) - names
        for state in MOMENTS[kind] if slots else ():
            numbers = optimizer.states[state]
            tensors = dict(zip(numbers, optimizer.listing.load([*numbers.values()]), strict=True))
            try:
                whole = {key: item.whole for key, item in tensors.items()}
                placed, _ = match(slots, {ALONE: whole}, (), source.home)
            except SourceError as error:
                others = sorted(whole.keys() - {key for slot in slots for key in slot.keys})
                hint = f"it has states of {some(others, 2)}, which are no tensors of the model" if others else lost
                raise SourceError(f"{state} of its optimizer: {error}", error.hint or hint) from None
            by_kind[kind] = {item.key: item for item in placed}
            pieces = tuple(piece for item in placed for piece in place_pieces(item, tensors[item.key]))
            states[state] = replace(source, tensors=pieces, dropped=(), without=without)
    keys = {key: item for items in by_kind.values() for key, item in items.items()}
    groups: dict[tuple[str, int | None], AnyGroup] = {}
    model = {unwrapped(name) for item in source.tensors for name in item.slot.keys} - buffers
    settings = _settings(optimizer)
    for key, group in _groups(optimizer, settings, keys, model, _implied_settings(source)).items():
        slot = keys[key].slot
        if key not in by_kind.get(type(group), {}):
            (kept,) = (MOMENTS[kind] for kind, items in by_kind.items() if key in items)
            raise UnsupportedError(
                f"{optimizer.listing.where}: the settings of {key} are for {' and '.join(MOMENTS[type(group)])} of "
                f"{NAMES[type(group)]}, and its optimizer keeps {' and '.join(kept)} of it"
            )
        for name in slot.rule.pattern.tensors:
            if groups.setdefault((name, slot.layer), group) != group:
                raise UnsupportedError(
                    f"{optimizer.listing.where}: the experts of layer {slot.layer} are in several groups"
                )
    for other in by_kind.keys() - {Group} if not groups else ():
        raise UnsupportedError(
            f"{optimizer.listing.where} has {' and '.join(MOMENTS[other])} and no parameter groups, which would tell "
            f"whether it is {NAMES[other]}'s"
        )
    states = {state: states[state] for state in CARRIED if state in states}
    counted = [key for kind, items in by_kind.items() if kind is not Muon for key in items]
    step = _step(optimizer, counted, needed=Group in by_kind)
    notes = tuple(_notes(settings.values()))
    if step is not None:
        saved = _values(optimizer.listing, trainer_step.SAVED).get(trainer_step.SAVED)
        notes += trainer_step.require_same(source, optimizer.listing.where, step, saved)
    return Optimizer(states, step, groups, notes=notes)


states = states_by(read)


def _by_kind(optimizer: OptimizerEntries, trained: Iterable[Slot]) -> dict[type[AnyGroup], list[Slot]]:
    """The parameters by the optimizer that trains them: Muon, and Adam or Lion.

    Raises:
        SourceError: a tensor that Muon trains in another layer has no state.
        UnsupportedError: Muon trains a tensor in one layer, and Adam in another.
    """
    slots: dict[type[AnyGroup], dict[tuple[str, ...], Slot]] = {kind: {} for kind in MOMENTS}
    others = Group if MOMENTUM in optimizer.states or "exp_avg_sq" in optimizer.states else Lion
    for slot in trained:
        muon = not optimizer.states.get(MOMENTUM, {}).keys().isdisjoint(slot.keys)
        slots[Muon if muon else others].setdefault(slot.keys, slot)
    of_kinds = (slots[Muon], slots[others])
    names = [{name for slot in each.values() for name in slot.rule.pattern.tensors} for each in of_kinds]
    if shared := sorted(set.intersection(*names)):
        moments = optimizer.states["exp_avg"].keys()
        parameter = next((keys[0] for keys in slots[Group] if moments.isdisjoint(keys)), None)
        if parameter is not None:
            raise SourceError(f"{optimizer.listing.where} has neither {MOMENTUM} nor exp_avg of {parameter}", FROZEN)
        raise UnsupportedError(
            f"{optimizer.listing.where} trains {shared[0]} with Muon in some layers, and not in others"
        )
    return {kind: [*of.values()] for kind, of in slots.items()}


def _require_known(optimizer: OptimizerEntries) -> None:
    where = optimizer.listing.where
    if all(key.isdecimal() for keys in optimizer.states.values() for key in keys):
        raise UnsupportedError(
            f"{where}: its optimizer numbers its parameters, as torch's own state_dict() does, and does not say which "
            "is which",
            "convert the weights without --with-optimizer; only the training that saved it can resume with it",
        )
    states = {*optimizer.states}
    states -= (
        {MOMENTUM} if "exp_avg" in states else set()
    )  # beside Muon an Adam trains the tensors that are no matrices
    if others := sorted(states - {*MOMENTS[Group], "step"}):
        raise UnsupportedError(
            f"{where}: its optimizer{whose(states)} is not Adam, AdamW or Lion: it keeps {', '.join(others)}",
            refusal_hint(states),
        )
    needed = MOMENTS[Lion if MOMENTUM not in optimizer.states else Group]
    if missing := [state for state in needed if state not in optimizer.states]:
        beside = f" beside {MOMENTUM}" * (MOMENTUM in optimizer.states)
        raise SourceError(f"{where}: its optimizer holds no {' and no '.join(missing)}{beside}")


def _step(optimizer: OptimizerEntries, keys: Collection[str], *, needed: bool) -> int | None:
    """The number of steps that all parameters have made; None of a Lion that counts none.

    Raises:
        SourceError: a parameter has no step, or none that is a whole number from 1 on.
        UnsupportedError: the steps differ, or the optimizer keeps another state.
    """
    where, numbers = optimizer.listing.where, optimizer.states.get("step", {})
    values: dict[str, Any] = dict(zip(numbers, map(small_of, optimizer.listing.load([*numbers.values()])), strict=True))
    for name, value in optimizer.listing.objects(f"{optimizer.container}state.").items():
        parts = STATE.fullmatch(name)
        if parts and parts["state"] == "step":
            values[unwrapped(parts["key"])] = value
        elif parts and parts["state"] not in KNOWN:
            kind = whose([parts["state"]])
            raise UnsupportedError(
                f"{where}: its optimizer{kind} is not Adam, AdamW or Lion: it keeps {parts['state']}",
                refusal_hint([parts["state"]]),
            )
    if counted := sorted(values.keys() & optimizer.states.get(MOMENTUM, {}).keys()):
        raise UnsupportedError(f"{where}: its optimizer keeps {MOMENTUM} and step of {counted[0]}, and Muon no step")
    steps: dict[int, str] = {}
    for key in keys if needed or values else ():
        if key not in values:
            raise SourceError(f"{where} holds no step of {key}", FROZEN)
        step = number_of(values[key], f"{where}: the step of {key}")
        if step < 1 or step != int(step):
            raise SourceError(f"{where}: {key} has made {step:g} steps", FROZEN)
        steps.setdefault(int(step), key)
    if len(steps) > 1:
        examples = " and ".join(f"{key} {number}" for number, key in list(steps.items())[:2])
        raise UnsupportedError(f"{where}: its parameters have made different numbers of steps, {examples}")
    return next(iter(steps), None)


def _implied_settings(source: Checkpoint) -> Mapping[str, Any]:
    """Settings that no group has, and by which an AdamW is recognised, if OLMo-core's own config names one."""
    if native.trainer_of({item.key for item in source.tensors}) != native.OLMO_CORE:
        return {}
    own = olmo_core.own_config(nearby_config.configs(source.root, source.home))
    return {"amsgrad": False} if own and olmo_core.makes_steps_of_adamw(own) else {}


def _values(listing: Listing, prefix: str) -> dict[str, Any]:
    """The values under a name, and under those that go on from it with a dot; small tensors are read as `Small`."""
    numbers = [number for number, name in enumerate(listing.names) if f"{name}.".startswith(f"{prefix}.")]
    tensors = zip(numbers, map(small_of, listing.load(numbers)), strict=True)
    return {**listing.objects(prefix), **{listing.names[number]: value for number, value in tensors}}


def _settings(optimizer: OptimizerEntries) -> dict[str, dict[str, Any]]:
    """The settings of each parameter group, by its number or the key of its only parameter."""
    prefix = optimizer.container + fsdp.GROUPS
    settings: dict[str, dict[str, Any]] = {}
    for name, value in _values(optimizer.listing, prefix).items():
        if name == prefix and isinstance(value, list):
            settings |= {
                str(number): dict(member) for number, member in enumerate(value) if isinstance(member, Mapping)
            }
        elif parts := re.fullmatch(r"(.+)\.(\w+)", name.removeprefix(f"{prefix}.")):
            settings.setdefault(parts[1], {})[parts[2]] = value
    return settings


def _notes(settings: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Note that groups of torch's Adam or AdamW do not say which of them it is, and have weight decay.

    Groups of both have the same settings up to torch 2.6; 2.7 made AdamW an Adam with `decoupled_weight_decay`.
    """
    for group in settings:
        if "amsgrad" in group and group.get("weight_decay") and group.keys().isdisjoint(DECOUPLED):
            yield (
                "the settings of its optimizer are those of Adam and of AdamW, which torch tells apart since 2.7: its "
                "weight decay is taken for AdamW's"
            )
            return


def _groups(
    optimizer: OptimizerEntries,
    settings: Mapping[str, Mapping[str, Any]],
    keys: Mapping[str, Placed],
    model: Collection[str],
    unsaid: Mapping[str, Any],
) -> dict[str, AnyGroup]:
    """The group of each parameter, by its key, in the order of the groups; empty where no settings are saved.

    Args:
        optimizer: the optimizer.
        settings: the settings of each group (`_settings`).
        keys: the parameters with moments, by key.
        model: all keys of the model.
        unsaid: settings that hold for all groups and that no group has.

    Raises:
        SourceError: a parameter is in no group or in two, or a group has a parameter that the model lacks.
    """
    listing = optimizer.listing
    order = {key: number for number, key in enumerate(keys)}
    groups: dict[str, AnyGroup] = {}
    for name in sorted(
        settings, key=lambda member: int(member) if member.isdecimal() else order.get(unwrapped(member), -1)
    ):
        param_group, where = {**unsaid, **settings[name]}, f"{listing.where}: group {name} of its optimizer"
        group = group_of(param_group, where)
        members = param_group["params"] if isinstance(param_group.get("params"), list) else [name]
        for key in (unwrapped(str(member)) for member in members):
            if key in groups:
                raise SourceError(f"{listing.where}: {key} is in two groups of its optimizer")
            groups[key] = group
    if settings and (missing := [key for key in keys if key not in groups]):
        raise SourceError(f"{listing.where}: {missing[0]} is in no group of its optimizer")
    if extra := sorted(groups.keys() - set(model)):
        raise SourceError(
            f"{listing.where}: the groups of its optimizer have {some(extra, 4)}, its model has no such parameter"
        )
    return {key: group for key, group in groups.items() if key in keys}
