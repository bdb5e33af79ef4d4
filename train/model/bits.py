"""The import of bitsandbytes, an optional dependency that runs on GPUs and on CPUs."""

from __future__ import annotations

from typing import Any

from formats.errors import UnsupportedError


def bitsandbytes(what: str) -> Any:
    """Import bitsandbytes and return the module.

    Args:
        what: the setting that needs bitsandbytes, for the error.

    Raises:
        UnsupportedError: bitsandbytes is not installed.
    """
    try:
        import bitsandbytes as library
    except ImportError:
        raise UnsupportedError(
            f"{what} needs bitsandbytes, which is not installed", "pip install 'vitruvian[bits]'"
        ) from None
    return library
