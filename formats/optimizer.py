"""What a training keeps of a model besides its weights, in no framework's terms: Adam's masters, moments and step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from formats.checkpoint import Checkpoint

STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""What there is of a parameter: the float32 master, unless it is float32 itself, and Adam's moments."""


class Group(NamedTuple):
    """How Adam treats some parameters, as torch calls it."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Optimizer:
    """What is left of a training when its framework's own words are taken away.

    Attributes:
        states: those of STATES that there are, each as a checkpoint of its own with the model's logical tensors.
        step: how many updates Adam has made.
        groups: how each logical tensor (name, layer) is treated.
        samples: how many samples it was trained on; None where the source does not say.
    """

    states: Mapping[str, Checkpoint]
    step: int
    groups: Mapping[tuple[str, int | None], Group]
    samples: int | None = None

    @cached_property
    def dtypes(self) -> dict[str, Mapping[tuple[str, int | None], str]]:
        """The element type of each logical tensor, by state."""
        return {state: source.dtypes() for state, source in self.states.items()}
