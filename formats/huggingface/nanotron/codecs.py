"""Codecs of the keys of nanotron's model_config.json: how the value of each key becomes a model setting, and back.

The table of keys is in model_config.py. Facts: huggingface/nanotron at 2411b022, config/models_config.py,
models/llama.py, models/qwen.py, nn/moe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.model.codec import Codec, Context, Maker, Spelled, fixed, scalar
from formats.model.values import boolean, positive_float, positive_int, some_layers

T = TypeVar("T")
LLAMA, QWEN2 = "llama", "qwen2"
"""The model classes of nanotron, as conditions of table rows."""
MARKS = {LLAMA: "is_llama_config", QWEN2: "is_qwen2_config"}
"""Model class: the key that marks its config."""
FLAG, COUNT = "true or false", "a whole number above 0"
"""The values that a key accepts, for error messages."""


def _flag(key: str) -> Codec:
    """The codec of a boolean key that is false where it is absent."""
    return scalar(
        key,
        lambda value, context: value is not None and checked_in_file(boolean, value, key, context.where, FLAG),
        lambda value, _: value,
    )


def _head_dim() -> Codec:
    """The codec of the head dimension, which has no key: it is always hidden / heads."""

    def read_size(_: Spelled, context: Context) -> int:
        hidden, heads = (
            checked_in_file(positive_int, context.values[name], key, context.where, COUNT)
            for name, key in (("hidden", "hidden_size"), ("heads", "num_attention_heads"))
        )
        if hidden % heads:
            raise SourceError(f"{context.where}: {heads} heads do not divide hidden_size = {hidden}")
        return hidden // heads

    def check(value: int, context: Context) -> Spelled:
        hidden, heads = context.values["hidden"], context.values["heads"]
        if value * heads != hidden:
            raise RefusedError(f"nanotron's heads have hidden / heads = {hidden / heads:g} elements, and these {value}")
        return {}

    return Codec(read_size, check)


def _neighbours(key: str) -> Codec:
    """The codec of whether neighbours in a head rotate; written as false (halves), the default of newer nanotron."""

    def read_order(value: Any, context: Context) -> bool:
        if value is None and (key in context.file or not context.file.get(MARKS[LLAMA])):
            raise SourceError(f"{context.where} does not say {key}, and there is no safe default")
        return value is None or checked_in_file(boolean, value, key, context.where, FLAG)

    return scalar(key, read_order, lambda *_: False)


def _interpolation(key: str) -> Codec:
    """The codec of `rope_seq_len_interpolation_factor`: positions are divided by it, which is linear scaling."""

    def written_factor(scaling: Mapping[str, Any] | None, _: Context) -> Any:
        kind, factor = (scaling or {}).get("rope_type"), (scaling or {}).get("factor")
        if scaling is not None and (kind != "linear" or {*scaling} != {"rope_type", "factor"}):
            raise RefusedError(
                f"nanotron's rotary embeddings are plain or linearly scaled, these are {kind}",
                "--set rope_scaling=none if the training shall do without: below the original length few do the same",
            )
        return factor

    def read_scaling(factor: Any, context: Context) -> Mapping[str, Any] | None:
        return (
            None
            if factor is None
            else {
                "rope_type": "linear",
                "factor": checked_in_file(
                    positive_float, factor, key, context.where, "a finite number above 0, or null for none"
                ),
            }
        )

    return scalar(key, read_scaling, written_factor)


def checked_in_file(check: Callable[[Any, str, str], T], value: Any, key: str, where: str, way: str) -> T:
    """Return a checked value of a key that `--set` cannot overrule, so that the error points to the file.

    The value is needed before `--set` is applied, or is not a model setting.

    Raises:
        SourceError: the value is invalid; `way` describes the valid ones.
    """
    try:
        return check(value, key, where)
    except SourceError as error:
        raise SourceError(str(error), f"correct it there: {way}") from None


def _unapplied(key: str) -> Codec:
    """The codec of `rope_scaling`, a field that nanotron's model classes have and never apply."""

    def check(value: Any, context: Context) -> None:
        if value is not None:
            raise UnsupportedError(
                f"{context.where} says {key}, which no model of nanotron applies",
                "set it to null there: the model was trained without",
            )

    return scalar(key, check, lambda *_: None)


def _nope_layers(key: str) -> Codec:
    """The codec of `no_rope_layer` = n: every n-th layer has no rotary embedding (models/qwen.py `_forward_packed`)."""

    def read_layers(every: Any, context: Context) -> tuple[int, ...]:
        step = (
            0
            if every is None
            else checked_in_file(positive_int, every, key, context.where, f"{COUNT}, or null for none")
        )
        return tuple(layer for layer in some_layers(context.values["layers"]) if step and (layer + 1) % step == 0)

    def written_step(layers: tuple[int, ...] | None, context: Context) -> int | None:
        count = context.values["layers"]
        step = layers[0] + 1 if layers else None
        if layers and (step is None or count % step or layers != (*range(step - 1, count, step),)):
            raise RefusedError(
                f"nanotron leaves out the rotation in each n-th layer, not in layers {list(layers)} of {count}"
            )
        return step

    return scalar(key, read_layers, written_step)


def _dense_layers(key: str) -> Codec:
    """The codec of the list of layers that have experts, read as the dense layers; [-1] means all layers."""

    def read_dense(layers: Any, context: Context) -> Any:
        every = some_layers(context.values["layers"])
        if layers in (None, [-1]):
            return ()
        if not isinstance(layers, list) or not all(type(layer) is int and layer in every for layer in layers):
            raise SourceError(f"{context.where} says {key} = {short(layers)}, these are no layers of {len(every)}")
        return tuple(layer for layer in every if layer not in layers)

    return scalar(
        key,
        read_dense,
        lambda dense, context: [layer for layer in range(context.values["layers"]) if layer not in (dense or ())],
    )


def _shared_expert(key: str) -> Codec:
    """The codec of `enable_shared_expert`, which must be true: the supported family with experts always has one."""

    def check(value: Any, context: Context) -> bool:
        if value is not True:
            raise UnsupportedError(
                f"{context.where}: {key} = {short(value)} is not supported, only True: transformers has no such "
                "class without an expert for all tokens"
            )
        return True

    return scalar(key, check, lambda *_: True)


CODECS: Mapping[str, Maker] = {
    "must be hidden / heads": _head_dim,
    "required": _neighbours,
    "linear factor": _interpolation,
    "no scaling": lambda: Codec(lambda *_: None, lambda *_: {}),
    "must be null": _unapplied,
    "every n-th": _nope_layers,
    "sparse list": _dense_layers,
    "must be false": fixed(
        False,
        None,
        error=lambda *_: RefusedError(
            "nanotron does not make the weights of a token's experts add up to 1, and this model does"
        ),
    ),
    "must be true": _shared_expert,
    "flag": _flag,
}
"""Codec, by its name in the table. A router's weights are the softmax over all experts: those of the chosen ones do not
add up to 1 (nn/moe.py `Router.routing`)."""
