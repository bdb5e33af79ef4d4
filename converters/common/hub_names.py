"""Names of the Hub where a folder is asked for: `ORG/NAME[@REVISION]` and `hf://ORG/NAME[@REVISION][/FOLDER]`.

They are looked for in this order: a local folder of that name; the mirrors of the site, folders with ORG/NAME in them
(`VITRUVIAN_MIRRORS`, separated by `:`); the cache of the Hub on this machine. Nothing is downloaded.

Facts about the cache: huggingface_hub 2.4.0, constants.py and `_local_folder.py`: `$HF_HUB_CACHE`, else
`$HF_HOME/hub`, else `~/.cache/huggingface/hub`; models--ORG--NAME/refs/REVISION holds the commit, whose files are in
snapshots/COMMIT.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from formats.errors import SourceError, some

NAME = re.compile(
    r"(?:hf://)?(?P<org>\w[\w.-]*)/(?P<name>\w[\w.-]*)(?:@(?P<revision>[^/\s]+))?(?:/(?P<folder>.+))?", re.A
)
SCHEME = "hf:/"
"""How `hf://` begins once a path has been made of it."""
MAIN = "main"


class Found(NamedTuple):
    """The folder that a name stands for; `note` says which one was taken, empty for a local folder."""

    folder: Path
    note: str = ""


def folder_of(path: Path) -> Found:
    """The folder that a name of the Hub stands for; any other path as it is.

    Args:
        path: what the user wrote where a folder is asked for.

    Raises:
        SourceError: it begins with `hf://`, and nothing on this machine has it.
    """
    text = str(path)
    named = text.startswith(SCHEME)
    text = "hf://" + text[len(SCHEME) :].lstrip("/") if named else text
    match = NAME.fullmatch(text)
    if match is None or (not named and (path.exists() or match["folder"] or path.parent.is_dir())):
        if named:
            raise SourceError(f"{text} is no name on the Hub", "such as hf://ORG/NAME, or hf://ORG/NAME@REVISION")
        return Found(path)
    org, name, revision, below = match["org"], match["name"], match["revision"], match["folder"] or ""
    looked = list[str]()
    if revision is None:
        for mirror in filter(None, os.environ.get("VITRUVIAN_MIRRORS", "").split(":")):
            folder = Path(mirror) / org / name
            if (folder / below).is_dir():
                return Found(folder / below, f"{org}/{name} is taken from the mirror {folder}")
            looked.append(str(folder))
    home = cache() / f"models--{org}--{name}"
    snapshot = _snapshot(home, revision or MAIN)
    if snapshot is not None and (snapshot / below).is_dir():
        return Found(snapshot / below, f"{org}/{name} is taken from the Hub's cache, revision {snapshot.name}")
    if not named:
        return Found(path)
    looked.append(str(home))
    at = f" --revision {revision}" if revision else ""
    wanted = f"{org}/{name}{f'@{revision}' if revision else ''}"
    raise SourceError(
        f"{wanted} is no folder here, and not in {some(looked, 4)}",
        f"download it first: hf download {org}/{name}{at}, into the cache or with --local-dir FOLDER",
    )


def cache() -> Path:
    """The folder of the Hub's cache."""
    held = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if held:
        return Path(held).expanduser()
    usual = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(usual) / "huggingface").expanduser() / "hub"


def _snapshot(home: Path, revision: str) -> Path | None:
    """The folder of a revision: a commit, or a name that refs/ knows."""
    ref = home / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    folder = home / "snapshots" / commit
    return folder if "/" not in commit and commit not in ("", ".", "..") and folder.is_dir() else None
