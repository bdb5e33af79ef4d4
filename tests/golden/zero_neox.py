"""Layers with the parameter names and shapes of GPT-NeoX's Llama (GQA, SwiGLU, RMSNorm, no biases), for zero_world.py.

Written from the names alone. Each tensor parallel rank has its part of every matrix and never speaks to the others:
what the layers compute makes no sense over ranks, and a norm, replicated in NeoX, drifts apart from its copies, as it
does there in long runs, only faster.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.nn import functional

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 96, 32, 3, 4, 2, 48
HEAD = HIDDEN // HEADS


class Embedding(nn.Module):
    """Index 0, and the logits where tied."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY // parts, HIDDEN)

    @property
    def word_embeddings_weight(self) -> nn.Parameter:
        """What DeepSpeed ties."""
        return self.word_embeddings.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """A rank that lacks a row takes another."""
        return self.word_embeddings(ids % self.word_embeddings.num_embeddings)


class RMSNorm(nn.Module):
    """`scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """x / rms(x) * scale."""
        return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale


class Attention(nn.Module):
    """`query_key_value` and `dense`: no attention, but every weight has a gradient."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.sizes = [count * HEAD // parts for count in (HEADS, KV_HEADS, KV_HEADS)]
        self.query_key_value = nn.Linear(HIDDEN, sum(self.sizes), bias=False)
        self.dense = nn.Linear(self.sizes[0], HIDDEN, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Of a token by itself."""
        query, key, values = self.query_key_value(value).split(self.sizes, -1)
        twice = HEADS // KV_HEADS
        return self.dense(query.sigmoid() * key.repeat(1, 1, twice) + values.repeat(1, 1, twice))


class MLP(nn.Module):
    """`linear1`, whose second half is the gate, and `linear2`."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(HIDDEN, 2 * INNER // parts, bias=False)
        self.linear2 = nn.Linear(INNER // parts, HIDDEN, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """SwiGLU."""
        up, gate = self.linear1(value).chunk(2, -1)
        return self.linear2(up * functional.silu(gate))


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.input_layernorm, self.attention = RMSNorm(), Attention(parts)
        self.post_attention_layernorm, self.mlp = RMSNorm(), MLP(parts)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Serial residuals."""
        value = value + self.attention(self.input_layernorm(value))
        return value + self.mlp(self.post_attention_layernorm(value))


class FinalNorm(nn.Module):
    """`norm.scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Call it."""
        return self.norm(value)


class Head(nn.Module):
    """`final_linear.weight`."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.final_linear = nn.Linear(HIDDEN, VOCABULARY // parts, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's logits."""
        return self.final_linear(value)


def same(value: Any) -> Any:
    """What NeoX has a lambda for, at the indices 1 and L+2."""
    return value


def logits(embedding: Embedding, value: torch.Tensor) -> torch.Tensor:
    """The head of a tied model."""
    return functional.linear(value, embedding.word_embeddings_weight)


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy within the rank's part of the vocabulary."""
    size = output.shape[-1]
    return functional.cross_entropy(output.float().view(-1, size), labels.view(-1) % size)


def specs(parts: int, *, tied: bool = False) -> list[LayerSpec | Callable[[Any], Any]]:
    """NeoX's sequence of layers, for a PipelineModule."""
    middle = [same, *(LayerSpec(Layer, parts) for _ in range(LAYERS)), same, LayerSpec(FinalNorm)]
    if not tied:
        return [LayerSpec(Embedding, parts), *middle, LayerSpec(Head, parts)]
    options = {"tied_weight_attr": "word_embeddings_weight"}
    first = TiedLayerSpec("embed", Embedding, parts, **options)
    return [first, *middle, TiedLayerSpec("embed", Embedding, parts, forward_fn=logits, **options)]


class Sequential(nn.Module):
    """NeoX without pipeline parallelism: `sequential.{i}.`."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        built = [spec.build() if isinstance(spec, LayerSpec) else nn.Identity() for spec in specs(parts)]
        self.sequential = nn.Sequential(*built)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return loss(self.sequential(ids), ids)


def initialise(model: nn.Module, part: int) -> None:
    """Weights that the name decides, and for a matrix the part; the matrices are marked as NeoX marks what is split."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            split = parameter.dim() > 1
            seed = zlib.crc32(f"{name.removeprefix('sequential.')} {part if split else 0}".encode())
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
            if split:
                parameter.model_parallel = True
            else:
                parameter.add_(1)


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro batches without end; the ranks of a replica must have the same."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        ids = torch.randint(VOCABULARY, (1, 24), generator=generator)
        yield ids, ids
