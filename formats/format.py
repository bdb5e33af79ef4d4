"""The type `Format`: how a checkpoint format is recognised and read, and what the commands have to know of a format.

Each room has its formats in its `__init__.py`, and `registry.py` lists them. Every command imports these `Format`s; the
modules that read a format are only loaded when they are used.
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
        """The layouts of the format, by the names that `explain` shows; empty where another format has its tensors."""

    def holders(self, family: Family, /) -> Mapping[str, bool]:
        """Whether models of a family fit the format: for its own name and for that of each of its dialects."""


class Training(Protocol):
    """The module that reads the optimizer states of a format."""

    def is_trained(self, source: Checkpoint, /) -> bool:
        """Whether there are optimizer states besides the weights."""

    def read(self, source: Checkpoint, /) -> Optimizer:
        """The optimizer of an opened checkpoint, independent of the framework."""

    def states(self, source: Checkpoint, /) -> tuple[Mapping[str, Checkpoint], Mapping[str, Any]]:
        """The optimizer states, each as a checkpoint of its own, and the entries of the optimizer for `inspect`."""


@dataclass(frozen=True)
class Format:
    """A checkpoint format.

    Attributes:
        name: the name of the format in checkpoints, plans and manifests.
        about: one phrase on the files of the format.
        commands: a hint with the commands that read the format.
        reads: the name of the module that reads the format (`Reader`).
        trains: the name of the module that reads its optimizer (`Training`); empty where no optimizer is read.
        to_folder: the command that converts the format to a Hugging Face folder; empty where it is one.
        reader_options: the fields of `Settings` that this reader knows, of those that not every reader knows.
        signs: a regular expression that a name in every folder of the format matches, or a name in a subfolder: a
            folder without such a name is of another format, and the reader need not be loaded.
        ranked: whether each rank has tensors of its own in its files.
        replicas: the default policy for further copies of a tensor: `verify`, or `drift`.
        folders: the name of a module whose `parts` lists the folders that weights and optimizer of a checkpoint are
            in, given the user's folder; empty where they are in that folder itself.
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
    folders: str = ""

    def detect(self, path: Path, names: Iterable[str] | None) -> bool:
        """Whether a folder looks like this format; `names` are those in the folder and its subfolders, if known."""
        like = re.compile(self.signs).fullmatch
        return (not self.signs or names is None or any(map(like, names))) and self.reader.detect(path)

    def parts(self, path: Path) -> list[Path]:
        """The folders that weights and optimizer of a checkpoint are in: `path`, or folders in it."""
        if not self.folders:
            return [path]
        parts: list[Path] = import_module(self.folders).parts(path)
        return parts

    @property
    def reader(self) -> Reader:
        """The module that reads the format, imported."""
        return cast(Reader, import_module(self.reads))

    @property
    def training(self) -> Training | None:
        """The module that reads the optimizer of the format, imported; None where no optimizer is read."""
        return cast(Training, import_module(self.trains)) if self.trains else None
