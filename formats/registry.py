"""The list of all formats, and the recognition of the format of a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from formats.deepspeed import MDS, NEOX, ZERO
from formats.errors import RefusedError, SourceError, VitruvianError, some
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
    from formats.huggingface.nanotron import optimizer as nanotron_optimizer
    from formats.megatron import classic, fsdp_dtensor, portable_optimizer, torch_dist

    READERS: tuple[Reader, ...] = (
        folder, fsdp_dtensor, torch_dist, fsdp, mds, neox, zero, classic, mistral, nanotron, maxtext,
    )  # fmt: skip
    TRAININGS: tuple[Training, ...] = (optimizer, fsdp_optimizer, portable_optimizer, nanotron_optimizer)

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (HUGGINGFACE, MEGATRON_FSDP, DIST, FSDP, MDS, NEOX, ZERO, MEGATRON, MISTRAL, NANOTRON, MAXTEXT)
}
"""Every format, by name, in the order in which a folder is compared with them.

A checkpoint that Megatron saves as fsdp_dtensor looks like torch_dist too, one of torch_dist like FSDP too, and its run
folder like that of a classic Megatron run.
"""
KNOWN_TO = {
    name: [form for form in FORMATS.values() if name in form.reader_options]
    for name in dict.fromkeys(name for form in FORMATS.values() for name in form.reader_options)
}
"""Field of `Settings` that not every reader knows: the formats whose readers do."""
ITERATION = re.compile(r"iter_\d+|release")
"""The name of a checkpoint folder in a run of Megatron."""
NUMBER = re.compile(r"\d+")
"""The name of a checkpoint folder in a run of nanotron or MaxText; others have such folders too."""
SHARD = re.compile(r"(model|pytorch_model)-\d{5}-of-\d{5}\.(safetensors|bin)")
"""The name of a shard of a Hugging Face folder, which has an index beside it."""
MODEL = re.compile(
    r"(model|pytorch_model|diffusion_pytorch_model|adapter_model|consolidated)([.-][\w-]+)?(\.\w+)?\.(safetensors|bin|pth)"
    r"|(flax|tf|rust)_model\.\w+|(model|decoder_model)\w*\.onnx|hf_model_\d+_\d+\.pt|(lit_)?model\.(pt|pth)"
    r"|.+\.(gguf|ckpt)|adapter_config\.json"
)
"""The name of a file with a model or an adapter: of the Hub, also without its index, and of formats without a reader
(Flax, TensorFlow, diffusers, Meta, torchtune, LitGPT, Lightning, ONNX, llama.cpp)."""
MOST_FOLDERS = 64
"""Most folders that are searched for checkpoints to name in a hint."""


def format_of(source: Checkpoint) -> Format:
    """The format of a checkpoint."""
    return FORMATS[source.format]


def open_checkpoint(path: Path, settings: Settings | None = None, first: Sequence[Format] = ()) -> Checkpoint:
    """Recognise a checkpoint and read its headers.

    Args:
        path: the folder of the checkpoint.
        settings: the user's settings.
        first: the formats to try before the others, for folders that hold weights in several.

    Raises:
        SourceError: there is nothing, or no known format, at the path; or the checkpoint is damaged.
        UnsupportedError: the checkpoint is valid, but of a kind that has no layout here.
        RefusedError: the folder holds two models, and no setting says which one to read.
    """
    from formats.checkpoint import Settings
    from formats.detect import signs
    from formats.detect.rivals import two_models
    from formats.disk.handle import dangling
    from formats.disk.stamps import noted
    from formats.torch_files.saves import require_one_save

    try:
        if not path.exists():
            raise SourceError(dangling(path) or f"{path} does not exist", downloaded(path))
        if not path.is_dir():
            signs.check_unknown(path)
            hint = f"name its folder: {path.parent}" if is_known(path.parent) else ""
            raise SourceError(f"{path} is a file, a checkpoint is a folder", hint)
        tag = settings.tag if settings else None
        place = path / tag if tag and len(tag) < 256 and Path(tag).name == tag and (path / tag).is_dir() else path
        signs.check(place)
        rivals = two_models(path, is_known) if place == path else None
        if rivals and not first:
            raise RefusedError(*rivals)
        names = {folder: names_in(folder) for folder in dict.fromkeys((place, path))}
        for form in [*first, *FORMATS.values()]:
            if any(form.detect(folder, listing) for folder, listing in names.items()):
                with noted() as stamps:
                    checkpoint = form.reader.read(path, settings or Settings())
                stamps = {file: stamps[file] for file in checkpoint.files if file in stamps}
                checkpoint = replace(checkpoint, settings=settings or checkpoint.settings, stamps=stamps)
                if rivals:
                    notes = (*checkpoint.notes, f"{rivals[0]}: what is read is the one of {form.name}")
                    checkpoint = replace(checkpoint, notes=notes)
                _check_family(checkpoint)
                _check_assets(checkpoint, path)
                require_one_save(checkpoint.home)
                return checkpoint
        entries = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        if isinstance(error, PermissionError) and not os.access(path, os.X_OK):
            raise SourceError(f"{path}: no permission to open files in it", f"chmod u+x {path}, or a+x") from None
        raise SourceError(f"{error.filename or path}: {error.strerror}") from None
    raise _unknown(path, entries)


def _unknown(path: Path, entries: Sequence[str]) -> SourceError:
    """Why a folder with given entries, of no known format, is no checkpoint, and what may be meant.

    Raises:
        SourceError: its config.json is no file.
        UnsupportedError: the folder is of a kind that has no layout here.
    """
    from formats.detect import signs
    from formats.disk.handle import dangling
    from formats.disk.safetensors import file_size
    from formats.fsdp import runs

    if (path / "config.json").exists():
        file_size(path / "config.json")  # an error if it is a folder or a pipe
    sharded = sorted({f"{part[1]}.{part[2]}.index.json" for name in entries if (part := SHARD.fullmatch(name))})
    if sharded:
        return SourceError(
            f"{path} holds shards of a model without their index, {sharded[0]}",
            "it tells which tensor is in which shard: take it from where the shards come from",
        )
    iterations = [name for name in entries if ITERATION.fullmatch(name)]
    if iterations:
        return SourceError(f"{path} holds no latest_checkpointed_iteration.txt", f"name one: {path / iterations[-1]}")
    saves = runs.checkpoints(path, is_known)
    if not saves:
        signs.check_unknown(path)
        saves = _inside(path)
    if saves:
        return SourceError(
            f"{path} holds {len(saves)} checkpoint{'s' if len(saves) > 1 else ''}", f"name one: {saves[0]}"
        )
    for folder in _folders(path):
        signs.check_unknown(folder)
    broken = [said for name in entries if (said := dangling(path / name))]
    if broken:
        return SourceError(f"{path} is not a checkpoint of a known format: {broken[0]}", "download or copy it again")
    return SourceError(
        f"{path} is not a checkpoint of a known format; it contains {some(entries, 6) or 'nothing'}",
        "`convert formats` lists what is read",
    )


def downloaded(path: Path) -> str:
    """The hint for a folder that does not exist: resume its unfinished conversion, or download it from the Hub."""
    partial = Path(f"{path}.partial")
    if partial.is_dir():
        return f"{partial} is that of a conversion that has not ended: run its command again, which resumes it"
    name = path if len(path.parts) == 2 and not path.parent.exists() else "ORG/NAME"
    return f"a model of the Hub has to be downloaded first: hf download {name} --local-dir FOLDER"


def _inside(path: Path) -> list[Path]:
    """The checkpoints in a folder, or in its `snapshots` if it is a model's folder in the cache of the Hub."""
    return [*filter(is_known, _folders(path / "snapshots" if (path / "snapshots").is_dir() else path))]


