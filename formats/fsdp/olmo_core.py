"""Read the model's settings from the config.json that OLMo-core writes beside a checkpoint; none is written here.

Facts: ai2-olmo-core 3.0.0 (PyPI), nn/transformer/config.py, nn/attention/__init__.py, nn/rope.py, nn/layer_norm.py,
train/callbacks/config_saver.py (keys that are None are left out); `sequence_mixer` was `attention` before. The results
of its own export (nn/hf/config.py) and of its model are in tests/golden/olmo_core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Settings
from formats.disk.json_file import read_json
from formats.errors import OptionNeededError, SourceError, UnsupportedError, short
from formats.families import family_named
from formats.huggingface.layers import FULL, SLIDING
from formats.huggingface.rope import LOCAL
from formats.model.checks import checked, require_same_settings
from formats.model.codec import Codec, Context, Spelled, read, rows
from formats.model.settings import corrected
from formats.model.spec import ModelSpec
from formats.model.values import is_finite, is_positive, positive_float, positive_int, some_layers

FAMILIES = ("olmo2", "olmo3")
"""The families that OLMo-core trains under its own tensor names; the second has windows."""
CLASS = "_CLASS_"
MIXER = "model.block.sequence_mixer"
SCALING, WINDOW = f"{MIXER}.rope.scaling", f"{MIXER}.sliding_window"
RAMP = ("beta_fast", "beta_slow")
"""The parameters of YaRN that say where its ramp begins and ends."""
EACH = "each layer"
"""The key, in a resolved config, of the list with the keys of every layer's block."""


def _read(function: Callable[[Spelled, Context], Any]) -> Codec:
    """A codec that only reads."""
    return Codec(function, lambda *_: {})


def _same_under_all(*keys: str) -> Codec:
    """The codec of one value under several keys, each with its class's default 1e-5 (layer_norm.py `LayerNorm`)."""

    def value(spelled: Spelled, context: Context) -> Any:
        first, *others = ((key, spelled.get(key, 1e-5)) for key in keys)
        for key, other in others:
            if other != first[1]:
                raise UnsupportedError(
                    f"{context.where}: {first[0]} = {short(first[1])} and {key} = {short(other)}: norms of several "
                    "kinds are not supported"
                )
        return first[1]

    return _read(value)


def _required(key: str) -> Codec:
    def value(spelled: Spelled, context: Context) -> Any:
        if key not in spelled:
            raise UnsupportedError(
                f"{context.where} has no {key}: attention without rotary embeddings is not supported"
            )
        return spelled[key]

    return _read(value)


def _window(_: Spelled, context: Context) -> int | None:
    """The width in tokens of all windows; None without windows (UnsupportedError: windows of several widths)."""
    widths = sorted({width for width in _windows(context) if width})
    if len(widths) > 1:
        raise UnsupportedError(f"{context.where}: windows of {widths[0]} and {widths[1]} tokens are not supported")
    return widths[0] if widths else None


def _scaling(_: Spelled, context: Context) -> dict[str, Any] | None:
    """The rotary scaling of all layers without a window, in the terms of Hugging Face; None if there is none.

    Raises:
        SourceError: the scaling lacks a value, or has one that is no finite number or of no such scaling.
        UnsupportedError: a layer with a window has a scaling, layers differ, or the scaling is of an unknown kind.
    """
    windows, scalings = _windows(context), []
    for layer, (block, window) in enumerate(zip(context.file[EACH], windows, strict=True)):
        given = {key.removeprefix(f"{SCALING}."): value for key, value in block.items() if key.startswith(SCALING)}
        if window and given:
            raise UnsupportedError(f"{context.where}: {SCALING} in layer {layer}, which has a window, is not supported")
        wrong = [key for key, value in given.items() if key not in (CLASS, SCALING) and not is_finite(value)]
        if wrong:
            said = f"{SCALING}.{wrong[0]} = {short(given[wrong[0]])}"
            raise SourceError(f"{context.where} says {said} in layer {layer}, it should be a finite number")
        scalings += [] if window else [given]
    if any(scaling != scalings[0] for scaling in scalings):
        raise UnsupportedError(f"{context.where}: {SCALING} differs between layers")
    if not scalings or not scalings[0]:
        return None
    kind, rescale = str(scalings[0].get(CLASS)).rpartition(".")[2], scalings[0].get("attention_rescale_factor", 1.0)
    if kind not in SCALINGS or rescale != 1.0:
        rescaled = "" if kind not in SCALINGS else f" with attention_rescale_factor = {short(rescale)}"
        raise UnsupportedError(f"{context.where}: {SCALING} by {kind}{rescaled} is not supported")
    try:
        scaling = SCALINGS[kind](scalings[0])
        if not all(is_positive(value) for key, value in scaling.items() if key != "rope_type"):
            raise ValueError(scaling)
        return scaling
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        values = ", ".join(f"{key} = {short(value)}" for key, value in scalings[0].items())
        raise SourceError(f"{context.where} says {SCALING} with {values}, which is no {kind}") from None


