"""The state of an optimizer, independent of the framework: FP32 master weights, moments, step, parameter groups."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint
from formats.errors import SourceError, UnsupportedError, short
from formats.layout.slots import Slot
from formats.torch_files.archive_writer import NUMBERS, Small

STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""Optimizer states of a parameter: the FP32 master weight, unless the parameter is float32 itself, and Adam's moments;
Lion has only the first moment."""
MOMENTUM = "momentum_buffer"
"""The state that Muon keeps of a matrix in place of Adam's moments: the running mean of its gradients."""
CARRIED = (*STATES, MOMENTUM)
"""Every state of a parameter that is carried."""


ADAM = frozenset({"amsgrad", "bias_correction", "correct_bias", "t_beta3"})
"""Settings of which the parameter groups of every Adam have at least one: torch's and DeepSpeedCPUAdam, FusedAdam, that
of old transformers, and bitsandbytes' (whose LAMB and AdEMAMix have it too, and keep or say more)."""
OTHERS = {"max_coeff": "LAMB", "momentum_decay": "NAdam"}
"""Setting in a parameter group: another optimizer that has it, and keeps the same states as Adam."""
USUAL = {"amsgrad": False, "maximize": False, "bias_correction": True, "correct_bias": True}
"""Settings that change Adam's step: the only value of each that is carried."""
DECOUPLED = ("decoupled_weight_decay", "adam_w_mode", "weight_decouple")
"""Settings that are true if the weight decay is AdamW's, in torch, apex and others; false: it is in the gradients."""
NEUTRAL = {"lr_mult": 1, "lr_scale": 1}
"""Factors that a schedule multiplies the learning rate with once more: the value that changes nothing."""
KNOWN = {
    "carried": ("params", "param_names", "lr", "betas", "eps", "weight_decay", "step"),
    "how torch computes the same": ("foreach", "fused", "capturable", "differentiable"),
    "of a schedule": (
        "initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "start_wd", "end_wd",
    ),
    "labels of DeepSpeed": ("name", "moe", "_ds_source_param_group_id"),
    "labels of Megatron": (
        "wd_mult", "pre_wd_mult", "pre_lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config",
        "optimizer",
    ),
}  # fmt: skip
"""Other settings in Adam's groups, by their use (torch 2.13.0, DeepSpeed 0.19.8, megatron-core 0.16.1
optimizer/__init__.py)."""
_KNOWN = frozenset({*USUAL, *DECOUPLED, *NEUTRAL}.union(*KNOWN.values()))
_UNSET: tuple[object, ...] = (None, False, "", (), [], {})
"""Values with which an unknown setting is taken to have no effect."""


STATE_BY_SETTING = {"amsgrad": "max_exp_avg_sq", "momentum_decay": "mu_product"}
"""Setting in a parameter group: the further state that an optimizer with it keeps of each parameter."""


OPTIMIZER_BY_STATE = {
    "square_avg": "RMSprop or Adadelta",
    "momentum_buffer": "Muon or SGD with momentum",
    "exp_avg_sq_row": "Adafactor, of transformers",
    "RMS": "Adafactor, of transformers",
    "row_var": "Adafactor, of torch",
    "variance": "Adafactor, of torch",
    "state1": "an 8-bit optimizer of bitsandbytes",
    "__bnb_optimizer_quant_state__": "an 8-bit optimizer of bitsandbytes",
    "exp_avg_diff": "Adan",
    "exp_inf": "Adamax",
    "max_exp_avg_sq": "Adam with amsgrad",
    "mu_product": "NAdam",
    "sum": "Adagrad",
    "GG": "SOAP",
    "z": "a schedule-free optimizer",
}
"""State of a parameter: the optimizer that keeps it (torch 2.13.0, transformers 5.23.0; the states of SOAP, Adan,
bitsandbytes and the schedule-free optimizers as their authors' code names them)."""


