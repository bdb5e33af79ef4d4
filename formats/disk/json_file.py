"""Reads JSON files of other programs: their size, depth, numbers and duplicate keys are checked."""

from __future__ import annotations

import json
from math import isinf
from pathlib import Path
from typing import Any

from formats.disk.safetensors import file_size, unique
from formats.errors import SourceError

MAX_JSON = 64 << 20


DIGITS = 300
"""Maximum number of digits of an integer; longer ones are beyond any float."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        SourceError: the file is missing, too large or no JSON object, or gives a key twice.
    """
    try:
        if (size := file_size(path)) > MAX_JSON:
            raise SourceError(f"{path} has {size} bytes, too many for a configuration")
        text = path.read_bytes().decode("utf-8")  # as transformers does: json.loads would take other encodings too
        value = json.loads(text, parse_int=_whole, parse_float=_fraction, object_pairs_hook=unique)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    except OverflowError as error:
        raise SourceError(f"{path} has {error}, which no setting can be") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{path} holds no JSON object")
    return value


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise OverflowError(f"a number of {len(text.lstrip('-'))} digits")
    return int(text)


def _fraction(text: str) -> float:
    if isinf(number := float(text)):
        raise OverflowError(f"the number {text[:20]}")
    return number
