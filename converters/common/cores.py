"""How many cores a job has."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
MOST = 16
"""Threads that are used unless more are asked for: more were never measured, and a login node is everybody's."""


def cores(own: Path = OWN, groups: Path = GROUPS) -> int:
    """The cores that this process may use: those of its affinity, as far as its control groups let it.

    Source: Documentation/admin-guide/cgroup-v2.rst of Linux 6: the line `0::PATH` names the group, and `cpu.max` of it
    and of each above it holds a quota and a period in microseconds, or `max` where there is none.

    Args:
        own: which groups this process is in.
        groups: where version 2 is mounted.
    """
    count = float(min(len(os.sched_getaffinity(0)), MOST))
    for folder in _folders(own, groups):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):  # none here, as in the uppermost group
            continue
        if quota != "max":
            count = min(count, int(quota) / int(period))
    return max(1, round(count))


def _folders(own: Path, groups: Path) -> list[Path]:
    """The group of version 2 that this process is in, and those above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    name = next((line[3:] for line in lines if line.startswith("0::")), None)
    if name is None:
        return []
    inside = groups / name.strip("/")
    return [inside, *(folder for folder in inside.parents if folder.is_relative_to(groups))]
