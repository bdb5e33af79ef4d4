"""Reads the two inputs of slicing: the slices json (tokens of each data set) and the state file (where each begins).

Facts: tilde-nlp/llm-gpt-neox at 374a5c6, misc/slices_final.json, misc/create_0_state_file.py, data_packs_make.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from formats.errors import SourceError, short
from train.data.packs.phases import Pool, pool
from train.data.tokens.indexed import bin_path, idx_path

POOLS = {"U1": ("U1",), "N": ("N", "U2"), "U3": ("U3",), "E": ("Ext",)}
"""Pool: the phases of the slices json whose sum the pool is."""
LARGEST = 16 << 20
"""Maximum number of bytes of an input file; real files have less than a tenth."""
DEEPEST = 100
"""Maximum nesting of a state file: real files have 3 levels. YAML libraries recurse in C and overflow the stack."""
MOST = 2**53
"""Maximum number of tokens of a data set in a phase: up to this number a float is exact."""


@dataclass(frozen=True)
class State:
    """How much of a data set earlier slices have taken.

    Attributes:
        datapath: path of the data set's `.bin`.
        idxs: first unused document after each slice; the next slice begins at the last of them.
    """

    datapath: str
    idxs: tuple[int, ...] = (0,)


def read_slices(path: Path) -> tuple[tuple[str, ...], dict[str, Pool]]:
    """Read a slices json: the names of the data sets, and the pools by name.

    Raises:
        SourceError: the file is not there, or is not a slices json.
    """
    try:
        content = json.loads(_content(path))
        names = _names(content["names"])
        totals_of_phase = {phase: _totals(content, phase, len(names)) for phases in POOLS.values() for phase in phases}
    except (KeyError, TypeError) as error:
        lacking = f"has no {error}" if isinstance(error, KeyError) else f"is wrong: {error}"
        raise SourceError(
            f"{path} {lacking}", 'it needs "names", and for each of U1, U2, N, U3 and Ext {"total": [tokens, ...]}'
        ) from None
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None
    except RecursionError:
        raise SourceError(f"{path} is not a slices json: it is nested too deep") from None
    pools = {
        name: pool(
            [sum(parts, Fraction(0)) for parts in zip(*(totals_of_phase[phase] for phase in phases), strict=True)]
        )
        for name, phases in POOLS.items()
    }
    return names, pools


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    if len(content) > LARGEST:
        raise SourceError(f"{path} has more than {LARGEST:,} bytes: it is a file of another kind")
    return content


def _names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not names:
        raise ValueError('"names" is not a list of data sets')
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable() or "/" in name:
            raise ValueError(f"{short(name)} is not a file name")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} are named twice")
    return tuple(names)


def _totals(content: Mapping[str, Any], phase: str, count: int) -> list[Fraction]:
    values = content[phase]["total"]
    if not isinstance(values, list) or len(values) != count:
        many = f"{len(values)} numbers" if isinstance(values, list) else short(values)
        raise ValueError(f'"total" of {phase} is {many}, for {count} names')
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
            raise ValueError(f'"total" of {phase} holds {short(value)}, which is no number of tokens up to 2^53')
    return [Fraction(value) for value in values]


def first_state(folder: Path) -> dict[str, State]:
    """The state of all token files of a folder before anything is sliced.

    Raises:
        SourceError: the folder has no token files, or some have no index.
    """
    try:
        names = sorted(path.name[: -len(".bin")] for path in folder.iterdir() if path.name.endswith(".bin"))
    except OSError as error:
        raise SourceError(f"{folder}: {error.strerror}") from None
    if not names:
        raise SourceError(f"{folder} holds no .bin")
    missing = [name for name in names if not idx_path(folder / name).is_file()]
    if missing:
        raise SourceError(f"{len(missing)} of {len(names)} .bin of {folder} have no .idx: {', '.join(missing)}")
    return {name: State(str(bin_path(folder.absolute() / name))) for name in names}


def state_text(state: Mapping[str, State]) -> bytes:
    """The content of a state file, as tilde-nlp's script writes it."""
    content = {name: {"datapath": entry.datapath, "idxs": list(entry.idxs)} for name, entry in state.items()}
    return str(yaml.dump(content, default_flow_style=False)).encode()


def read_state(path: Path) -> dict[str, State]:
    """Read a state file: the states of data sets, by name.

    Raises:
        SourceError: the file is not there, or is not a state file.
    """
    try:
        text, loader = _content(path), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        _require_flat(text, loader)
        content = yaml.load(text, loader)  # noqa: S506  # both loaders are safe
        return {name: _state(name, entry) for name, entry in content.items()}
    except (yaml.YAMLError, AttributeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SourceError(
            f"{path} is not a state file: {short(reason, 200)}",
            "`train packs state` writes one for a folder of .bin files",
        ) from None


def _require_flat(text: bytes, loader: Any) -> None:
    """Refuse deep nesting before the YAML is loaded: parser events come one by one, without recursion."""
    depth = 0
    for event in yaml.parse(text, loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST}")


def _state(name: Any, content: Any) -> State:
    if not isinstance(name, str):  # YAML reads no: and 1: as a boolean and a number
        raise ValueError(f"{short(name)} is not text, write it in quotes")
    content = content if isinstance(content, dict) else {}
    path, idxs = content.get("datapath"), content.get("idxs")
    sound = isinstance(idxs, list) and idxs and all(type(number) is int and number >= 0 for number in idxs)
    if not isinstance(path, str) or Path(path).name in ("", "..") or not sound or idxs != sorted(idxs):
        raise ValueError(f"{name} needs a datapath and idxs, document numbers that never fall, at least one")
    return State(path, tuple(idxs))


def dump(content: Any) -> bytes:
    """A small YAML file in the order of `content`, as tilde-nlp's script writes it."""
    return str(yaml.dump(content, sort_keys=False)).encode()
