"""Which formats there are, and how one is recognised."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from formats.deepspeed import MDS, NEOX, ZERO
from formats.errors import RefusedError, SourceError, some
from formats.format import Format
from formats.fsdp import FSDP
from formats.huggingface import HUGGINGFACE, MAXTEXT, MISTRAL, NANOTRON
from formats.megatron import DIST, MEGATRON, MEGATRON_FSDP

if TYPE_CHECKING:  # mypy sees that the modules of the formats are what `Format` says
    from formats.checkpoint import Checkpoint, Settings
    from formats.deepspeed import optimizer, zero
    from formats.deepspeed.mds import checkpoint as mds
    from formats.deepspeed.neox import checkpoint as neox
    from formats.format import Reader, Training
    from formats.fsdp import checkpoint as fsdp
    from formats.fsdp import optimizer as fsdp_optimizer
    from formats.huggingface import folder
    from formats.huggingface.maxtext import checkpoint as maxtext
    from formats.huggingface.mistral import folder as mistral
    from formats.huggingface.nanotron import checkpoint as nanotron
    from formats.megatron import classic, fsdp_dtensor, portable_optimizer, torch_dist

    READERS: tuple[Reader, ...] = (
        folder, fsdp_dtensor, torch_dist, fsdp, mds, neox, zero, classic, mistral, nanotron, maxtext,
    )  # fmt: skip
    TRAININGS: tuple[Training, ...] = (optimizer, fsdp_optimizer, portable_optimizer)

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (HUGGINGFACE, MEGATRON_FSDP, DIST, FSDP, MDS, NEOX, ZERO, MEGATRON, MISTRAL, NANOTRON, MAXTEXT)
}
"""Every format, by name.

They are tried in this order. What Megatron saves as fsdp_dtensor would pass for torch_dist, that for FSDP, and its run
for a classic one.
"""
KNOWN_TO = {
    name: [form for form in FORMATS.values() if name in form.reader_options]
    for name in dict.fromkeys(name for form in FORMATS.values() for name in form.reader_options)
}
"""Setting of a reader: the formats that know it, of those that not every format knows."""
ITERATION = re.compile(r"iter_\d+|release")
"""Folders of a run of Megatron, each a checkpoint."""
MOST_FOLDERS = 64
"""How many folders are looked into for a hint."""


def format_of(source: Checkpoint) -> Format:
    """The format of a checkpoint."""
    return FORMATS[source.format]


def open_checkpoint(path: Path, settings: Settings | None = None, first: Sequence[Format] = ()) -> Checkpoint:
    """Recognise a checkpoint and read its headers.

    Args:
        path: its folder.
        settings: what the user said.
        first: the formats to try before the others, for folders that hold weights in several.

    Raises:
        SourceError: there is nothing, or nothing known, at the path; or what is there is damaged.
        UnsupportedError: it is sound, but of a kind that has no layout here.
        RefusedError: it holds two models, and nobody said which.
    """
    from formats.checkpoint import Settings
    from formats.detect import signs
    from formats.detect.rivals import require_one
    from formats.torch_files.saves import require_one_save

    try:
        if not path.exists():
            raise SourceError(f"{path} does not exist", downloaded(path))
        if not path.is_dir():
            signs.check_unknown(path)
            hint = f"name its folder: {path.parent}" if is_known(path.parent) else ""
            raise SourceError(f"{path} is a file, a checkpoint is a folder", hint)
        tag = settings.tag if settings else None
        place = path / tag if tag and Path(tag).name == tag and (path / tag).is_dir() else path
        signs.check(place)
        if place == path and not first:
            require_one(path, is_known)
        names = {folder: names_in(folder) for folder in dict.fromkeys((place, path))}
        for form in [*first, *FORMATS.values()]:
            if any(form.detect(folder, listing) for folder, listing in names.items()):
                checkpoint = form.reader.read(path, settings or Settings())
                checkpoint = replace(checkpoint, settings=settings or checkpoint.settings)
                _check_family(checkpoint)
                _check_assets(checkpoint, path)
                require_one_save(checkpoint.home)
                return checkpoint
        entries = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise SourceError(f"{error.filename or path}: {error.strerror}") from None
    from formats.fsdp import runs

    iterations = [name for name in entries if ITERATION.fullmatch(name)]
    if iterations:
        raise SourceError(f"{path} holds no latest_checkpointed_iteration.txt", f"name one: {path / iterations[-1]}")
    saves = runs.checkpoints(path, is_known)
    if not saves:
        signs.check_unknown(path)
        saves = _inside(path)
    if saves:
        raise SourceError(
            f"{path} holds {len(saves)} checkpoint{'s' if len(saves) > 1 else ''}", f"name one: {saves[0]}"
        )
    for folder in _folders(path):
        signs.check_unknown(folder)
    raise SourceError(
        f"{path} is not a checkpoint of a known format; it contains {some(entries, 6) or 'nothing'}",
        "`convert formats` lists what is read",
    )


def downloaded(path: Path) -> str:
    """How a folder comes to be that is not there: by its conversion to the end, or from the Hub."""
    begun = Path(f"{path}.partial")
    if begun.is_dir():
        return f"{begun} is that of a conversion that has not ended: run its command again, which resumes it"
    name = path if len(path.parts) == 2 and not path.parent.exists() else "ORG/NAME"
    return f"a model of the Hub has to be downloaded first: hf download {name} --local-dir FOLDER"


def _inside(path: Path) -> list[Path]:
    """Checkpoints in a folder that is none itself, or in the snapshots of a folder of the Hub's cache."""
    return [*filter(is_known, _folders(path / "snapshots" if (path / "snapshots").is_dir() else path))]


