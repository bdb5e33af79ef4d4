"""Megatron-Bridge's classes with a vision tower beside megatron-core's language model: names and further fields.

    language_model.*          a GPTModel, whose fields are those of `run_config.py`, or of a class in `providers.py`
    visual.*, vision_tower.*  the vision tower, a Hugging Face module: whole on each TP rank of the first stage
    multi_modal_projector.*   Gemma 3's projector between the two, a module of Bridge with its own configuration

A model is read with its config.json, whose values are compared with the fields of run_config.yaml, and are written into
them. Positions of images are computed in code; for text, `mrope` is the same as `rope`.

Facts: Megatron-Bridge 0.3.1 models/qwen_vl/ (qwen25_vl_provider.py, modeling_qwen25_vl.py, qwen3_vl_provider.py,
modelling_qwen3_vl/model.py and text_model.py), models/gemma_vl/ (gemma3_vl_provider.py, modeling_gemma3_vl.py),
models/glm_vl/ (glm_45v_provider.py, modeling_glm_45v.py), models/glm/glm45_provider.py and the names that its bridges
map; utils/yaml_utils.py for a config in a field. transformers 4.57.3, with which it runs, for the defaults of config
classes. `return_dict`, the kind of object in which transformers returns features of images, is a field from 0.4.0 on
(0.4.0 to 0.6.2, the same provider files). Checkpoints that they saved are in tests/golden/bridge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.huggingface.whole_model import renamed
from formats.megatron.args.provider import TARGET
from formats.megatron.args.tower import Layers
from formats.model.accepted import Deviation
from formats.model.spec import ModelSpec
from formats.model.values import positive_int

Config = Mapping[str, Any]
Compared = list[tuple[str, Any, Any]]
"""Of fields: (name, file value, config value)."""
GPT = "megatron.bridge.models.gpt_provider.GPTModelProvider"
PREFIX = "language_model."
"""The prefix of the names of the language model."""
HEAD = "lm_head."
INSIDE, FROM = "config_dict", ".from_dict"
"""The key under which a field that is a Hugging Face config holds the config's keys."""
TOWER, TEXT = "vision_config", "hf_text_config"
"""Fields that are Hugging Face configs. The second is used for the rotary embedding only, in 0.3.1."""
OF_MODEL = "the config of its model"
"""What errors call a config that is a config.json, or made of the fields (`whole_config.py`)."""
BASE = 1e4
"""The base of the rotary embedding of a tower: transformers 4.57.3, and Megatron-Bridge in code."""
ROTARY = ("rope_theta", "head_dim", "hidden_size", "num_attention_heads")
_QWEN = {
    "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16,
    "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 4,
    "window_size": 112, "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
_QWEN3 = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
_QWEN3_5 = {key: value for key, value in _QWEN3.items() if key != "deepstack_visual_indexes"}
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "Qwen2_5_VLVisionConfig": _QWEN,
    **dict.fromkeys(("Qwen3_5VisionConfig", "Qwen3_5MoeVisionConfig"), _QWEN3_5),
    "Qwen3VLVisionConfig": _QWEN3,
    "Qwen3VLMoeVisionConfig": _QWEN3,
    "Glm4vMoeVisionConfig": {
        "depth": 24, "hidden_size": 1536, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "num_heads": 12, "in_channels": 3, "image_size": 336, "patch_size": 14, "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 4096, "intermediate_size": 13696,
    },
    "SiglipVisionConfig": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_channels": 3, "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6, "attention_dropout": 0.0, "vision_use_head": True,
    },
    "Mistral3Config": {
        "image_token_index": 10, "projector_hidden_act": "gelu", "vision_feature_layer": -1,
        "multimodal_projector_bias": False, "spatial_merge_size": 2,
        TOWER: {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "num_channels": 3, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "attention_dropout": 0.0,
            "rope_parameters": {"rope_theta": 1e4},
        },
        "text_config": {"rms_norm_eps": 1e-5},
    },
}  # fmt: skip
"""Config class of a tower, or of a whole: what transformers assumes of a key that a config.json leaves out.

4.57.3 and 5.23.0. Of a config in a config the keys here alone are compared: a text is compared by its
settings, but for what the projector behind the tower takes from it.
"""
OF_A_FILE = {
    "_name_or_path", "architectures", "attn_implementation", "_attn_implementation_autoset", "dtype", "id2label",
    "initializer_range", "label2id", "model_type", "torch_dtype", "transformers_version", "tie_word_embeddings",
}  # fmt: skip
"""Keys of a config that do not affect the computation of the tower."""
RUNNING = {
    "add_decoder", "add_encoder", "bos_token_id", "eos_token_id", "freeze_language_model", "freeze_vision_model",
    "freeze_vision_projection", "cp_comm_type", "decoder_sparse_step", "deepstack_visual_indexes", "dist_train",
    "head_dim", TEXT, "in_channels", "language_max_sequence_length", "max_vision_cuda_graph_seq_length",
    "mlp_only_layers", "num_position_embeddings", "out_hidden_size", "patch_size", "pretrained_model_name",
    "return_dict", "temporal_patch_size", "use_hf_vision_model", "vision_cuda_graph_impl", "vision_cuda_graph_scope",
    "vision_dp_when_cp", "vision_end_token_id", "vision_start_token_id", "vision_token_id",
}  # fmt: skip
"""Further fields that do not affect a model, as its tower is built from `vision_config`. Those in `fields` of a class
are compared nevertheless."""


