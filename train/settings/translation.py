"""Translates a file of settings of another trainer to our settings, by the tables of `other_trainers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from formats.errors import UsageError
from train.settings.other_trainers import Settings, Trainer


def translate(trainer: Trainer, path: Path) -> tuple[Settings, list[str]]:
    """Translate a file of settings of another trainer to our settings.

    Returns:
        Our settings, and lines that name for each key the setting that it became, that it has no effect, or why it is
        left out.

    Raises:
        UsageError: the file cannot be read, or two keys contradict each other.
    """
    given = _read(path)
    settings: Settings = {}
    key_of: dict[str, str] = {}
    done, idle, left = list[str](), list[str](), list[str]()
    for key, value in given.items():
        made = _made(trainer, key, value)
        if made is None:
            why = trainer.left.get(key)
            if why is None and key not in trainer.values and key.startswith(trainer.idle):
                idle.append(key)
            else:
                left.append(f"not translated: {key}: {value!s:.60}: {why or _unknown(trainer, key)}")
            continue
        for name, ours in made.items():
            if settings.get(name, ours) != ours:
                raise UsageError(f"{path}: {key_of[name]} and {key} both mean {name}: {settings[name]} and {ours}")
            settings[name], key_of[name] = ours, key
            done.append(f"{key} -> {name}: {ours}")
        if not made:
            idle.append(key)
    for keys, theirs, ours_there in trainer.defaults:
        if given.keys().isdisjoint(keys):
            ours_by_name = ours_there(settings) if callable(ours_there) else ours_there
            fresh = {
                name: ours for name, ours in ours_by_name.items() if name not in settings and _holds(name, settings)
            }
            settings |= fresh
            done += [f"no {keys[0]} ({trainer.name}: {theirs}) -> {name}: {ours}" for name, ours in fresh.items()]
    return _joined(settings), [*done, *([f"no effect here: {', '.join(idle)}"] if idle else []), *left]


def _holds(name: str, settings: Settings) -> bool:
    """Whether a setting applies: settings of LoRA do only if LoRA is asked for."""
    return not name.startswith("lora.") or bool(settings.get("lora"))


def _made(trainer: Trainer, key: str, value: Any) -> Settings | None:
    """The settings that a key becomes; None if it is not translated."""
    if key in trainer.keys:
        return {trainer.keys[key]: value}
    if key not in trainer.values:
        return None
    try:
        return trainer.values[key](value)
    except (TypeError, AttributeError, KeyError):  # a value of another kind than the trainer has
        return None


def _unknown(trainer: Trainer, key: str) -> str:
    return "there is no such setting here" if key in trainer.values else "it is not in the table of this trainer"


def _read(path: Path) -> dict[str, Any]:
    """The keys of a file that have a value; keys in sections of torchtune have dotted names."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a mapping of settings")
    flat: dict[str, Any] = {}
    for key, value in content.items():
        sections = isinstance(value, dict) and "_component_" in value
        flat |= {f"{key}.{name}": inner for name, inner in value.items()} if sections else {str(key): value}
    return {key: _number(value) for key, value in flat.items() if value is not None}


def _number(value: Any) -> Any:
    """The value, where text such as 1e-5, a string in YAML 1.1, becomes a number."""
    try:
        return float(value) if isinstance(value, str) and value[:1].isdigit() and "e" in value.lower() else value
    except ValueError:
        return value


def _joined(settings: Settings) -> Settings:
    """Settings with both betas in one, without those of LoRA if nothing asks for LoRA, and no epochs beside steps."""
    if settings.get("lora"):
        settings.setdefault("lora.rank", 16)
    betas = [settings.pop(f"optim.betas.{place}", default) for place, default in enumerate((0.9, 0.999))]
    settings.setdefault("optim.betas", betas)
    if "steps.train_iters" in settings:
        settings.pop("steps.epochs", None)
    return {name: value for name, value in settings.items() if name != "lora" and _holds(name, settings)}
