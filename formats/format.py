"""What a format is to everybody else: how it is recognised and read, and what commands have to know of it.

Each room has a `format.py` with its formats, which `registry.py` lists. It is read whenever a command starts, so that
it imports its own readers where they are called for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from formats.checkpoint import Checkpoint, Settings
    from formats.families.family import Family
    from formats.layout.table import Rule
    from formats.optimizer import Optimizer


class Reader(Protocol):
    """The module that reads a format."""

    def detect(self, path: Path) -> bool:
        """Whether a folder looks like the format."""

    def read(self, path: Path, settings: Settings) -> Checkpoint:
        """Open a checkpoint: headers only, none of the weights.

        Raises:
            SourceError: it is damaged or incomplete.
            UnsupportedError: it is of a kind that has no layout here.
            RefusedError: it contradicts itself, or what the user said.
        """

    def tables(self) -> Mapping[str, tuple[Rule, ...]]:
        """Its layouts, by the names under which `explain` shows them; none where the tensors are another format's."""

    def holders(self, family: Family) -> Mapping[str, bool]:
        """Whether it holds at least some models of a family, by the names of its dialects, such as its own."""


class Training(Protocol):
    """The module that reads what a training keeps besides the weights."""

    def is_trained(self, source: Checkpoint) -> bool:
        """Whether an optimizer lies with the weights."""

    def read(self, source: Checkpoint) -> Optimizer:
        """The optimizer of an opened checkpoint, in no framework's terms.

        Raises:
            SourceError: there is none, or it is damaged or incomplete.
            UnsupportedError: it is not Adam's, or kept in a way that is not known.
        """

    def states(self, source: Checkpoint) -> tuple[Mapping[str, Checkpoint], Mapping[str, Any]]:
        """Its states, each as a checkpoint of its own, and what `inspect` says of it. Raises as `read` does."""


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        name: what checkpoints, plans and manifests call it.
        about: what a folder of it holds.
        commands: a hint: the commands that read it.
        reader: loads the module that reads it.
        training: loads the module that reads its optimizer; None where no optimizer is read.
        to_folder: the command that makes a Hugging Face folder of it; empty where it is one.
        reader_options: the options of reading (`Settings`) that its reader knows, of those that not all know.
        writer_options: the options that its writer knows, of those that not all know.
        ranked: whether each rank has tensors of its own in its files.
        replicas: what is done with further copies of a tensor unless the user says: `verify`, or `drift`.
    """

    name: str
    about: str
    commands: str
    reader: Callable[[], Reader]
    training: Callable[[], Training] | None = None
    to_folder: str = ""
    reader_options: tuple[str, ...] = ()
    writer_options: tuple[str, ...] = ()
    ranked: bool = False
    replicas: str = "verify"
