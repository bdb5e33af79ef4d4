"""Translate the arguments of Megatron-DeepSpeed to those of Megatron-LM, its origin, and back.

Facts: megatron/arguments.py of deepspeedai/Megatron-DeepSpeed at 6acc370a and 4efb479d, of OpenLLM-France's at a106b24.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from formats.deepspeed.mds import bloom
from formats.deepspeed.mds.tables import FAMILIES, FIRST_LAYER, OF_BIGSCIENCE
from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args.args import from_megatron, to_megatron
from formats.model.codec import Codec, Context, Spelled, choice, read, rows, scalar, single, write
from formats.model.spec import ModelSpec
from formats.torch_files.pickle_values import Opaque

NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
NO_EXPERTS = (None, 1, [1])
"""Values of `num_experts` of a model without experts; otherwise a number for each layer with experts."""
BASE = 10000
"""The base of rotary embeddings in trees without an argument for it. In others the argument is an integer."""
FPDT, ROTARY_SWITCH = "ds_sequence_parallel_fpdt", "use_rotary_position_embeddings"
OF_RUN = """
abort_on_unmet_fused_kernel_constraints actual_seq_length aml_data_download_path attn_mask checkpoint_in_cpu
checkpoint_num_layers codecarbon_dir consumed_train_tokens contigious_checkpointing cpu_optimizer cpu_torch_adam
create_moe_param_group curriculum_learning curriculum_learning_legacy curriculum_scheduler curriculum_seqlen
data_efficiency_curriculum_learning data_efficiency_curriculum_learning_numel
data_efficiency_curriculum_learning_seqlen_type data_prefixes data_weights deepscale deepscale_config deepspeed
deepspeed_activation_checkpointing deepspeed_config deepspeed_config_dict deepspeed_configuration deepspeed_dataloader
disable_mem_efficient_ln distribute_checkpointed_activations ds_fused_adam ds_inference ds_pipeline_enabled
ds_sequence_parallel_fpdt_chunk_size ds_sequence_parallel_size embedding_weights_in_fp32
enable_expert_tensor_parallelism enable_zbh1_exact_semantics enable_zbh1_pipeline eval_only expert_interval
force_ds_sequence_parallel gigaflos_no_embeds hidden_size_teacher img_dim inference kd kd_alpha_ce kd_beta_ce kd_temp
kill_switch_file kill_switch_path load_iteration load_tag load_teacher log_level log_level_replica
log_optimizer_states_to_tensorboard log_path logger_iteration loss_on_targets_only lr_decay_tokens lr_warmup_tokens
mask_user_turn mean_noise_span_length mem_efficient_ln moe_eval_capacity_factor moe_expert_parallel_size moe_loss_coeff
moe_min_capacity moe_top2_2nd_expert_sampling moe_train_capacity_factor mos multiple_valid_sets no_load_lr_state
no_pipeline_parallel noise_density num_attention_heads_teacher num_experts_teacher num_layers_teacher
override_lr_scheduler pad_vocab_size_to parameters_in_billions_no_embedding partition_activations pp_partition_method
pretrain_causal_attention profile_backward profile_steps random_ltd random_ltd_layer_num random_ltd_reserved_length
remote_device repeated_dataloader reset_iteration return_data_index reweight_loss_based_on_position_frequency
rotary_pos_emb scattered_embeddings skip_train_iteration_range split_transformers sync_tp_duplicated_parameters
synchronize_each_layer teacher_forward test_weighted_split_names test_weighted_split_paths
test_weighted_split_paths_path test_weighted_split_splits test_weighted_split_weights tile_factor tokenizer_name_or_path
topk train_data_exact_num_epochs train_desc_path train_doc_idx_path train_idx_path train_sample_idx_path
train_shuffle_idx_path train_tokens train_weighted_split_names train_weighted_split_paths
train_weighted_split_paths_path train_weighted_split_splits train_weighted_split_weights universal_checkpoint
use_checkpoint_lr_scheduler use_contiguous_buffers_in_ddp use_dataset_only use_flash_attn_builder use_flash_attn_triton
use_flash_attn_v1 use_flash_attn_v2 use_pin_memory use_tutel valid_num_workers valid_weighted_split_names
valid_weighted_split_paths valid_weighted_split_paths_path valid_weighted_split_splits valid_weighted_split_weights
wandb_api_key wandb_id wandb_logger wandb_resume wandb_run_name zero_allgather_bucket_size zero_contigious_gradients
zero_reduce_bucket_size zero_reduce_scatter zero_stage
"""
RUN = frozenset(OF_RUN.split())
"""Arguments that Megatron-LM lacks and that change neither layout nor computation, those that a training adds to its
own (megatron/training.py, pretrain_gpt.py) among them. `compression_training`,
`num_experts_switch` and `memory_centric_tiled_linear` may: they are not listed, and refused unless they are off."""
ALIKE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "max_position_embeddings",
    "layernorm_epsilon", "swiglu", "squared_relu", "openai_gelu", "bias_gelu_fusion", "add_bias_linear",
    "rotary_percent", "untie_embeddings_and_output_weights",
)  # fmt: skip
"""Arguments of the model with the same meaning in Megatron-LM."""


def _groups(key: str) -> Codec:
    """The codec of Megatron-LM's `group_query_attention`: true where the number of key/value heads is given."""
    return Codec(lambda spelled, _: key in spelled, lambda *_: {})


