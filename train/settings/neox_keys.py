"""Translates GPT-NeoX keys to our settings, so that a GPT-NeoX yml trains unchanged.

A file with such keys has GPT-NeoX's defaults for settings that it does not give. Keys without a counterpart are refused
unless they are in `IGNORED`: such keys describe the model, as the checkpoint does too, or how GPT-NeoX works inside.
Keys may be written with `-` or `_`.

Facts: EleutherAI/gpt-neox ea7aefd8 and tilde-nlp/llm-gpt-neox 374a5c6, megatron/neox_arguments for keys and defaults,
megatron/learning_rates.py for learning rates, megatron/data/gpt2_dataset.py for rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from converters.assets.tokenizer_files import BEGINS
from formats.errors import UsageError

ALIASES: Mapping[str, str] = {
    "train_data_paths": "data.train",
    "train_data_weights": "data.weights",
    "seq_length": "data.seq_length",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "train_batch_size": "batch.size",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "optim.clip",
    "clip_grad": "optim.clip",
    "weight_decay": "optim.weight_decay",
    "lr_decay_style": "schedule.style",
    "train_iters": "steps.train_iters",
    "train_epochs": "steps.epochs",
    "iteration_offset": "steps.iteration_offset",
    "exit_interval": "steps.exit_interval",
    "checkpoint_factor": "save.every",
    "keep_last_n_checkpoints": "save.keep",
    "save": "save.path",
    "load": "model.path",
    "vocab_file": "model.tokenizer",
    "checkpoint_activations": "model.activation_checkpointing",
    "log_interval": "log.every",
    "seed": "seed",
}
VALUES: Mapping[str, Callable[[Any], tuple[str, Any]]] = {
    "finetune": lambda value: ("init", "finetune" if value else "resume"),
    "pack_impl": lambda value: ("data.packing", _packing(value)),
    "valid_data_paths": lambda value: ("data.validation", _named(value)),
    "SFT_ENABLED": lambda value: ("data.loss", "all" if str(value).lower() in ("0", "false") else "assistant"),
    "precision": lambda value: ("model.dtype", {"bfloat16": "bf16", "fp32": "fp32"}.get(value, value)),
}
TOGETHER: Mapping[str, str] = {
    "min_lr": "schedule.min_lr", "warmup": "schedule.warmup", "lr_decay_iters": "", "cd_start_iter": "schedule.start",
    "cd_end_iter": "schedule.end", "start_cd_lr": "", "decay_pp": "", "loss_mask_pairs": "",
    "loss_mask_alternating_individual": "", "eval_interval": "evaluate.every", "eval_iters": "evaluate.max_rows",
    "allow_chopped": "data.overlong", "eod_mask_loss": "",
}  # fmt: skip
"""Key that has a meaning only together with others, see `completed`: the equivalent setting, empty if there is none."""
DEFAULTS: Mapping[str, tuple[str, Any]] = {
    "pack_impl": ("data.packing", "packed"),
    "loss_mask_pairs": ("data.loss", "all"),
    "lr_decay_style": ("schedule.style", "linear"),
    "weight_decay": ("optim.weight_decay", 0.1),
    "betas": ("optim.betas", [0.9, 0.999]),
    "precision": ("model.dtype", "fp32"),
}
"""Key: the setting that the key becomes, and GPT-NeoX's default value."""
WARMUP, EVAL_ITERS, EVAL_INTERVAL, FALL = 0.01, 100, 1000, 0.693
"""GPT-NeoX's defaults of `warmup`, `eval_iters` and `eval_interval`, and the exponent of its exponential decay."""
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "hidden_dropout": ((0,), "nothing is dropped out here"),
    "attention_dropout": ((0,), "nothing is dropped out here"),
    "loss_mask_individual": (([], [0]), "only padding, 0, is left out at any position: there is no padding here"),
    "data_path": ((), "train_data_paths and valid_data_paths name token files, or a plan: train pack P --split 98,1,1"),
    "batch_iteration_offset": ((0,), "no rows are skipped here; a run resumes with the next row"),
    "use_checkpoint_lr_scheduler": ((False,), "settings override a checkpoint's here"),
    "weight_by_num_documents": ((False,), "each row is trained as often as any other"),
    "checkpoint_scale": (("linear",), "checkpoints are written at equal distances: save.every"),
    "extra_save_iters": (([],), "checkpoints are written at equal distances: save.every"),
    "train_impl": (("normal",), "only next tokens are trained here"),
    "no_load_optim": ((False,), "finetune: true takes weights only"),
    "use_mup": ((False,), "all weights have one learning rate here"),
    "z_loss": ((0,), "the loss is only the cross entropy"),
    "use_bnb_optimizer": ((False,), "AdamW keeps its moments in float32 here"),
}
"""Key: the values that agree with what this trainer does, and why any other value is refused."""
IGNORED = frozenset({
    "override_lr_scheduler", "CURSE_ATTENTION", "SAMPLE_ENDS", "test_data_paths", "split",
    "valid_data_weights", "test_data_weights",
    # the model, which the checkpoint describes
    "num_layers", "hidden_size", "intermediate_size", "mlp_multiple_of", "expansion_factor", "num_attention_heads",
    "num_kv_heads", "sliding_window_width", "max_position_embeddings", "norm", "use_qk_layernorm", "layernorm_epsilon",
    "rms_norm_epsilon", "scalenorm_epsilon", "pos_emb", "rpe_num_buckets", "rpe_max_distance", "opt_pos_emb_offset",
    "no_weight_tying", "attention_config", "sparsity_config", "num_unique_layers", "param_sharing_style",
    "make_vocab_size_divisible_by", "activation", "rotary_pct", "rotary_emb_base", "rotary_save_freqs_buffer", "yarn",
    "yarn_beta_slow", "yarn_beta_fast", "yarn_factor", "yarn_attention_factor",
    "yarn_original_max_position_embeddings", "gpt_j_residual", "gpt_j_tied", "use_bias_in_norms",
    "use_bias_in_attn_linear", "use_bias_in_mlp", "mlp_type", "output_layer_parallelism", "padded_vocab_size",
    "init_method", "init_method_std", "output_layer_init_method", "apply_query_key_layer_scaling",
    # how GPT-NeoX computes
    "layernorm_fusion", "rmsnorm_fusion", "use_flashattn_swiglu", "scaled_upper_triang_masked_softmax_fusion",
    "scaled_masked_softmax_fusion", "bias_gelu_fusion", "bias_dropout_fusion", "rope_fusion", "fp16_lm_cross_entropy",
    "use_cpu_initialization", "attention_softmax_in_fp32", "pipe_parallel_size", "model_parallel_size",
    "pipe_partition_method", "sequence_parallel", "world_size", "is_pipe_parallel", "zero_optimization", "bf16", "fp16",
    "fp32_allreduce", "prescale_gradients", "gradient_predivide_factor", "communication_data_type", "data_types",
    "deepspeed", "deepspeed_extra_args", "activation_checkpointing", "checkpoint_num_layers", "partition_activations",
    "deepspeed_activation_checkpointing", "contiguous_checkpointing", "checkpoint_in_cpu", "synchronize_each_layer",
    "profile_backward", "loss_scale", "dynamic_loss_scale", "loss_scale_window", "min_scale", "hysteresis",
    # data and checkpoints
    "tokenizer_type", "merge_file", "data_impl", "dataset_impl", "use_shared_fs", "num_workers", "mmap_warmup",
    "short_seq_prob", "weighted_sampler_alpha", "no_save_optim", "no_save_rng", "no_load_rng", "checkpoint",
    "checkpoint_validation_with_forward_pass", "s3_path", "s3_chunk_size", "do_train", "do_valid", "do_test",
    # what GPT-NeoX logs
    "use_wandb", "wandb", "wandb_group", "wandb_team", "wandb_project", "wandb_host", "wandb_init_all_ranks",
    "use_comet", "comet_workspace", "comet_project", "comet_experiment_name", "comet_tags", "comet_others",
    "tensorboard", "tensorboard_dir", "csv_monitor", "git_hash", "log_dir", "log_grad_pct_zeros", "log_param_norm",
    "log_grad_norm", "log_optimizer_states", "log_gradient_noise_scale", "gradient_noise_scale_n_batches",
    "gradient_noise_scale_cpu_offload", "memory_profiling", "memory_profiling_path", "profile", "profile_step_start",
    "profile_step_stop", "steps_per_print", "wall_clock_breakdown", "comms_logger", "flops_profiler", "dump_state",
    "char_level_ppl",
    # how GPT-NeoX is started
    "launcher", "distributed_backend", "deepspeed_slurm", "deepspeed_mpi", "no_ssh_check", "hostfile", "include",
    "exclude", "num_nodes", "num_gpus", "master_port", "master_addr", "force_multi", "detect_nvlink_pairs",
    "autotuning", "autotuning_run", "comment", "account", "user_script", "config_files", "local_rank", "rank",
    "lazy_mpu_init", "global_num_gpus", "adlr_autoresume", "adlr_autoresume_interval", "onnx_safe",
})  # fmt: skip
"""Keys without effect. Documents of a row are always kept apart, and settings always override those of a checkpoint."""
HELD = "(GPT-NeoX)"
"""The section of a tree that has the keys of `TOGETHER` until all are known; its presence marks a GPT-NeoX file."""


