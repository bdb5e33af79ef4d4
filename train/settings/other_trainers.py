"""Tables that translate the settings of axolotl, TRL, LLaMA-Factory and torchtune to ours, for `train init`.

Every key of a file becomes a setting, has no effect here, or is left out with a reason; all three are printed. Settings
that a file does not give have the defaults of its trainer, not ours.

Facts: axolotl 0.19.0 utils/schemas/ and core/builders/base.py; TRL 1.16.0 trainer/sft_config.py and model_config.py;
transformers 5.23.0 training_args.py; LLaMA-Factory 0.9.5 hparams/; torchtune 0.6.1 recipes/configs/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from train.settings.dependent_keys import (  # fmt: skip
    PREFERENCES,
    QUANTIZE,
    Given,
    Rule,
    builders,
    completions,
    constant,
    longer_documents,
    loss_of_builder,
    mixed,
    no_limit,
    off,
    quantized,
    strategy,
    unpacked,
)

Settings = dict[str, Any]
"""Values of our settings, by dotted names."""
Value = Callable[[Any], Settings | None]
"""Function of the value of a key that returns our settings; None if the value cannot be expressed."""


class Trainer(NamedTuple):
    """How the settings of another trainer are translated.

    Attributes:
        name: name of the trainer.
        keys: our setting with the same meaning, by key.
        values: function that translates the value, by key.
        defaults: defaults of the trainer: keys, the value that applies if none of them is given, and our settings, or a
            function of the keys of a file that returns them.
        idle: keys, or prefixes of keys, that have no effect here.
        left: why a key is not translated, by key.
        rules: rules for keys that depend on others, or whose absence is to be named.
        nulls: keys whose null is a value; other keys with null are not given.
    """

    name: str
    keys: Mapping[str, str]
    values: Mapping[str, Value]
    defaults: tuple[tuple[tuple[str, ...], Any, Settings | Callable[[Given], Settings]], ...]
    idle: tuple[str, ...]
    left: Mapping[str, str]
    rules: tuple[Rule, ...]
    nulls: tuple[str, ...] = ()


def _to(name: str, **choices: Any) -> Value:
    """The translation to a setting whose values have other names."""
    return lambda value: {name: choices[str(value).lower()]} if str(value).lower() in choices else None


def _if(settings: Settings, other: Settings | None = None) -> Value:
    """The translation of a flag: the settings for `true`, and for `false`; without the latter false means nothing."""
    return lambda value: settings if value is True else ({} if other is None else other) if value is False else None


def _positive(name: str) -> Value:
    """The translation of a number where zero and less mean that the setting is not given."""
    return lambda value: {name: value} if value > 0 else {}


def _warmup(value: Any) -> Settings | None:
    """The translation of a share of the steps, 1 being all of them; in our setting 1 and more count steps."""
    return None if value > 1 else {"schedule.warmup": "all" if value == 1 else value} if value > 0 else {}


def _steps(name: str) -> Value:
    """The translation of a number of steps; a share of the steps cannot be expressed."""
    return lambda value: None if 0 < value < 1 else {name: int(value)} if value > 0 else {}


def _trackers(value: Any) -> Settings | None:
    names = [value] if isinstance(value, str) else list(value)
    return {"log.trackers": [name for name in names if name != "none"]} if "all" not in names else None


def _targets(value: Any) -> Settings:
    """The layers with adapters; LLaMA-Factory writes them as a list with commas, and `all`."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
    return {"lora.targets": ["all-linear"] if names in (["all"], ["all-linear"]) else names}


def _optimizer(value: Any) -> Settings | None:
    """AdamW of torch, fused or not, or of bitsandbytes with moments in 8 bits; None for any other optimizer."""
    name = str(value).lower()
    return {"optim.moments": "8bit"} if name in ADAMW_8BIT else {} if name in ADAMW else None


def _template(value: Any) -> Settings | None:
    """A chat template that is shipped here too; the tokenizer's own is our default; None for any other template."""
    return {"chat_template": value} if value in ("chatml", "llama3") else {} if value == "tokenizer_default" else None


def _loggers(value: Any) -> Settings:
    return {"log.trackers": [name for key, name in LOGGERS.items() if key in value]}


def _style(value: Any) -> Settings | None:
    """A schedule of transformers, whose `constant` has no warm-up."""
    name = str(value).lower()
    if name not in STYLES:
        return None
    return {"schedule.style": STYLES[name], **({"schedule.warmup": 0} if name == "constant" else {})}


STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
          "cosine_with_min_lr": "cosine"}  # fmt: skip
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "torch.optim.adamw")
ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "bitsandbytes.optim.adamw8bit")
LOGGERS = {"WandB": "wandb", "TensorBoard": "tensorboard", "MLFlow": "mlflow"}
TUNE_LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Loggers and layers of torchtune."""
ATTENTION = _to("model.attention", flash_attention_2="flash", flash_attention_3="flash", fa2="flash", sdpa="sdpa",
                eager="eager", flex_attention="flex", auto="auto", disabled="sdpa")  # fmt: skip
TOKENIZE = "train tokenize makes token files of it, which --data names"
SETS = "evaluate.every, evaluate.best and evaluate.patience apply once data.validation names sets"
SHARDS = ("deepspeed", "fsdp", "ddp_", "dataloader_", "dataset_num_proc", "preprocessing_num_workers")

OF_THE_TRAINER: Mapping[str, str] = {
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "adam_epsilon": "optim.eps",
    "max_grad_norm": "optim.clip",
    "gradient_accumulation_steps": "batch.accumulation",
    "neftune_noise_alpha": "neftune_alpha",
    "seed": "seed",
}
"""Key of transformers' TrainingArguments, which other trainers have too: our setting."""
VALUES_OF_THE_TRAINER: Mapping[str, Value] = {
    "lr_scheduler_type": _style,
    "lr_scheduler_kwargs": lambda value: {"schedule.min_lr": value["min_lr"]} if set(value) == {"min_lr"} else None,
    "optim": _optimizer,
    "adam_beta1": lambda value: {"optim.betas.0": value},
    "adam_beta2": lambda value: {"optim.betas.1": value},
    "warmup_ratio": _warmup,
    "warmup_steps": _positive("schedule.warmup"),
    "max_steps": _steps("steps.train_iters"),
    "save_steps": _steps("save.every"),
    "save_strategy": lambda value: {} if value == "steps" else None,
    "save_total_limit": _positive("save.keep"),
    "logging_steps": _steps("log.every"),
    "bf16": _if({"model.dtype": "bf16"}, {"model.dtype": "fp32"}),
    "fp16": lambda value: {} if value is False else None,
    "gradient_checkpointing": _if({"model.activation_checkpointing": True}, {"model.activation_checkpointing": False}),
    "torch_compile": _if({"model.compile": True}),
    "use_liger_kernel": _if({"model.kernels": "liger"}),
    "report_to": _trackers,
    "attn_implementation": ATTENTION,
}
IDLE = (
    "output_dir", "overwrite_output_dir", "logging_dir", "logging_strategy", "run_name", "wandb_", "mlflow_", "tf32",
    "group_by_length", "remove_unused_columns", "push_to_hub", "hub_", "trust_remote_code",
    "gradient_checkpointing_kwargs", "save_safetensors", "save_only_model", "do_train", "do_eval", "eval_strategy",
    "ddp_timeout", "per_device_eval_batch_size", "eval_batch_size",
    "greater_is_better", "data_seed", *SHARDS,
)  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "max_steps": (-1, 0), "save_strategy": ("steps",), "fp16": (False,), "pure_bf16": (False,)
}  # fmt: skip
"""Values of keys that say no more than their absence, so that defaults apply."""
LEFT = {
    "fp16": "the compute dtype is bf16 or fp32",
    "save_strategy": "save.every counts steps",
    "dataset_name": TOKENIZE,
    "eval_steps": SETS,
    "metric_for_best_model": SETS,
    "load_best_model_at_end": SETS,
    "early_stopping_patience": SETS,
    "resume_from_checkpoint": "a run resumes by itself",
    "label_smoothing_factor": "the loss is the cross entropy of the labels",
}
QUANTIZED: Settings = {"lora.quantize": "nf4"}
QLORA: Settings = {"lora": True, **QUANTIZED}
ADAM: Settings = {"optim.betas": [0.9, 0.999]}

