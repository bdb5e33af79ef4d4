"""The deviations that `--accept` names, whatever the source; beside them, it names arguments and keys of a run."""

from __future__ import annotations

from collections.abc import Mapping

STEPS = "global_steps"
LAST_STEP = "last_train_step"
NORMS = "rounded_norms"
EXPERT_BIAS = "expert_bias_E"
FUSION = "bias_gelu_fusion"
EPSILON = "post_layernorm_epsilon"
IMAGES = "image_attention"
UNKNOWN = "unknown-arguments"
LINEAR, LLAMA3, YARN, LATENT = "rotary_seq_len_interpolation_factor", "rope_scaling_factor", "yarn", "latent_yarn"
FIRST, SECOND, MOMENTUM = "exp_avg", "exp_avg_sq", "momentum_buffer"
KNOWN: Mapping[str, str] = {
    STEPS: "DeepSpeed: an optimizer that has made other steps than the model file counts",
    LAST_STEP: "nanotron: the same of the step in its metadata",
    NORMS: "norms of linear attention are rounded where one is taken off",
    EXPERT_BIAS: "torchtitan: a bias of routers that transformers has no place for is left out",
    FUSION: "Megatron: a GPT-OSS that clamped before it added the bias of its experts",
    EPSILON: "Megatron-Bridge: a Gemma 3 with two epsilons",
    IMAGES: "Megatron-Bridge: a Gemma 3 whose images see only what is before them",
    UNKNOWN: "Megatron: arguments that no version has are settings of the run",
    LINEAR: "flags for a Megatron-LM that ignores the factor of linear scaling",
    LLAMA3: "the same of the factor of llama3 scaling",
    YARN: "the same of YaRN",
    LATENT: "the same of YaRN with latent attention",
    FIRST: "first moments that are not finite",
    SECOND: "second moments that are not finite, or negative",
    MOMENTUM: "a momentum of Muon that is not finite",
}
"""Name: what is taken in spite of it."""
