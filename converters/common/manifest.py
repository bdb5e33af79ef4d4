"""Read the manifest of an output, and compare it with the output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from blake3 import blake3

from formats.checkpoint import MANIFEST, Checkpoint, OutputFile
from formats.disk.json_file import read_json
from formats.disk.threads import Threads
from formats.errors import SourceError, VerificationError, short
from formats.families import family_named
from formats.model.spec import ModelSpec, Spec, Verbatim
from formats.torch_files.saves import THREADS, entry_of

LARGEST = 64 << 20
"""Most bytes of a small file that is hashed."""
UNSETTABLE = {"family", "own", "biases"}
"""The settings that `--set` cannot give."""


def read_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, str]] | None:
    """The settings and the digests in a folder's manifest, None without one.

    Raises:
        SourceError: the file is no manifest, or contradicts itself.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    document = read_json(path)
    facts, digests = document.get("settings"), _digests(document.get("tensors"))
    if not isinstance(facts, dict) or digests is None:
        raise SourceError(f"{path} is not a manifest of vitruvian")
    if document.get("digest") != total(digests):
        raise SourceError(
            f"{path} contradicts itself: its digest {short(document.get('digest'))} is not that of its tensors",
            "it was edited by hand, or files of two outputs are mixed up: convert again, or remove it",
        )
    return facts, digests


def total(digests: Mapping[str, str]) -> str:
    """The digest of a checkpoint from the digests of its tensors."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return blake3(lines.encode()).hexdigest()


def small_digests(home: Path, names: Iterable[str]) -> dict[str, str]:
    """The digest of each small file that is read with a model; empty where the file is absent.

    Args:
        home: the folder of the manifest.
        names: the paths of the files, relative to that folder.
    """
    paths = {name: home.parent / name[3:] if name.startswith("../") else home / name for name in names}
    return {
        name: blake3(path.read_bytes()).hexdigest() if path.is_file() and path.stat().st_size <= LARGEST else ""
        for name, path in paths.items()
    }


def archive_sums(home: Path, names: Iterable[str]) -> dict[str, str]:
    """Size and CRC-32 of each file of torch.save (`formats.torch_files.saves`); empty where the file is absent.

    Only the zip directories are read, which have the CRC-32 of every entry: of tensors and of what is pickled.
    """
    present = [name for name in names if (home / name).is_file()]
    with Threads(THREADS) as pool:
        entries = [*pool.map(lambda name: entry_of(home / name), present)]
    sums = {name: f"{entry.size} {entry.crc32:08x}" for name, entry in zip(present, entries, strict=True)}
    return {name: sums.get(name, "") for name in names}


RECORDED: Mapping[str, Callable[[Path, Iterable[str]], dict[str, str]]] = {
    "files": small_digests,
    "archives": archive_sums,
}
"""Section of a manifest: the function that computes what it records of files, by their paths from the manifest."""


def archive_names(home: Path, files: Iterable[OutputFile]) -> list[str]:
    """The planned files of torch.save with tensors, by their paths from the manifest."""
    every = (file for file in files if file.tensors or any(file.states.values()))
    return [file.path.relative_to(home).as_posix() for file in every if file.checksums]


def bare_digests(home: Path, files: Iterable[OutputFile]) -> dict[str, str]:
    """The digest of each planned file without tensors, by its path relative to the folder of the manifest.

    Such a file holds settings and the state of a training. In an output that goes into a store it may be gone from this
    machine, so that its content is taken from the plan.
    """
    bare = (file for file in files if not file.tensors and not any(file.states.values()) and file.size <= LARGEST)
    return {file.path.relative_to(home).as_posix(): blake3(_content(file)).hexdigest() for file in bare}


def _content(file: OutputFile) -> bytes:
    """The bytes of a planned file without tensors."""
    content = bytearray(file.size)
    for offset, part in file.headers({}):
        content[offset : offset + len(part)] = part
    return bytes(content)


def recorded_files(home: Path) -> dict[str, str]:
    """The digests of small files in a folder's manifest, by their paths relative to the folder."""
    return dict(read_json(home / MANIFEST).get("files") or {})


def absent_run(home: Path, names: Iterable[str]) -> list[str]:
    """Of recorded files, those of the run around a folder, if none of them is there: the folder was copied alone.

    In a run that has some of them, the others are missing.
    """
    around = [name for name in names if name.startswith("../")]
    return [] if any((home.parent / name[3:]).exists() for name in around) else around


def changed_files(home: Path, sections: Iterable[str] = RECORDED) -> list[str] | None:
    """The files that differ from a folder's manifest, of those in `RECORDED`; None if it records no small files.

    Those of an `absent_run` do not differ.

    Args:
        home: the folder of the manifest.
        sections: the sections of the manifest that are compared.

    Raises:
        SourceError: the file is no manifest, or a file of torch.save is damaged.
    """
    facts, changed = read_json(home / MANIFEST), list[str]()
    for section in sections:
        remembered = facts.get(section, {})
        if not isinstance(remembered, dict) or not all(isinstance(digest, str) for digest in remembered.values()):
            raise SourceError(f"{home / MANIFEST} is not a manifest of vitruvian")
        sums, absent = RECORDED[section](home, remembered), absent_run(home, remembered)
        changed += [name for name in sums if sums[name] != remembered[name] and name not in absent]
    return changed if "files" in facts else None


