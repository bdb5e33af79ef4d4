"""The model_config.json of nanotron, converted to and from model settings by one table.

nanotron has two model classes with a config class each: `LlamaConfig`, and `Qwen2Config`, which adds sliding windows,
layers without rotary embeddings, biases and experts. Its Llama has neither biases nor windows. Neither class applies
`rope_scaling`.

Facts: huggingface/nanotron at 2411b022, config/models_config.py, models/llama.py, models/qwen.py, nn/moe.py; for
versions 0.4 and 0.5, whose `LlamaConfig` has neither `rope_theta` nor `rope_interleaved`, models/llama.py: neighbouring
rows rotate, with a base of 10000. Checkpoints of 0.5 and 2411b022 with their logits are in tests/golden/nanotron.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from formats.checkpoint import Settings
from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.families import family_named
from formats.huggingface.nanotron import special_tokens
from formats.model.checks import checked, unsaid
from formats.model.codec import Codec, Context, Maker, Spelled, read, rows, same, scalar, write
from formats.model.settings import FIXED, TYPES, corrected
from formats.model.spec import ModelSpec, differences
from formats.model.values import real, some_layers, truth, whole

T = TypeVar("T")
NAME = "model_config.json"
LLAMA, QWEN2 = "llama", "qwen2"
"""The model classes of nanotron, as conditions of table rows."""
MARKS = {LLAMA: "is_llama_config", QWEN2: "is_qwen2_config"}
"""Model class: the key that marks its config."""
EXPERTS, DENSE = "experts", "no experts"
"""Conditions of table rows: whether some layers have experts."""
FLAG, COUNT = "true or false", "a whole number above 0"
"""The values that a key accepts, for error messages."""
OLD_BASE = 10000.0
"""The base of rotary embeddings in versions whose config has no `rope_theta`."""
DEFAULT_EPSILON = 1e-6


def _only(only: Any) -> Maker:
    """The codec of a key that may have one value only, which is also assumed where the key is absent."""

    def of(key: str) -> Codec:
        def check(value: Any, context: Context) -> Any:
            if value is not None and (value != only or type(value) is not type(only)):
                raise UnsupportedError(f"{context.where}: {key} = {short(value)} is not supported, only {only!r}")
            return only

        return scalar(key, check, lambda *_: only)

    return of


def _assumed(otherwise: Any) -> Maker:
    """The codec of a key with a default for where it is absent."""
    return lambda key: scalar(key, lambda value, _: otherwise if value is None else value, lambda value, _: value)


def _flag(key: str) -> Codec:
    """The codec of a boolean key that is false where it is absent."""
    return scalar(
        key,
        lambda value, context: value is not None and _there(truth, value, key, context.where, FLAG),
        lambda value, _: value,
    )


def _heads(key: str) -> Codec:
    """The codec of the number of key/value heads, which is the number of heads where the key is absent."""
    return scalar(
        key, lambda value, context: context.values["heads"] if value is None else value, lambda value, _: value
    )


def _square() -> Codec:
    """The codec of the head dimension, which has no key: it is always hidden / heads."""

    def read_size(_: Spelled, context: Context) -> int:
        hidden, heads = (
            _there(whole, context.values[name], key, context.where, COUNT)
            for name, key in (("hidden", "hidden_size"), ("heads", "num_attention_heads"))
        )
        if hidden % heads:
            raise SourceError(f"{context.where}: {heads} heads do not divide hidden_size = {hidden}")
        return hidden // heads

    def check(value: int, context: Context) -> Spelled:
        hidden, heads = context.values["hidden"], context.values["heads"]
        if value * heads != hidden:
            raise RefusedError(f"nanotron's heads have hidden / heads = {hidden / heads:g} elements, and these {value}")
        return {}

    return Codec(read_size, check)


def _order(key: str) -> Codec:
    """The codec of whether neighbours in a head rotate; written as false (halves), the default of newer nanotron."""

    def read_order(value: Any, context: Context) -> bool:
        if value is None and not context.file.get(MARKS[LLAMA]):
            raise SourceError(f"{context.where} does not say {key}, and there is no safe default")
        return value is None or _there(truth, value, key, context.where, FLAG)

    return scalar(key, read_order, lambda *_: False)


def _interpolation(key: str) -> Codec:
    """The codec of `rope_seq_len_interpolation_factor`: positions are divided by it, which is linear scaling."""

    def written_factor(scaling: Mapping[str, Any] | None, _: Context) -> Any:
        kind, factor = (scaling or {}).get("rope_type"), (scaling or {}).get("factor")
        if scaling is not None and (kind != "linear" or {*scaling} != {"rope_type", "factor"}):
            raise RefusedError(
                f"nanotron's rotary embeddings are plain or linearly scaled, these are {kind}",
                "--set rope_scaling=none if the training shall do without: below the original length few do the same",
            )
        return factor

    def read_scaling(factor: Any, context: Context) -> Mapping[str, Any] | None:
        return (
            None
            if factor is None
            else {
                "rope_type": "linear",
                "factor": _there(real, factor, key, context.where, "a finite number above 0, or null for none"),
            }
        )

    return scalar(key, read_scaling, written_factor)


def _there(check: Callable[[Any, str, str], T], value: Any, key: str, where: str, way: str) -> T:
    """Return a checked value of a key that `--set` cannot overrule, so that the error points to the file.

    The value is needed before `--set` is applied, or is not a model setting.

    Raises:
        SourceError: the value is invalid; `way` describes the valid ones.
    """
    try:
        return check(value, key, where)
    except SourceError as error:
        raise SourceError(str(error), f"correct it there: {way}") from None


def _unapplied(key: str) -> Codec:
    """The codec of `rope_scaling`, a field that nanotron's model classes have and never apply."""

    def check(value: Any, context: Context) -> None:
        if value is not None:
            raise UnsupportedError(
                f"{context.where} says {key}, which no model of nanotron applies",
                "set it to null there: the model was trained without",
            )

    return scalar(key, check, lambda *_: None)


