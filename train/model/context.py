"""Context parallelism: attention of a rank's queries to the keys and values of the other ranks of its group.

Each layer gathers the keys and values of all parts of the rows, and slices from the beginning of the document of the
rank's first token up to the rank's last token. The gradients are summed back to the ranks that computed the keys and
values. The attention itself is over documents whose queries are the last tokens of their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from formats.errors import UnsupportedError

QUERIES = 1024
"""Number of queries whose scores are computed at once: the mask of all queries over all keys would be gigabytes."""


class Context(NamedTuple):
    """Which keys a part of a row attends to.

    Attributes:
        group: process group of the ranks whose keys are gathered.
        begin: place of the first key among the gathered keys.
        stop: place after the last key.
    """

    group: Any
    begin: int
    stop: int


# torch 2.13 renames both functions, and deprecates their names in torch 2.10
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    """The parts of all ranks of a group, concatenated, [n, …]; the gradient of a part is summed in float32."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.shape = group, part.shape
        whole = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
        all_gather(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        own = gradient.new_empty(ctx.shape, dtype=torch.float32)
        reduce_scatter(own, gradient.float().contiguous(), group=ctx.group)
        return own.to(gradient.dtype), None


def gathered(part: torch.Tensor, group: Any) -> torch.Tensor:
    """The parts of all ranks of a group, concatenated along the first dimension; differentiable."""
    whole: torch.Tensor = _Gather.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


def across(attend: Callable[..., tuple[Any, None]]) -> Callable[..., tuple[Any, None]]:
    """Wrap an attention over documents so that it gathers keys and values when it gets a `context` argument."""

    def attention(module: Any, query: Any, key: Any, value: Any, _: Any, **kwargs: Any) -> tuple[Any, None]:
        context: Context | None = kwargs.pop("context", None)
        if context is not None:
            key, value = (
                gathered(tensor.transpose(0, 2), context.group)[context.begin : context.stop].transpose(0, 2)
                for tensor in (key, value)
            )
        return attend(module, query, key, value, None, **kwargs)

    return attention


def sdpa(module: Any, query: Any, key: Any, value: Any, _: Any, **kwargs: Any) -> tuple[Any, None]:
    """Attention over documents whose queries are the last tokens of their keys, by `scaled_dot_product_attention`.

    Args:
        module: the attention layer.
        query: [1, heads, n, head dim].
        key: [1, groups, m, head dim].
        value: [1, groups, m, value dim].
        kwargs: `cu_seq_lens_q`, `cu_seq_lens_k`, `scaling`, `sliding_window`.

    Returns:
        [1, n, heads, value dim], and no attention weights.

    Raises:
        UnsupportedError: the layer needs dropout, a soft cap or sinks.
    """
    require_plain("sdpa across ranks", module, kwargs)
    window = kwargs.get("sliding_window")
    document, place = _places(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    document_of_key, place_of_key = _places(kwargs["cu_seq_lens_k"], kwargs["cu_seq_lens_k"])
    first = kwargs["cu_seq_lens_k"][document]  # first key of the document of each query
    begins = (first if window is None else first + (place - window + 1).clamp(min=0)).tolist()
    stops = (first + place + 1).tolist()

    def attend(low: int, high: int) -> torch.Tensor:
        keys = slice(begins[low], stops[high - 1])
        back = place[low:high, None] - place_of_key[keys]
        seen = (document[low:high, None] == document_of_key[keys]) & (back >= 0)
        if window is not None:
            seen &= back < window
        return torch.nn.functional.scaled_dot_product_attention(
            query[:, :, low:high], key[:, :, keys], value[:, :, keys], attn_mask=seen, scale=kwargs.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip

    count = query.shape[2]
    out = torch.cat([attend(low, min(low + QUERIES, count)) for low in range(0, count, QUERIES)], 2)
    return out.transpose(1, 2).contiguous(), None


def _places(ends: torch.Tensor, ends_of_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The document of each token, and the token's position in it.

    The last tokens of a document are the last of its keys, so a query's position counts from the document's first key.
    """
    sizes, totals = ends.diff(), ends_of_keys.diff()
    document = torch.repeat_interleave(torch.arange(len(sizes), device=ends.device), sizes)
    first = totals - sizes - ends[:-1]
    return document, torch.arange(len(document), device=ends.device) + first[document]


def require_plain(attention: str, module: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a layer that needs more than scores, a scale and a window.

    Args:
        attention: name of the attention, for the error.
        module: the attention layer.
        kwargs: the arguments that the layer passes to the attention.

    Raises:
        UnsupportedError: the layer has dropout, a soft cap or sinks.
    """
    for name in ("dropout", "softcap", "s_aux"):
        value = kwargs.get(name)
        if value is not None and (name != "dropout" or value):
            raise UnsupportedError(
                f"the attention {attention} has no {name}, {module.config.model_type} needs it",
                "--model.attention eager",
            )
