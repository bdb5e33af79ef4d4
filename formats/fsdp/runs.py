"""Find the checkpoints in the folder of a training run, which has a subfolder for each saved step."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from formats.errors import SourceError

STEPS = re.compile(r"(?:checkpoint|step|global_step|epoch)[-_]?(\d+)")
"""The name of a checkpoint folder in a run, with its step."""


def checkpoints(path: Path, detect: Callable[[Path], bool]) -> list[Path]:
    """The checkpoints in a run's folder, the newest first; none when the folder is a checkpoint itself."""
    try:
        if not path.is_dir() or detect(path):
            return []
        numbered = [(int(step[1]), child) for child in path.iterdir() if (step := STEPS.fullmatch(child.name))]
        return [child for _, child in sorted(numbered, reverse=True) if child.is_dir() and detect(child)]
    except OSError as error:
        raise SourceError(f"{error.filename or path}: {error.strerror}") from None
