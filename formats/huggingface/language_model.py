"""Read only the language model of a multimodal model: its config, and the tensor names that it has by itself.

Facts: transformers 5.23.0, conversion_mapping.py (the prefixes of its names in files and in memory), the
`configuration_*.py` of the models named here (the config of the language model, and its defaults),
configuration_utils.py `SubConfigSpec`. The table or the class of a language model tells which tensors it has, so that
none of them can be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from formats.checkpoint import Settings
from formats.disk.safetensors import Fragment
from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.families import find_family
from formats.model import untabled

TEXT = "text"
"""The value of `--only` for the language model."""
HEADS = {
    r".*ForSequenceClassification": "AutoModelForSequenceClassification",
    r".*ForTokenClassification": "AutoModelForTokenClassification",
    r".*ForQuestionAnswering": "AutoModelForQuestionAnswering",
    r"(?!.*LMHeadModel).*Model": "AutoModel",
}
"""Pattern of the name of a class without a head of language: the automatic class of transformers that loads it."""
PREFIXES = {
    "language_model.model.blocks.": "model.layers.",  # as transformers saves a Kimi-K2.5
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "model.layers.": "model.layers.",
    "model.embed_tokens.": "model.embed_tokens.",
    "model.norm.": "model.norm.",
    "model.final_layernorm.": "model.final_layernorm.",
    "model.embedding_norm.": "model.embedding_norm.",
    "lm_head.": "lm_head.",
    "mtp.": "mtp.",
}
"""Prefix of a tensor name of the language model in the whole model: its prefix in the language model alone. The first
that fits counts."""
WHOLES = {
    "aria": "aria_text", "aya_vision": "cohere2", "cohere2_vision": "cohere2", "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama", "exaone4_5": "exaone4", "fuyu": "persimmon", "gemma3": "gemma3_text",
    "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text", "glm4v_moe": "glm4v_moe_text",
    "got_ocr2": "qwen2", "hyperclovax_vision_v2": "hyperclovax", "idefics2": "mistral", "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3", "lfm2_vl": "lfm2", "lfm3_vl": "lfm3", "lighton_ocr": "qwen3",
    "llama4": "llama4_text", "llava": "llama", "llava_next": "llama", "llava_next_video": "llama",
    "llava_onevision": "qwen2", "minimax_m3_vl": "minimax_m3_vl_text", "mistral3": "mistral", "ovis2": "qwen2",
    "paligemma": "gemma", "perception_lm": "llama", "pp_chart2table": "qwen2", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "smolvlm": "llama", "step3p7": "step3p5",
    "video_llama_3": "qwen2", "video_llava": "llama", "vipllava": "llama",
}  # fmt: skip
"""Model type of the whole model: the model type of its language model, where `text_config` names none."""
NEUTRAL: dict[str, dict[str, Any]] = {
    "cohere2": {"logit_scale": 1.0},
    "falcon_h1": {"lm_head_multiplier": 1.0},
    "gemma2": {"final_logit_softcapping": None},
    "gemma3_text": {"final_logit_softcapping": None},
    "gemma4_text": {"final_logit_softcapping": None},
    "granite": {"logits_scaling": 1.0},
    "granitemoe": {"logits_scaling": 1.0},
    "granitemoehybrid": {"logits_scaling": 1.0},
    "hyperclovax": {"logits_scaling": 1.0},
}
"""Model type of a language model: the keys by which its own class changes the logits of the head, with the values that
leave the logits as they are."""
CHANGING = ("gemma4", "gemma4_unified", "hyperclovax_vision_v2", "paligemma")
"""Model types of the whole model whose classes change the logits too. In all others the logits are those of the head
alone, whatever the config of the language model is."""
UNLIKE = {"gemma3": "use_bidirectional_attention"}
"""Model type of the whole model: a key of `text_config` with another effect there than in the language model alone."""
IGNORED = {"mistral": "layer_types"}
"""Model type of a language model: a key that its class ignores, and by which AutoConfig takes a config with this model
type for another class (auto/configuration_auto.py, 5.23.0). AutoConfig does not do so to a `text_config`."""
CLASSES = {
    "aria_text": "AriaTextForCausalLM", "gemma": "GemmaForCausalLM", "hyperclovax": "HyperCLOVAXForCausalLM",
    "lfm3": "Lfm3ForCausalLM", "persimmon": "PersimmonForCausalLM",
}  # fmt: skip
"""Model type of a language model without a table: its class."""
FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Model types whose config may have the keys of the language model beside those of the whole model."""
OF_THE_WHOLE = ("vision_", "image_", "video_", "audio_", "architectures", "auto_map")
"""Prefixes of the keys in such a config that do not belong to the language model."""
INHERITED = ("dtype", "torch_dtype", "transformers_version", "quantization_config", "bos_token_id", "eos_token_id",
             "pad_token_id")  # fmt: skip
