"""The model_config.json of nanotron, converted to and from model settings by one table.

nanotron has two model classes with a config class each: `LlamaConfig`, and `Qwen2Config`, which adds sliding windows,
layers without rotary embeddings, biases and experts. Its Llama has neither biases nor windows. Neither class applies
`rope_scaling`.

Facts: huggingface/nanotron at 2411b022, config/models_config.py, models/llama.py, models/qwen.py, nn/moe.py; for
versions 0.4 and 0.5, whose `LlamaConfig` has neither `rope_theta` nor `rope_interleaved`, models/llama.py: neighbouring
rows rotate, with a base of 10000; for windows, models/qwen.py at 4bda8a2b (2025-03-30), 3ef78f00 (2025-05-11), b4142da7
(2025-05-12) and 7bc99232, in which these came to main (2025-06-23). Checkpoints of 0.5 and 2411b022 with their logits
are in tests/golden/nanotron.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.checkpoint import Settings
from formats.errors import RefusedError, UnsupportedError, short
from formats.families import family_named
from formats.huggingface.nanotron import special_tokens
from formats.huggingface.nanotron.codecs import CODECS, COUNT, LLAMA, MARKS, QWEN2, checked_in_file
from formats.model.checks import checked, lost_setting, require_no_contradictions
from formats.model.codec import read, rows, write
from formats.model.settings import FIXED, TYPES, corrected
from formats.model.spec import ModelSpec, differences
from formats.model.values import positive_int

NAME = "model_config.json"
EXPERTS, DENSE = "experts", "no experts"
"""Conditions of table rows: whether some layers have experts."""
TABLE = rows(
    """
