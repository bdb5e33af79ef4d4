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
from converters.library.options import Place
from formats.checkpoint import MANIFEST
from formats.errors import RefusedError


@dataclass(frozen=True)
class Pushed:
    """What came of a push.

    Attributes:
        repo: ORG/NAME.
        revision: the branch or the pull request.
        commit: the commit with the files.
        url: its page.
        files: how many files it has, each compared with the Hub's hash of it.
        nbytes: their bytes.
        digest: the hash of the weights, which equals that of the manifest; None without a manifest.
        notes: what else to know.
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
        """What `convert push --json` prints."""
        return {
            "repo": self.repo, "revision": self.revision, "commit": self.commit, "url": self.url, "files": self.files,
            "bytes": self.nbytes, "digest": self.digest, "notes": list(self.notes),
        }  # fmt: skip


def problems_of(folder: Path) -> list[str]:
    """What keeps a folder from being published; each problem is a sentence."""
    assets = dict(files(folder))
    chats = held_template(assets) is not None
    return [
        finding.sentence for finding in findings(assets, embedding_rows(folder), need_template=chats) if finding.blocks
    ]


def require_fit(folder: Path, problems: list[str]) -> None:
    """Insist on a folder that can be published.

    Raises:
        RefusedError: there are problems.
    """
    if problems:
        raise RefusedError(f"{folder} is not fit to be published: {'; '.join(problems)}")


def notes_of(plan: Push, digest: str | None) -> list[str]:
    """What to know before a push, given the digest of the verified weights."""
    unproved = f"{plan.folder} holds no {MANIFEST}: there was nothing to compare the weights with"
    return [*plan.notes, *([] if digest else [unproved])]


def send(plan: Push, digest: str | None, *, quiet: bool) -> Pushed:
    """Send what a push plans, whose weights were verified."""
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
        private: what a new repository is.
        revision: the branch, made if it does not exist; or refs/pr/N; None for main.
        create_pr: open a pull request instead.
        base_model: id of the model on the Hub that the weights come from, for the card.

    Raises:
        UsageError: there is no token, or a name is none of the Hub.
        RefusedError: the folder is not fit to be published.
        VerificationError: its weights are not those of its manifest, or the Hub holds something else afterwards.
        NetworkError: the Hub cannot be reached.
    """
    require_token()
    folder = Path(out)
    plan = plan_push(
        folder, repo, private=private, revision=revision, create_pr=create_pr, base_model=base_model, quiet=True
    )
    require_fit(folder, problems_of(folder))
    return send(plan, verify_folder(folder, quiet=True), quiet=True)