Notes = list[tuple[str, str]]


def translated(content: Mapping[str, Any], path: str) -> tuple[dict[str, Any], Notes]:
    """A tree of our settings from a file that may have GPT-NeoX keys.

    Returns:
        The tree, for `completed`; and for each key that was translated or has no effect the setting that the key became
        (or an empty string), and a note.

    Raises:
        UsageError: two keys contradict each other, or a key cannot be translated.
    """
    tree: dict[str, Any] = {}
    kind = content.get("tokenizer_type", content.get("tokenizer-type"))
    notes: Notes = []
    idle: list[str] = []
    origins: dict[str, tuple[str, Any]] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if isinstance(value, dict) and name in ("optimizer", "zero_optimization", "fp16", "bf16"):
            settings, section_notes = _section(str(key), name, value, path)
            for ours, setting_value in settings.items():
                _say(
                    tree,
                    origins,
                    f"{key}.stage" if name == "zero_optimization" else str(key),
                    ours,
                    setting_value,
                    path,
                )
            notes += section_notes
            idle += [] if section_notes else [str(key)]
        elif name in IGNORED and not (name == "profile" and isinstance(value, dict)):
            idle.append(str(key))
        elif isinstance(value, dict):
            for ours, setting_value in value.items():
                _say(tree, origins, f"{name}.{ours}", f"{name}.{ours}", setting_value, path)
            tree.setdefault(name, {})
        elif name in ONLY:
            values, why = ONLY[name]
            if value not in values:
                raise UsageError(f"{path}: {key} is {value!r}: {why}", f"without {key} it is trained")
            idle.append(str(key))
        elif name == "vocab_file" and kind not in (None, *BEGINS):
            why = f"it is not read as a tokenizer of tokenizer_type {kind}; --model.tokenizer FILE gives one"
            notes.append(("", f"{key}: no effect, {why}"))
        elif name in TOGETHER:
            _say(tree, origins, str(key), f"{HELD}.{name}", value, path, TOGETHER[name])
        elif name in ALIASES or name in VALUES:
            ours, setting_value = (ALIASES[name], value) if name in ALIASES else VALUES[name](value)
            _say(tree, origins, str(key), ours, setting_value, path)
            if ours != name:
                notes.append((ours, f"{key} -> {ours}: {setting_value}"))
        else:
            tree[name] = value
    if idle:
        notes.append(("", f"no effect here: {', '.join(idle)}"))
    if any(ours for ours, _ in notes):
        tree.setdefault(HELD, {})
    return tree, notes


