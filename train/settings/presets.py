"""Presets of `train init`: settings of published recipes for a model on a machine, with the source of each number.

Settings that a recipe does not give have our defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from formats.errors import UsageError


class Preset(NamedTuple):
    """The settings of a recipe, for a model and a machine.

    Attributes:
        model: name on the Hub of the model to start from.
        ranks: number of ranks for which the batch equation is solved, and on which the memory of `train plan` fits.
        memory: memory of a rank's device, in bytes.
        settings: value and its source, by dotted name.
        note: what differs from the recipe here; empty if nothing does.
    """

    model: str
    ranks: int
    memory: float
    settings: Mapping[str, tuple[Any, str]]
    note: str = ""


TULU = "allenai/open-instruct 0becd2c, scripts/train/tulu3/finetune_8b.sh"
SMOL = "huggingface/alignment-handbook 61d7a82, recipes/smollm3/sft/sft.yaml"
ZEPHYR = "huggingface/alignment-handbook 0213b5b, recipes/zephyr-7b-beta/sft/config_qlora.yaml"
DIE = "LUMI has 8 dies of 64 GB a node (docs.lumi-supercomputer.eu, LUMI-G)"
BOOSTER = "Leonardo has 4 A100 of 64 GB a node (docs.hpc.cineca.it, Leonardo Booster)"
EXAMPLES = "the recipe counts examples, which are not packed there: a row here has several"

LLAMA: Mapping[str, tuple[Any, str]] = {
    "data.seq_length": (4096, f"{TULU}: max_seq_length"),
    "batch.size": (128, f"{TULU}: 8 nodes x 8 processes x 1 x gradient_accumulation_steps 2"),
    "batch.micro": (1, f"{TULU}: per_device_train_batch_size"),
    "optim.lr": (5e-6, f"{TULU}: learning_rate"),
    "optim.weight_decay": (0.0, f"{TULU}: weight_decay"),
    "schedule.style": ("linear", f"{TULU}: lr_scheduler_type"),
    "schedule.warmup": (0.03, f"{TULU}: warmup_ratio"),
    "steps.epochs": (2, f"{TULU}: num_train_epochs"),
    "model.activation_checkpointing": (True, f"{TULU}: gradient_checkpointing"),
}
PRESETS: Mapping[str, Preset] = {
    "llama-3.1-8b/lumi-8": Preset("meta-llama/Llama-3.1-8B", 64, 64e9, LLAMA, f"{DIE}; {EXAMPLES}"),
    "llama-3.1-8b/leonardo-16": Preset("meta-llama/Llama-3.1-8B", 64, 64e9, LLAMA, f"{BOOSTER}; {EXAMPLES}"),
    "smollm3-3b/lumi-8": Preset(
        "HuggingFaceTB/SmolLM3-3B-checkpoints, revision it-mid-training", 64, 64e9,
        {
            "data.seq_length": (65536, f"{SMOL}: max_length, packing"),
            "batch.size": (128, f"{SMOL}: GBS 128 on 8 nodes"),
            "batch.micro": (1, f"{SMOL}: per_device_train_batch_size"),
            "optim.lr": (2e-5, f"{SMOL}: learning_rate"),
            "optim.clip": (0.2, f"{SMOL}: max_grad_norm"),
            "schedule.style": ("cosine", f"{SMOL}: cosine_with_min_lr"),
            "schedule.min_lr": (2e-6, f"{SMOL}: min_lr_rate 0.1"),
            "schedule.warmup": (0.03, f"{SMOL}: warmup_ratio"),
            "steps.epochs": (5, f"{SMOL}: num_train_epochs"),
            "data.loss": ("assistant", f"{SMOL}: assistant_only_loss"),
            "model.activation_checkpointing": (True, f"{SMOL}: gradient_checkpointing"),
        },
        DIE,
    ),
    "mistral-7b/qlora-8": Preset(
        "mistralai/Mistral-7B-v0.1", 8, 24e9,
        {
            "data.seq_length": (2048, f"{ZEPHYR}: max_length"),
            "batch.size": (64, f"{ZEPHYR}: 8 GPUs x 4 x gradient_accumulation_steps 2"),
            "batch.micro": (4, f"{ZEPHYR}: per_device_train_batch_size"),
            "optim.lr": (2e-4, f"{ZEPHYR}: learning_rate"),
            "schedule.style": ("cosine", f"{ZEPHYR}: lr_scheduler_type"),
            "schedule.warmup": (0.1, f"{ZEPHYR}: warmup_ratio"),
            "steps.epochs": (1, f"{ZEPHYR}: num_train_epochs"),
            "lora.quantize": ("nf4", f"{ZEPHYR}: load_in_4bit"),
            "lora.rank": (16, f"{ZEPHYR}: lora_r"),
            "lora.alpha": (16, f"{ZEPHYR}: lora_alpha"),
            "lora.dropout": (0.05, f"{ZEPHYR}: lora_dropout"),
            "lora.targets": (["all-linear"], f"{ZEPHYR}: lora_target_modules names all seven"),
            "model.activation_checkpointing": (True, f"{ZEPHYR}: gradient_checkpointing"),
        },
        EXAMPLES,
    ),
}  # fmt: skip
"""Presets by name: model/machine-nodes, or model/method-GPUs."""


def preset(name: str) -> Preset:
    """A preset by its name.

    Raises:
        UsageError: there is no preset of this name.
    """
    if name not in PRESETS:
        raise UsageError(f"{name} is no preset", f"there are {', '.join(PRESETS)}")
    return PRESETS[name]


def sources(name: str) -> list[str]:
    """A line for each setting of a preset with its source, and a line for what differs from the recipe here."""
    chosen = preset(name)
    lines = [f"{key}: {value}  ({source})" for key, (value, source) in chosen.settings.items()]
    return [f"of {chosen.model}, on {chosen.ranks} ranks", *lines, *([f"note: {chosen.note}"] if chosen.note else [])]
