"""How documents of a row are kept apart, on each device, and a check that they really are.

A row is passed to transformers as one sequence of batch 1. Two innocent arguments would switch its document masks off
without a word: an attention mask of ones, and a cache (transformers 5.23.0 masking_utils.py takes positions for the
boundaries only if there is neither). `forward_words` is the only place that makes the arguments.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from formats.errors import UnsupportedError, UsageError, VerificationError
from train.rows import Flat

BACKENDS = {
    "flash": "flash_attention_2",
    "varlen": "vitruvian_varlen",
    "flex": "flex_attention",
    "sdpa": "sdpa",
    "eager": "eager",
}
"""Our names, and those of transformers."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference of hidden states, relative to their largest, between a packed and an unpacked document."""
LENGTHS = (5, 1, 17, 32, 2)


def resolve(wanted: str, device: torch.device) -> str:
    """The backend to use.

    Args:
        wanted: a key of `BACKENDS`, or auto: the fastest that the device has.
        device: where the model runs.

    Raises:
        UnsupportedError: the device does not have it.
    """
    rocm = torch.version.hip is not None
    has = {
        "flash": device.type == "cuda" and find_spec("flash_attn") is not None,
        "varlen": device.type == "cuda" and find_spec("torch.nn.attention.varlen") is not None,
        "flex": device.type == "cuda" and not rocm,
        "sdpa": True,
        "eager": True,
    }
    if wanted == "auto":
        return next(name for name, there in has.items() if there and name != "flex")
    if not has[wanted]:
        raise UnsupportedError(
            f"the attention {wanted} does not run on {device.type} here", "model.attention auto takes what does"
        )
    return wanted


def varlen(module: Any, query: Any, key: Any, value: Any, _: Any, **words: Any) -> tuple[Any, None]:
    """Attention over documents of different lengths by torch's own kernel, as transformers calls one.

    Args:
        module: the attention layer.
        query: [1, heads, n, head dim].
        key: [1, groups, n, head dim].
        value: likewise.
        words: `cu_seq_lens_q`, `max_length_q`, `scaling`, `sliding_window`.

    Returns:
        [1, n, heads, head dim], and no weights.
    """
    from torch.nn.attention.varlen import varlen_attn

    ends, longest, window = words["cu_seq_lens_q"], words["max_length_q"], words.get("sliding_window")
    q, k, v = (one[0].transpose(0, 1).contiguous() for one in (query, key, value))
    size = (-1 if window is None else window - 1, 0)
    out: Any = varlen_attn(
        q, k, v, ends, ends, longest, longest, scale=words.get("scaling"), window_size=size,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    del module
    return out[None], None


def register() -> None:
    """Make `vitruvian_varlen` known to transformers, with no mask of its own."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(BACKENDS["varlen"], varlen)
    ALL_MASK_ATTENTION_FUNCTIONS.register(BACKENDS["varlen"], lambda *_, **__: None)


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


def self_check(config: Any, device: torch.device, backend: str, dtype: torch.dtype) -> float:
    """Run two layers of the model on documents of a row and on each by itself.

    Args:
        config: the model's configuration, of transformers.
        device: where it will run.
        backend: a key of `BACKENDS`.
        dtype: of the computation.

    Returns:
        The largest difference of hidden states, relative to the largest of them.

    Raises:
        VerificationError: documents see each other.
    """
    import copy

    from transformers import AutoModel

    small = copy.deepcopy(config)
    small.num_hidden_layers, small.use_cache = min(2, config.num_hidden_layers), False
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[: small.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        words = torch.randint(0, min(1000, config.vocab_size), (sum(LENGTHS),))
        with torch.device(device):
            model: Any = AutoModel.from_config(  # type: ignore[no-untyped-call]
                small, dtype=dtype, attn_implementation=BACKENDS[backend]
            ).eval()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    flat = Flat(words.numpy(), words.numpy(), positions.numpy(), ends.numpy(), max(LENGTHS), 0)
    with torch.no_grad():
        packed = model(**forward_words(flat, device, backend)).last_hidden_state[0].float()
        alone = [
            model(**forward_words(_one(words[low:high]), device, backend)).last_hidden_state[0].float()
            for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]
    apart = float((packed - torch.cat(alone)).abs().max() / packed.abs().max())
    if not apart <= TOLERANCE[dtype]:
        raise VerificationError(
            f"documents of a row see each other with the attention {backend} on {device.type}: hidden states differ by "
            f"{apart:.2g} of the largest, {TOLERANCE[dtype]:g} is allowed",
            "choose another one: --model.attention sdpa",
        )
    return apart


def _one(words: torch.Tensor) -> Flat:
    """A document by itself."""
    ends = torch.tensor([0, len(words)], dtype=torch.int32)
    return Flat(words.numpy(), words.numpy(), torch.arange(len(words)).numpy(), ends.numpy(), len(words), 0)


def require_masks(config: Any) -> None:
    """Refuse models whose layers carry a state over a row: positions do not reset that.

    Raises:
        UsageError: there are such layers.
    """
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    strange = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    if strange or any(hasattr(config, name) for name in ("mamba_d_state", "ssm_state_size", "state_size")):
        what = ", ".join(strange) or "state space"
        raise UsageError(
            f"{config.model_type} has layers that carry a state from token to token ({what})",
            "documents of a row would see each other: such a model cannot be trained packed",
        )