ADAFACTOR = {
    ("row_var", "exp_avg_sq_row"): "its statistics of rows and columns are no tensors of the model",
    (
        "variance",
        "RMS",
    ): "its step is bounded by the mean square of each rank's part, and would be another on other ranks",
}
"""Why Adafactor is not carried, by the states that it keeps. Of whole parameters these are statistics of rows and
columns (torch 2.13.0 optim/_adafactor.py, transformers 5.23.0 optimization.py). FSDP1 and ZeRO pass it a rank's flat
part as a parameter, which has no rows and columns; with FSDP2 and tensor parallelism of torch 2.13.0 neither class
makes a step."""


def refusal_hint(kept: Collection[str]) -> str:
    """The hint for an optimizer that is refused for the states that it keeps."""
    reasons = [f"{reason}: " for states, reason in ADAFACTOR.items() if not set(states).isdisjoint(kept)]
    return "".join(reasons[:1]) + "convert the weights without the optimizer"


def whose(states: Collection[str]) -> str:
    """The optimizer, other than Adam, that keeps such states, in parentheses for a message; empty if unknown."""
    names = [name for state, name in OPTIMIZER_BY_STATE.items() if state in states]
    return f" ({names[0]})" if names else ""


def require_states(group: Mapping[str, Any], where: str) -> None:
    """Refuse a parameter group whose settings give its parameters a state that is not carried.

    Raises:
        UnsupportedError: a setting in `STATE_BY_SETTING` is on.
    """
    for name, state in STATE_BY_SETTING.items():
        if group.get(name):
            raise UnsupportedError(
                f"{where} says {name} = {short(group[name])}: such an optimizer keeps {state} too, which is not carried"
            )


def require_adam(group: Mapping[str, Any], where: str) -> None:
    """Refuse a parameter group that is not one of a plain AdamW.

    Raises:
        UnsupportedError: the group is of another optimizer, or of an Adam that computes something else.
    """
    other = next((name for key, name in OTHERS.items() if key in group), "")
    if other or not ADAM & group.keys():  # torch's RAdam has none of these
        raise UnsupportedError(f"{where}: its optimizer is {other or 'of an unknown kind'}, and only Adam's is carried")
    _require_usual(group, where, "Adam")


def _require_usual(group: Mapping[str, Any], where: str, kind: str) -> None:
    """Refuse a parameter group with a setting that changes the step of the optimizer `kind` (UnsupportedError)."""
    for name, usual in USUAL.items():
        if bool(group.get(name, usual)) is not usual:
            raise UnsupportedError(f"{where} says {name} = {group[name]}, and only {kind} with {usual} is carried")
    if group.get("weight_decay") and any(group.get(name) in (False, 0) for name in DECOUPLED):
        decay = short(group["weight_decay"])
        raise UnsupportedError(f"{where}: a weight decay of {decay} is in the gradients, and not AdamW's")
    for name, value in group.items():
        if (name in NEUTRAL and value != NEUTRAL[name]) or (name not in _KNOWN and value not in _UNSET):
            raise UnsupportedError(
                f"{where} says {name} = {short(value)}, and what that does to {kind}'s step is not carried",
                "convert the weights without the optimizer",
            )


class Group(NamedTuple):
    """A parameter group of Adam, with torch's names."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Muon(NamedTuple):
    """A parameter group of torch's Muon, with torch's names (2.13.0 optim/_muon.py)."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None


class Lion(NamedTuple):
    """A parameter group of Lion (lion-pytorch 0.2.5, DeepSpeed 0.19.8 ops/lion)."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float


AnyGroup = Group | Lion | Muon
"""A parameter group of an optimizer that is carried."""
MOMENTS: Mapping[type[AnyGroup], tuple[str, ...]] = {Muon: (MOMENTUM,), Lion: ("exp_avg",), Group: STATES[1:]}
"""Type of a parameter group: the states that its optimizer keeps of a parameter besides the FP32 master weight."""
NAMES: Mapping[type[AnyGroup], str] = {Muon: "Muon", Lion: "Lion", Group: "Adam"}
"""Type of a parameter group: the name of its optimizer."""
OF_MUON = frozenset({"ns_steps", "ns_coefficients"})
"""Settings that Muon alone has."""
RATES = (None, "original", "match_rms_adamw")
"""Values of `adjust_lr_fn`: how torch's Muon scales the learning rate by the shape of a matrix."""


