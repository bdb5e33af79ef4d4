"""QLoRA: the weights of linear layers are NF4 of bitsandbytes, quantized when they are read. Each rank has all of them.

A frozen weight takes half a byte per element, and a float32 for each 64 elements. FSDP does not shard these weights:
only adapters, embedding, head and norms are sharded. The value in the computation is that of bitsandbytes (0.50.2
functional.py `quantize_4bit`), which transformers' `load_in_4bit` computes too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from formats.errors import UnsupportedError
from train.model.bits import bitsandbytes
from train.model.parts import layers

KIND = "nf4"


class Packed(nn.Parameter):
    """A frozen weight with two 4-bit numbers in a byte, [elements / 2, 1]; `whole_shape` is the weight's own shape."""

    whole_shape: tuple[int, ...]
    dtype_of_whole: torch.dtype
    state: Any

    def quantize(self, whole: torch.Tensor) -> None:
        """Quantize a weight and keep the result."""
        library = bitsandbytes("lora.quantize")
        self.data, self.state = library.functional.quantize_4bit(
            whole.to(self.device, self.dtype_of_whole), quant_type=KIND
        )


class Linear4bit(nn.Linear):
    """A linear layer whose weight is `Packed`."""

    weight: Packed

    def __init__(self, plain: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        packed = torch.empty(plain.weight.numel() // 2, 1, dtype=torch.uint8, device=device)
        self.weight = Packed(packed, requires_grad=False)
        self.weight.whole_shape = tuple(plain.weight.shape)
        self.weight.dtype_of_whole = plain.weight.dtype
        self.register_parameter("bias", plain.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer; the weight is dequantized in the forward and in the backward pass."""
        out: torch.Tensor = bitsandbytes("lora.quantize").matmul_4bit(
            x, self.weight.t(), quant_state=self.weight.state, bias=self.bias
        )
        return out


def quantize(model: Any, device: torch.device) -> None:
    """Replace the linear layers in the decoder's layers by layers with quantized weights.

    Args:
        model: the model, on the meta device.
        device: where the model will run.

    Raises:
        UnsupportedError: bitsandbytes is not installed, or the model has experts, whose weights are no linear layers.
    """
    bitsandbytes("lora.quantize")
    for layer in layers(model):
        for name, module in [*layer.named_modules()]:
            if any(parameter.dim() > 2 for parameter in module.parameters(recurse=False)):
                raise UnsupportedError(
                    f"{model.config.model_type} has experts, which are not quantized here", "remove lora.quantize"
                )
            if isinstance(module, nn.Linear):
                path, _, last = name.rpartition(".")
                setattr(layer.get_submodule(path), last, Linear4bit(module, device))


def packed(model: Any) -> set[nn.Parameter]:
    """The quantized weights of a model."""
    return {tensor for tensor in model.parameters() if isinstance(tensor, Packed)}
