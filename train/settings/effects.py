"""Refuses, before the first step, settings that would have no effect because of other settings."""

from __future__ import annotations

from formats.errors import UsageError
from train.settings.config import Config

OF_SETS = ("every", "metrics", "max_rows", "tokenizer", "best", "prompts")
"""Settings of `evaluate` that apply to the validation sets."""


def check_effect(config: Config, total: int) -> None:
    """Check that every setting that is given has an effect, and that settings work together.

    Args:
        config: the settings.
        total: number of steps of the run.

    Raises:
        UsageError: a setting has no effect, or two settings do not work together.
    """
    for name in OF_SETS:
        value = getattr(config.evaluate, name)
        if value and not config.data.validation:
            raise UsageError(
                f"evaluate.{name} is {value!s}, and data.validation names no set to evaluate",
                f"--data.validation.NAME PREFIX; or without evaluate.{name}",
            )
    for name in ("patience", "min_delta"):
        if getattr(config.evaluate, name) and config.evaluate.best is None:
            raise UsageError(f"evaluate.{name} needs a metric that decides", "--evaluate.best NAME")
    if config.lora is not None and config.model.freeze:
        raise UsageError("model.freeze has no effect with lora: all weights of the model are frozen", "remove it")
    if config.lora is not None and config.lora.quantize != "none" and config.lora.dora:
        raise UsageError("lora.dora needs the norms of weights, which lora.quantize changes", "remove one of them")
    if config.init == "moments" and (config.lora is not None or config.model.init == "config"):
        other = "lora" if config.lora is not None else "model.init config"
        raise UsageError(f"init moments continues a training of all weights, and {other} starts another", "--init auto")
    if config.model.activation_offload and not config.model.activation_checkpointing:
        raise UsageError(
            "model.activation_offload without model.activation_checkpointing would copy gathered weights too",
            "--model.activation_checkpointing true",
        )
    shared: dict[str, object] = {"neftune_alpha": config.neftune_alpha, "model.compile": config.model.compile}
    split: dict[str, object] = {
        "lora": config.lora,
        "optim.moments 8bit": config.optim.moments == "8bit",
        "parallel.replicas": config.parallel.replicas > 1,
        "parallel.context": config.parallel.context > 1,
    }
    for setting, foreign in {"context": shared, "tensor": shared | split}.items():
        ranks = getattr(config.parallel, setting)
        for name in (name for name, value in foreign.items() if value and ranks > 1):
            raise UsageError(f"{name} does not work with parallel.{setting} {ranks}", "remove one")
    profile = config.profile
    if profile.kind is not None and profile.after + profile.steps > total:
        raise UsageError(
            f"profile.after {profile.after} and profile.steps {profile.steps} take "
            f"{profile.after + profile.steps} steps, the run has {total}: nothing would be profiled",
            f"--profile.after {max(0, total - profile.steps)}",
        )
