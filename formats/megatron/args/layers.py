"""Codecs of arguments that select layers: those without rotary embedding, without sliding window, without experts.

Megatron selects them by 0 or 1 for each layer, or by a step. Facts: megatron-core 0.16.1,
transformer/transformer_config.py `no_rope_freq`, models/gpt/experimental_attention_variant_module_specs.py
`get_linear_attention_pattern`, transformer/utils.py `is_layer_window_attention` and `get_sliding_window_causal_mask`,
models/gpt/gpt_layer_specs.py `get_gpt_decoder_layer_specs`. Transformer Engine 2, pytorch/attention/
dot_product_attention/utils.py `check_set_window_size`: to its causal masks -1 is no bound, and a right of -1 is 0. To
the mask of megatron-core's own attention (0.19.2 too) -1 is a number: a token does not see itself. Local layers have
that attention, and since 0.19 those of Transformer Engine with `--attention-backend local` (megatron/training/models/
gpt.py `build_model`), in Megatron-Bridge and NeMo with any megatron-core (`builders.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from formats.errors import UnsupportedError, short
from formats.megatron.args.codecs import refusal
from formats.model.codec import Codec, Context, Maker, single
from formats.model.values import some_layers
from formats.torch_files.pickle_values import Opaque

SLIDING, FULL = "sliding_attention", "full_attention"
Layers = tuple[int, ...]


def _layers(context: Context) -> range:
    """The numbers of all layers; empty if the number of layers is not known."""
    return some_layers(context.values["layers"])


def _named(
    flag: int, at: Callable[[int, int], bool], *types: type, absent: int | None = None, even: bool = False
) -> Maker:
    """A codec of the layers that an argument selects, by a list with 0 or 1 for each layer, or by a step.

    Args:
        flag: the flag of the selected layers in a list.
        at: whether (layer, step) selects the layer.
        types: the types that flags may have.
        absent: the value of an argument that is absent; None if that selects no layer.
        even: whether the step has to divide the number of layers.
    """

    def of(key: str) -> Codec:
        def read(_: Any, context: Context) -> Layers:
            given, count, layers = context.file.get(key, absent), context.values["layers"], _layers(context)
            match given:
                case None if absent is None:
                    return ()
                case int(step) if type(step) is int and step > 0 and not (even and len(layers) % step):
                    return tuple(layer for layer in layers if at(layer, step))
                case list(flags) if len(flags) == count and all(type(of) in types and of in (0, 1) for of in flags):
                    return tuple(layer for layer in layers if flags[layer] == flag)
            raise UnsupportedError(f"{context.where}: {key} = {short(given)} says nothing about {short(count)} layers")

        def write(layers: Layers, context: Context) -> list[int] | int | None:
            return [flag if layer in layers else 1 - flag for layer in _layers(context)] if layers else absent

        return single(read, write)(key)

    return of


def _last(layer: int, step: int) -> bool:
    return (layer + 1) % step == 0


def full(key: str, window: str) -> Codec:
    """A codec of the layers without a window: those with a 0, or the last of each step; all if no window is set."""
    named = _named(0, _last, int, bool)(key)
    return Codec(
        lambda spelled, context: named.read(spelled, context) if window in spelled else tuple(_layers(context)),
        lambda layers, context: named.write(layers if context.values["sliding_window"] else (), context),
    )


def _read_kinds(_: Any, context: Context) -> list[str]:
    return [FULL if layer in context.values["full_layers"] else SLIDING for layer in _layers(context)]


def _write_kinds(value: Any, context: Context) -> list[int]:
    count = context.values["layers"]
    kinds = value or [FULL if layer % 2 else SLIDING for layer in _layers(context)]
    if not (isinstance(kinds, list) and len(kinds) == count and all(kind in (SLIDING, FULL) for kind in kinds)):
        raise refusal(context, f"of {short(count)} layers each is {SLIDING} or {FULL}, this model's are {short(kinds)}")
    return [int(kind == SLIDING) for kind in kinds]


def is_local(backend: Any) -> bool:
    """Whether an attention backend is local, in the args of Megatron-LM or the YAML of Megatron-Bridge."""
    match backend:
        case "local" | Opaque(name="AttnBackend", args=(4,)):
            return True
        case {"_target_": "megatron.core.transformer.enums.AttnBackend", "_args_": [4]}:
            return True
    return False


def own_attention(args: Mapping[str, Any]) -> str:
    """The argument with its value by which attention is megatron-core's own, not Transformer Engine's; else empty."""
    if args.get("transformer_impl") == "local":
        return "transformer_impl = local"
    return "attention_backend = local" if is_local(args.get("attention_backend")) else ""


def _read_window(spelled: Any, context: Context) -> int | None:
    local = own_attention(context.file)
    match spelled:
        case None:
            return None
        case [-1, 0 | -1] if not local:
            return None
        case [int(left), int(right)] if left >= 0 and (right == 0 or (right == -1 and not local)):
            return left + 1
    given = f"window_size = {short(spelled)}" + (f" with {local}" if local else "")
    raise UnsupportedError(f"{context.where}: {given} is not supported, only (left, 0)")


def _unfused(key: str) -> Codec:
    """A codec of the fused softmax, which `ambiguous.require_window` judges: false in a model with a window."""
    return Codec(lambda *_: None, lambda _, context: {key: False} if context.values["sliding_window"] else {})


CODECS: Mapping[str, Maker] = {
    "no-RoPE layers": _named(1, _last, int, bool, even=True),
    "full-attention layers": full,
    "linear layers": _named(1, lambda layer, step: bool((layer + 1) % step), int),
    "MoE frequency": _named(0, lambda layer, step: bool(layer % step), int, absent=1),
    "layer types": single(_read_kinds, _write_kinds),
    "not with a window": _unfused,
    "left window": single(_read_window, lambda tokens, _: None if tokens is None else (tokens - 1, 0)),
}
"""The codecs by name.

`no-RoPE layers` are those with a 1, or the last of each step; `linear layers` those with a 1, or all but the last of
each step. `MoE frequency` selects the dense layers: those with a 0, or all but the first of each step. `layer types`
are a list of names for sliding and full attention, in turn if a config has none. The setting of `left window` counts
the tokens that a token sees, itself included; Megatron counts the tokens to its left."""
