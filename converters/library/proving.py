"""Show that nothing was lost: digests, comparisons with a manifest or another checkpoint, differences."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.assets.trusted import is_read_with_model
from converters.common.manifest import (
    absent_run,
    changed_files,
    completed,
    contradictions,
    is_verbatim,
    read_manifest,
    recorded_files,
    remembered_states,
    total,
)
from converters.library.effects import Effects, own_config
from converters.library.options import Effort, Place, Reading, checked, known_family, limits_of, path_of, settings_of
from converters.move.engine import digest_of
from converters.move.journal import Share
from converters.plan.agreement import APART, file_differences, setting_differences
from converters.plan.names import with_same_names
from converters.plan.plan import Job, Plan
from converters.plan.targets import plan_reading
from converters.prove.archive_crc import check
from converters.prove.belonging import has_optimizer
from converters.prove.diff import Difference, compare
from converters.prove.resumed import digests, has_journal, journal_of
from converters.prove.sources import unrecorded
from converters.prove.unread import unread
from formats.checkpoint import ASSETS, MANIFEST, Checkpoint
from formats.errors import OptionNeededError, SourceError, UsageError, VerificationError, count, some
from formats.huggingface import folder as huggingface
from formats.model.spec import ModelSpec, Spec, Verbatim

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from formats.families.family import Family

UNCOMPARED_OPTIMIZER = "the weights were compared, the optimizer was not"
UNCOMPARED_FILES = (
    "its manifest, of an earlier version, names no small files: tokenizer, template and what no table knows of "
    "config.json were not compared"
)
OWN_NAMES = (
    "the digest of a {}, which no table describes, is that of its tensors under the names that they have here: compare "
    "it with one of the same format, or two checkpoints with `convert diff`"
)
"""Note on the digest of a model whose tensors may have other names in memory than in files."""


class Proving(Reading, Effort, total=False):
    """Options of a proof."""


@dataclass(frozen=True)
class Digest:
    """The hash of a checkpoint's weights, and of each logical tensor.

    Attributes:
        digest: the hash, of a model with a table the same in every format and topology.
        tensors: the hash of each logical tensor.
        notes: what the hash cannot be compared with.
    """

    digest: str
    tensors: dict[str, str]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record that `convert digest --json` prints."""
        return {"digest": self.digest, "tensors": self.tensors, "notes": [*self.notes]}


@dataclass(frozen=True)
class Verified:
    """The comparison of a checkpoint with its manifest, or with another checkpoint in any format.

    Attributes:
        out: the checkpoint.
        name: the manifest or checkpoint that it was compared with.
        tensors: how many logical tensors were compared.
        digest: the hash of the checkpoint's weights.
        against: the hash of the other side's weights.
        settings: settings that differ, as `name: here | there`.
        differing: names of the logical tensors that differ, or that one side lacks.
        notes: what was not compared, or does not count.
        files: small files that are not those that the manifest records, such as a tokenizer, or the settings of an
            optimizer.
        damaged: sentences on what no tensor was compared of, such as rows of vocabulary padding, and is not what was
            written, by the checksums of the files.
    """

    out: Path
    name: str
    tensors: int
    digest: str
    against: str
    settings: tuple[str, ...]
    differing: tuple[str, ...]
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.settings or self.differing or self.files or self.damaged)

    def require(self, hint: str = "") -> None:
        """Raise an error if something differs.

        Raises:
            VerificationError: settings, tensors or files differ, or a file is damaged.
        """
        if self.settings:
            settings = "; ".join(self.settings)
            raise VerificationError(f"{self.out} and {self.name} differ in settings (here | there): {settings}")
        if self.differing:
            names = ", ".join(self.differing[:5]) + (" …" if len(self.differing) > 5 else "")
            raise VerificationError(
                f"{len(self.differing)} of {self.tensors} tensors of {self.out} differ from {self.name}: {names}", hint
            )
        if self.damaged:
            parts = count(len(self.damaged), "part is", "parts are")
            raise VerificationError(
                f"{self.out} is damaged: {parts} not what was written: {some(self.damaged, 3)}", "copy it again"
            )
        if self.files:
            differ = "is" if len(self.files) == 1 else "are"
            place = self.out / ASSETS if (self.out / ASSETS).is_dir() else self.out
            recorded = f"; or, if that is meant, `convert assets {place} --from {place}` records it"
            raise VerificationError(
                f"{some(self.files, 5)} of {self.out} {differ} not what {self.name} says",
                "copy it again" + recorded * all(is_read_with_model(Path(name).name) for name in self.files),
            )

    def to_dict(self) -> dict[str, Any]:
        """The record that `convert verify --json` prints."""
        sides = {"equal": self.equal, "digest": self.digest, "against": self.against}
        lists = {"settings": list(self.settings), "differing": list(self.differing), "files": list(self.files)}
        return {**sides, **lists, "damaged": list(self.damaged)}


