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
classes. Checkpoints that it saved are in tests/golden/bridge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args import gemma3
from formats.megatron.args.provider import TARGET
from formats.model.accepted import IMAGES
from formats.model.spec import ModelSpec

Config = Mapping[str, Any]
GPT = "megatron.bridge.models.gpt_provider.GPTModelProvider"
PREFIX = "language_model."
"""The prefix of the names of the language model."""
HEAD = "lm_head."
INSIDE = "config_dict"
"""The key under which a field that is a Hugging Face config holds the config's keys."""
TOWER, TEXT = "vision_config", "hf_text_config"
"""Fields that are Hugging Face configs. The second is used for the rotary embedding only."""
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
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "Qwen2_5_VLVisionConfig": _QWEN,
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
}  # fmt: skip
"""Config class of a tower: what transformers assumes of a key that a config.json leaves out (4.57.3 and 5.23.0)."""
OF_A_FILE = {
    "_name_or_path", "architectures", "attn_implementation", "_attn_implementation_autoset", "dtype", "id2label",
    "initializer_range", "label2id", "model_type", "torch_dtype", "transformers_version", "tie_word_embeddings",
}  # fmt: skip
"""Keys of a config that do not affect the computation of the tower."""
RUNNING = {
    "bos_token_id", "eos_token_id", "freeze_language_model", "freeze_vision_model", "freeze_vision_projection",
    "cp_comm_type", "decoder_sparse_step", "deepstack_visual_indexes", "head_dim", "in_channels",
    "language_max_sequence_length", "mlp_only_layers", "num_position_embeddings", "out_hidden_size", "patch_size",
    "pretrained_model_name", "temporal_patch_size", "use_hf_vision_model", "vision_dp_when_cp", "vision_end_token_id",
    "vision_start_token_id", "vision_token_id",
}  # fmt: skip
"""Further fields that do not affect a model, as its tower is built from `vision_config`. Those in `fields` of a class
are compared nevertheless."""


class Deviation(NamedTuple):
    """A difference between the computation of a class and that of transformers.

    Attributes:
        accept: the name with which the user accepts the difference (`--accept`).
        what: a description of the difference.
        use: the purpose for which the difference can be accepted.
    """

    accept: str
    what: str
    use: str


@dataclass(frozen=True)
class Vision:
    """A class of Megatron-Bridge with a vision tower.

    Attributes:
        kind: the `model_type` of the models that the class computes.
        target: the name of the class, with its module.
        text: name prefix in files of the language model alone: prefix in Hugging Face files of the whole model.
        towers: prefix of all other names in Hugging Face files: prefix in Megatron-Bridge; the first match counts.
        fields: field of the class: the function that computes its value from a config.json.
        depth: how many of the first layers get features of an image, computed from a config.json.
        language: the class of the language model alone.
        positions: the `position_embedding_type`, where that of the language model alone is `rope`; None if the same.
        lacks: settings of a language model that the class does not support and `language` does not refuse itself.
        turned: the matrices of Hugging Face files that the class has transposed.
        states: the `_extra_state` entries that a load requires besides those of the language model.
        deviation: the difference from the computation of transformers; None if there is none.
        fixed: further fields with one value for all models, which is not the field's default.
        later: prefixes of names in releases from 0.4.0 on, whose tower has megatron-core's layers.
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
    turned: frozenset[str] = frozenset()
    states: tuple[str, ...] = ()
    deviation: Deviation | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    later: tuple[str, ...] = ()

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
        before = next((prefix for prefix in self.towers if key.startswith(prefix)), None)
        return None if before is None else self.towers[before] + key.removeprefix(before)

    def of_tower(self, name: str) -> str | None:
        """The name in files of a tensor of the tower, from its name in Megatron-Bridge; None of any other tensor."""
        before = next((prefix for prefix, own in self.towers.items() if name.startswith(own)), None)
        return None if before is None else before + name.removeprefix(self.towers[before])

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
        odd = next((setting for setting in self.lacks if getattr(spec, setting)), None)
        if odd:
            raise RefusedError(f"Megatron-Bridge's {self.name} has no {odd} = {short(getattr(spec, odd))}")
        if (spec.vocab or 0) % tp:
            raise RefusedError(
                f"{spec.vocab} tokens do not divide over tp = {tp}, and {self.name} pads none", "take another --tp"
            )
        if self.depth(config) > first:
            raise RefusedError(
                f"Megatron-Bridge's {self.name} adds features of images after the first {self.depth(config)} layers, "
                f"which have to be of the first stage, and that has {first}",
                "take a smaller --pp, or --first-stage-layers",
            )

    def deviations(self, accept: Collection[str], where: str) -> tuple[str, ...]:
        """Return the note on the accepted deviation from transformers; empty if the class has no deviation.

        Raises:
            RefusedError: the deviation is not in `accept`.
        """
        if self.deviation is None:
            return ()
        if self.deviation.accept in accept:
            return (self.deviation.what,)
        raise RefusedError(f"{where}: {self.deviation.what}", f"--accept {self.deviation.accept}, {self.deviation.use}")

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
                f"{where} and the config of its model contradict each other (file | config): {'; '.join(differing)}",
                "give the right config with --config",
            )


def of_fields(fields: Mapping[str, Any]) -> Vision | None:
    """The class that the fields of a run_config.yaml name; None if it is not in `VISIONS`."""
    return next((vision for vision in VISIONS.values() if fields.get(TARGET) == vision.target), None)


def of_text(vision: Vision, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of the language model, as its class alone would have them.

    Raises:
        UnsupportedError: the positions are not of the class's kind, or rotary_base differs from hf_text_config.
    """
    others = {name: value for name, value in fields.items() if name not in {*vision.fields, *RUNNING}}
    others |= {TARGET: vision.language}
    if vision.positions is None:
        return others
    if fields.get("position_embedding_type") != vision.positions:
        odd = short(fields.get("position_embedding_type"))
        raise UnsupportedError(f"{where}: position_embedding_type = {odd} in a {vision.name}")
    inner = (fields.get(TEXT) or {}).get(INSIDE) or {}
    if inner and inner.get("rope_theta") != fields.get("rotary_base"):
        raise UnsupportedError(
            f"{where}: rotary_base = {short(fields.get('rotary_base'))}, and the class goes by hf_text_config, whose "
            f"rope_theta is {short(inner.get('rope_theta'))}"
        )
    return {**others, "position_embedding_type": "rope"}


