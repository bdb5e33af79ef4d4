"""Where the parts of a model of transformers are."""

from __future__ import annotations

from typing import Any

from torch import nn

from formats.errors import UnsupportedError


def decoder_of(model: Any) -> Any:
    """The model without its head.

    Llama 4 names another prefix than it has, and gives itself (transformers 5.23.0 models/llama4/modeling_llama4.py,
    `Llama4ForCausalLM.base_model_prefix`); then it is what lies beside the head under the usual name.
    """
    found = model.get_decoder()
    inner = getattr(model, "model", None)
    return inner if found is model and isinstance(inner, nn.Module) else found


def layers(model: Any) -> list[Any]:
    """The decoder's layers."""
    decoder = decoder_of(model)
    for name in ("layers", "h", "blocks"):
        if isinstance(getattr(decoder, name, None), nn.ModuleList):
            return list(getattr(decoder, name))
    raise UnsupportedError(f"{model.config.model_type} has no list of layers where others have it")
