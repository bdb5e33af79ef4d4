"""Makes a slices json (the tokens of each data set in each phase) from tokens of phases and weights of data sets."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from formats.errors import SourceError, short
from train.data.packs.inputs import POOLS
from train.data.packs.phases import largest_remainders

PHASES = tuple(phase for phases in POOLS.values() for phase in phases)
EXAMPLE = "U1: {tokens: 150000000000, weights: {arxiv: 1, wiki: 2.5}}"


def slices_of(path: Path) -> dict[str, Any]:
    """The content of a slices json: numbers of tokens that add up to those of each phase.

    Args:
        path: a YAML file that has, for some of U1, U2, N, U3 and Ext, the tokens, and a weight of each data set used.

    Raises:
        SourceError: the file is not of this form.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SourceError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict) or not content or set(content) - {*PHASES}:
        raise SourceError(f"{path} is no mapping of {', '.join(PHASES)}", EXAMPLE)
    parts = {phase: _phase(path, phase, entry) for phase, entry in content.items()}
    names = list(dict.fromkeys(name for _, weights in parts.values() for name in weights))
    slices: dict[str, Any] = {"names": names}
    for phase in PHASES:
        tokens, weights = parts.get(phase, (0, {}))
        whole = sum(weights.values(), Fraction(0))
        shares = [tokens * weights.get(name, Fraction(0)) / (whole or 1) for name in names]
        slices[phase] = {"total": list(largest_remainders(shares, tokens))}
    return slices


def _phase(path: Path, phase: str, entry: Any) -> tuple[int, dict[str, Fraction]]:
    """The tokens of a phase, and the weights of its data sets."""
    weights = entry.get("weights") if isinstance(entry, dict) else None
    tokens = entry.get("tokens") if isinstance(entry, dict) else None
    if type(tokens) is not int or tokens < 1 or not isinstance(weights, dict) or not weights:
        raise SourceError(f"{path}: {phase} is {short(entry)}, and not tokens and weights", EXAMPLE)
    for name, weight in weights.items():
        if not isinstance(name, str) or isinstance(weight, bool) or not isinstance(weight, int | float) or weight <= 0:
            raise SourceError(f"{path}: {phase} gives {short(name)} the weight {short(weight)}", EXAMPLE)
    return tokens, {name: Fraction(str(weight)) for name, weight in weights.items()}
