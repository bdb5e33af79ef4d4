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
"""The value of `load_format`, where that is a name."""
PLACE = "checkpoint"
OPENING = Reading.__optional_keys__ - {"config"}
READING = (Effort.__optional_keys__ - {"progress"}) | {"prefetch"}


def opened(extra_config: Any, base: str, revision: str | None) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint that the extra config of a loader names, and the options to read it. Only headers are read.

    Args:
        extra_config: `checkpoint`, the folder of a checkpoint of any format, and options of `vitruvian.open` and
            `vitruvian.torch.iterate` by name.
        base: the model that the server was given: a Hugging Face folder, or its name on the Hub.
        revision: the revision of a name on the Hub; None for the newest.

    Raises:
        UsageError: the extra config names no checkpoint, or an option that does not exist.
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
    """Name and tensor of all weights that a server loads into a model, on the CPU, under the names of the Hub.

    Each process that loads reads each tensor once.

    Args:
        extra_config: as in `opened`.
        base: as in `opened`.
        revision: as in `opened`.
        model: the model of the server; its `secondary_weights` are taken from further folders.

    Raises:
        UnsupportedError: the model takes weights from further folders.
        VitruvianError: what `opened` and `vitruvian.torch.iterate` raise.
    """
    if getattr(model, "secondary_weights", ()):
        raise UnsupportedError(
            f"{type(model).__name__} takes weights from further folders, and one checkpoint is loaded",
            "convert it to a Hugging Face folder, and serve that",
        )
    checkpoint, reading = opened(extra_config, base, revision)
    yield from iterate(checkpoint, **reading)
