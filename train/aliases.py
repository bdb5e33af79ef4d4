"""Keys of GPT-NeoX files and what they are called here, so that a user's yml trains as it is.

Facts: EleutherAI/gpt-neox ea7aefd8 megatron/neox_arguments, tilde-nlp/llm-gpt-neox 374a5c6 for the fork's keys. Keys
may have `-` or `_`. What has no meaning here is refused unless it is in `IGNORED`: it describes the model, which the
checkpoint does too, or how GPT-NeoX does its work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from formats.errors import UsageError

ALIASES: Mapping[str, str] = {
    "train_data_paths": "data.train",
    "seq_length": "data.seq_length",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "train_batch_size": "batch.size",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "optim.clip",
    "clip_grad": "optim.clip",
    "weight_decay": "optim.weight_decay",
    "lr_decay_style": "schedule.style",
    "warmup": "schedule.warmup",
    "min_lr": "schedule.min_lr",
    "cd_start_iter": "schedule.start",
    "cd_end_iter": "schedule.end",
    "train_iters": "steps.train_iters",
    "iteration_offset": "steps.iteration_offset",
    "exit_interval": "steps.exit_interval",
    "checkpoint_factor": "save.every",
    "keep_last_n_checkpoints": "save.keep",
    "save": "save.path",
    "load": "model.path",
    "checkpoint_activations": "model.activation_checkpointing",
    "log_interval": "log.every",
    "seed": "seed",
}
VALUES: Mapping[str, Callable[[Any], tuple[str, Any]]] = {
    "finetune": lambda value: ("init", "finetune" if value else "resume"),
    "pack_impl": lambda value: ("data.packing", _packing(value)),
    "loss_mask_pairs": lambda value: ("data.loss", "assistant" if value else "all"),
    "loss_mask_alternating_individual": lambda value: ("data.loss", "assistant" if value else "all"),
    "SFT_ENABLED": lambda value: ("data.loss", "all" if str(value).lower() in ("0", "false") else "assistant"),
    "precision": lambda value: ("model.dtype", {"bfloat16": "bf16", "fp32": "fp32"}.get(value, value)),
}
IGNORED = frozenset({
    "override_lr_scheduler", "CURSE_ATTENTION", "SAMPLE_ENDS", "loss_mask_individual", "eod_mask_loss", "launcher",
    "distributed_backend", "deepspeed_slurm", "no_ssh_check", "tokenizer_type", "vocab_file", "data_impl",
    "num_workers", "eval_interval", "eval_iters", "zero_optimization", "steps_per_print", "wall_clock_breakdown",
    "use_wandb", "bf16", "fp16", "hidden_size", "num_layers", "num_attention_heads", "num_kv_heads",
    "intermediate_size", "max_position_embeddings", "norm", "rms_norm_epsilon", "pos_emb", "rotary_pct",
    "rotary_emb_base", "no_weight_tying", "gpt_j_residual", "output_layer_parallelism", "activation", "mlp_type",
    "use_bias_in_attn_linear", "use_bias_in_norms", "use_bias_in_mlp", "attention_config",
    "make_vocab_size_divisible_by", "model_parallel_size", "pipe_parallel_size", "init_method",
    "output_layer_init_method", "attention_dropout", "hidden_dropout", "lr_decay_iters", "partition_activations",
    "synchronize_each_layer", "checkpoint_num_layers", "tensorboard_dir", "log_dir",
})  # fmt: skip
"""Without effect: documents of a row are always kept apart, and the settings here always win over a checkpoint's."""


def translated(held: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A tree of ours out of a file that may have keys of GPT-NeoX.

    Returns:
        The tree; and for each key that was translated or has no effect the setting that it became, or nothing, and a
        line that says so.

    Raises:
        UsageError: two keys say different things, or one cannot be translated.
    """
    tree: dict[str, Any] = {}
    notes: list[tuple[str, str]] = []
    said: dict[str, tuple[str, Any]] = {}
    for key, value in held.items():
        name = str(key).replace("-", "_")
        if name == "optimizer":
            for ours, given in _optimizer(value, path).items():
                _say(tree, said, str(key), ours, given, path)
            notes.append(("optim", "optimizer -> optim"))
        elif name == "zero_optimization" and isinstance(value, dict) and value.get("stage") in (1, 2, 3):
            stage = value["stage"]
            _say(tree, said, f"{key}.stage", "parallel.zero_stage", stage, path)
            told = (
                f"{key}.stage -> parallel.zero_stage: {stage}, if --engine deepspeed trains; fsdp shards all as 3 does"
            )
            notes.append(("parallel.zero_stage", told))
        elif name == "fp16" and isinstance(value, dict) and value.get("enabled") and value.get("type") != "bfloat16":
            notes.append(("", f"{key}: no effect, nothing is trained in float16: the computation is in model.dtype"))
        elif name in IGNORED:
            notes.append(("", f"{key}: no effect"))
        elif isinstance(value, dict):
            for ours, given in value.items():
                _say(tree, said, f"{name}.{ours}", f"{name}.{ours}", given, path)
            tree.setdefault(name, {})
        elif name in ALIASES or name in VALUES:
            ours, given = (ALIASES[name], value) if name in ALIASES else VALUES[name](value)
            _say(tree, said, str(key), ours, given, path)
            if ours != name:
                notes.append((ours, f"{key} -> {ours}: {given}"))
        else:
            tree[name] = value
    return tree, notes


def _say(tree: dict[str, Any], said: dict[str, tuple[str, Any]], key: str, ours: str, value: Any, path: str) -> None:
    before = said.setdefault(ours, (key, value))
    if before[1] != value:
        raise UsageError(f"{path}: {before[0]} says {before[1]!r}, {key} says {value!r}: both mean {ours}")
    *sections, last = ours.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{path}: {section} is {inner!r}, and {key} belongs into a section of that name")
        tree = inner
    tree[last] = value


def _optimizer(value: Any, path: str) -> dict[str, Any]:
    params = value.get("params") if isinstance(value, dict) else None
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(params, dict) or str(kind).lower() not in ("adam", "adamw"):
        raise UsageError(f"{path}: the optimizer {kind} is not known", 'only {"type": "Adam", "params": {…}}')
    unknown = sorted(params.keys() - {"lr", "betas", "eps", "weight_decay"})
    if unknown:
        raise UsageError(f"{path}: the optimizer has {', '.join(unknown)}, which AdamW has not")
    try:
        return {f"optim.{name}": float(held) if isinstance(held, str) else held for name, held in params.items()}
    except ValueError as error:
        raise UsageError(f"{path}: the optimizer's params hold no number: {error}") from None


def _packing(value: Any) -> Any:
    return {"k_bin_packed": "k_bin", "pack_until_overflow": "overflow", "packed": "packed"}.get(value, value)
