"""Paths in a store, which readers use like paths on disk; what only a disk can do is refused.

`s3://bucket/run`, `gs://…`, `az://…`, `https://…` and `hf://ORG/NAME@REVISION/…`. Listings of a store are kept until a
path in the store is opened anew (`remote`): an object that has changed since is refused when it is read.
"""

from __future__ import annotations

import io
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from errno import ENOENT
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path, PosixPath
from typing import Any
from urllib.parse import unquote

from converters.remote.hub_repo import Repo
from converters.remote.object_store import SCHEMES, Bucket
from converters.remote.ranges import SMALLEST, Object, fetchers
from converters.remote.store import Entry, Store
from formats.disk.handle import opened, pread, size_of
from formats.errors import UnsupportedError, UsageError

DEPTH = {"hf": 3} | dict.fromkeys(SCHEMES, 2)
"""Scheme: how many parts of a path identify the store."""
REMEMBERED = 1 << 20
"""Bytes up to which a file that was read as a whole is kept in memory, since several readers read it."""


class Mount:
    """A store with its cached listings, entries and contents.

    Attributes:
        store: the store.
        roots: folders that the user named; above these, single files are requested, and no listings.
        beside: files of the disk in place of objects that are not sent yet, by key.
    """

    def __init__(self, store: Store, roots: Iterable[str] = ()) -> None:
        self.store, self.roots, self.beside = store, list(roots), dict[str, Path]()
        self.folders: dict[str, Mapping[str, Entry | None]] = {}
        self.objects: dict[str, Entry | None] = {}
        self.heads: dict[str, Future[memoryview]] = {}
        self.texts: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def list_folder(self, folder: str) -> dict[str, Entry | None]:
        """The entries of a folder by name; None for a folder."""
        above, _, name = folder.rpartition("/")
        with self.lock:
            if folder not in self.folders:
                absent = above in self.folders and self.folders[above].get(name, 0) is not None
                self.folders[folder] = {} if absent else self.store.list_folder(folder)
            entries = dict(self.folders[folder])
        for key, path in self.beside.items():
            inside = key.removeprefix(f"{folder}/") if folder else key
            if not folder or inside != key:
                name, _, deeper = inside.partition("/")
                entries[name] = None if deeper else Entry(path.stat().st_size, "beside")
        return entries

    def entry(self, key: str) -> Entry | None:
        """The entry of an object, None if there is no such object."""
        if key in self.roots and self.list_folder(key):  # a web server has a page there
            return None
        folder, _, name = key.rpartition("/")
        below = any(not root or folder == root or folder.startswith(f"{root}/") for root in self.roots)
        if below or folder in self.folders:
            return self.list_folder(folder).get(name)
        with self.lock:
            if key not in self.objects:
                self.objects[key] = self.store.stat(key)
            return self.objects[key]


MOUNTS: dict[str, Mount] = {}
"""The stores in use, by the beginning of their paths."""


