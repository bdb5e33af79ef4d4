"""Classes of Megatron-Bridge with a tower of images beside megatron-core's language model: names and further fields.

    language_model.*    a GPTModel, whose fields are those of `run_config.py`
    visual.*            the tower, the module of Hugging Face itself: whole on each tensor rank of the first stage

What a config.json says of the whole is compared with the fields of a file, and written into them: a whole is read with
its config. Positions of images are in code: of text `mrope` is what `rope` is.

Facts: Megatron-Bridge 0.3.1 models/qwen_vl/ (qwen25_vl_provider.py, modeling_qwen25_vl.py, qwen3_vl_provider.py,
modelling_qwen3_vl/model.py and text_model.py) and the names that its bridges map; utils/yaml_utils.py for a config in
a field. transformers 4.57.3, with which it runs, for what config classes assume. tests/golden/bridge has its own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from formats.errors import RefusedError, UnsupportedError, short
from formats.megatron.args.provider import TARGET
from formats.model.spec import ModelSpec

Config = Mapping[str, Any]
PREFIX = "language_model."
"""What stands before the names of the language model."""
HEAD = "lm_head."
INSIDE = "config_dict"
"""The keys of a config that is a field."""
TOWER, TEXT = "vision_config", "hf_text_config"
"""Fields that are configs. Of the second the rotary embedding alone is made."""
ROTARY = ("rope_theta", "head_dim", "hidden_size", "num_attention_heads")
OF_A_FILE = {
    "_name_or_path", "architectures", "attn_implementation", "_attn_implementation_autoset", "dtype", "id2label",
    "initializer_range", "label2id", "model_type", "torch_dtype", "transformers_version", "tie_word_embeddings",
}  # fmt: skip
"""Keys of a config that say nothing of what its tower computes."""
RUNNING = {
    "bos_token_id", "eos_token_id", "freeze_language_model", "freeze_vision_model", "freeze_vision_projection",
    "cp_comm_type", "decoder_sparse_step", "deepstack_visual_indexes", "head_dim", "in_channels",
    "language_max_sequence_length", "mlp_only_layers", "num_position_embeddings", "out_hidden_size", "patch_size",
    "pretrained_model_name", "temporal_patch_size", "use_hf_vision_model", "vision_dp_when_cp", "vision_token_id",
}  # fmt: skip
"""Further fields: no model of the class depends on them, whose tower goes by `vision_config`."""


@dataclass(frozen=True)
class Vision:
    """One class.

    Attributes:
        kind: the model type of its models.
        target: the class, with its module.
        text: how names of the language model begin by itself: how they begin in the whole's files.
        towers: how all other names begin there: how they do in Megatron-Bridge.
        fields: what its fields are, by what says it of a config.json.
        depth: how many of the first layers are given features of an image, by its `vision_config`.
    """

    kind: str
    target: str
    text: Mapping[str, str]
    towers: Mapping[str, str]
    fields: Mapping[str, Callable[[Config], Any]]
    depth: Callable[[Config], int] = field(default=lambda _: 0)

    @property
    def name(self) -> str:
        """The class without its module."""
        return self.target.rpartition(".")[2]

    def in_files(self, key: str) -> str:
        """The name in files of a tensor of the language model."""
        before = next(prefix for prefix in self.text if key.startswith(prefix))
        return self.text[before] + key.removeprefix(before)

    def in_bridge(self, key: str) -> str | None:
        """The name in Megatron-Bridge of a tensor of a tower; None if it is of none."""
        before = next((prefix for prefix in self.towers if key.startswith(prefix)), None)
        return None if before is None else self.towers[before] + key.removeprefix(before)

    def of_tower(self, name: str) -> str | None:
        """The name in files of a tensor of a tower, by that in Megatron-Bridge; None if it is of none."""
        before = next((prefix for prefix, own in self.towers.items() if name.startswith(own)), None)
        return None if before is None else before + name.removeprefix(self.towers[before])

    def said(self, config: Config) -> dict[str, Any]:
        """The fields of a model, beside those of its language model."""
        return {
            TARGET: self.target,
            **{name: value(config) for name, value in self.fields.items()},
            "position_embedding_type": "mrope",
            "scatter_embedding_sequence_parallel": False,
            "should_pad_vocab": False,
        }

    def require(self, spec: ModelSpec, config: Config, tp: int, first: int) -> None:
        """The class computes a model.

        Args:
            spec: its language model.
            config: the config.json of the whole.
            tp: tensor parallel size.
            first: layers of the first stage.

        Raises:
            RefusedError: it does not.
        """
        settings = ("rope_scaling", "sliding_window", "dense_layers")
        odd = next((setting for setting in settings if getattr(spec, setting)), None)
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

    def require_agreement(self, fields: Mapping[str, Any], config: Config, where: str) -> None:
        """The fields of a file say what a config.json does.

        Raises:
            RefusedError: they contradict each other.
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
    """The class that a file names; None if it is none of these."""
    return next((vision for vision in VISIONS.values() if fields.get(TARGET) == vision.target), None)


