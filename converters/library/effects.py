"""Open the checkpoints of a proof, each with its own config, or with that of the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from converters.common.progress import Progress, Tell
from converters.plan.opening import open_source, require_effect, require_family, require_known
from converters.plan.request import Limits
from formats.checkpoint import Checkpoint, Settings
from formats.errors import ContradictionError
from formats.megatron import DIST, MEGATRON, MEGATRON_FSDP

if TYPE_CHECKING:
    from formats.families.family import Family


@dataclass(frozen=True)
class Effects:
    """How checkpoints are opened and read for a proof: settings, limits, a family of the user's own, and progress."""

    settings: Settings
    limits: Limits
    family: Family | None = None
    quiet: bool = True
    tell: Tell | None = None

    def progress(self, what: str, nbytes: int) -> Progress:
        """A progress display for a step of the work."""
        return Progress(what, nbytes, self.quiet, self.tell)

    def open(self, path: Path, settings: Settings, *others: Checkpoint, alone: bool = True) -> Checkpoint:
        """Open a checkpoint; if it is the last one, each setting has to have an effect on one of the checkpoints."""
        source = open_source(path, settings)
        if alone or others:
            require_effect(settings if alone else self.settings, source, *others)
            require_family(self.family, source, *others)
            require_known(settings.accept, source, *others)
        return source

    def open_beside(self, path: Path, other: Path, *others: Checkpoint) -> Checkpoint:
        """Open one of two checkpoints that are compared, with the config of the other if it has none.

        Where that contradicts settings of its own, it is read by these, and the comparison names the difference.
        """
        settings = own_config(path, self.settings, other)
        try:
            return self.open(path, settings, *others, alone=False)
        except ContradictionError:
            if settings.config in (None, self.settings.config):
                raise
            return self.open(path, replace(settings, config=None), *others, alone=False)


def own_config(path: Path, settings: Settings, other: Path | None = None) -> Settings:
    """The settings for one of two checkpoints, with its own config, else the one given, else that of the other."""
    own = (path / "config.json").is_file()
    if other is not None and settings.config is None and (other / "config.json").is_file():
        knows_itself = any(form.reader.detect(path) for form in (DIST, MEGATRON, MEGATRON_FSDP))
        return replace(settings, config=None if own or knows_itself else other)
    return replace(settings, config=None if own else settings.config)
