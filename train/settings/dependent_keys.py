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
PREFERENCES = "preferences are not trained here"
LOSSES = {
    "all": ("alpaca_dataset", "alpaca_cleaned_dataset", "text_completion_dataset", "cnn_dailymail_articles_dataset",
            "wikitext_dataset"),
    "assistant": ("chat_dataset", "instruct_dataset", "grammar_dataset", "samsum_dataset", "slimorca_dataset",
                  "multimodal.llava_instruct_dataset", "multimodal.multimodal_chat_dataset",
                  "multimodal.the_cauldron_dataset", "multimodal.vqa_dataset"),
}  # fmt: skip
"""Builders of torchtune's datasets by the labels that they train where train_on_input is not given (0.6.1)."""
PREFERRED = ("hh_rlhf_helpful_dataset", "preference_dataset", "stack_exchange_paired_dataset")
"""Builders of torchtune's datasets for preferences."""


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


def off(*names: str) -> Rule:
    """The rule for flags that are false, as by default, where another is true, or in stage pt of LLaMA-Factory."""

    def rule(given: Given) -> Found:
        keys = [name for name in names if given.get(name) is False]
        on = [f"{name}: true" for name in names if given.get(name) is True]
        on += ["stage: pt"] if given.get("stage") == "pt" else []
        return (keys, f"no effect there: {', '.join(keys)}: false beside {on[0]}") if keys and on else None

    return rule


def completions(given: Given) -> Found:
    """What TRL trains of records with a prompt and a completion where neither flag says it."""
    if given.get("assistant_only_loss") is True or "completion_only_loss" in given:
        return None
    why = "of records with prompt and completion only the completion is trained there: data.loss: assistant"
    return [], f"not translated: completion_only_loss: null by default: {why}"


def loss_of_builder(given: Given) -> dict[str, Any]:
    """The labels that a builder of torchtune's datasets trains by default; empty for one that is not known."""
    losses = [loss for loss, known in LOSSES.items() if _builder(given) in known]
    return {"data.loss": losses[0]} if losses else {}


def longer_documents(given: Given) -> dict[str, Any]:
    """What TRL, LLaMA-Factory or torchtune does with documents longer than a row: where it has a limit, they are cut.

    Cut over several rows: by TRL's strategy `wrapped` and in stage pt of LLaMA-Factory, where they pack, and by
    torchtune's split_across_pack, the default of text_completion_dataset.
    """
    split = given.get("dataset.split_across_pack", _builder(given) == "text_completion_dataset")
    if given.get("packing") is True and given.get("packing_strategy") == "wrapped":
        return {"data.packing": "packed"}
    if given.get("stage") == "pt" and given.get("packing", True) is True:
        return {"data.packing": "packed"}
    if given.get("dataset.packed") is True and split is True:
        return {"data.packing": "packed"}
    unlimited = given.get("max_length", "a number") is None or no_limit(given)
    return {} if unlimited else {"data.overlong": "truncate"}


def no_limit(given: Given) -> Found:
    """The length of torchtune's rows where its tokenizer has no limit, as by default."""
    if "tokenizer._component_" not in given or given.get("tokenizer.max_seq_len") is not None:
        return None
    return [], "not translated: tokenizer.max_seq_len: null: no limit there; here a row has data.seq_length tokens"


def builders(given: Given) -> Found:
    """The builders of torchtune's datasets for preferences, and those whose default is not known."""
    if _builder(given) in PREFERRED:
        return ["dataset._component_"], f"not translated: dataset._component_: {_builder(given)}: {PREFERENCES}"
    if "dataset.train_on_input" in given or loss_of_builder(given):
        return None
    why = "are not known; data.loss: assistant by default"
    return [], f"not translated: the labels that {_builder(given)} trains {why}"


def _builder(given: Given) -> str:
    """The name of the builder of torchtune's dataset; `dataset` where there is none, or several."""
    return str(given.get("dataset._component_", "dataset")).removeprefix("torchtune.datasets.")
