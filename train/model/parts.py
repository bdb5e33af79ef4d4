"""The decoder of a model of transformers, and its layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from formats.errors import UnsupportedError


def decoder_of(model: Any) -> Any:
    """The model without its head.

    Llama 4 has a wrong `base_model_prefix`, so `get_decoder()` returns the model itself (transformers 5.23.0
    models/llama4/modeling_llama4.py, `Llama4ForCausalLM`); then the decoder is the attribute `model`.
    """
    decoder = model.get_decoder()
    inner = getattr(model, "model", None)
    return inner if decoder is model and isinstance(inner, nn.Module) else decoder


def layers(model: Any) -> list[Any]:
    """The layers of the model's decoder."""
    decoder = decoder_of(model)
    for name in ("layers", "h", "blocks"):
        if isinstance(getattr(decoder, name, None), nn.ModuleList):
            return list(getattr(decoder, name))
    raise UnsupportedError(f"{model.config.model_type} has no list of layers named layers, h or blocks")
