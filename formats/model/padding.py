"""The padding of a vocabulary: a trainer adds rows to the embedding until they are a multiple of a unit.

Megatron-LM and its forks: `make_vocab_size_divisible_by` times the tensor parallel size (megatron/training/tokenizer/
tokenizer.py `_vocab_size_with_padding`); nanotron alike (src/nanotron/trainer.py `_vocab_size_with_padding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.errors import RefusedError


def unit_of(multiple: Any, tp: Any, rows: int) -> int:
    """The number of rows that the padded vocabulary is a multiple of; all rows if that is not known.

    Args:
        multiple: what the files say of `make_vocab_size_divisible_by`.
        tp: what they say of the tensor parallel size of the training.
        rows: rows of the embedding; if they are no multiple, something else has padded them.
    """
    if type(multiple) is not int or type(tp) is not int or multiple <= 0 or tp <= 0:
        return rows
    return multiple * tp if rows % (multiple * tp) == 0 else rows


def require_rows(vocab: int | None, rows: int, unit: int, where: str | Path, values: Mapping[str, Any]) -> None:
    """Refuse a vocabulary that the trainer would have padded to fewer rows than the embedding has.

    Args:
        vocab: the number of tokens; None if it is not known.
        rows: rows of the embedding, padding included.
        unit: that of `unit_of`.
        where: what to call the checkpoint in an error.
        values: the user's values of settings; `vocab` among them overrules the rule.

    Raises:
        RefusedError: rows of tokens would be taken for padding.
    """
    if vocab is not None and vocab <= rows - unit and "vocab" not in values:
        raise RefusedError(
            f"a vocabulary of {vocab} would have been padded to {-(-vocab // unit) * unit} rows, {where} holds "
            f"{rows}: rows of tokens would be lost",
            f"give the tokenizer of this model, or override it with --set vocab={vocab}",
        )


def require_recorded(recorded: int, size: int | None, config: Any, where: str | Path) -> None:
    """Refuse a vocabulary other than that which the files record.

    A config may have more tokens than its tokenizer, which the files record: nothing is lost.

    Args:
        recorded: the number of tokens that the files record.
        size: the number that the user gave, None if there is none.
        config: the number in the config that belongs to the weights, None if there is none.
        where: what to call the file that records it in an error.

    Raises:
        RefusedError: the user gave another size, or a config that has fewer tokens.
    """
    given = size or config
    if type(given) is int and (given < recorded or (size and given != recorded)):
        named, way = ("--vocab-size", "leave --vocab-size out") if size else ("the config", "give its config")
        raise RefusedError(
            f"{where} says a vocabulary of {recorded}, {named} {given}: they contradict each other",
            f"{way}, or override it with --set vocab={given}",
        )