def of_text(vision: Vision, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of the language model, as those of a GPTModelProvider.

    Raises:
        UnsupportedError: its positions are none that a config can say.
    """
    if fields.get("position_embedding_type") != "mrope":
        odd = short(fields.get("position_embedding_type"))
        raise UnsupportedError(f"{where}: position_embedding_type = {odd} in a {vision.name}")
    inner = (fields.get(TEXT) or {}).get(INSIDE) or {}
    if inner and inner.get("rope_theta") != fields.get("rotary_base"):
        raise UnsupportedError(
            f"{where}: rotary_base = {short(fields.get('rotary_base'))}, and the class goes by hf_text_config, whose "
            f"rope_theta is {short(inner.get('rope_theta'))}"
        )
    others = {name: value for name, value in fields.items() if name not in {*vision.fields, *RUNNING}}
    return {**others, "position_embedding_type": "rope"}


def _compared(name: str, ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    """(name, file, config) of what both say: of a config inside, those of its keys that both have."""
    if name not in (TOWER, TEXT):
        return [(name, ours, theirs)]
    own, other = ours.get(INSIDE) or {}, theirs[INSIDE]
    keys = ROTARY if name == TEXT else [key for key in own if key not in OF_A_FILE]
    return [(f"{name}.{key}", own[key], other[key]) for key in keys if key in own and key in other]


def _key(name: str, assumed: Any) -> Callable[[Config], Any]:
    """A key of the config, and what its class assumes."""
    return lambda config: config.get(name, assumed)


def _inside(target: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, as Megatron-Bridge's files hold one."""
    return {TARGET: f"transformers.models.{target}.from_dict", "_call_": True, INSIDE: dict(config)}


def _tower(target: str) -> Callable[[Config], Any]:
    return lambda config: _inside(target, config.get(TOWER) or {})


def _ropes(config: Config) -> Mapping[str, Any]:
    """What a config says of its rotary embedding, wherever that is."""
    text = config.get("text_config") or config
    return text.get("rope_parameters") or text.get("rope_scaling") or {}


def _sections(assumed: Sequence[int]) -> Callable[[Config], Any]:
    """How many pairs of a head turn by the time, the height and the width of an image."""
    return lambda config: list(_ropes(config).get("mrope_section") or assumed)


def _text(target: str) -> Callable[[Config], Any]:
    """The config of the text as transformers 4 has it, which makes the rotary embedding of it."""

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
"""What stands where an image is."""
QWEN = "megatron.bridge.models.qwen_vl."
DEEP = {"model.": "model.language_model.", HEAD: HEAD}


def _qwen3(kind: str, name: str, target: str) -> Vision:
    """A Qwen3-VL."""
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

    return Vision(kind, f"{QWEN}qwen3_vl_provider.{target}", DEEP, {"model.visual.": "vision_model."}, fields, depth)


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
    )
}
"""Model type: the class."""
LACKING: Mapping[str, str] = {
    "gemma3": "Megatron-Bridge's Gemma3VLModelProvider has a projector with a configuration of its own, which is not "
    "written here, and names of the tower as transformers 4 has them",
}
"""Model type: why it is not written for the class that there is (0.3.1 models/gemma_vl/modeling_gemma3_vl.py)."""
