"""Send a Hugging Face folder to the Hub, verified before and after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.assets.files import files
from converters.assets.token_files import held_template
from converters.hub.preflight import embedding_rows, findings
from converters.hub.push_plan import Push, plan_push, verify_folder
from converters.hub.upload import push as upload
from converters.hub.upload import require_token
from converters.library.options import Place, path_of
from formats.checkpoint import MANIFEST
from formats.errors import RefusedError


@dataclass(frozen=True)
class Pushed:
    """The result of a push.

    Attributes:
        repo: ORG/NAME.
        revision: the branch or the pull request.
        commit: the commit with the files.
        url: the page of the commit, or of the pull request.
        files: how many files the commit has, each compared with the Hub's hash of it.
        nbytes: bytes of these files.
        digest: the hash of the weights, which equals that of the manifest; None without a manifest.
        notes: further messages for the user.
    """

    repo: str
    revision: str
    commit: str
    url: str
    files: int
    nbytes: int
    digest: str | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The record that `convert push --json` prints."""
        return {
            "repo": self.repo, "revision": self.revision, "commit": self.commit, "url": self.url, "files": self.files,
            "bytes": self.nbytes, "digest": self.digest, "notes": list(self.notes),
        }  # fmt: skip


def problems_of(folder: Path) -> list[str]:
    """The problems that keep a folder from being published, each as a sentence."""
    assets = dict(files(folder))
    chats = held_template(assets) is not None
    return [
        finding.sentence for finding in findings(assets, embedding_rows(folder), need_template=chats) if finding.blocks
    ]


def require_fit(folder: Path, problems: list[str]) -> None:
    """Refuse a folder that cannot be published.

    Raises:
        RefusedError: there are problems.
    """
    if problems:
        raise RefusedError(f"{folder} is not fit to be published: {'; '.join(problems)}")


def notes_of(plan: Push, digest: str | None) -> list[str]:
    """Messages for the user before a push, given the digest of the verified weights."""
    unproved = f"{plan.folder} holds no {MANIFEST}: there was nothing to compare the weights with"
    return [*plan.notes, *([] if digest else [unproved])]


def send(plan: Push, digest: str | None, *, quiet: bool) -> Pushed:
    """Upload the files of a planned push, after the weights were verified."""
    done = upload(plan, quiet=quiet)
    notes = (*notes_of(plan, digest), *done.notes)
    return Pushed(plan.repo, done.revision, done.commit, done.url, len(plan.files), plan.nbytes, digest, notes)


def push(
    out: Place,
    repo: str,
    *,
    private: bool = True,
    revision: str | None = None,
    create_pr: bool = False,
    base_model: str | None = None,
) -> Pushed:
    """Send a Hugging Face folder to the Hub. The token is that of HF_TOKEN or of `hf auth login`.

    Args:
        out: the folder.
        repo: ORG/NAME.
        private: whether a new repository is private.
        revision: the branch, made if it does not exist; or refs/pr/N; None for main.
        create_pr: open a pull request instead.
        base_model: id of the model on the Hub that the weights come from, for the card.

    Raises:
        UsageError: there is no token, or a name is not valid on the Hub.
        RefusedError: the folder is not fit to be published; or the repository is public and should not be, or holds
            files that would be loaded with those of the folder.
        VerificationError: the weights are not those of the manifest, or the Hub's files differ after the upload.
        NetworkError: the Hub cannot be reached.
    """
    require_token()
    folder = path_of(out, "out")
    plan = plan_push(
        folder, repo, private=private, revision=revision, create_pr=create_pr, base_model=base_model, quiet=True
    )
    require_fit(folder, problems_of(folder))
    return send(plan, verify_folder(folder, quiet=True), quiet=True)