def _every(key: str) -> Codec:
    """The codec of `no_rope_layer` = n: every n-th layer has no rotary embedding (models/qwen.py `_forward_packed`)."""

    def read_layers(every: Any, context: Context) -> tuple[int, ...]:
        step = 0 if every is None else _there(whole, every, key, context.where, f"{COUNT}, or null for none")
        return tuple(layer for layer in some_layers(context.values["layers"]) if step and (layer + 1) % step == 0)

    def written_step(layers: tuple[int, ...] | None, context: Context) -> int | None:
        count = context.values["layers"]
        step = layers[0] + 1 if layers else None
        if layers and (step is None or count % step or layers != (*range(step - 1, count, step),)):
            raise RefusedError(
                f"nanotron leaves out the rotation in each n-th layer, not in layers {list(layers)} of {count}"
            )
        return step

    return scalar(key, read_layers, written_step)


def _sparse(key: str) -> Codec:
    """The codec of the list of layers that have experts, read as the dense layers; [-1] means all layers."""

    def read_dense(layers: Any, context: Context) -> Any:
        every = some_layers(context.values["layers"])
        if layers in (None, [-1]):
            return ()
        if not isinstance(layers, list) or not all(type(layer) is int and layer in every for layer in layers):
            raise SourceError(f"{context.where} says {key} = {short(layers)}, these are no layers of {len(every)}")
        return tuple(layer for layer in every if layer not in layers)

    return scalar(
        key,
        read_dense,
        lambda dense, context: [layer for layer in range(context.values["layers"]) if layer not in (dense or ())],
    )


def _weights() -> Codec:
    """The codec of router normalization, which nanotron never does (nn/moe.py `Router.routing`).

    The weights of a token's experts are the softmax over all experts, and do not add up to 1.
    """

    def check(normalized: bool, _: Context) -> Spelled:
        if normalized:
            raise RefusedError(
                "nanotron does not make the weights of a token's experts add up to 1, and this model does"
            )
        return {}

    return Codec(lambda *_: False, check)