def completed(tree: dict[str, Any], path: str) -> list[str]:
    """Add the settings that the keys of `TOGETHER` become, and GPT-NeoX's defaults, where a tree has no value.

    Args:
        tree: settings of one or several files and the command line; changed in place.
        path: the file, for errors.

    Returns:
        A note for each setting.

    Raises:
        UsageError: a key requires another key that is missing, or cannot be translated.
    """
    held_keys = tree.pop(HELD, None)
    if held_keys is None:
        return []
    try:
        return _completed(tree, held_keys)
    except UsageError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None


def _completed(tree: dict[str, Any], held_keys: Mapping[str, Any]) -> list[str]:
    notes = []

    def fill(ours: str, value: Any, why: str) -> None:
        if get(tree, ours) is None:
            put(tree, ours, value)
            notes.append(f"{why} -> {ours}: {value}")

    for ours, value, why in _masks(tree, held_keys):
        fill(ours, value, why)
    if get(tree, "data.loss") is None and os.environ.get("SFT_ENABLED") == "1":
        raise UsageError(
            "SFT_ENABLED is 1, which masks instructions, but no loss_mask_pairs say which tokens they are",
            "--data.loss assistant trains only replies, --data.loss all everything",
        )
    for key, (ours, value) in DEFAULTS.items():
        fill(ours, value, f"no {key}")
    for ours, value, why in [*_rates(tree, held_keys), *_rows(tree, held_keys)]:
        fill(ours, value, why)
    files = get(tree, "data.train")
    if isinstance(files, list) and len(files) > 1:
        fill("data.weights", [1.0] * len(files), "no train_data_weights, each file has the same share")
    idle = [key for key in ("eval_interval", "eval_iters") if key in held_keys]
    if idle and not get(tree, "data.validation"):
        notes.append(f"{', '.join(idle)}: no effect without valid_data_paths")
    if "eod_mask_loss" in held_keys:
        notes.append("eod_mask_loss: no effect, the token after the end of a document is never a label here")
    if get(tree, "init") is None:
        notes.append(
            "no finetune: init is auto, which resumes from a checkpoint of this trainer with its moments; of another, "
            "such as GPT-NeoX's own, it takes the weights without the moments, which --init moments takes too"
        )
    return notes


