"""Stock Megatron-LM trains with Muon, whose optimizer is that of emerging-optimizers: saves, loads and trains on.

As stock_dist.py, in the same environment:

    python stock_muon.py JOBS.json

The entries of JOBS.json are those of stock_dist.py, without `bucket`; emerging-optimizers is installed there.
"""

from __future__ import annotations

import sys
from typing import Any

import stock_dist
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.training.training import wrap_model_chunks_with_ddp


class Training(stock_dist.Training):
    """Model, optimizer and scheduler of one rank."""

    @property
    def fills_states(self) -> bool:
        """Whether Adam, beside Muon, is a distributed optimizer."""
        return bool(self.args.use_layer_wise_distributed_optimizer and self.args.use_layer_wise_param_layout)

    def wrapped(self, config: Any, module: Any, job: dict[str, Any]) -> Any:
        """The model with its gradient buffers, as `get_model` makes them of the arguments."""
        args = self.args
        return wrap_model_chunks_with_ddp(
            [module],
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            use_layer_wise_distributed_optimizer=args.use_layer_wise_distributed_optimizer,
            use_layer_wise_param_layout=args.use_layer_wise_param_layout,
        )[0]


def without_gpu() -> None:
    """Replace what Megatron asks of a GPU, and a gather of tensors of several sizes, which gloo has not."""
    stock_dist.without_gpu_alone()
    dist.all_gather = stock_dist.all_gather


if __name__ == "__main__":
    stock_dist.Training = Training
    stock_dist.without_gpu_alone, stock_dist.without_gpu = stock_dist.without_gpu, without_gpu
    sys.exit(stock_dist.main())
