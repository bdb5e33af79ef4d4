"""Names of the Hub in place of folders: `ORG/NAME[@REVISION]` and `hf://ORG/NAME[@REVISION][/FOLDER]`.

A name is looked up in this order: a local folder of that name; the mirrors of the site, folders with ORG/NAME in them
(`VITRUVIAN_MIRRORS`, separated by `:`); the cache of the Hub on this machine; the Hub, from which only needed bytes are
read by ranges (`converters.remote`), unless `HF_HUB_OFFLINE` is set. Nothing is downloaded. `s3://`, `gs://`, `az://`
and `https://` are read in the same way.

A revision may have slashes, written `%2F`; those of `refs/pr/N` and `refs/convert/NAME` may be plain (2.4.0,
hf_file_system.py `SPECIAL_REFS_REVISION_REGEX` and `resolve_path`). Facts about the cache: huggingface_hub 2.4.0,
constants.py and `_local_folder.py`: `$HF_HUB_CACHE`, else `$HF_HOME/hub`, else `~/.cache/huggingface/hub`;
models--ORG--NAME/refs/REVISION holds the commit, whose files are in snapshots/COMMIT.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from formats.errors import NetworkError, SourceError, UsageError, some

REVISION = r"refs/convert/[\w.-]+(?=/|$)|refs/pr/\d+(?=/|$)|[^/\s]+"
NAME = re.compile(
    rf"(?:hf://)?(?P<org>\w[\w.-]*)/(?P<name>\w[\w.-]*)(?:@(?P<revision>{REVISION}))?(?:/(?P<folder>.+))?", re.A
)
SCHEME = "hf:/"
"""The beginning of `hf://` in a Path, which joins two slashes."""
MAIN = "main"
STORES = ("s3", "gs", "az", "https", "http")
"""The schemes of addresses in other stores."""
WRITTEN = ("s3", "gs", "az", SCHEME[:-2])
"""The schemes of addresses that can be written."""
READ = (*STORES, SCHEME[:-2])
"""The schemes of addresses that can be read."""
ADDRESS = re.compile(r"([A-Za-z][\w+.-]+):/", re.A)
"""The beginning of an address, also of one in a Path, which joins two slashes."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables that keep huggingface_hub off the network (2.4.0, constants.py)."""


class ResolvedFolder(NamedTuple):
    """The folder that a name stands for; `note` tells where it was found, empty for a local folder."""

    folder: Path
    note: str = ""