@dataclass(frozen=True)
class Differences:
    """The differences between two checkpoints.

    Attributes:
        tensors: the tensors that differ, by their logical names.
        settings: the settings that differ, as `name: one | two`.
        compared: how many tensors the first has.
        keys: the Hugging Face key of each logical tensor, with `{layer}` and `{expert}`; none for a model without a
            table.
        config: keys of config.json that no tensor depends on and that differ, as `name: one | two`. They do not count.
        notes: what was not compared.
    """

    tensors: tuple[Difference, ...]
    settings: tuple[str, ...]
    compared: int
    keys: Mapping[str, str] = field(default_factory=dict)
    config: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def place_of(self, name: str) -> tuple[str, str]:
        """The logical tensor and the layer of a tensor such as `up.3`; the name itself and "" without a table."""
        tensor, _, layer = name.partition(".")
        return (tensor, layer) if tensor in self.keys and (layer.isdecimal() or tensor == name) else (name, "")

    def key_of(self, name: str) -> str:
        """The Hugging Face key of a tensor of one layer, such as `up.3`."""
        tensor, layer = self.place_of(name)
        return self.keys[tensor].replace("{layer}", layer).replace("{expert}", "*") if tensor in self.keys else name

    @property
    def equal(self) -> bool:
        """Whether no setting and no tensor differs."""
        return not (self.settings or self.tensors)

    def __bool__(self) -> bool:
        """Whether there are differences."""
        return not self.equal

    def to_dict(self) -> dict[str, Any]:
        """The record that `convert diff --json` prints."""
        tensors = [
            {"name": tensor.name, "key": self.key_of(tensor.name), "what": tensor.what, "elements": tensor.count,
             "largest": tensor.largest} for tensor in self.tensors
        ]  # fmt: skip
        return {
            "equal": self.equal, "settings": list(self.settings), "config": list(self.config), "tensors": tensors,
        }  # fmt: skip


# --- what the commands do --------------------------------------------------------------------------------------------


def digest_with(source: Checkpoint, effects: Effects) -> Digest:
    """The digests of an opened checkpoint."""
    digests = _hashed(plan_reading(source).jobs, effects)
    notes = (OWN_NAMES.format(source.spec.family),) if isinstance(source.spec, Verbatim) else ()
    return Digest(total(digests), digests, notes)


def verify_with(out: Path, src: Path | None, effects: Effects, share: Share | None = None) -> Verified:
    """Compare a checkpoint with its manifest, or with another one.

    Args:
        out: the checkpoint.
        src: the other checkpoint, None for the manifest.
        effects: how checkpoints are opened and read.
        share: the part of the tensors that is read here; the call without a share reads what no share has read, and
            finishes.

    Raises:
        SourceError: there is no manifest.
        OptionNeededError: the manifest is of a model with a table, and no config tells which.
        UsageError: the manifest is of a model without a table, and with a config or setting it is one with a table.
        VerificationError: the manifest is of a model that a table described, and no table does now.
        Interrupted: a signal came while a journal is kept; the same call resumes.
    """
    if src is not None:
        return _verify_with_source(out, src, effects)
    settings = own_config(out, effects.settings)
    settings = replace(settings, verbatim=settings.verbatim or is_verbatim(out), without_buffers=True, own_names=True)
    checkpoint = effects.open(out, settings)
    remembered = read_manifest(checkpoint.home)
    if remembered is None:
        raise SourceError(
            f"{checkpoint.home} holds no {MANIFEST}", f"compare it with its source: convert verify {out} SRC"
        )
    facts, against = remembered
    if facts.get("family") != checkpoint.spec.family:  # the names in it may be those of a config
        checkpoint = effects.open(out, replace(settings, own_names=False))
    if isinstance(checkpoint.spec, Verbatim) and "layers" in facts and checkpoint.config is None:
        raise OptionNeededError(
            f"{out} has no config.json, and {MANIFEST} is of a model that a table describes", "add --config BASE"
        )
    if isinstance(checkpoint.spec, Verbatim) and "layers" in facts and not settings.verbatim:
        raise VerificationError(
            f"{out} is of a model that a table described when {MANIFEST} was written, and none does now: "
            f"{checkpoint.spec.why}",
            "correct its config.json",
        )
    if isinstance(checkpoint.spec, ModelSpec) and "layers" not in facts:
        raise UsageError(
            f"{checkpoint.home / MANIFEST} has every tensor under its own name, and with a config they are those of a "
            f"{checkpoint.spec.family}",
            f"leave {'--set' if effects.settings.values else 'the config'} out, or compare it with its source: "
            f"convert verify {out} SRC",
        )
    differing = contradictions(checkpoint.spec.settings(), completed(facts, checkpoint.spec))
    changed = changed_files(checkpoint.home)
    notes = [UNCOMPARED_FILES] if changed is None else []
    if absent := absent_run(checkpoint.home, recorded_files(checkpoint.home)):
        notes.append(f"{checkpoint.home} is without the run around it: not compared is {some(absent, 4)}")
    if beside := unrecorded(checkpoint):
        notes.append(f"{some(beside, 5)} of {out}: not in {MANIFEST}, and programs may take it for a part of the model")
    states = remembered_states(checkpoint.home)
    read = partial(_resumed, out, effects, share) if share or has_journal(out) else None
    verified = _verified(checkpoint, out, MANIFEST, {**against}, states, differing, notes, effects, read)
    if read and share is None:
        shutil.rmtree(journal_of(out))
    return replace(verified, files=tuple(changed or ()))


