"""Whether a decoder of MaxText computes what a config specifies: its checkpoint says no settings.

Facts: maxtext 0.2.5 (PyPI), configs/types.py, layers/attentions.py (`init_rotary_embedding`), layers/linears.py
(`_convert_to_activation_function`: functions of jax.nn, whose gelu is the approximation), layers/normalizations.py
(`RMSNorm`: epsilon 1e-6 where a decoder names none), models/gemma2.py, models/gemma3.py. Of `LLAMA3`:
layers/embeddings.py (`_apply_scaling_factor`), the same from 733c1157 (2024-10-01), the first with it, to 2026-08-22.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from formats.errors import RefusedError, UnsupportedError, short, some
from formats.huggingface.maxtext.changes import query_scale
from formats.huggingface.maxtext.layers import BLOCKS
from formats.huggingface.maxtext.tables import FAMILIES
from formats.model.settings import rope_way
from formats.model.spec import ModelSpec

SCALINGS = {"default": False, "linear": False, "llama3": True}
"""Rotary scaling that is read: whether neighbouring rows rotate with it. MaxText's YaRN may do either
(`rope_interleave`), so it is not read."""
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The llama3 scaling of MaxText, which no setting of it changes."""
PAIRED = ("gemma2",)
"""Families whose decoder is made of whole periods."""
EPSILON = 1e-6
"""The epsilon of all norms in the layers of Gemma."""


def neighbours_of(spec: ModelSpec, assets: Path) -> bool:
    """Whether rotary embeddings rotate neighbouring rows of a head, not halves.

    Raises:
        UnsupportedError: the family is not supported, or MaxText's decoder does not compute what the config specifies.
    """
    where = f"{assets / 'config.json'}"
    if spec.family not in FAMILIES:
        raise UnsupportedError(f"{where}: a {spec.family} of MaxText is not read; of it are {', '.join(FAMILIES)}")
    if odd := {*spec.biases} - {"qkv_bias"}:
        names = some(sorted(odd), 2)
        raise UnsupportedError(f"{where}: {names} of {spec.family}, and MaxText's decoder has no such biases")
    if spec.activation == "gelu":
        raise UnsupportedError(f"{where}: activation = gelu, and MaxText has its approximation alone")
    if spec.router_normalized is False:
        raise UnsupportedError(
            f"{where}: norm_topk_prob = false, and MaxText's decoder of {spec.family} takes the softmax over the "
            "experts of a token, whose weights always add up to 1",
            "if the config is not of this training: --set router_normalized=true",
        )
    if FAMILIES[spec.family].gemma:
        _require_gemma(spec, where)
    elif spec.sliding_window is not None:
        raise UnsupportedError(
            f"{where}: sliding_window = {spec.sliding_window}, and MaxText's decoder of {spec.family} has no windows",
            "if the training saw no longer texts: --set sliding_window=none",
        )
    kind = (spec.rope_scaling or {}).get("rope_type", "default")
    if kind not in SCALINGS or (FAMILIES[spec.family].gemma and SCALINGS[kind]):
        raise UnsupportedError(
            f"{where}: rope_type = {short(kind)}, with which a checkpoint does not say which rows of a head rotate"
        )
    return SCALINGS[kind]


def require_scaling(spec: ModelSpec, chosen: Collection[str], assets: Path) -> None:
    """Refuse a llama3 scaling by other numbers than MaxText's, with which no stock MaxText trained.

    Args:
        spec: the model that the config describes.
        chosen: the names of the settings that the user passed.
        assets: the folder of the config.

    Raises:
        RefusedError: it is such a scaling, and the user has not chosen one.
    """
    scaling = spec.rope_scaling or {}
    odd = [key for key, value in LLAMA3.items() if scaling.get(key) != value]
    if scaling.get("rope_type") == "llama3" and odd and "rope_scaling" not in chosen:
        said = ", ".join(f"{key} = {short(scaling.get(key))}" for key in odd)
        known = ", ".join(f"{LLAMA3[key]:g}" for key in odd)
        raise RefusedError(
            f"{assets / 'config.json'}: llama3 scaling with {said}, and MaxText has {known} whatever a config says",
            f"{rope_way({'rope_type': 'llama3', **LLAMA3}, 'stock MaxText')} or "
            f"{rope_way(scaling, 'a MaxText that was changed to heed them')}",
        )


def _require_gemma(spec: ModelSpec, where: str) -> None:
    """Refuse a config of which MaxText's decoder of Gemma 2 or 3 computes something else.

    Raises:
        UnsupportedError: it is such a config.
    """
    period = BLOCKS[spec.family][0].period
    types, pattern = spec.own["layer_types"], spec.own.get("sliding_window_pattern")
    usual = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(spec.layers)]
    scales = {float(spec.head_dim), float(spec.hidden // spec.heads)}
    differences = (
        ("sliding_window", spec.sliding_window, "some number", spec.sliding_window is None),
        ("layer_types", types, f"a window in all but each layer {period}", types not in (None, usual)),
        ("sliding_window_pattern", pattern, period, types is None and pattern not in (None, period)),
        ("num_hidden_layers", spec.layers, "an even number", spec.family in PAIRED and spec.layers % 2 != 0),
        ("rms_norm_eps", spec.norm_epsilon, EPSILON, spec.norm_epsilon != EPSILON),
        ("tie_word_embeddings", spec.tied, True, not spec.tied),
        ("use_bidirectional_attention", True, False, bool(spec.own["use_bidirectional_attention"])),
        (
            "query_pre_attn_scalar", query_scale(spec), "the head dimension, or hidden size / heads",
            not FAMILIES[spec.family].rooted and query_scale(spec) not in scales,
        ),
    )  # fmt: skip
    for key, value, known, differs in differences:
        if differs:
            raise UnsupportedError(f"{where}: {key} = {short(value)}, and MaxText's {spec.family} has {known}")
