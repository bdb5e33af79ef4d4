"""Model families: one file a family, with its table of Hugging Face names and the facts of its config.

To add one, copy the nearest file, change its table, and add its tiny models (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from formats.errors import UnsupportedError, short
from formats.families.family import FAMILY_FILE, Family

NO_FAMILIES = ("blocks", "family")
"""Modules of this package that define no family."""
OTHERWISE = {"granitemoehybrid": ("granite_hybrid",)}
"""Model type: its families whose names do not begin with the model type, as all other families' do."""


def family_named(name: str) -> Family:
    """Return the family with a name, such as `ModelSpec.family`."""
    return FAMILIES[name]


def find_family(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a config.json; None if there is none.

    Of the families with its model type and marks, those of its `architectures` come first, then those with most marks.
    """
    fitting = [
        family
        for family in _named_like(config.get("model_type"))
        if config.get("model_type") == (family.model_type or family.name)
        and all(config.get(key) == value for key, value in family.marks.items())
        and (not family.blocks or any(block in family.blocks for block in _blocks(family, config)))
    ]

    def likeness(family: Family) -> tuple[bool, int]:
        return config.get("architectures") == [family.architecture], len((*family.marks, *family.blocks))

    return max(fitting, key=likeness, default=None)


def _named_like(kind: Any) -> Iterator[Family]:
    """Yield the families that may have a model type; the modules of other families are not imported."""
    for name in FAMILIES:
        if name not in NAMES or (isinstance(kind, str) and (name.startswith(kind) or name in OTHERWISE.get(kind, ()))):
            yield FAMILIES[name]


def _blocks(family: Family, config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the kind of each layer in a config.json: the letters of a pattern, or the words of a list."""
    for key in family.keys["mlp_layers"].split():
        yield from config[key] if isinstance(config.get(key), str | list) else ()


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a config.json.

    Raises:
        UnsupportedError: there is none; the message lists the supported families, or names the unsupported value.
    """
    family = find_family(config)
    if family is None:
        marked = [other.marks for other in FAMILIES.values() if config.get("model_type") == other.model_type]
        for key, only in marked[0].items() if marked else ():
            if config.get(key) != only:
                raise UnsupportedError(
                    f"{where}: {key} = {short(config.get(key))} is not supported for {config['model_type']}, only {only!r}"
                )
        alike = [
            other.model_type or other.name
            for other in FAMILIES.values()
            if config.get("architectures") == [other.architecture] and not other.hub_class
        ]
        way = f"; its class is that of {alike[0]}: correct `model_type` if it computes the same" if alike else ""
        raise UnsupportedError(
            f"{where}: no table describes the model type {short(config.get('model_type'))} without --family "
            f"{_file(where)}{way}",
            f"supported: {', '.join(sorted(FAMILIES))}",
        )
    return family


def _file(where: str) -> str:
    """Return the path of a user's family file beside the config.json; `FILE` if there is none."""
    path = Path(where).with_name(FAMILY_FILE)
    return str(path) if path.is_file() else "FILE"


class Families(Mapping[str, Family]):
    """All families by name, which is also the name of the module, imported on first use.

    A user's own family is among them inside `known`.
    """

    def __getitem__(self, name: str) -> Family:
        own = OWN.get()
        if own is not None and name == own.name:
            return own
        if name not in NAMES:
            raise KeyError(name)
        family: Family = import_module(f"{__name__}.{name}").FAMILY
        return family

    def __iter__(self) -> Iterator[str]:
        own = OWN.get()
        return iter(NAMES if own is None else (*NAMES, own.name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


NAMES = tuple(module.name for module in iter_modules(__path__) if module.name not in NO_FAMILIES)
OWN: ContextVar[Family | None] = ContextVar("own", default=None)
FAMILIES = Families()


@contextmanager
def known(family: Family) -> Iterator[None]:
    """Add a user's own family to `FAMILIES` inside the context."""
    token = OWN.set(family)
    try:
        yield
    finally:
        OWN.reset(token)
