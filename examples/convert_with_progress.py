"""A conversion in a notebook or a service, with its own progress: `convert_with_progress.py SRC OUT`."""

import sys

import vitruvian


def progress(what: str, done: int, total: int) -> None:
    """Called from several threads."""
    if done == total:
        print(f"{what}: {total} bytes")


try:
    result = vitruvian.convert(sys.argv[1], sys.argv[2], to="megatron", tp=2, progress=progress)
except vitruvian.VitruvianError as error:
    sys.exit(f"{error}\n{error.hint}")
print(f"{result.tensors} tensors, digest {result.digest}")
