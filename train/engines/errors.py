"""The reason of an engine's error in one sentence."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException


def reason(error: BaseException) -> str:
    """What went wrong with a checkpoint, in a line: torch gathers failures of ranks, each with a traceback."""
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items(), key=lambda one: one[0])
        return f"rank {rank} says {reason(error)}"
    return " ".join(str(error).split())[:200]
