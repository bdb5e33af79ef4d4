"""How documents of a row are kept apart, on each device.

A row is passed to transformers as one sequence of batch 1. Two innocent arguments would switch its document masks off
without a word: an attention mask of ones, and a cache (transformers 5.23.0 masking_utils.py takes positions for the
boundaries only if there is neither). `forward_words` is the only place that makes the arguments.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

import torch

from formats.errors import UnsupportedError
from formats.huggingface.config import DROPOUTS
from train.data.rows import Flat
from train.model.parts import layers

BACKENDS = {
    "flash": "flash_attention_2",
    "varlen": "vitruvian_varlen",
    "flex": "flex_attention",
    "sdpa": "sdpa",
    "eager": "eager",
}
"""Our names, and those of transformers."""
UNPLACED = ("falcon", "gpt_oss")
"""Model types whose decoder makes masks and hands no positions to what makes them (transformers 5.23.0)."""
OWN_KERNELS = ("falcon",)
"""Model types that have a class for each attention instead of the interface (transformers 5.23.0): sdpa and eager."""
WIDEST = 256
"""Elements of the widest head of flash-attn 2, and of torch's varlen kernel, which takes multiples of 8 alone."""


def resolve(wanted: str, config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """The backend to use.

    Args:
        wanted: a key of `BACKENDS`, or auto: the fastest that is right for the model on the device.
        config: the model's configuration, of transformers.
        device: where the model runs.
        dtype: of the computation; flash and varlen have none for float32, nor for wide heads.

    Raises:
        UnsupportedError: the device does not have it, or it computes something else than the model does.
    """
    rocm = torch.version.hip is not None
    half = device.type == "cuda" and dtype != torch.float32
    # sdpa and varlen know no cap and no sinks; transformers 5.23.0 has no sdpa for these, with a cap or not
    capped = config.model_type in ("gemma2", "gpt_oss") or getattr(config, "attn_logit_softcapping", None) is not None
    common = config.model_type not in OWN_KERNELS
    fits = half and common and _width(config) <= WIDEST
    # varlen drops nothing out
    dropped = any(getattr(config, name, 0) for name in DROPOUTS["attention_dropout"])
    has = {
        "flash": fits and config.model_type != "gpt_oss" and _has_flash(),
        "varlen": fits and not capped and not dropped and _width(config) % 8 == 0 and _has_varlen(),
        "flex": device.type == "cuda" and common and not rocm,
        "sdpa": not capped,
        "eager": True,
    }
    if wanted == "auto":
        return next(name for name, there in has.items() if there and name != "flex")
    if not has[wanted]:
        raise UnsupportedError(
            f"the attention {wanted} does not compute {config.model_type} in {str(dtype)[6:]} on {device.type} here",
            "model.attention auto takes what does",
        )
    return wanted


def _width(config: Any) -> int:
    """The elements of a head's query; with latent attention `head_dim` is that of its turned part."""
    if getattr(config, "qk_rope_head_dim", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _has_flash() -> bool:
    """Whether flash-attn can be imported: one that was built for another torch cannot."""
    try:
        import_module("flash_attn")
    except ImportError:
        return False
    return True


def _has_varlen() -> bool:
    """Whether torch's kernel takes windows, scales and grouped heads: that of 2.10 takes none of these, 2.13's does."""
    from torch.nn.attention import varlen as kernel

    return {"window_size", "scale", "enable_gqa"} <= signature(kernel.varlen_attn).parameters.keys()


def varlen(module: Any, query: Any, key: Any, value: Any, _: Any, **words: Any) -> tuple[Any, None]:
    """Attention over documents of different lengths by torch's own kernel, as transformers calls one.

    Args:
        module: the attention layer.
        query: [1, heads, n, head dim].
        key: [1, groups, n, head dim].
        value: likewise; [..., value dim] with latent attention.
        words: `cu_seq_lens_q`, `max_length_q`, `scaling`, `sliding_window`.

    Returns:
        [1, n, heads, value dim], and no weights.

    Raises:
        UnsupportedError: the layer wants something that the kernel has not.
    """
    from torch.nn.attention.varlen import varlen_attn

    for name in ("dropout", "softcap", "s_aux"):
        wanted = words.get(name)
        if wanted is not None and (name != "dropout" or wanted):
            raise UnsupportedError(
                f"the attention varlen has no {name}, {module.config.model_type} wants it", "--model.attention eager"
            )
    ends, longest, window = words["cu_seq_lens_q"], words["max_length_q"], words.get("sliding_window")
    q, k, v = (one[0].transpose(0, 1).contiguous() for one in (query, key, value))
    size, width = (-1 if window is None else window - 1, 0), v.shape[-1]
    v = torch.nn.functional.pad(v, (0, q.shape[-1] - width))  # the kernel takes one width
    out: Any = varlen_attn(
        q, k, v, ends, ends, longest, longest, scale=words.get("scaling"), window_size=size,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[None, ..., :width], None


def named(backend: str) -> str:
    """The name that transformers has for a backend, which it knows from now on; `varlen` has no mask of its own."""
    if backend == "varlen":
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        AttentionInterface.register(BACKENDS[backend], varlen)
        ALL_MASK_ATTENTION_FUNCTIONS.register(BACKENDS[backend], lambda *_, **__: None)
    return BACKENDS[backend]


def keep_apart(model: Any) -> None:
    """Give layers masks that see where documents begin, where the model makes masks without positions."""
    if model.config.model_type not in UNPLACED:
        return
    from transformers import masking_utils

    makers = {
        "full_attention": masking_utils.create_causal_mask,
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
    }

    def masked(kind: str) -> Any:
        def hook(_: Any, given: tuple[torch.Tensor], words: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            about = {"position_ids": words["position_ids"], "attention_mask": None, "past_key_values": None}
            mask = makers[kind](config=model.config, inputs_embeds=given[0], **about)
            return given, {**words, "attention_mask": mask}

        return hook

    found = layers(model)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(found)
    for layer, kind in zip(found, kinds, strict=True):
        layer.register_forward_pre_hook(masked(kind), with_kwargs=True)


def forward_words(flat: Flat, device: torch.device, backend: str) -> dict[str, Any]:
    """The arguments of a model's forward for flattened rows, without labels."""
    words: dict[str, Any] = {
        "input_ids": torch.from_numpy(flat.input_ids).to(device)[None],
        "position_ids": torch.from_numpy(flat.position_ids).to(device)[None],
        "use_cache": False,
    }
    if backend in ("flash", "varlen"):
        ends = torch.from_numpy(flat.cu_seqlens).to(device)
        words |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        words |= dict.fromkeys(("max_length_q", "max_length_k"), max(1, flat.longest))
    return words