def kind_of(about: Mapping[str, Any]) -> type[AnyGroup]:
    """The optimizer that a parameter group looks like: Lion's group has betas and no eps."""
    if not OF_MUON.isdisjoint(about):
        return Muon
    return Lion if "betas" in about and "eps" not in about else Group


def required_states(groups: Iterable[Mapping[str, Any]], states: Collection[str]) -> tuple[str, ...]:
    """The states of `CARRIED` that parameters must have, by their groups and by the `states` of any parameter.

    Without groups the states of Adam are required.
    """
    kinds = {kind_of(group) for group in groups} or {Group}
    required = {STATES[0], *(state for kind in kinds for state in MOMENTS[kind])}
    return tuple(state for state in CARRIED if state in required or (state in STATES and state in states))


def group_of(about: Mapping[str, Any], where: str) -> AnyGroup:
    """A parameter group of Adam, Lion or Muon, out of the settings of a group of torch.

    Raises:
        SourceError: a setting is missing, not a finite number, or a value that no such optimizer takes.
        UnsupportedError: see `require_adam`; or the group is of a Lion or Muon that computes something else.
    """
    return READERS[kind_of(about)](about, where)


def _adam(about: Mapping[str, Any], where: str) -> Group:
    require_adam(about, where)
    first, second = _numbers(about.get("betas"), 2, f"{where} has the betas", f"{where}: its betas")
    lr, eps, decay = (number_of(about.get(name), f"{where}: its {name}") for name in ("lr", "eps", "weight_decay"))
    _require_within(where, "Adam", {"lr": lr, "eps": eps, "weight_decay": decay}, {"betas": first}, {"betas": second})
    return Group(lr, (first, second), eps, decay)


def _lion(about: Mapping[str, Any], where: str) -> Lion:
    _require_usual(about, where, "Lion")
    first, second = _numbers(about["betas"], 2, f"{where} has the betas", f"{where}: its betas")
    lr, decay = (number_of(about.get(name), f"{where}: its {name}") for name in ("lr", "weight_decay"))
    _require_within(where, "Lion", {"lr": lr, "weight_decay": decay}, {"betas": first}, {"betas": second})
    return Lion(lr, (first, second), decay)


def _muon(about: Mapping[str, Any], where: str) -> Muon:
    other = sorted(name for name in about if name not in {*Muon._fields, *_KNOWN} and about[name] not in _UNSET)
    if other or (missing := [name for name in Muon._fields if name not in about]):
        what = f"says {other[0]} = {short(about[other[0]])}" if other else f"does not say its {missing[0]}"
        raise UnsupportedError(f"{where} {what}: of the optimizers called Muon only that of torch is carried")
    a, b, c = _numbers(about["ns_coefficients"], 3, f"{where} has the ns_coefficients", f"{where}: its ns_coefficients")
    lr, decay, momentum, eps, steps = (
        number_of(about[name], f"{where}: its {name}") for name in ("lr", "weight_decay", "momentum", "eps", "ns_steps")
    )
    settings = {"lr": lr, "weight_decay": decay, "eps": eps, "ns_steps": steps}
    _require_within(where, "Muon", settings, {"momentum": momentum})
    nesterov, rate = about["nesterov"], about["adjust_lr_fn"]
    if type(nesterov) is not bool or rate not in RATES or steps != int(steps):
        values = f"nesterov {short(nesterov)}, adjust_lr_fn {short(rate)} and ns_steps {steps:g}"
        raise SourceError(f"{where} has {values}, which no Muon takes")
    return Muon(lr, decay, momentum, nesterov, (a, b, c), eps, int(steps), rate)


READERS: Mapping[type[AnyGroup], Callable[[Mapping[str, Any], str], AnyGroup]] = {
    Muon: _muon, Lion: _lion, Group: _adam,
}  # fmt: skip
"""Type of a parameter group: the function that reads one."""


def _numbers(values: Any, count: int, what: str, each: str) -> list[float]:
    """The `count` finite numbers of a list (SourceError: `values` is no such list)."""
    if not isinstance(values, tuple | list) or len(values) != count:
        raise SourceError(f"{what} {short(values)}")
    return [number_of(value, each) for value in values]


