"""`convert` without the checksums of its source: python -m tests.bench.unchecked {with,without} WORDS ….

There is no option for it, so they are taken out here, in a process of their own. `with` starts the same way and leaves
them in: what is compared differs in nothing else.
"""

from __future__ import annotations

import sys
from typing import Any

from converters import cli
from converters.move.source_checks import SourceChecks, Verdict


def nothing(*_: Any) -> None:
    """Count no bytes."""


def none_compared(*_: Any) -> Verdict:
    """Read nothing further."""
    return Verdict(0, 0, 0)


if __name__ == "__main__":
    if sys.argv.pop(1) == "without":
        SourceChecks.passed = nothing  # type: ignore[method-assign]
        SourceChecks.complete = none_compared  # type: ignore[method-assign]
    cli.main()
