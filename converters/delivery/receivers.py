"""Where an output in a store is put: what is sent is seen by nobody, or is no model yet, until all of it is there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from converters.remote.hub_repo import Repo
from converters.remote.object_store import Bucket
from converters.remote.path import RemotePath, remote
from converters.remote.store import Entry
from formats.errors import OutputError, VerificationError

BRANCH, FOLDER = "vitruvian-partial", "partial"
"""Where files are on the Hub until one commit puts all of them on the branch that was asked for."""
WEIGHTS = (".safetensors", ".pt", ".distcp")
KEPT = ("README.md",)
"""What stays on the Hub when a model is replaced."""
Free = Callable[[Sequence[str]], None]
"""Raises where what is there, and is not of the conversion, may not be replaced."""


class Receiver(Protocol):
    """A place in a store. Names are relative to OUT."""

    def check(self, free: Free) -> None:
        """Whether it may be written."""

    def begin(self, own: Collection[str], free: Free) -> None:
        """Make it ready, given what an earlier run of the same conversion may have left."""

    def send(self, name: str, path: Path) -> Entry:
        """Send a file of weights."""

    def abandon(self, names: Collection[str]) -> None:
        """Delete what was sent, of all these names."""

    def has(self, name: str, entry: Entry) -> bool:
        """Whether a file that was sent is still what it was."""

    def reading(self, small: Mapping[str, Path]) -> RemotePath:
        """Where all can be read, with small files of the disk that are not there yet."""

    def finish(self, small: Mapping[str, Path], sent: Mapping[str, Entry]) -> None:
        """Send the small files, in their order, and let everybody see the model."""


class InBucket:
    """A folder in a bucket. Files of weights are no model before the small files are beside them."""

    def __init__(self, out: RemotePath) -> None:
        self.out = out
        store, self.key = out.mount()[0].store, out.mount()[1]
        assert isinstance(store, Bucket)
        self.bucket = store
        if not self.key:
            raise OutputError(f"{out} is all of a bucket", f"name a folder in it: {out}/model")

    def _held(self) -> dict[str, Entry]:
        return {key.removeprefix(f"{self.key}/"): entry for key, entry in self.bucket.every(self.key).items()}

    def check(self, free: Free) -> None:
        """Whether it may be written (`Receiver`)."""
        free([*self._held()])

    def begin(self, own: Collection[str], free: Free) -> None:
        """Make it ready (`Receiver`). What is replaced is deleted first, what a reader begins with before the rest."""
        others = [name for name in self._held() if name not in own]
        free(others)
        self.bucket.remove(f"{self.key}/{name}" for name in sorted(others, key=lambda name: name.endswith(WEIGHTS)))

    def send(self, name: str, path: Path) -> Entry:
        """Send a file (`Receiver`)."""
        return self.bucket.send(f"{self.key}/{name}", path)

    def abandon(self, names: Collection[str]) -> None:
        """Delete what was sent (`Receiver`)."""
        self.bucket.remove(f"{self.key}/{name}" for name in self._held() if name in names)

    def has(self, name: str, entry: Entry) -> bool:
        """Whether it is still there (`Receiver`)."""
        return self.bucket.found(f"{self.key}/{name}") == entry

    def reading(self, small: Mapping[str, Path]) -> RemotePath:
        """Where all can be read (`Receiver`)."""
        return beside(self.out, small)

    def finish(self, small: Mapping[str, Path], sent: Mapping[str, Entry]) -> None:
        """Send the small files (`Receiver`)."""
        for name, path in small.items():
            self.bucket.send(f"{self.key}/{name}", path)
        stored = self._held()
        if wrong := [name for name, entry in sent.items() if stored.get(name) != entry]:
            raise VerificationError(f"{self.out}/{wrong[0]} was changed by somebody else", "run the same command again")


class OnHub:
    """A branch of a repository. Files wait in a branch of their own, and become a model by one commit."""

    def __init__(self, out: RemotePath) -> None:
        self.out = out
        store, self.key = out.mount()[0].store, out.mount()[1]
        assert isinstance(store, Repo)
        self.repo, self.branch = store, store.revision or "main"
        self.old: list[str] = []

    def _held(self) -> list[str]:
        """The files below OUT now, the card apart."""
        paths = Repo(self.repo.name, self.branch).tree
        below = f"{self.key}/" if self.key else ""
        return [path.removeprefix(below) for path in paths if path.startswith(below) and path not in KEPT]

    def check(self, free: Free) -> None:
        """Whether it may be written (`Receiver`)."""
        if self._exists():
            free(self._held())

    def _exists(self) -> bool:
        """Whether there are the repository and the branch."""
        ask = self.repo.ask
        if not ask(lambda api: api.repo_exists(self.repo.name)):
            return False
        return bool(ask(lambda api: api.revision_exists(self.repo.name, self.branch)))

    def begin(self, own: Collection[str], free: Free) -> None:
        """Make it ready (`Receiver`): a new repository is private."""
        from converters.hub.upload import calm, require_token

        calm(quiet=True)
        require_token()
        name, ask = self.repo.name, self.repo.ask
        ask(lambda api: api.create_repo(name, private=True, exist_ok=True))
        if self.branch != "main":
            ask(lambda api: api.create_branch(name, branch=self.branch, exist_ok=True))
        self.old = self._held()
        free([old_name for old_name in self.old if old_name not in own] if own else self.old)
        if not own:
            self.abandon(())
        ask(lambda api: api.create_branch(name, branch=BRANCH, exist_ok=True))

    def send(self, name: str, path: Path) -> Entry:
        """Send a file (`Receiver`)."""
        place, repo = f"{FOLDER}/{name}", self.repo.name

        def upload(api: Any) -> Any:
            message = f"Upload {name} with vitruvian"
            return api.upload_file(
                path_or_fileobj=path, path_in_repo=place, repo_id=repo, revision=BRANCH, commit_message=message
            )

        self.repo.ask(upload)
        return self._there(name)

    def abandon(self, names: Collection[str]) -> None:  # noqa: ARG002  # as a bucket needs them
        """Delete what was sent (`Receiver`), which is in its branch alone."""
        if self.repo.ask(lambda api: api.revision_exists(self.repo.name, BRANCH)):
            self.repo.ask(lambda api: api.delete_branch(self.repo.name, branch=BRANCH))

    def _there(self, name: str) -> Entry:
        infos = self.repo.ask(lambda api: api.get_paths_info(self.repo.name, [f"{FOLDER}/{name}"], revision=BRANCH))
        if not infos:
            return Entry(-1, "")
        return Entry(infos[0].size, infos[0].lfs.sha256 if infos[0].lfs else infos[0].blob_id)

    def has(self, name: str, entry: Entry) -> bool:
        """Whether it is still there (`Receiver`)."""
        return self._there(name) == entry

    def reading(self, small: Mapping[str, Path]) -> RemotePath:
        """Where all can be read (`Receiver`)."""
        return beside(RemotePath(f"hf:/{self.repo.name}@{BRANCH}") / FOLDER, small)

    def finish(self, small: Mapping[str, Path], sent: Mapping[str, Entry]) -> None:
        """One commit (`Receiver`)."""
        from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete

        below = f"{self.key}/" if self.key else ""
        changes: list[Any] = [
            CommitOperationCopy(f"{FOLDER}/{filename}", f"{below}{filename}", BRANCH) for filename in sent
        ]
        changes += [CommitOperationAdd(f"{below}{name}", path) for name, path in small.items()]
        gone = [filename for filename in self.old if filename not in sent and filename not in small]
        changes += [CommitOperationDelete(f"{below}{filename}") for filename in gone]
        name, message = self.repo.name, "Upload a model with vitruvian"
        self.repo.ask(lambda api: api.create_commit(name, changes, commit_message=message, revision=self.branch))
        tree = Repo(name, self.branch).tree
        if wrong := [filename for filename, entry in sent.items() if tree.get(f"{below}{filename}") != entry]:
            raise VerificationError(f"{self.out}/{wrong[0]} is not what was sent", "run the same command again")
        self.repo.ask(lambda api: api.delete_branch(name, branch=BRANCH))


def receiver_of(out: RemotePath) -> Receiver:
    """Where an output is put."""
    return OnHub(out) if out.parts[0] == "hf:" else InBucket(out)


def beside(out: RemotePath, small: Mapping[str, Path]) -> RemotePath:
    """A path as it is now, with files of the disk that stand for objects which are not there yet."""
    store = remote(out)
    mount, key = store.mount()
    mount.beside = {f"{key}/{name}" if key else name: path for name, path in small.items()}
    return store
