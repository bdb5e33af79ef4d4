"""The config.json of a model of images that the fields of its run hold: its text's config and its tower's.

    hf_text_config, vision_config    Qwen3-VL: the two configs, and the ids of tokens in fields of their own
    hf_config                        Mistral 3: the config of the whole

Bridge's other classes have no config of the text: what their fields leave open is in the config.json that the training
began with alone.

Facts: as in `vision.py`; transformers' `to_dict` writes every key of a config, also those of all configs (`OF_ALL`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.megatron.args.provider import TARGET
from formats.megatron.args.vision import TEXT, TOWER, Vision, config_in

OF_ALL = {
    "_name_or_path", "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "transformers_version",
}  # fmt: skip
"""Keys of every config, which say nothing of a model."""
MODEL_ID = "hf_model_id"
"""The field that names the model from which the run began, where it was imported by name."""


def of_fields(vision: Vision, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of a model, from the fields of its run; None if they do not hold all of it."""
    parts = {"text_config": fields.get(TEXT), TOWER: fields.get(TOWER)}
    if vision.whole:
        whole = _plain(config_in(fields.get(vision.whole) or {}))
        parts = {name: whole.get(name) for name in parts}
    else:
        whole = {name: fields[name] for name in vision.fields if type(fields.get(name)) is int and name.endswith("_id")}
        whole["tie_word_embeddings"] = fields.get("share_embeddings_and_output_weights") is True
        parts = {name: _plain(config_in(of)) if isinstance(of, Mapping) else None for name, of in parts.items()}
    if not vision.architecture or not all(isinstance(of, Mapping) and of.get("model_type") for of in parts.values()):
        return None
    return {**whole, "architectures": [vision.architecture], "model_type": vision.kind, **parts}


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the keys of every config; types of torch by their names, as a config.json has them."""
    kept = {key: value for key, value in config.items() if key not in OF_ALL}
    for key, value in kept.items():
        if isinstance(value, Mapping):
            target = value.get(TARGET)
            kept[key] = str(target).removeprefix("torch.") if isinstance(target, str) else _plain(value)
    return {key: value for key, value in kept.items() if not (key in ("architectures", "dtype") and value is None)}
