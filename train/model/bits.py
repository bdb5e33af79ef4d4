"""bitsandbytes, where it is installed: it runs on GPUs and on CPUs."""

from __future__ import annotations

from typing import Any

from formats.errors import UnsupportedError


def bitsandbytes(what: str) -> Any:
    """The library.

    Args:
        what: the setting that needs it.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import bitsandbytes as library
    except ImportError:
        raise UnsupportedError(
            f"{what} needs bitsandbytes, which is not installed", "pip install 'vitruvian[bits]'"
        ) from None
    return library
