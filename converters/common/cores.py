"""The number of cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
MOST = 16
"""Most threads by default: more were never measured, and login nodes are shared."""
CEILING = 256
"""Most threads that may be asked for."""


def cores(own: Path = OWN, groups: Path = GROUPS) -> int:
    """The cores that this process may use: those of its affinity, limited by the quotas of its control groups.

    Source: Documentation/admin-guide/cgroup-v2.rst of Linux 6: the line `0::PATH` names the group, and `cpu.max` of it
    and of each above it holds a quota and a period in microseconds, or `max` where there is none.

    Args:
        own: the file that lists the control groups of this process.
        groups: the folder where cgroup version 2 is mounted.
    """
    count = float(min(len(os.sched_getaffinity(0)), MOST))
    for folder in _folders(own, groups):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):  # no quota in this group, as in the uppermost one
            continue
        if quota != "max":
            count = min(count, int(quota) / int(period))
    return max(1, round(count))


def _folders(own: Path, groups: Path) -> list[Path]:
    """The folders of this process's cgroup of version 2, and of the groups above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    name = next((line[3:] for line in lines if line.startswith("0::")), None)
    if name is None:
        return []
    inside = groups / name.strip("/")
    return [inside, *(folder for folder in inside.parents if folder.is_relative_to(groups))]