def _compared(name: str, ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    """Return (name, file value, config value) of a field; of a nested config, of each key with its class default."""
    if not isinstance(theirs, Mapping) or not isinstance(ours, Mapping):
        return [(name, ours, theirs)]
    if INSIDE not in theirs:
        return [(f"{name}.{key}", ours.get(key), value) for key, value in theirs.items()]
    own, other = ours.get(INSIDE) or {}, theirs[INSIDE]
    if name == TEXT:
        return [(f"{name}.{key}", own[key], other[key]) for key in ROTARY if key in own and key in other]
    assumed = ASSUMED[theirs[TARGET].split(".")[-2]]
    keys = [*assumed, *(key for key in own if key in other and key not in assumed and key not in OF_A_FILE)]
    return [(f"{name}.{key}", own.get(key, assumed.get(key)), other.get(key, assumed.get(key))) for key in keys]


def _key(name: str, assumed: Any) -> Callable[[Config], Any]:
    """Return the function that reads a key of a config, with the default of the config's class."""
    return lambda config: config.get(name, assumed)


def _inside(target: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Hugging Face config in the form in which Megatron-Bridge's files hold it."""
    return {TARGET: f"transformers.models.{target}.from_dict", "_call_": True, INSIDE: dict(config)}


def _tower(target: str) -> Callable[[Config], Any]:
    return lambda config: _inside(target, config.get(TOWER) or {})


def _ropes(config: Config) -> Mapping[str, Any]:
    """Return the rotary parameters of a config, of transformers 4 or 5, of the text config or the top level."""
    text = config.get("text_config") or config
    return text.get("rope_parameters") or text.get("rope_scaling") or {}


def _sections(assumed: Sequence[int]) -> Callable[[Config], Any]:
    """Return the function that reads how many pairs of a head rotate by time, height and width of an image."""
    return lambda config: list(_ropes(config).get("mrope_section") or assumed)


def _text(target: str) -> Callable[[Config], Any]:
    """Return the function that writes the text config, for the rotary embedding, in the form of transformers 4."""

    def written(config: Config) -> dict[str, Any]:
        text, ropes = dict(config["text_config"]), _ropes(config)
        text.pop("rope_parameters", None)
        text |= {"rope_theta": text.get("rope_theta", ropes.get("rope_theta", 5e5))}
        text["rope_scaling"] = {key: value for key, value in ropes.items() if key != "rope_theta"}
        return _inside(target, text)

    return written


TOKENS = {
    "image_token_id": _key("image_token_id", 151655),
    "video_token_id": _key("video_token_id", 151656),
    "vision_start_token_id": _key("vision_start_token_id", 151652),
    "vision_end_token_id": _key("vision_end_token_id", 151653),
}
"""Token ids that mark images and videos, with the defaults of Qwen's configs."""
QWEN = "megatron.bridge.models.qwen_vl."
DEEP = {"model.": "model.language_model.", HEAD: HEAD}


def _qwen3(kind: str, name: str, target: str) -> Vision:
    """Return the class of a kind of Qwen3-VL, dense or with experts."""
    module = f"{kind}.configuration_{kind}.{name}"
    fields = {
        TOWER: _tower(f"{module}VisionConfig"),
        TEXT: _text(f"{module}TextConfig"),
        "mrope_section": _sections((24, 20, 20)),
        "spatial_merge_size": lambda config: (config.get(TOWER) or {}).get("spatial_merge_size", 2),
        **TOKENS,
    }

    def depth(config: Config) -> int:
        return len((config.get(TOWER) or {}).get("deepstack_visual_indexes", (8, 16, 24)))

    return Vision(
        kind,
        f"{QWEN}qwen3_vl_provider.{target}",
        DEEP,
        {"model.visual.": "vision_model."},
        fields,
        depth,
        later=("vision_model.decoder.",),
    )


def _projector(config: Config) -> dict[str, Any]:
    """Return the configuration of Gemma 3's projector; Megatron-Bridge's own import writes the released image sizes."""
    tower = config.get(TOWER) or {}
    return {
        TARGET: f"{GEMMA}modeling_gemma3_vl.Gemma3VLMultimodalProjectorConfig",
        "input_size": tower.get("hidden_size", 768),
        "hidden_size": (config.get("text_config") or {}).get("hidden_size", 2304),
        "image_size": tower.get("image_size", 224),
        "patch_dim": tower.get("patch_size", 16),
        "tokens_per_image": config.get("mm_tokens_per_image", 256),
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": True,
        "layernorm_epsilon": tower.get("layer_norm_eps", 1e-6),
    }


GEMMA = "megatron.bridge.models.gemma_vl."
PROJECTOR = "multi_modal_projector."
VISIONS: Mapping[str, Vision] = {
    vision.kind: vision
    for vision in (
        Vision(
            "qwen2_5_vl",
            f"{QWEN}qwen25_vl_provider.Qwen25VLModelProvider",
            {"model.": "model.", HEAD: HEAD},
            {"visual.": "visual."},
            {
                TOWER: _tower("qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig"),
                "mrope_section": _sections((16, 24, 24)),
                **TOKENS,
            },
        ),
        _qwen3("qwen3_vl", "Qwen3VL", "Qwen3VLModelProvider"),
        _qwen3("qwen3_vl_moe", "Qwen3VLMoe", "Qwen3VLMoEModelProvider"),
        Vision(
            "glm4v_moe",
            "megatron.bridge.models.glm_vl.glm_45v_provider.GLM45VModelProvider",
            DEEP,
            {"model.visual.": "visual."},
            {
                TOWER: _tower("glm4v_moe.configuration_glm4v_moe.Glm4vMoeVisionConfig"),
                "mrope_section": _sections((8, 12, 12)),
                "image_token_id": _key("image_token_id", 151363),
                "video_token_id": _key("video_token_id", 151364),
                "image_start_token_id": _key("image_start_token_id", 151339),
                "image_end_token_id": _key("image_end_token_id", 151340),
                "video_start_token_id": _key("video_start_token_id", 151341),
                "video_end_token_id": _key("video_end_token_id", 151342),
            },
            lacks=("rope_scaling", "sliding_window"),
            fixed={"mtp_num_layers": None},
        ),
        Vision(
            "gemma3",
            f"{GEMMA}gemma3_vl_provider.Gemma3VLModelProvider",
            {"model.": "language_model.model.", HEAD: f"language_model.{HEAD}"},
            {
                "vision_tower.vision_model.": "vision_tower.vision_model.",
                "vision_tower.": "vision_tower.vision_model.",  # as transformers 5 saves it
                f"{PROJECTOR}mm_input_projection_weight": f"{PROJECTOR}proj.weight",
                f"{PROJECTOR}mm_soft_emb_norm.": f"{PROJECTOR}mm_soft_embed_norm.",
            },
            {
                TOWER: _tower("siglip.configuration_siglip.SiglipVisionConfig"),
                "vision_projector_config": _projector,
                "mm_tokens_per_image": _key("mm_tokens_per_image", 256),
                "image_token_id": _key("image_token_index", 262144),
            },
            language=gemma3.PROVIDER.target,
            positions=None,
            lacks=(),
            turned=frozenset({f"{PROJECTOR}mm_input_projection_weight"}),
            states=tuple(f"{PROJECTOR}{name}._extra_state/shard_0_1" for name in ("mm_soft_embed_norm", "proj")),
            deviation=Deviation(
                IMAGES,
                "in stock Megatron-Bridge the tokens of an image see only those before them, in transformers all of "
                "their image",
                "for a training of text, or to go on as the run does",
            ),
        ),
    )
}
"""`model_type`: the class of Megatron-Bridge."""
HERE = "no release of Megatron-Bridge on PyPI (up to 0.3.1) has a class of it"
LACKING: Mapping[str, str] = {
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        f"{HERE}, and those from 0.4.0 on give it a tower of megatron-core's layers, which is not known here",
    ),
    "kimi_k25": f"{HERE}, and those from 0.4.0 on load the code of its tower from its repository",
    "mistral3": "Megatron-Bridge 0.3.1 runs with transformers 4, and its Ministral3Model calls what 5 alone has",
    "NemotronH_Nano_VL_V2": "Megatron-Bridge's NemotronNano12Bv2VLModelProvider has the sizes of its tower in code, "
    "and transformers has no class of it",
}
"""`model_type`: why such models are not written for Megatron-Bridge.

Facts: 0.3.1 models/ministral3/modeling_ministral3.py (`pooler_output`), nemotron_vl/nemotron_vl_provider.py; 0.4.2
models/qwen_vl/qwen35_vl_bridge.py, kimi_vl/modeling_kimi_k25_vl.py.
"""