"""Keys of the whole model that also hold for the language model, where `text_config` lacks them."""
TIED = "tie_word_embeddings"
TIED_WHOLES = (
    "aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "gemma3", "gemma4", "gemma4_unified",
    "got_ocr2", "hyperclovax_vision_v2", "internvl", "kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr", "mistral3",
    "ovis2", "paligemma", "pp_chart2table",
)  # fmt: skip
"""Model types of whole models that are tied where their config does not say it (the config classes of 5.23.0)."""
ROPES = ("rope_parameters", "rope_scaling")
OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Rotary settings for which elements of a head rotate by height and width in an image; in text the three positions of a
token are equal."""


class Same(NamedTuple):
    """The family that computes the same as a language model without a class of its own.

    Attributes:
        family: the model type of the family.
        assumed: the defaults of the language model's config class that differ from those of the family's; by the names
            of the key, of which the config has none.
        fixed: keys of the family, with values for what the language model always computes.
    """

    family: str
    assumed: Mapping[str, Any]
    fixed: Mapping[str, Any] = {}


QWEN2_VL = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80,
    "rope_theta": 1e6, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
QWEN3_VL_MOE = {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000,
    "moe_intermediate_size": 1408, "num_experts num_local_experts": 60, "num_experts_per_tok": 4, "rope_theta": 5e5,
}  # fmt: skip
GLM4V_MOE = {"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True}
SAME = {
    **dict.fromkeys(("glm4v_moe_text", "Glm4vMoe_text"), Same("glm4_moe", GLM4V_MOE, {"use_qk_norm": False})),
    "kimi_k2": Same("deepseek_v3", {}),
    "qwen2_vl_text": Same("qwen2", QWEN2_VL),
    "qwen2_5_vl_text": Same("qwen2", QWEN2_VL),
    "qwen3_vl_text": Same("qwen3", {"max_position_embeddings": 128000, "rope_theta": 5e5}),
    "qwen3_vl_moe_text": Same("qwen3_moe", QWEN3_VL_MOE, {"norm_topk_prob": True}),
}
"""Model type of a language model without a class of its own: the family that computes the same."""
Value = TypeVar("Value")


class Selection(NamedTuple):
    """The part of a checkpoint that is read.

    Attributes:
        config: the config.json of the part.
        names: new name of each tensor that is read: its name in the checkpoint.
        left: the names of all other tensors; None where the whole model is read.
        notes: messages for the user.
    """

    config: dict[str, Any]
    names: Mapping[str, str]
    left: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    def of(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """The values of `tensors` for the tensors that are read, by their new names."""
        return {new: tensors[old] for new, old in self.names.items()}


def auto_class(config: Mapping[str, Any]) -> str:
    """The automatic class of transformers 5.23.0 (auto/modeling_auto.py) that loads the model of a config."""
    for pattern, name in HEADS.items():
        if any(re.fullmatch(pattern, str(architecture)) for architecture in config.get("architectures") or ()):
            return name
    return "AutoModelForImageTextToText" if config.get("model_type") in [*WHOLES] else "AutoModelForCausalLM"


def has_class(kind: str) -> bool:
    """Whether transformers has a class for the language model alone of a type of whole models."""
    text = WHOLES.get(kind, "")
    text = SAME[text].family if text in SAME else text
    return text in CLASSES or find_family({"model_type": text, "architectures": []}) is not None


def select(config: dict[str, Any], keys: Iterable[str], settings: Settings, where: str) -> Selection:
    """The part of a checkpoint that is read: with `settings.only` the language model of a multimodal model, else all.

    Args:
        config: the config.json of the checkpoint.
        keys: the names of the tensors in the checkpoint.
        settings: the user's settings.
        where: what to call the config in an error.

    Raises:
        UnsupportedError: the language model has no class of its own.
        SourceError: the checkpoint holds a tensor of the language model twice.
        RefusedError: the checkpoint holds no output head, and its config contradicts itself on whether it is tied.
    """
    every = list(keys)
    if settings.only is None or not _inner(config):
        return Selection(config, {key: key for key in every})
    names: dict[str, str] = {}
    for key in every:
        before = next((prefix for prefix in PREFIXES if key.startswith(prefix)), None)
        if before is None:
            continue
        new = PREFIXES[before] + key.removeprefix(before)
        if new in names:
            raise SourceError(f"{new} of the language model is there twice: {names[new]} and {key}")
        names[new] = key
    read_keys = set(names.values())
    headless = "lm_head.weight" not in names
    text_config, notes = _config(config, headless, where)
    if headless and "tied" not in settings.values:
        _require_one_word(config, where)
    return Selection(text_config, names, tuple(key for key in every if key not in read_keys), notes)


def with_transposed_experts(
    config: Mapping[str, Any], fragments: dict[str, Fragment], settings: Settings
) -> dict[str, Fragment]:
    """The tensors of a checkpoint; with `settings.only` its fused experts are transposed to their shape in memory.

    Args:
        config: the config.json of the whole model.
        fragments: the tensors by their names in the checkpoint.
        settings: the user's settings.
    """
    kind, hidden = str(config.get("model_type")) if settings.only else "", _inner(config).get("hidden_size")

    def transposed(key: str, fragment: Fragment) -> Fragment:
        axis = untabled.hidden_axis(kind, key)
        if axis is None or len(fragment.shape) != 3 or fragment.shape[axis] == hidden:
            return fragment
        first, second, third = range(3)
        order = (first, third, second)
        return fragment._replace(
            shape=tuple(fragment.shape[i] for i in order), strides=tuple(fragment.strides[i] for i in order)
        )

    return {key: transposed(key, fragment) for key, fragment in fragments.items()}


def modules_of(left: Iterable[str]) -> list[str]:
    """The parts of a model that the named tensors are in: the first word of each name, two after `model`."""
    words = (key.split(".") for key in left)
    return list(dict.fromkeys(".".join(word[: 1 + (word[0] == "model")]) for word in words))


def _inner(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    if inner is None and config.get("model_type") in FLAT:
        return {key: value for key, value in config.items() if not key.startswith(OF_THE_WHOLE)} | {"model_type": None}
    return dict(inner) if isinstance(inner, dict) else {}


def _config(config: Mapping[str, Any], headless: bool, where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config.json of the language model alone, and notes for the user.

    Raises:
        UnsupportedError: the whole model is of an unknown type, or the language model alone cannot compute the same.
    """
    kind, inner = config.get("model_type"), _inner(config)
    if kind not in WHOLES:
        raise UnsupportedError(
            f"{where}: --only text does not know how {short(kind)} has its language model",
            f"it knows {', '.join(WHOLES)}",
        )
    if inner.get(UNLIKE.get(kind, "")):
        raise UnsupportedError(
            f"{where}: with {UNLIKE[kind]} = {short(inner[UNLIKE[kind]])} {kind} computes something else of text than "
            "its language model does alone",
            "Hugging Face, FSDP and DeepSpeed take the model whole, without --only text",
        )
    text = inner.get("model_type") or WHOLES[kind]
    text_config = {key: config[key] for key in INHERITED if config.get(key) is not None} | inner
    text_config[TIED] = _tied(config, inner, headless)
    if text in SAME:
        ropes = {key: _of_text(text_config[key]) for key in ROPES if isinstance(text_config.get(key), dict)}
        known = {*text_config, *(key for rope in ropes.values() for key in rope)}
        assumed = {key: value for key, value in SAME[text].assumed.items() if known.isdisjoint(key.split())}
        text_config = (
            {key.split()[0]: value for key, value in assumed.items()} | text_config | ropes | dict(SAME[text].fixed)
        )
        text = SAME[text].family
    text_config |= {"model_type": text, "architectures": []}
    family = find_family(text_config)
    name = family.architecture if family else CLASSES.get(text)
    if name is None:
        raise UnsupportedError(
            f"{where}: {text}, the language model in {kind}, has no class of its own in transformers",
            "Hugging Face, FSDP and DeepSpeed take the model whole, without --only text",
        )
    text_config.pop(IGNORED.get(text, ""), None)
    neutral = {} if kind in CHANGING else NEUTRAL.get(text, {})
    notes = tuple(
        f"{kind} leaves {key} out of its logits, so the language model has {json.dumps(value)}"
        f"{f', not {short(text_config[key])}' if key in text_config else ''}"
        for key, value in neutral.items()
        if text_config.get(key, ...) != value
    )
    text_config |= {**neutral, "architectures": [name]}
    first = ("architectures", "model_type")
    return {key: text_config[key] for key in (*first, *(key for key in text_config if key not in first))}, notes


