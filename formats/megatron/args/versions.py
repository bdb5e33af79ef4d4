"""Megatron-LM 0.12 to 0.19: the options of each release, those that it loads from a checkpoint, and those it ignores.

Facts: NVIDIA/Megatron-LM at the heads of core_r0.12.0 to core_r0.19.0: megatron/training/arguments.py (the parser),
checkpointing.py `load_args_from_checkpoint`, pretrain_gpt.py, gpt_builders.py and training/models/gpt.py (the arguments
passed to the model), transformer/multi_latent_attention.py. "Stock" is pretrain_gpt.py, with --use-checkpoint-args.
The tests compare this file with the releases that are installed, and run the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from formats.model.accepted import LATENT, LINEAR, LLAMA3, YARN

VERSIONS = tuple(f"0.{minor}" for minor in range(12, 20))
"""The releases in this file; the first stands for older releases too."""
FIRST, NEWEST = VERSIONS[0], VERSIONS[-1]
ALWAYS = object()
"""Marks an option that is always given: its default differs between releases, or it describes the files."""

Args = Mapping[str, Any]


def is_between(version: str, first: str | None, last: str = NEWEST) -> bool:
    """Whether a version is among `first` to `last`; False if `first` is None."""
    place = VERSIONS.index
    return first is not None and place(first) <= place(version) <= place(last)


# --- options ---------------------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """A command-line option of stock Megatron.

    Attributes:
        dest: the name of the argument in `args`.
        default: the value that needs no option.
        known: the first version that has the option.
        loaded: the first version that takes the argument from a checkpoint; None if none does.
        form: the spelling: `value`, `quoted`, `true`, `false` (`--no-…`), `switch` (either), `list` or `pair`.
        option: the name of the option without dashes; empty if it follows from `dest`.
        when: the kind of model or checkpoint that the option is for (`KINDS`).
    """

    dest: str
    default: Any = None
    known: str = FIRST
    loaded: str | None = None
    form: str = "value"
    option: str = ""
    when: str = ""

    @property
    def name(self) -> str:
        """The name of the option on the command line."""
        return "--" + (self.option or ("no-" if self.form == "false" else "") + self.dest.replace("_", "-"))


OPTIONS = (
    Option("norm_epsilon", ALWAYS),
    Option("make_vocab_size_divisible_by", ALWAYS),
    Option("transformer_impl", ALWAYS),
    Option("tensor_model_parallel_size", ALWAYS),
    Option("pipeline_model_parallel_size", ALWAYS),
    Option("ckpt_format", "torch"),
    Option("use_megatron_fsdp", False, known="0.16", form="true"),
    Option("pipeline_model_parallel_layout", known="0.13", form="quoted"),
    Option("num_layers_per_virtual_pipeline_stage", when="even"),
    Option("virtual_pipeline_model_parallel_size", option="num-virtual-stages-per-pipeline-rank", when="uneven"),
    Option("decoder_first_pipeline_num_layers"),
    Option("decoder_last_pipeline_num_layers"),
    Option("use_rope_scaling", False, form="true"),
    Option("rope_scaling_factor", 8.0, when="llama3"),
    Option("rotary_seq_len_interpolation_factor", when="rope"),
    Option("rotary_scaling_factor", ALWAYS, when="yarn"),
    Option("yarn_original_max_position_embeddings", ALWAYS, known="0.19", when="yarn"),
    Option("yarn_beta_fast", ALWAYS, known="0.19", when="yarn"),
    Option("yarn_beta_slow", ALWAYS, known="0.19", when="yarn"),
    Option("mscale", ALWAYS, when="yarn"),
    Option("mscale_all_dim", ALWAYS, when="yarn"),
    Option("yarn_correction_range_round_to_int", ALWAYS, known="0.19", form="switch", when="yarn"),
    Option("qk_layernorm", False, form="true"),
    Option("bias_gelu_fusion", True, form="false", when="gelu"),
    Option("apply_layernorm_1p", False, form="true"),
    Option("no_rope_freq", known="0.13", form="list"),
    Option("window_attn_skip_freq", known="0.15", form="list"),
    Option("window_size", known="0.15", form="pair"),
    Option("masked_softmax_fusion", True, form="false", when="local window"),
    Option("expert_model_parallel_size", ALWAYS, when="experts"),
    Option("expert_tensor_parallel_size", ALWAYS, when="experts"),
    Option("moe_router_num_groups", when="experts"),
    Option("moe_router_group_topk", when="experts"),
    Option("moe_router_score_function", "softmax", loaded="0.16", when="experts"),
    Option("moe_router_enable_expert_bias", False, loaded="0.16", form="true", when="experts"),
    Option("moe_router_topk_scaling_factor", loaded="0.16", when="experts"),
    Option("moe_shared_expert_gate", False, known="0.16", form="true", when="experts"),
    Option("use_grouped_gemm_for_shared_expert", False, known="0.19", form="true", when="experts"),
    Option("moe_mlp_glu_interleave_size", known="0.18", when="experts"),
    Option("moe_shared_expert_glu_interleave_size", known="0.19", when="experts"),
    Option("softmax_type", "vanilla", known="0.15"),
    Option("quick_geglu", False, known="0.15", form="true"),
    Option("glu_linear_offset", 0.0, known="0.15"),
    Option("activation_func_clamp_value", known="0.15"),
    Option("mtp_num_layers", loaded="0.17"),
    Option("experimental_attention_variant", known="0.16"),
    Option("dsa_indexer_n_heads", known="0.16", when="indexed"),
    Option("dsa_indexer_head_dim", known="0.16", when="indexed"),
    Option("dsa_indexer_topk", known="0.16", when="indexed"),
    Option("dsa_indexer_topk_freq", 1, known="0.19", when="indexed"),
    Option("dsa_indexer_skip_topk_offset", 0, known="0.19", when="indexed"),
    Option("dsa_indexer_rope_interleaved", False, known="0.19", form="true", when="indexed"),
    Option("dsa_indexer_rotate_activation", True, known="0.19", form="false", when="indexed"),
    Option("dsa_indexer_k_norm_epsilon", known="0.19", when="indexed"),
    Option("sequence_parallel", False, form="true", when="indexed"),
    Option("apply_rope_fusion", True, form="false", option="no-rope-fusion", when="local or latent rope"),
    Option("no_persist_layer_norm", False, form="true", when="local"),
    Option("attention_output_gate", False, known="0.16", form="true"),
    Option("linear_attention_freq", known="0.16", form="list"),
    Option("linear_num_key_heads", ALWAYS, known="0.16", when="recurrent"),
    Option("linear_num_value_heads", ALWAYS, known="0.16", when="recurrent"),
    Option("linear_key_head_dim", ALWAYS, known="0.16", when="recurrent"),
    Option("linear_value_head_dim", ALWAYS, known="0.16", when="recurrent"),
    Option("linear_conv_kernel_dim", ALWAYS, known="0.16", when="recurrent"),
    Option("mamba_num_heads", known="0.13", loaded="0.13", when="state"),
    Option("moe_latent_size", known="0.16", loaded="0.16", when="experts"),
    Option("multi_latent_attention", False, form="true"),
    Option("q_lora_rank", when="latent"),
    Option("kv_lora_rank", ALWAYS, when="latent"),
    Option("qk_head_dim", ALWAYS, when="latent"),
    Option("qk_pos_emb_head_dim", ALWAYS, when="latent"),
    Option("v_head_dim", ALWAYS, when="latent"),
    Option("rotary_scaling_factor", ALWAYS, when="latent"),
    Option("mscale", ALWAYS, when="latent"),
    Option("mscale_all_dim", ALWAYS, when="latent"),
    Option("bf16", False, form="true"),
    Option("fp16", False, form="true"),
    Option("use_distributed_optimizer", False, form="true", when="optimizer"),
    Option("no_save_optim", False, form="true", option="no-load-optim", when="iteration"),
    Option("iteration", 0, form="true", option="no-load-rng"),
)
"""The options of a run, in this order; every version takes all other arguments from the checkpoint."""
BEFORE_OTHERS = (Option("rope_type", known="0.14", when="latent"),)
"""Options that older versions lack and do not need: there plain rope is YaRN with a factor of 1."""


def _uneven(args: Args) -> bool:
    return bool(args.get("virtual_pipeline_model_parallel_size")) and not args.get(
        "num_layers_per_virtual_pipeline_stage"
    )


KINDS: Mapping[str, Callable[[Args], bool]] = {
    "": lambda _: True,
    "even": lambda args: not args.get("pipeline_model_parallel_layout"),
    "uneven": lambda args: not args.get("pipeline_model_parallel_layout") and _uneven(args),
    "rope": lambda args: not _latent(args) and args.get("position_embedding_type") == "rope",
    "llama3": lambda args: not _latent(args) and bool(args.get("use_rope_scaling")),
    "yarn": lambda args: not _latent(args) and args.get("position_embedding_type") == "yarn",
    "latent": lambda args: args.get("multi_latent_attention") is True,
    "latent yarn": lambda args: _latent(args) and args.get("rope_type") != "rope",
    "latent local": lambda args: _latent(args) and args.get("transformer_impl") == "local",
    "local": lambda args: args.get("transformer_impl") == "local",
    "local or latent rope": lambda args: _latent(args) or (KINDS["local"](args) and KINDS["rope"](args)),
    "local window": lambda args: args.get("transformer_impl") == "local" and bool(args.get("window_size")),
    "mtp": lambda args: bool(args.get("mtp_num_layers")),
    "indexed": lambda args: args.get("experimental_attention_variant") == "dsa",
    "recurrent": lambda args: args.get("experimental_attention_variant") == "gated_delta_net",
    "state": lambda args: bool(args.get("hybrid_override_pattern") or args.get("hybrid_layer_pattern")),
    "state experts": lambda args: KINDS["state"](args) and args.get("num_experts") is not None,
    "gelu": lambda args: args.get("swiglu") is False,
    "experts": lambda args: args.get("num_experts") is not None,
    "optimizer": lambda args: not args.get("no_save_optim"),
    "iteration": lambda args: bool(args.get("iteration")),
}
"""Whether args are of a kind of model or checkpoint, by the name of the kind in a row."""


def _latent(args: Args) -> bool:
    return args.get("multi_latent_attention") is True


# --- ignored arguments -----------------------------------------------------------------------------------------------


class ValueOf(NamedTuple):
    """The value of another argument."""

    dest: str


class Patch(NamedTuple):
    """A line to add to the user's own tree, with which a version heeds an argument.

    Attributes:
        name: the name of the deviation for `--accept`.
        place: the function, and its file.
        beside: the line of the function before or after which to add the line, such as `before return x`.
        line: the line to add; `{dest}` stands for the value of an argument.
    """

    name: str
    place: str
    beside: str
    line: str


OLD_CALL, CALL = ("model_provider in pretrain_gpt.py", "gpt_builder in gpt_builders.py")
IN_CALL, BEFORE_CALL = "after model = GPTModel(", "before model = GPTModel("
ARGUMENTS, LATER_ARGUMENTS = (
    f"{name} in megatron/training/{file}.py"
    for name, file in (
        ("core_transformer_config_from_args", "arguments"),
        ("core_transformer_config_from_args", "argument_utils"),
    )
)
BUILDER = "gpt_config_from_args in megatron/training/argument_utils.py"
BEFORE_CONFIG, BEFORE_BUILT = "before config_class(**kw_args)", "before return model_config_cls(**kwargs)"

LINEAR_LINE = "seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,"
LLAMA3_LINE = "rope_scaling_factor=args.rope_scaling_factor,"
LLAMA3_BUILT = 'kwargs["rope_scaling_factor"] = args.rope_scaling_factor'
YARN_LINE = (
    "vars(config).update(yarn_rotary_scaling_factor={rotary_scaling_factor}, "
    "yarn_original_max_position_embeddings={yarn_original_max_position_embeddings}, yarn_beta_fast={yarn_beta_fast}, "
    "yarn_beta_slow={yarn_beta_slow}, yarn_mscale={mscale}, yarn_mscale_all_dim={mscale_all_dim}, "
    "yarn_correction_range_round_to_int={yarn_correction_range_round_to_int})"
)
LATENT_LINE = (
    "kw_args.update(original_max_position_embeddings={original_max_position_embeddings}, beta_fast={beta_fast}, "
    "beta_slow={beta_slow})"
)
OLD_LATENT = Patch(LATENT, ARGUMENTS, BEFORE_CONFIG, LATENT_LINE)
NEW_LATENT = Patch(LATENT, LATER_ARGUMENTS, BEFORE_CONFIG, LATENT_LINE)
FAILS = object()
"""Marks an argument with which a version fails without the patch."""


class Ignored(NamedTuple):
    """An argument that some versions do not pass to the model.

    Attributes:
        dest: the name of the argument.
        computed: the value that those versions compute with instead, or `FAILS`.
        when: the kind of model (`KINDS`).
        first: the first of those versions.
        last: the last of those versions.
        patch: the patch with which they heed the argument, if there is one.
    """

    dest: str
    computed: Any
    when: str
    first: str
    last: str
    patch: Patch | None = None


IGNORED = (
    Ignored(LINEAR, None, "rope", "0.12", "0.14", Patch(LINEAR, OLD_CALL, IN_CALL, LINEAR_LINE)),
    Ignored(LINEAR, None, "rope", "0.15", "0.18", Patch(LINEAR, CALL, IN_CALL, LINEAR_LINE)),
    Ignored(LLAMA3, 8.0, "llama3", "0.12", "0.14", Patch(LLAMA3, OLD_CALL, IN_CALL, LLAMA3_LINE)),
    Ignored(LLAMA3, 8.0, "llama3", "0.15", "0.18", Patch(LLAMA3, CALL, IN_CALL, LLAMA3_LINE)),
    Ignored(LLAMA3, 8.0, "llama3", "0.19", "0.19", Patch(LLAMA3, BUILDER, BEFORE_BUILT, LLAMA3_BUILT)),
    Ignored("position_embedding_type", "none", "yarn", "0.12", "0.14"),
    Ignored("rotary_scaling_factor", FAILS, "yarn", "0.15", "0.18", Patch(YARN, CALL, BEFORE_CALL, YARN_LINE)),
    Ignored("original_max_position_embeddings", ValueOf("max_position_embeddings"), "latent yarn", "0.12", "0.13"),
    Ignored("mscale_all_dim", ValueOf("mscale"), "latent yarn", "0.12", "0.13"),
    Ignored("beta_fast", 32.0, "latent yarn", "0.12", "0.13"),
    Ignored("beta_slow", 1.0, "latent yarn", "0.12", "0.13"),
    Ignored("original_max_position_embeddings", 4096, "latent yarn", "0.14", "0.17", OLD_LATENT),
    Ignored("beta_fast", 32.0, "latent yarn", "0.14", "0.17", OLD_LATENT),
    Ignored("beta_slow", 1.0, "latent yarn", "0.14", "0.17", OLD_LATENT),
    Ignored("original_max_position_embeddings", 4096, "latent yarn", "0.18", "0.19", NEW_LATENT),
    Ignored("beta_fast", 32.0, "latent yarn", "0.18", "0.19", NEW_LATENT),
    Ignored("beta_slow", 1.0, "latent yarn", "0.18", "0.19", NEW_LATENT),
)
"""The arguments that stock versions ignore, though they have an option for them or the argument has none at all."""


class RefusedValue(NamedTuple):
    """A value of an argument with which versions `first` to `last` refuse or do not compute a model, and why."""

    dest: str
    value: Any
    when: str
    first: str
    why: str
    last: str = NEWEST


REFUSED_VALUES = (
    RefusedValue(
        "q_lora_rank",
        None,
        "latent local",
        "0.19",
        "its local layers refuse latents whose queries have none (mla_qk_norm_config.py)",
    ),
    RefusedValue("is_hybrid_model", True, "state experts", FIRST, "no layer of its hybrids has experts", "0.15"),
    RefusedValue(
        "experimental_attention_variant",
        "dsa",
        "",
        FIRST,
        "other elements of the heads of its indexer rotate, or it has none (dsa.py)",
        "0.18",
    ),
    RefusedValue(
        "experimental_attention_variant",
        "dsa",
        "mtp",
        "0.19",
        "it builds no layer that predicts a second token beside sparse attention (training/models/gpt.py)",
    ),
    RefusedValue(
        "experimental_attention_variant",
        "gated_delta_net",
        "mtp",
        "0.19",
        "it builds no layer that predicts a second token beside linear attention (training/models/gpt.py)",
    ),
)
DEVIATIONS = tuple(dict.fromkeys(row.patch.name for row in IGNORED if row.patch))


def ignored(args: Args, version: str) -> list[Ignored]:
    """The rows of `IGNORED` for the arguments that a version does not heed."""
    return [
        row
        for row in IGNORED
        if KINDS[row.when](args)
        and is_between(version, row.first, row.last)
        and args.get(row.dest) != value_used(row, args)
    ]


def value_used(row: Ignored, args: Args) -> Any:
    """The value that a version computes with instead of an ignored argument's."""
    return args.get(row.computed.dest) if isinstance(row.computed, ValueOf) else row.computed


