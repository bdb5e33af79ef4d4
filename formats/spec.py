"""ModelSpec: the settings that the weights depend on, whatever framework wrote them.

Each framework's spelling is a table in a file of its own: `hf_config.py`, `megatron_args.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from formats.errors import SourceError, UnsupportedError, UsageError
from formats.families import family_named
from formats.layout import model_tensors

OPTIONAL = ("family", "vocab", "rope_scaling", "sliding_window", "notes")


@dataclass(frozen=True)
class ModelSpec:
    """The settings of a decoder, whatever framework wrote it.

    `vocab` is the true vocabulary, None while unknown; `rope_scaling` is in Hugging Face's terms (`rope_type` and its
    parameters), None for plain rotary embeddings; `sliding_window` counts the tokens that a token sees, itself
    included. `notes` say which settings came from a documented default.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int | None
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    sliding_window: int | None
    tied: bool
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def conditions(self) -> frozenset[str]:
        """The layout conditions that follow from the settings."""
        return frozenset({"tied" if self.tied else "untied"})

    @property
    def tensors(self) -> tuple[str, ...]:
        """The logical tensors of the model, in the order of its family's table."""
        return model_tensors(family_named(self.family).tensors, self.conditions)

    def sizes(self, padded_vocab: int | None = None) -> dict[str, int]:
        """The size of each axis; `padding` is what a padded vocabulary adds."""
        vocab = self.vocab if self.vocab is not None else padded_vocab or 0
        return {
            "layer": self.layers, "hidden": self.hidden, "vocab": vocab, "padding": (padded_vocab or vocab) - vocab,
            "group": self.kv_heads, "head": self.heads // self.kv_heads, "dim": self.head_dim,
            "half": 2, "pair": self.head_dim // 2, "ffn": self.ffn,
        }  # fmt: skip

    def differences(self, other: ModelSpec) -> list[str]:
        """The settings in which two models differ, as `name: this | other`."""
        return [
            f"{one.name}: {getattr(self, one.name)} | {getattr(other, one.name)}"
            for one in fields(self)
            if one.compare and getattr(self, one.name) != getattr(other, one.name)
        ]


REQUIRED = [one.name for one in fields(ModelSpec) if one.name not in OPTIONAL]
"""The settings without which there is no model."""


def checked(values: dict[str, Any], where: str) -> ModelSpec:
    """Build a spec from found values; each must be there and of its type.

    Raises:
        SourceError: one is missing, or makes no sense; the message names the flag that supplies it.
    """
    for name in REQUIRED:
        value = values.get(name)
        if value is None:
            raise SourceError(f"{where} does not say {name}, and there is no safe default", f"add --set {name}=VALUE")
        if name == "tied":
            sound = isinstance(value, bool)
        else:
            numbers = (int, float) if name in ("norm_epsilon", "rope_theta") else int
            sound = isinstance(value, numbers) and not isinstance(value, bool) and value >= 0
        if not sound:
            raise SourceError(f"{where} says {name} = {value!r}", f"correct it with --set {name}=VALUE")
    for name in ("norm_epsilon", "rope_theta"):
        values[name] = float(values[name])
    spec = ModelSpec(**values)
    if not spec.layers or not spec.kv_heads or spec.heads % spec.kv_heads:
        raise SourceError(
            f"{where}: {spec.heads} heads in {spec.kv_heads} key/value groups over {spec.layers} layers make no model"
        )
    if spec.head_dim % 2:
        raise UnsupportedError(f"{where}: a head dimension of {spec.head_dim} is odd, so it cannot be rotary")
    return spec


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Parse `--set NAME=VALUE`; a value is JSON, or `none`.

    Raises:
        UsageError: no such setting, or no such value.
    """
    names = {one.name for one in fields(ModelSpec)} - {"family", "notes"}
    parsed = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in names:
            raise UsageError(f"--set {setting}: there is no setting {name!r}", f"settings: {', '.join(sorted(names))}")
        try:
            parsed[name] = (
                None if text.lower() == "none" else json.loads(text.lower() if text in ("True", "False") else text)
            )
        except ValueError:
            raise UsageError(f"--set {setting}: {text!r} is no JSON value") from None
    return parsed
