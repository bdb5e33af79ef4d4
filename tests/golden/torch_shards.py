"""Run on some ranks: torch's Hugging Face writer saves a matrix, a vector and a scalar; a shard of each for each rank.

torch_shards.py OUT ROWS
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

if __name__ == "__main__":
    out, rows = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrix = 1 + torch.arange(rows * 8, dtype=torch.float32).reshape(rows, 8)
    state = {"w": distribute_tensor(matrix, mesh, [Shard(0)]), "scale": torch.tensor(3.5)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(out, save_distributed=True))
    dist.destroy_process_group()
