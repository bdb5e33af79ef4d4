"""What a format is to everybody else: how it is recognised and read, and what commands have to know of it.

Each room has its formats in its `__init__.py`, and `registry.py` lists them. They are there whenever a command starts:
their modules are loaded when they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from pathlib import Path

    from formats.checkpoint import Checkpoint, Settings
    from formats.families.family import Family
    from formats.layout.table import Rule
    from formats.optimizer import Optimizer


class Reader(Protocol):
    """The module that reads a format."""

    def detect(self, path: Path, /) -> bool:
        """Whether a folder looks like the format."""

    def read(self, path: Path, settings: Settings, /) -> Checkpoint:
        """Open a checkpoint: headers only, none of the weights."""

    def tables(self) -> Mapping[str, tuple[Rule, ...]]:
        """Its layouts, by the names that `explain` shows; none where the tensors are those of another format."""

    def holders(self, family: Family, /) -> Mapping[str, bool]:
        """Whether it holds models of a family, by its own name and those of its dialects."""


class Training(Protocol):
    """The module that reads what a training keeps besides the weights."""

    def is_trained(self, source: Checkpoint, /) -> bool:
        """Whether there are optimizer states besides the weights."""

    def read(self, source: Checkpoint, /) -> Optimizer:
        """The optimizer of an opened checkpoint, in no framework's terms."""

    def states(self, source: Checkpoint, /) -> tuple[Mapping[str, Checkpoint], Mapping[str, Any]]:
        """Its states, each as a checkpoint of its own, and what `inspect` says of it."""


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        name: what checkpoints, plans and manifests call it.
        about: what a folder of it holds.
        commands: a hint: the commands that read it.
        reads: the module that reads it.
        trains: the module that reads its optimizer; empty where no optimizer is read.
        to_folder: the command that makes a Hugging Face folder of it; empty where it is one.
        reader_options: the options of reading (`Settings`) that its reader knows, of those that not all know.
        signs: what some name in a folder of it is like, or in a folder in that: where none is, it is another format,
            and its reader need not be loaded.
        ranked: whether each rank has tensors of its own in its files.
        replicas: what is done with further copies of a tensor unless the user says: `verify`, or `drift`.
    """

    name: str
    about: str
    commands: str
    reads: str
    trains: str = ""
    to_folder: str = ""
    reader_options: tuple[str, ...] = ()
    signs: str = ""
    ranked: bool = False
    replicas: str = "verify"

    def detect(self, path: Path, names: Iterable[str] | None) -> bool:
        """Whether a folder looks like it, which has such names in it and in its folders; None where that is unknown."""
        like = re.compile(self.signs).fullmatch
        return (not self.signs or names is None or any(map(like, names))) and self.reader.detect(path)

    @property
    def reader(self) -> Reader:
        """Its reader, loaded."""
        return cast(Reader, import_module(self.reads))

    @property
    def training(self) -> Training | None:
        """What reads its optimizer, loaded."""
        return cast(Training, import_module(self.trains)) if self.trains else None
