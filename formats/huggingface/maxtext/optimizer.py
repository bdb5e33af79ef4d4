"""Read the optimizer of a MaxText training: the moments and the number of steps of its AdamW (`opt_type: adamw`).

    opt_state.0.mu.params.decoder…    the first moment of each parameter, in an array like that of the parameter
    opt_state.0.nu.params.decoder…    the second
    opt_state.0.count                 how many steps were made
    opt_state.2.count                 the same, for the schedule of the learning rate
    step                              the same, for the training

Its parameters are what it trains: there are no further master weights. Learning rate, betas, epsilon and weight decay
are in none of its files. Its other optimizers have other names: `adam_pax` has `opt_state.mu`, with moments that are
corrected for their bias.

The three numbers are the same: gradients are accumulated within a step, and a training that skips steps
(`skip_step_on_spikes`) has its states under other names.

Facts: maxtext 0.2.5 (PyPI), optimizers/optimizers.py (`get_optimizer`, `adam_pax`); the same and
trainers/pre_train/train.py at e591f30cb of 2026-08-22 for steps; optax 0.2.8 `adamw`, whose moments, without
`adam_eps_root`, are those of torch's AdamW.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from formats.checkpoint import Checkpoint
from formats.disk.chunks import Array, arrays, whole_number
from formats.errors import RefusedError, SourceError, UnsupportedError, some
from formats.huggingface.maxtext.changes import change_of, changed
from formats.huggingface.maxtext.checkpoint import renamed
from formats.huggingface.maxtext.decoder import neighbours_of
from formats.huggingface.maxtext.layers import by_layer
from formats.huggingface.maxtext.orbax import Tree, read_tree
from formats.huggingface.maxtext.tables import slots_of
from formats.layout.pieces import Scattered, match_pieces
from formats.model.accepted import SCALED_STEPS
from formats.model.spec import ModelSpec
from formats.optimizer import Optimizer, states_by

OPTIMIZER = "opt_state."
MOMENT = re.compile(r"opt_state\.0\.(?P<state>mu|nu)\.params\.(?P<key>.+)")
"""The name of a moment of a parameter."""
STATES = {"mu": "exp_avg", "nu": "exp_avg_sq"}
"""Moment: its name in torch."""
COUNTS = ("opt_state.0.count", "opt_state.2.count", "step")
WITHOUT = "convert the weights without --with-optimizer"


def is_trained(source: Checkpoint) -> bool:
    """Whether there are optimizer states besides the weights."""
    return bool(source.state)


def read(source: Checkpoint) -> Optimizer:
    """Read the optimizer of an opened checkpoint of MaxText.

    Raises:
        SourceError: there is no optimizer, or it is damaged or incomplete.
        UnsupportedError: the optimizer is not AdamW.
        RefusedError: parameters that MaxText stores otherwise than transformers would take other steps.
    """
    optimizer = _read(source)
    _require_same_steps(source)
    return optimizer


def _read(source: Checkpoint) -> Optimizer:
    tree = read_tree(source.home)
    every = [*map(".".join, tree.names)]
    names = [name for name in every if name.startswith(OPTIMIZER)]
    if not names:
        raise SourceError(f"{source.root} holds no optimizer", "take the checkpoint of a training, with its opt_state")
    moments: dict[str, dict[str, str]] = {state: {} for state in STATES.values()}
    for name in names:
        if match := MOMENT.fullmatch(name):
            moments[STATES[match["state"]]][match["key"]] = name
    if others := sorted({*names} - {*COUNTS, *(name for keys in moments.values() for name in keys.values())}):
        raise UnsupportedError(
            f"{source.home}: its optimizer keeps {some(others, 3)}, and only MaxText's adamw is carried", WITHOUT
        )
    described = arrays(tree.store, dict.fromkeys([*names, *(name for name in every if name in COUNTS)]))
    of_states = {state: _state(source, state, keys, tree, described) for state, keys in moments.items()}
    return Optimizer(of_states, _step(source, tree, described), {}, notes=tuple(renamed(source.home, tree)))


states = states_by(_read)


def _state(
    source: Checkpoint, state: str, keys: Mapping[str, str], tree: Tree, described: Mapping[str, Array]
) -> Checkpoint:
    """Return one state of all parameters as a checkpoint of its own.

    Raises:
        SourceError: a parameter has no such state, or one of another shape.
    """
    spec, assets = source.spec, source.assets
    assert isinstance(spec, ModelSpec)
    assert assets is not None
    tensors = dict[str, Scattered]()
    for key, name in keys.items():
        tensors |= by_layer(key, name, described[name], tree.store, spec)
    slots = slots_of(spec, source.padded_vocab or 0, neighbours=neighbours_of(spec, assets))
    if lost := next((slot.keys[0] for slot in slots if tensors.keys().isdisjoint(slot.keys)), None):
        raise SourceError(
            f"{source.home} holds no {state} of {lost}",
            "is it frozen? an optimizer moves with a model that is trained as a whole",
        )
    _, pieces, _ = match_pieces(slots, tensors, (), source.home)
    return replace(source, tensors=tuple(changed(piece, spec, state) for piece in pieces), dropped=(), twins=())


def _step(source: Checkpoint, tree: Tree, described: Mapping[str, Array]) -> int:
    """Return the number of steps that the optimizer has made.

    Raises:
        SourceError: the number is missing, or none from 1 on.
        UnsupportedError: the schedule of the learning rate or the training has counted another number.
    """
    counts = dict[str, int]()
    for name in COUNTS:
        count = whole_number(tree.store, name, described.get(name))
        if count is None:
            raise SourceError(f"{source.home} holds no number {name}", WITHOUT)
        counts[name] = count
    if len({*counts.values()}) > 1:
        told = " and ".join(f"{name} = {count}" for name, count in counts.items())
        raise UnsupportedError(f"{source.home} has made different numbers of steps: {told}", WITHOUT)
    step = counts[COUNTS[0]]
    if step < 1:
        raise SourceError(f"{source.home}: its optimizer has made {step} steps", WITHOUT)
    return step


def _require_same_steps(source: Checkpoint) -> None:
    """Refuse moments of parameters that are stored otherwise than in transformers, unless the user accepts them.

    With w = c * stored, MaxText's steps of w are c times those of a framework that trains w itself at the same rate;
    and its weight decay draws a norm that is stored plus 1 to -1.

    Raises:
        RefusedError: there are such parameters.
    """
    assert isinstance(source.spec, ModelSpec)
    spec = source.spec
    found = dict[str, float]()
    for placed in source.tensors:
        if change := change_of(placed, spec):
            found |= dict.fromkeys(placed.slot.rule.pattern.tensors, change.factor)
    if found and SCALED_STEPS not in source.settings.accept:
        factors = ", ".join(
            f"{name} {factor:.4g}" if factor != 1 else f"{name} 1 and another weight decay"
            for name, factor in found.items()
        )
        raise RefusedError(
            f"{source.home}: MaxText stores some parameters otherwise, and its steps of them are those of another "
            f"framework at the same rate times: {factors}",
            f"--accept {SCALED_STEPS} carries the moments; in groups of their own, with that factor times the rate, "
            "and weight decay and epsilon divided by it, they train on as in MaxText",
        )
