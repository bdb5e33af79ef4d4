"""The effect of each argument of Megatron-LM on a model: all options and config fields of 0.12 to 0.19, and of main.

An argument of a checkpoint is a field of TransformerConfig or MLATransformerConfig, an option of pretrain_gpt.py, or
set by a program. Arguments that change how weights are stored (`layout`) or what the model computes (`compute`) are in
the table below; `run_options.py` has the names of all others. An argument with a value that no table here understands
is refused, and so is an argument that no version has: nothing is dropped.

Facts: the dataclasses of megatron-core 0.12 to 0.19 (model_parallel_config.py, transformer/transformer_config.py) and
megatron/training/arguments.py at each release branch and at d98e8a64; the arguments that stock Megatron passes to its
model are in megatron/training/argument_utils.py `core_transformer_config_from_args` at 0.19.2.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import UnsupportedError, short
from formats.megatron.args.run_options import RUN
from formats.model.accepted import UNKNOWN
from formats.model.values import equal

FIELDS_TEXT = """
activation_func                             compute  null
activation_func_clamp_value                 compute  null
add_bias_linear                             layout   read
add_position_embedding                      layout   nothing
add_qkv_bias                                layout   read
apply_layernorm_1p                          layout   false
apply_query_key_layer_scaling               compute  nothing
apply_residual_connection_post_layernorm    compute  false
attention_output_gate                       layout   false
attention_softmax_in_fp32                   compute  nothing
autocast_dtype                              compute  rounding
bert_binary_head                            layout   loud
beta_fast                                   compute  read
beta_slow                                   compute  read
bf16                                        compute  rounding
bias_activation_fusion                      compute  nothing
bias_gelu_fusion                            compute  read
decoder_num_layers                          layout   loud
disable_bf16_reduced_precision_matmul       compute  rounding
disable_bias_linear                         layout   read
dsa_indexer_head_dim                        layout   with experimental_attention_variant
dsa_indexer_k_norm_epsilon                  compute  with experimental_attention_variant
dsa_indexer_k_norm_fp32                     compute  with experimental_attention_variant
dsa_indexer_n_heads                         layout   with experimental_attention_variant
dsa_indexer_rope_interleaved                compute  with experimental_attention_variant
dsa_indexer_rotate_activation               compute  with experimental_attention_variant
dsa_indexer_scoring_relu                    compute  with experimental_attention_variant
dsa_indexer_skip_topk_offset                compute  with experimental_attention_variant
dsa_indexer_topk                            compute  with experimental_attention_variant
dsa_indexer_topk_freq                       compute  with experimental_attention_variant
enable_autocast                             compute  rounding
enable_gpt_oss                              compute  false
enable_mhc_connections                      layout   false
encoder_num_layers                          layout   nothing
experimental_attention_variant              layout   null
expert_gtp_weight_remat_size                layout   1
expert_parallel                             layout   false
expert_tensor_parallel_num_weight_shards    layout   null | = expert_tensor_parallel_size | = tensor_model_parallel_size
export_force_local_attention                layout   false
ffn_hidden_size                             layout   read
first_last_layers_bf16                      compute  rounding
fp16                                        compute  rounding
fp32_residual_connection                    compute  rounding
fp4                                         compute  rounding
fp4_param                                   layout   loud
fp4_param_gather                            layout   loud
fp4_quantizer_factory                       compute  rounding
fp4_recipe                                  compute  rounding
fp8                                         compute  rounding
fp8_amax_compute_algo                       compute  rounding
fp8_amax_history_len                        compute  rounding
fp8_dot_product_attention                   compute  rounding
fp8_interval                                compute  rounding
fp8_margin                                  compute  rounding
fp8_multi_head_attention                    compute  rounding
fp8_output_proj                             compute  rounding
fp8_param                                   layout   loud
fp8_param_gather                            layout   loud
fp8_quantizer_factory                       compute  rounding
fp8_recipe                                  compute  rounding
gated_linear_unit                           layout   null | false | = swiglu | = quick_geglu
gdp_num_householder                         layout   with is_hybrid_model
glu_linear_offset                           compute  0.0
group_query_attention                       layout   read
gtp_remat_opt_in_modules                    layout   with gtp_weight_remat_size
gtp_weight_remat_size                       layout   1
heterogeneous_block_specs                   layout   false
heterogeneous_layers_config_encoded_json    layout   null
heterogeneous_layers_config_path            layout   null
hidden_size                                 layout   read
hybrid_attention_ratio                      layout   0.0 | null
hybrid_layer_pattern                        layout   null
hybrid_mlp_ratio                            layout   0.0 | null
hybrid_override_pattern                     layout   null
is_hybrid_model                             layout   false
kitchen_attention_backend                   compute  rounding
kitchen_config_file                         layout   null
kitchen_recipe_number                       layout   null
kv_channels                                 layout   read
kv_lora_rank                                layout   read
layernorm_epsilon                           compute  read
layernorm_zero_centered_gamma               layout   false
linear_attention_freq                       layout   null
linear_conv_kernel_dim                      layout   with experimental_attention_variant
linear_key_head_dim                         layout   with experimental_attention_variant
linear_num_key_heads                        layout   with experimental_attention_variant
linear_num_value_heads                      layout   with experimental_attention_variant
linear_value_head_dim                       layout   with experimental_attention_variant
logit_dtype                                 compute  rounding
make_vocab_size_divisible_by                layout   read
mamba_head_dim                              layout   with is_hybrid_model
mamba_num_groups                            layout   with is_hybrid_model
mamba_num_heads                             layout   with is_hybrid_model
mamba_state_dim                             layout   with is_hybrid_model
mamba_training_ssm_states_dtype             compute  rounding
max_position_embeddings                     layout   read
mhc_init_gating_factor                      layout   with enable_mhc_connections
mhc_num_residual_streams                    layout   with enable_mhc_connections
mhc_sinkhorn_iterations                     layout   with enable_mhc_connections
mla_down_proj_fusion                        layout   false
model_spec                                  layout   null
modelopt_enabled                            layout   false
moe_apply_probs_on_input                    compute  false    experts
moe_dispatch_fwd_dtype                      compute  rounding
moe_expert_capacity_factor                  compute  null    experts
moe_expert_rank_capacity_factor             compute  null    experts
moe_extended_tp                             layout   false    experts
moe_ffn_hidden_size                         layout   read
moe_grouped_gemm                            layout   read
moe_input_jitter_eps                        compute  null    experts
moe_latent_size                             layout   null    experts
moe_layer_freq                              layout   read
moe_mlp_glu_interleave_size                 layout   read
moe_pad_expert_input_to_capacity            compute  with moe_expert_capacity_factor
moe_router_dtype                            compute  rounding
moe_router_enable_expert_bias               layout   read
moe_router_force_biased                     compute  null    experts
moe_router_force_load_balancing             compute  false    experts
moe_router_group_topk                       compute  read
moe_router_load_balancing_type              compute  read
moe_router_num_groups                       compute  read
moe_router_pre_softmax                      compute  read
moe_router_quantile_balancing_ema           compute  with moe_router_load_balancing_type
moe_router_score_function                   compute  read
moe_router_topk                             compute  read
moe_router_topk_limited_devices             compute  null    experts
moe_router_topk_scaling_factor              compute  read
moe_shared_expert_gate                      layout   read
moe_shared_expert_glu_interleave_size       layout   read
moe_shared_expert_intermediate_size         layout   read
moe_single_grouped_bias                     layout   false    experts
moe_single_grouped_weight                   layout   false    experts
moe_token_drop_policy                       compute  with moe_expert_capacity_factor
moe_token_dropping                          compute  false    experts
moe_upcycling_granularity                   layout   nothing
moe_use_legacy_grouped_gemm                 layout   loud
moe_use_upcycling                           layout   nothing
mrope_section                               compute  null
mscale                                      compute  read
mscale_all_dim                              compute  read
mtp_hybrid_override_pattern                 layout   null
mtp_num_layers                              layout   read
mtp_use_repeated_layer                      layout   false
multi_latent_attention                      layout   false
multi_query_attention                       layout   loud
mup_attn_scale_power                        compute  with use_mup
mup_base_head_dim                           compute  with use_mup
mup_base_hidden_size                        compute  with use_mup
mup_embedding_mult                          compute  with use_mup
mup_output_mult                             compute  with use_mup
mup_width_mult                              compute  with use_mup
no_rope_freq                                compute  read
norm_epsilon                                compute  read
normalization                               layout   read
num_attention_heads                         layout   read
num_experts                                 layout   read
num_layers                                  layout   read
num_layers_at_end_in_bf16                   compute  rounding
num_layers_at_start_in_bf16                 compute  rounding
num_moe_experts                             layout   nothing
num_query_groups                            layout   read
num_tokentypes                              layout   loud
onnx_safe                                   compute  false | null
openai_gelu                                 compute  nothing
original_max_position_embeddings            compute  read
pad_vocab_size                              layout   nothing
padded_vocab_size                           layout   read
params_dtype                                compute  rounding
position_embedding_type                     layout   "rope" | "learned_absolute" | "yarn"
q_lora_rank                                 layout   read
qk_head_dim                                 layout   read
qk_l2_norm                                  compute  false
qk_layernorm                                layout   read
qk_pos_emb_head_dim                         layout   read
quant_recipe                                layout   null
quick_geglu                                 layout   false
relative_attention_max_distance             layout   with position_embedding_type
relative_attention_num_buckets              layout   with position_embedding_type
restore_modelopt_state                      layout   false
retro_add_retriever                         layout   false
retro_attention_gate                        layout   with retro_add_retriever
retro_cyclic_train_iters                    layout   with retro_add_retriever
retro_encoder_layers                        layout   with retro_add_retriever
retro_num_neighbors                         layout   with retro_add_retriever
retro_num_retrieved_chunks                  layout   with retro_add_retriever
retro_project_dir                           layout   with retro_add_retriever
rope_scaling_factor                         compute  read
rope_type                                   compute  read
rotary_base                                 compute  read
rotary_interleaved                          compute  false
rotary_percent                              compute  read
rotary_scaling_factor                       compute  read
rotary_seq_len_interpolation_factor         compute  read
share_embeddings_and_output_weights         layout   nothing
softmax_scale                               compute  null
softmax_type                                layout   "vanilla"
spec                                        layout   null
squared_relu                                compute  false
swiglu                                      layout   read
te_precision_config_file                    layout   null
tensor_parallel_num_weight_shards           layout   null | = tensor_model_parallel_size
test_mode                                   compute  false
transformer_impl                            layout   loud
true_vocab_size                             layout   read
untie_embeddings_and_output_weights         layout   read
use_grouped_gemm_for_dense_mlp              layout   false
use_grouped_gemm_for_shared_expert          layout   read
use_kitchen                                 layout   false
use_kitchen_attention                       compute  rounding
use_legacy_models                           layout   loud
use_mup                                     compute  false
use_rope_scaling                            compute  read
use_rotary_position_embeddings              layout   read
v_head_dim                                  layout   read
vocab_extra_ids                             layout   loud
vocab_size                                  layout   nothing
window_attn_skip_freq                       compute  read
window_size                                 compute  read
yaml_cfg                                    compute  null
yarn_beta_fast                              compute  read
yarn_beta_slow                              compute  read
yarn_correction_range_round_to_int          compute  read
yarn_mscale                                 compute  with yarn_rotary_scaling_factor
yarn_mscale_all_dim                         compute  with yarn_rotary_scaling_factor
yarn_original_max_position_embeddings       compute  read
yarn_rotary_scaling_factor                  compute  null
"""
"""Argument, class, and its harmless values, with which the tables here are right; `experts`: acts only with experts.

    null | 0        the values that a reader accepts, in JSON
    = NAME          the value of that argument
    read            a table here has the argument as a setting, or has a rule for it
    with NAME       no effect while the argument NAME has one of its values in this table
    rounding        changes the precision of a computation, not what is computed
    loud            changes names, shapes or types in the files, which the readers detect
    nothing         no effect in models of megatron-core
