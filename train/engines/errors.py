"""The reason for an engine's error in one sentence."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException


def reason(error: BaseException) -> str:
    """What went wrong with a checkpoint, in one line: torch collects the failures of all ranks with tracebacks."""
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank} says {reason(error)}"
    return " ".join(str(error).split())[:200]
