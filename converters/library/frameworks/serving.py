"""The weights of any checkpoint for a server, which reads config and tokenizer from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from converters.library.checkpoint import Checkpoint, open_checkpoint
from converters.library.frameworks.into_model import iterate
from converters.library.options import KINDS, TEXT, Effort, Reading, checked
from formats.errors import UnsupportedError, UsageError

FORMAT = "vitruvian"
"""What `load_format` is called, where it is a name."""
PLACE = "checkpoint"
OPENING = Reading.__optional_keys__ - {"config"}
READING = (Effort.__optional_keys__ - {"progress"}) | {"prefetch"}


def opened(extra_config: Any, base: str, revision: str | None) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint that the extra config of a loader names, and how it is read. Headers are read, no weights.

    Args:
        extra_config: `checkpoint`, the folder of one of any format, and options of `vitruvian.open` and
            `vitruvian.torch.iterate` by name.
        base: the model that the server was given: a Hugging Face folder, or its name on the Hub.
        revision: of the name on the Hub; None for the newest.

    Raises:
        UsageError: it names none, or an option that does not exist.
        SourceError: the checkpoint is damaged, incomplete, or of another model than the server's.
    """
    extra_config = extra_config if isinstance(extra_config, dict) else {}
    if not extra_config.get(PLACE):
        raise UsageError(
            "the extra config of the loader names no checkpoint",
            f"""--model-loader-extra-config '{{"{PLACE}": "run/"}}'""",
        )
    if "config" in extra_config:
        raise UsageError("the config is that of the server's model", f"give {extra_config['config']} as the model")
    options = checked(extra_config, {PLACE, *OPENING, *READING}, {**KINDS, PLACE: TEXT})
    place = options.pop(PLACE)
    config = base if revision is None or Path(base).is_dir() else f"{base}@{revision}"
    opening = {name: value for name, value in options.items() if name in OPENING}
    reading = {name: value for name, value in options.items() if name in READING}
    return open_checkpoint(place, config=config, **opening), reading


def weights(extra_config: Any, base: str, revision: str | None, model: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of all that a server loads into a model, on the CPU, in the names of the Hub.

    Each is read once, by each process that loads.

    Args:
        extra_config: as of `opened`.
        base: as of `opened`.
        revision: as of `opened`.
        model: of the server; `secondary_weights` are those that it takes from further folders.

    Raises:
        UnsupportedError: it takes some from further folders.
        VitruvianError: what `opened` and `vitruvian.torch.iterate` raise.
    """
    if getattr(model, "secondary_weights", ()):
        raise UnsupportedError(
            f"{type(model).__name__} takes weights from further folders, and one checkpoint is loaded",
            "convert it to a Hugging Face folder, and serve that",
        )
    checkpoint, reading = opened(extra_config, base, revision)
    yield from iterate(checkpoint, **reading)