class RemotePath(PosixPath):
    """A path in a store, with the methods of `Path` that readers use."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> str:
        raise UnsupportedError(
            f"{self} is in a store, and this needs a folder of this machine", "convert it into a folder first"
        )

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self.parts == other.parts

    def mount(self) -> tuple[Mount, str]:
        """The mounted store of the path, and the key of the path in it."""
        parts = self.parts
        depth = DEPTH[parts[0].rstrip(":")] if parts and parts[0].rstrip(":") in DEPTH else 0
        if not depth or len(parts) < depth or ".." in parts:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(self))
        name = "/".join(parts[:depth])
        mount = MOUNTS.get(name) or MOUNTS.setdefault(name, Mount(_store(parts, depth)))  # the same for all threads
        return mount, "/".join(parts[depth:])

    # --- what a path is ---------------------------------------------------------------------------------------------

    def _entry(self) -> Entry | None:
        """The entry of the object; None for a folder.

        Raises:
            FileNotFoundError: there is neither an object nor a folder.
        """
        mount, key = self.mount()
        entry = mount.entry(key) if key else None
        if entry is None and not mount.list_folder(key):
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(self))
        return entry

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:  # noqa: ARG002  # as Path has it
        """Size and kind of the object; the time is a number made from the ETag, which changes with the object."""
        entry = self._entry()
        mark = int.from_bytes(blake2b(entry.identity.encode(), digest_size=7).digest(), "big") if entry else 0
        kind = stat.S_IFREG if entry else stat.S_IFDIR
        fields = (kind | 0o444, mark, 0, 1, 0, 0, entry.size if entry else 0, 0, 0, 0)
        return os.stat_result(fields, {"st_mtime_ns": mark})

    lstat = stat

    def _is(self, folder: bool) -> bool:
        try:
            return (self._entry() is None) == folder
        except FileNotFoundError:
            return False

    def exists(self, **_: Any) -> bool:
        """Whether there is such an object or folder."""
        return self._is(folder=False) or self._is(folder=True)

    def is_file(self, **_: Any) -> bool:
        """Whether the path is an object."""
        mount_key = self._mounted()
        return mount_key is not None and mount_key[0].entry(mount_key[1]) is not None

    def _mounted(self) -> tuple[Mount, str] | None:
        """The mounted store and the key, None for a path that cannot be an object."""
        try:
            mount, key = self.mount()
        except FileNotFoundError:
            return None
        return (mount, key) if key else None

    def is_dir(self, **_: Any) -> bool:
        """Whether there are objects below the path."""
        return self._is(folder=True)

    def is_symlink(self) -> bool:
        """Return False: a store has no links."""
        return False

    def is_absolute(self) -> bool:
        """Return True: the path does not depend on the current folder."""
        return True

    def resolve(self, strict: bool = False) -> RemotePath:  # noqa: ARG002  # as Path has it
        """The path itself."""
        return self

    def absolute(self) -> RemotePath:
        """The path itself."""
        return self

    def relative_to(self, other: Any, *_: Any, **__: Any) -> Path:  # type: ignore[override]  # what is left is in no store
        """The path relative to a folder above it."""
        return Path(*super().relative_to(other).parts)

    def expanduser(self) -> RemotePath:
        """The path itself."""
        return self

    # --- what is in it ----------------------------------------------------------------------------------------------

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]  # Path has a generator of its own
        """The paths in a folder.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        mount, key = self.mount()
        names = mount.list_folder(key)
        if not names and key:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(self))
        return iter([self / name for name in sorted(names)])

    def glob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]  # Path takes more
        """The paths below a folder that match a pattern of names."""
        first, *deeper = pattern.split("/", 1)
        if not self.is_dir():
            return
        for path in self.iterdir():
            if fnmatchcase(path.name, first):
                if deeper:
                    yield from path.glob(deeper[0])
                else:
                    yield path

    def ranges(self) -> Any:
        """Open the object for reads at any offset (`formats.disk.handle`)."""
        mount, key = self.mount()
        entry = mount.entry(key) if key else None
        if entry is None:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(self))
        if key in mount.beside:
            return os.open(mount.beside[key], os.O_RDONLY)
        return Object(mount.store, key, entry, mount.heads.pop(key, None))

    def open(self, mode: str = "r", *_: Any, encoding: str | None = None, errors: str | None = None, **__: Any) -> Any:
        """Open the object for reading from the beginning."""
        if mode not in ("r", "rt", "rb"):
            self.__fspath__()
        mount, key = self.mount()
        if key in mount.beside:
            return mount.beside[key].open(mode, encoding=encoding, errors=errors)
        raw = io.BufferedReader(_Stream(self.ranges()))
        return raw if mode == "rb" else io.TextIOWrapper(raw, encoding or "utf-8", errors)

    def read_bytes(self) -> bytes:
        """The whole content."""
        mount, key = self.mount()
        if key in mount.texts:
            return mount.texts[key]
        with opened(self) as handle:
            content = pread(handle, size_of(handle), 0)
        if len(content) <= REMEMBERED:
            mount.texts[key] = content
        return content

    def read_text(self, encoding: str | None = None, errors: str | None = None, **_: Any) -> str:
        """The whole content as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    @staticmethod
    def ahead(paths: Iterable[RemotePath]) -> None:
        """Request the first bytes of objects that will be read soon (`formats.disk.handle.prefetch`)."""
        for path in paths:
            mount, key = path.mount()
            entry = mount.entry(key)
            if entry is not None and key not in mount.heads and key not in mount.beside:
                stop = min(entry.size, SMALLEST)
                mount.heads[key] = fetchers().submit(mount.store.fetch, key, entry, 0, stop)


class _Stream(io.RawIOBase):
    """An open object as a stream with a position."""

    def __init__(self, stored: Object) -> None:
        self.held, self.at = stored, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.held.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = self.held.read_at(memoryview(buffer).cast("B"), self.at)
        self.at += count
        return count

    def close(self) -> None:
        self.held.close()
        super().close()


def remote(path: Path) -> RemotePath:
    """The path in a store that the user wrote, with earlier listings of the store discarded; no request is sent yet."""
    place = RemotePath(*path.parts) if not isinstance(path, RemotePath) else path
    if ".." in place.parts:
        raise UsageError(f"{place} has a part '..', which no address in a store means", "write the whole address")
    depth = DEPTH[place.parts[0].rstrip(":")]
    name, key = "/".join(place.parts[:depth]), "/".join(place.parts[depth:])
    before = MOUNTS.get(name)
    MOUNTS[name] = Mount(_store(place.parts, depth), {key, *(before.roots if before else ())})
    return place


def _store(parts: tuple[str, ...], depth: int) -> Store:
    if parts[0] == "hf:":
        repo, _, revision = "/".join(parts[1:depth]).partition("@")
        return Repo(repo, unquote(revision) or None)
    return Bucket(f"{parts[0]}//{'/'.join(parts[1:depth])}")
