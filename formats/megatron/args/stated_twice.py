"""A folder with args of Megatron-LM and the fields of a class beside them, as `--for bridge` writes them.

Megatron-LM builds its model of the args, and Megatron-Bridge of its fields alone: both have to describe one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Settings
from formats.megatron.args import providers
from formats.megatron.args.args import from_megatron
from formats.megatron.args.moe import INTERLEAVE, interleaves_of
from formats.model.checks import require_no_contradictions
from formats.model.spec import ModelSpec, differences

Args = Mapping[str, Any]


def require_same(args: Args, fields: Args, paths: tuple[Path, Path], settings: Settings) -> None:
    """Refuse args and fields of a class that describe two models.

    Args:
        args: the args.
        fields: the fields as args (`run_config.args_of`).
        paths: the files of both.
        settings: the user's settings, which overrule both.

    Raises:
        RefusedError: they differ in a setting, or in the order of rows.
        UnsupportedError: the model of one of them has no layout here.
    """
    one, other = (_spec(of, path, settings) for of, path in zip((args, fields), paths, strict=True))
    vocab = one.vocab if other.vocab is None else other.vocab  # which either may leave open
    lines = differences(replace(one, vocab=one.vocab or vocab), replace(other, vocab=vocab))
    sizes, others = (interleaves_of(of, str(path)) for of, path in zip((args, fields), paths, strict=True))
    lines += [f"{INTERLEAVE[name]}: {size} | {others[name]}" for name, size in sizes.items() if size != others[name]]
    require_no_contradictions(
        lines,
        f"{paths[0]} and the {paths[1].name} beside it",
        f"args | {paths[1].name}",
        "remove the file that does not describe these weights, or decide with --set NAME=VALUE",
    )


def _spec(args: Args, path: Path, settings: Settings) -> ModelSpec:
    if provider := providers.of_args(args):
        return provider.spec_of(args, settings.values, None, str(path), settings.accept)
    return from_megatron(args, settings.values, None, str(path), accept=settings.accept, settled=True)