def _resumed(out: Path, effects: Effects, share: Share | None, plan: Plan) -> dict[str, str]:
    """The digests of a checkpoint's tensors, or of a share of them, with journals that resume an interrupted run."""
    with effects.progress(
        "hashing", sum(job.nbytes for job in (share.jobs(plan.jobs) if share else plan.jobs))
    ) as tell:
        return digests(out, plan, effects.limits, share, tell.advance)


def _verify_with_source(out: Path, src: Path, effects: Effects) -> Verified:
    checkpoint = effects.open(out, own_config(out, effects.settings), alone=False)
    source = effects.open_beside(src, out, checkpoint)
    checkpoint, source = with_same_names(checkpoint, source)
    differing = setting_differences(checkpoint, source)
    jobs = plan_reading(source).jobs
    here, there = (sorted(set(side.dtypes().values())) for side in (checkpoint, source))
    cast = (
        f"{out} is {', '.join(here)} and {src} {', '.join(there)}: what was cast differs; `convert verify {out}` "
        "compares it with what was written"
    )
    notes = [cast] * (here != there)
    if others := file_differences(checkpoint, source):
        notes.append(f"{APART} (here | there): {some(others, 6)}")
    return _verified(checkpoint, out, str(src), _hashed(jobs, effects), None, differing, notes, effects)


def _verified(
    checkpoint: Checkpoint,
    out: Path,
    name: str,
    against: dict[str, str],
    states: dict[str, str] | None,
    settings: list[str],
    notes: list[str],
    effects: Effects,
    read: Callable[[Plan], dict[str, str]] | None = None,
) -> Verified:
    """Compare the digests of a checkpoint, and of its optimizer states where `states` are known, with recorded ones.

    `read` computes the digests, if not all tensors are to be read from the first to the last; tensors that it leaves
    out, as for a share, are not compared. Of what the digests leave out, the checksums of the files are compared, with
    states None of the entries that weights are in.
    """
    from converters.plan.state_jobs import state_jobs
    from converters.plan.training_state import training_of, with_parameters

    plan, there = plan_reading(checkpoint), {**against, **(states or {})}
    apart = dict[str, Checkpoint]()
    weights = {job.name for job in plan.jobs}
    if states:
        written = with_parameters(checkpoint, {name.partition(".")[2] for name in states})
        optimizer_states, _ = training_of(checkpoint).states(written)
        apart = {state: of for state, of in optimizer_states.items() if not _are_weights(of, checkpoint)}
        plan = replace(plan, jobs=(*plan.jobs, *state_jobs(checkpoint, apart)))
    elif has_optimizer(checkpoint):
        notes = [UNCOMPARED_OPTIMIZER, *notes]
    here = read(plan) if read else _hashed(plan.jobs, effects, checked=False)  # a digest proves more than a CRC-32
    left_out = {job.name for job in plan.jobs} - here.keys()
    wrong = sorted(tensor for tensor in {*here, *there} - left_out if here.get(tensor) != there.get(tensor))
    counted = len({*here, *there} - left_out)
    totals = total({name: digest for name, digest in here.items() if name in weights}), total(against)
    read_of = [checkpoint, *apart.values()]
    faults = () if left_out else _damaged(read_of, plan.jobs, effects, others=states is not None)
    return Verified(out, name, counted, *totals, tuple(settings), tuple(wrong), tuple(notes), damaged=faults)


