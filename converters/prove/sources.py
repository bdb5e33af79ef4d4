"""Compare sources with the manifests that the conversions which wrote them left beside their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from converters.assets.trusted import is_read_with_model, refusal_reason
from converters.common.manifest import changed_files, check_manifest, read_manifest, recorded_files, remembered_states
from converters.plan.plan import MASTERS, Job, Plan, Recorded
from formats.checkpoint import ASSETS, MANIFEST, Checkpoint
from formats.errors import VerificationError, count, some
from formats.layout.tensors import TENSORS
from formats.model.spec import ModelSpec, Verbatim
from formats.optimizer import STATES

VOCAB = "vocab"
"""The axis of tensors that have a row for each token, and the setting."""


def check_manifests(plan: Plan) -> None:
    """Compare sources with their manifests, before a byte of the weights is read.

    Files with the state of a training, such as the settings of an optimizer, are compared if states are moved; and of
    an adapter, whose tensors have other names in the manifest.

    Raises:
        VerificationError: a source is not what it was when its manifest was written.
    """
    moved = any(job.state for job in plan.jobs)
    for source in plan.sources:
        check_manifest(source)
        if (moved or source.settings.adapter) and (changed := _changed_state(source.home)):
            raise VerificationError(
                f"{some(changed, 5)} of {source.root} {'is' if len(changed) == 1 else 'are'} not what {MANIFEST} says",
                f"copy it again; or, if that is meant, remove {source.home / MANIFEST}",
            )


def _changed_state(home: Path) -> list[str]:
    """The files with the state of a training that differ from a folder's manifest, if there is one.

    Files that are read with a model, such as a tokenizer, may be changed by the user, those of the run above the folder
    by its next save, and any may be absent.
    """
    changed = (changed_files(home) if (home / MANIFEST).is_file() else None) or ()
    inside = [name for name in changed if not name.startswith("../") and (home / name).is_file()]
    return [name for name in inside if not is_read_with_model((home / name).name)]


def recorded_tensors(source: Checkpoint) -> dict[str, str]:
    """The digests in a source's manifest, of weights and optimizer states; empty if it lists tensors by other names.

    Those of parts of its tensors and of a model that is read with a table, or without one,
    unlike when it was written, have other names. With another vocabulary than when it was written, by the user's
    decision, the tensors with a row for each token are others.
    """
    facts, remembered = read_manifest(source.home) or ({}, {})
    other = isinstance(source.spec, Verbatim) == ("layers" in facts)
    if not facts or other or source.original:
        return {}
    every = {**remembered, **remembered_states(source.home)}
    if not _has_other_vocabulary(source, facts):
        return every
    return {name: digest for name, digest in every.items() if VOCAB not in TENSORS.get(name.rpartition(".")[2], ())}


def _has_other_vocabulary(source: Checkpoint, facts: Mapping[str, Any]) -> bool:
    """Whether a model with a table is read with another vocabulary than the settings in its manifest say."""
    return isinstance(source.spec, ModelSpec) and source.spec.vocab != facts.get(VOCAB, source.spec.vocab)


def compared(plan: Plan, *, unchanged: bool = False) -> Plan:
    """The plan, whose jobs compare what they read with the manifests of the sources where they change the values.

    `check_source` compares what is written as it is read, without a further hash; with `unchanged` these jobs compare
    too, if they read all of a tensor. The names of an adapter inside a checkpoint are others. Never compared are sums,
    products of an adapter, quantized weights, and moments in place of weights: no manifest has their digests.
    """
    homes = {path: source.home for source in plan.sources for path in source.files}
    known = {source.home: recorded_tensors(source) for source in plan.sources if not source.settings.adapter}
    if not any(known.values()):
        return plan

    def noted(read: Job) -> Job:
        part = next(iter(read.sources), None)
        if part is None or read.moment or (read.partial and read.replicas) or not is_stored(read):
            return read
        name = f"{MASTERS}.{read.name}" if read.twins and not read.state else read.name
        digest = known.get(homes.get(part.fragment.path, Path()), {}).get(name)
        return replace(read, recorded=Recorded(name, digest)) if digest else read

    def changing(job: Job) -> Job:
        if not (job.edges or unchanged):
            return job
        terms = tuple(term._replace(job=noted(term.job)) for term in job.terms)
        return replace(job, terms=terms) if terms else noted(job)

    return replace(plan, jobs=tuple(map(changing, plan.jobs)))


def is_stored(read: Job) -> bool:
    """Whether the elements that a job reads are in files, and not computed from what is there."""
    fragments = [part.fragment for part in read.sources]
    every = (piece for fragment in fragments for piece in (fragment, *(inner for _, inner in fragment.pieces)))
    return not any(piece.scales or piece.product or piece.coded or piece.chunk for piece in every)


def manifest_notes(plan: Plan) -> Iterator[str]:
    """Notes on what is carried from sources though their manifests contradict it, or do not tell."""
    for source in plan.sources:
        if not (source.home / MANIFEST).is_file() or source.settings.adapter:
            continue
        changed = [] if source.settings.config else [*_changed_assets(source.home), *unrecorded_assets(source.home)]
        if changed:
            yield (
                f"{some(changed, 5)} of {source.root}: not what {MANIFEST} says, and carried as it is; "
                f"`convert assets {source.root} --from {source.root}` records a change that is meant"
            )
        if not recorded_tensors(source):
            yield (
                f"the weights are not compared with {MANIFEST} of {source.root}, which lists them by other names: "
                f"`convert verify {source.root}` does"
            )
        elif _has_other_vocabulary(source, facts := (read_manifest(source.home) or ({}, {}))[0]):
            yield (
                f"what has a row for each token is not compared with {MANIFEST} of {source.root}, which is of a "
                f"vocabulary of {facts[VOCAB]}, and {source.spec.vocab} are read"
            )


def _changed_assets(home: Path) -> Iterator[str]:
    """The files that are read with a model and that differ from a folder's manifest."""
    for name in changed_files(home, ["files"]) or ():
        if is_read_with_model(PurePath(name).name) and (home / name).is_file():
            yield PurePath(name).name


