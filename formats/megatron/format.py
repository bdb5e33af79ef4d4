"""Megatron's checkpoints, for the registry."""

from __future__ import annotations

from formats.format import Format, Reader, Training


def _classic() -> Reader:
    from formats.megatron import classic

    return classic


def _torch_dist() -> Reader:
    from formats.megatron import torch_dist

    return torch_dist


def _training() -> Training:
    from formats.megatron import portable_optimizer

    return portable_optimizer


READ_BY = "for Megatron use `convert megatron2hf` or `convert reshard`"
WRITTEN_WITH = (
    "tp", "pp", "vpp", "norm", "kind", "iteration", "tokens", "ep", "etp", "experts", "interleave", "version",
)  # fmt: skip
MEGATRON = Format(
    "megatron",
    "mp_rank_XX[_YYY]/model_optim_rng.pt: Megatron-LM's --ckpt-format torch, and Megatron-LLM",
    READ_BY,
    _classic,
    _training,
    "megatron2hf",
    writer_options=WRITTEN_WITH,
    ranked=True,
)
DIST = Format(
    "megatron_dist",
    "Megatron-LM's --ckpt-format torch_dist: torch DCP (.metadata, .distcp) with metadata.json",
    READ_BY,
    _torch_dist,
    _training,
    "megatron2hf",
    writer_options=WRITTEN_WITH,
)
