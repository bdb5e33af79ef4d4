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
        states = [one._get_fsdp_state() for one in engine.trainee.modules() if isinstance(one, FSDPModule)]
        groups = [one._fsdp_param_group for one in states if one._fsdp_param_group]
        held = [tensor for group in groups for one in group.fsdp_params
                for tensor in (one.unsharded_accumulated_grad, getattr(one, "_unsharded_param", one.sharded_param).grad,
                               one.sharded_param.grad) if tensor is not None]  # fmt: skip
        held += [one._partial_reduce_output for one in groups if one._partial_reduce_output is not None]
        shard = sum(one.sharded_param.to_local().numel() for group in groups for one in group.fsdp_params)
        if ranks.first:
            print([sum(getattr(one, "_local_tensor", one).numel() for one in held), shard])
        ranks.wait()
