"""Recipes: which data set is read, which of its records, and what each record becomes. A recipe is a small YAML file.

about: Basque instructions of Aya             one line for `train fetch --list`
source: CohereForAI/aya_dataset               a set of the Hub; or files: ./pairs.csv, data/*.jsonl; or ./folder
config: default                               a subset of the set; several are read in order
splits: [train, test]
where: {language_code: eus}                   conditions, all of which have to hold
user: inputs                                  a field, or a template such as "{prompt}{input}"
assistant: targets
as: conversations                             or control-text, or text
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from formats.errors import UsageError
from train.data.fetch.filters import Condition, Template

FORMS = ("conversations", "control-text", "text")
ROLES = ("system", "user", "assistant")
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet")


@dataclass(frozen=True)
class Recipe:
    """A recipe that selects and converts records of a source.

    Attributes:
        name: name of the recipe's file, without suffix.
        about: description in one line.
        source: the set's name on the Hub, or files and folders.
        config: subsets of the set, in the order in which they are read; empty for the default subset.
        splits: names of the splits to read, such as train; empty if the set has only one.
        revision: branch, tag or commit on the Hub.
        quotes: whether a field of a table may be quoted; None for .csv only.
        where: conditions that a record has to meet.
        speakers: role, and the template of its turn, in the order of the turns.
        conversations: the field that has the turns as a list.
        turns: the keys for `role` and `content` in a turn of `conversations`.
        roles: pairs of a speaker's name in `conversations`, and our role.
        text: template of plain text, or of text with markers.
        keep: fields that are copied to the output.
        dedup: whether only the first record with the same prompt is kept.
        sample: number of records to draw; None for all.
        seed: seed of the sample.
        form: output format, one of `FORMS`.
    """

    name: str
    source: tuple[str, ...]
    about: str = ""
    config: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    revision: str | None = None
    quotes: bool | None = None
    where: tuple[Condition, ...] = ()
    speakers: tuple[tuple[str, Template], ...] = ()
    conversations: str | None = None
    turns: tuple[str, str] = ("role", "content")
    roles: tuple[tuple[str, str], ...] = tuple((role, role) for role in ROLES)
    text: Template | None = None
    keep: tuple[str, ...] = ()
    dedup: bool = False
    sample: int | None = None
    seed: int = 0
    form: str = "conversations"

    @property
    def local(self) -> bool:
        """Whether the source is files or folders; decided by the spelling of the source, never by what exists."""
        return is_local(self.source[0])

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field that the recipe reads, in the order of the recipe."""
        templates = [template for _, template in self.speakers] + ([self.text] if self.text else [])
        names = [condition.field for condition in self.where]
        names += [name for template in templates for name in template.fields]
        return tuple(dict.fromkeys([*names, *([self.conversations] if self.conversations else []), *self.keep]))


def is_local(source: str) -> bool:
    """Whether a source is a path: its text begins with one of . / ~ $, or has the suffix of a format."""
    return source.startswith((".", "/", "~", "$")) or source.lower().removesuffix(".gz").endswith(SUFFIXES)


def nearest(word: str, known: Iterable[str]) -> str:
    """`: did you mean X?`, if a known word is similar to a word; else empty."""
    near = get_close_matches(word, list(known), 1, 0.5)
    return f": did you mean {near[0]}?" if near else ""


def expanded(source: str) -> Path:
    """A path with ~ and variables such as $WORK expanded."""
    return Path(os.path.expandvars(source)).expanduser()


def check_local(recipe: Recipe) -> None:
    """Refuse keys of a recipe that do not apply to its kind of source.

    Raises:
        UsageError: the recipe has such a key.
    """
    if not recipe.local:
        if recipe.quotes is not None:
            raise UsageError(f"quotes is for local tables, and {recipe.source[0]} is on the Hub")
        return
    folder = len(recipe.source) == 1 and is_folder(recipe.source[0])
    for key, value in (("config", recipe.config), ("splits", recipe.splits), ("revision", recipe.revision)):
        if value and (not folder or key == "revision"):
            raise UsageError(f"{key} has no meaning for {recipe.source[0]}", "a set of the Hub is written org/name")


def is_folder(source: str) -> bool:
    """Whether a path is a folder: it has no suffix of a format."""
    return not source.lower().removesuffix(".gz").endswith(SUFFIXES)