def _require_within(where: str, kind: str, anything: Mapping[str, float], *fractions: Mapping[str, float]) -> None:
    """Refuse a setting that is negative or infinite, and a fraction that is negative, or 1 or more (SourceError)."""
    for settings, most in ((anything, math.inf), *((fraction, 1.0) for fraction in fractions)):
        for name, value in settings.items():
            if not 0 <= value < most:
                raise SourceError(f"{where}: its {name} is {value:g}, which no {kind} takes")


def number_of(value: Any, what: str) -> float:
    """A finite number as a float; `value` may be a tensor with one element.

    Raises:
        SourceError: the value is no finite number.
    """
    if isinstance(value, Small) and value.dtype in NUMBERS and math.prod(value.shape) == 1:
        value = value.number
    if type(value) not in (int, float) or not math.isfinite(value):
        raise SourceError(f"{what} is {short(value)}, which is no number")
    return float(value)


def step_tensor(step: int) -> Small:
    """The number of steps as torch's Adam keeps it: a float32 (torch/optim/adam.py, `_get_scalar_dtype`).

    Raises:
        UnsupportedError: the number is no float32.
    """
    packed = struct.pack("<f", step)
    if struct.unpack("<f", packed)[0] != step:
        raise UnsupportedError(f"torch's Adam counts steps in float32, and {step} is not one")
    return Small("F32", (), packed)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of a training, independent of the framework.

    Attributes:
        states: the present states of `CARRIED`, each as a checkpoint of its own with the logical tensors that have it.
        step: the number of updates made; None where the source does not record it, as a Lion need not count.
        groups: the parameter group of each logical tensor (name, layer).
        samples: the number of samples trained on; None where the source does not record it.
        notes: messages for the user.
    """

    states: Mapping[str, Checkpoint]
    step: int | None
    groups: Mapping[tuple[str, int | None], AnyGroup]
    samples: int | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def dtypes(self) -> dict[str, Mapping[tuple[str, int | None], str]]:
        """The element type of each logical tensor, by state."""
        return {state: source.dtypes() for state, source in self.states.items()}

    def has(self, state: str, slot: Slot) -> bool:
        """Whether a physical tensor has this state.

        Raises:
            UnsupportedError: only a part of the tensor has the state, or Muon's momentum is that of no single matrix.
        """
        present = {(name, slot.layer) in self.dtypes[state] for name in slot.rule.pattern.tensors}
        if len(present) > 1 or (present == {True} and state == MOMENTUM and len(slot.shape) != 2):
            raise UnsupportedError(
                f"{slot.keys[0]} {[*slot.shape]} is one parameter there, and not one matrix that Muon trained",
                "convert the weights without the optimizer",
            )
        return present == {True}

    def updates(self, where: Path) -> int:
        """The number of updates made, for outputs that need it in a name or a schedule.

        Raises:
            UnsupportedError: the number is unknown.
        """
        if self.step is None:
            raise UnsupportedError(
                f"{where} does not say how many steps its optimizer has made",
                "convert the weights without the optimizer",
            )
        return self.step

    def require_only(self, kinds: Collection[type[AnyGroup]], where: Path, what: str) -> None:
        """Refuse parameter groups of other optimizers than those whose states the target can hold.

        Args:
            kinds: the types of groups that the target holds.
            where: the source, for the message.
            what: a clause on the target, for the message.

        Raises:
            UnsupportedError: a group is of another type.
        """
        for kind in dict.fromkeys(map(type, self.groups.values())):
            if kind not in kinds:
                raise UnsupportedError(
                    f"{where} was trained with {NAMES[kind]}, and {what}: {' and '.join(MOMENTS[kind])} is not carried "
                    "there",
                    "convert the weights without the optimizer",
                )


def states_by(
    read: Callable[[Checkpoint], Optimizer],
) -> Callable[[Checkpoint], tuple[Mapping[str, Checkpoint], dict[str, Any]]]:
    """The function `states` of a format (`formats.format.Training`), from the function that reads its optimizer."""

    def states(source: Checkpoint) -> tuple[Mapping[str, Checkpoint], dict[str, Any]]:
        optimizer = read(source)
        return optimizer.states, {"step": optimizer.step}

    return states
