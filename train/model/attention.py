"""Attention backends, and how each keeps the documents of a packed row apart.

A row is passed to transformers as one sequence of batch 1. Two harmless-looking arguments silently disable the document
mask: an attention mask of ones, and a cache (transformers 5.23.0 masking_utils.py derives document boundaries from
positions only if there is neither). Only `forward_kwargs` makes the arguments.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

import torch

from formats.errors import UnsupportedError
from formats.huggingface.config import DROPOUTS
from train.data.rows import Flat
from train.model.context import Context, across, require_plain, sdpa
from train.model.parts import layers

BACKENDS = {
    "flash": "flash_attention_2",
    "varlen": "vitruvian_varlen",
    "flex": "flex_attention",
    "sdpa": "sdpa",
    "eager": "eager",
}
"""Name of a backend in our settings: its name in transformers."""
ACROSS = {"varlen": "vitruvian_varlen_across", "sdpa": "vitruvian_sdpa_across"}
"""Backends that can be computed across the ranks of a context group, and the names in transformers of that variant."""
UNPLACED = ("falcon", "gpt_oss")
"""Model types whose decoder passes no positions to the mask function (transformers 5.23.0)."""
LACKING = {
    "falcon": {"flash", "varlen", "flex"},
    "gemma2": {"sdpa", "varlen"},
    "gpt_oss": {"sdpa", "varlen", "flash"},
    "mimo_v2_flash": {"sdpa", "varlen", "flash", "flex"},
}
"""Model type: the backends that cannot compute it (transformers 5.23.0). A Falcon has attention classes of its own
instead of the interface; sdpa and varlen have no soft caps and no sinks, flash-attn 2 has no sinks, and flex no values
that are narrower than keys."""
WIDEST = 256
"""Largest head dimension of flash-attn 2 and of torch's varlen kernel, which takes multiples of 8 only."""


def resolve(requested: str, config: Any, device: torch.device, dtype: torch.dtype, context: int = 1) -> str:
    """The attention backend to use.

    Args:
        requested: a key of `BACKENDS`, or auto: the fastest backend that is correct for the model on the device.
        config: the model's configuration, of transformers.
        device: where the model runs.
        dtype: compute dtype; flash and varlen support neither float32 nor wide heads.
        context: number of ranks that share a row.

    Raises:
        UnsupportedError: the backend is not available on the device, or lacks something that the model needs.
    """
    rocm = torch.version.hip is not None
    half = device.type == "cuda" and dtype != torch.float32
    capped = getattr(config, "attn_logit_softcapping", None) is not None  # sdpa and varlen have no soft caps
    fits = half and _width(config) <= WIDEST
    # varlen has no attention dropout
    dropped = any(getattr(config, name, 0) for name in DROPOUTS["attention_dropout"])
    has = {
        "flash": fits and _has_flash(),
        "varlen": fits and not capped and not dropped and _width(config) % 8 == 0 and _has_varlen(),
        "flex": device.type == "cuda" and not rocm,
        "sdpa": not capped,
        "eager": True,
    } | dict.fromkeys(LACKING.get(config.model_type, ()), False)
    if context > 1:
        bare = dropped or config.model_type in UNPLACED
        has = {name: there and name in ACROSS and not bare for name, there in has.items()}
    if requested == "auto":
        requested = next((name for name, there in has.items() if there and name != "flex"), "auto")
    if not has.get(requested):
        shared = f" over {context} ranks" if context > 1 else ""
        raise UnsupportedError(
            f"the attention {requested} does not compute {config.model_type} in {str(dtype)[6:]} on {device.type} here"
            f"{shared}",
            "--parallel.context 1" if requested == "auto" else "model.attention auto takes what does",
        )
    return requested


def _width(config: Any) -> int:
    """Dimension of a query head; with MLA `head_dim` in the config is only that of the rotary part."""
    if getattr(config, "qk_rope_head_dim", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _has_flash() -> bool:
    """Whether flash-attn can be imported (a build for another torch cannot), and transformers accepts it."""
    try:
        import_module("flash_attn")
    except ImportError:
        return False
    from transformers.utils.import_utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())


def _has_varlen() -> bool:
    """Whether torch's varlen kernel takes windows and scales: it does in torch 2.11 to 2.13, not in 2.10."""
    return {"window_size", "scale"} <= _kernel_arguments()


