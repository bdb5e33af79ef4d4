"""A rank of two that fills a sharded model from a run of Megatron: `torchrun sharded_model.py HF RUN`."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

import vitruvian.torch
from vitruvian import UnsupportedError


def sharded(model: torch.nn.Module, how: str) -> torch.nn.Module:
    """The model on a mesh of two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    if how == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def main() -> None:
    """Fill and compare."""
    source, run = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    expected = AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    for how in ("fsdp2", "tp"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
        model = sharded(model, how)
        vitruvian.torch.load(model, run)
        spread = 0
        for name, tensor in model.state_dict().items():
            spread += isinstance(tensor, DTensor) and tensor.to_local().shape != tensor.shape
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(full, expected[name]), f"{how}: {name}"
        assert spread >= 6, f"{how}: {spread} tensors are sharded"
    full = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    flat = FullyShardedDataParallel(full, device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="FSDP1"):
        vitruvian.torch.load(flat, run)
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main()
