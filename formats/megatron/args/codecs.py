"""Codecs that any argument of Megatron may have."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args.fields import equal
from formats.model.codec import Codec, Context, Maker, Spelled, Value, scalar


def cannot(context: Context, why: str) -> RefusedError:
    """Why Megatron has no such model."""
    return RefusedError(f"megatron-core cannot compute this {context.values['family']}: {why}")


def single(read: Value, write: Value = lambda value, _: value) -> Maker:
    """One key, None where it has no value. A row may name more, which are read."""
    return lambda key, *_: scalar(key, read, write)


def epsilon_of(what: str, only: float) -> Maker:
    """The epsilon of all norms, which has to be that of the norms of something."""

    def read(spelled: Any, context: Context) -> Any:
        if spelled != only:
            known = f"layernorm_epsilon = {short(spelled)} is not supported with {what}, only {only}"
            raise UnsupportedError(f"{context.where}: {known}")
        return spelled

    def write(value: float, context: Context) -> float:
        if value != only:
            raise cannot(context, f"its norms have an epsilon of {value:g}, those of its {what} {only:g}")
        return value

    return single(read, write)


def fixed(why: str, *allowed: Any) -> Callable[[], Codec]:
    """What no argument says: the first value; of others that are not allowed `why` is said, with {} for the value."""

    def write(value: Any, context: Context) -> Spelled:
        if value not in allowed:
            raise cannot(context, why.format(short(value)))
        return {}

    return lambda: Codec(lambda *_: allowed[0], write)


def derived(write: Callable[[Mapping[str, Any]], Any]) -> Maker:
    """One key, which is written as it follows from the settings, and not read."""
    return lambda key: Codec(lambda *_: None, lambda _, context: {key: write(context.values)})


def choice(*spellings: tuple[Any, Any]) -> Maker:
    """One key that may have some values: (its value, the setting), the first where it is absent."""

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
    """One key that has one value: `= VALUE`, in JSON."""
    return {f"= {json.dumps(value)}": choice((value, None)) for value in values}


def switch(*allowed: bool, opposite: Collection[str] = ()) -> Maker:
    """Keys that mean the same, or the opposite: one of `allowed`, the first where they are absent."""

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
