"""Find the model's config, or its name, in the files that trainers leave beside the weights of an FSDP checkpoint."""

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
"""Most bytes of a `train_params.yaml` that is read."""


def configs(path: Path, folder: Path) -> Iterator[Path]:
    """The config.json files beside the weights, of Hugging Face or of a trainer."""
    near = [path, folder, path / "huggingface", folder / "huggingface", folder.parent]
    near += [path.parent] if STEPS.fullmatch(path.name) else []
    yield from (config for config in (place / "config.json" for place in near) if config.is_file())


def config_folder(path: Path, folder: Path, settings: Settings, known: Callable[[], Mapping[str, Any]]) -> Path | None:
    """The folder with the Hugging Face config.json of the weights: the user's, or one that a trainer left beside them.

    None where there is only OLMo-core's config.json, which describes the model too.

    Raises:
        OptionNeededError: there is no config.json.
    """
    found = settings.config or own_folder(path, folder)
    if found or any(configs(path, folder)):
        return found
    named = _named(path)
    hint = f" (train_params.yaml names {named})" if named else ""
    raise OptionNeededError(
        f"{path} has no config.json", f"add --config BASE, the model that the training began with{hint}", known
    )


def own_folder(path: Path, folder: Path) -> Path | None:
    """The folder with the Hugging Face config.json that a trainer left beside the weights, or named there."""
    beside = next((config.parent for config in configs(path, folder) if not olmo_core.is_own(config)), None)
    named = _named(path)
    return beside or (Path(named) if named and (Path(named) / "config.json").is_file() else None)


def _named(path: Path) -> str | None:
    """The model that a file beside the weights names, or one in the folder above."""
    return _model_name(path) or _model_name(path.parent)


def _model_name(folder: Path) -> str | None:
    """The model that llama-cookbook's `train_params.yaml` names; None without such a file or name."""
    path = folder / "train_params.yaml"
    if not path.is_file() or path.stat().st_size > MOST_YAML:
        return None
    name = re.search(r"^model_name:\s*['\"]?([^'\"\n]+?)['\"]?\s*$", path.read_text(errors="replace"), re.MULTILINE)
    return name[1] if name else None
