"""The arguments of Megatron-DeepSpeed in those of Megatron-LM, which it began with and which say what they mean.

Facts: megatron/arguments.py of deepspeedai/Megatron-DeepSpeed at 6acc370a and of OpenLLM-France's at a106b24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import UnsupportedError, short
from formats.torch_files.pickle_values import Opaque

NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
NO_EXPERTS = (None, 1, [1])
"""`num_experts` of a model without any: it is a number for each layer that has some."""
REQUIRED: Mapping[str, tuple[Any, ...]] = {"mlp_type": (None, "standard"), "embed_layernorm": (None, False)}
"""Arguments that change what a model computes: the values that are supported."""
OF_RUN = """
aml_data_download_path attn_mask checkpoint_in_cpu checkpoint_num_layers consumed_train_tokens
contigious_checkpointing cpu_optimizer cpu_torch_adam create_moe_param_group curriculum_learning_legacy
data_efficiency_curriculum_learning deepscale deepscale_config deepspeed deepspeed_activation_checkpointing
deepspeed_config disable_mem_efficient_ln distribute_checkpointed_activations ds_fused_adam ds_inference
ds_pipeline_enabled ds_sequence_parallel_size embedding_weights_in_fp32 enable_expert_tensor_parallelism
enable_zbh1_exact_semantics enable_zbh1_pipeline expert_interval force_ds_sequence_parallel hidden_size_teacher
inference kd kd_alpha_ce kd_beta_ce kd_temp kill_switch_file load_iteration load_tag load_teacher
log_optimizer_states_to_tensorboard lr_decay_tokens lr_warmup_tokens mask_user_turn mem_efficient_ln
moe_eval_capacity_factor moe_expert_parallel_size moe_loss_coeff moe_min_capacity moe_top2_2nd_expert_sampling
moe_train_capacity_factor mos multiple_valid_sets no_load_lr_state no_pipeline_parallel num_attention_heads_teacher
num_experts_teacher num_layers_teacher partition_activations pp_partition_method profile_backward profile_steps
random_ltd remote_device repeated_dataloader reset_iteration return_data_index rotary_pos_emb scattered_embeddings
split_transformers synchronize_each_layer tile_factor tokenizer_name_or_path topk train_data_exact_num_epochs
train_desc_path train_doc_idx_path train_idx_path train_sample_idx_path train_shuffle_idx_path train_tokens
universal_checkpoint use_dataset_only use_flash_attn_builder use_flash_attn_triton use_flash_attn_v1 use_flash_attn_v2
use_pin_memory use_tutel wandb_api_key wandb_id wandb_logger wandb_resume wandb_run_name zero_allgather_bucket_size
zero_contigious_gradients zero_reduce_bucket_size zero_reduce_scatter zero_stage
"""
RUN = frozenset(OF_RUN.split())
"""Arguments that Megatron-LM has not, and that change neither layout nor computation. `compression_training`,
`num_experts_switch` and `memory_centric_tiled_linear` may: they are unknown, and refused unless they are off."""


def translated(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments as Megatron-LM spells them.

    Args:
        args: the attributes of the namespace.
        where: what to call its file in an error.

    Raises:
        UnsupportedError: the model has something that has no layout here.
    """
    for name, values in REQUIRED.items():
        if args.get(name) not in values:
            raise UnsupportedError(f"{where}: {name} = {short(args[name])} is not supported, only {values[-1]}")
    if args.get("num_experts") not in NO_EXPERTS:
        raise UnsupportedError(f"{where}: {short(args['num_experts'])} experts, which are not supported")
    rotary = args.get("use_rotary_position_embeddings")
    kind = args.get("position_embedding_type", "rope" if rotary else "learned_absolute")
    if isinstance(kind, Opaque):
        raise UnsupportedError(
            f"{where}: the positions of BigScience's tree ({short(kind.args)}, of BLOOM) are not supported",
            "bigscience/bloom is on the Hub with its weights",
        )
    norm, groups = args.get("normalization", "layernorm"), args.get("num_key_value_heads")
    own = {
        "num_experts": None,
        "normalization": NORMS.get(norm, norm) if isinstance(norm, str) else norm,
        "position_embedding_type": kind,
        "rotary_base": args.get("rope_theta", 10000),
        "num_query_groups": groups,
        "group_query_attention": groups is not None,
    }
    theirs = {"mlp_type", "embed_layernorm", "num_key_value_heads", "rope_theta"} | RUN
    return {name: value for name, value in args.items() if name not in theirs} | own
