"""The end of a training: its last checkpoint as a Hugging Face folder, made by `convert fsdp2hf` as a user would."""

from __future__ import annotations

from pathlib import Path


def export(checkpoint: Path, out: Path) -> None:
    """Convert a checkpoint; in bf16, without a process group, in constant memory, read back and compared.

    Raises:
        VitruvianError: as the converter says.
    """
    from converters.convert import SHARD_SIZE, Request, plan_huggingface, run
    from formats.registry import open_checkpoint

    request = Request(out, cast="bf16", quiet=True)
    plan = plan_huggingface(open_checkpoint(checkpoint), request, SHARD_SIZE)
    run(plan, request, lambda _, __: None)
