"""Which modules Megatron-Bridge gives an adapter, by the patterns in `target_modules` and `exclude_modules`.

    linear_qkv                      every module of that name
    *.layers.0.*.linear_qkv         modules whose whole name matches: `*` is any text, the rest a regular expression

Without `target_modules` every linear layer gets one, so `exclude_modules` counts alone. CanonicalLoRA has names of its
own for the parts of a fused matrix, such as `linear_q`. The number of a layer counts from 0 in each pipeline stage.

Facts: Megatron-Bridge 0.6.2 peft/module_matcher.py `match`, peft/utils.py `wildcard_match`, peft/canonical_lora.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from formats.errors import SourceError, short, some

STORED_EXPERTS = ".mlp.experts.experts."
"""What stands before the name of a matrix of experts in a checkpoint."""
LIVE_EXPERTS = (".mlp.experts.", ".mlp.experts.local_experts.0.")
"""The same in the model: of grouped experts, and of experts one by one."""
LAYER = re.compile(r"\.layers\.(\d+)\.")
FIELDS = ("target_modules", "exclude_modules")


def patterns(peft: Mapping[str, Any], where: Path) -> tuple[list[str], list[str]]:
    """The patterns of modules that get an adapter, and of those that get none.

    Raises:
        SourceError: a field is no list of patterns.
    """
    lists = []
    for field in FIELDS:
        values = peft.get(field) or []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise SourceError(f"{where}: {field} of its peft is {short(values)}, which is no list of names")
        try:
            [_compiled(value) for value in values]
        except re.error as error:
            raise SourceError(f"{where}: {field} of its peft has a pattern that is none: {error}") from None
        lists.append(values)
    return lists[0], lists[1]


def require(
    modules: Iterable[tuple[str, Collection[str]]],
    targets: Sequence[str],
    excluded: Sequence[str],
    stage_layers: int,
    folder: Path,
) -> None:
    """Refuse an adapter of modules that its config leaves out.

    Args:
        modules: the modules with an adapter, by their names in a checkpoint, such as
            `decoder.layers.0.self_attention.linear_qkv`; each with the names that `target_modules` has for the adapter.
        targets: the patterns of modules that get an adapter; if there are none, all do.
        excluded: the patterns of modules that get none.
        stage_layers: how many layers a pipeline stage may have, whose numbers are then unknown; 0 without stages.
        folder: the folder of the iteration, for error messages.

    Raises:
        SourceError: it is such an adapter.
    """
    beyond: dict[str, None] = {}
    for stored, names in modules:
        numbers = map(str, range(stage_layers)) if stage_layers else [r"\g<1>"]
        live = {LAYER.sub(rf".layers.{number}.", stored) for number in numbers}
        if not any(_is_trained(module, names, targets, excluded) for module in live):
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
    return any(
        pattern == name or any(_compiled(pattern).match(f"{live}{name}") for live in places) for pattern in given
    )


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(f"^{pattern.replace('*', '(.*)')}$")
