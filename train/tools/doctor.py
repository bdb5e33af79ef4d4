"""Checks a machine before the first job: versions, device, attention backends, ranks, nodes.

Under torchrun or srun all ranks take part, and an all-reduce over them is checked and timed.
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
"""Size of the tensor that is all-reduced, in bytes."""


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        name: what was checked.
        text: the result.
        fault: whether a training would fail or be wrong.
    """

    name: str
    text: str
    fault: bool = False


def examine(world: World, model: Path | None, slower: float) -> Iterator[Finding]:
    """Run all checks. Collective: all ranks call it.

    Args:
        world: the ranks.
        model: Hugging Face folder whose layers are tried; None takes a small Llama.
        slower: factor from which a node is slow, see `node_speed.compare`.
    """
    yield Finding("system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    yield Finding("torch", f"{torch.__version__}, {runtime if torch.cuda.is_available() else 'no GPU'}")
    yield Finding("packages", ", ".join(f"{name} {installed}" for name in PACKAGES if (installed := _version(name))))
    yield Finding("device", _device(world.device))
    yield Finding("cores", f"{len(os.sched_getaffinity(0))} for this process, {torch.get_num_threads()} threads")
    yield from _attention(world.device, _config(model))
    if world.ranks > 1:
        yield _sum(world)
    usual, slow = compare(measure(world), slower)
    yield Finding("nodes", usual)
    for node, reason in slow.items():
        yield Finding(f"slow {node}", reason)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    peak = peak_of(device)
    known = f"{peak / 1e12:.0f} TFLOP/s bf16" if peak else "of unknown speed: the log has no MFU"
    return f"{properties.name}, {size(properties.total_memory)}, {torch.cuda.device_count()} on this node, {known}"


def _config(model: Path | None) -> Any:
    if model is not None:
        return open_config(model)
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "llama", vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip


def _attention(device: torch.device, config: Any) -> Iterator[Finding]:
    """A finding for each attention backend: the difference between packed documents and unpacked ones."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = resolve("auto", config, device, dtype)
    for backend in BACKENDS:
        name = f"attention {backend}"
        try:
            difference = self_check(config, device, resolve(backend, config, device, dtype), dtype)
        except (UnsupportedError, VerificationError) as error:
            yield Finding(name, str(error), fault=backend == chosen)
        else:
            note = ", taken by model.attention auto" if backend == chosen else ""
            yield Finding(name, f"documents of a row differ by {difference:.1e} from unpacked ones{note}")


def _sum(world: World) -> Finding:
    """A finding on an all-reduce over all ranks, on the device: its result and its speed."""
    tensor = torch.ones(SUMMED // 4, device=world.device)
    dist.all_reduce(tensor)
    right = bool((tensor == world.ranks).all())
    world.wait()
    began = time.monotonic()
    for _ in range(5):
        dist.all_reduce(tensor)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    seconds = (time.monotonic() - began) / 5
    rate = 2 * SUMMED * (world.ranks - 1) / world.ranks / seconds
    result = f"{world.ranks} ranks sum {size(SUMMED)} in {seconds * 1e3:.1f} ms, {size(round(rate))}/s a rank"
    return Finding("ranks", result if right else f"{world.ranks} ranks sum 1 to something else", fault=not right)
