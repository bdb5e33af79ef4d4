"""The command `vitruvian`: `convert` and `train` under one name, for `python -m` and `torchrun -m` too."""

from __future__ import annotations

import atexit
import gc
import os
import sys

from vitruvian import beside

USAGE = """\
Usage: vitruvian convert COMMAND ...   checkpoints between frameworks
       vitruvian train COMMAND ...     data and supervised fine-tuning
       vitruvian --version

Each has --help. `convert` and `train` alone are the same commands.
"""


def convert() -> None:
    """The command `convert`. It multiplies matrices in one thread each, so OpenBLAS is kept from starting threads."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _run("converters.cli")


def train() -> None:
    """The command `train`."""
    _run("train.cli")


def _run(module: str) -> None:
    """Run a command. Modules and headers are many small objects without cycles, of which a collection frees nothing."""
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)  # no collection at the end either, which takes 60 ms of 400
    beside.load(module).main()


COMMANDS = {"convert": convert, "train": train}


def main() -> None:
    """Entry point."""
    words = sys.argv[1:]
    if words and words[0] in COMMANDS:
        sys.argv = [f"{sys.argv[0]} {words[0]}", *words[1:]]
        COMMANDS[words[0]]()
        return
    if words == ["--version"]:
        from importlib.metadata import version

        sys.stdout.write(f"vitruvian {version('vitruvian')}\n")
        return
    known = words in ([], ["-h"], ["--help"])
    (sys.stdout if known else sys.stderr).write(USAGE if known else f"error: there is no command {words[0]}\n{USAGE}")
    sys.exit(0 if known else 2)


if __name__ == "__main__":
    main()
