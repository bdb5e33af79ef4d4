"""Which of several models in the files of one FSDP checkpoint an optimizer is of, by the names of their containers."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from formats.checkpoint import Checkpoint
from formats.errors import UnsupportedError
from formats.fsdp.checkpoint import CONTAINERS, COPY
from formats.torch_files.wrappers import unwrapped


def require_own(source: Checkpoint, optimizer: str, where: Path) -> None:
    """Refuse the optimizer of another model than the one that the user has chosen by its container.

    An optimizer is of the model that is nearest to it in the saved dictionary, or has words of its name; of several
    that are equally near, of the one that is named as the trained one.

    Args:
        source: the opened checkpoint.
        optimizer: the container of the optimizer.
        where: the place of the optimizer.

    Raises:
        UnsupportedError: the optimizer is of another model, or the names do not tell of which one.
    """
    own = source.settings.container
    if own is None:
        return
    models = [own, *_others(source)]
    near = {model: _nearness(model, optimizer) for model in models}
    nearest = [model for model in models if near[model] == max(near.values())]
    trained = nearest
    if len(trained) > 1:
        trained = [model for model in trained if not any(map(COPY.fullmatch, model.split(".")))]
    if len(trained) > 1:
        trained = [model for model in trained if model.rpartition(".")[2] in CONTAINERS]
    if trained != [own]:
        of = f"is of {trained[0] or 'the top level'}" if len(trained) == 1 else f"may be of {' or '.join(nearest)}"
        also = f", or name that one with --container {trained[0]}" if len(trained) == 1 and trained[0] else ""
        raise UnsupportedError(
            f"{where}: its optimizer {optimizer or 'at the top level'} {of}, by their names, and not of {own!r}",
            f"convert the weights of {own!r} without --with-optimizer{also}",
        )


def _others(source: Checkpoint) -> list[str]:
    """The containers, besides the one that is read, that have all tensors of the model."""
    keys = [item.key for item in source.tensors]
    names = {unwrapped(name.removeprefix(".")) for name in source.dropped}
    starts = {name.removesuffix(keys[0]) for name in names if name.endswith(keys[0])}
    return sorted(
        start.removesuffix(".")
        for start in starts
        if start[-1:] in ("", ".") and all(f"{start}{key}" in names for key in keys)
    )


def _nearness(model: str, optimizer: str) -> tuple[int, int]:
    """How many names two paths have in common from the start on, and how many words that not every model has."""
    pairs = zip(model.split("."), optimizer.split("."), strict=False)
    shared = [*takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return len(shared), len((_words(model) & _words(optimizer)) - _words(".".join(CONTAINERS)))


def _words(container: str) -> set[str]:
    return {*re.split(r"[._]", container)}