def dumped(facts: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest: tensors last, as there are many."""
    last = {name: facts[name] for name in ("archives", "tensors", "optimizer") if name in facts}
    first = {name: value for name, value in facts.items() if name not in last}
    return (json.dumps({**first, **last}, indent=1) + "\n").encode()


def remembered_states(folder: Path) -> dict[str, str]:
    """The digests of optimizer states in a folder's manifest; empty without a manifest or states.

    Raises:
        SourceError: the file is no manifest.
    """
    path = folder / MANIFEST
    digests = _digests(read_json(path).get("optimizer", {})) if path.is_file() else {}
    if digests is None:
        raise SourceError(f"{path} is not a manifest of vitruvian")
    return digests


def _digests(tensors: Any) -> dict[str, str] | None:
    """The digest of each tensor in a section of a manifest, None if the section is malformed."""
    if not isinstance(tensors, dict):
        return None
    by_name = {name: entry.get("blake3") for name, entry in tensors.items() if isinstance(entry, dict)}
    digests = {name: digest for name, digest in by_name.items() if isinstance(digest, str)}
    return digests if len(digests) == len(tensors) else None


def is_verbatim(folder: Path) -> bool:
    """Whether a folder's manifest lists the tensors under their own names, without a table."""
    facts, _ = read_manifest(folder) or ({"layers": 0}, {})
    return "layers" not in facts


def contradictions(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """The settings that differ from a manifest's, as `name: here | there`; of a map, each key that differs."""
    texts = []
    for name, value in here.items():
        other = there.get(name)
        if value == other:
            continue
        ours, theirs = (each if isinstance(each, dict) else {} for each in (value, other))
        keys = [key for key in {**ours, **theirs} if key not in ours or key not in theirs or ours[key] != theirs[key]]
        pairs = [(f"{name}.{key}", ours.get(key), theirs.get(key)) for key in keys] or [(name, value, other)]
        texts += [f"{setting}: {short(a)} | {short(b)}" for setting, a, b in pairs]
    return texts


def completed(facts: Mapping[str, Any], spec: Spec) -> Mapping[str, Any]:
    """The settings of a manifest; keys of the family's own that a former release did not record are as the spec's."""
    own = facts.get("own", {})
    if not (isinstance(spec, ModelSpec) and isinstance(own, Mapping)):
        return facts
    return {**facts, "own": {**spec.own, **own}}


def check_manifest(source: Checkpoint) -> None:
    """Compare the settings and tensor names in the headers of a source with its manifest, if there is one.

    Only settings are compared that the manifest records, and that the user has not given (with --set, --config,
    --family and the like). The names of a model with a table follow from its settings; a manifest of a model without a
    table is not compared with a model that has one.

    Raises:
        VerificationError: the source is not what it was when its manifest was written.
    """
    manifest, source = read_manifest(source.home), source.original or source
    if manifest is None or source.settings.only or source.settings.adapter:  # a manifest is of all that was trained
        return
    (facts, digests), path = manifest, source.home / MANIFEST
    spec, stated = source.spec, source.settings
    if isinstance(spec, Verbatim) == ("layers" in facts):
        if isinstance(spec, ModelSpec) or stated.verbatim or stated.config:
            return
        raise VerificationError(
            f"{path} is of a model that a table describes, {short(facts.get('family'))}, and none does now: {spec.why}",
            "correct its config.json, or name its --family; --verbatim carries every tensor under its own name",
        )
    recorded, decided = completed(facts, spec), {*stated.values}
    if isinstance(spec, ModelSpec) and family_named(spec.family).file:
        decided.add("family")
    here = {name: value for name, value in spec.settings().items() if name in recorded and name not in decided}
    wrong = {name: value for name, value in here.items() if value != recorded[name]}
    if wrong and stated.config is None:
        ways = " ".join(f"--set {quote(f'{name}={json.dumps(value)}')}" for name, value in wrong.items())
        raise VerificationError(
            f"{source.root} and {path} differ in settings (here | there): {'; '.join(contradictions(wrong, recorded))}",
            f"if that is meant: {'' if wrong.keys() & UNSETTABLE else f'{ways}, or '}remove {path}",
        )
    known = digests.keys() - {*source.dropped}
    odd = sorted(spec.shapes.keys() ^ known) if isinstance(spec, Verbatim) else []
    if odd:  # but for the second names of shared parameters
        stored = {item.fragment for item in source.tensors if item.key in known}
        odd = sorted({*odd} - {item.key for item in source.tensors if item.fragment in stored})
    if odd:
        raise VerificationError(
            f"{source.root} is damaged: {len(odd)} tensors, such as {odd[0]}, are in it or in {path}, not in both",
            f"`convert verify {source.root}` lists them; if that is meant, remove {path}",
        )
