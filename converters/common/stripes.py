"""Stripes of Lustre: the files of an output are spread over disks by their size, without an option.

    first 1 GiB       on one disk: a small file is read with one request
    up to 16 GiB      on 4 disks
    the rest          on 16 disks

The parts of a file are spread in this way as it grows: the layout is set on the new folder, and files that are created
in it inherit it (lfs-setstripe(1), Lustre 2.10 and newer; an older version refuses, and its default layout applies). No
machine with Lustre was at hand: the numbers were not measured.
"""

from __future__ import annotations

from pathlib import Path

from converters.common.disk_space import command_output, mounted

LAYOUT = (
    "-E", "1G", "-c", "1", "-S", "4M",
    "-E", "16G", "-c", "4", "-S", "4M",
    "-E", "-1", "-c", "16", "-S", "16M",
)  # fmt: skip
"""For each part of a file: its end (-1 for that of the file), over how many disks it is spread, and the stripe size."""


def stripe(folder: Path) -> None:
    """Set the striping of files in a new folder, if it is on Lustre and `lfs` is installed."""
    if mounted(folder) == "lustre":
        command_output("lfs", "setstripe", *LAYOUT, str(folder))
