"""The hash of a tensor's bytes."""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from converters.plan.plan import Job


def hasher(job: Job) -> Any:
    """A BLAKE3 hash that has been fed the name, element type and shape of a job's tensor, before its bytes."""
    return blake3(f"{job.name} {job.dtype} {list(job.shape)}\n".encode())
