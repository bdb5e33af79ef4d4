"""Decide which model a run of Megatron-LM computed if its args ask for something that its version ignored.

Args record the settings that a run was given, not the settings that it computed with; and a modified source tree, which
may heed more of them, leaves the same args. Where the two readings differ, the user has to choose. Args that no parser
made were written by a converter, and nobody trained with them: every save of Megatron writes what its own parser made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args.table import PATTERN
from formats.megatron.args.versions import FAILS, by_name, effective_args, ignored, version_of
from formats.model.spec import ModelSpec

Args = Mapping[str, Any]
Scaling = Mapping[str, Any] | None


def with_both_names(args: Args, settings: Mapping[str, Any], where: str) -> Args:
    """The args; arguments that have two names have under both the value that the version of the checkpoint reads.

    Raises:
        RefusedError: the values of the two names of the epsilon differ, and the version is not known.
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
    """Refuse args with two patterns of layers; 0.17 to 0.19 copy the pattern of the older name to the newer one.

    Raises:
        RefusedError: both names of the pattern are there with different patterns.
    """
    given = {name: args[name] for name in PATTERN.split("|") if args.get(name) is not None}
    if len({*map(str, given.values())}) > 1:
        patterns = " and ".join(f"{name} = {short(pattern)}" for name, pattern in given.items())
        raise RefusedError(f"{where}: {patterns} contradict each other")


def rope_scaling(args: Args, read: Callable[[Args], Scaling], base: ModelSpec | None, where: str) -> Scaling:
    """The rope scaling that a run was trained with.

    Args:
        args: the args of the checkpoint.
        read: returns the rope scaling that args specify.
        base: the spec of the config that travels with the checkpoint.
        where: what to call the file in an error.

    Raises:
        RefusedError: the version computed another rope scaling than its args specify, or one that args cannot specify.
    """
    version = version_of(args)
    if version is None:
        return read(args)
    rows = ignored(args, version)
    changed = any(row.computed is FAILS for row in rows)  # a stock tree would have failed
    if changed and args.get("yarn_original_max_position_embeddings") is not None:
        return read(args)
    written, ways = _reading(args, read), []
    if changed:
        ways += [_way(base.rope_scaling, "as in the config")] if base and base.rope_scaling else []
    else:
        computed = _reading(effective_args(args, version), read)
        if computed == written:
            return read(args)
        ways += [_way(computed[0], f"stock Megatron-LM {version}")] if computed else []
    ways += [_way(written[0], "a tree that was changed to heed them")] if written else []
    asked = ", ".join(f"{row.dest} = {short(args.get(row.dest))}" for row in rows)
    raise RefusedError(
        f"{where}: Megatron-LM {version} made these args, whose stock tree does not compute {asked}", " or ".join(ways)
    )


def _reading(args: Args, read: Callable[[Args], Scaling]) -> tuple[Scaling] | None:
    """The rope scaling that args specify, in a tuple; None if transformers has no name for it."""
    try:
        return (read(args),)
    except UnsupportedError:
        return None


def _way(scaling: Scaling, whose: str) -> str:
    """The option with which the user chooses a rope scaling, and in brackets who computes it."""
    value = f"'rope_scaling={json.dumps(dict(scaling))}'" if scaling else "rope_scaling=none"
    return f"--set {value} ({whose})"
