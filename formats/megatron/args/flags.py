"""The command-line flags with which a version of Megatron-LM runs a checkpoint, beyond the args in its files.

A model that a version does not compute is refused. If a one-line patch of the user's own tree makes the version compute
it, `--accept` writes the flags all the same, after a comment with the patch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from formats.errors import RefusedError, UsageError, short
from formats.megatron.args.versions import (
    ALWAYS,
    BEFORE_OTHERS,
    DEVIATIONS,
    FAILS,
    KINDS,
    NEWEST,
    OPTIONS,
    REFUSED_VALUES,
    VERSIONS,
    Option,
    Patch,
    ignored,
    is_between,
    value_used,
)


class Fault(NamedTuple):
    """Why a version does not compute a model, and the patch that makes it compute the model, if there is one."""

    why: str
    patch: Patch | None = None


def required_options(args: Mapping[str, Any], version: str) -> Iterator[Option]:
    """The options that these args need, whether or not the version has them or takes them from the checkpoint."""
    for option in (*OPTIONS, *(older for older in BEFORE_OTHERS if is_between(version, older.known))):
        value = args.get(option.dest)
        if KINDS[option.when](args) and value is not None and (option.default is ALWAYS or value != option.default):
            yield option


def faults(args: Mapping[str, Any], version: str) -> list[Fault]:
    """Why a version does not compute this model; empty if it does."""
    unheeded = ignored(args, version)
    unsupported = [
        Fault(
            f"it cannot compute {row.patch.name}"
            if row.computed is FAILS and row.patch
            else f"it computes with {row.dest} = {short(value_used(row, args))} instead of {short(args.get(row.dest))}",
            row.patch,
        )
        for row in unheeded
    ]
    reported = {row.when for row in unheeded}
    unsupported += [
        Fault(f"it has no {option.name}")
        for option in required_options(args, version)
        if not is_between(version, option.known) and option.when not in reported
    ]
    return unsupported + [
        Fault(row.why)
        for row in REFUSED_VALUES
        if KINDS[row.when](args) and is_between(version, row.first, row.last) and args.get(row.dest) == row.value
    ]


def choose_version(args: Mapping[str, Any], asked: str | None, accepted: Collection[str]) -> tuple[str, list[Fault]]:
    """The version that the flags are for, and all reasons why it does not compute the model.

    Args:
        args: the args of the checkpoint.
        asked: the version that the user named; None for the newest that computes the model.
        accepted: the deviations that the user accepts.

    Raises:
        UsageError: `accepted` names a deviation that the version does not have for this model.
        RefusedError: the version does not compute the model, and not all of its deviations were accepted.
    """
    every = {version: faults(args, version) for version in VERSIONS}

    def left(version: str) -> list[Fault]:
        return [fault for fault in every[version] if not (fault.patch and fault.patch.name in accepted)]

    newest = tuple(reversed(VERSIONS))
    able = [release for release in newest if not every[release]]
    best = [
        *able,
        *(release for release in newest if not left(release)),
        *(release for release in newest if _patchable(every[release])),
        NEWEST,
    ]
    version = asked or best[0]
    open_faults = left(version)
    if open_faults:
        first = able[-1] if able else None
        known = f"the first that does is {first}" if first else "no release does"
        why = "; ".join(dict.fromkeys(fault.why for fault in open_faults))
        raise RefusedError(
            f"stock Megatron-LM {version} does not compute this model, and {known}: {why}",
            _refusal_hint(open_faults, args, first),
        )
    needed = {fault.patch.name for fault in every[version] if fault.patch}
    for name in accepted:
        if name in DEVIATIONS and name not in needed:
            raise UsageError(
                f"--accept {name}: the flags of Megatron-LM {version} for this model do not deviate so", "leave it out"
            )
    return version, every[version]


def _patchable(missing: list[Fault]) -> bool:
    """Whether each fault has a patch."""
    return all(fault.patch for fault in missing)


def _refusal_hint(faults: list[Fault], args: Mapping[str, Any], able: str | None) -> str:
    """The hint of a refusal: another version, or the patches with the `--accept` that goes with them."""
    ways = [f"--megatron-version {able}"] if able else []
    patches = [fault.patch for fault in faults if fault.patch]
    if _patchable(faults):
        names = dict.fromkeys(patch.name for patch in patches)
        lines = dict.fromkeys(patch_instruction(patch, args) for patch in patches)
        accepted = " ".join(f"--accept {name}" for name in names)
        ways.append(f"{accepted} for a tree of your own with this line: {'; '.join(lines)}")
    return ", or ".join(ways)


def patch_instruction(patch: Patch, args: Mapping[str, Any]) -> str:
    """The instruction to apply a patch, as text."""
    return f"in {patch.place}, {patch.beside} add {patch.line.format_map(args)}"


def flags(args: Mapping[str, Any], asked: str | None = None, accepted: Collection[str] = ()) -> str:
    """The text of the flags, a flag on each line, with comments as in a shell.

    Args:
        args: the args that are written into the checkpoint.
        asked: the version; None for the newest that computes the model.
        accepted: the deviations that the user accepts; names of arguments that a reader accepts are ignored.

    Raises:
        UsageError: `accepted` names a deviation that the version does not have for this model.
        RefusedError: the version does not compute the model.
    """
    version, deviations = choose_version(args, asked, accepted)
    patches = dict.fromkeys(patch_instruction(fault.patch, args) for fault in deviations if fault.patch)
    lines = [f"# flags for Megatron-LM {version}"]
    lines += [f"# it computes this model only with a change: {patch}" for patch in patches]
    lines.append("--use-checkpoint-args")
    for option in required_options(args, version):
        if is_between(version, option.known) and not is_between(version, option.loaded):
            lines.append(_spelled(option, args[option.dest]))
    return "\n".join([*lines, ""])


def remarks(text: str) -> tuple[str, ...]:
    """The comments in a text of flags, as notes."""
    return tuple(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


def _spelled(option: Option, value: Any) -> str:
    """An option with its value as written on a shell command line."""
    match option.form:
        case "true" | "false":
            return option.name
        case "switch":
            return option.name if value else f"--no-{option.name.removeprefix('--')}"
        case "list":
            return f"{option.name} '[{','.join(map(str, value))}]'"
        case "pair":
            return f"{option.name} {value[0]},{value[1]}"
        case "quoted":
            return f"{option.name} '{value}'"
    return f"{option.name} {value}"
