"""Whether the tensors of a model without a table are those of its config: compared with transformers or the base model.

Where a table describes a model, the plan proves that the checkpoint is complete. The names and shapes of any other
model are compared with the first of these that is available: the model that transformers makes of the config (in a
process of its own), the weights of the base model, and the manifest of an earlier conversion. Without any of them
nothing proves that a tensor is not missing from every layer, so that the checkpoint is refused, unless the user takes
its tensors as they are (--verbatim). The sizes and counts in the config are compared in any case.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from converters.assets.files import has_floats_alone
from converters.common.manifest import check_manifest, read_manifest
from formats.checkpoint import Checkpoint
from formats.errors import SourceError, UnsupportedError, short
from formats.families import find_family
from formats.huggingface import mtp
from formats.huggingface.config import config_differences, from_huggingface, unknown_keys
from formats.huggingface.folder import has_weights, read_files
from formats.huggingface.layers import FULL
from formats.huggingface.quantized import without_quantization
from formats.layout.table import MTP
from formats.model.coherence import FURTHER, Finding, contradictions, losses, predicts_further
from formats.model.spec import ModelSpec, Spec, Verbatim, class_tells, computing_differences, differences, of_own
from formats.model.vocab_rows import EMBEDDING, HEAD, rows

NEEDED = ("transformers", "torch", "accelerate")
"""Packages that are needed to ask transformers; accelerate places a model on the meta device."""
PROGRAM = (str(Path(__file__).with_name("meta_model.py")),)
SECONDS = 300
"""Time limit for transformers: the largest models take ten seconds, importing it from a slow file system a minute."""
SHOWN = 4
HINT = (
    "a file of the checkpoint may be missing, or --config names another model; what may be missing or left over is "
    "named with --allow-missing, such as --allow-missing '{}'"
)
OTHER = "take config.json from where the weights come from"
CHECKED = "names and shapes checked against:"
UNPROVEN = "a kind of tensor that is missing from every layer would not be seen"
AS_THEY_ARE = "take the tensors as they are with --verbatim"
BASE = "name its base with the weights (--config BASE), or "
INSTALL = "install a transformers that knows the model (pip install 'vitruvian[transformers]'), or "
UNBOUNDED = (
    "the files of torch's Hugging Face writer do not record how many there were, and nothing tells whether the last of "
    "them are here"
)


def notes(source: Checkpoint, spec: Spec, config: bytes) -> list[str]:
    """Check that the tensors of a checkpoint are those that its config describes.

    Args:
        source: the opened checkpoint.
        spec: the spec of the output, whose vocabulary may have grown.
        config: the config.json of the output.

    Returns:
        Notes for the summary on what the tensors were compared with, and on names of --allow-missing that no difference
        has; of a model with a table, on layers that only its config has.

    Raises:
        SourceError: a tensor is missing, has another shape, or is no tensor of the model.
        UnsupportedError: nothing tells which tensors the model has.
    """
    if layers := mtp.note(spec, json.loads(config), source.dropped):
        return [layers]
    if not (isinstance(spec, Verbatim) and isinstance(source.spec, Verbatim)):
        return []
    check_manifest(source)  # where there is a manifest, its error message is the better one
    parsed = json.loads(config)
    floats = has_floats_alone(source)
    described = without_quantization(parsed)[0] if floats else parsed
    quantized = described.get("quantization_config")  # by which transformers does not tell its tensors
    if quantized:
        answer = {"why": "config.json says that weights are quantized" if floats else "the weights are quantized"}
    else:
        answer = ask_transformers(described, spec.shapes)
    if "why" not in answer:
        _require_tie(source, spec, answer)
        findings = _of_transformers(answer, parsed, known_only=not source.settings.verbatim)
        return [f"{CHECKED} transformers", *_judged(source, findings)]
    differing = _against_base(source, source.spec)
    if differing is not None:
        idle = _judged(source, [*differing, *contradictions(parsed, spec)])
        return [f"{CHECKED} base ({answer['why']})", *idle]
    compared = source.settings.verbatim or not quantized  # what is quantized may differ from layer to layer
    idle = _judged(source, [*contradictions(parsed, spec), *(losses(parsed, spec) if compared else ())])
    if source.unbounded and not _is_bounded(source.spec):
        raise SourceError(
            f"{source.root}: {UNBOUNDED}: {answer['why']}", "name the base model with its weights: --config BASE"
        )
    _, written = read_manifest(source.home) or ({}, {})
    if written.keys() == source.spec.shapes.keys():
        return [f"{CHECKED} manifest ({answer['why']})", *idle]
    if not source.settings.verbatim:
        untabled = spec.why if quantized else f"no table describes {spec.family}"
        judged = not _brings_config(source)  # what has a config of its own is not compared with a base
        raise UnsupportedError(
            f"nothing here tells whether {source.root} is complete: {untabled}, {answer['why']}"
            + ", and no base with weights is named" * judged,
            INSTALL * (not quantized) + BASE * judged + AS_THEY_ARE,
        )
    return [f"{CHECKED} config only ({answer['why']}): {UNPROVEN}", *idle]


def _require_tie(source: Checkpoint, spec: Verbatim, answer: Mapping[str, Any]) -> None:
    """Refuse a config that ties a head which its class does not tie, of files that hold the head.

    Raises:
        SourceError: it is such a config: the head is not written as a copy of the embedding, and would be lost.
    """
    heads = {placed.key for placed in source.tensors} & spec.copies.keys()
    missing = {*answer.get("missing", ())}
    for key in sorted(missing if missing <= heads else ()):  # otherwise the config is of another model
        raise SourceError(
            f"{source.root}: its config ties {key} to {spec.copies[key]}, and its class in transformers does not",
            "convert both as they are: --set tied=false",
        )


def ask_transformers(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The report of transformers on a config and tensor shapes (`meta_model.report`), or `why` there is none."""
    return _ask({"config": config, "shapes": shapes})


