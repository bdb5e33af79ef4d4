"""Plan a push: the files of a Hugging Face folder with their hashes, and the card. Nothing is sent here."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from converters.assets.trusted import refusal_reason, require_inside
from converters.common.hub_names import STORES, scheme_of
from converters.hub import model_card
from converters.hub.files import File
from formats.disk.threads import Threads
from formats.errors import SourceError, UsageError, VerificationError, short, some
from formats.huggingface.folder import unindexed_files

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
"""Patterns of files that frameworks take for weights at the root of a repository."""
NAME = re.compile(r"(?!.*(?:--|[.][.]))(?!.*[.]git$)(?:\w(?:[\w.-]*\w)?/)?\w(?:[\w.-]*\w)?", re.ASCII)
"""Valid names of a repository: huggingface_hub 2.4.0, utils/_validators.py."""
STEP = 1 << 20
MAIN = "main"


@dataclass(frozen=True)
class Push:
    """The files of a push, and where they are sent.

    Attributes:
        folder: the Hugging Face folder.
        repo: ORG/NAME.
        files: all files that are sent, with the card.
        card: the text of README.md.
        private: whether a new repository is private.
        revision: the branch, None for main; it is made if it does not exist.
        create_pr: whether the files go into a new pull request.
        base_model: id of the model that the weights were trained from.
        left_out: (name, reason) of files in the folder that are not sent.
        notes: messages for the user.
    """

    folder: Path
    repo: str
    files: tuple[File, ...]
    card: str
    private: bool
    revision: str | None
    create_pr: bool
    base_model: str | None
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def plan_push(
    folder: Path,
    repo: str,
    *,
    private: bool = True,
    revision: str | None = None,
    create_pr: bool = False,
    base_model: str | None = None,
    quiet: bool = True,
) -> Push:
    """Find and hash the files to send, in constant memory. Needs neither network nor token.

    Raises:
        UsageError: a name is not valid on the Hub, options exclude each other, or the folder is no model's.
        SourceError: the folder is not a Hugging Face folder, or a file in it cannot be read.
    """
    check_names(repo, base_model)
    if create_pr and revision not in (None, MAIN):
        raise UsageError("--create-pr and --revision exclude each other: a pull request is always one to main")
    if scheme_of(folder) in STORES:
        raise UsageError(
            f"{folder} is in a store, and a push sends a folder of this machine", "convert into hf://ORG/NAME"
        )
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", "name that of a model: convert push FOLDER ORG/NAME")
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} is not a Hugging Face folder: it holds no config.json", f"convert to huggingface {folder} OUT"
        )
    left_out: list[tuple[str, str]] = []
    paths = dict(_walk(folder, left_out))
    if not any(fnmatchcase(name, WEIGHTS[0]) for name in paths):
        raise SourceError(f"{folder} holds no *.safetensors file")
    paths.pop(model_card.NAME, None)
    left_out += [(name, "the model is in other files") for name in unindexed_files(folder) if paths.pop(name, None)]
    files = _hashed(paths, quiet)
    text, notes = model_card.write_card(folder, repo, files, base_model)
    content = text.encode()
    files.append(File(model_card.NAME, len(content), hashlib.sha256(content).hexdigest(), None))
    files.sort(key=lambda file: file.name)
    return Push(
        folder, repo, tuple(files), text, private, revision, create_pr, base_model, tuple(left_out), tuple(notes)
    )


def check_names(repo: str, base_model: str | None) -> None:
    """Refuse names of repositories that are not valid on the Hub.

    Raises:
        UsageError: a name is not valid, or lacks its ORG/.
    """
    for name, what in ((repo, "ORG/NAME"), (base_model, "--base-model")):
        if name is not None and not (NAME.fullmatch(name) and len(name.rpartition("/")[2]) <= 96):
            allowed = "letters, digits and single - _ . within, 96 of them at most"
            raise UsageError(f"{what} {short(name)} is not a valid name on the Hub: it has {allowed}")
    if "/" not in repo:
        raise UsageError(f"{short(repo)} does not say whose repository it is", f"convert push OUT YOUR-NAME/{repo}")


def _walk(folder: Path, left_out: list[tuple[str, str]]) -> Iterator[tuple[str, Path]]:
    """(name, path) of all files that are sent; others are added to `left_out` with the reason."""

    def refuse(error: OSError) -> None:
        raise SourceError(f"{error.filename}: {error.strerror}")

    for root, folders, names in os.walk(folder, onerror=refuse):
        below = Path(root).relative_to(folder)
        for name in sorted(folders):
            why = refusal_reason(Path(root) / name) or (
                "a link to a folder" if (Path(root) / name).is_symlink() else ""
            )
            if why:
                folders.remove(name)
                left_out.append(((below / name).as_posix() + "/", why))
        folders.sort()
        for name in sorted(names):
            path, shown = Path(root) / name, (below / name).as_posix()
            if why := refusal_reason(path) or _irregular(path):
                left_out.append((shown, why))
            elif not shown.isprintable():
                raise SourceError(f"{folder} holds a file whose name cannot be sent: {short(shown)}")
            else:
                yield shown, require_inside(path, folder)


def _irregular(path: Path) -> str:
    """Why a path is not a regular file, nor a link to one; empty if it is."""
    try:
        return "" if stat.S_ISREG(path.stat().st_mode) else "no regular file"
    except OSError as error:
        raise SourceError(f"{path} is a broken link" if path.is_symlink() else f"{path}: {error.strerror}") from None


def _hashed(paths: Mapping[str, Path], quiet: bool) -> list[File]:
    from converters.common.progress import Progress

    def one(name: str, path: Path) -> File:
        counted, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(STEP))
        try:
            with path.open("rb", buffering=0) as reader:
                while got := reader.readinto(buffer):
                    counted.update(buffer[:got])
                    size += got
                    progress.advance(got)
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from None
        return File(name, size, counted.hexdigest(), path)

    nbytes = sum(path.stat().st_size for path in paths.values())
    with Progress("hashing", nbytes, quiet) as progress, Threads(2) as pool:
        return list(pool.map(one, paths.keys(), paths.values()))


def verify_folder(folder: Path, *, quiet: bool = True) -> str | None:
    """Read all weights of a folder, and compare them with its manifest.

    Returns:
        The digest of the weights; None without a manifest to compare them with.

    Raises:
        VerificationError: weights, settings or small files are not those of the manifest, or a weight is NaN or
            infinite.
    """
    from converters.common.manifest import changed_files, is_verbatim, read_manifest, total
    from converters.common.progress import Progress
    from converters.move.engine import digest_of
    from converters.plan.request import Limits
    from converters.plan.targets import plan_reading
    from formats.checkpoint import MANIFEST, Settings
    from formats.registry import open_checkpoint

    remembered = read_manifest(folder)
    checkpoint = open_checkpoint(folder, Settings(verbatim=is_verbatim(folder)))
    hint = "convert it again, or copy it again"
    facts, against = remembered or (checkpoint.spec.settings(), {})
    settings = [key for key, value in checkpoint.spec.settings().items() if value != facts.get(key)]
    if settings:
        raise VerificationError(f"{folder} and its {MANIFEST} differ in settings: {', '.join(settings)}", hint)
    if changed := (changed_files(folder) if remembered else None):
        raise VerificationError(
            f"{some(changed, 5)} of {folder}: not what its {MANIFEST} says",
            f"if that is meant, `convert assets {folder} --from {folder}` records it",
        )
    plan = plan_reading(checkpoint)
    with Progress("verifying", plan.nbytes, quiet) as progress:
        digests = digest_of(plan.jobs, Limits(finite=True), progress.advance)
    if remembered is None:
        return None
    wrong = sorted(name for name in {*digests, *against} if digests.get(name) != against.get(name))
    if wrong:
        names = ", ".join(wrong[:5]) + (" …" if len(wrong) > 5 else "")
        raise VerificationError(f"{len(wrong)} tensors of {folder} differ from its {MANIFEST}: {names}", hint)
    return total(digests)
