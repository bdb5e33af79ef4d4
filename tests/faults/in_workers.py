"""Runs a command of `convert` whose jobs are done by processes, however small: python in_workers.py WORDS..."""

from __future__ import annotations

from converters.move import engine


def main() -> None:
    """Make every job large enough, then run the command."""
    from converters.cli import main as convert

    engine.EACH = 1
    convert()


if __name__ == "__main__":
    main()
