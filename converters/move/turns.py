"""Writers of one file take turns where the file system lets one at a time write: who waits sleeps.

The local file systems of Linux write to a file under the exclusive lock of its inode, for which others spin as long as
its holder runs. Two processes that write one file lose a seventh of their CPU-seconds to that. With a lock of ours
around the write of a whole piece of a tensor, one reads and hashes while the other writes (tests/bench/README.md).
Lustre and GPFS let several clients write parts of one file together, and a lock of NFS is a request to its server:
there nobody takes turns. Nor do the parts of a conversion (`--part`): one stopped in its turn would stop others.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converters.common.atomic import lock
from converters.common.disk_space import mounted

ONE_WRITER = frozenset({"tmpfs", "ext3", "ext4", "xfs", "btrfs", "overlay"})
"""File systems whose buffered writes hold the inode's lock exclusively, as /proc/mounts names them (Linux 6:
`shmem_file_write_iter` in mm/shmem.c, `ext4_buffered_write_iter` in fs/ext4/file.c, which also serves ext3,
`xfs_file_buffered_write` in fs/xfs/xfs_file.c, `btrfs_buffered_write` in fs/btrfs/file.c, `ovl_write_iter` in
fs/overlayfs/file.c)."""


def one_writer(folder: Path) -> bool:
    """Whether the file system of a folder lets one at a time write to a file."""
    return mounted(folder) in ONE_WRITER


class Turns:
    """The turns of threads and processes to write to the same files.

    Between processes it is the lock of an open file, flock(2): each process has opened the file itself, and the system
    releases the lock of a process that ends, killed or not. Threads of a process share an open file, so a
    file has a lock for them too.

    Args:
        taken: whether turns are taken.
    """

    def __init__(self, taken: bool = False) -> None:
        self.taken = taken
        self.threads: dict[Path, threading.Lock] = {}

    @contextmanager
    def __call__(self, path: Path, descriptor: int) -> Iterator[None]:
        """Wait for the turn to write to a file, and end it with the context, in which nothing else may be waited for.

        Args:
            path: the file.
            descriptor: the file as this process has opened it.
        """
        if not self.taken:
            yield
            return
        with self.threads.setdefault(path, threading.Lock()):
            locked = lock(descriptor, path, wait=True)
            try:
                yield
            finally:
                if locked:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
