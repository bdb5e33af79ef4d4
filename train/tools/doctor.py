"""What a machine has, and whether attention keeps documents apart on it: the questions before the first job.

Under torchrun or srun all ranks take part, and a sum over all of them is checked and timed.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from converters.common.progress import size
from formats.errors import UnsupportedError, VerificationError
from train.distributed import World
from train.model.attention import BACKENDS, resolve
from train.model.selfcheck import self_check
from train.model.trainee import open_config
from train.run.throughput import peak_of
from train.tools.node_speed import compare, measure

PACKAGES = (
    "transformers", "safetensors", "tokenizers", "sentencepiece", "numpy", "deepspeed", "accelerate", "peft",
    "flash-attn", "liger-kernel", "triton", "tensorboard", "wandb", "vllm",
)  # fmt: skip
SUMMED = 64 * 2**20
"""Bytes of the tensor that is summed over the ranks."""


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        name: what.
        told: what was found.
        fault: whether a training would fail or be wrong.
    """

    name: str
    told: str
    fault: bool = False


def examine(world: World, model: Path | None, slower: float) -> Iterator[Finding]:
    """Look at everything. Every rank has to come here.

    Args:
        world: the ranks.
        model: Hugging Face folder whose layers are tried; None takes a small Llama.
        slower: see `nodes.compare`.
    """
    yield Finding("system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    yield Finding("torch", f"{torch.__version__}, {runtime if torch.cuda.is_available() else 'no GPU'}")
    yield Finding("packages", ", ".join(f"{name} {held}" for name in PACKAGES if (held := _version(name))))
    yield Finding("device", _device(world.device))
    yield Finding("cores", f"{len(os.sched_getaffinity(0))} for this process, {torch.get_num_threads()} threads")
    yield from _attention(world.device, _config(model))
    if world.ranks > 1:
        yield _sum(world)
    usual, slow = compare(measure(world), slower)
    yield Finding("nodes", usual)
    for node, told in slow.items():
        yield Finding(f"slow {node}", told)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return "CPU"
    held = torch.cuda.get_device_properties(device)
    peak = peak_of(device)
    known = f"{peak / 1e12:.0f} TFLOP/s bf16" if peak else "of unknown speed: the log has no MFU"
    return f"{held.name}, {size(held.total_memory)}, {torch.cuda.device_count()} on this node, {known}"


def _config(model: Path | None) -> Any:
    if model is not None:
        return open_config(model)
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "llama", vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip


def _attention(device: torch.device, config: Any) -> Iterator[Finding]:
    """Each attention that there is: how far documents of a row are from documents alone, and how long that takes."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = resolve("auto", config, device, dtype)
    for backend in BACKENDS:
        name = f"attention {backend}"
        try:
            apart = self_check(config, device, resolve(backend, config, device, dtype), dtype)
        except (UnsupportedError, VerificationError) as error:
            yield Finding(name, str(error), fault=backend == chosen)
        else:
            taken = ", taken by model.attention auto" if backend == chosen else ""
            yield Finding(name, f"documents of a row differ by {apart:.1e} from documents alone{taken}")


def _sum(world: World) -> Finding:
    """A sum over all ranks, on the device: right, and how fast."""
    held = torch.ones(SUMMED // 4, device=world.device)
    dist.all_reduce(held)
    right = bool((held == world.ranks).all())
    world.wait()
    began = time.monotonic()
    for _ in range(5):
        dist.all_reduce(held)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    seconds = (time.monotonic() - began) / 5
    rate = 2 * SUMMED * (world.ranks - 1) / world.ranks / seconds
    told = f"{world.ranks} ranks sum {size(SUMMED)} in {seconds * 1e3:.1f} ms, {size(round(rate))}/s a rank"
    return Finding("ranks", told if right else f"{world.ranks} ranks sum 1 to something else", fault=not right)
