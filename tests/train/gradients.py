"""What a rank holds of gradients behind a micro-batch that is not the last: `gradients.py CONFIG.yml`."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.fsdp import FSDPModule

from train.data.rows import open_rows
from train.distributed import world
from train.engines.fsdp import FsdpEngine
from train.model.trainee import open_config
from train.settings.config_file import load_config

if __name__ == "__main__":
    config, _ = load_config(Path(sys.argv[1]))
    with world(config.parallel.replicas, 2) as ranks:
        engine = FsdpEngine(config, open_config(config.model.path), ranks, "sdpa")
        flat = open_rows(config.data, config.data.train, 1).flat([ranks.rank])
        engine.backward(engine.trainee(flat, ranks.device, None), False)
        states = [module._get_fsdp_state() for module in engine.trainee.modules() if isinstance(module, FSDPModule)]
        groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]
        gradients = [
            tensor for group in groups for param in group.fsdp_params for tensor in (
                param.unsharded_accumulated_grad, getattr(param, "_unsharded_param", param.sharded_param).grad,
                param.sharded_param.grad,
            ) if tensor is not None
        ]  # fmt: skip
        gradients += [group._partial_reduce_output for group in groups if group._partial_reduce_output is not None]
        shard = sum(param.sharded_param.to_local().numel() for group in groups for param in group.fsdp_params)
        if ranks.first:
            print([sum(getattr(tensor, "_local_tensor", tensor).numel() for tensor in gradients), shard])
        ranks.wait()
