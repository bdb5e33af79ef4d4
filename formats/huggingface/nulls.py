"""Null in a config.json: the keys in which it says something, and those in which it has to be written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from formats.errors import SourceError
from formats.families.family import Family

NULLABLE = {
    "attn_logit_softcapping", "ffn_hidden_size", "final_logit_softcapping", "layer_types", "mlp_layer_types",
    "mlp_only_layers", "moe_layers", "n_inner", "no_rope_layers", "num_kv_heads", "num_ln_in_parallel_attn",
    "partial_rotary_factor", "q_lora_rank", "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim",
    "sliding_window", "use_bidirectional_attention",
}  # fmt: skip
"""Keys in which null means something, or the same as no key, whatever the family (transformers 5.23.0, the config class
of each); those of one family are in its file. In any other key that a table reads the class refuses it, or its model
fails; transformers 4 took it for false."""
ROTARY = {
    "": {"partial_rotary_factor", "rope_theta"},
    "dynamic": {"factor"},
    "linear": {"factor"},
    "llama3": {"factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"},
    "longrope": {"long_factor", "short_factor"},
    "yarn": {"original_max_position_embeddings"},
}
"""Rotary settings in which null says nothing, by their type: those of every type under "". No model can be built with
them (transformers 5.23.0, modeling_rope_utils.py); `partial_rotary_factor` is ignored by those classes that lack it."""


def require_values(config: Mapping[str, Any], family: Family, keys: Collection[str], where: str) -> None:
    """No key is null in which null says nothing.

    Args:
        config: the parsed file.
        family: its family.
        keys: those that the table of the family reads.
        where: what to call the file in an error.

    Raises:
        SourceError: one is.
    """
    usual = {key for known in (family.requires, family.own) for key, value in known.items() if value is None}
    heads = {"num_key_value_heads"} if family.mha else set[str]()
    nulls = sorted(
        key for key in {*keys} - usual - NULLABLE - heads - {*family.nulls} if key in config and config[key] is None
    )
    if nulls:
        raise SourceError(
            f"{where} says {nulls[0]} = null, which transformers 5 refuses and version 4 took for false",
            "give the key its value; without the key, it has the default of its class",
        )


def require_rotary_values(parameters: Mapping[str, Any], where: str) -> None:
    """No rotary setting is null in which null says nothing.

    Args:
        parameters: `rope_parameters` or `rope_scaling`, those of one kind of layers.
        where: what to call the file in an error.

    Raises:
        SourceError: one is.
    """
    kind = parameters.get("rope_type", parameters.get("type"))
    keys = ROTARY[""] | ROTARY.get(str(kind), set())
    nulls = sorted(key for key in keys if key in parameters and parameters[key] is None)
    if nulls:
        raise SourceError(
            f"{where} says {nulls[0]} = null in its rotary settings, with which transformers builds no model",
            "give the key its value; without the key, it has the default of its class",
        )


def tokens_beyond(config: Mapping[str, Any], family: Family, vocab: int | None) -> dict[str, None]:
    """The ids of special tokens that a vocabulary does not have: null in place of them.

    An embedding of transformers takes `pad_token_id` for one of its rows, so that such a model cannot be built.
    """
    ids = {key: config.get(key, usual) for key, usual in family.tokens.items()}
    highest = {key: max(value if isinstance(value, list) else [value]) for key, value in ids.items() if value}
    return {key: None for key, token in highest.items() if vocab is not None and token >= vocab}
