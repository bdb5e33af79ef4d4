"""Stripes of Lustre: the files of an output are spread over its disks by their size, without being asked for.

    up to 1 GiB       on one disk: what is small is read with one request
    up to 16 GiB      what is beyond the first, on 4
    larger            what is beyond these, on 16

A file of any size begins as a small one and is spread further as it grows: it is one layout, set on the new folder, and
what is made in it inherits it (lfs-setstripe(1), Lustre 2.10 and newer; an older one refuses, and its own holds). No
machine with Lustre was at hand: the numbers were not measured.
"""

from __future__ import annotations

from pathlib import Path

from converters.common.room import asked, mounted

LAYOUT = (
    "-E", "1G", "-c", "1", "-S", "4M",
    "-E", "16G", "-c", "4", "-S", "4M",
    "-E", "-1", "-c", "16", "-S", "16M",
)  # fmt: skip
"""Where a part of a file ends (-1 for the end of the file), over how many disks it is spread, and in which steps."""


def stripe(folder: Path) -> None:
    """Say how the files of a new folder are spread, if it is on Lustre and `lfs` is there."""
    if mounted(folder) == "lustre":
        asked("lfs", "setstripe", *LAYOUT, str(folder))
