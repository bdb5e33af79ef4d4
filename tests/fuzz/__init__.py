"""Attacks with random cases: what ends with exit code 0 has to be right, as another program judges it.

Each module here but `__main__`, `runner` and `test_small` is one attack: `attack(seed, folder)` makes one random case
in an empty folder, runs the project on it, and returns a word for the outcome. It raises AssertionError when something
ends with exit code 0 and a wrong result, or as a bug.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

Attack = Callable[[int, Path], str]


def attacks() -> dict[str, Attack]:
    """Every attack by its name."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return {
        name: importlib.import_module(f"{__name__}.{name}").attack
        for name in sorted(names)
        if name not in ("__main__", "runner", "test_small")
    }