def effective_args(args: Args, version: str) -> dict[str, Any]:
    """The args that a stock version computed with.

    Config fields for which no version has an option are in the args of a run only if its own tree has an option for
    them, and then they reach the model.
    """
    rows = [
        row
        for row in ignored(args, version)
        if row.computed is not FAILS and not (row.patch and row.patch.name == LATENT and args.get(row.dest) is not None)
    ]
    return {**args, **{row.dest: value_used(row, args) for row in rows}}


# --- the version of a checkpoint -------------------------------------------------------------------------------------

WROTE = {
    "sft": "0.13",
    "save_retain_interval": "0.14",
    "perform_rl_step": "0.15",
    "dump_param_to_param_group_map": "0.16",
    "async_strategy": "0.17",
    "eval_global_batch_size": "0.18",
    "freeze_all_layers": "0.19",
}
"""The first version whose parser has an argument, by argument; the parser writes these into all args."""
OLDEST = ("lr_decay_style", "clip_grad")
"""Arguments that the parsers of all versions have, and that converters do not write."""


RENAMED = (
    ("norm_epsilon", "layernorm_epsilon", "0.16"),
    ("apply_layernorm_1p", "layernorm_zero_centered_gamma", "0.16"),
)
"""Two names of one argument, and the first version that reads the second name instead of the first."""


def by_name(args: Args, version: str) -> dict[str, Any]:
    """The args; arguments with two names have under both the value of the name that a version reads."""
    known = dict(args)
    for old, new, first in RENAMED:
        counts, other = (new, old) if is_between(version, first) else (old, new)
        if counts in args and other in args:
            known[other] = args[counts]
    return known


def version_of(args: Args) -> str | None:
    """The version whose parser made these args; the oldest for all older versions; None if no parser made them."""
    versions = [version for name, version in WROTE.items() if name in args]
    return versions[-1] if versions else FIRST if all(name in args for name in OLDEST) else None
