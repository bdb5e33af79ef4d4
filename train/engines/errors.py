"""The reason of an engine's error, in one line."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException


def reason(error: BaseException) -> str:
    """The message of an error in one line; of torch's checkpoint errors of all ranks, that of the first failed rank."""
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank} says {reason(error)}"
    return " ".join(str(error).split())[:200]
