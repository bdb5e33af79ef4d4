"""Which modules Megatron-Bridge gives an adapter, by the patterns in `target_modules` and `exclude_modules`.

    linear_qkv                      every module of that name
    *.layers.0.*.linear_qkv         modules whose whole name matches: `*` is any text, `.` any character

Bridge takes what is between two `*` for a regular expression. One of a fixed length, such as `[0-3]`, is understood:
then the first place where it matches is the right one, and no pattern takes more than a few passes over a name.

Without `target_modules` every linear layer gets one, so `exclude_modules` counts alone. CanonicalLoRA has names of its
own for the parts of a fused matrix, such as `linear_q`. The number of a layer counts from 0 in each pipeline stage.

Facts: Megatron-Bridge 0.6.2 peft/module_matcher.py `match`, peft/utils.py `wildcard_match`, peft/canonical_lora.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from formats.errors import SourceError, UnsupportedError, short, some

STORED_EXPERTS = ".mlp.experts.experts."
"""What stands before the name of a matrix of experts in a checkpoint."""
LIVE_EXPERTS = (".mlp.experts.", ".mlp.experts.local_experts.0.")
"""The same in the model: of grouped experts, and of experts one by one."""
LAYER = re.compile(r"\.layers\.(\d+)\.")
FIELDS = ("target_modules", "exclude_modules")
VARIABLE = re.compile(r"(?<!\\)[+?{|(^$]")
"""What makes a regular expression one of several lengths, or ties it to a place."""


def patterns(peft: Mapping[str, Any], where: Path) -> tuple[list[str], list[str]]:
    """The patterns of modules that get an adapter, and of those that get none.

    Raises:
        SourceError: a field is no list of patterns.
        UnsupportedError: a part of a pattern besides `*` matches texts of several lengths.
    """
    lists = []
    for field in FIELDS:
        values = peft.get(field) or []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise SourceError(f"{where}: {field} of its peft is {short(values)}, which is no list of names")
        try:
            [_parts(value) for value in values]
        except re.error as error:
            raise SourceError(f"{where}: {field} of its peft has a pattern that is none: {error}") from None
        if odd := next((value for value in values if VARIABLE.search(value)), ""):
            raise UnsupportedError(
                f"{where}: {field} of its peft has the pattern {short(odd)}, of which more than * is of any length"
            )
        lists.append(values)
    return lists[0], lists[1]


Modules = Iterable[tuple[str, Collection[str]]]
"""Modules by their names in a checkpoint, such as `decoder.layers.0.self_attention.linear_qkv`, each with the names
that `target_modules` has for its adapter."""


def require(
    modules: Modules,
    without: Modules,
    targets: Sequence[str],
    excluded: Sequence[str],
    stage_layers: int,
    folder: Path,
) -> None:
    """Refuse an adapter of modules that its config leaves out, or without one of those that it names.

    Args:
        modules: the modules with an adapter.
        without: the modules of the model without one.
        targets: the patterns of modules that get an adapter; if there are none, all do.
        excluded: the patterns of modules that get none.
        stage_layers: how many layers a pipeline stage may have, whose numbers are then unknown; 0 without stages.
        folder: the folder of the iteration, for error messages.

    Raises:
        SourceError: it is such an adapter.
    """

    def trained(stored: str, names: Collection[str]) -> list[bool]:
        """Whether a module gets an adapter, by each number that its layer may have."""
        numbers = map(str, range(stage_layers)) if stage_layers else [r"\g<1>"]
        live = {LAYER.sub(rf".layers.{number}.", stored) for number in numbers}
        return [_is_trained(module, names, targets, excluded) for module in live]

    lost = [name for stored, names in without if targets and all(trained(stored, names)) for name in sorted(names)]
    if lost:
        raise SourceError(f"{folder} holds no LoRA of {some([*dict.fromkeys(lost)], 3)}, which its target_modules name")
    beyond: dict[str, None] = {}
    for stored, names in modules:
        if not any(trained(stored, names)):
            beyond |= dict.fromkeys(f"{stored.rpartition('.')[0]}.{name}" for name in sorted(names))
    if beyond:
        raise SourceError(
            f"{folder} has a LoRA of {len(beyond)} modules that its config leaves out: {some([*beyond], 3)}",
            f"{' or '.join(FIELDS)} was changed after the training: take the file of the run",
        )


def _is_trained(module: str, names: Collection[str], targets: Sequence[str], excluded: Sequence[str]) -> bool:
    place, _, own = module.rpartition(".")
    if _is_named(f"{place}.", own, excluded):
        return False
    return not targets or any(_is_named(f"{place}.", name, targets) for name in names)


def _is_named(place: str, name: str, given: Sequence[str]) -> bool:
    """Whether a pattern is the name of a module, or matches its name in the model, which begins with its place."""
    places = [place.replace(STORED_EXPERTS, live) for live in LIVE_EXPERTS] if STORED_EXPERTS in place else [place]
    return any(pattern == name or any(_matches(pattern, f"{live}{name}") for live in places) for pattern in given)


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a whole name."""
    first, *others = _parts(pattern)
    if not others:
        return first.fullmatch(name) is not None
    found = first.match(name)
    for part in others[:-1]:
        found = found and part.search(name, found.end())
    return found is not None and any(others[-1].fullmatch(name, end) for end in range(found.end(), len(name) + 1))


@lru_cache(maxsize=1024)
def _parts(pattern: str) -> tuple[re.Pattern[str], ...]:
    """What is between the `*` of a pattern."""
    return tuple(map(re.compile, pattern.split("*")))
