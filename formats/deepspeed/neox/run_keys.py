"""The keys of a GPT-NeoX yml that change neither the layout of a checkpoint nor what its model computes.

Facts: the fields of neox_args.py and deepspeed_args.py in megatron/neox_arguments, of every commit up to ea7aefd8, and
configs/ there; the fork tilde-nlp/llm-gpt-neox at 92fc59e7. Settings of layers that are refused (experts, Mamba, RWKV,
gMLP) and of muP are among the keys: the keys that switch these on are in `yml.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from formats.deepspeed.neox.settings_table import ROWS, YARN_ORIGINAL, YARN_USUAL
from formats.deepspeed.neox.yml import NEOX_ONLY
from formats.errors import UnsupportedError, short

OF_MODEL = {
    *(name for row in ROWS for names in row.keys for name in names), *NEOX_ONLY, *YARN_USUAL, YARN_ORIGINAL,
    "yarn_factor", "mlp_type", "expansion_factor", "seq_length", "make_vocab_size_divisible_by",
    "model_parallel_size", "pipe_parallel_size",
}  # fmt: skip
"""Keys that are read, or refused if their value is not supported."""
RUN = """
CURSE_ATTENTION SAMPLE_ENDS SFT_ENABLED account activation_checkpointing adlr_autoresume adlr_autoresume_interval
allow_chopped amp apply_query_key_layer_scaling attention_dropout attention_softmax_in_fp32 attention_type autotuning
autotuning_run base_shapes_file batch_iteration_offset batch_size bf16 bias_dropout_fusion cd_end_iter cd_start_iter
char_level_ppl checkpoint checkpoint_activations checkpoint_factor checkpoint_in_cpu checkpoint_num_layers
checkpoint_scale checkpoint_validation_with_forward_pass clip_grad comet_experiment comet_experiment_name comet_others
comet_project comet_tags comet_workspace comment comms_logger communication_data_type compression_training config_files
contiguous_checkpointing coord_check create_moe_param_group csv_monitor curriculum_learning curriculum_seqlen
data_efficiency data_impl data_path data_types dataset_impl decay_lr_to decay_pp deepscale deepscale_config deepspeed
deepspeed_activation_checkpointing deepspeed_extra_args deepspeed_mpi deepspeed_slurm detect_nvlink_pairs dim_att
distributed_backend do_test do_train do_valid dpo_beta dpo_fp32 dpo_reference_free dump_state dynamic_loss_scale
elasticity enable_expert_tensor_parallelism eod_mask_loss eval_interval eval_iters eval_results_prefix eval_tasks
exclude exit_interval expert_interval extra_save_iters ffn_dim finetune flops_profiler force_multi fp16
fp16_lm_cross_entropy fp32_allreduce fp32_reinforce fused_kernels_build_path gas genfile git_hash global_num_gpus
gmlp_attn_dim gradient_accumulation_steps gradient_clipping gradient_noise_scale_cpu_offload
gradient_noise_scale_n_batches gradient_predivide_factor greedy head_size hidden_dropout hostfile hysteresis include
init_method init_method_std is_pipe_parallel iteration iteration_offset keep_last_n_checkpoints kl_div_beta kl_impl
kto_beta kto_desirable_weight kto_fp32 kto_undesirable_weight label_data_paths launcher layernorm_fusion lazy_mpu_init
load local_rank log_dir log_grad_norm log_grad_pct_zeros log_gradient_noise_scale log_interval log_optimizer_states
log_param_norm loss_mask_alternating_individual loss_mask_pairs loss_scale loss_scale_window lr lr_decay_fraction
lr_decay_iters lr_decay_style mamba_causal_conv_fusion mamba_inner_func_fusion mamba_selective_fp32_params
mamba_selective_scan_fusion mamba_use_bias_in_conv mamba_use_bias_in_linears master_addr master_port max_tokens
maximum_tokens memory_profiling memory_profiling_path merge_file min_lr min_scale mmap_warmup moe_eval_capacity_factor
moe_expert_interval moe_expert_parallel_size moe_glu moe_jitter_eps moe_lbl_in_fp32 moe_loss_coeff moe_min_capacity
moe_router_type moe_token_dropping moe_top_k moe_train_capacity_factor moe_type moe_use_residual mup_attn_temp
mup_embedding_mult mup_init_scale mup_output_temp mup_rp_embedding_mult mup_width_scale neg_test_data_paths
neg_test_label_data_paths neg_train_data_paths neg_train_label_data_paths neg_valid_data_paths
neg_valid_label_data_paths no_load_optim no_load_rng no_save_optim no_save_rng no_ssh_check num_gpus num_nodes
num_samples num_workers online_dataserver_ips online_dataserver_ports onnx_safe opt_pos_emb_offset optimizer
optimizer_type out_seq_length output_layer_init_method override_lr_scheduler pack_impl padded_vocab_size
param_sharing_style partition_activations peak_theoretical_tflops pipe_partition_method pos_test_data_paths
pos_test_label_data_paths pos_train_data_paths pos_train_label_data_paths pos_valid_data_paths
pos_valid_label_data_paths precision precompute_model_name prescale_gradients profile profile_backward
profile_step_start profile_step_stop prompt_end rank recompute reinforce_leave_one_out reset_attention_mask
reset_position_ids return_logits rmsnorm_fusion rope_fusion rotary_save_freqs_buffer rpe_max_distance rpe_num_buckets
s3_chunk_size s3_path sample_input_file sample_output_file save save_base_shapes save_interval save_iters
scaled_masked_softmax_fusion scaled_upper_triang_masked_softmax_fusion scalenorm_epsilon scheduler seed
sequence_parallel serve_model_weights short_seq_prob slurm_comment sparse_attention sparse_gradients sparsity_config
split start_cd_lr steps_per_print synchronize_each_layer te_columnparallel te_fp8_amax_compute_algo
te_fp8_amax_history_len te_fp8_format te_fp8_margin te_fp8_wgrad temperature tensorboard tensorboard_dir test_data_path
test_data_paths test_data_weights test_label_data_paths test_reward_data_paths text_gen_type tokenizer_type top_k top_p
train_batch_size train_data_path train_data_paths train_data_weights train_epochs train_iters train_label_data_paths
train_micro_batch_size_per_gpu train_reward_data_paths use_bias_in_norms use_bnb_optimizer use_checkpoint_lr_scheduler
use_comet use_cpu_initialization use_flashattn_swiglu use_shared_fs use_tutel use_wandb user_script valid_data_path
valid_data_paths valid_data_weights valid_label_data_paths valid_reward_data_paths vocab_file wall_clock_breakdown
wandb wandb_group wandb_host wandb_init_all_ranks wandb_project wandb_run_name wandb_team warmup warmup_iters
weight_by_num_documents weight_decay weight_server_port weighted_sampler_alpha world_size z_loss
zero_allgather_bucket_size zero_allow_untested_optimizer zero_contiguous_gradients zero_optimization
zero_reduce_bucket_size zero_reduce_scatter zero_stage
"""
OF_RUN = frozenset(RUN.split())


def require_known(config: Mapping[str, Any], where: str, accept: Collection[str]) -> list[str]:
    """Refuse a yml with keys that neither GPT-NeoX nor a fork known here has, unless their value is false or empty.

    Args:
        config: the merged yml.
        where: what to call the yml in an error.
        accept: keys that the user names, to be treated as keys of the run.

    Returns:
        Notes for the user on the keys that were accepted.

    Raises:
        UnsupportedError: no version has the key, which may change what the model computes.
    """
    unknown = sorted(key for key, value in config.items() if key not in OF_MODEL and key not in OF_RUN and value)
    refused = [key for key in unknown if key not in accept]
    if refused:
        listing = ", ".join(f"{key} = {short(config[key])}" for key in refused)
        raise UnsupportedError(
            f"{where}: no GPT-NeoX that is known here has {listing}",
            "correct a misspelt key; if it changes neither layout nor computation: "
            + " ".join(f"--accept {key}" for key in refused),
        )
    return [f"unknown keys are taken for settings of the run: {', '.join(unknown)}"] if unknown else []