SCALINGS: Mapping[str, Callable[[Spelled], dict[str, Any]]] = {
    "PIRoPEScalingConfig": lambda own: {"rope_type": "linear", "factor": own["factor"]},
    "StepwiseRoPEScalingConfig": lambda own: {
        "rope_type": "llama3",
        "factor": own["factor"],
        "original_max_position_embeddings": own["old_context_len"],
        "low_freq_factor": 1 / (1 - own["low_freq_proportion"]),
        "high_freq_factor": 1 / own["high_freq_proportion"],
    },
    "YaRNRoPEScalingConfig": lambda own: {
        "rope_type": "yarn",
        "factor": own["factor"],
        "original_max_position_embeddings": own["old_context_len"],
        "attention_factor": 0.1 * math.log(own["factor"]) + 1,
        "beta_fast": own["beta_fast"],
        "beta_slow": own["beta_slow"],
    },
}
"""Class of a scaling: its settings in the terms of Hugging Face (rope.py `to_hf_config`)."""

TABLE = rows(
    f"""
layers            model.n_layers
hidden            model.d_model
vocab             model.vocab_size
tied              model.tie_word_embeddings    default false
heads             {MIXER}.n_heads
kv_heads          {MIXER}.n_kv_heads           default heads
head_dim          {MIXER}.head_dim             default hidden / heads
ffn               model.block.feed_forward.hidden_size
norm_epsilon      model.block.layer_norm.eps {MIXER}.qk_norm.eps model.lm_head.layer_norm.eps  equal
rope_theta        {MIXER}.rope.theta           required
rope_scaling      -                            scaling of all layers
sliding_window    -                            window of all layers
max_positions     train_module.max_sequence_length
""",
    {
        "equal": _same_under_all,
        "required": _required,
        "scaling of all layers": lambda: _read(_scaling),
        "window of all layers": lambda: _read(_window),
    },
)
NORMS = ("model.block.layer_norm", f"{MIXER}.qk_norm", "model.lm_head.layer_norm")
ONLY: Mapping[str, tuple[Any, ...]] = {
    "model.name": ("default",),
    "model.block.name": ("reordered_norm",),
    f"{MIXER}.type": ("attention",),
    f"{MIXER}.name": ("default",),
    f"{MIXER}.rope.name": ("default",),  # `complex` turns neighbours, with tensors of the same names and shapes
    f"{MIXER}.rope.no_global_rope": (False,),
    f"{MIXER}.rope.partial_rotary_factor": (1.0,),
    "model.block.feed_forward.name": ("default",),
    "model.block.feed_forward.activation": ("silu",),
    "model.lm_head.name": ("default",),
    **{f"{norm}.name": ("rms", "fused_rms", "cute_rms") for norm in NORMS},
}
"""Key that is no setting: the values with which the model is of these families. All other keys have to be false."""
LEFT_OUT = dict.fromkeys(("model.block.name", *(f"{norm}.name" for norm in NORMS)), "default")
"""The defaults of keys in `ONLY`: a block with its norms first, and norms that subtract the mean."""
OF_A_RUN = {
    CLASS, "dtype", "full_precision", "elementwise_affine", "backend", "use_flash", "init_method",
    "init_seed", "init_std", "embedding_init_std", "freeze_params", "loss_implementation", "use_recompute_qkv_prep",
    "mxfp8_projections", "mxfp8_qkv_projection", "mxfp8_out_projection", "mxfp8_save_qkv_for_backward", "compile",
    "dp_config", "tp_config", "ac_config", "float8_config",
}  # fmt: skip
"""Parts of keys that do not affect the model, or that its tensors tell too."""
CONFIG = "--config BASE, a model whose config.json says it"


