"""What the Hub answers, one function a kind of request."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import yaml

from tests.hub.store import Entry, RefusedError

if TYPE_CHECKING:
    from tests.hub.server import Handler

Reply = tuple[int, Any]
Route = Callable[..., "Reply | None"]
ROUTES: list[tuple[str, re.Pattern[str], Route]] = []


def route(method: str, pattern: str) -> Callable[[Route], Route]:
    """Say which requests a function answers. {repo} and {rev} stand for themselves."""
    pattern = pattern.replace("{repo}", r"(?P<repo>[^/]+/[^/]+)").replace("{rev}", r"(?P<rev>[^/]+)")

    def note(function: Route) -> Route:
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return note


@route("GET", "/api/whoami-v2")
def whoami(self: Handler) -> Reply:
    self.user()
    return 200, {"type": "user", "name": "tester", "orgs": [{"name": "acme"}], "auth": {"type": "access_token"}}


@route("POST", "/api/validate-yaml")
def validate_yaml(self: Handler) -> Reply:
    text = self.json()["content"]
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    try:
        metadata = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        return 400, {"errors": [{"message": str(error)}], "warnings": []}
    return 200, {
        "errors": [],
        "warnings": [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}],
    }


@route("POST", "/api/repos/create")
def create(self: Handler) -> Reply:
    request = self.json()
    name = f"{request.get('organization') or 'tester'}/{request['name']}"
    self.user(name.partition("/")[0])
    facts = {"url": f"{self.hub.endpoint}/{name}", "name": name}
    if name in self.hub.store.repos:
        return 409, facts | {"error": "You already created this model repo"}
    self.hub.store.create(name, request.get("visibility") == "private" or bool(request.get("private")))  # before 1.0
    return 200, facts


@route("POST", "/api/models/{repo}/branch/(?P<branch>[^/]+)")
def branch(self: Handler, repo: str, branch: str) -> Reply:
    _, oid, _ = self.tree(repo, (self.json() or {}).get("startingPoint", "main"), write=True)
    stored_repo = self.hub.store.repos[repo]
    if branch.startswith("refs/"):
        raise RefusedError(400, f"Invalid reference for a branch: {branch}")
    if branch in stored_repo.refs:
        raise RefusedError(409, "Reference already exists")
    stored_repo.refs[branch] = oid
    return 200, {}


@route("DELETE", "/api/models/{repo}/branch/(?P<branch>[^/]+)")
def delete_branch(self: Handler, repo: str, branch: str) -> Reply:
    del self.repo(repo, write=True).refs[branch]
    return 200, {}


@route("POST", "/api/models/{repo}/paths-info/{rev}")
def paths_info(self: Handler, repo: str, rev: str) -> Reply:
    body = b"".join(self.pieces())
    paths = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
    _, _, entries = self.tree(repo, rev)
    return 200, [_described(path, entries[path]) for path in paths if path in entries]


@route("POST", "/api/models/{repo}/preupload/{rev}")
def preupload(self: Handler, repo: str, rev: str) -> Reply:
    _, _, tree = self.tree(repo, rev, write=True)
    files = []
    for file in self.json()["files"]:
        large = file["path"].endswith((".safetensors", ".model", ".bin")) or file["size"] > 10 << 20
        entry = tree.get(file["path"])
        oid = (entry.sha256 or entry.blob) if entry else None
        mode = "lfs" if large else "regular"
        files.append(
            {"path": file["path"], "uploadMode": mode, "shouldIgnore": self.hub.skips(file["path"]), "oid": oid}
        )
    return 200, {"files": files}


@route("POST", "/{repo}[.]git/info/lfs/objects/batch")
def batch(self: Handler, repo: str) -> Reply:
    self.repo(repo, write=True)
    request, objects = self.json(), []
    for pointer in request["objects"]:
        oid, size = pointer["oid"], pointer["size"]
        answer = {"oid": oid, "size": size}
        if not self.hub.store.lfs(oid).exists():
            upload: dict[str, Any] = {"href": f"{self.hub.endpoint}/lfs/{oid}"}
            if size > self.hub.multipart and "multipart" in request["transfers"]:
                count = -(-size // self.hub.multipart)
                parts = {str(part): f"{upload['href']}/{part}" for part in range(1, count + 1)}
                upload["header"] = {"chunk_size": str(self.hub.multipart), **parts}
            answer["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.endpoint}/verify"}}
        objects.append(answer)
    return 200, {"transfer": "basic", "objects": objects}


@route("PUT", "/lfs/(?P<oid>[0-9a-f]{64})(?:/(?P<part>[0-9]+))?")
def put(self: Handler, oid: str, part: str = "") -> Reply:
    path = self.hub.store.folder / f"{oid}.{part or threading.get_ident()}"
    self.save(path)
    if not part and not self.hub.store.keep(oid, [path]):
        raise RefusedError(400, f"what came is not {oid}")
    self.extra = {"ETag": f'"{part}"'}
    return 200, {}


@route("POST", "/lfs/(?P<oid>[0-9a-f]{64})")
def complete(self: Handler, oid: str) -> Reply:
    numbers = [part["partNumber"] for part in self.json()["parts"]]
    if not self.hub.store.keep(oid, [self.hub.store.folder / f"{oid}.{number}" for number in numbers]):
        raise RefusedError(400, f"the parts are not {oid}")
    return 200, {}


@route("POST", "/verify")
def verify(self: Handler) -> Reply:
    self.user()
    request = self.json()
    path = self.hub.store.lfs(request["oid"])
    if not path.exists() or path.stat().st_size != request["size"]:
        raise RefusedError(422, f"{request['oid']} is not here")
    return 200, {}


@route("POST", "/api/models/{repo}/commit/{rev}")
def commit(self: Handler, repo: str, rev: str) -> Reply:
    stored_repo, _, before = self.tree(repo, rev, write=True)
    if rev not in stored_repo.refs:
        raise RefusedError(400, f"{rev} is no branch")
    lines = [json.loads(line) for line in b"".join(self.pieces()).splitlines()]
    message, tree, store = "", dict(before), self.hub.store
    for line in lines:
        value = line["value"]
        if line["key"] == "header":
            message = value["summary"]
        elif line["key"] == "file":
            tree[value["path"]] = store.put(base64.b64decode(value["content"]))
        elif line["key"] == "lfsFile":
            if not self.arrived(value["oid"]):
                raise RefusedError(400, f"LFS pointer of {value['path']} points to a file that does not exist")
            size = value.get("size", store.lfs(value["oid"]).stat().st_size)  # a copy does not say it
            tree[value["path"]] = store.pointer(value["oid"], size)
        elif line["key"] == "deletedFile":
            tree.pop(value["path"], None)
    for path, entry in tree.items():
        if self.hub.altered and path.startswith(self.hub.altered):
            tree[path] = Entry(entry.size, "0" * 40, entry.sha256 and "0" * 64)
    with self.hub.lock:
        ref = f"refs/pr/{stored_repo.open_pull(message)}" if self.query.get("create_pr") else rev
        oid = stored_repo.commit(ref, message, tree)
    url = f"{self.hub.endpoint}/{repo}"
    pull = f"{url}/discussions/{ref.rpartition('/')[2]}" if self.query.get("create_pr") else None
    return 200, {"commitUrl": f"{url}/commit/{oid}", "commitOid": oid, "pullRequestUrl": pull}


def _described(path: str, entry: Entry) -> dict[str, Any]:
    """A file, as the tree lists it."""
    facts: dict[str, Any] = {"type": "file", "path": path, "size": entry.size, "oid": entry.blob}
    if entry.sha256:
        facts["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": 134}
    return facts


@route("GET", "/api/models/{repo}")
@route("GET", "/api/models/{repo}/revision/{rev}")
def info(self: Handler, repo: str, rev: str = "main") -> Reply:
    stored_repo, oid, tree = self.tree(repo, rev)
    siblings: list[dict[str, Any]] = []
    for path, entry in sorted(tree.items()):
        siblings.append({"rfilename": path})
        if self.query.get("blobs"):
            siblings[-1] |= {"size": entry.size, "blobId": entry.blob}
            if entry.sha256:
                siblings[-1]["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": 134}
    facts = {
        "_id": "0",
        "id": repo,
        "modelId": repo,
        "private": stored_repo.private,
        "tags": [],
        "downloads": 0,
        "likes": 0,
    }
    return 200, facts | {"sha": oid, "siblings": siblings}


@route("GET", "/api/models/{repo}/tree/{rev}(?:/(?P<folder>.+))?")
def tree(self: Handler, repo: str, rev: str, folder: str = "") -> Reply:
    _, _, entries = self.tree(repo, rev)
    inside = {path: entry for path, entry in entries.items() if not folder or path.startswith(f"{folder}/")}
    if folder and not inside:
        raise RefusedError(404, f"{folder} does not exist on {rev}", "EntryNotFound")
    if self.query.get("recursive", "").lower() == "true":
        return 200, [_described(path, entry) for path, entry in sorted(inside.items())]
    depth = len(PurePosixPath(folder).parts) + 1
    here = [_described(path, entry) for path, entry in sorted(inside.items()) if path.count("/") == depth - 1]
    folders = {"/".join(path.split("/")[:depth]) for path in inside if path.count("/") >= depth}
    return 200, [
        *here,
        *({"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in sorted(folders)),
    ]


@route("GET", "/api/models/{repo}/refs")
def refs(self: Handler, repo: str) -> Reply:
    stored_repo = self.repo(repo)
    listed = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in stored_repo.refs.items()
    ]
    return 200, {"branches": [ref for ref in listed if "/" not in ref["name"]], "converts": [], "tags": []}


def _pull(self: Handler, name: str, number: int) -> dict[str, Any]:
    """A pull request, as its page tells it."""
    pull = self.repo(name).pulls.get(number)
    if pull is None:
        raise RefusedError(404, f"there is no discussion {number}")
    return pull | {
        "num": number, "author": {"name": "tester"}, "createdAt": "2026-01-01T00:00:00.000Z", "isPullRequest": True,
        "repo": {"name": name, "type": "model"}, "events": [], "changes": {"base": "refs/heads/main"},
        "filesWithConflicts": [],
    }  # fmt: skip


@route("POST", "/api/models/{repo}/discussions")
def discuss(self: Handler, repo: str) -> Reply:
    stored_repo, request = self.repo(repo, write=True), self.json()
    if not request["pullRequest"]:
        raise RefusedError(400, "this Hub has pull requests only")
    with self.hub.lock:
        number = stored_repo.open_pull(request["title"])
    return 200, {"num": number, "pullRequest": True, "url": f"{self.hub.endpoint}/{repo}/discussions/{number}"}


@route("GET", "/api/models/{repo}/discussions/(?P<number>[0-9]+)")
def discussion(self: Handler, repo: str, number: str) -> Reply:
    return 200, _pull(self, repo, int(number))


@route("GET", "/{repo}/resolve/{rev}/(?P<path>.+)")
def resolve(self: Handler, repo: str, rev: str, path: str) -> Reply | None:
    _, oid, entries = self.tree(repo, rev)
    if path not in entries:
        self.extra = {"X-Repo-Commit": oid}
        raise RefusedError(404, "Entry not found", "EntryNotFound")
    entry = entries[path]
    first, last = 0, entry.size - 1
    range_match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
    if range_match:
        first, last = int(range_match[1]), min(last, int(range_match[2] or last))
    headers = {
        "ETag": f'"{entry.sha256 or entry.blob}"', "X-Repo-Commit": oid, "Content-Length": str(last - first + 1),
        "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream",
    }  # fmt: skip
    if range_match:
        headers["Content-Range"] = f"bytes {first}-{last}/{entry.size}"
    if entry.sha256 and self.hub.storage:
        self.hub.storage += 1
        self.extra = {
            "Location": f"http://localhost:{self.hub.server.server_port}/cdn/{entry.sha256}?signed={self.hub.storage}",
            "X-Repo-Commit": oid, "X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(entry.size),
        }  # fmt: skip
        return 302, {}
    self.send_file(206 if range_match else 200, headers, self.hub.store.path(entry), first, last - first + 1)
    return None


@route("GET", "/cdn/(?P<oid>[0-9a-f]{64})")
def cdn(self: Handler, oid: str) -> Reply | None:
    """The storage that the Hub leads to: an address is signed for a while, and no token is sent there."""
    assert "Authorization" not in self.headers
    if int(self.query["signed"]) < self.hub.expired:
        raise RefusedError(403, "the signature has expired")
    path = self.hub.store.lfs(oid)
    size = path.stat().st_size
    range_match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
    first, last = (int(range_match[1]), int(range_match[2] or size - 1)) if range_match else (0, size - 1)
    headers = {"Content-Length": str(last - first + 1)}
    if range_match:
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    self.send_file(206 if range_match else 200, headers, path, first, last - first + 1)
    return None


@route("GET", "/api/models/{repo}/xet-write-token/{rev}")
def xet(self: Handler, repo: str, rev: str) -> Reply:
    self.tree(repo, rev, write=True)
    if self.hub.cas is None:
        raise RefusedError(404, "this Hub has no Xet storage")
    until = int(time.time()) + 3600
    return 200, {"casUrl": self.hub.cas.url, "exp": until, "accessToken": "of-the-test"}
