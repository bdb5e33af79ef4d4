"""What a run of Megatron-LM was trained with, where its args ask for something that its version ignored.

Args hold what was asked of a run, not what it computed, and a tree that was changed leaves the same args. So nothing
proves either reading: where they differ, the user says which one it is. Args that no parser made are those of a
converter, which nobody has trained with: every save of Megatron writes what its own parser made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args.table import PATTERN
from formats.megatron.args.versions import FAILS, by_name, heeded, ignored, version_of
from formats.model.spec import ModelSpec

Args = Mapping[str, Any]
Scaling = Mapping[str, Any] | None


def named(args: Args, settings: Mapping[str, Any], where: str) -> Args:
    """The args, with what is given under two names as the version of the checkpoint reads it.

    Raises:
        RefusedError: two names of the epsilon differ, and nothing tells which one counts.
    """
    version = version_of(args)
    if version:
        return by_name(args, version)
    epsilons = [args[name] for name in ("norm_epsilon", "layernorm_epsilon") if args.get(name) is not None]
    if len({*map(str, epsilons)}) > 1 and "norm_epsilon" not in settings:
        raise RefusedError(
            f"{where}: norm_epsilon = {short(epsilons[0])} counts up to Megatron-LM 0.15, layernorm_epsilon = "
            f"{short(epsilons[1])} since 0.16, and nothing in its args tells the version",
            f"--set norm_epsilon={epsilons[0]} or --set norm_epsilon={epsilons[1]}",
        )
    return args


def require_one_pattern(args: Args, where: str) -> None:
    """A hybrid has one pattern of layers: 0.17 to 0.19 copy the older name's to the newer one, and take no two.

    Raises:
        RefusedError: both names are there with two patterns.
    """
    given = {name: args[name] for name in PATTERN.split("|") if args.get(name) is not None}
    if len({*map(str, given.values())}) > 1:
        patterns = " and ".join(f"{name} = {short(pattern)}" for name, pattern in given.items())
        raise RefusedError(f"{where}: {patterns} contradict each other")


def rope_scaling(args: Args, read: Callable[[Args], Scaling], base: ModelSpec | None, where: str) -> Scaling:
    """The rope scaling that a run was trained with.

    Args:
        args: those of the checkpoint.
        read: the rope scaling that args say.
        base: the spec of the config that travels with it.
        where: what to call the file in an error.

    Raises:
        RefusedError: its version computed something else than its args say, or they do not say what it computed.
    """
    version = version_of(args)
    if version is None:
        return read(args)
    rows = ignored(args, version)
    changed = any(row.computed is FAILS for row in rows)  # a stock tree would have ended
    if changed and args.get("yarn_original_max_position_embeddings") is not None:
        return read(args)
    written, ways = _reading(args, read), []
    if changed:
        ways += [_way(base.rope_scaling, "as in the config")] if base and base.rope_scaling else []
    else:
        computed = _reading(heeded(args, version), read)
        if computed == written:
            return read(args)
        ways += [_way(computed[0], f"stock Megatron-LM {version}")] if computed else []
    ways += [_way(written[0], "a tree that was changed to heed them")] if written else []
    asked = ", ".join(f"{row.dest} = {short(args.get(row.dest))}" for row in rows)
    raise RefusedError(
        f"{where}: Megatron-LM {version} made these args, whose stock tree does not compute {asked}", " or ".join(ways)
    )


def _reading(args: Args, read: Callable[[Args], Scaling]) -> tuple[Scaling] | None:
    """What args say; None if transformers has no name for it."""
    try:
        return (read(args),)
    except UnsupportedError:
        return None


def _way(scaling: Scaling, whose: str) -> str:
    """A reading as the option that says it."""
    value = f"'rope_scaling={json.dumps(dict(scaling))}'" if scaling else "rope_scaling=none"
    return f"--set {value} ({whose})"