def unrecorded_assets(home: Path) -> list[str]:
    """The files that are read with a model beside those that a folder's manifest records, and that it does not."""
    recorded = [name for name in recorded_files(home) if is_read_with_model(PurePath(name).name)]
    folders = {home / PurePath(name).parent for name in recorded if name[:3] != "../" or ASSETS in PurePath(name).parts}
    known = {home / name for name in recorded}
    return sorted(
        path.name
        for folder in folders
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_file() and is_read_with_model(path.name) and not refusal_reason(path) and path not in known
    )


def unrecorded(checkpoint: Checkpoint) -> list[str]:
    """The files that programs read as parts of a model and that its manifest is not about."""
    weights = checkpoint.home.glob("*.safetensors")
    return [*unrecorded_assets(checkpoint.home), *sorted(path.name for path in {*weights} - {*checkpoint.files})]


def check_source(plan: Plan, digests: Mapping[str, str]) -> None:
    """Compare the tensors that were read with the manifest of the source, if there is one.

    Not compared are FP32 master weights that are written as the weights, since they were compared with the weights of
    the manifest; tensors that are read as parts of others, which the manifest does not have; and moments in place of
    weights.

    Raises:
        VerificationError: the source is not what it was when its manifest was written.
    """
    moments = plan.source.settings.weights in STATES[1:]  # moments are read under the names of the weights
    remembered = {} if moments else recorded_tensors(plan.source)
    labels = {job.name: job.label for job in plan.jobs if not (job.edges or (job.twins and not job.state))}
    wrong = [label for name, label in labels.items() if remembered.get(name, digests[name]) != digests[name]]
    if wrong:
        differing = count(len(wrong), "tensor differs", "tensors differ")
        raise VerificationError(
            f"{plan.source.home} is damaged: {differing} from its {MANIFEST}, such as {wrong[0]}",
            f"`convert verify {plan.source.root}` lists them",
        )