layers               num_hidden_layers
hidden               hidden_size
heads                num_attention_heads
kv_heads             num_key_value_heads                           default heads
head_dim             -                                             must be hidden / heads
ffn                  intermediate_size
max_positions        max_position_embeddings
norm_epsilon         rms_norm_eps                                  default 1e-6
rope_theta           rope_theta                                    default 10000.0
tied                 tie_word_embeddings                           default false
neighbours           rope_interleaved                              required
-                    hidden_act                                    = "silu"
-                    rope_scaling                                  must be null
-                    attention_bias                                = false          llama
rope_scaling         -                                             no scaling       llama
biased               attention_bias                                flag             qwen2
rope_scaling         rope_seq_len_interpolation_factor             linear factor    qwen2
sliding_window       sliding_window_size                           same             qwen2
nope_layers          no_rope_layer                                 every n-th       qwen2
-                    flex_attention_mask                           = null           qwen2
-                    _use_qkv_packed                               = true           qwen2
-                    moe_config                                    = null           no experts
experts              moe_config.num_experts                        same             experts
top_k                moe_config.top_k                              same             experts
expert_ffn           moe_config.moe_intermediate_size              same             experts
shared_ffn           moe_config.shared_expert_intermediate_size    same             experts
dense_layers         moe_config.layers                             sparse list      experts
router_normalized    -                                             must be false    experts
-                    moe_config.enable_shared_expert               must be true     experts
""",
    CODECS,
)
"""Setting, key and codec. `neighbours` and `biased` are not model settings: the first chooses the layout, the second
the family. Versions whose config has no `rope_theta` have a base of 10000. Without `_use_qkv_packed` this commit of
nanotron cannot compute attention."""

WINDOW, SINCE_WINDOWS = "sliding_window_size", "rope_seq_len_interpolation_factor"
"""The key of the window, and one that came a day after the commit that computes windows; a save has all keys."""
VOCAB = "vocab_size"
"""The key of the rows of the embedding: the trainer writes the padded number (trainer.py `init_model`)."""
OF_A_RUN: Mapping[str, Any] = {
    **special_tokens.DEFAULTS, "initializer_range": 0.02, "pretraining_tp": 1, "use_cache": True,
    "_attn_implementation": "flash_attention_2", "z_loss_enabled": False, "z_loss_coefficient": 0.0001,
}  # fmt: skip
"""Keys that change neither layout nor computation, with the value that is written."""
OF_QWEN2: Mapping[str, Any] = {
    "_fused_rotary_emb": True, "_fused_rms_norm": True, "_use_doc_masking": False, "log_attn_probs": False,
    "ring_attn_heads_k_stride": None,
}  # fmt: skip
"""Keys of `Qwen2Config` alone that change neither layout nor computation, with the value that is written."""
OF_EXPERTS: Mapping[str, Any] = {"router_aux_loss_coef": 0.01, "token_dispatcher_type": "alltoall"}
"""Keys of `MoEConfig` that change neither layout nor computation, with the value that is written."""
HARMLESS = {*OF_A_RUN, *OF_QWEN2, *MARKS.values(), VOCAB, *(f"moe_config.{key}" for key in OF_EXPERTS)}

MAY_HAVE = {
    "llama": {"scaled"},
    "mistral": {"window", "scaled"},
    "smollm3": {"nope_layers", "scaled"},
    "qwen2": {"biases", "scaled"},
    "qwen2_moe": {"biases", "experts", "scaled"},
}
"""Family: the optional traits of its models. The first family that fits is chosen where no config names one."""
HAS = {"qwen2": {"biases"}, "qwen2_moe": {"biases", "experts"}}
"""Family: the traits that every model of the family has."""

NULLS = ("rope_interleaved",)
"""Keys whose null is not the value of older versions, which have no such key."""


def read_config(
    config: Mapping[str, Any], settings: Settings, base: ModelSpec | None, where: str
) -> tuple[ModelSpec, bool]:
    """Return the spec of a model, and whether neighbouring rows of a head rotate.

    Args:
        config: the content of model_config.json.
        settings: the settings that the user passed.
        base: the spec of the model's Hugging Face config, if there is one.
        where: the name of the file in an error.

    Raises:
        SourceError: a setting is missing.
        UnsupportedError: the model computes something that has no layout here.
        RefusedError: model_config.json and the Hugging Face config contradict each other, or the version that saved the
            model ignored its window.
    """
    flat = _flat(config)
    kind = next((kind for kind, mark in MARKS.items() if flat.get(mark)), "")
    if not kind:
        named = next(
            (key for key, value in flat.items() if key.startswith("is_") and value), "none of nanotron's marks"
        )
        raise UnsupportedError(
            f"{where} has {named}: of nanotron's models Llama and Qwen2 are read", "see `convert formats`"
        )
    conditions = _conditions(kind, config.get("moe_config") is not None)
    known = {
        name
        for row in TABLE
        if not row.condition or row.condition in conditions
        for names in row.keys
        for name in names
    }
    for key, value in flat.items():
        if key not in known and key not in HARMLESS and value is not None:
            raise UnsupportedError(f"{where}: {key} = {short(value)} is not supported")
    spelled = {key: value for key, value in flat.items() if value is not None or key in NULLS}
    values = read(TABLE, spelled, conditions, where)
    neighbours, biased = values.pop("neighbours"), values.pop("biased", False)
    if "sliding_window" not in settings.values:
        _require_heeded(values.get("sliding_window"), flat, where)
    values |= settings.values
    padded = checked_in_file(positive_int, flat.get(VOCAB), VOCAB, where, COUNT)
    tokens = settings.vocab_size or settings.values.get("vocab")
    if tokens and tokens > padded:
        raise RefusedError(
            f"--vocab-size {tokens} is more than the {padded} rows that {where} says the embedding has",
            "give the number of tokens without padding, or leave the option out",
        )
    has = {
        "biases": biased,
        "window": values.get("sliding_window"),
        "nope_layers": values.get("nope_layers"),
        "experts": values.get("experts"),
        "scaled": values.get("rope_scaling"),
    }
    traits = {trait for trait, holds in has.items() if holds}
    values["family"] = _family(traits, base, where)
    values["vocab"] = tokens or (base.vocab if base and base.vocab and base.vocab <= padded else padded)
    keys = family_named(values["family"]).keys
    values = {name: FIXED.get(name) if value is None else value for name, value in values.items()}
    values |= {name: FIXED[name] for name in FIXED if name in keys and values.get(name) is None}
    values = {name: value for name, value in values.items() if name not in FIXED or name in keys}
    return _confirmed(values, settings.values, base, where), neighbours


def _require_heeded(window: Any, flat: Mapping[str, Any], where: str) -> None:
    """Refuse a window in the config of a version that computes none.

    From 4bda8a2b to 3ef78f00 `_forward_packed` calls flash-attn with `window_size=(-1, -1)`. The versions before fail
    (`CoreAttention`: "Simple causal mask is not supported with sliding window").

    Raises:
        RefusedError: it is such a window.
    """
    if type(window) is int and SINCE_WINDOWS not in flat:
        raise RefusedError(
            f"{where}: {WINDOW} = {window} without a {SINCE_WINDOWS}: it was saved by a nanotron from before "
            f"2025-06-23 (7bc99232), whose attention ignores {WINDOW}",
            f"--set sliding_window=none (the stock version) or --set sliding_window={window} (one that heeds it)",
        )


def _confirmed(values: dict[str, Any], overrides: Mapping[str, Any], base: ModelSpec | None, where: str) -> ModelSpec:
    """Return the spec, compared with the Hugging Face config, which sets `max_positions` unless the user set it."""
    notes = list[str]()
    if base and values["max_positions"] != base.max_positions and "max_positions" not in overrides:
        notes.append(f"max_positions = {base.max_positions} as in the config, {where} has {values['max_positions']}")
        values["max_positions"] = base.max_positions
    spec = checked(values | {"notes": tuple(notes)}, corrected(where, overrides))
    differing = [line for line in differences(spec, base) if line.partition(":")[0] not in overrides] if base else []
    decided = {line.partition(":")[0] for line in differing} & {*TYPES}
    ways = [f"decide with --set {name}=VALUE" for name in sorted(decided)]
    hint = ", ".join([*ways, f"{'or ' * bool(ways)}give the right config with --config"])
    require_no_contradictions(differing, f"{where} and its config", "nanotron | config", hint)
    return spec


def _family(traits: set[str], base: ModelSpec | None, where: str) -> str:
    """The family of a model with these traits: that of its Hugging Face config, if that family allows the traits."""
    fitting = [name for name, may in MAY_HAVE.items() if HAS.get(name, set()) <= traits <= may]
    if not fitting:
        having = " and ".join(sorted(traits))
        raise UnsupportedError(f"{where}: a model with {having} is of no family that is read from nanotron")
    return base.family if base and base.family in fitting else fitting[0]


def written_config(spec: ModelSpec, padded: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of model_config.json for a model.

    Args:
        spec: the model.
        padded: rows of the embedding, padding among them.
        config: the Hugging Face config, from which the ids of special tokens are taken.

    Raises:
        UnsupportedError: models of the family are not written for nanotron.
        RefusedError: nanotron has no key for a setting of the model.
    """
    if spec.family not in MAY_HAVE:
        raise UnsupportedError(
            f"nanotron is written of {', '.join(MAY_HAVE)}, not of a {spec.family}", "see `convert formats`"
        )
    biased = "biases" in HAS.get(spec.family, ())
    beyond_llama = biased or spec.sliding_window or spec.nope_layers or spec.rope_scaling
    kind = QWEN2 if beyond_llama else LLAMA
    conditions = _conditions(kind, bool(spec.experts))
    lost = lost_setting(TABLE, conditions, spec)
    lost = lost or (f"{', '.join(spec.biases)}" if spec.biases else "")
    if lost:
        raise RefusedError(f"nanotron has no {lost}")
    values = {**vars(spec), "biased": biased, "neighbours": False}
    flat = write(TABLE, values, conditions, "")
    experts = {key.removeprefix("moe_config."): flat.pop(key) for key in [*flat] if key.startswith("moe_config.")}
    written = {
        MARKS[kind]: True,
        **OF_A_RUN,
        **special_tokens.written(config),
        **flat,
        VOCAB: padded,
        **(OF_QWEN2 if kind == QWEN2 else {}),
    }
    return {**written, **({"moe_config": {**OF_EXPERTS, **experts}} if experts else {})}


def _conditions(kind: str, experts: bool) -> set[str]:
    return {kind, EXPERTS if experts else DENSE} if kind == QWEN2 else {kind}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return model_config.json as one flat dict; a key of the `moe_config` map becomes `moe_config.KEY`."""
    inner = config.get("moe_config")
    if not isinstance(inner, dict) or not inner:
        return dict(config)
    outer = {key: value for key, value in config.items() if key != "moe_config"}
    return outer | {f"moe_config.{key}": value for key, value in inner.items()}
