"""What a training will take, from its settings and the headers of its files: no GPU, no torch.

Memory is that of one rank: float32 weights, gradients and two moments of its shard; the gathered weights of two layers
and of the root in the computation's type; the inputs of every layer, which activation checkpointing keeps; and the
logits of a chunk. ZeRO-1 shards no gradients, and neither ZeRO-1 nor ZeRO-2 the weights that are computed with. It is
an estimate: kernels, the allocator and DeepSpeed's buckets add their own, and what it offloads is counted all the same.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from formats.errors import UnsupportedError, UsageError
from train.batching import Sizes, batch_sizes, make_order
from train.config import Config
from train.rows import Rows, open_rows

MASTERS, GRADIENT = 3 * 4, 4
"""Bytes of a parameter in its shard: weight and two moments, gradient."""
WIDTH = {"bf16": 2, "fp32": 4}
LOGITS = 2048
"""Tokens whose logits are held at a time, see `model.CHUNK`."""
PEAK = {
    "A100": 312e12,  # NVIDIA A100 datasheet, dense bf16
    "H100": 989e12,  # NVIDIA H100 SXM datasheet
    "H200": 989e12,  # NVIDIA H200 datasheet
    "MI250X": 191.5e12,  # AMD MI250X datasheet: 383e12 of the card, whose two dies are a device each
    "MI300X": 1307e12,  # AMD MI300X datasheet
}
"""Part of a device's name: bf16 floating point operations a second."""


class Estimate(NamedTuple):
    """What a training will take.

    Attributes:
        sizes: the batch equation.
        steps: how many there are.
        rows: of the data, and how full they are.
        parameters: of the model.
        memory: bytes of a rank, by what they are for.
        flops: floating point operations of all steps that the model's mathematics needs, see `speed.flops_of`.
    """

    sizes: Sizes
    steps: int
    rows: Rows
    parameters: int
    memory: dict[str, int]
    flops: float

    @property
    def epochs(self) -> float:
        """Passes over the rows."""
        return self.steps * self.sizes.size / len(self.rows)

    def seconds(self, device: str, mfu: float) -> float:
        """Time of all steps on devices of `PEAK` that reach a share of their speed."""
        return self.flops / (PEAK[device] * mfu * self.sizes.ranks)


def estimate(config: Config, ranks: int) -> Estimate:
    """Look at the settings, the data's indexes and the model's headers.

    Raises:
        UsageError: the settings contradict each other, or the ranks cannot be divided.
    """
    from formats.registry import open_checkpoint
    from formats.spec import ModelSpec

    if ranks % config.parallel.replicas:
        raise UsageError(f"{ranks} ranks cannot be {config.parallel.replicas} replicas of equal shards")
    sizes = batch_sizes(config.batch, ranks)
    rows = open_rows(config.data, config.data.train, config.seed)
    order, steps = make_order(len(rows), config.seed, config.steps, sizes.size)
    spec = open_checkpoint(config.model.path).spec
    counted = sum(prod(shape) for _, _, shape in spec.boxes(None))
    if not isinstance(spec, ModelSpec):
        raise UnsupportedError(f"{config.model.path} is of no known family: its sizes are not known either")
    hidden, layers, vocabulary = spec.hidden, spec.layers, spec.vocab or 0
    width, tokens = WIDTH[config.model.dtype], sizes.micro * config.data.seq_length
    shards = ranks // config.parallel.replicas
    kept = 1 if config.model.activation_checkpointing else 16
    stage = config.parallel.zero_stage if config.engine == "deepspeed" else None
    graded = 1 if stage == 1 else shards
    gathered = width * (2 * (counted - 2 * vocabulary * hidden) // layers + 2 * vocabulary * hidden)
    memory = {
        "weights, gradients, moments": MASTERS * counted // shards + GRADIENT * counted // graded,
        "gathered weights": {None: gathered, 3: gathered + width * counted // shards}.get(stage, width * counted),
        "activations": kept * layers * tokens * hidden * width + 40 * tokens * hidden * width,
        "logits": 3 * 4 * min(LOGITS, tokens) * vocabulary,
    }
    lengths = np.concatenate([documents.indexed.sizes for documents in rows.documents]).astype(float)
    inputs = lengths[lengths <= config.data.seq_length + 1] - 1
    pairs = np.square(inputs).sum() / 2
    multiplied = counted if spec.tied else counted - vocabulary * hidden
    once = 6.0 * multiplied * inputs.sum() + 12.0 * layers * spec.heads * spec.head_dim * pairs
    return Estimate(sizes, steps, rows, counted, memory, float(once) * order.samples / len(rows))
