"""Translates a file of settings of another trainer to our settings, by the tables of `other_trainers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from formats.errors import UsageError
from train.settings.other_trainers import NEUTRAL, Settings, Trainer


def translate(trainer: Trainer, path: Path) -> tuple[Settings, list[str]]:
    """Translate a file of settings of another trainer to our settings.

    Returns:
        Our settings, and lines that name for each key the setting that it became, that it has no effect, or why it is
        left out.

    Raises:
        UsageError: the file cannot be read, or two keys contradict each other.
    """
    given = _read(path, trainer.nulls)
    settings: Settings = {}
    key_of: dict[str, str] = {}
    made_of, idle, left = list[tuple[str, str, Any]](), list[str](), list[str]()
    bound = [found for rule in trainer.rules if (found := rule(given))]
    unbound = given.keys() - {key for keys, _ in bound for key in keys}
    for key, value in given.items():
        if key not in unbound:
            continue
        made = _made(trainer, key, value)
        if made is None:
            why = trainer.left.get(key)
            if why is None and key not in trainer.values and key.startswith(trainer.idle):
                idle.append(key)
            else:
                left.append(f"not translated: {key}: {value!s:.60}: {why or _unknown(trainer, key)}")
            continue
        for name, ours in made.items():
            both = _both(name, settings.get(name, ours), ours)
            if both is None:
                raise UsageError(f"{path}: {key_of[name]} and {key} both mean {name}: {settings[name]} and {ours}")
            settings[name], key_of[name] = both, key
            made_of.append((key, name, both))
        if not made:
            idle.append(key)
    done = list[str]()
    meant = {key for key, value in given.items() if value not in NEUTRAL.get(key, ())}
    for keys, theirs, ours_there in trainer.defaults:
        if meant.isdisjoint(keys):
            ours_by_name = ours_there(given) if callable(ours_there) else ours_there
            fresh = {
                name: ours for name, ours in ours_by_name.items() if name not in settings and _holds(name, settings)
            }
            settings |= fresh
            done += [f"no {keys[0]} ({trainer.name}: {theirs}) -> {name}: {ours}" for name, ours in fresh.items()]
    idle += [key for key, name, _ in made_of if not _holds(name, settings)]
    done = [f"{key} -> {name}: {ours}" for key, name, ours in made_of if _holds(name, settings)] + done
    left += [line for _, line in bound]
    return _joined(settings), [*done, *([f"no effect here: {', '.join(idle)}"] if idle else []), *left]


def _both(name: str, one: Any, other: Any) -> Any:
    """The value of a setting that two keys mean: names of layers with adapters add up; None for a contradiction."""
    if one == other:
        return one
    return list(dict.fromkeys([*one, *other])) if name == "lora.targets" and "all-linear" not in one + other else None


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


def _read(path: Path, nulls: tuple[str, ...]) -> dict[str, Any]:
    """The keys of a file that have a value, null being one of `nulls`; keys in sections of torchtune are dotted."""
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
    return {key: _number(value) for key, value in flat.items() if value is not None or key in nulls}


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
