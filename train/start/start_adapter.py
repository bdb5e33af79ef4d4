"""The PEFT adapter that a training starts from: its settings are those of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import UnsupportedError, UsageError
from formats.huggingface.lora_config import CONFIG, read_config
from train.settings.config import Lora

KEYS: Mapping[str, str] = {
    "r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "use_rslora": "rslora", "use_dora": "dora",
}  # fmt: skip
"""Key of `adapter_config.json`: our setting in `lora` for it (peft 0.21.2 tuners/lora/config.py)."""
UNKNOWN = (
    "rank_pattern", "alpha_pattern", "modules_to_save", "exclude_modules", "layers_to_transform", "layers_pattern",
    "target_parameters", "fan_in_fan_out",
)  # fmt: skip
"""Keys of `adapter_config.json` that `convert merge` supports and that the training has no setting for."""


def resolved(lora: Lora) -> Lora:
    """The settings of adapters, completed from the adapter folder that the training starts from, if there is one.

    Raises:
        SourceError: the folder has no adapter.
        UnsupportedError: the adapter has something that this trainer does not train.
        UsageError: a setting contradicts the adapter.
    """
    if lora.adapter is None:
        return lora
    config = read_config([lora.adapter])
    where = lora.adapter / CONFIG
    for name in UNKNOWN:
        if config.get(name):
            raise UnsupportedError(f"{where} says {name} = {config[name]}, which cannot be trained further here")
    if config.get("init_lora_weights") == "mica":  # peft 0.21.2 tuners/lora/variants.py `MiCALinearVariant`
        raise UnsupportedError(
            f"{where} says init_lora_weights = mica: PEFT trains its lora_A alone, which is not done here"
        )
    if config.get("bias", "none") != "none" or not isinstance(config.get("target_modules"), list):
        name = "bias" if config.get("bias", "none") != "none" else "target_modules"
        raise UnsupportedError(f"{where} says {name} = {config.get(name)}, which cannot be trained further here")
    settings: dict[str, Any] = {ours: config.get(key, False) for key, ours in KEYS.items()}
    settings["targets"] = sorted(settings["targets"])
    if settings["alpha"] != int(settings["alpha"]):
        raise UnsupportedError(f"{where} says lora_alpha = {settings['alpha']}, and lora.alpha is a whole number here")
    settings["alpha"] = int(settings["alpha"])
    for name, value in settings.items():
        given = getattr(lora, name)
        if name in lora.model_fields_set and (sorted(given) if name == "targets" else given) != value:
            raise UsageError(f"lora.{name} is {given}, and {where} says {value}", f"remove lora.{name}")
    return lora.model_copy(update=settings)
