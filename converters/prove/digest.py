"""Digests: a hash of a model's weights that does not depend on the layout.

The elements of each logical tensor and layer are hashed (BLAKE3) in the canonical order of its axes, after a line with
its name, element type and shape. The digest of a checkpoint is the hash over these, sorted by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from converters.assets.trusted import is_read_with_model
from converters.common.atomic import write_file
from converters.common.manifest import (
    archive_names,
    archive_sums,
    bare_digests,
    dumped,
    read_manifest,
    recorded_files,
    small_digests,
    total,
)
from converters.plan.plan import Plan, name_in
from formats.checkpoint import ASSETS, MANIFEST, Target
from formats.disk.json_file import read_json
from formats.huggingface.language_model import modules_of
from formats.optimizer import CARRIED

STATE_FILE = ".pt"
"""The suffix of small files that hold the state of a training."""


def manifest(plan: Plan, target: Target, digests: Mapping[str, str], root: Path, weights: Path) -> bytes:
    """The bytes of the manifest of an output, with which `convert verify OUT` can check it anywhere.

    Args:
        plan: the plan that was executed.
        target: its target.
        digests: the digest of each job.
        root: the folder of the output, with its small files.
        weights: the folder of the output, with its weight files; a path in a store, if they were sent there.
    """
    sections: dict[str, dict[str, Any]] = {"tensors": {}}
    for job in plan.jobs:
        if not job.state or job.state in CARRIED:  # padding belongs to no tensor
            about = {"dtype": job.dtype, "shape": list(job.shape), "blake3": digests[job.name]}
            sections.setdefault("optimizer" if job.state else "tensors", {})[job.name] = about
    source: dict[str, Any] = {"format": plan.source.format, "topology": dict(plan.source.topology)}
    if plan.source.left is not None:
        source["left_out"] = modules_of(plan.source.left)
    whole = total(of_weights(plan, digests))
    facts = {"vitruvian": 1, "digest": whole, "source": source, "settings": plan.spec.settings()}
    if plan.inputs:
        facts["sources"] = [entry.record for entry in plan.inputs]
    trained = any(job.state for job in plan.jobs)
    return dumped({**facts, **_files(target, root, weights if trained else None), **sections})


def _files(target: Target, root: Path, trained: Path | None) -> dict[str, dict[str, str]]:
    """The sections of a manifest on files.

    Parameter groups, step and schedule of a training are pickled in some of its archives, and no digest of a tensor has
    these. `trained` is the folder with the archives of an output that has an optimizer.
    """
    home = root / target.home
    small = sorted(name for name in {*target.texts, *target.copies} if _is_remembered(PurePath(name), target))
    digests = small_digests(home, [os.path.relpath(f"/{name}", f"/{target.home}") for name in small])
    sections = {"files": digests | bare_digests(home, target.files)}
    if trained is not None:
        sections["archives"] = archive_sums(trained / target.home, archive_names(home, target.files))
    return sections


def _is_remembered(name: PurePath, target: Target) -> bool:
    """Whether a manifest records a small file: one that is read with a model, or what is written beside the weights.

    Trackers beside the folder of the manifest are written again by a training that resumes.
    """
    written = str(name) in target.texts or name.suffix == STATE_FILE
    return is_read_with_model(name.name) or (written and name.is_relative_to(target.home))


def record_files(folder: Path, names: Iterable[str]) -> None:
    """Record the present digests of files that are read with a model in its manifest, if there is one.

    The manifest is in the folder of the files, or in that of the weights in it, or beside it. What it records of a
    training stays.
    """
    beside = folder.parent.glob(f"*/{MANIFEST}") if folder.name == ASSETS else folder.glob(f"*/{MANIFEST}")
    for path in [folder / MANIFEST] if (folder / MANIFEST).is_file() else beside:
        prefix = "" if path.parent == folder else f"../{ASSETS}/" if folder.name == ASSETS else "../"
        recorded = recorded_files(path.parent)
        if not any(name.startswith(prefix) for name in recorded):
            continue
        kept = {name: digest for name, digest in recorded.items() if not is_read_with_model(PurePath(name).name)}
        digests = small_digests(path.parent, sorted(f"{prefix}{name}" for name in names))
        write_file(path, dumped({**read_json(path), "files": {**digests, **kept}}))


def of_weights(plan: Plan, digests: Mapping[str, str]) -> dict[str, str]:
    """The digests of the weights, without those of optimizer states."""
    return {job.name: digests[job.name] for job in plan.jobs if not job.state}


def same_output(plan: Plan, place: Path) -> dict[str, str] | None:
    """The digests in a folder's manifest, if its settings, tensor names, small files and sizes are those of a plan."""
    if plan.target is None or not (place / MANIFEST).is_file():
        return None
    settings, tensors = read_manifest(place) or ({}, {})
    if settings != plan.spec.settings() or tensors.keys() != {job.name for job in plan.jobs}:
        return None
    sizes = {place / name_in(file): file.size for file in plan.target.files}
    if not all(path.is_file() and path.stat().st_size == size for path, size in sizes.items()):
        return None
    small = [*plan.target.texts.items(), *((name, path.read_bytes()) for name, path in plan.target.copies.items())]
    same = all((place / name).is_file() and (place / name).read_bytes() == content for name, content in small)
    return tensors if same else None
