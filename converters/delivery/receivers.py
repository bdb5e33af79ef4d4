"""Receivers of an output in an object store: what was sent is not visible, or no model yet, until it is complete."""

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
"""The branch and folder on the Hub where files wait until one commit puts all of them on the requested branch."""
WEIGHTS = (".safetensors", ".pt", ".distcp")
KEPT = ("README.md",)
"""Files that stay on the Hub when a model is replaced."""
Free = Callable[[Sequence[str]], None]
"""Called with the names at OUT that are not of the conversion; raises if they may not be replaced."""


class Receiver(Protocol):
    """A place in a store. Names are relative to OUT."""

    def check(self, free: Free) -> None:
        """Raise if OUT may not be written."""

    def begin(self, own: Collection[str], free: Free) -> None:
        """Prepare OUT; `own` are the files that an earlier run of the same conversion may have left."""

    def send(self, name: str, path: Path) -> Entry:
        """Send a file of weights."""

    def abandon(self, names: Collection[str]) -> None:
        """Delete the files that were sent, of all these names."""

    def has(self, name: str, entry: Entry) -> bool:
        """Whether a file that was sent is unchanged in the store."""

    def reading(self, small: Mapping[str, Path]) -> RemotePath:
        """The path where the whole output can be read, with small files from the disk that are not sent yet."""

    def finish(self, small: Mapping[str, Path], sent: Mapping[str, Entry]) -> None:
        """Send the small files, in their order, and make the model visible."""


class InBucket:
    """A folder in a bucket. Weight files are no model before the small files are beside them."""

    def __init__(self, out: RemotePath) -> None:
        self.out = out
        store, self.key = out.mount()[0].store, out.mount()[1]
        assert isinstance(store, Bucket)
        self.bucket = store
        if not self.key:
            raise OutputError(f"{out} is all of a bucket", f"name a folder in it: {out}/model")

    def _present(self) -> dict[str, Entry]:
        return {key.removeprefix(f"{self.key}/"): entry for key, entry in self.bucket.every(self.key).items()}

    def check(self, free: Free) -> None:
        """Raise if OUT may not be written (`Receiver`)."""
        free([*self._present()])

    def begin(self, own: Collection[str], free: Free) -> None:
        """Prepare OUT (`Receiver`): delete the model that is replaced, its small files before its weights."""
        others = [name for name in self._present() if name not in own]
        free(others)
        self.bucket.remove(f"{self.key}/{name}" for name in sorted(others, key=lambda name: name.endswith(WEIGHTS)))

    def send(self, name: str, path: Path) -> Entry:
        """Send a file (`Receiver`)."""
        return self.bucket.send(f"{self.key}/{name}", path)

    def abandon(self, names: Collection[str]) -> None:
        """Delete the files that were sent (`Receiver`)."""
        self.bucket.remove(f"{self.key}/{name}" for name in self._present() if name in names)

    def has(self, name: str, entry: Entry) -> bool:
        """Whether a file is unchanged in the bucket (`Receiver`)."""
        return self.bucket.stat(f"{self.key}/{name}") == entry

    def reading(self, small: Mapping[str, Path]) -> RemotePath:
        """The path where the output can be read (`Receiver`)."""
        return with_local_files(self.out, small)

    def finish(self, small: Mapping[str, Path], sent: Mapping[str, Entry]) -> None:
        """Send the small files (`Receiver`)."""
        for name, path in small.items():
            self.bucket.send(f"{self.key}/{name}", path)
        stored = self._present()
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

    def _present(self) -> list[str]:
        """The files below OUT at present, without the card."""
        paths = Repo(self.repo.name, self.branch).tree
        below = f"{self.key}/" if self.key else ""
        return [path.removeprefix(below) for path in paths if path.startswith(below) and path not in KEPT]

    def check(self, free: Free) -> None:
        """Raise if OUT may not be written (`Receiver`)."""
        if self._exists():
            free(self._present())

    def _exists(self) -> bool:
        """Whether the repository and the branch exist."""
        ask = self.repo.ask
        if not ask(lambda api: api.repo_exists(self.repo.name)):
            return False
        return bool(ask(lambda api: api.revision_exists(self.repo.name, self.branch)))

    def begin(self, own: Collection[str], free: Free) -> None:
        """Prepare OUT (`Receiver`): a new repository is private."""
        from converters.hub.upload import quiet_hub_logging, require_token

        quiet_hub_logging(quiet=True)
        require_token()
        name, ask = self.repo.name, self.repo.ask
        ask(lambda api: api.create_repo(name, private=True, exist_ok=True))
        if self.branch != "main":
            ask(lambda api: api.create_branch(name, branch=self.branch, exist_ok=True))
        self.old = self._present()
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
        """Delete the files that were sent (`Receiver`), with the branch that holds them."""
        if self.repo.ask(lambda api: api.revision_exists(self.repo.name, BRANCH)):
            self.repo.ask(lambda api: api.delete_branch(self.repo.name, branch=BRANCH))

    def _there(self, name: str) -> Entry:
        infos = self.repo.ask(lambda api: api.get_paths_info(self.repo.name, [f"{FOLDER}/{name}"], revision=BRANCH))
        if not infos:
            return Entry(-1, "")
        return Entry(infos[0].size, infos[0].lfs.sha256 if infos[0].lfs else infos[0].blob_id)

    def has(self, name: str, entry: Entry) -> bool:
        """Whether a file is unchanged on the Hub (`Receiver`)."""
        return self._there(name) == entry

    def reading(self, small: Mapping[str, Path]) -> RemotePath:
        """The path where the output can be read (`Receiver`)."""
        return with_local_files(RemotePath(f"hf:/{self.repo.name}@{BRANCH}") / FOLDER, small)

    def finish(self, small: Mapping[str, Path], sent: Mapping[str, Entry]) -> None:
        """Make the commit that publishes the model (`Receiver`)."""
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
    """The receiver of an output: a repository on the Hub, or a bucket."""
    return OnHub(out) if out.parts[0] == "hf:" else InBucket(out)


def with_local_files(out: RemotePath, small: Mapping[str, Path]) -> RemotePath:
    """A path in a store, listed anew, with files of the disk in place of objects that are not sent yet."""
    store = remote(out)
    mount, key = store.mount()
    mount.beside = {f"{key}/{name}" if key else name: path for name, path in small.items()}
    return store
