"""Tensor parallelism: each rank computes some of the heads of a layer, and a part of the MLP's width.

The weights become DTensors by the plan of transformers before FSDP shards them over the other ranks. Modules that the
plan does not name, such as norms and whatever is outside of layers, are computed as a whole by each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from formats.errors import UnsupportedError
from formats.huggingface.config import DROPOUTS

STYLES: Mapping[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
}
"""Style in transformers' plans: the same style of torch (transformers 5.23.0 distributed/tensor_parallel.py)."""
PARTIAL = "replicated_with_grad_allreduce"
"""The style of the norms of query and key heads: each rank has the gradient of its own heads only."""


def split(decoder_layers: Iterable[Any], config: Any, mesh: DeviceMesh) -> None:
    """Split the weights of layers over ranks, on the meta device.

    Args:
        decoder_layers: the layers.
        config: the model's configuration, of transformers; the model is of one of `splitting.FAMILIES`.
        mesh: the ranks that each compute a part of every layer.
    """
    styles = {name: STYLES[style] for name, style in _plan(config).items() if style != PARTIAL}
    for layer in decoder_layers:
        parallelize_module(layer, mesh, styles, src_data_rank=None)


def sum_partial(decoder_layers: Iterable[Any], config: Any, mesh: DeviceMesh) -> None:
    """Sum the gradients of the norms of heads over the ranks that have the heads. Collective."""
    names = [name for name, style in _plan(config).items() if style == PARTIAL]
    for layer in decoder_layers:
        for tensor in (tensor for name in names for tensor in layer.get_submodule(name).parameters()):
            if tensor.grad is not None:  # FSDP gives each of these ranks the same shard
                local = tensor.grad.to_local() if isinstance(tensor.grad, DTensor) else tensor.grad
                dist.all_reduce(local, group=mesh.get_group())


def require_no_dropout(config: Any) -> None:
    """Refuse dropout: each rank would drop other elements of a tensor that all ranks compute.

    Raises:
        UnsupportedError: the configuration has dropout.
    """
    for name in (name for names in DROPOUTS.values() for name in names if getattr(config, name, 0)):
        raise UnsupportedError(f"{config.model_type} has {name}, and parallel.tensor none", "--parallel.tensor 1")


def _plan(config: Any) -> dict[str, str]:
    """The style of each module that the plan splits, by the module's name in its layer."""
    return {name.partition(".*.")[2]: style for name, style in config.base_model_tp_plan.items() if ".*." in name}