AXOLOTL = Trainer(
    "axolotl",
    {
        **OF_THE_TRAINER,
        "base_model": "model.path",
        "sequence_len": "data.seq_length",
        "micro_batch_size": "batch.micro",
        "num_epochs": "steps.epochs",
        "lora_r": "lora.rank",
        "lora_alpha": "lora.alpha",
        "lora_dropout": "lora.dropout",
    },
    {
        **VALUES_OF_THE_TRAINER,
        "lr_scheduler": _style,
        "optimizer": _optimizer,
        "bf16": _to("model.dtype", true="bf16", auto="bf16", full="bf16", false="fp32"),
        "adapter": lambda value: {"lora": True} if value == "lora" else QLORA if value == "qlora" else None,
        "load_in_4bit": _if(QUANTIZED, {}),
        "peft_use_dora": _if({"lora.dora": True}, {}),
        "peft_use_rslora": _if({"lora.rslora": True}, {}),
        "lora_target_modules": _targets,
        "lora_target_linear": _if({"lora.targets": ["all-linear"]}),
        "train_on_inputs": _if({"data.loss": "all"}, {"data.loss": "assistant"}),
        "sample_packing": _if({"data.packing": "bfd"}, {}),
        "excess_length_strategy": _to("data.overlong", drop="drop", truncate="truncate", **{"raise": "error"}),
        "flash_attention": _if({"model.attention": "flash"}),
        "sdp_attention": _if({"model.attention": "sdpa"}),
        "flex_attention": _if({"model.attention": "flex"}),
        "eager_attention": _if({"model.attention": "eager"}),
        "liger_rope": _if({"model.kernels": "liger"}),
        "liger_rms_norm": _if({"model.kernels": "liger"}),
        "liger_glu_activation": _if({"model.kernels": "liger"}),
        "wandb_project": lambda value: {"log.trackers": ["wandb"]} if value else {},
        "use_tensorboard": _if({"log.trackers": ["tensorboard"]}),
        "chat_template": _template,
    },
    (
        (("lr_scheduler", "lr_scheduler_type"), "cosine", {"schedule.style": "cosine"}),
        (("warmup_steps", "warmup_ratio"), "3 % of the steps, at most 100", {"schedule.warmup": 0.03}),
        (("num_epochs", "max_steps"), 1, {"steps.epochs": 1}),
        (("sequence_len",), 512, {"data.seq_length": 512}),
        (("train_on_inputs",), False, {"data.loss": "assistant"}),
        (("micro_batch_size",), 1, {"batch.micro": 1}),
        (("gradient_accumulation_steps",), 1, {"batch.accumulation": 1}),
        (("gradient_checkpointing",), False, {"model.activation_checkpointing": False}),
        (("adam_beta1", "adam_beta2"), [0.9, 0.999], ADAM),
        (("bf16",), "auto", {"model.dtype": "bf16"}),
    ),
    (
        *IDLE, "plugins", "base_model_config", "tokenizer_", "model_type", "dataset_prepared_path", "val_set_size",
        "pad_to_sequence_len", "eval_sample_packing", "dataset_processes", "is_", "liger_fused_linear_cross_entropy",
        "strict", "evals_per_epoch", "eval_table_size", "eval_max_new_tokens", "local_rank", "debug",
        "sample_packing_", "multipack_real_batches", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "xformers_",
    ),
    {
        **LEFT,
        "datasets": TOKENIZE,
        "special_tokens": "the tokenizer has them: `convert assets`, or `convert tokenizer` for new ones",
        "test_datasets": "data.validation names token files: train tokenize",
        "load_in_8bit": "weights are quantized to 4 bits only: lora.quantize nf4",
        "saves_per_epoch": "save.every counts steps: train plan prints how many an epoch has",
        "rl": PREFERENCES,
        "lora_modules_to_save": "only adapters are trained with LoRA",
    },
    (constant, unpacked("sample_packing")),
)  # fmt: skip
TRL = Trainer(
    "TRL",
    {
        **OF_THE_TRAINER,
        "model_name_or_path": "model.path",
        "max_seq_length": "data.seq_length",
        "per_device_train_batch_size": "batch.micro",
        "num_train_epochs": "steps.epochs",
        "lora_r": "lora.rank",
        "lora_alpha": "lora.alpha",
        "lora_dropout": "lora.dropout",
    },
    {
        **VALUES_OF_THE_TRAINER,
        "max_length": lambda value: None if value is None else {"data.seq_length": value},
        "use_peft": _if({"lora": True}),
        "load_in_4bit": _if(QUANTIZED, {}),
        "use_dora": _if({"lora.dora": True}, {}),
        "use_rslora": _if({"lora.rslora": True}, {}),
        "lora_target_modules": _targets,
        "packing": _if({}, {}),
        "packing_strategy": _to("data.packing", bfd="bfd", wrapped="packed"),
        "assistant_only_loss": _if({"data.loss": "assistant"}, {"data.loss": "all"}),
        "completion_only_loss": _if({"data.loss": "assistant"}, {"data.loss": "all"}),
        "dtype": _to("model.dtype", bfloat16="bf16", float32="fp32", auto="bf16"),
        "torch_dtype": _to("model.dtype", bfloat16="bf16", float32="fp32", auto="bf16"),
        "chat_template_path": lambda value: {"chat_template": value},
    },
    (
        (("learning_rate",), 2e-5, {"optim.lr": 2e-5}),
        (("lr_scheduler_type",), "linear", {"schedule.style": "linear"}),
        (("num_train_epochs", "max_steps"), 3, {"steps.epochs": 3}),
        (("per_device_train_batch_size",), 8, {"batch.micro": 8}),
        (("gradient_accumulation_steps",), 1, {"batch.accumulation": 1}),
        (("max_length", "max_seq_length"), 1024, {"data.seq_length": 1024}),
        (("rule for longer documents",), "they are cut", longer_documents),
        (("assistant_only_loss", "completion_only_loss"), False, {"data.loss": "all"}),
        (("adam_beta1", "adam_beta2"), [0.9, 0.999], ADAM),
        (("save_steps", "save_strategy"), 500, {"save.every": 500}),
        (("seed",), 42, {"seed": 42}),
        (("bf16", "fp16"), True, {"model.dtype": "bf16"}),
        (("lora_dropout",), 0.05, {"lora.dropout": 0.05}),
        (("lora_target_modules",), "those of PEFT for Llama", {"lora.targets": ["q_proj", "v_proj"]}),
    ),
    (*IDLE, "model_revision", "dataset_text_field", "dataset_kwargs", "dataset_train_split", "dataset_test_split",
     "padding_free", "pad_token", "eos_token", "pad_to_multiple_of", "eval_packing", "lora_task_type"),
    {
        **LEFT,
        "datasets": TOKENIZE,
        "dataset_config": TOKENIZE,
        "load_in_8bit": "weights are quantized to 4 bits only: lora.quantize nf4",
        "lora_modules_to_save": "only adapters are trained with LoRA",
        "max_length": "null is no limit there; here a row has data.seq_length tokens",
    },
    (constant, strategy, unpacked("packing"), mixed, off("assistant_only_loss", "completion_only_loss"), completions),
    ("max_length",),
)  # fmt: skip
LLAMA_FACTORY = Trainer(
    "LLaMA-Factory",
    {
        **OF_THE_TRAINER,
        "model_name_or_path": "model.path",
        "cutoff_len": "data.seq_length",
        "per_device_train_batch_size": "batch.micro",
        "num_train_epochs": "steps.epochs",
        "lora_rank": "lora.rank",
        "lora_alpha": "lora.alpha",
        "lora_dropout": "lora.dropout",
    },
    {
        **VALUES_OF_THE_TRAINER,
        "stage": lambda value: {} if value == "sft" else {"data.loss": "all"} if value == "pt" else None,
        "finetuning_type": lambda value: {"lora": True} if value == "lora" else {} if value == "full" else None,
        "lora_target": _targets,
        "quantization_bit": lambda value: QUANTIZED if value == 4 else None,
        "use_dora": _if({"lora.dora": True}, {}),
        "use_rslora": _if({"lora.rslora": True}, {}),
        "train_on_prompt": _if({"data.loss": "all"}, {"data.loss": "assistant"}),
        "mask_history": _if({"data.loss": "last_turn"}, {"data.loss": "assistant"}),
        "flash_attn": ATTENTION,
        "enable_liger_kernel": _if({"model.kernels": "liger"}),
        "pure_bf16": _if({}, {}),
    },
    (
        (("learning_rate",), 5e-5, {"optim.lr": 5e-5}),
        (("lr_scheduler_type",), "linear", {"schedule.style": "linear"}),
        (("num_train_epochs", "max_steps"), 3, {"steps.epochs": 3}),
        (("per_device_train_batch_size",), 8, {"batch.micro": 8}),
        (("gradient_accumulation_steps",), 1, {"batch.accumulation": 1}),
        (("cutoff_len",), 2048, {"data.seq_length": 2048}),
        (("rule for longer documents",), "they are cut", longer_documents),
        (("bf16", "pure_bf16"), False, {"model.dtype": "fp32"}),
        (("finetuning_type",), "lora", {"lora": True}),
        (("lora_rank",), 8, {"lora.rank": 8}),
        (("lora_alpha",), "twice lora_rank", lambda given: {"lora.alpha": 2 * given.get("lora_rank", 8)}),
        (("adam_beta1", "adam_beta2"), [0.9, 0.999], ADAM),
        (("save_steps", "save_strategy"), 500, {"save.every": 500}),
        (("seed",), 42, {"seed": 42}),
        (("train_on_prompt", "mask_history"), False, {"data.loss": "assistant"}),
    ),
    (*IDLE, "template", "plot_loss", "val_size", "packing", "neat_packing", "overwrite_cache",
     "include_", "preprocessing_", "disable_gradient_checkpointing", "use_fast_tokenizer", "tokenized_path"),
    {
        **LEFT,
        "dataset": TOKENIZE,
        "dataset_dir": TOKENIZE,
        "max_samples": "train tokenize takes all records: cut the file before it",
        "eval_dataset": "data.validation names token files: train tokenize",
        "mix_strategy": "data.weights mixes sets",
        "interleave_probs": "data.weights: the same list, with one of token files in --data",
        "pissa_init": "adapters begin as LoRA does",
        "additional_target": "only adapters are trained with LoRA",
        "freeze_trainable_layers": "model.freeze names what is not trained",
    },
    (constant, unpacked("packing", "neat_packing"), off("train_on_prompt", "mask_history")),
)  # fmt: skip
TORCHTUNE = Trainer(
    "torchtune",
    {
        "optimizer.lr": "optim.lr",
        "optimizer.weight_decay": "optim.weight_decay",
        "optimizer.betas": "optim.betas",
        "optimizer.eps": "optim.eps",
        "lr_scheduler.num_warmup_steps": "schedule.warmup",
        "batch_size": "batch.micro",
        "gradient_accumulation_steps": "batch.accumulation",
        "epochs": "steps.epochs",
        "clip_grad_norm": "optim.clip",
        "tokenizer.max_seq_len": "data.seq_length",
        "checkpointer.checkpoint_dir": "model.path",
        "enable_activation_checkpointing": "model.activation_checkpointing",
        "log_every_n_steps": "log.every",
        "compile": "model.compile",
        "seed": "seed",
        "model.lora_rank": "lora.rank",
        "model.lora_alpha": "lora.alpha",
        "model.lora_dropout": "lora.dropout",
    },
    {
        "dtype": _to("model.dtype", bf16="bf16", fp32="fp32"),
        "optimizer._component_": _optimizer,
        "lr_scheduler._component_": lambda value: {"schedule.style": "cosine"} if "cosine" in value else None,
        "dataset.train_on_input": _if({"data.loss": "all"}, {"data.loss": "assistant"}),
        "dataset.packed": _if({}, {}),
        "dataset.split_across_pack": _if({}, {}),
        "metric_logger._component_": _loggers,
        "model.lora_attn_modules": lambda value: {"lora.targets": [TUNE_LAYERS.get(name, name) for name in value]},
        "model.apply_lora_to_mlp": _if({"lora.targets": ["gate_proj", "down_proj", "up_proj"]}),
        "model.apply_lora_to_output": lambda value: {} if value is False else None,
        "model.quantize_base": lambda value: {} if value is False else None,
        "model._component_": lambda value: {"lora": True} if "lora" in value else {},
    },
    (
        (("lr_scheduler._component_",), "none", {"schedule.style": "constant"}),
        (("optimizer.weight_decay",), "0.01 of torch's AdamW", {"optim.weight_decay": 0.01}),
        (("optimizer.betas",), [0.9, 0.999], ADAM),
        (("clip_grad_norm",), "none", {"optim.clip": 0}),
        (("model.lora_rank",), 8, {"lora.rank": 8}),
        (("model.lora_alpha",), 16, {"lora.alpha": 16}),
        (("dataset.train_on_input",), "as the builder of the dataset has it", loss_of_builder),
        (("rule for longer documents",), "they are cut", longer_documents),
        (("gradient_accumulation_steps",), 1, {"batch.accumulation": 1}),
        (("enable_activation_checkpointing",), False, {"model.activation_checkpointing": False}),
    ),
    ("output_dir", "tokenizer.", "checkpointer.", "resume_from_checkpoint", "device", "profiler", "loss.", "shuffle",
     "optimizer.fused", "metric_logger.", "log_peak_memory_stats", "log_level", "enable_activation_offloading",
     "optimizer_in_bwd", "custom_sharded_layers", "tensor_parallel_", "cudnn_"),
    {
        "dataset._component_": TOKENIZE,
        "dataset.source": TOKENIZE,
        "dataset.split": TOKENIZE,
        "max_steps_per_epoch": "steps.train_iters counts the steps of the run",
        "model.quantize_base": QUANTIZE,
        "model.apply_lora_to_output": "lora.targets names the layers with adapters",
    },
    (unpacked("dataset.packed"), quantized, builders, no_limit),
)  # fmt: skip
TRAINERS: Mapping[str, Trainer] = {
    "axolotl": AXOLOTL, "trl": TRL, "llama-factory": LLAMA_FACTORY, "torchtune": TORCHTUNE
}  # fmt: skip
"""The translated trainers, by the name in the options of `train init`, such as `--from-axolotl FILE`."""
