"""Find the layers that predict tokens after the next (MTP layers) by their keys in a model's files.

Facts: transformers 5.23.0, conversion_mapping.py `MtpModel`. The classes of models leave these layers out, so that
a config does not tell whether files hold them; a model that transformers has saved has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from formats.checkpoint import Settings
from formats.errors import SourceError
from formats.families import family_named
from formats.layout.table import MTP
from formats.model.coherence import FURTHER
from formats.model.spec import ModelSpec, Spec
from formats.model.untabled import language

PREFIX = re.compile(r"((?:.*\.)?layers\.\d+\.)(?:enorm|hnorm|eh_proj)\..*|((?:model\.)?mtp\.).*")
"""The prefix of all keys of an MTP layer: the number of the layer, if it has one of these tensors, or `mtp.`."""
NUMBER = re.compile(r"\\\{\w+\\\}")
JOIN = "mtp_join"
"""The logical tensor that each MTP layer has once, and no other layer."""


def keys_of(keys: Iterable[str]) -> list[str]:
    """The keys that belong to MTP layers."""
    every = list(keys)
    prefixes = tuple({match[1] or match[2] for match in map(PREFIX.fullmatch, every) if match})
    return [key for key in every if key.startswith(prefixes)] if prefixes else []


def dropped_keys(keys: Iterable[str], settings: Settings) -> list[str]:
    """The keys of MTP layers, if the user drops these layers; else none."""
    return keys_of(keys) if MTP in settings.drop else []


def count(spec: ModelSpec, keys: Iterable[str]) -> int:
    """The number of MTP layers among the keys of a model's files; 0 if the table of its family has none."""
    return sum(1 for _ in _joins(spec, keys))


def require_uncounted(spec: ModelSpec, keys: Iterable[str], file: str) -> None:
    """Refuse a config whose `num_hidden_layers` counts an MTP layer, which would become a layer of the decoder.

    Args:
        spec: the model.
        keys: the keys in its files, with those of MTP layers that the user drops.
        file: the name of the config, for the error.

    Raises:
        SourceError: the number of an MTP layer is below `num_hidden_layers`.
    """
    joins = {int(match[1]): match[0] for match in _joins(spec, keys) if match.re.groups}
    first = min(joins, default=spec.layers)
    if first < spec.layers:
        raise SourceError(
            f"{file} says {spec.layers} layers, and number {first} of them predicts a further token: it has "
            f"{joins[first]}",
            f"num_hidden_layers counts the layers before it: {first}?",
        )


def require_all(spec: ModelSpec, config: dict[str, Any], file: str) -> None:
    """Refuse a model some of whose MTP layers are missing. One without any is as transformers saves it: see `note`.

    Raises:
        SourceError: the files have fewer MTP layers than the config says, and not none.
    """
    key, number = _said(config)
    if 0 < spec.mtp_layers < number:
        raise SourceError(
            f"{file} says {key} = {number}, and the files have {spec.mtp_layers} of these layers",
            "is a file missing? --drop mtp leaves such layers out; or correct the number",
        )


def note(spec: Spec, config: dict[str, Any], dropped: Iterable[str]) -> str:
    """A note on a config that speaks of MTP layers of which there are none; empty for any other.

    Args:
        spec: the model.
        config: the config.
        dropped: keys of the source that are left out, of which those of MTP layers have a note of their own.
    """
    key, number = _said(config)
    if not isinstance(spec, ModelSpec) or spec.mtp_layers or not number or keys_of(dropped):
        return ""
    if not any(JOIN in rule.pattern.tensors for rule in family_named(spec.family).tensors):
        return ""
    return (
        f"config.json says {key} = {number}, and there is no layer that predicts further tokens (MTP), as in what "
        "transformers saves: if the files had any, they are lost"
    )


def _said(config: dict[str, Any]) -> tuple[str, int]:
    """The key of a config that says how many MTP layers there are, and the number."""
    of = language(config)
    return max(
        ((key, of[key]) for key in FURTHER if type(of.get(key)) is int), key=lambda said: said[1], default=("", 0)
    )


def _joins(spec: ModelSpec, keys: Iterable[str]) -> Iterator[re.Match[str]]:
    """The keys of the joining matrices, of which each MTP layer has one; a group holds the number of the layer."""
    joins = [rule.key for rule in family_named(spec.family).tensors if JOIN in rule.pattern.tensors]
    patterns = [re.compile(NUMBER.sub(r"(\\d+)", re.escape(key))) for key in joins]
    return (match for key in keys for pattern in patterns if (match := pattern.fullmatch(key)))


def with_layer_count(config: dict[str, Any], spec: Spec, dropped: Iterable[str]) -> dict[str, Any]:
    """The config with the number of MTP layers in the files that are written.

    Args:
        config: the config to be written, which is changed in place.
        spec: the model.
        dropped: keys of the source that are left out.
    """
    inner = language(config)
    if isinstance(spec, ModelSpec) and spec.mtp_layers:
        joins = [rule.key for rule in family_named(spec.family).tensors if JOIN in rule.pattern.tensors]
        if any("{layer}" in key for key in joins):  # MTP layers have numbers
            inner[FURTHER[0]] = spec.mtp_layers
    elif keys_of(dropped):
        inner |= {key: 0 for key in FURTHER if inner.get(key)}
    return config