def folder_of(path: Path) -> ResolvedFolder:
    """The folder that a name of the Hub, or an address in a store, stands for; any other path as it is.

    Args:
        path: the folder as the user wrote it.

    Raises:
        SourceError: the path is a name that is neither on this machine nor on the Hub, or the Hub may not be asked.
        NetworkError: the Hub cannot be reached.
    """
    text = str(path)
    if scheme_of(path) in STORES:
        from converters.remote.path import remote

        return ResolvedFolder(remote(path))
    named = text.startswith(SCHEME)
    text = "hf://" + text[len(SCHEME) :].lstrip("/") if named else text
    match = NAME.fullmatch(text)
    revision = unquote(match["revision"]) if match and match["revision"] else None
    above = {".", ".."}.intersection((revision or "").split("/"))
    local = revision is None and path.parent.is_dir()  # a folder here has no revisions
    if match is None or above or (not named and (path.exists() or match["folder"] or local)):
        if named:
            raise SourceError(
                f"{text} is not a valid name on the Hub", "such as hf://ORG/NAME, or hf://ORG/NAME@REVISION"
            )
        return ResolvedFolder(path)
    org, name, below = match["org"], match["name"], match["folder"] or ""
    looked = list[str]()
    if revision is None:
        for mirror in filter(None, os.environ.get("VITRUVIAN_MIRRORS", "").split(":")):
            folder = Path(mirror) / org / name
            if (folder / below).is_dir():
                return ResolvedFolder(folder / below, f"{org}/{name} is taken from the mirror {folder}")
            looked.append(str(folder))
    home = cache() / f"models--{org}--{name}"
    snapshot = _snapshot(home, revision or MAIN)
    if snapshot is not None and (snapshot / below).is_dir():
        return ResolvedFolder(snapshot / below, f"{org}/{name} is taken from the Hub's cache, revision {snapshot.name}")
    address = f"{org}/{name}{f'@{revision}' if revision else ''}"
    offline = next(
        (variable for variable in OFFLINE if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")), None
    )
    if offline is None:
        return _on_hub(f"{org}/{name}@{quote(revision, '')}" if revision else address, below)
    revisions = sorted(folder.name for folder in home.glob("snapshots/*"))
    if revisions:
        raise SourceError(
            f"{address}: the Hub's cache {home} holds no revision {revision or MAIN}, and {offline} is set; it holds "
            f"{some(revisions, 4)}",
            f"name one: {org}/{name}@{revisions[0]}",
        )
    if not named:
        return ResolvedFolder(path)
    looked.append(str(home))
    at = f" --revision {revision}" if revision else ""
    raise SourceError(
        f"{address} is not a folder here, and not in {some(looked, 4)}, and {offline} is set",
        f"unset {offline}, or: hf download {org}/{name}{at}, into the cache or with --local-dir FOLDER",
    )


def _on_hub(address: str, below: str) -> ResolvedFolder:
    """A folder of a repository that is read from the Hub.

    Raises:
        SourceError: the Hub has no such repository, or the folder is not in it.
        NetworkError: the Hub cannot be reached.
    """
    from converters.remote.hub_repo import Repo
    from converters.remote.path import remote

    folder = remote(Path(f"{SCHEME}{address}") / below)
    store = folder.mount()[0].store
    assert isinstance(store, Repo)
    try:
        commit = store.commit
    except (SourceError, UsageError, NetworkError) as error:
        raise type(error)(f"{address} is not a folder here; {error}", error.hint) from None
    if below and not folder.is_dir():
        raise SourceError(f"{folder} is not a folder on the Hub")
    return ResolvedFolder(folder, f"{address} is read from the Hub, revision {commit}")


def scheme_of(path: str | PathLike[str]) -> str:
    """The scheme of an address, such as `s3`; empty for a path without one."""
    address = ADDRESS.match(str(path))
    return address[1] if address else ""


def require_scheme(path: str | PathLike[str], taken: Collection[str]) -> None:
    """Refuse an address that is not taken where a path is named: as a path, it would be one of a folder `s3:`.

    Args:
        path: what the user wrote.
        taken: the schemes of the addresses that are taken: `READ`, `WRITTEN`, or none.

    Raises:
        UsageError: it is an address with another scheme, or a scheme alone.
    """
    scheme = scheme_of(path)
    if scheme in taken and not str(path)[len(f"{scheme}:") :].strip("/"):
        raise UsageError(f"{path} is no whole address", f"write {scheme}://NAME/FOLDER")
    if not scheme or scheme in taken:
        return
    if scheme.lower() == "file":
        raise UsageError(f"{path} is an address", f"write the path alone: /{str(path)[len('file:/') :].lstrip('/')}")
    if scheme.lower() in taken:
        raise UsageError(f"{path}: the scheme {scheme} is not known", f"it is written {scheme.lower()}://…")
    if not taken:
        raise UsageError(f"{path} is an address, and only a path of this machine is taken here")
    hint = f"what can be: a folder of this machine, {', '.join(f'{name}://…' for name in taken)}"
    if scheme.lower() in READ:
        raise UsageError(f"{path} can be read, and not written", hint)
    raise UsageError(f"{path}: addresses with {scheme}:// can be neither read nor written", hint)


def place_of(path: Path) -> Path:
    """The place of an output: a folder, or a path in a store.

    Raises:
        UsageError: the path is an address that nothing can be written to.
    """
    require_scheme(path, WRITTEN)
    if not scheme_of(path):
        return path
    from converters.remote.path import remote

    return remote(path)


def cache() -> Path:
    """The folder of the Hub's cache."""
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if folder:
        return Path(folder).expanduser()
    usual = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(usual) / "huggingface").expanduser() / "hub"


def _snapshot(home: Path, revision: str) -> Path | None:
    """The folder of a revision in the cache: of a commit, or of a name in refs/; None if it is not there."""
    ref = home / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    folder = home / "snapshots" / commit
    return folder if "/" not in commit and commit not in ("", ".", "..") and folder.is_dir() else None


def one_line(text: str) -> str:
    """A text as one line of bounded length, with only the host of each address: the rest may hold a signature."""
    return " ".join(re.sub(r"(https?://[^/\s'\")]+)[^\s'\")]*", r"\1", text).split())[:300]