"""

WORDS = ("read", "rounding", "loud", "nothing")
LAYERS = "transformer_layer_spec"
"""The argument that names code which builds the layers: `unknown-arguments` does not accept it."""
MOST_NAMES = 8
"""The largest number of unknown arguments that a hint lists one by one."""


@dataclass(frozen=True)
class Field:
    """An argument that changes layout or computation.

    Attributes:
        name: the argument.
        kind: `layout` or `compute`.
        values: the harmless values, with which layout and computation are as the tables assume; empty with a `rule`.
        same: arguments whose values are harmless too.
        rule: one of `WORDS`, or the argument without which this argument has no effect; empty for none.
        experts: whether the argument acts only in a model with experts.
    """

    name: str
    kind: str
    values: tuple[Any, ...] = ()
    same: tuple[str, ...] = ()
    rule: str = ""
    experts: bool = False

    def allows(self, value: Any, args: Mapping[str, Any]) -> bool:
        """Whether layout and computation with a value are as the tables assume."""
        if self.rule or (self.experts and args.get("num_experts") is None):
            return True
        named = tuple(args[name] for name in self.same if args.get(name) is not None)
        return any(equal(value, known) for known in (*self.values, *named))


def _parsed(text: str) -> Iterator[Field]:
    for line in text.strip().splitlines():
        name, kind, rest = line.split(maxsplit=2)
        rest, experts = rest.removesuffix(" experts").strip(), rest.endswith(" experts")
        if rest in WORDS or rest.startswith("with "):
            yield Field(name, kind, rule=rest.removeprefix("with "), experts=experts)
            continue
        choices = [choice.strip() for choice in rest.split("|")]
        same = tuple(choice.removeprefix("= ") for choice in choices if choice.startswith("= "))
        values = tuple(json.loads(choice) for choice in choices if not choice.startswith("= "))
        yield Field(name, kind, values, same, experts=experts)


FIELDS: Mapping[str, Field] = {field.name: field for field in _parsed(FIELDS_TEXT)}
ASSUMED = {field.name: field.values[0] for field in FIELDS.values() if field.values and field.values[0] is not None}
"""The value that the tables assume for an argument, if it is not None; the default in the args that are written."""


def require_understood(
    args: Mapping[str, Any],
    where: str,
    *,
    understood: Collection[str] = (),
    own: Collection[str] = (),
    accept: Collection[str] = (),
) -> list[str]:
    """Refuse args that would be dropped: values that the tables do not assume, and arguments that no version has.

    Args:
        args: the args of a checkpoint.
        where: what to call the file of the args in an error.
        understood: arguments that another table checks.
        own: arguments that only this dialect has.
        accept: arguments that the user names, to be treated as if they had a known value.

    Returns:
        Notes for the user on the arguments that were accepted.

    Raises:
        UnsupportedError: an argument has a value without a counterpart, or no version has the argument.
    """
    unusual = [
        (field, args[name])
        for name, field in FIELDS.items()
        if name in args and name not in understood and not field.allows(args[name], args)
    ]
    refused = [(field, value) for field, value in unusual if field.name not in accept]
    if refused:
        reasons = "; ".join(
            f"{field.name} = {short(value)} is not supported, only {field.values[0]!r}" for field, value in refused
        )
        words = " ".join(f"--accept {field.name}" for field, _ in refused)
        raise UnsupportedError(f"{where}: {reasons}", f"{words} converts the weights as if it were at that value")
    strange = unknown(args, own)
    left = [name for name in strange if name not in accept and (UNKNOWN not in accept or name == LAYERS)]
    if left:
        left.sort(key=lambda name: name != LAYERS)
        reasons = ", ".join(f"{name} = {short(args[name])}" for name in left[:MOST_NAMES])
        rest = f" and {len(left) - MOST_NAMES} more" if len(left) > MOST_NAMES else ""
        names = left if len(left) <= MOST_NAMES else [*({LAYERS} & {*left}), UNKNOWN]
        raise UnsupportedError(
            f"{where}: no Megatron-LM that is known here has these arguments: {reasons}{rest}",
            f"if they change neither layout nor computation: {' '.join(f'--accept {name}' for name in names)}",
        )
    notes = [f"{field.name} = {short(value)} is taken as {field.values[0]!r}" for field, value in unusual]
    return notes + ([f"unknown arguments are taken for settings of the run: {', '.join(strange)}"] if strange else [])


def unknown(args: Mapping[str, Any], own: Collection[str] = ()) -> list[str]:
    """The arguments that no version has, apart from `own` ones and those that are off."""
    names = (name for name in args if isinstance(name, str) and name not in FIELDS and name not in RUN)
    return sorted(name for name in names if name not in own and not off(args[name]))


def off(value: Any) -> bool:
    """Whether a value means that an option was not used: None, False, 0 or empty."""
    return value is None or (isinstance(value, bool | int | float | str | list | tuple | dict) and not value)


def run_arguments(args: Mapping[str, Any]) -> list[str]:
    """The arguments that do not describe a model: settings of the run, which `reshard` keeps and no config can hold."""
    return sorted(name for name in args if isinstance(name, str) and name not in FIELDS)