def get(tree: Any, name: str) -> Any:
    """The value of a setting in a tree, None where the setting is not given."""
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def put(tree: dict[str, Any], name: str, value: Any, origin: str = "") -> None:
    """Set a setting in a tree.

    Raises:
        UsageError: a value is where a section is expected.
    """
    *sections, last = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UsageError(f"{origin or name}: {section} is {tree!r}, which is no section")
    tree[last] = value


def _say(
    tree: dict[str, Any],
    origins: dict[str, tuple[str, Any]],
    key: str,
    place: str,
    value: Any,
    path: str,
    ours: str = "",
) -> None:
    before = origins.setdefault(ours or place, (key, value))
    if before[1] != value:
        raise UsageError(f"{path}: {before[0]} says {before[1]!r}, {key} says {value!r}: both mean {ours or place}")
    put(tree, place, value, f"{path}: {key}")


# --- keys that are sections ------------------------------------------------------------------------------------------


def _section(key: str, name: str, value: dict[str, Any], path: str) -> tuple[dict[str, Any], Notes]:
    """The settings that a section of GPT-NeoX becomes, and notes; empty if it has no effect."""
    if name == "optimizer":
        return _optimizer(value, path), [("optim", "optimizer -> optim")]
    if name == "zero_optimization" and value.get("stage") in (1, 2, 3):
        stage, ours = value["stage"], "parallel.zero_stage"
        note = f"{key}.stage -> {ours}: {stage}, with --engine deepspeed; fsdp shards everything, as stage 3 does"
        return {ours: stage}, [(ours, note)]
    if name in ("fp16", "bf16") and value.get("enabled"):
        half = name == "fp16" and value.get("type") != "bfloat16"
        note = f"{key}: no effect, nothing is trained in float16: model.dtype is bf16" if half else ""
        return {"model.dtype": "bf16"}, [("model.dtype", note or f"{key} -> model.dtype: bf16")]
    return {}, []


def _optimizer(value: dict[str, Any], path: str) -> dict[str, Any]:
    params, kind = value.get("params"), value.get("type")
    if not isinstance(params, dict) or str(kind).lower() not in ("adam", "adamw"):
        raise UsageError(f"{path}: the optimizer {kind} is not known", 'only {"type": "Adam", "params": {…}}')
    unknown = sorted(params.keys() - {"lr", "betas", "eps", "weight_decay"})
    if unknown:
        raise UsageError(f"{path}: the optimizer has {', '.join(unknown)}, which AdamW has not")
    try:
        return {
            f"optim.{name}": float(number) if isinstance(number, str) else number for name, number in params.items()
        }
    except ValueError as error:
        raise UsageError(f"{path}: a param of the optimizer is not a number: {error}") from None


def _packing(value: Any) -> Any:
    return {"k_bin_packed": "k_bin", "pack_until_overflow": "overflow", "packed": "packed"}.get(value, value)


def _named(value: Any) -> dict[str, str]:
    """Validation sets by names, which are those of their files."""
    paths = [str(path) for path in (value if isinstance(value, list) else [value])]
    sets = {Path(path).name.removesuffix(".bin"): path for path in paths}
    if len(sets) < len(paths):
        raise UsageError("two of valid_data_paths have one name", "data: {validation: {NAME: PREFIX, …}} names them")
    return sets


# --- keys that have a meaning together -------------------------------------------------------------------------------

Filled = Iterator[tuple[str, Any, str]]
"""Triples: a setting, its value, and the GPT-NeoX keys that the value comes from, or why."""


