"""The layers that predict tokens after the next (MTP), by their keys in a model's files.

Facts: transformers 5.23.0, conversion_mapping.py `MtpModel`. The classes of models leave these layers out, so that
a config does not tell whether files hold them; a model that transformers has saved has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from formats.checkpoint import Settings
from formats.families import family_named
from formats.layout.table import MTP
from formats.model.coherence import FURTHER
from formats.model.spec import ModelSpec, Spec
from formats.model.untabled import language

PREFIX = re.compile(r"((?:.*\.)?layers\.\d+\.)(?:enorm|hnorm|eh_proj)\..*|((?:model\.)?mtp\.).*")
"""What all keys of such a layer begin with: its number, of which its own tensors tell, or a word of its own."""
NUMBER = re.compile(r"\\\{\w+\\\}")
JOIN = "mtp_join"
"""The tensor that each such layer has once, and no other layer."""


def keys_of(keys: Iterable[str]) -> list[str]:
    """Those of some keys that are of such layers."""
    every = list(keys)
    prefixes = tuple({match[1] or match[2] for match in map(PREFIX.fullmatch, every) if match})
    return [key for key in every if key.startswith(prefixes)] if prefixes else []


def dropped(keys: Iterable[str], settings: Settings) -> list[str]:
    """Those that the user leaves out."""
    return keys_of(keys) if MTP in settings.drop else []


def count(spec: ModelSpec, keys: Iterable[str]) -> int:
    """How many such layers files hold with these keys, of a family whose table has lines for them."""
    joins = [rule.key for rule in family_named(spec.family).tensors if JOIN in rule.pattern.tensors]
    patterns = [re.compile(NUMBER.sub(r"(\\d+)", re.escape(key))) for key in joins]
    return sum(1 for key in keys if any(pattern.fullmatch(key) for pattern in patterns))


def counted(config: dict[str, Any], spec: Spec, dropped: Iterable[str]) -> dict[str, Any]:
    """A config that says how many such layers the files have which it will be with.

    Args:
        config: what is otherwise written; nothing else has it.
        spec: the model.
        dropped: keys of the source that are left out.
    """
    inner = language(config)
    if isinstance(spec, ModelSpec) and spec.mtp_layers:
        joins = [rule.key for rule in family_named(spec.family).tensors if JOIN in rule.pattern.tensors]
        if any("{layer}" in key for key in joins) and not inner.get(FURTHER[0]):  # they are numbered after the others
            inner[FURTHER[0]] = spec.mtp_layers
    elif keys_of(dropped):
        inner |= {key: 0 for key in FURTHER if inner.get(key)}
    return config
