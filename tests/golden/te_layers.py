"""Transformer Engine's layers on a CPU: stand-ins in torch with the names of their parameters, for both judges.

Linear attention has no local layers. So megatron-core's own code builds its blocks of Transformer Engine's, and only
what computes in these is replaced; what megatron-core computes itself, of which linear attention is most, is untouched.

Facts: megatron-core 0.16.1 and 0.19.2, extensions/transformer_engine.py (`TELayerNormColumnParallelLinear`: a norm and
a linear layer in one, `layer_norm_weight` and `weight`), models/gpt/experimental_attention_variant_module_specs.py,
ssm/gated_delta_net.py: `torch_chunk_gated_delta_rule`, its own recurrence in torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import megatron.core
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

VERSION = tuple(map(int, megatron.core.__version__.split(".")[:2]))


def normed(x: torch.Tensor, weight: torch.Tensor, config: Any, eps: float) -> torch.Tensor:
    """An RMSNorm, in float32; its weight is stored less one where the config says so."""
    if config.normalization != "RMSNorm":
        raise ValueError(f"{config.normalization} is beyond these stand-ins")
    y = x.float()
    scale = weight.float() + bool(config.layernorm_zero_centered_gamma)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


class Norm(torch.nn.Module):
    """`TENorm`."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normed(x, self.weight, self.config, self.eps)


class NormAndColumn(ColumnParallelLinear):
    """`TELayerNormColumnParallelLinear`."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=self.config.params_dtype))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        x = normed(x, self.layer_norm_weight, self.config, self.config.layernorm_epsilon)
        return super().forward(x, *args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state, group = self.state_dict(prefix="", keep_vars=True), (metadata or {}).get("dp_cp_group")
        groups = {"tp_group": self.tp_group, "dp_cp_group": group}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0, "bias": 0}, sharded_offsets, **groups)


class Layers(LocalSpecProvider):
    """What megatron-core asks for Transformer Engine's classes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormAndColumn

    def layer_norm(self, *_: Any, **__: Any) -> type:
        return Norm

    def grouped_mlp_modules(self, *args: Any, **kwargs: Any) -> Any:
        if VERSION >= (0, 18):  # a builder, not a class and its parts
            return super().grouped_mlp_modules(False)
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def install() -> None:
    """Let megatron-core build of them, and compute linear attention by its own code in torch."""
    gpt_layer_specs.TESpecProvider = variants.TESpecProvider = Layers
    gpt_layer_specs.HAVE_TE = True
    variants._get_backend_spec_provider = Layers
    name = "megatron.core.ssm.gated_delta_net"
    delta = import_module(name if VERSION < (0, 18) else f"{name}.common")
    delta.HAVE_FLA = True  # whose kernels deterministic_mode does not call, but for this one
    delta.l2norm = lambda x, dim=-1, eps=1e-6: x * torch.rsqrt((x * x).sum(dim, keepdim=True) + eps)
    if VERSION >= (0, 18):
        rule = delta.torch_chunk_gated_delta_rule

        def without_lengths(*args: Any, cu_seqlens: None = None, **kwargs: Any) -> Any:
            return rule(*args, **kwargs)

        import_module(f"{name}.gdn").torch_chunk_gated_delta_rule = without_lengths