ADAMW = ("SkipStepAdamWConfig",)
"""Optimizers that make AdamW's step from the same moments, with fewer settings than torch's; a step that they skip is
not counted (optim/adamw.py)."""


def is_own(path: Path) -> bool:
    """Whether a config.json is OLMo-core's."""
    model = read_json(path).get("model")
    return isinstance(model, dict) and CLASS in model


def own_config(configs: Iterable[Path]) -> Path | None:
    """The first of some config.json files that is OLMo-core's."""
    return next(filter(is_own, configs), None)


def makes_steps_of_adamw(path: Path) -> bool:
    """Whether a config.json of OLMo-core names an optimizer of `ADAMW`, which its parameter groups do not tell."""
    config = dict(_flat(read_json(path)))
    return str(config.get(f"train_module.optim.{CLASS}")).rpartition(".")[2] in ADAMW


def spec_of(path: Path, settings: Settings, known: Callable[[], Mapping[str, Any]]) -> ModelSpec:
    """The settings of the model that a config.json of OLMo-core describes.

    Args:
        path: the file.
        settings: the user's settings.
        known: returns the record of the weights without a config, for an error.

    Raises:
        OptionNeededError: only a config of Hugging Face has the missing settings.
        SourceError: a setting is missing or damaged.
        UnsupportedError: the model computes something that has no layout here.
    """
    values = _values(path, settings)
    if values["max_positions"] is None:
        how = f"add --set max_positions=N, or {CONFIG}"
        raise OptionNeededError(f"{path} does not say how long a sequence may be", how, known)
    usual, theta = family_named(FAMILIES[1]).own[LOCAL], values["rope_theta"]
    if values["own"] and theta != usual:  # a config that is made here has no key for that of a window
        windowed = f"{path}: rope_theta = {short(theta)} in layers with a window, where transformers assumes {usual}"
        raise OptionNeededError(windowed, f"add {CONFIG}", known)
    return checked(values, corrected(str(path), settings.values))


def require_same(path: Path, settings: Settings, base: ModelSpec) -> None:
    """Check that the config of Hugging Face describes the same model as OLMo-core's own.

    Raises:
        SourceError: a setting is missing or damaged.
        UnsupportedError: the model computes something that has no layout here.
        RefusedError: the two configs contradict each other.
    """
    spec = checked(
        _values(path, settings) | {"max_positions": base.max_positions}, corrected(str(path), settings.values)
    )
    require_same_settings(spec, _spelled_out(base), f"{path} and the config", "OLMo-core | config")


def _values(path: Path, settings: Settings) -> dict[str, Any]:
    where = str(path)
    file = _resolved(read_json(path), where)
    named = {name for row in TABLE for names in row.keys for name in names}
    for key, value in file.items():
        judged = key.startswith("model.") and key not in named and OF_A_RUN.isdisjoint(key.split("."))
        if judged and value not in ONLY.get(key, (False,)):
            raise UnsupportedError(f"{where}: {key} = {short(value)} is not supported")
    values = read(TABLE, file, (), where) | dict(settings.values)
    values |= {} if settings.vocab_size is None else {"vocab": settings.vocab_size}
    if "rope_scaling" not in settings.values:
        _require_same_ramp(values, where)
    windows = _windows(Context(values, where, file, []))
    kinds = [SLIDING if window else FULL for window in windows]
    own = {"layer_types": kinds, LOCAL: values["rope_theta"]} if any(windows) else {}
    return values | {"family": FAMILIES[any(windows)], "own": own}


