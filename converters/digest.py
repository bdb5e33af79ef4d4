"""Digests: a hash of what a model is, whatever the layout that holds it.

The elements of each logical tensor and layer are hashed (BLAKE3) in the canonical order of its axes, after a line that
says its name, element type and shape. The digest of a checkpoint is the hash over these, sorted by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from blake3 import blake3

from converters.plan import Job, Plan
from formats.checkpoint import MANIFEST, Checkpoint
from formats.errors import SourceError, VerificationError, short
from formats.families import family_named
from formats.huggingface import read_json
from formats.optimizer import STATES
from formats.spec import ModelSpec, Verbatim

UNSETTABLE = {"family", "own", "biases"}
"""The settings that `--set` cannot give."""


def hasher(job: Job) -> Any:
    """A hash that has seen the line that says what follows."""
    return blake3(f"{job.name} {job.dtype} {list(job.shape)}\n".encode())


def total(digests: Mapping[str, str]) -> str:
    """The digest of a checkpoint, given that of each of its tensors."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return blake3(lines.encode()).hexdigest()


def manifest(plan: Plan, digests: Mapping[str, str]) -> bytes:
    """What travels with an output so that `convert verify OUT` can check it anywhere."""
    held: dict[str, dict[str, Any]] = {"tensors": {}}
    for job in plan.jobs:
        if not job.state or job.state in STATES:  # padding belongs to no tensor
            about = {"dtype": job.dtype, "shape": list(job.shape), "blake3": digests[job.name]}
            held.setdefault("optimizer" if job.state else "tensors", {})[job.name] = about
    source = {"format": plan.source.format, "topology": dict(plan.source.topology)}
    weights = total(of_weights(plan, digests))
    facts = {"vitruvian": 1, "digest": weights, "source": source, "settings": plan.spec.settings()}
    return (json.dumps({**facts, **held}, indent=1) + "\n").encode()


def of_weights(plan: Plan, digests: Mapping[str, str]) -> dict[str, str]:
    """The digests of the weights alone."""
    return {job.name: digests[job.name] for job in plan.jobs if not job.state}


def read_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, str]] | None:
    """The settings and the digests in a folder's manifest, None without one.

    Raises:
        SourceError: it is no manifest.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    held = read_json(path)
    facts, digests = held.get("settings"), _digests(held.get("tensors"))
    if not isinstance(facts, dict) or digests is None:
        raise SourceError(f"{path} is no manifest of vitruvian")
    return facts, digests


def remembered_states(folder: Path) -> dict[str, str]:
    """The digests of an optimizer in a folder's manifest, none without one.

    Raises:
        SourceError: it is no manifest.
    """
    path = folder / MANIFEST
    digests = _digests(read_json(path).get("optimizer", {})) if path.is_file() else {}
    if digests is None:
        raise SourceError(f"{path} is no manifest of vitruvian")
    return digests


def _digests(tensors: Any) -> dict[str, str] | None:
    """The digest of each tensor of a manifest, None if it is none."""
    if not isinstance(tensors, dict):
        return None
    found = {name: entry.get("blake3") for name, entry in tensors.items() if isinstance(entry, dict)}
    digests = {name: digest for name, digest in found.items() if isinstance(digest, str)}
    return digests if len(digests) == len(tensors) else None


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


def is_verbatim(folder: Path) -> bool:
    """Whether a folder's manifest counts its tensors under their own names."""
    facts, _ = read_manifest(folder) or ({"layers": 0}, {})
    return "layers" not in facts


def contradictions(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Where settings are not those of a manifest, as `name: here | there`; of a map, each of its keys."""
    found = []
    for name, one in here.items():
        other = there.get(name)
        if one == other:
            continue
        ours, theirs = (each if isinstance(each, dict) else {} for each in (one, other))
        keys = [key for key in {**ours, **theirs} if key not in ours or key not in theirs or ours[key] != theirs[key]]
        pairs = [(f"{name}.{key}", ours.get(key), theirs.get(key)) for key in keys] or [(name, one, other)]
        found += [f"{said}: {short(a)} | {short(b)}" for said, a, b in pairs]
    return found


def check_manifest(source: Checkpoint) -> None:
    """Compare what the headers of a source say with the manifest that travels with it, if there is one.

    Only what the manifest records, and what the user has not said (with --set, --config, --family and the like). Names
    follow from the settings of a model that a table describes; a manifest of names says nothing of such a one.

    Raises:
        VerificationError: the source is not what it was when its manifest was written.
    """
    held = read_manifest(source.home)
    if held is None:
        return
    (facts, digests), path = held, source.home / MANIFEST
    spec, said = source.spec, source.settings
    if isinstance(spec, Verbatim) == ("layers" in facts):
        if isinstance(spec, ModelSpec) or said.verbatim or said.config:
            return
        raise VerificationError(
            f"{path} is of a model that a table describes, {short(facts.get('family'))}, and none does now: {spec.why}",
            "correct its config.json, or name its --family; --verbatim carries every tensor under its own name",
        )
    decided = {*said.values, *(["vocab"] if said.vocab_size else [])}
    if isinstance(spec, ModelSpec) and family_named(spec.family).file:
        decided.add("family")
    here = {name: value for name, value in spec.settings().items() if name in facts and name not in decided}
    wrong = {name: value for name, value in here.items() if value != facts[name]}
    if wrong and said.config is None:
        ways = " ".join(f"--set {quote(f'{name}={json.dumps(value)}')}" for name, value in wrong.items())
        raise VerificationError(
            f"{source.root} and {path} differ in settings (here | there): {'; '.join(contradictions(wrong, facts))}",
            f"if that is meant: {'' if wrong.keys() & UNSETTABLE else f'{ways}, or '}remove {path}",
        )
    odd = sorted(spec.shapes.keys() ^ digests.keys()) if isinstance(spec, Verbatim) else []
    if odd:
        raise VerificationError(
            f"{source.root} is damaged: {len(odd)} tensors, such as {odd[0]}, are in it or in {path}, not in both",
            f"`convert verify {source.root}` lists them; if that is meant, remove {path}",
        )


def check_source(plan: Plan, digests: Mapping[str, str]) -> None:
    """Compare what was read with the manifest that travels with the source, if there is one.

    Masters that are written as the weights are not: they were compared with those that the manifest is of.

    Raises:
        VerificationError: the source is not what it was when its manifest was written.
    """
    _, remembered = read_manifest(plan.source.home) or ({}, {})
    remembered = {**remembered, **remembered_states(plan.source.home)}
    kept = [job.name for job in plan.jobs if not (job.edges or (job.twins and not job.state))]
    wrong = [name for name in kept if remembered.get(name, digests[name]) != digests[name]]
    if wrong:
        raise VerificationError(
            f"{plan.source.home} is damaged: {len(wrong)} tensors differ from its {MANIFEST}, such as {wrong[0]}",
            f"`convert verify {plan.source.root}` lists them",
        )
