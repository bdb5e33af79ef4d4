"""The model that the manifest beside a checkpoint records.

The args of Megatron name no family and spell out what a config leaves to a default. Of a checkpoint that a conversion
wrote, and whose config is gone, the manifest tells which of the families that the args fit it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import MANIFEST
from formats.disk.json_file import read_json
from formats.errors import RefusedError, UnsupportedError, VitruvianError
from formats.families import FAMILIES
from formats.megatron.args.args import from_megatron
from formats.model.checks import checked
from formats.model.spec import ModelSpec


def as_recorded(spec: ModelSpec, args: Mapping[str, Any], settings: Mapping[str, Any], folder: Path) -> ModelSpec:
    """The spec of args in the words of the manifest in their folder.

    Args:
        spec: what the args say alone.
        args: the args of a checkpoint that a conversion wrote, and that no config travels with.
        settings: values that overrule the args.
        folder: the folder of the manifest, where there is one.

    Returns:
        `spec` where there is no manifest of a model with a table, where it contradicts the args, or where the user
        named a family.
    """
    recorded = _recorded(folder)
    if recorded is not None and not FAMILIES[spec.family].file:
        base = replace(recorded, max_positions=spec.max_positions, vocab=spec.vocab or recorded.vocab)
        with suppress(RefusedError, UnsupportedError):
            return from_megatron(args, settings, base, str(folder), settled=True)
    return spec


def _recorded(folder: Path) -> ModelSpec | None:
    """The model in the manifest of a folder; None where there is none, or where it makes no model with a table."""
    path = folder / MANIFEST
    facts = read_json(path).get("settings") if path.is_file() else None
    if not isinstance(facts, dict) or "layers" not in facts or facts.get("family") not in FAMILIES:
        return None
    own, biases = facts.get("own", {}), facts.get("biases", [])
    family = FAMILIES[facts["family"]]
    if not isinstance(own, dict) or own.keys() != family.own.keys() or not isinstance(biases, list):
        return None
    if tuple(biases) not in family.bias_choices():
        return None
    with suppress(VitruvianError):
        return checked({**facts, "own": own, "biases": tuple(biases)}, str(path))
    return None