def _number(tree: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    value = get(tree, name)
    try:
        if not isinstance(value, bool):
            return default if value is None else float(value)
    except (TypeError, ValueError):
        pass
    raise UsageError(f"{name} is {value!r}, which is no number")


def _masks(tree: Mapping[str, Any], neox: Mapping[str, Any]) -> Filled:
    """The settings of which labels are trained.

    A pair of equal ids is the user's token, an alternating id is the assistant's.
    """
    pairs, opens = neox.get("loss_mask_pairs"), neox.get("loss_mask_alternating_individual")
    if not pairs and not opens:
        return
    pair, opening = (list(ids) if isinstance(ids, list) else [] for ids in (pairs, opens))
    if len(pair) != 2 or pair[0] != pair[1] or len(opening) > 1 or (opens and not opening):
        if get(tree, "data.loss") is not None:
            return
        raise UsageError(
            f"loss_mask_pairs {pairs} with loss_mask_alternating_individual {opens} is not a mask of replies",
            "[USER, USER] and [ASSISTANT] are; or set data: {loss: …, control_tokens: {user: …, assistant: …}}",
        )
    yield "data.loss", "assistant", "loss_mask_pairs, and the token that opens a reply is not a label either"
    if opening:
        control = {"user": pair[0], "assistant": opening[0]}
        yield "data.control_tokens", control, "loss_mask_pairs, loss_mask_alternating_individual"


def _rates(tree: Mapping[str, Any], neox: Mapping[str, Any]) -> Filled:
    """The settings of the schedule. After the warm-up the learning rate is at least min_lr, with every style."""
    style, lowest = get(tree, "schedule.style"), _number(neox, "min_lr")
    if lowest:
        yield "schedule.min_lr" if style == "cosine" else "schedule.floor", lowest, "min_lr"
    if style == "sqrt":
        yield from _cool_down(tree, neox)
    elif style == "exponential":
        yield "schedule.min_lr", _number(tree, "optim.lr") * math.exp(-FALL), f"lr_decay_style {style}"
    warmup, why = _number(neox, "warmup", WARMUP), "warmup" if "warmup" in neox else "no warmup"
    if not 0 <= warmup <= 1 and get(tree, "schedule.warmup") is None:
        raise UsageError(f"warmup is {warmup:g}: a share of the steps, 1 is all of them", "--schedule.warmup STEPS")
    total = get(tree, "steps.train_iters")
    decayed = max(1, int(_number(neox, "lr_decay_iters", 1)))
    if "lr_decay_iters" not in neox or decayed == total:
        yield "schedule.warmup", "all" if warmup == 1 else warmup, why
        return
    yield "schedule.warmup", math.ceil(warmup * decayed), f"{why} of lr_decay_iters"
    if style in ("linear", "cosine", "exponential"):
        end = int(_number(tree, "steps.iteration_offset")) + decayed
        yield "schedule.end", end, "lr_decay_iters, after which the rate stays"


def _cool_down(tree: Mapping[str, Any], neox: Mapping[str, Any]) -> Filled:
    """The settings of the cool-down of tilde-nlp's fork: from start_cd_lr to decay_pp times it, between two steps."""
    settings = {"cd_start_iter": "start", "cd_end_iter": "end", "start_cd_lr": "min_lr", "decay_pp": "min_lr"}
    needed = [key for key, ours in settings.items() if get(tree, f"schedule.{ours}") is None]
    lacking = [key for key in needed if neox.get(key) is None]
    if lacking:
        raise UsageError(f"lr_decay_style sqrt requires {', '.join(lacking)}")
    yield "schedule.start", neox.get("cd_start_iter"), "cd_start_iter"
    yield "schedule.end", neox.get("cd_end_iter"), "cd_end_iter"
    if "decay_pp" in needed:
        high, rate = _number(neox, "start_cd_lr"), _number(tree, "optim.lr")
        if rate != high:
            conflict = (
                f"the optimizer's lr is {rate:g}, start_cd_lr is {high:g}: a decay by sqrt begins with the second"
            )
            raise UsageError(conflict, f"give both the same value, such as --optim.lr {high:g}")
        yield "schedule.min_lr", high * _number(neox, "decay_pp"), "decay_pp x start_cd_lr"


def _rows(tree: Mapping[str, Any], neox: Mapping[str, Any]) -> Filled:
    """The settings of how documents longer than a row are treated, and how many rows are evaluated."""
    if get(tree, "data.packing") == "overflow":
        yield "data.overlong", "truncate" if neox.get("allow_chopped", True) else "drop", "allow_chopped"
    if get(tree, "data.validation"):
        every = neox.get("eval_interval")
        yield ("evaluate.every", *((EVAL_INTERVAL, "no eval_interval") if every is None else (every, "eval_interval")))
        rows = _number(tree, "batch.size")
        rows = rows or _number(tree, "batch.micro", 1) * _number(tree, "batch.accumulation", 1)
        batches = _number(neox, "eval_iters", EVAL_ITERS)
        if not batches:
            raise UsageError("eval_iters is 0, and valid_data_paths name sets to be evaluated", "remove one of them")
        yield "evaluate.max_rows", int(batches * rows), f"eval_iters {batches:g} x {rows:g} rows"