def _folders(path: Path) -> list[Path]:
    """The folders in a folder, as many as are looked into."""
    return list(islice((folder for folder in sorted(path.iterdir()) if folder.is_dir()), MOST_FOLDERS))


def detected(path: Path) -> Format | None:
    """The format that a folder looks like."""
    names = names_in(path)
    return next((form for form in FORMATS.values() if form.detect(path, names)), None)


def is_known(path: Path) -> bool:
    """Whether a folder is of a known format; what cannot be looked into is none."""
    try:
        return detected(path) is not None
    except (OSError, SourceError):
        return False


def names_in(path: Path) -> set[str] | None:
    """The names of what is in a folder and in its folders, but for that of the config and tokenizer of a run.

    None where to list them takes requests, or is not allowed.
    """
    from formats.checkpoint import ASSETS
    from formats.disk.handle import is_elsewhere

    if is_elsewhere(path):
        return None
    try:
        entries = [*os.scandir(path)]  # tells folders from files without a request for each
        inside = (os.scandir(entry) for entry in entries if entry.name != ASSETS and entry.is_dir())
        return {entry.name for entry in chain(entries, *inside)}
    except OSError:
        return None


def steps(run: Path) -> list[str]:
    """The folders of a run whose names are those of checkpoints, whatever is in them."""
    from formats.fsdp import runs

    names = sorted(path.name for path in run.iterdir() if path.is_dir())
    return [name for name in names if ITERATION.fullmatch(name) or runs.STEPS.fullmatch(name)]


def _check_assets(checkpoint: Checkpoint, path: Path) -> None:
    """The folder of config and tokenizer that was found in a run is in it: a link there may be anybody's.

    Raises:
        SourceError: it is a link that leads elsewhere.
    """
    assets = checkpoint.assets
    if assets is None or assets in (path, checkpoint.settings.config) or not assets.is_symlink():
        return
    if not assets.resolve().is_relative_to(path.resolve()):
        raise SourceError(
            f"{assets} is a link to {assets.resolve()}, which is not in {path}",
            f"if it is meant: --config {assets.resolve()}",
        )


def _check_family(checkpoint: Checkpoint) -> None:
    """The table of the user's own that travelled with the weights is the one that was named.

    Raises:
        RefusedError: it is another one, and what is read with it would be in another order than what was written.
    """
    from formats.families import FAMILIES
    from formats.families.family import FAMILY_FILE

    family, own_file = FAMILIES.get(checkpoint.spec.family), (checkpoint.assets or checkpoint.root) / FAMILY_FILE
    named = family.file if family else None
    if named is not None and own_file.is_file() and own_file.read_bytes() != named.read_bytes():
        raise RefusedError(
            f"{checkpoint.root} was written with {own_file}, and {named} says something else",
            f"name that file with --family, or write the checkpoint again; remove {own_file} if it is wrong",
        )
