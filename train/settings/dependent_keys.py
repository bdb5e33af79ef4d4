"""Rules for keys of other trainers whose meaning depends on other keys, or whose absence is to be named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Given = Mapping[str, Any]
"""The keys of a file of another trainer, with their values."""
Found = tuple[list[str], str] | None
"""Keys that are not translated beside the others, and the line that says so; None if a rule does not apply."""
Rule = Callable[[Given], Found]
"""Function of the keys of a file."""
QUANTIZE = "lora.quantize: nf4 quantizes the frozen weights"


def constant(given: Given) -> Found:
    """The warm-up of transformers' schedule `constant`, which has none."""
    keys = [key for key in ("warmup_steps", "warmup_ratio") if key in given]
    is_constant = "constant" in (str(given.get(key)).lower() for key in ("lr_scheduler", "lr_scheduler_type"))
    why = "the schedule constant has no warm-up, constant_with_warmup has"
    return (keys, f"no effect there: {', '.join(keys)}: {why}") if is_constant and keys else None


def unpacked(*names: str) -> Rule:
    """The rule for a trainer that packs only where one of these keys is true; stage pt of LLaMA-Factory has it true."""

    def rule(given: Given) -> Found:
        keys = [name for name in names if name in given]
        if any(given[key] is True for key in keys) or (not keys and given.get("stage") == "pt"):
            return None
        value = f"{', '.join(keys)}: false" if keys else f"{names[0]}: false by default"
        why = "rows are packed here, so that a batch holds more dialogues and an epoch has fewer steps"
        return keys, f"not translated: {value}: {why}"

    return rule


def strategy(given: Given) -> Found:
    """TRL's way of packing where it does not pack."""
    if "packing_strategy" not in given or given.get("packing") is True:
        return None
    return ["packing_strategy"], "no effect there: packing_strategy: packing is off"


def mixed(given: Given) -> Found:
    """The dtype of TRL's weights where the compute dtype is bf16, as it is by default."""
    keys = [key for key in ("dtype", "torch_dtype") if given.get(key) == "float32"]
    is_mixed = given.get("bf16", given.get("fp16") is not True) is True
    why = "with bf16 it is the dtype of the master weights, which are float32 here too"
    return (keys, f"no effect here: {', '.join(keys)}: float32: {why}") if is_mixed and keys else None


def quantized(given: Given) -> Found:
    """The builders of torchtune with quantize_base, whose names begin with qlora_."""
    builder = str(given.get("model._component_"))
    if not builder.rpartition(".")[2].startswith("qlora_"):
        return None
    return [], f"not translated: the quantization of model._component_: {builder}: {QUANTIZE}"
