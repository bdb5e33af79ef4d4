"""Codecs that rows of several arguments of Megatron use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.model.codec import Codec, Context, Maker, Spelled, choice, single


def refusal(context: Context, why: str) -> RefusedError:
    """The error that megatron-core cannot compute a model."""
    return RefusedError(f"megatron-core cannot compute this {context.values['family']}: {why}")


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


def derived(write: Callable[[Mapping[str, Any]], Any]) -> Maker:
    """A codec of one key whose value is computed from the settings by `write`, and not read."""
    return lambda key: Codec(lambda *_: None, lambda _, context: {key: write(context.values)})


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