def _norm(key: str) -> Codec:
    """The codec of the kind of the norms, which is in lower case here."""
    names = {name: norm for norm, name in NORMS.items()}
    return scalar(key, lambda norm, _: NORMS.get(norm, norm), lambda name, _: names[name])


def _no_experts(key: str) -> Codec:
    """The codec of `num_experts`, which may only be that of a model without experts."""

    def read_none(spelled: Spelled, context: Context) -> None:
        if spelled.get(key) not in NO_EXPERTS:
            raise UnsupportedError(f"{context.where}: {short(spelled[key])} experts, which are not supported")

    return Codec(read_none, lambda *_: {key: [1]})


def _not_one_less(key: str) -> Codec:
    """The codec of norms whose weights are stored minus 1, of which GPTModelPipe has those of its layers alone.

    Facts: megatron/model/gpt_model.py (the specs of the final norm) and transformer.py at 4efb479d.
    """

    def read_false(spelled: Spelled, context: Context) -> bool:
        if spelled.get(key):
            raise UnsupportedError(
                f"{context.where}: {key} = {short(spelled[key])}: a pipeline of Megatron-DeepSpeed adds 1 to the norms "
                "of its layers and not to the final one, and no class of transformers does"
            )
        return False

    return Codec(read_false, lambda *_: {key: False})


def _positions(rotary: str, learned: str, kind: str) -> Codec:
    """The codec of the kind of positions: an enum in BigScience's tree, a switch for each kind in the others."""

    def read_kind(spelled: Spelled, context: Context) -> Any:
        if isinstance(spelled.get(kind), Opaque):
            raise UnsupportedError(
                f"{context.where}: of the positions of BigScience's tree ALiBi alone is supported, this is "
                f"{short(spelled[kind].args)} of its {spelled[kind].name}"
            )
        return spelled.get(kind, "rope" if spelled.get(rotary) else "learned_absolute")

    return Codec(read_kind, lambda value, _: {rotary: value == "rope", learned: value != "rope"})


TABLE = rows(
    """
normalization            normalization           lower case
rotary_base              rope_theta              default 10000, integer
num_query_groups         num_key_value_heads
group_query_attention    num_key_value_heads     whether present
num_experts              num_experts             no experts
position_embedding_type  use_rotary_position_embeddings add_position_embedding position_embedding_type  rotary, learned
apply_layernorm_1p       apply_layernorm_1p      not one less
-                        mlp_type                = "standard"
-                        embed_layernorm         false if present
""",
    {
        "false if present": lambda key: choice((False, None))(key)._replace(
            write=lambda *_: {}
        ),  # only BigScience has it
        "lower case": _norm,
        "default 10000, integer": single(
            lambda theta, _: BASE if theta is None else theta, lambda theta, _: int(theta)
        ),
        "whether present": _groups,
        "no experts": _no_experts,
        "not one less": _not_one_less,
        "rotary, learned": _positions,
    },
)
"""Argument of Megatron-LM, the arguments here, and the codec."""
OWN = {name for row in TABLE for names in row.keys for name in names}
"""The arguments here that the table translates."""


