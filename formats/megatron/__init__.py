"""Megatron-LM: classic shards, torch_dist, Megatron-FSDP, Megatron-LLM, and their optimizers."""

from dataclasses import replace

from formats.format import Format

MEGATRON = Format(
    "megatron",
    "mp_rank_XX[_YYY]/model_optim_rng.pt: Megatron-LM's --ckpt-format torch, and Megatron-LLM",
    "for Megatron use `convert megatron2hf` or `convert reshard`",
    "formats.megatron.classic",
    "formats.megatron.portable_optimizer",
    "megatron2hf",
    ranked=True,
    folders="formats.megatron.folders",
)
ABOUT = "Megatron-LM's --ckpt-format torch_dist: torch DCP (.metadata, .distcp) with metadata.json"
DIST = replace(
    MEGATRON,
    name="megatron_dist",
    about=ABOUT,
    reads="formats.megatron.torch_dist",
    reader_options=("adapter", "only"),
    signs=r".*\.metadata|.*\.distcp|common\.pt",
    ranked=False,
)
MEGATRON_FSDP = replace(
    DIST,
    name="megatron_fsdp",
    about="Megatron-LM's --ckpt-format fsdp_dtensor: torch DCP of Megatron-FSDP, under the names of its modules",
    reads="formats.megatron.fsdp_dtensor",
    reader_options=MEGATRON.reader_options,
)
