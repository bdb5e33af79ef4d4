"""Copies a data set of the Hub, file by file at one commit, for machines without internet access.

`datasets.load_dataset(FOLDER)` reads the copy as it reads the set itself, and so does `source: ./FOLDER` in a recipe.
FOLDER/.vitruvian.json records the commit and whether the copy is complete: an interrupted copy resumes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters.common.atomic import write_file
from formats.errors import OutputError, SourceError, UsageError, VerificationError, short
from train.data.fetch.recipe import Recipe
from train.data.fetch.sources import commit_of, explained

MARK = ".vitruvian.json"
STEP = 1 << 22


def copy_set(recipe: Recipe, folder: Path, quiet: bool = False) -> tuple[Recipe, str]:
    """Copy the set that a recipe names, unless the folder already has it.

    Returns:
        The recipe that reads the copy, and the commit that was copied.

    Raises:
        UsageError: the source is not a set of the Hub.
        OutputError: the folder has other files, or a copy of another set or revision.
        NetworkError: the Hub cannot be reached.
        VerificationError: a downloaded file does not have the hash that the Hub gives.
    """
    if recipe.local:
        raise UsageError(f"--cache copies a set of the Hub, and {recipe.source[0]} is local")
    name, mark = recipe.source[0], _mark(folder)
    if mark is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} holds something else", "--cache NEW_FOLDER")
    if mark is not None and (mark.get("source"), mark.get("wanted")) != (name, recipe.revision):
        other = f"{mark.get('source')} at {mark.get('wanted') or 'its newest commit'}"
        raise OutputError(f"{folder} is a copy of {other}", "--cache NEW_FOLDER")
    local = replace(recipe, source=(str(folder.absolute()),), revision=None)
    if mark is not None and mark.get("complete") is True:
        return local, str(mark["commit"])
    commit = str(mark["commit"]) if mark else commit_of(name, recipe.revision)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"source": name, "wanted": recipe.revision, "commit": commit, "complete": False}
    write_file(folder / MARK, _text(facts))
    _download(name, commit, folder, quiet)
    shutil.rmtree(folder / ".cache" / "huggingface", ignore_errors=True)  # state from which a download resumes
    write_file(folder / MARK, _text({**facts, "complete": True}))
    return local, commit


def _mark(folder: Path) -> dict[str, Any] | None:
    path = folder / MARK
    if not path.is_file():
        return None
    try:
        mark = json.loads(path.read_bytes())
    except ValueError:
        mark = None
    if not isinstance(mark, dict) or not isinstance(mark.get("commit"), str):
        raise SourceError(f"{path} does not say what the folder is a copy of", f"remove {folder}")
    return mark


def _text(facts: dict[str, Any]) -> bytes:
    return (json.dumps(facts, indent=1) + "\n").encode()


def _download(name: str, commit: str, folder: Path, quiet: bool) -> None:
    """Download the files and compare each with the SHA-256 or git hash that the Hub gives."""
    from huggingface_hub import HfApi, snapshot_download, utils

    if quiet or not sys.stderr.isatty():
        utils.disable_progress_bars()  # type: ignore[attr-defined]  # public, but not exported
    with explained(name):
        snapshot_download(name, repo_type="dataset", revision=commit, local_dir=folder, library_name="vitruvian")
        files = HfApi(library_name="vitruvian").dataset_info(name, revision=commit, files_metadata=True).siblings or []
    for file in files:
        path = folder / file.rfilename
        if not path.is_file():
            raise VerificationError(f"{file.rfilename} of {name} was not downloaded", f"remove {folder}")
        expected = file.lfs.sha256 if file.lfs is not None else file.blob_id
        if _hash(path, git=file.lfs is None) != expected:
            raise VerificationError(
                f"{path} does not have the hash that the Hub gives: {short(str(expected))}", f"remove {folder}"
            )


def _hash(path: Path, git: bool) -> str:
    """SHA-256 of a file, or its git blob id, as hexadecimal text."""
    digest = hashlib.sha1(usedforsecurity=False) if git else hashlib.sha256()
    if git:
        digest.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while piece := file.read(STEP):
            digest.update(piece)
    return digest.hexdigest()
