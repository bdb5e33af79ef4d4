"""Adapters of low rank (LoRA): peft makes the modules; filling, sharding and saving them is done here.

The model's own weights are frozen. A checkpoint holds the adapters alone, under the names that they have in peft's
files, and peft's `adapter_config.json`, which says what they are adapters of.
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
"""What peft puts before the names of a model's modules (peft 0.21.2 utils/save_and_load.py)."""
BASE = "base_model_name_or_path"
SAME = {
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
    BASE: "model.path",
}
"""What an adapter means nothing without, and where the settings say it,"""
FREE = ("lora_dropout", "inference_mode", "peft_version")
"""and what may change; nothing else of peft's can be set here."""


def insert(model: Any, lora: Lora, base: Path) -> None:
    """Put float32 adapters without memory beside linear layers, and freeze everything else.

    Args:
        model: of transformers, without memory.
        lora: the settings.
        base: the folder of its weights.

    Raises:
        UsageError: a target is no linear layer of the model, or the head of one that shares it with the embedding.
        UnsupportedError: peft is not installed, the folder has an adapter already, or experts would get one.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UnsupportedError("lora needs peft, which is not installed", "pip install '.[lora]'") from None
    if (base / NOTE).is_file():
        raise UnsupportedError(f"{base} holds a PEFT adapter beside its weights", "merge it into them first")
    _check(model, lora)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, task_type="CAUSAL_LM",
        target_modules="all-linear" if lora.everywhere else lora.targets, base_model_name_or_path=str(base.resolve()),
    )  # fmt: skip
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    held = adapters(model)
    if any(".experts." in name for name in held):
        attention = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in held if "attn." in name})
        raise UnsupportedError(
            f"peft would put adapters on the experts of {model.config.model_type} too, which are not trained here",
            f"name layers of attention: --lora.targets '[{', '.join(attention)}]'",
        )


def note_of(model: Any) -> dict[str, Any] | None:
    """What `adapter_config.json` says of a model's adapters; None if it has none."""
    if not hasattr(model, "peft_config"):
        return None
    said = model.peft_config["default"].to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in said.items()}


def _check(model: Any, lora: Lora) -> None:
    if lora.everywhere:
        return
    held = dict(model.named_modules())
    linear = {name.rpartition(".")[2] for name, module in held.items() if isinstance(module, nn.Linear)}
    for target in lora.targets:
        found = [module for name, module in held.items() if ("." + name).endswith("." + target)]
        if not found or not all(isinstance(module, nn.Linear) for module in found):
            raise UsageError(
                f"lora.targets: {target} is no linear layer of {model.config.model_type}",
                f"it has {', '.join(sorted(linear))}",
            )
        if model.config.tie_word_embeddings and model.get_output_embeddings() in found:
            raise UsageError(f"lora.targets: {target} is the embedding too, it cannot change alone")


def adapters(model: Any) -> dict[str, torch.Tensor]:
    """The adapters by their names in peft's files; none if there are none."""
    return {
        ROOT + name.replace(".default.", "."): tensor
        for name, tensor in model.named_parameters()
        if any(adapter in name for adapter in ADAPTERS)
    }


def begin(model: Any, seed: int) -> None:
    """Give adapters the values with which peft begins, B zero, A random: those of a seed, on any number of ranks."""
    for number, (name, tensor) in enumerate(sorted(adapters(model).items())):
        whole = torch.zeros(tensor.shape)
        if ".lora_A." in name:
            chosen = torch.Generator().manual_seed(seed_of(seed, number))
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=chosen)  # peft 0.21.2 tuners/lora/layer.py
        place(tensor, whole)


def write_note(folder: Path, model: Any) -> None:
    """Write `adapter_config.json` into a checkpoint, if the model has adapters."""
    said = note_of(model)
    if said is not None:
        write_file(folder / NOTE, (json.dumps(said, indent=2, sort_keys=True) + "\n").encode())


def check_same(folder: Path, model: Any) -> None:
    """Refuse a checkpoint of another adapter, of an adapter where all weights are trained, or the other way round.

    Args:
        folder: the checkpoint.
        model: what is to be filled from it.

    Raises:
        RefusedError: it is one.
    """
    said = note_of(model)
    _compare(folder, None if said is None else json.loads(json.dumps(said)))


def require_same_settings(folder: Path, lora: Lora | None) -> None:
    """Likewise by the settings alone, before there is a model; without one, nobody knows what `all-linear` means.

    Args:
        folder: the checkpoint.
        lora: the settings, None where all weights are trained.

    Raises:
        RefusedError: it is of another adapter.
    """
    said = None
    if lora is not None:
        targets = {} if lora.everywhere else {"target_modules": sorted(lora.targets)}
        said = {"r": lora.rank, "lora_alpha": lora.alpha, **targets}
    _compare(folder, said)


def _compare(folder: Path, said: Mapping[str, Any] | None) -> None:
    there = (folder / NOTE).is_file()
    if there != (said is not None):
        what = "an adapter, and the settings have no lora" if there else "all weights, and the settings have lora"
        raise RefusedError(f"{folder} holds {what}", "take another save.path; an exported folder can be model.path")
    if said is None:
        return
    held = read_json(folder / NOTE)
    free = (*FREE, BASE) if (folder / RECORD).is_file() else FREE  # then the weights themselves were compared
    changed = [name for name in said if name not in free and held.get(name, said[name]) != said[name]]
    if changed:
        told = "; ".join(f"{SAME.get(name, name)}: {held[name]}, now {said[name]}" for name in changed)
        hint = "resume with the settings that it was trained with; other adapters are another run: --save.path …"
        if changed == [BASE]:  # of a version that recorded neither the weights nor this file
            hint = f"if only the folder has moved, correct it in {folder / NOTE}"
        raise RefusedError(f"{folder} is another adapter ({told})", hint)
