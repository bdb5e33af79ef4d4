"""Codecs that rows of several arguments of Megatron use."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args.fields import equal
from formats.model.codec import Codec, Context, Maker, Spelled, Value, scalar


def refusal(context: Context, why: str) -> RefusedError:
    """The error that megatron-core cannot compute a model."""
    return RefusedError(f"megatron-core cannot compute this {context.values['family']}: {why}")


def single(read: Value, write: Value = lambda value, _: value) -> Maker:
    """A codec of one key, with None for no value; further names in the row are only read."""
    return lambda key, *_: scalar(key, read, write)


def epsilon_of(what: str, only: float) -> Maker:
    """A codec of the epsilon of all norms, which must be `only`, the epsilon of the norms of `what`."""

    def read(spelled: Any, context: Context) -> Any:
        if spelled != only:
            known = f"layernorm_epsilon = {short(spelled)} is not supported with {what}, only {only}"
            raise UnsupportedError(f"{context.where}: {known}")
        return spelled

    def write(value: float, context: Context) -> float:
        if value != only:
            raise refusal(context, f"its norms have an epsilon of {value:g}, those of its {what} {only:g}")
        return value

    return single(read, write)


def fixed(why: str, *allowed: Any) -> Callable[[], Codec]:
    """A codec of a setting without an argument: reads the first value, refuses values that are not allowed.

    Args:
        why: the reason in the error, with {} for the value.
        allowed: the values that may be written; nothing is written for them.
    """

    def write(value: Any, context: Context) -> Spelled:
        if value not in allowed:
            raise refusal(context, why.format(short(value)))
        return {}

    return lambda: Codec(lambda *_: allowed[0], write)


def derived(write: Callable[[Mapping[str, Any]], Any]) -> Maker:
    """A codec of one key whose value is computed from the settings by `write`, and not read."""
    return lambda key: Codec(lambda *_: None, lambda _, context: {key: write(context.values)})


def choice(*spellings: tuple[Any, Any]) -> Maker:
    """A codec of one key that has one of some values; without the key it is the first.

    Args:
        spellings: (value of the key, value of the setting).
    """

    def of(key: str) -> Codec:
        def read(_: Any, context: Context) -> Any:
            spelled = context.file.get(key, spellings[0][0])
            for known, value in spellings:
                if equal(spelled, known):
                    return value
            only = f"{key} = {short(spelled)} is not supported, only {spellings[0][0]!r}"
            raise UnsupportedError(f"{context.where}: {only}")

        return single(read, lambda value, _: next((known for known, of in spellings if of == value), spellings[0][0]))(
            key
        )

    return of


def only(*values: Any) -> dict[str, Maker]:
    """Codecs of keys that have one value each, by name: `= VALUE`, in JSON."""
    return {f"= {json.dumps(value)}": choice((value, None)) for value in values}


def switch(*allowed: bool, opposite: Collection[str] = ()) -> Maker:
    """A codec of a boolean setting under several keys that mean the same, or the opposite.

    Args:
        allowed: the values that the setting may have; the first if all keys are absent.
        opposite: the keys that mean the opposite.
    """

    def of(*keys: str) -> Codec:
        def read(spelled: Spelled, context: Context) -> bool:
            flags = dict[str, bool]()
            for key in keys:
                known = choice(*((flag is not (key in opposite), flag) for flag in allowed))(key)
                flags[key] = known.read(spelled, context)
            given = {key: flag for key, flag in flags.items() if key in context.file}
            if len({*given.values()}) > 1:
                words = " and ".join(f"{key} = {context.file[key]}" for key in given)
                raise UnsupportedError(f"{context.where}: {words} contradict each other")
            return next(iter(given.values()), allowed[0])

        return Codec(read, lambda value, _: {key: bool(value) is not (key in opposite) for key in keys})

    return of