def of_model(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model, without those of a run (`RUN`)."""
    return {name: value for name, value in args.items() if name not in RUN}


def translated(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments of Megatron-LM for those of Megatron-DeepSpeed.

    Args:
        args: the attributes of the namespace.
        where: the name of the file in an error.

    Raises:
        UnsupportedError: an argument has a value that is not supported.
    """
    others = {name: value for name, value in of_model(args).items() if name not in OWN}
    return others | read(TABLE, args, (), where)


def require_rotation(args: Mapping[str, Any], where: str, accept: Collection[str]) -> list[str]:
    """Refuse rotary embeddings of deepspeedai's tree since 676a482c (2024-12-04), whose parser has `FPDT`.

    `RotaryEmbedding` gives a cosine and a sine there, and `apply_rotary_pos_emb` takes them for angles: it rotates by
    the cosine of the angle (megatron/model/rotary_pos_embedding.py, 4efb479d). A pipeline ends at its start
    (megatron/utils.py `update_rotary_pos_emb`), so that one that was trained is of a tree that was changed.

    Args:
        args: the attributes of the namespace.
        where: the name of the file in an error.
        accept: arguments that the user names, `ROTARY_SWITCH` for a tree that rotates by the angle.

    Returns:
        Notes for the user on what was accepted.

    Raises:
        UnsupportedError: the args are of such a run.
    """
    if FPDT not in args or not args.get(ROTARY_SWITCH):
        return []
    if ROTARY_SWITCH in accept:
        return [f"{ROTARY_SWITCH}: accepted, as of a tree that rotates by the angle of a position"]
    raise UnsupportedError(
        f"{where}: {ROTARY_SWITCH} with {FPDT}, an argument of deepspeedai's tree since 676a482c (2024-12-04), "
        "which rotates by the cosine of the angle of a position, and no pipeline at all",
        f"if your tree rotates by the angle: --accept {ROTARY_SWITCH}",
    )


def spelled(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments with which Megatron-DeepSpeed builds a model.

    Raises:
        RefusedError: there is no argument for a setting: the arguments, read back, describe another model.
        UnsupportedError: the family of the model is not supported.
    """
    if spec.family not in FAMILIES:
        raise UnsupportedError(f"Megatron-DeepSpeed is written of {', '.join(FAMILIES)}, not of a {spec.family}")
    if FAMILIES[spec.family] == OF_BIGSCIENCE:
        return bloom.to_args(spec)
    theirs = to_megatron(spec)
    args = {name: theirs[name] for name in ALIKE if name in theirs} | write(TABLE, theirs, (), "")
    again = to_megatron(from_megatron(translated(args, ""), {"vocab": spec.vocab}, None, "", settled=True))
    unspelled = [f"{name} = {short(value)}" for name, value in theirs.items() if again.get(name) != value]
    if unspelled:
        raise RefusedError(f"Megatron-DeepSpeed has no {', '.join(unspelled)} (in Megatron-LM's words)")
    return args


# --- the command line of a training ----------------------------------------------------------------------------------

VALUES = {
    "num_layers": "--num-layers", "hidden_size": "--hidden-size", "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads", "num_key_value_heads": "--num-key-value-heads",
    "kv_channels": "--kv-channels", "max_position_embeddings": "--max-position-embeddings",
    "layernorm_epsilon": "--layernorm-epsilon", "normalization": "--normalization",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by",
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
}  # fmt: skip
"""Argument: its command-line option, which takes a value."""
ROTARY = {"rope_theta": "--rotary-position-embeddings-theta", "rotary_percent": "--rotary-percent"}
"""Argument of rotary embeddings: its command-line option, which takes a value."""
SWITCHES = {
    "swiglu": (True, "--swiglu"), "squared_relu": (True, "--squared-relu"),
    "bias_gelu_fusion": (False, "--no-bias-gelu-fusion"), "add_bias_linear": (False, "--disable-bias-linear"),
    "use_rotary_position_embeddings": (True, "--use-rotary-position-embeddings"),
    "untie_embeddings_and_output_weights": (True, "--untie-embeddings-and-output-weights"),
    "embed_layernorm": (True, "--embed-layernorm"),
    "bf16": (True, "--bf16"), "fp16": (True, "--fp16"),
}  # fmt: skip
"""Argument: the value that a switch gives it, and the switch."""


SCHEDULED = {FIRST_LAYER: "--override-opt_param-scheduler", OF_BIGSCIENCE: "--override-lr-scheduler"}
"""By the number of the first layer: the option with which the schedule of the command line replaces that of the
checkpoint."""
FRESH = {
    FIRST_LAYER: ("--finetune",), OF_BIGSCIENCE: ("--finetune", "--no-load-optim", SCHEDULED[OF_BIGSCIENCE]),
}  # fmt: skip
"""Options with which a training begins with the weights alone. With `--finetune` BigScience's tree loads optimizer and
schedule too (megatron/checkpointing.py `load_checkpoint`)."""
RESUMES = ("--universal-checkpoint", "--no-load-rng")
"""Options with which a training resumes, and that of SCHEDULED."""


def flags(args: Mapping[str, Any], *, resumes: bool) -> str:
    """Return the command-line options that a training needs, as it takes none of them from the checkpoint.

    `--use-checkpoint-args` looks for files of Megatron-LM (megatron/checkpointing.py `load_args_from_checkpoint`), and
    with `--finetune` the arguments of checkpoint and command line are not compared.
    """
    values = VALUES | (ROTARY if args.get("use_rotary_position_embeddings") else {})
    tree = OF_BIGSCIENCE if bloom.holds(args) else FIRST_LAYER
    lines = ["--deepspeed", *((*RESUMES, SCHEDULED[tree]) if resumes else FRESH[tree])]
    lines += [f"{option} {args[name]}" for name, option in values.items() if name in args]
    lines += ["--position-embedding-type alibi"] if bloom.holds(args) else []
    lines += [option for name, (value, option) in SWITCHES.items() if args.get(name) is value]
    return "\n".join(lines) + "\n"
