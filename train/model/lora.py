"""LoRA adapters: peft makes the modules; they are filled, sharded and saved here.

The base model's weights are frozen. A checkpoint holds only the adapters, under the names that they have in peft's
files, and peft's `adapter_config.json`, which names their base model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from converters.common.atomic import write_file
from formats.disk.json_file import read_json
from formats.errors import RefusedError, UnsupportedError, UsageError
from train.model.trainee import ADAPTERS, place
from train.settings.batching import seed_of
from train.settings.config import Lora
from train.start.run_folder import RECORD

NOTE = "adapter_config.json"
ROOT = "base_model.model."
"""Prefix of module names in peft's files (peft 0.21.2 utils/save_and_load.py)."""
BASE = "base_model_name_or_path"
SAME = {
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
    BASE: "model.path",
}
"""Keys of `adapter_config.json` that define an adapter, and our settings for them."""
FREE = ("lora_dropout", "inference_mode", "peft_version")
"""Keys that may change; no other setting of peft can be set here."""


def insert(model: Any, lora: Lora, base: Path) -> None:
    """Add float32 adapters on the meta device to linear layers, and freeze everything else.

    Args:
        model: of transformers, on the meta device.
        lora: the settings.
        base: the folder of its weights.

    Raises:
        UsageError: a target is not a linear layer of the model, or is a head that is tied to the embedding.
        UnsupportedError: peft is not installed, the folder already has an adapter, or experts would get one.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UnsupportedError("lora needs peft, which is not installed", "pip install 'vitruvian[lora]'") from None
    if (base / NOTE).is_file():
        raise UnsupportedError(f"{base} holds a PEFT adapter beside its weights", "merge it into them first")
    _check(model, lora)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, task_type="CAUSAL_LM",
        target_modules="all-linear" if lora.everywhere else lora.targets, base_model_name_or_path=str(base.resolve()),
    )  # fmt: skip
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    inserted = adapters(model)
    if any(".experts." in name for name in inserted):
        attention = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in inserted if "attn." in name})
        raise UnsupportedError(
            f"peft would put adapters on the experts of {model.config.model_type} too, which are not trained here",
            f"name layers of attention: --lora.targets '[{', '.join(attention)}]'",
        )


def note_of(model: Any) -> dict[str, Any] | None:
    """The contents of `adapter_config.json` for a model's adapters; None if it has none."""
    if not hasattr(model, "peft_config"):
        return None
    settings = model.peft_config["default"].to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def _check(model: Any, lora: Lora) -> None:
    if lora.everywhere:
        return
    modules = dict(model.named_modules())
    linear = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear)}
    for target in lora.targets:
        targeted = [module for name, module in modules.items() if ("." + name).endswith("." + target)]
        if not targeted or not all(isinstance(module, nn.Linear) for module in targeted):
            raise UsageError(
                f"lora.targets: {target} is no linear layer of {model.config.model_type}",
                f"it has {', '.join(sorted(linear))}",
            )
        if model.config.tie_word_embeddings and model.get_output_embeddings() in targeted:
            raise UsageError(f"lora.targets: {target} is tied to the embedding, it cannot get an adapter")


def adapters(model: Any) -> dict[str, torch.Tensor]:
    """The adapters by their names in peft's files; empty if there are none."""
    return {
        ROOT + name.replace(".default.", "."): tensor
        for name, tensor in model.named_parameters()
        if any(adapter in name for adapter in ADAPTERS)
    }


def begin(model: Any, seed: int) -> None:
    """Initialise adapters as peft does, B zero and A random, from a seed: the same on any number of ranks."""
    for number, (name, tensor) in enumerate(sorted(adapters(model).items())):
        whole = torch.zeros(tensor.shape)
        if ".lora_A." in name:
            chosen = torch.Generator().manual_seed(seed_of(seed, number))
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=chosen)  # peft 0.21.2 tuners/lora/layer.py
        place(tensor, whole)


def write_note(folder: Path, model: Any) -> None:
    """Write `adapter_config.json` into a checkpoint, if the model has adapters."""
    settings = note_of(model)
    if settings is not None:
        write_file(folder / NOTE, (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode())


def check_same(folder: Path, model: Any) -> None:
    """Refuse a checkpoint of another adapter, or an adapter where all weights are trained, or vice versa.

    Args:
        folder: the checkpoint.
        model: the model that will be filled from it.

    Raises:
        RefusedError: it does not match.
    """
    settings = note_of(model)
    _compare(folder, None if settings is None else json.loads(json.dumps(settings)))


def require_same_settings(folder: Path, lora: Lora | None) -> None:
    """The check of `check_same` from the settings only, before the model is built; `all-linear` needs the model.

    Args:
        folder: the checkpoint.
        lora: the settings, None where all weights are trained.

    Raises:
        RefusedError: it does not match.
    """
    settings = None
    if lora is not None:
        targets = {} if lora.everywhere else {"target_modules": sorted(lora.targets)}
        settings = {"r": lora.rank, "lora_alpha": lora.alpha, **targets}
    _compare(folder, settings)


def _compare(folder: Path, settings: Mapping[str, Any] | None) -> None:
    there = (folder / NOTE).is_file()
    if there != (settings is not None):
        what = "an adapter, and the settings have no lora" if there else "all weights, and the settings have lora"
        raise RefusedError(f"{folder} holds {what}", "take another save.path; an exported folder can be model.path")
    if settings is None:
        return
    saved = read_json(folder / NOTE)
    free = (*FREE, BASE) if (folder / RECORD).is_file() else FREE  # with it, the weights themselves were compared
    changed = [name for name in settings if name not in free and saved.get(name, settings[name]) != settings[name]]
    if changed:
        changes = "; ".join(f"{SAME.get(name, name)}: {saved[name]}, now {settings[name]}" for name in changed)
        hint = "resume with the settings that it was trained with; other adapters are another run: --save.path …"
        if changed == [BASE]:  # written by a version that recorded neither the weights nor this file
            hint = f"if only the folder has moved, correct it in {folder / NOTE}"
        raise RefusedError(f"{folder} is another adapter ({changes})", hint)
