"""What a Hub keeps: repositories, branches, pull requests, commits, and files as git blobs or as LFS objects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASE = 1 << 20


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def git_hash(content: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A file in a commit: `sha256` is set if its bytes are an LFS object, `blob` is its name in git."""

    size: int
    blob: str
    sha256: str = ""


@dataclass
class Repo:
    """A repository: what each ref points to, what each commit holds, and the titles of the pull requests."""

    name: str
    private: bool
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Entry]] = field(default_factory=dict)
    pulls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def commit(self, ref: str, message: str, tree: dict[str, Entry]) -> str:
        """Put a tree on a ref."""
        facts = [self.refs.get(ref), ref, message, len(self.commits), sorted(tree)]
        oid = hashlib.sha1(json.dumps(facts).encode()).hexdigest()
        self.commits[oid] = tree
        self.refs[ref] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, a pull request's ref or a commit's own name means."""
        if revision in self.commits:
            return revision
        return self.refs.get(revision)

    def open_pull(self, title: str) -> int:
        """A new pull request, which starts where main is."""
        number = len(self.pulls) + 1
        self.pulls[number] = {"title": title, "status": "draft"}
        self.refs[f"refs/pr/{number}"] = self.refs["main"]
        return number


class Store:
    """Repositories in memory, the bytes of their files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repos: dict[str, Repo] = {}
        (folder / "blobs").mkdir(parents=True)
        (folder / "lfs").mkdir()

    def create(self, name: str, private: bool) -> Repo:
        """A new repository, which begins with a .gitattributes as the real one does."""
        repo = self.repos[name] = Repo(name, private)
        repo.commit("main", "initial commit", {".gitattributes": self.put(b"*.safetensors filter=lfs -text\n")})
        return repo

    def put(self, content: bytes) -> Entry:
        """Keep a file that is no LFS object."""
        blob = git_hash(content)
        (self.folder / "blobs" / blob).write_bytes(content)
        return Entry(len(content), blob)

    def lfs(self, sha256: str) -> Path:
        """Where an LFS object is, or would be."""
        return self.folder / "lfs" / sha256

    def path(self, entry: Entry) -> Path:
        """Where the bytes of a file are."""
        return self.lfs(entry.sha256) if entry.sha256 else self.folder / "blobs" / entry.blob

    def keep(self, sha256: str, parts: Iterable[Path]) -> bool:
        """Make an LFS object of what came; False and nothing kept if it is not what was announced."""
        counted, joined = hashlib.sha256(), self.folder / f"{sha256}.whole"
        with joined.open("wb") as writer:
            for part in parts:
                with part.open("rb") as reader:
                    while piece := reader.read(BASE):
                        counted.update(piece)
                        writer.write(piece)
                part.unlink()
        if counted.hexdigest() != sha256:
            joined.unlink()
            return False
        joined.rename(self.lfs(sha256))
        return True

    def pointer(self, sha256: str, size: int) -> Entry:
        """A file whose bytes are an LFS object."""
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        return Entry(size, git_hash(text.encode()), sha256)

    def content(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Every file of a revision, for a test to look at."""
        stored_repo = self.repos[repo]
        tree: Mapping[str, Entry] = stored_repo.commits[stored_repo.resolve(revision) or ""]
        return {name: self.path(entry).read_bytes() for name, entry in tree.items()}
