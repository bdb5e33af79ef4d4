"""What the Hub answers about datasets: the same as about models, at other addresses, and what streaming asks for."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from tests.hub.routes import Reply, info, resolve, route, tree
from tests.hub.store import Entry

if TYPE_CHECKING:
    from tests.hub.server import Handler, Hub

LARGE = (".parquet", ".gz")


def add_set(hub: Hub, name: str, files: dict[str, bytes]) -> str:
    """Put a dataset on the Hub, large formats as LFS objects. Returns its commit."""
    store, entries = hub.store, dict[str, Entry]()
    for path, content in files.items():
        entry = store.put(content)
        entries[path] = entry
        if path.endswith(LARGE):
            oid = hashlib.sha256(content).hexdigest()
            temporary = Path(store.folder) / f"{oid}.in"
            temporary.write_bytes(content)
            assert store.keep(oid, [temporary])
            entries[path] = store.pointer(oid, len(content))
    key = f"datasets/{name}"
    if key not in store.repos:
        store.create(key, False)
    return store.repos[key].commit("main", "a set", entries)


@route("GET", "/api/datasets/{repo}")
@route("GET", "/api/datasets/{repo}/revision/{rev}")
def set_info(self: Handler, repo: str, rev: str = "") -> Reply:
    status, facts = info(self, f"datasets/{repo}", rev or "main")
    return status, facts | {"id": repo, "gated": False, "disabled": False}


@route("GET", "/api/datasets/{repo}/tree/{rev}(?:/(?P<folder>.+))?")
def set_tree(self: Handler, repo: str, rev: str, folder: str = "") -> Reply:
    return tree(self, f"datasets/{repo}", rev, folder)


@route("POST", "/api/datasets/{repo}/paths-info/{rev}")
def paths_info(self: Handler, repo: str, rev: str) -> Reply:
    query = parse_qs(b"".join(self.pieces()).decode())
    _, _, entries = self.tree(f"datasets/{repo}", rev)
    infos: list[dict[str, Any]] = []
    for path in (name.strip("/") for name in query.get("paths", [])):
        if path in entries:
            entry = entries[path]
            infos.append({"type": "file", "path": path, "size": entry.size, "oid": entry.blob})
            if entry.sha256:
                infos[-1]["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": 134}
        elif any(name.startswith(f"{path}/") for name in entries):
            infos.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
    return 200, infos


@route("GET", "/datasets/{repo}/resolve/{rev}/(?P<path>.+)")
def set_resolve(self: Handler, repo: str, rev: str, path: str) -> Reply | None:
    return resolve(self, f"datasets/{repo}", rev, path)


def files_asked(hub: Hub) -> list[str]:
    """Which files of sets were asked for."""
    return [match[1] for path, _ in hub.asked("GET /datasets/") if (match := re.search("/resolve/[^/]+/(.+)$", path))]
