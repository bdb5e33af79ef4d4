"""Which tensors of a model are frozen: by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from formats.errors import UsageError


def frozen(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The names of the tensors that are frozen.

    Args:
        names: names of all trainable tensors of the model, as transformers has them in memory.
        patterns: shell patterns; the last one that matches a name decides, and a pattern with a leading `!` unfreezes.

    Raises:
        UsageError: a pattern matches no name, or nothing is left to train.
    """
    known = sorted(names)
    chosen = set[str]()
    for pattern in patterns:
        matched = {name for name in known if fnmatchcase(name, pattern.removeprefix("!"))}
        if not matched:
            raise UsageError(
                f"model.freeze: {pattern} matches no tensor of the model",
                f"it has {known[0]}, {known[len(known) // 2]} and {len(known) - 2} more" if len(known) > 2 else "",
            )
        chosen = chosen - matched if pattern.startswith("!") else chosen | matched
    if patterns and len(chosen) == len(known):
        raise UsageError(
            f"model.freeze freezes all {len(known)} tensors of the model: nothing would be trained",
            '--model.freeze \'["*", "!lm_head.*"]\' trains the head',
        )
    return chosen
