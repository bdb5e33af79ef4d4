"""Digests: a hash of a model's weights that does not depend on the layout.

The elements of each logical tensor and layer are hashed (BLAKE3) in the canonical order of its axes, after a line with
its name, element type and shape. The digest of a checkpoint is the hash over these, sorted by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.assets.trusted import is_read_with_model
from converters.common.manifest import changed_files, check_manifest, dumped, read_manifest, remembered_states, total
from converters.plan.plan import Plan
from formats.checkpoint import MANIFEST
from formats.errors import VerificationError, count, some
from formats.huggingface.language_model import modules_of
from formats.optimizer import CARRIED, STATES


def manifest(plan: Plan, digests: Mapping[str, str], files: Mapping[str, str]) -> bytes:
    """The bytes of the manifest of an output, with which `convert verify OUT` can check it anywhere.

    Args:
        plan: the plan that was executed.
        digests: the digest of each job.
        files: the digests of small files, by their paths from the manifest.
    """
    sections: dict[str, dict[str, Any]] = {"tensors": {}}
    for job in plan.jobs:
        if not job.state or job.state in CARRIED:  # padding belongs to no tensor
            about = {"dtype": job.dtype, "shape": list(job.shape), "blake3": digests[job.name]}
            sections.setdefault("optimizer" if job.state else "tensors", {})[job.name] = about
    source: dict[str, Any] = {"format": plan.source.format, "topology": dict(plan.source.topology)}
    if plan.source.left is not None:
        source["left_out"] = modules_of(plan.source.left)
    weights = total(of_weights(plan, digests))
    facts = {"vitruvian": 1, "digest": weights, "source": source, "settings": plan.spec.settings()}
    if plan.inputs:
        facts["sources"] = [entry.record for entry in plan.inputs]
    return dumped({**facts, "files": dict(files), **sections})


def of_weights(plan: Plan, digests: Mapping[str, str]) -> dict[str, str]:
    """The digests of the weights, without those of optimizer states."""
    return {job.name: digests[job.name] for job in plan.jobs if not job.state}


def same_output(plan: Plan, place: Path) -> dict[str, str] | None:
    """The digests in a folder's manifest, if its settings, tensor names and small files are those of a plan."""
    if plan.target is None or not (place / MANIFEST).is_file():
        return None
    settings, tensors = read_manifest(place) or ({}, {})
    if settings != plan.spec.settings() or tensors.keys() != {job.name for job in plan.jobs}:
        return None
    texts = plan.target.texts.items()
    same = all((place / name).is_file() and (place / name).read_bytes() == text for name, text in texts)
    return tensors if same else None


def check_manifests(plan: Plan) -> None:
    """Compare sources with their manifests, before a byte of the weights is read.

    Small files with the state of a training, such as the settings of an optimizer, are compared if states are moved.

    Raises:
        VerificationError: a source is not what it was when its manifest was written.
    """
    moved = any(job.state for job in plan.jobs)
    for source in plan.sources:
        check_manifest(source)
        if moved and (changed := _changed_state(source.home)):
            raise VerificationError(
                f"{some(changed, 5)} of {source.root} {'is' if len(changed) == 1 else 'are'} not what {MANIFEST} says",
                f"copy it again; or, if that is meant, remove {source.home / MANIFEST}",
            )


def _changed_state(home: Path) -> list[str]:
    """The small files with the state of a training that differ from a folder's manifest, if there is one.

    Files that are read with a model, such as a tokenizer, may be changed by the user, those of the run above the folder
    by its next save, and any may be absent.
    """
    changed = (changed_files(home) if (home / MANIFEST).is_file() else None) or ()
    inside = [name for name in changed if not name.startswith("../") and (home / name).is_file()]
    return [name for name in inside if not is_read_with_model((home / name).name)]


def check_source(plan: Plan, digests: Mapping[str, str]) -> None:
    """Compare the tensors that were read with the manifest of the source, if there is one.

    Not compared are FP32 master weights that are written as the weights, since they were compared with the weights of
    the manifest; tensors that are read as parts of others, which the manifest does not have; and moments in place of
    weights.

    Raises:
        VerificationError: the source is not what it was when its manifest was written.
    """
    _, remembered = read_manifest(plan.source.home) or ({}, {})
    moments = plan.source.settings.weights in STATES[1:]  # moments are read under the names of the weights
    remembered = {} if plan.source.original or moments else {**remembered, **remembered_states(plan.source.home)}
    labels = {job.name: job.label for job in plan.jobs if not (job.edges or (job.twins and not job.state))}
    wrong = [label for name, label in labels.items() if remembered.get(name, digests[name]) != digests[name]]
    if wrong:
        differing = count(len(wrong), "tensor differs", "tensors differ")
        raise VerificationError(
            f"{plan.source.home} is damaged: {differing} from its {MANIFEST}, such as {wrong[0]}",
            f"`convert verify {plan.source.root}` lists them",
        )
