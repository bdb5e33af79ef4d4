"""LoRA adapters: peft makes the modules; this file fills, shards and saves them.

The base model's weights are frozen. A checkpoint holds only the adapters, under the names that they have in peft's
files, and peft's `adapter_config.json`, which names their base model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from converters.common.atomic import write_file
from formats.disk.json_file import read_json
from formats.errors import RefusedError, SourceError, UnsupportedError, UsageError, some
from train.model.trainee import ADAPTERS, pieces, shape_of
from train.settings.batching import seed_of
from train.settings.config import Lora
from train.start.run_folder import RECORD

NOTE, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ROOT, MAGNITUDE = "base_model.model.", "lora_magnitude_vector"
"""Prefix of module names in peft's files, and the name of DoRA's tensor there (peft 0.21.2 utils/save_and_load.py)."""
BASE = "base_model_name_or_path"
SAME = {
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
    "use_rslora": "lora.rslora",
    "use_dora": "lora.dora",
    BASE: "model.path",
}
"""Key of `adapter_config.json` that defines an adapter: our setting for it."""
FREE = ("lora_dropout", "inference_mode", "peft_version")
"""Keys of `adapter_config.json` that may change between jobs; no other setting of peft can be set here."""


def insert(model: Any, lora: Lora, base: Path) -> None:
    """Add float32 adapters on the meta device to linear layers, and freeze everything else.

    Args:
        model: a model of transformers, on the meta device.
        lora: the settings.
        base: the folder of the model's weights.

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
        use_rslora=lora.rslora, use_dora=lora.dora,
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
    """The contents of `adapter_config.json` for a model's adapters; None if the model has none."""
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
    """The adapter tensors of a model by their names in peft's files; empty if there are none."""
    return {
        ROOT + name.replace(".default.", ".").replace(f"{MAGNITUDE}.weight", MAGNITUDE): tensor
        for name, tensor in model.named_parameters()
        if any(adapter in name for adapter in ADAPTERS)
    }


def begins(model: Any, lora: Lora | None, base: Path, seed: int) -> Iterator[tuple[torch.Tensor, Any]]:
    """Each adapter tensor, and its initial values, which can be sliced: the same on any number of ranks.

    Args:
        model: a model with adapters.
        lora: the settings; None yields nothing.
        base: the folder of the model's weights.
        seed: seed of A, which is random as in peft; B is zero, DoRA's magnitudes are the norms of the weight's rows.

    Raises:
        SourceError: `lora.adapter` has other tensors than the model.
    """
    if lora is None:
        return
    tensors = dict(sorted(adapters(model).items()))
    if lora.adapter is not None:
        yield from _saved(tensors, lora.adapter)
        return
    plain = [name for name in tensors if not name.endswith(MAGNITUDE)]  # the place in this list is part of the seed
    for number, name in enumerate(plain):
        whole = torch.zeros(shape_of(tensors[name]))
        if ".lora_A." in name:
            chosen = torch.Generator().manual_seed(seed_of(seed, number))
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=chosen)  # peft 0.21.2 tuners/lora/layer.py
        yield tensors[name], whole
    if lora.dora:
        sources = {id(tensor): piece for tensor, piece in pieces(model, base)}
        for name, module in model.named_modules():
            if hasattr(module, MAGNITUDE):
                yield tensors[f"{ROOT}{name}.{MAGNITUDE}"], _Norms(sources[id(module.base_layer.weight)], module)


class _Norms:
    """The norms of the rows of a weight, as peft computes them: in the dtype that the weight has in memory."""

    def __init__(self, piece: Any, module: Any) -> None:
        self.piece, self.dtype = piece, module.base_layer.weight.dtype

    def __getitem__(self, where: Any) -> torch.Tensor:
        rows = where[0] if isinstance(where, tuple) else where
        norms: torch.Tensor = torch.linalg.norm(self.piece[rows].to(self.dtype), dim=1)
        return norms.float()


def _saved(tensors: Mapping[str, torch.Tensor], folder: Path) -> Iterator[tuple[torch.Tensor, Any]]:
    """Each adapter tensor, and its slice in the files of an adapter that peft, or an export, has written."""
    from safetensors import safe_open

    if not (folder / WEIGHTS).is_file():
        raise SourceError(f"{folder} has no {WEIGHTS}", "load and save it with PEFT, which writes safetensors")
    with safe_open(folder / WEIGHTS, "pt") as file:
        saved = set(file.keys())
        odd = sorted(saved ^ tensors.keys())
        if odd:
            where = f"{folder / WEIGHTS} has" if odd[0] in saved else f"{folder / WEIGHTS} has not, and the model has"
            raise SourceError(f"{where} {some(odd, 2)}: it is of another model, or has more than matrices")
        for name, tensor in tensors.items():
            piece = file.get_slice(name)
            if list(piece.get_shape()) != list(shape_of(tensor)):
                raise SourceError(
                    f"{name} of {folder / WEIGHTS} has the shape {piece.get_shape()}, the model {shape_of(tensor)}"
                )
            yield tensor, piece


def write_note(folder: Path, model: Any) -> None:
    """Write `adapter_config.json` into a checkpoint, if the model has adapters."""
    settings = note_of(model)
    if settings is not None:
        write_file(folder / NOTE, (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode())


def check_same(folder: Path, model: Any) -> None:
    """Refuse a checkpoint of another adapter, or of adapters where all weights are trained, or vice versa.

    Args:
        folder: the checkpoint.
        model: the model that will be filled from the checkpoint.

    Raises:
        RefusedError: the checkpoint does not match the model.
    """
    settings = note_of(model)
    _compare(folder, None if settings is None else json.loads(json.dumps(settings)))


def require_same_settings(folder: Path, lora: Lora | None) -> None:
    """Do the check of `check_same` from the settings, before the model is built; `all-linear` needs the model.

    Args:
        folder: the checkpoint.
        lora: the settings, None where all weights are trained.

    Raises:
        RefusedError: the checkpoint does not match the settings.
    """
    settings = None
    if lora is not None:
        targets = {} if lora.everywhere else {"target_modules": sorted(lora.targets)}
        kind = {"use_rslora": lora.rslora, "use_dora": lora.dora}
        settings = {"r": lora.rank, "lora_alpha": lora.alpha, **kind, **targets}
    _compare(folder, settings)


def _compare(folder: Path, settings: Mapping[str, Any] | None) -> None:
    there = (folder / NOTE).is_file()
    if there != (settings is not None):
        what = "an adapter, and the settings have no lora" if there else "all weights, and the settings have lora"
        raise RefusedError(f"{folder} holds {what}", "take another save.path; an exported folder can be model.path")
    if settings is None:
        return
    saved = read_json(folder / NOTE)
    free = (*FREE, BASE) if (folder / RECORD).is_file() else FREE  # with a record, the weights were compared
    changed = [name for name in settings if name not in free and saved.get(name, settings[name]) != settings[name]]
    if changed:
        changes = "; ".join(f"{SAME.get(name, name)}: {saved[name]}, now {settings[name]}" for name in changed)
        hint = "resume with the settings that it was trained with; other adapters are another run: --save.path …"
        if changed == [BASE]:  # written by a version that recorded neither the weights nor this file
            hint = f"if only the folder has moved, correct it in {folder / NOTE}"
        raise RefusedError(f"{folder} is another adapter ({changes})", hint)