def _kernel_arguments() -> set[str]:
    """The names of the arguments of torch's varlen kernel."""
    from torch.nn.attention.varlen import varlen_attn

    return set(signature(varlen_attn).parameters)


def varlen(module: Any, query: Any, key: Any, value: Any, _: Any, **kwargs: Any) -> tuple[Any, None]:
    """Attention over documents of different lengths by torch's own kernel, with the signature of transformers.

    Args:
        module: the attention layer.
        query: [1, heads, n, head dim].
        key: [1, groups, n, head dim].
        value: [1, groups, n, head dim]; [1, groups, n, value dim] with MLA.
        kwargs: `cu_seq_lens_q`, `max_length_q`, `cu_seq_lens_k`, `max_length_k`, `scaling`, `sliding_window`.

    Returns:
        [1, n, heads, value dim], and no attention weights.

    Raises:
        UnsupportedError: the layer needs dropout, a soft cap or sinks, which the kernel lacks.
    """
    from torch.nn.attention.varlen import varlen_attn

    require_plain("varlen", module, kwargs)
    ends, window = (kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]), kwargs.get("sliding_window")
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    size, width = (-1 if window is None else window - 1, 0), v.shape[-1]
    v = torch.nn.functional.pad(v, (0, q.shape[-1] - width))  # the kernel requires one width for all three
    # torch 2.11 has grouped heads without an argument for them
    grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _kernel_arguments() else {}
    out: Any = varlen_attn(
        q, k, v, *ends, kwargs["max_length_q"], kwargs["max_length_k"], scale=kwargs.get("scaling"), window_size=size,
        **grouped,
    )  # fmt: skip
    return out[None, ..., :width], None


def named(backend: str, context: int = 1) -> str:
    """The name of a backend in transformers.

    Backends that get the lengths of documents (`varlen`, and all across ranks) are registered there, with no mask.
    """
    functions = {BACKENDS["varlen"]: varlen, ACROSS["varlen"]: across(varlen), ACROSS["sdpa"]: across(sdpa)}
    name = ACROSS[backend] if context > 1 else BACKENDS[backend]
    if name in functions:
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        AttentionInterface.register(name, functions[name])
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, lambda *_, **__: None)
    return name


def keep_apart(model: Any) -> None:
    """Pass document masks to the layers of models that make masks without positions (`UNPLACED`)."""
    if model.config.model_type not in UNPLACED:
        return
    from transformers import masking_utils

    makers = {
        "full_attention": masking_utils.create_causal_mask,
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
    }

    def masked(kind: str) -> Any:
        def hook(_: Any, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            mask_inputs = {"position_ids": kwargs["position_ids"], "attention_mask": None, "past_key_values": None}
            mask = makers[kind](config=model.config, inputs_embeds=args[0], **mask_inputs)
            return args, {**kwargs, "attention_mask": mask}

        return hook

    decoder_layers = layers(model)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(decoder_layers)
    for layer, kind in zip(decoder_layers, kinds, strict=True):
        layer.register_forward_pre_hook(masked(kind), with_kwargs=True)


def forward_kwargs(flat: Flat, device: torch.device, backend: str, group: Any = None) -> dict[str, Any]:
    """The arguments of a model's forward for flattened rows, without labels.

    Args:
        flat: the rows, or this rank's part of them.
        device: where the model is.
        backend: a key of `BACKENDS`.
        group: the process group of the ranks that share rows; None if each rank has its own rows.
    """
    kwargs: dict[str, Any] = {
        "input_ids": torch.from_numpy(flat.input_ids).to(device)[None],
        "position_ids": torch.from_numpy(flat.position_ids).to(device)[None],
        "use_cache": False,
    }
    if backend in ("flash", "varlen") or group is not None:
        of_keys = (flat.cu_seqlens, flat.longest) if flat.keys is None else (flat.keys.cu_seqlens, flat.keys.longest)
        for name, (ends, longest) in {"q": (flat.cu_seqlens, flat.longest), "k": of_keys}.items():
            kwargs[f"cu_seq_lens_{name}"] = torch.from_numpy(ends).to(device)
            kwargs[f"max_length_{name}"] = max(1, longest)
    if flat.keys is not None:
        kwargs["context"] = Context(group, flat.keys.begin, flat.keys.stop)
    return kwargs
