"""Regular expressions in the settings of a LoRA: those whose matching can take time that doubles with each letter.

Python's `re` goes back: a repeat or a choice inside a repeat may be matched in as many ways as there are subsets of the
letters of a name, as in `([a-z.]+)+!`. What PEFT, trainers and people write of names has no use for it.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

EXPRESSIONS = (
    "target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern",
)  # fmt: skip
"""Settings with expressions: a text, a list of texts, or a map whose keys are."""


def nested(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield setting and expression where a repeat contains a choice or another repeat."""
    for name in EXPRESSIONS:
        value = config.get(name)
        texts = [value] if isinstance(value, str) else value or ()
        yield from ((name, text) for text in texts if _is_nested(_parsed(text), inside=False))


def _parsed(text: str) -> Any:
    """The tree of an expression; None of what is no expression, which is found where it is matched."""
    parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
    try:
        return parser.parse(text)
    except re.error:
        return None


def _is_nested(node: Any, *, inside: bool) -> bool:
    """Whether a part of a parsed expression has such a repeat, or is one if it is `inside` a repeat."""
    node = getattr(node, "data", node)
    kind = repr(node[0]) if isinstance(node, tuple) and node else ""
    if kind.endswith("_REPEAT"):
        low, high, repeated = node[1]
        return (inside and low != high) or _is_nested(repeated, inside=inside or high > 1)
    if kind == "BRANCH" and inside:
        return True
    return isinstance(node, list | tuple) and any(_is_nested(part, inside=inside) for part in node)
