"""Transformer Engine's layers on a CPU: stand-ins in torch with the names of their parameters, for both judges.

Linear attention and hybrids with state spaces have no local layers. So megatron-core's own code builds its blocks of
Transformer Engine's, and only what computes in these is replaced; what megatron-core computes itself, of which linear
attention is most, is untouched. Of a state space the recurrence and the norm behind the gate are kernels of mamba_ssm.

Facts: megatron-core 0.16.1 and 0.19.2, extensions/transformer_engine.py (`TELayerNormColumnParallelLinear`: a norm and
a linear layer in one, `layer_norm_weight` and `weight`), models/gpt/experimental_attention_variant_module_specs.py,
ssm/gated_delta_net.py: `torch_chunk_gated_delta_rule`, its own recurrence in torch; 0.16.1, ssm/mamba_mixer.py.
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import megatron.core
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

VERSION = tuple(map(int, megatron.core.__version__.split(".")[:2]))


def normed(x: torch.Tensor, weight: torch.Tensor, config: Any, eps: float) -> torch.Tensor:
    """An RMSNorm, in float32; its weight is stored minus 1 where the config says so."""
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
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.normalization == "LayerNorm":
            return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
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


class Whole(torch.nn.Linear):
    """`TELinear` that every tensor rank holds whole."""

    def __init__(self, rows: int, columns: int, *, config: Any, **_: Any) -> None:
        super().__init__(rows, columns, bias=False, dtype=config.params_dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class GatedNorm(torch.nn.Module):
    """`RMSNormGated` of mamba_ssm: times SiLU of the gate, then an RMSNorm within each group."""

    def __init__(self, size: int, eps: float, group_size: int, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps, self.group = torch.nn.Parameter(torch.ones(size, dtype=dtype)), eps, group_size

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y = (x * torch.nn.functional.silu(z)).float().unflatten(-1, (-1, self.group))
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2).to(x.dtype) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state, group = self.state_dict(prefix="", keep_vars=True), (metadata or {}).get("dp_cp_group")
        groups = {"tp_group": get_tensor_model_parallel_group(), "dp_cp_group": group}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


def scan(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *_: Any, **also: Any
) -> Any:
    """`mamba_chunk_scan_combined`, token by token; a head reads and writes its state as its group does."""
    dt = torch.nn.functional.softplus(dt + also["dt_bias"])
    b, c = (tensor.repeat_interleave(x.shape[2] // tensor.shape[2], 2) for tensor in (b, c))
    state, outputs = torch.zeros(x.shape[0], *x.shape[2:], b.shape[-1]), []
    for now in range(x.shape[1]):
        state = state * torch.exp(dt[:, now] * a)[..., None, None]
        state = state + (dt[:, now, :, None] * x[:, now])[..., None] * b[:, now, :, None]
        outputs.append((state * c[:, now, :, None]).sum(-1) + also["D"][:, None] * x[:, now])
    return torch.stack(outputs, 1)


class Layers(LocalSpecProvider):
    """What megatron-core asks for Transformer Engine's classes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormAndColumn

    def linear(self) -> type:
        return Whole

    def layer_norm(self, *_: Any, **__: Any) -> type:
        return Norm

    def grouped_mlp_modules(self, *args: Any, **kwargs: Any) -> Any:
        if VERSION >= (0, 18):  # a builder, not a class and its parts
            return super().grouped_mlp_modules(False)
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def hybrid() -> ModuleSpec:
    """megatron-core's own `mamba_stack_spec`, of these layers."""
    te = import_module("megatron.core.extensions.transformer_engine")
    specs = import_module("megatron.core.models.mamba.mamba_layer_specs")
    experts = get_moe_module_spec_for_backend(Layers(), num_experts=1, moe_grouped_gemm=False)
    ours = (
        (te.TENorm, Norm),
        (te.TELayerNormColumnParallelLinear, NormAndColumn),
        (te.TERowParallelLinear, RowParallelLinear),
        (te.TEDotProductAttention, DotProductAttention),
        (specs.moe, experts),
    )

    def of(part: Any) -> Any:
        for theirs, stand_in in ours:
            if part is theirs:
                return stand_in
        if isinstance(part, ModuleSpec):
            return replace(part, submodules=of(part.submodules))
        if is_dataclass(part) and not isinstance(part, type):
            return type(part)(**{field.name: of(getattr(part, field.name)) for field in fields(part)})
        return part

    return of(specs.mamba_stack_spec)


def install_state_space() -> None:
    """Let megatron-core compute state spaces, and latents of experts, without the packages that have their kernels."""
    if find_spec("triton") is None:  # which kernels of inference are imported from
        sys.modules["megatron.core.inference.contexts.attention_context.triton.tensor_ops"] = MagicMock()
    mixer, block = (import_module(f"megatron.core.ssm.mamba_{name}") for name in ("mixer", "block"))
    mixer.HAVE_MAMBA_SSM, mixer.causal_conv1d_fn, mixer.mamba_chunk_scan_combined = True, None, scan
    mixer.ExtendedRMSNorm = mixer.RMSNormGated = GatedNorm
    block.TENorm = Norm
    moe = import_module("megatron.core.transformer.moe.moe_layer")
    moe.HAVE_TE, moe.TELinear = True, Whole


def install() -> None:
    """Let megatron-core build of them, and compute linear attention by its own code in torch."""
    gpt_layer_specs.TESpecProvider = variants.TESpecProvider = Layers
    gpt_layer_specs.HAVE_TE = True
    variants._get_backend_spec_provider = Layers
    name = "megatron.core.ssm.gated_delta_net"
    delta = import_module(name if VERSION < (0, 18) else f"{name}.common")
    delta.HAVE_FLA = True  # whose kernels deterministic_mode does not call, but for this one
    delta.l2norm = lambda x, dim=-1, eps=1e-6: x * torch.rsqrt((x * x).sum(dim, keepdim=True) + eps)
    if VERSION >= (0, 19):  # which asks of what class the projections to latents are
        import_module("megatron.core.transformer.experimental_attention_variant.absorbed_mla").TELinear = Whole
    if VERSION >= (0, 18):
        rule = delta.torch_chunk_gated_delta_rule

        def without_lengths(*args: Any, cu_seqlens: None = None, **kwargs: Any) -> Any:
            return rule(*args, **kwargs)

        import_module(f"{name}.gdn").torch_chunk_gated_delta_rule = without_lengths