def _require_same_ramp(values: Mapping[str, Any], where: str) -> None:
    """Refuse YaRN whose frequencies are not those of transformers.

    Between the frequencies that are kept and those that are divided by the factor both have a ramp. OLMo-core ends it
    at the last frequency (rope.py, `half_dim - 1`), transformers (5.23.0, `_compute_yarn_parameters`) at `dim - 1`; and
    one that ends before it begins is a step in OLMo-core alone.

    Raises:
        UnsupportedError: the two ramps differ.
    """
    scaling, theta, dim = values["rope_scaling"], values["rope_theta"], values["head_dim"]
    if not scaling or scaling["rope_type"] != "yarn":
        return
    if not is_positive(theta) or theta <= 1:
        raise UnsupportedError(f"{where}: YaRN with rope_theta = {short(theta)} is not supported")
    rotated = (scaling["original_max_position_embeddings"] / (scaling[beta] * 2 * math.pi) for beta in RAMP)
    start, stop = (dim * math.log(turns) / (2 * math.log(theta)) for turns in rotated)
    low, ours, theirs = max(math.floor(start), 0), *(min(math.ceil(stop), last) for last in (dim // 2 - 1, dim - 1))
    spans = max(ours - low, 1e-3), theirs - low or 1e-3
    ramps = [[min(max((index - low) / span, 0), 1) for index in range(dim // 2)] for span in spans]
    if ramps[0] != ramps[1]:
        raise UnsupportedError(
            f"{where}: YaRN from frequency {low} to {math.ceil(stop)} of {dim // 2} is not that of transformers, which "
            "ends it elsewhere"
        )


def _spelled_out(base: ModelSpec) -> ModelSpec:
    """A spec with the defaults of transformers filled in (5.23.0, configuration_olmo3.py, modeling_rope_utils.py)."""
    own, scaling = {**base.own}, base.rope_scaling
    if own.get("layer_types", ...) is None:
        own["layer_types"] = [FULL if layer % 4 == 3 else SLIDING for layer in range(base.layers)]
    if scaling and scaling["rope_type"] == "yarn":
        attention = 0.1 * math.log(positive_float(scaling.get("factor"), "the factor of YaRN", "the config")) + 1
        scaling = {"attention_factor": attention, "beta_fast": 32, "beta_slow": 1, **scaling}
    return replace(base, own=own, rope_scaling=scaling)


def _resolved(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config as one map of dotted keys; `EACH` has the keys of each layer's block.

    Raises:
        UnsupportedError: layers differ in more than windows and rotary scaling, or `block_overrides` is no map.
    """
    model = dict(config["model"])
    block, others = model.pop("block", {}), model.pop("block_overrides", None) or {}
    if not isinstance(others, dict):
        raise UnsupportedError(f"{where}: model.block_overrides = {short(others)} is not supported")
    every = _block(block)
    each = [_block(others.get(str(layer), block)) for layer in some_layers(model.get("n_layers"))]
    for layer, own in enumerate(each):
        for key in dict.fromkeys([*every, *own]):
            if not key.startswith((SCALING, WINDOW)) and own.get(key) != every.get(key):
                raise UnsupportedError(
                    f"{where}: {key} = {short(own.get(key))} in layer {layer} and {short(every.get(key))} in others: "
                    "layers that differ are not supported"
                )
    alike = {key: value for key, value in every.items() if not key.startswith((SCALING, WINDOW))}
    outer = {key: value for key, value in config.items() if key != "model"}
    return LEFT_OUT | dict(_flat({**outer, "model": model})) | alike | {EACH: each}


def _block(block: Any) -> dict[str, Any]:
    """The dotted keys of a layer's block, by the names of version 3."""
    block = dict(block) if isinstance(block, dict) else {}
    mixer = block.pop("attention", None)
    return dict(_flat({"model": {"block": block if mixer is None else {**block, "sequence_mixer": mixer}}}))


def _flat(value: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{outer}{key}.")
        elif inner is not None:
            yield f"{outer}{key}", inner


def _windows(context: Context) -> list[int | None]:
    """The window of each layer in tokens, or None (nn/attention/__init__.py `SlidingWindowAttentionConfig`)."""
    each, where = context.file[EACH], context.where

    def of(layer: int, block: Mapping[str, Any]) -> int | None:
        pattern = block.get(f"{WINDOW}.pattern")
        first, last = (block.get(f"{WINDOW}.force_full_attention_on_{end}_layer", True) for end in ("first", "last"))
        if pattern is None or (first and layer == 0) or (last and layer == len(each) - 1):
            return None
        if not isinstance(pattern, list) or not pattern:
            raise SourceError(f"{where} says {WINDOW}.pattern = {short(pattern)}, it should be a list of windows")
        width = pattern[(layer - bool(first)) % len(pattern)]
        return None if width == -1 else positive_int(width, f"{WINDOW}.pattern", where)

    return [of(layer, block) for layer, block in enumerate(each)]