def config_as_read(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A config.json as its class in transformers reads it, with all defaults; None where transformers does not tell."""
    return _ask({"config": config}).get("config")


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        return {"why": f"{' and '.join(lacking)} not installed"}
    answer: dict[str, Any] = json.loads(_answer_of_program(json.dumps(request)))
    return answer


@lru_cache(maxsize=4)
def _answer_of_program(request: str) -> str:
    import subprocess

    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    words = [sys.executable, *PROGRAM]
    try:
        ran = subprocess.run(  # noqa: S603  # this interpreter, and fixed words
            words, input=request, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **quiet},
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return json.dumps({"why": f"transformers gave no answer in {SECONDS} seconds"})
    last = ran.stdout.rpartition("\n{")
    return "{" + last[2] if ran.returncode == 0 and last[1] else json.dumps({"why": "transformers gave no answer"})


def _judged(source: Checkpoint, findings: Sequence[Finding]) -> list[str]:
    """Refuse findings that --allow-missing does not name. Returns a note on each of its names that no finding has.

    Raises:
        SourceError: there is such a finding.
    """
    allowed = source.settings.allow_missing
    unaccepted = [finding for finding in findings if not any(fnmatchcase(finding.name, pattern) for pattern in allowed)]
    if unaccepted:
        texts = "; ".join(finding.text for finding in unaccepted[:SHOWN]) + (
            f"; and {len(unaccepted) - SHOWN} more" * (len(unaccepted) > SHOWN)
        )
        raise SourceError(
            f"{source.root} and its config are not one whole model: {texts}",
            HINT.format(unaccepted[0].name) if unaccepted[0].name else OTHER,
        )
    idle = [pattern for pattern in allowed if not any(fnmatchcase(finding.name, pattern) for finding in findings)]
    return [f"--allow-missing {pattern}: no such tensor is missing, left over or of another shape" for pattern in idle]


def _brings_config(source: Checkpoint) -> bool:
    """Whether the config.json of a checkpoint is in the folder of the checkpoint."""
    return source.assets is not None and source.assets.resolve() in (source.root.resolve(), source.home.resolve())


def _against_base(source: Checkpoint, spec: Verbatim) -> list[Finding] | None:
    """The tensors in which a model differs from the base of its training; None without a base that has weights."""
    folder = source.assets
    if folder is None or not has_weights(folder) or _brings_config(source):
        return None
    base = {key: fragment.shape for key, fragment in read_files(folder).items()}
    embeddings = [shape for key, shape in base.items() if EMBEDDING.fullmatch(key)] if spec.tied else []
    copies = {*spec.copies, *(key for key, shape in base.items() if HEAD.fullmatch(key) and shape in embeddings)}
    shared = set() if any(map(HEAD.fullmatch, base)) else {key for key in spec.shapes if HEAD.fullmatch(key)}
    embedded = next((shape for key, shape in spec.shapes.items() if EMBEDDING.fullmatch(key)), None)
    cut = {key: spec.shapes[key] for key in shared if embedded is not None and spec.shapes[key] != embedded}
    unknown = [] if source.settings.verbatim else [key for key in spec.shapes if key not in {*base, *shared}]
    return [
        *(Finding(key, f"{key} is missing") for key in base if key not in spec.shapes and key not in copies),
        *(Finding(key, f"{key} is no tensor of {folder}") for key in unknown),
        *(Finding(key, f"{key} is {list(here)}, the embedding {list(embedded or ())}") for key, here in cut.items()),
        *(
            Finding(key, f"{key} is {list(shape)}, {list(base[key])} in {folder}")
            for key, shape in spec.shapes.items()
            if key in base and not _same(key, shape, base[key], spec)
        ),
    ]


def _same(key: str, here: tuple[int, ...], there: tuple[int, ...], spec: Verbatim) -> bool:
    """Whether two shapes of a tensor are equal, or that of the checkpoint has the vocabulary rows of its spec."""
    grown = here[:1] == (spec.vocab,) and here[1:] == there[1:]
    return here == there or (grown and bool(EMBEDDING.fullmatch(key) or HEAD.fullmatch(key)))


def _of_transformers(answer: Mapping[str, Any], config: dict[str, Any], *, known_only: bool) -> list[Finding]:
    """The findings in a report of transformers; without `known_only` (--verbatim) unexpected tensors are allowed."""
    unknown = [key for key in answer.get("unexpected", ()) if known_only and not predicts_further(config, key)]
    return [
        *(Finding("", text) for text in answer["errors"]),
        *(
            Finding(key, f"{key} is {here}, and {wanted} in the model")
            for key, here, wanted in answer.get("mismatched", ())
        ),
        *(Finding(key, f"{key} is missing") for key in answer.get("missing", ())),
        *(Finding(key, f"{key} is no tensor of the model") for key in unknown),
        *doubled(answer),
    ]


def doubled(answer: Mapping[str, Any]) -> list[Finding]:
    """The tensors that a checkpoint has under two names, of which transformers loads one, in its report."""
    first: dict[str, str] = {}
    return [
        Finding(key, f"{first[target]} and {key} are both loaded as {target}")
        for key, target in answer.get("renamed", ())
        if first.setdefault(target, key) != key
    ]


def _is_bounded(spec: Verbatim) -> bool:
    """Whether an embedding that has all of its rows proves that no rank's file is missing."""
    return spec.vocab is not None and rows(spec) == spec.vocab


def setting_differences(first: Checkpoint, other: Checkpoint) -> list[str]:
    """The settings in which two models differ, as `name: one | other`; without a table the keys of their configs.

    Of configs that are written otherwise, those as transformers reads them: a default may be written out in one.
    """
    spec, another = first.spec, other.spec
    changed = differences(spec, another)
    if first.config is None or other.config is None:
        return changed
    if isinstance(spec, ModelSpec) and isinstance(another, ModelSpec):
        lines = _as_read(first.config, other.config) if class_tells(spec, another) else None
        if lines is None:
            return changed
        return [*differences(replace(spec, own=another.own), another), *of_own(lines, spec)]
    written = config_differences(first.config, other.config)
    if changed or not written:
        return changed
    lines = _as_read(first.config, other.config)
    return written if lines is None else lines


def _as_read(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str] | None:
    """The differences of two configs as transformers reads them; None where it does not tell."""
    one, two = config_as_read(first), config_as_read(other)
    return None if one is None or two is None else config_differences(_without_plain(one), _without_plain(two))


def _without_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without `layer_types` by which no layer differs: a class that has no such key takes it for none."""
    return {
        name: _without_plain(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not (name == "layer_types" and isinstance(value, list) and {*map(str, value)} == {FULL})
    }


APART = "config.json differs in keys that no tensor depends on"
"""The message for two config.json that differ only in keys that no tensor depends on."""


def file_differences(first: Checkpoint, other: Checkpoint) -> list[str]:
    """The keys that no tensor depends on in which two config.json differ, such as tokens that end a reply."""
    if isinstance(first.spec, Verbatim) or first.config is None or other.config is None:
        return []
    ours, theirs = first.config, other.config
    left_out = FURTHER if MTP in first.settings.drop else ()
    return [
        f"{name}: {short(ours.get(name))} | {short(theirs.get(name))}"
        for name in dict.fromkeys([*unknown_keys(ours), *unknown_keys(theirs)])
        if ours.get(name) != theirs.get(name) and name not in left_out
    ]


def model_differences(source: Checkpoint, config: Mapping[str, Any], own: Mapping[str, Any], where: str) -> list[str]:
    """The settings in which a checkpoint differs from a model that is in memory, as `name: checkpoint's | model's`.

    Args:
        source: the checkpoint.
        config: the config of the model in memory, as transformers writes it.
        own: the checkpoint's config, where it has one, as the model's class reads it; compared if there is no table, or
            a key is left to the class.
        where: what to call the model's config in an error.

    Raises:
        UnsupportedError: the model computes something that the family of its config does not have.
    """
    if isinstance(source.spec, Verbatim):
        return config_differences(own, config) if source.config else []
    family = find_family(config)
    if family is None:
        return [f"family: {source.spec.family} | {config.get('model_type')}"]
    spec = from_huggingface(config, {}, where)
    if source.config and class_tells(source.spec, spec):
        lines = of_own(config_differences(own, config), spec)
        return [*computing_differences(replace(source.spec, own=spec.own), spec), *lines]
    return computing_differences(source.spec, spec)
