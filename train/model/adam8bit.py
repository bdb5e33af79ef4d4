"""AdamW of bitsandbytes, with 8-bit moments in blocks, over the local shards of this rank.

Checkpoints have float32 moments, as those of every other run; when they are read, they become the same 8-bit numbers
again, so a run resumes bit for bit on the same number of ranks. Blocks are of 256 elements of a shard, and shards of
less than 4096 elements keep float32: with another number of ranks, moments are rounded differently
(bitsandbytes 0.50.2 optim/optimizer.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from train.model.bits import bitsandbytes
from train.model.optimizer import groups
from train.settings.config import Optim

BLOCK = 256
MOMENTS = {"exp_avg": ("state1", "absmax1", "qmap1"), "exp_avg_sq": ("state2", "absmax2", "qmap2")}
"""Moment in torch: names in bitsandbytes of its 8-bit numbers, the largest value of each block, and the code table."""


class Adam8bit:
    """An optimizer with the part of torch's interface that the engine needs, over parameters that FSDP shards.

    Attributes:
        param_groups: parameter groups as in torch's optimizers; the learning rate is read in each step.
        state: float32 moments by parameter, filled only between `unpack` and `pack`.
    """

    def __init__(self, trainee: nn.Module, optim: Optim) -> None:
        library = bitsandbytes("optim.moments 8bit")
        self.library = library.functional
        words = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
        self.param_groups: list[dict[str, Any]] = [group | words for group in groups(trainee, optim.weight_decay)]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        self.shards: dict[torch.Tensor, nn.Parameter] = {}
        inner = []
        for group in self.param_groups:
            shards = {tensor: nn.Parameter(_local(tensor)) for tensor in group["params"]}
            self.shards |= {tensor: shard for tensor, shard in shards.items() if shard.numel()}
            inner.append({**group, "params": [shard for shard in shards.values() if shard.numel()]})
        self.inner = library.optim.AdamW8bit(inner, **words)

    def step(self) -> None:
        """Update the shards with the current gradients and learning rates."""
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        for tensor, shard in self.shards.items():  # the storage of a shard may have changed
            shard.data = _local(tensor)
            shard.grad = None if tensor.grad is None else _local(tensor.grad)
        self.inner.step()

    def zero_grad(self) -> None:
        """Remove the gradients."""
        for tensor, shard in self.shards.items():
            tensor.grad = shard.grad = None

    def unpack(self) -> None:
        """Fill `state` with the moments, dequantized to float32."""
        steps = max((int(state["step"]) for state in self.inner.state.values()), default=0)
        for tensor in (tensor for group in self.param_groups for tensor in group["params"]):
            moments = {name: torch.zeros_like(tensor, dtype=torch.float32) for name in MOMENTS}
            state: dict[str, Any] = self.inner.state[self.shards[tensor]] if tensor in self.shards else {}
            for name, (values, largest, code) in MOMENTS.items() if state else ():
                numbers = state[values]
                if code in state:
                    # the signed code ends at -0.993 instead of -1, so the largest of a block would not be kept
                    signed = torch.where(state[code] == state[code].min().clamp(max=-1e-9), -1.0, state[code])
                    numbers = self.library.dequantize_blockwise(
                        numbers, absmax=state[largest], code=signed, blocksize=BLOCK
                    )
                _local(moments[name]).copy_(numbers)
            self.state[tensor] = {"step": torch.tensor(float(steps)), **moments}

    def pack(self) -> None:
        """Quantize the moments in `state` into the optimizer of bitsandbytes, and empty `state`."""
        for index, group in enumerate(self.inner.param_groups):
            for place, shard in enumerate(group["params"]):
                self.inner.init_state(group, shard, index, place)
        for tensor, shard in self.shards.items():
            state = self.inner.state[shard]
            state["step"] = int(self.state[tensor]["step"])
            for name, (values, largest, code) in MOMENTS.items():
                moment = _local(self.state[tensor][name])
                if code not in state:
                    state[values].copy_(moment)
                    continue
                state[largest].copy_(_largest(moment))
                state[values].copy_(_nearest(moment, state[largest], state[code]))
        self.state = {}


def _blocks(moment: torch.Tensor) -> torch.Tensor:
    """The blocks of a moment, [blocks, 256], the last block padded with zeros."""
    flat = moment.flatten()
    return nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _largest(moment: torch.Tensor) -> torch.Tensor:
    return _blocks(moment).abs().amax(1)


def _nearest(moment: torch.Tensor, largest: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """The 8-bit numbers of a moment: the nearest code. bitsandbytes on CPUs does not always choose the nearest."""
    scaled = _blocks(moment) / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    numbers = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2).to(torch.uint8)
    return numbers.flatten()[: moment.numel()].view(moment.shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is on this rank."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