def _folders(path: Path) -> list[Path]:
    """The first `MOST_FOLDERS` subfolders of a folder, in the order of their names."""
    return list(islice((folder for folder in sorted(path.iterdir()) if folder.is_dir()), MOST_FOLDERS))


def detected(path: Path) -> Format | None:
    """The first format that a folder looks like; None if there is none."""
    names = names_in(path)
    return next((form for form in FORMATS.values() if form.detect(path, names)), None)


def is_known(path: Path) -> bool:
    """Whether a folder is of a known format; False if it cannot be read."""
    try:
        return detected(path) is not None
    except (OSError, SourceError):
        return False


def names_in(path: Path) -> set[str] | None:
    """The names of the entries of a folder and of its subfolders, except for those inside `ASSETS`.

    None where listing them needs requests to a remote store, or is not permitted.
    """
    from formats.checkpoint import ASSETS
    from formats.disk.handle import is_remote

    if is_remote(path):
        return None
    try:
        entries = [*os.scandir(path)]  # tells folders from files without a request for each
        inside = (os.scandir(entry) for entry in entries if entry.name != ASSETS and entry.is_dir())
        return {entry.name for entry in chain(entries, *inside)}
    except OSError:
        return None


def steps(run: Path) -> list[str]:
    """The names of the subfolders of a run that are named like checkpoints; their contents are not read."""
    from formats.fsdp import runs

    names = sorted(path.name for path in run.iterdir() if path.is_dir())
    named = (ITERATION, runs.STEPS, NUMBER)
    return [name for name in names if any(pattern.fullmatch(name) for pattern in named)]


def others_inside(path: Path) -> list[str]:
    """The checkpoints, and the adapters of PEFT, in a checkpoint's folder that are no part of that checkpoint.

    Args:
        path: the folder of a checkpoint, or of a run with one.

    Returns:
        Their paths, relative to the folder. Links lead elsewhere, and are left out.

    Raises:
        OSError: a folder cannot be listed.
    """
    from formats.detect.rivals import ONE_MODEL

    if (path / ONE_MODEL).is_file():
        names = names_in(path)
        forms = [form for form in FORMATS.values() if form.detect(path, names)]
    else:
        forms = [form for form in [detected(path)] if form]
    own = [part for form in forms for part in form.parts(path)]
    found, folders = list[str](), _subfolders(path)
    for folder in folders:  # which grows
        if any(part.is_relative_to(folder) for part in own) or not _is_checkpoint(folder):
            folders += _subfolders(folder)
        else:
            found.append(str(folder.relative_to(path)))
    return sorted(found)


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, a damaged one too, or has a `MODEL`; not the `ASSETS` of a checkpoint."""
    try:
        form = detected(path)
    except VitruvianError:
        return True
    if form not in (None, HUGGINGFACE):  # of the latter, with an index alone it is what is kept for the way back
        return True
    return any(MODEL.fullmatch(child.name) for child in path.iterdir() if child.is_file())


def _subfolders(path: Path) -> list[Path]:
    """The subfolders of a folder, without links."""
    from formats.disk.handle import is_remote

    if is_remote(path):
        return [child for child in path.iterdir() if child.is_dir()]
    return [path / entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]


def _check_assets(checkpoint: Checkpoint, path: Path) -> None:
    """Refuse an assets folder of a run that is a link out of the run, to files that may belong to anyone.

    Raises:
        SourceError: the folder is such a link.
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
    """Check that the user's family table is the one that was stored beside the weights.

    Raises:
        RefusedError: the tables differ, so that elements would be read in another order than they were written in.
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
