"""Megatron-LM: classic shards, torch_dist, Megatron-LLM, and their optimizers."""

from formats.format import Format

COMMANDS = "for Megatron use `convert megatron2hf` or `convert reshard`"
OPTIMIZER = "formats.megatron.portable_optimizer"
OPTIONS = ("tp", "pp", "vpp", "norm", "kind", "iteration", "tokens", "ep", "etp", "experts", "interleave", "version")
MEGATRON = Format(
    "megatron",
    "mp_rank_XX[_YYY]/model_optim_rng.pt: Megatron-LM's --ckpt-format torch, and Megatron-LLM",
    COMMANDS,
    "formats.megatron.classic",
    OPTIMIZER,
    "megatron2hf",
    writer_options=OPTIONS,
    ranked=True,
)
DIST = Format(
    "megatron_dist",
    "Megatron-LM's --ckpt-format torch_dist: torch DCP (.metadata, .distcp) with metadata.json",
    COMMANDS,
    "formats.megatron.torch_dist",
    OPTIMIZER,
    "megatron2hf",
    writer_options=OPTIONS,
)
