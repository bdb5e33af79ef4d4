"""Megatron-FSDP of stock Megatron-LM 0.19.2 trains, saves as fsdp_dtensor and loads it (CPU, gloo, two ranks).

As stock_dist.py, in the same environment:

    python stock_fsdp.py JOBS.json

The entries of JOBS.json are those of stock_dist.py, without `pp`, `logits` and `bucket`; `save` names folders.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import stock_dist
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS")

from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import checkpointing
from stock_dist import CPU, Idle, all_gather

SHARDED = "optim_grads_params"
FSDP = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--data-parallel-sharding-strategy", SHARDED]


class Stream(Idle):
    """A stream whose events can be waited for."""

    def record_event(self, *_: Any) -> Idle:
        """An event."""
        return Idle()


def without_gpu() -> None:
    """Replace what Megatron-FSDP asks of a GPU, and give torch's Adam states of empty shards, as the fused one has."""
    stock_dist.without_gpu_of_torch_dist()
    cuda: Any = torch.cuda
    cuda.Stream = Stream
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    torch.Tensor.record_stream = lambda self, *_: None  # type: ignore[assignment]
    dist.all_gather = all_gather
    begin: Any = device_mesh.DeviceMesh.__init__
    device_mesh.DeviceMesh.__init__ = lambda self, _, *args, **kwargs: begin(self, "cpu", *args, **kwargs)
    listed = DistributedOptimizer.sharded_param_state_fsdp_dtensor

    def complete(self: Any, is_loading: bool = False) -> Any:
        if is_loading:
            self._init_optimizer_states_with_dummy_values()
        for parameter in (parameter for group in self.optimizer.param_groups for parameter in group["params"]):
            if not self.optimizer.state.get(parameter):
                moments = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                self.optimizer.state[parameter] = {"step": torch.tensor(float(self.steps_made)), **moments}
        return listed(self)

    DistributedOptimizer.sharded_param_state_fsdp_dtensor = complete
    DistributedOptimizer.steps_made = 0
    # 0.16.1 does nothing here, for the weights are the main ones; 0.19.2 raises an error
    DistributedOptimizer._copy_model_params_to_main_params = lambda self, **_: None


class Training(stock_dist.Training):
    """Model, optimizer and scheduler of one rank."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__({**job, "pp": 1, "flags": [*job["flags"], *FSDP]})

    def wrapped(self, config: Any, module: Any, job: dict[str, Any]) -> Any:
        """The model, sharded."""
        ddp = DistributedDataParallelConfig(
            use_megatron_fsdp=True, use_distributed_optimizer=True, grad_reduce_in_fp32=True,
            data_parallel_sharding_strategy=SHARDED, check_for_nan_in_grad=False, gradient_reduce_div_fusion=False,
        )  # fmt: skip
        return FullyShardedDataParallel(config=config, ddp_config=ddp, module=module, device=CPU)

    def save(self, out: str, how: str) -> None:
        """What Megatron-FSDP saves."""
        self.args.save, self.args.iteration = out, self.iteration
        DistributedOptimizer.steps_made = self.iteration
        Path(out).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        checkpointing.save_checkpoint(self.iteration, [self.model], self.optimizer, self.scheduler, 0)
        dist.barrier()


if __name__ == "__main__":
    assert ps  # as the other imports, after the environment is as Megatron-FSDP wants it
    stock_dist.RANKS, stock_dist.Training = 2, Training
    stock_dist.without_gpu_of_torch_dist, stock_dist.without_gpu = stock_dist.without_gpu, without_gpu
    sys.exit(stock_dist.main())