def _damaged(checkpoints: list[Checkpoint], jobs: Iterable[Job], effects: Effects, *, others: bool) -> tuple[str, ...]:
    """Sentences on the members of archives that digests leave out (`unread`) and whose CRC-32 differs."""
    limits = effects.limits
    paths, is_checked = unread(checkpoints, jobs, copies=limits.replicas == "verify", others=others)
    if not paths:
        return ()
    with effects.progress("checking", sum(path.stat().st_size for path in paths)) as progress:
        return check(paths, limits.threads, progress.advance, is_checked).damaged


def _are_weights(state: Checkpoint, checkpoint: Checkpoint) -> bool:
    """Whether an optimizer state is the weights themselves, as master weights may be: they are compared as weights."""
    return {id(placed.fragment) for placed in state.tensors} <= {id(placed.fragment) for placed in checkpoint.tensors}


def diff_with(one: Path, two: Path, effects: Effects, *, measured: bool = False) -> Differences:
    """The differences between two checkpoints of any formats, tensor by tensor; `measured`: with distances."""
    first = effects.open_beside(one, two)
    second = effects.open_beside(two, one, first)
    first, second = with_same_names(first, second)
    left, right = plan_reading(first), plan_reading(second)
    with effects.progress("comparing", left.nbytes) as progress:
        differing = compare(left, right, effects.limits, progress.advance, measured=measured)
    keys, settings = _keys(second.spec) | _keys(first.spec), tuple(setting_differences(first, second))
    notes = (UNCOMPARED_OPTIMIZER,) if has_optimizer(first) or has_optimizer(second) else ()
    others = tuple(file_differences(first, second))
    return Differences(tuple(differing), settings, len(left.jobs), keys, others, notes)


def _keys(spec: Spec) -> dict[str, str]:
    """The Hugging Face key of each logical tensor of a model."""
    if isinstance(spec, Verbatim):
        return {}
    slots = huggingface.model_slots(spec)
    return {tensor: slot.rule.spellings[0] for slot in reversed(slots) for tensor in slot.rule.pattern.tensors}


def _hashed(jobs: Iterable[Job], effects: Effects, checked: bool = True) -> dict[str, str]:
    every = list(jobs)
    with effects.progress("hashing", sum(job.nbytes for job in every)) as progress:
        return digest_of(every, effects.limits, progress.advance, checked=checked)


# --- the library -----------------------------------------------------------------------------------------------------


def digest(src: Place, **options: Unpack[Proving]) -> Digest:
    """The hash of the weights, of a model with a table the same in every format and topology.

    All weights are read once.

    Args:
        src: the folder of a checkpoint.
        options: by the flags of `convert digest`.

    Raises:
        SourceError: the checkpoint cannot be read, is damaged or incomplete.
        VerificationError: copies of a tensor in the checkpoint differ.
    """
    stated = checked(options, Proving.__optional_keys__)
    with known_family(stated) as family:
        effects = _effects(stated, family)
        return digest_with(effects.open(path_of(src, "src"), effects.settings), effects)


def verify(out: Place, src: Place | None = None, **options: Unpack[Proving]) -> Verified:
    """Compare a checkpoint with its manifest, or with another one in any format; both are read once.

    Args:
        out: the folder of a checkpoint that Vitruvian wrote, or with `src` of any checkpoint.
        src: the folder of the other checkpoint; None for the manifest.
        options: by the flags of `convert verify`.

    Raises:
        VerificationError: settings, tensors or small files differ, or what no digest is of is damaged.
        SourceError: a checkpoint cannot be read, or there is no manifest.
    """
    stated = checked(options, Proving.__optional_keys__)
    with known_family(stated) as family:
        other = None if src is None else path_of(src, "src")
        verified = verify_with(path_of(out, "out"), other, _effects(stated, family))
    verified.require()
    return verified


def diff(one: Place, two: Place, **options: Unpack[Proving]) -> Differences:
    """The differences between two checkpoints of any formats: settings, and elements of tensors.

    Args:
        one: the folder of a checkpoint.
        two: the folder of another.
        options: by the flags of `convert diff`.

    Raises:
        SourceError: a checkpoint cannot be read, is damaged or incomplete.
    """
    stated = checked(options, Proving.__optional_keys__)
    with known_family(stated) as family:
        return diff_with(path_of(one, "one"), path_of(two, "two"), _effects(stated, family))


def _effects(options: Mapping[str, Any], family: Family | None) -> Effects:
    limits = limits_of(options, options.get("replicas", "verify"))
    return Effects(settings_of(options), limits, family, tell=options.get("progress"))