def _tied(config: Mapping[str, Any], inner: Mapping[str, Any], headless: bool) -> bool:
    """Whether the output head is tied: the config of the whole model decides, as transformers 5.23 does for all."""
    return config.get(TIED, headless or inner.get(TIED, False)) is True


def _require_one_word(config: Mapping[str, Any], where: str) -> None:
    """Refuse a config, of files without a head, by which the whole model is not tied though its text is, or may be.

    Raises:
        RefusedError: it is such a config: transformers 4 made a tied model of the files, and 5 fills a head with random
            numbers.
    """
    kind, said = config.get("model_type"), _inner(config).get(TIED)
    if TIED not in config and said is not True and kind in WHOLES and kind not in TIED_WHOLES:
        raise RefusedError(
            f"{where} says {TIED} = {short(said)} in text_config and nothing outside, where a {kind} is not tied by "
            "default, and the files hold no lm_head.weight",
            "if the head was trained tied to the embedding: --set tied=true",
        )
    if TIED in config and config[TIED] is not True and _inner(config).get(TIED) is True:
        raise RefusedError(
            f"{where} says {TIED} = {short(config[TIED])} and true in its text_config, and the files hold no "
            "lm_head.weight: transformers 5 goes by the first and fills a head with random numbers",
            "if the head was trained tied to the embedding: --set tied=true",
        )


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of text alone, where the three positions of a token are equal."""
    plain = {key: value for key, value in rope.items() if key not in OF_IMAGES}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}
