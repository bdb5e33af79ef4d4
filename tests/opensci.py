"""The class of open-sci-ref, which no release of transformers has: Qwen 3 with biases in the MLP.

Written after the description of OpensciConfig and OpensciMLP in open-sci's branch of transformers; registered, so that
the tests build, save and load it like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM


@strict
class OpensciConfig(Qwen3Config):
    """That of Qwen 3 with a key more."""

    model_type = "opensci"
    mlp_bias: bool = True


class OpensciForCausalLM(Qwen3ForCausalLM):
    """That of Qwen 3 with three biases more in each layer."""

    config_class = OpensciConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj") if config.mlp_bias else ():
                linear = getattr(layer.mlp, name)
                linear.bias = torch.nn.Parameter(torch.zeros(linear.out_features))


AutoConfig.register("opensci", OpensciConfig)
AutoModelForCausalLM.register(OpensciConfig, OpensciForCausalLM)
