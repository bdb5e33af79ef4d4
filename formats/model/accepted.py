"""The deviations that `--accept` names, whatever the source; beside them, it names arguments and keys of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from formats.errors import RefusedError

STEPS = "global_steps"
LAST_STEP = "last_train_step"
TRAINER_STEP = "trainer_step"
COUPLED = "adam_w_mode"
NORMS = "rounded_norms"
EXPERT_BIAS = "expert_bias_E"
FUSION = "bias_gelu_fusion"
EPSILON = "post_layernorm_epsilon"
IMAGES = "image_attention"
MERGER = "merger_gelu"
UNKNOWN = "unknown-arguments"
SCALED_STEPS = "scaled_steps"
LINEAR, LLAMA3, YARN, LATENT = "rotary_seq_len_interpolation_factor", "rope_scaling_factor", "yarn", "latent_yarn"
FIRST, SECOND, MOMENTUM = "exp_avg", "exp_avg_sq", "momentum_buffer"
KNOWN: Mapping[str, str] = {
    STEPS: "DeepSpeed: an optimizer that has made other steps than the model file counts",
    COUPLED: "DeepSpeed: a configuration whose optimizer is no AdamW, of a training that made an AdamW itself",
    LAST_STEP: "nanotron: an optimizer that has made other steps than its metadata counts",
    TRAINER_STEP: "FSDP, DeepSpeed: an optimizer or a model that has made other steps than the trainer counts",
    NORMS: "norms of linear attention that are rounded when 1 is subtracted",
    EXPERT_BIAS: "torchtitan: a bias of routers that transformers has no place for, which is left out",
    FUSION: "Megatron: a GPT-OSS that was clamped before the bias of its experts was added",
    EPSILON: "Megatron-Bridge: a Gemma 3 whose norms have two epsilons",
    IMAGES: "Megatron-Bridge: a Gemma 3 whose attention is causal within an image",
    MERGER: "Megatron-Bridge, torchtitan: an approximated gelu behind the tower of a Qwen3-VL or Qwen3.5",
    SCALED_STEPS: "MaxText: an optimizer with parameters that take larger or smaller steps there than elsewhere",
    UNKNOWN: "Megatron: arguments that no version has, as settings that leave the model alone",
    LINEAR: "flags for a Megatron-LM that ignores the factor of linear rotary scaling",
    LLAMA3: "flags for a Megatron-LM that ignores the factor of llama3 rotary scaling",
    YARN: "flags for a Megatron-LM that ignores YaRN",
    LATENT: "flags for a Megatron-LM that ignores YaRN in latent attention (MLA)",
    FIRST: "first moments of Adam that are not finite",
    SECOND: "second moments of Adam that are not finite, or negative",
    MOMENTUM: "a momentum of Muon that is not finite",
}
"""Name: what is converted in spite of the deviation (the table in converters/README.md)."""


class Deviation(NamedTuple):
    """A difference between the computation of a trainer's class and that of transformers.

    Attributes:
        accept: the name with which the user accepts the difference (`--accept`).
        what: a description of the difference.
        use: the purpose for which the difference can be accepted.
    """

    accept: str
    what: str
    use: str

    def notes(self, accept: Collection[str], where: str) -> tuple[str, ...]:
        """Return the note on the deviation.

        Raises:
            RefusedError: the deviation is not in `accept`.
        """
        if self.accept in accept:
            return (self.what,)
        raise RefusedError(f"{where}: {self.what}", f"--accept {self.accept}, {self.use}")
