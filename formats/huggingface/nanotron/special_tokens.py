"""The ids of special tokens in the model_config.json of nanotron, which computes nothing with them.

`bos_token_id` and `eos_token_id` are integers there, and `pad_token_id` is an integer or null; dacite, which reads a
config, compares types. A config.json may have lists.

Facts: huggingface/nanotron at 2411b022, config/models_config.py (`LlamaConfig`, `Qwen2Config`), config/config.py
(`get_config_from_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import short

DEFAULTS: Mapping[str, int | None] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
"""Key of an id, which a config.json has too: what nanotron's classes assume."""


def read(config: Mapping[str, Any], vocab: int | None) -> dict[str, int]:
    """The ids that a model_config.json says, by their keys, of those that the vocabulary has."""
    ids = {key: config[key] for key in DEFAULTS if type(config.get(key)) is int}
    return {key: token for key, token in ids.items() if 0 <= token < (vocab or 0)}


def written(config: Mapping[str, Any]) -> dict[str, int]:
    """The ids for a model_config.json, by their keys, of those that a config.json has: of a list the first."""
    ids = {key: next(iter(_listed(config.get(key))), None) for key in DEFAULTS}
    return {key: token for key, token in ids.items() if type(token) is int}


def notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A note on each id for which a model_config.json has no place as a config.json says it."""
    ids = {**DEFAULTS, **written(config)}
    differing = {key: config[key] for key in DEFAULTS if key in config and _listed(config[key]) != _listed(ids[key])}
    return tuple(
        f"{key} = {'null' if value is None else short(value)} of the config, {ids[key]} in model_config.json: nanotron "
        "has one there, and computes nothing with it"
        for key, value in differing.items()
    )


def apart(
    model_config: Mapping[str, Any], config: Mapping[str, Any], vocab: int | None, where: object
) -> tuple[str, ...]:
    """A note on each id that is none of the vocabulary, or of which the config has another one.

    Args:
        model_config: the content of model_config.json.
        config: that of config.json; empty without one.
        vocab: the number of tokens.
        where: the name of model_config.json in a note.
    """
    ids = read(model_config, vocab)
    invalid = {key: model_config[key] for key in DEFAULTS if model_config.get(key) is not None and key not in ids}
    other = {
        key: token for key, token in ids.items() if config.get(key) is not None and token not in _listed(config[key])
    }
    return (
        *(
            f"{key} = {short(value)} of {where} is none of its tokens, and is left out"
            for key, value in invalid.items()
        ),
        *(f"{key} = {short(config[key])} as in the config, {where} has {token}" for key, token in other.items()),
    )


def _listed(value: Any) -> list[Any]:
    """What a config says of one or several tokens as a list."""
    return value if isinstance(value, list) else [value]