def _shared(key: str) -> Codec:
    """The codec of `enable_shared_expert`, which must be true: the supported family with experts always has one."""

    def check(value: Any, context: Context) -> bool:
        if value is not True:
            raise UnsupportedError(
                f"{context.where}: {key} = {short(value)} is not supported, only True: transformers has no such "
                "class without an expert for all tokens"
            )
        return True

    return scalar(key, check, lambda *_: True)


CODECS: Mapping[str, Maker] = {
    "same": same,
    "as heads": _heads,
    "hidden / heads": _square,
    "or 10000": _assumed(OLD_BASE),
    "or 1e-6": _assumed(DEFAULT_EPSILON),
    "order": _order,
    "interpolation": _interpolation,
    "none": lambda: Codec(lambda *_: None, lambda *_: {}),
    "unapplied": _unapplied,
    "every": _every,
    "sparse": _sparse,
    "weights": _weights,
    "shared": _shared,
    "or false": _assumed(False),
    "yes or no": _flag,
    **{f"= {json.dumps(value)}": _only(value) for value in ("silu", None, False, True)},
}
TABLE = rows(
    """
layers               num_hidden_layers
hidden               hidden_size
heads                num_attention_heads
kv_heads             num_key_value_heads                  as heads
head_dim             -                                    hidden / heads
ffn                  intermediate_size
max_positions        max_position_embeddings
norm_epsilon         rms_norm_eps                         or 1e-6
rope_theta           rope_theta                           or 10000
tied                 tie_word_embeddings                  or false
neighbours           rope_interleaved                     order
-                    hidden_act                           = "silu"
-                    rope_scaling                         unapplied
-                    attention_bias                       = false             llama
rope_scaling         -                                    none                llama
biased               attention_bias                       yes or no             qwen2
rope_scaling         rope_seq_len_interpolation_factor    interpolation       qwen2
sliding_window       sliding_window_size                  same              qwen2
nope_layers          no_rope_layer                        every               qwen2
-                    flex_attention_mask                  = null              qwen2
-                    _use_qkv_packed                      = true              qwen2
-                    moe_config                           = null              no experts
experts              moe_config.num_experts               same              experts
top_k                moe_config.top_k                     same              experts
expert_ffn           moe_config.moe_intermediate_size     same              experts
shared_ffn           moe_config.shared_expert_intermediate_size    same    experts
dense_layers         moe_config.layers                    sparse              experts
router_normalized    -                                    weights             experts
-                    moe_config.enable_shared_expert      shared            experts
""",
    CODECS,
)
"""Setting, key and codec. `neighbours` and `biased` are not model settings: the first chooses the layout, the second
the family. Without `_use_qkv_packed` this commit of nanotron cannot compute attention."""

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
        RefusedError: model_config.json and the Hugging Face config contradict each other.
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
    values = read(TABLE, flat, conditions, where)
    neighbours, biased = values.pop("neighbours"), values.pop("biased", False)
    values |= settings.values
    padded = _there(whole, flat.get(VOCAB), VOCAB, where, COUNT)
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


def _confirmed(values: dict[str, Any], said: Mapping[str, Any], base: ModelSpec | None, where: str) -> ModelSpec:
    """Return the spec, compared with the Hugging Face config, which sets `max_positions` unless the user set it."""
    notes = list[str]()
    if base and values["max_positions"] != base.max_positions and "max_positions" not in said:
        notes.append(f"max_positions = {base.max_positions} as in the config, {where} has {values['max_positions']}")
        values["max_positions"] = base.max_positions
    spec = checked(values | {"notes": tuple(notes)}, corrected(where, said))
    apart = [line for line in differences(spec, base) if line.partition(":")[0] not in said] if base else []
    if apart:
        decided = {line.partition(":")[0] for line in apart} & {*TYPES}
        ways = [f"decide with --set {name}=VALUE" for name in sorted(decided)]
        raise RefusedError(
            f"{where} and its config contradict each other (nanotron | config): {'; '.join(apart)}",
            ", ".join([*ways, f"{'or ' * bool(ways)}give the right config with --config"]),
        )
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
    lost = unsaid(TABLE, conditions, spec)
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
