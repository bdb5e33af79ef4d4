"""What trainers leave beside the weights of an FSDP checkpoint: the config of the model, or its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import Settings
from formats.errors import OptionNeededError
from formats.fsdp import olmo_core
from formats.fsdp.runs import STEPS

MOST_YAML = 1 << 20
"""Bytes of a `train_params.yaml` that is read."""


def configs(path: Path, folder: Path) -> Iterator[Path]:
    """The config.json files that trainers leave beside the weights, Hugging Face's or their own."""
    near = [path, folder, path / "huggingface", folder / "huggingface", folder.parent]
    near += [path.parent] if STEPS.fullmatch(path.name) else []
    yield from (config for config in (place / "config.json" for place in near) if config.is_file())


def config_folder(path: Path, folder: Path, settings: Settings, known: Callable[[], Mapping[str, Any]]) -> Path | None:
    """The folder with the config.json that belongs to the weights: the user's, or one that trainers leave beside them.

    None where only OLMo-core's is there, which describes the model too.

    Raises:
        OptionNeededError: there is none.
    """
    if settings.config is not None:
        return settings.config
    described = False
    for config in configs(path, folder):
        if not olmo_core.is_own(config):
            return config.parent
        described = True
    named = _model_name(path) or _model_name(path.parent)
    if named and (Path(named) / "config.json").is_file():
        return Path(named)
    if described:
        return None
    hint = f" (train_params.yaml names {named})" if named else ""
    raise OptionNeededError(
        f"{path} has no config.json", f"add --config BASE, the model that the training began with{hint}", known
    )


def _model_name(folder: Path) -> str | None:
    """The model that llama-cookbook's `train_params.yaml` names."""
    path = folder / "train_params.yaml"
    if not path.is_file() or path.stat().st_size > MOST_YAML:
        return None
    name = re.search(r"^model_name:\s*['\"]?([^'\"\n]+?)['\"]?\s*$", path.read_text(errors="replace"), re.MULTILINE)
    return name[1] if name else None