FRACTION = "rotary_percent"
"""A field that has another default in some of the classes than in GPTModelProvider (0.3.1 and 0.6.0,
qwen35_vl_provider.py and glm_45v_provider.py). Megatron-Bridge saves every field."""


@dataclass(frozen=True)
class Vision:
    """A class of Megatron-Bridge with a vision tower.

    Attributes:
        kind: the `model_type` of the models that the class computes.
        target: the name of the class, with its module.
        text: name prefix in files of the language model alone: prefix in Hugging Face files of the whole model.
        towers: prefix of all other names in Hugging Face files: prefix in Megatron-Bridge, with `{layer}` for the
            number of a layer; the first match counts.
        fields: field of the class: the function that computes its value from a config.json.
        depth: how many of the first layers get features of an image, computed from the config of the tower.
        language: the class of the language model alone.
        positions: the `position_embedding_type`, where that of the language model alone is `rope`; None if the same.
        lacks: settings of a language model that the class does not support and `language` does not refuse itself.
        ignores: fields of rotary scaling that the class does not hand to its language model.
        transposed: the matrices of Hugging Face files that the class has transposed.
        states: the `_extra_state` entries that a load requires besides those of the language model.
        deviation: the difference from the computation of transformers; None if there is none.
        fixed: further fields with one value for all models, which is not the field's default.
        releases: the releases of Megatron-Bridge that compute the model as it is written; empty for 0.3.1 and whatever
            later ones.
        layers: the layers of the tower, where the release that is written has megatron-core's; None if it is a module
            of Hugging Face.
        arguments: fields of the language model that a GPTModelProvider of other models has at one value.
        family: the only family of language models that the class computes, where another passes as one; None otherwise.
        whole: the field that is the config of the whole, of which the language model is read too; empty if there is
            none.
        architecture: the class in transformers, where the fields hold all of the config (`whole_config.py`).
        signs: prefixes of names that a run of these releases has, and none of earlier ones.
        told: fields whose values tell these releases from earlier ones with the same names.
        limit: why the class does not compute a model, from the language model's spec, the config of the tower and
            that of the whole; empty if it does.
    """

    kind: str
    target: str
    text: Mapping[str, str]
    towers: Mapping[str, str]
    fields: Mapping[str, Callable[[Config], Any]]
    depth: Callable[[Config], int] = field(default=lambda _: 0)
    language: str = GPT
    positions: str | None = "mrope"
    lacks: tuple[str, ...] = ("rope_scaling", "sliding_window", "dense_layers")
    ignores: tuple[str, ...] = ("rope_scaling",)
    transposed: frozenset[str] = frozenset()
    states: tuple[str, ...] = ()
    deviation: Deviation | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    releases: str = ""
    layers: Layers | None = None
    arguments: tuple[str, ...] = ()
    family: str | None = None
    whole: str = ""
    architecture: str = ""
    signs: tuple[str, ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    limit: Callable[[ModelSpec, Config, Config], str] = field(default=lambda *_: "")

    @property
    def name(self) -> str:
        """The name of the class without its module."""
        return self.target.rpartition(".")[2]

    def in_files(self, key: str) -> str:
        """The name in Hugging Face files of a tensor of the language model, from its name in a language model alone."""
        before = next(prefix for prefix in self.text if key.startswith(prefix))
        return self.text[before] + key.removeprefix(before)

    def in_bridge(self, key: str) -> str | None:
        """The name in Megatron-Bridge of a tensor of the tower, from its name in files; None of any other tensor."""
        return renamed(key, self.towers.items())

    def of_tower(self, name: str) -> str | None:
        """The name in files of a tensor of the tower, from its name in Megatron-Bridge; None of any other tensor."""
        return renamed(name, ((own, prefix) for prefix, own in self.towers.items()))

    def tower(self, config: Config) -> dict[str, Any]:
        """The config of the tower, completed with the defaults of its class.

        Raises:
            SourceError: a size is no number, or a list of layers no list.
        """
        said = self.fields[TOWER](config)
        assumed = ASSUMED[said[TARGET].split(".")[-2]]
        tower = {**assumed, **said[INSIDE]}
        for key, default in assumed.items():
            if type(default) is int:
                positive_int(tower[key], f"{TOWER}.{key}", OF_MODEL)
            elif isinstance(default, list) and not isinstance(tower[key], list):
                raise SourceError(f"{OF_MODEL}: {TOWER}.{key} = {short(tower[key])} is no list of layers")
        return tower

    def on_hub(self, key: str) -> str:
        """The name of a tensor in files of the Hub, from its name in files of any version of transformers."""
        name = self.in_bridge(key)
        return key if name is None else str(self.of_tower(name))

    def said(self, config: Config) -> dict[str, Any]:
        """Return the fields of a model that the class adds to those of the language model."""
        return {
            TARGET: self.target,
            **{name: value(config) for name, value in self.fields.items()},
            **({"position_embedding_type": self.positions} if self.positions else {}),
            **self.fixed,
            "scatter_embedding_sequence_parallel": False,
            "should_pad_vocab": False,
        }

    def require(self, spec: ModelSpec, config: Config, tp: int, first: int) -> None:
        """Refuse a model that the class cannot compute in a topology.

        Args:
            spec: the language model.
            config: the config.json of the whole model.
            tp: tensor-parallel size.
            first: number of layers of the first pipeline stage.

        Raises:
            RefusedError: the class lacks a setting of the language model, the vocabulary does not divide over `tp`, or
                layers with features of an image are not in the first stage.
        """
        if self.family not in (None, spec.family):
            raise RefusedError(
                f"Megatron-Bridge's {self.name} computes a {self.family}, and this text is a {spec.family}"
            )
        odd = next((setting for setting in self.lacks if getattr(spec, setting)), None)
        if odd:
            raise RefusedError(f"Megatron-Bridge's {self.name} has no {odd} = {short(getattr(spec, odd))}")
        if (spec.vocab or 0) % tp:
            raise RefusedError(
                f"{spec.vocab} tokens do not divide over tp = {tp}, and {self.name} pads none", "take another --tp"
            )
        self.require_limit(spec, config)
        if TOWER in self.fields:
            self._require_tower(self.tower(config), tp, first)

    def require_limit(self, spec: ModelSpec, config: Config) -> None:
        """Refuse a model that the class computes otherwise than transformers, or not at all.

        Raises:
            RefusedError: it is such a model.
        """
        why = self.limit(spec, self.tower(config) if TOWER in self.fields else {}, config)
        if why:
            raise RefusedError(f"Megatron-Bridge's {self.name} {why}")

    def _require_tower(self, tower: Mapping[str, Any], tp: int, first: int) -> None:
        """Refuse a tower, by its config with its defaults, that the class cannot compute in a topology."""
        rotary = {"rope_theta": tower.get("rope_theta", BASE), **(tower.get("rope_parameters") or {})}
        base = rotary["rope_theta"]
        if base != BASE:
            raise RefusedError(
                f"Megatron-Bridge's {self.name} turns its tower with a base of {BASE:g}, not {short(base)}"
            )
        if other := sorted(rotary.keys() - {"rope_theta", "rope_type"}):
            raise RefusedError(f"Megatron-Bridge's {self.name} knows no {other[0]} of the tower's rotary embedding")
        if self.layers:
            self.layers.require(tower, tp, self.name)
        if self.depth(tower) > first:
            raise RefusedError(
                f"Megatron-Bridge's {self.name} adds features of images after the first {self.depth(tower)} layers, "
                f"which have to be of the first stage, and that has {first}",
                "take a smaller --pp, or --first-stage-layers",
            )

    def deviations(self, accept: Collection[str], where: str) -> tuple[str, ...]:
        """Return the note on the accepted deviation from transformers; empty if the class has no deviation.

        Raises:
            RefusedError: the deviation is not in `accept`.
        """
        return self.deviation.notes(accept, where) if self.deviation else ()

    def require_agreement(self, fields: Mapping[str, Any], config: Config, where: str) -> None:
        """Refuse fields of a run_config.yaml that differ from a config.json.

        Raises:
            RefusedError: fields and config.json contradict each other.
        """
        differing = [
            f"{name}: {short(ours)} | {short(theirs)}"
            for field_name, value in self.fields.items()
            if field_name in fields
            for name, ours, theirs in _compared(field_name, fields[field_name], value(config))
            if ours != theirs
        ]
        if differing:
            raise RefusedError(
                f"{where} and {OF_MODEL} contradict each other (file | config): {'; '.join(differing)}",
                "give the right config with --config",
            )


def of_text(vision: Vision, fields: Mapping[str, Any], settings: Collection[str], where: str) -> dict[str, Any]:
    """Return the fields of the language model, as its class alone would have them.

    Args:
        vision: the class.
        fields: its fields.
        settings: the settings that the user passed.
        where: what to call the file in an error.

    Raises:
        UnsupportedError: the positions are not of the class's kind, rotary_base differs from hf_text_config, or a field
            has no effect in the class.
        SourceError: a field is missing, whose default is the class's own.
    """
    own = {*vision.fields, *RUNNING} - {vision.whole}
    others = {name: value for name, value in fields.items() if name not in own}
    others |= {TARGET: vision.language}
    if vision.positions is None:
        return others
    if fields.get("position_embedding_type") != vision.positions:
        odd = short(fields.get("position_embedding_type"))
        raise UnsupportedError(f"{where}: position_embedding_type = {odd} in a {vision.name}")
    if FRACTION not in fields:
        raise SourceError(
            f"{where} lacks {FRACTION}, which Megatron-Bridge saves of every {vision.name}", "copy the file again"
        )
    ignored = [name for name in vision.ignores if fields.get(name)]
    if ignored and "rope_scaling" not in settings:
        raise UnsupportedError(
            f"{where}: {ignored[0]} = {short(fields[ignored[0]])}, which {vision.name} does not hand to its model",
            "what it trained is --set rope_scaling=none",
        )
    inner = config_in(fields.get(TEXT) or {})
    if inner and "rope_parameters" not in inner and inner.get("rope_theta") != fields.get("rotary_base"):
        raise UnsupportedError(
            f"{where}: rotary_base = {short(fields.get('rotary_base'))}, and the class goes by {TEXT}, whose "
            f"rope_theta is {short(inner.get('rope_theta'))}"
        )
    return {**others, "position_embedding_type": "rope"}


def _compared(name: str, ours: Any, theirs: Any) -> Compared:
    """Return (name, file value, config value) of a field; of a nested config, of each key with its class default."""
    if not isinstance(theirs, Mapping) or not isinstance(ours, Mapping):
        return [(name, ours, theirs)]
    if INSIDE not in theirs:
        return [(f"{name}.{key}", ours.get(key), value) for key, value in theirs.items()]
    own, other = config_in(ours), theirs[INSIDE]
    if name == TEXT:
        return [(f"{name}.{key}", own[key], other[key]) for key in ROTARY if key in own and key in other]
    assumed = ASSUMED[theirs[TARGET].split(".")[-2]]
    keys = [*assumed, *(key for key in own if key in other and key not in assumed and key not in OF_A_FILE)]
    classes = [str(of.get(TARGET)).removesuffix(FROM) for of in (ours, theirs)]
    return [(f"{name}.{TARGET}", classes[0], classes[1]), *_by_key(name, own, other, keys, assumed)]


def _by_key(
    name: str, own: Config, other: Config, keys: Collection[str], assumed: Config
) -> list[tuple[str, Any, Any]]:
    """Return (name, file value, config value) of keys of a config; of a config inside, of each key that is assumed."""
    found = Compared()
    for key in keys:
        place, default = f"{name}.{key}", assumed.get(key)
        ours, theirs = own.get(key, default), other.get(key, default)
        if isinstance(default, Mapping) and isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            found += _by_key(place, ours, theirs, [*default], default)
        else:
            found.append((place, ours, theirs))
    return found


def config_in(field: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a Hugging Face config in a field: under `INSIDE`, or, from 0.5 on, beside the name of its class."""
    return dict(field.get(INSIDE) or {}) if INSIDE in field else {key: field[key] for key in field if key != TARGET}


def key_of(name: str, assumed: Any) -> Callable[[Config], Any]:
    """Return the function that reads a key of a config, with the default of the config's class."""
    return lambda config: config.get(name, assumed)


def inside(target: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Hugging Face config in the form in which Megatron-Bridge's files hold it."""
    return {TARGET: f"transformers.models.{target}.from_dict", "_call_": True, INSIDE: dict(config)}


def tower_of(target: str) -> Callable[[Config], Any]:
    """Return the function that writes the tower's config as a field."""
    return lambda config: inside(target, config.get(TOWER) or {})


def ropes_of(config: Config) -> Mapping[str, Any]:
    """Return the rotary parameters of a config, of transformers 4 or 5, of the text config or the top level."""
    text = config.get("text_config") or config
    return text.get("rope_parameters") or text.get("rope_scaling") or {}


def sections(assumed: Sequence[int]) -> Callable[[Config], Any]:
    """Return the function that reads how many pairs of a head rotate by time, height and width of an image."""
    return lambda config: list(ropes_of(config).get("mrope_section") or assumed)


def text_of(target: str) -> Callable[[Config], Any]:
    """Return the function that writes the text config, for the rotary embedding, in the form of transformers 4."""

    def written(config: Config) -> dict[str, Any]:
        text, ropes = dict(config["text_config"]), ropes_of(config)
        text.pop("rope_parameters", None)
        text |= {"rope_theta": text.get("rope_theta", ropes.get("rope_theta", 5e5))}
        text["rope_scaling"] = {key: value for key, value in ropes.items() if key != "rope_theta"}
        return inside(target, text)

    return written
