"""Null in a config.json: the keys that may be null, and those that have to be written as null."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from formats.errors import SourceError
from formats.families.family import Family
from formats.model.values import SCALED

NULLABLE = {
    "attn_logit_softcapping", "ffn_hidden_size", "final_logit_softcapping", "layer_types", "mlp_layer_types",
    "mlp_only_layers", "moe_layers", "n_inner", "no_rope_layers", "num_kv_heads", "num_ln_in_parallel_attn",
    "partial_rotary_factor", "q_lora_rank", "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim",
    "sliding_window", "use_bidirectional_attention",
}  # fmt: skip
"""Keys that may be null in every family: null has a meaning, or is the same as no key (transformers 5.23.0, the config
class of each). Such keys of one family are in the file of the family. Null in any other key that a table reads is
refused by the class, its model fails, or it derives a value; transformers 4 took it for false."""
MEANT = {"q_lora_rank"}
"""Of these, the keys whose null is a value, and not the default of the class: queries without a latent."""
ROTARY = {
    "": {"partial_rotary_factor", "rope_theta"},
    "dynamic": {"factor"},
    "linear": {"factor"},
    "llama3": {"factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"},
    "longrope": {"long_factor", "short_factor"},
    "yarn": {"original_max_position_embeddings"},
}
"""Type of rotary embedding, "" for every type: the settings that may not be null. No model can be built with null in
them (transformers 5.23.0, modeling_rope_utils.py); classes without `partial_rotary_factor` ignore it."""


def require_values(config: Mapping[str, Any], family: Family, keys: Collection[str], where: str) -> None:
    """Refuse a config with null in a key that may not be null.

    Args:
        config: the parsed file.
        family: the family of the model.
        keys: the keys that the table of the family reads.
        where: what to call the file in an error.

    Raises:
        SourceError: a key is null that may not be.
    """
    usual = {key for known in (family.requires, family.own) for key, value in known.items() if value is None}
    heads = {"num_key_value_heads"} if family.mha else set[str]()
    nulls = sorted(
        key for key in {*keys} - usual - NULLABLE - heads - {*family.nulls} if key in config and config[key] is None
    )
    if nulls:
        raise SourceError(
            f"{where} says {nulls[0]} = null, which transformers 4 took for false, and 5 refuses or derives",
            "give the key its value; without the key, it has the default of its class, which may be another",
        )


def require_rotary_values(parameters: Mapping[str, Any], where: str) -> None:
    """Refuse rotary settings without a setting that has no default, or with null in one that may not be null.

    Args:
        parameters: `rope_parameters` or `rope_scaling`, for one kind of layers.
        where: what to call the file in an error.

    Raises:
        SourceError: a setting is missing, or null and may not be.
    """
    kind = parameters.get("rope_type", parameters.get("type"))
    missing = [key for key in SCALED.get(str(kind), ()) if key not in parameters]
    if missing:
        raise SourceError(
            f"{where} has rotary settings of type {kind} without {missing[0]}, with which transformers builds no model",
            "give the key its value",
        )
    keys = ROTARY[""] | ROTARY.get(str(kind), set())
    nulls = sorted(key for key in keys if key in parameters and parameters[key] is None)
    if nulls:
        raise SourceError(
            f"{where} says {nulls[0]} = null in its rotary settings, with which transformers builds no model",
            "give the key its value; without the key, it has the default of its class",
        )


def tokens_beyond(config: Mapping[str, Any], family: Family, vocab: int | None) -> dict[str, None]:
    """The config keys of special tokens whose ids are beyond the vocabulary, each with null as its new value.

    An embedding of transformers takes `pad_token_id` for one of its rows, so that a model with such an id cannot be
    built.
    """
    ids = {key: config.get(key, usual) for key, usual in family.tokens.items()}
    highest = {key: max(value if isinstance(value, list) else [value]) for key, value in ids.items() if value}
    return {key: None for key, token in highest.items() if vocab is not None and token >= vocab}
