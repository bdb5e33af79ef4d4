"""The classes of Megatron-Bridge with a vision tower that are known here, and why other models have none.

Facts: as in `vision.py`, and of each class in the file that it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from formats.errors import RefusedError
from formats.megatron.args import gemma3, ministral3
from formats.megatron.args.provider import TARGET
from formats.megatron.args.releases import FIRST_RELEASE, LAST, LATER, is_first
from formats.megatron.args.tower import Layers, Stack
from formats.megatron.args.vision import (
    HEAD,
    TEXT,
    TOWER,
    Config,
    Vision,
    inside,
    key_of,
    ropes_of,
    sections,
    text_of,
    tower_of,
)
from formats.model.accepted import IMAGES, MERGER, Deviation
from formats.model.spec import ModelSpec
from formats.model.values import positive_int

TOKENS = {
    "image_token_id": key_of("image_token_id", 151655),
    "video_token_id": key_of("video_token_id", 151656),
    "vision_start_token_id": key_of("vision_start_token_id", 151652),
    "vision_end_token_id": key_of("vision_end_token_id", 151653),
}
"""Token ids that mark images and videos, with the defaults of Qwen's configs."""
QWEN = "megatron.bridge.models.qwen_vl."
DEEP = {"model.": "model.language_model.", HEAD: HEAD}


CORE = "vision_model.decoder."
MERGERS = f"{CORE}deepstack_merger_list."
BLOCKS = {
    "model.visual.blocks.{layer}.norm1.": f"{CORE}layers.{{layer}}.self_attention.linear_qkv.layer_norm_",
    "model.visual.blocks.{layer}.attn.qkv.": f"{CORE}layers.{{layer}}.self_attention.linear_qkv.",
    "model.visual.blocks.{layer}.attn.proj.": f"{CORE}layers.{{layer}}.self_attention.linear_proj.",
    "model.visual.blocks.{layer}.norm2.": f"{CORE}layers.{{layer}}.mlp.linear_fc1.layer_norm_",
    "model.visual.blocks.{layer}.mlp.": f"{CORE}layers.{{layer}}.mlp.",
    "model.visual.merger.norm.": "vision_model.merger.patch_norm.",
    **{f"model.visual.{name}.": f"vision_model.{name}." for name in ("merger", "patch_embed", "pos_embed")},
}


def _deepstack(tower: Config) -> int:
    """Return how many layers of a tower have features for the language model, each for one of its first layers."""
    return len(tower["deepstack_visual_indexes"])


PARTS = (
    "self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj", "mlp.linear_fc1",
    "mlp.linear_fc2",
)  # fmt: skip
"""The parts of a layer of a tower with an `_extra_state`."""
MERGER_PARTS = ("patch_norm", "linear_fc1", "linear_fc2")
"""The parts of a merger with one."""
GELU = Deviation(
    MERGER,
    "in stock Megatron-Bridge the mergers behind the tower have the gelu that tanh approximates, in transformers "
    "the exact one",
    "which changes little, or for a training of text",
)


def _layers(*further: Stack, **fixed: Any) -> Layers:
    """Return the layers of a tower of Qwen3-VL's kind, with further stacks, and keys that have one value."""
    return Layers(
        stacks=(Stack(f"{CORE}layers.", lambda tower: int(tower["depth"]), PARTS), *further),
        heads="num_heads",
        by_head="model.visual.blocks.{layer}.attn.qkv.",
        divided={
            "heads": lambda tower: tower["num_heads"],
            "rows of the MLP": lambda tower: tower["intermediate_size"],
            "rows of the merger": lambda tower: tower["hidden_size"] * tower["spatial_merge_size"] ** 2,
        },
        fixed={"hidden_act": "gelu_pytorch_tanh", **fixed},
        once=tuple(f"vision_model.merger.{name}" for name in MERGER_PARTS),
    )


UNSCALED = ("seq_len_interpolation_factor", "rope_scaling")
"""The fields that Qwen3VLModel does not hand to its language model (0.3.1 and 0.6.0, models/qwen_vl/
modelling_qwen3_vl/model.py); megatron-core's `mrope`, which the other classes have, takes the first (gpt_model.py)."""


def _qwen3(kind: str, name: str, target: str) -> Vision:
    """Return the class of a kind of Qwen3-VL, dense or with experts."""
    return Vision(
        kind,
        f"{QWEN}qwen3_vl_provider.{target}",
        DEEP,
        {
            "model.visual.deepstack_merger_list.{layer}.norm.": f"{MERGERS}{{layer}}.patch_norm.",
            "model.visual.deepstack_merger_list.": MERGERS,
            **BLOCKS,
        },
        {
            TOWER: tower_of(f"{kind}.configuration_{kind}.{name}VisionConfig"),
            "mrope_section": sections((24, 20, 20)),
            "spatial_merge_size": lambda config: (config.get(TOWER) or {}).get("spatial_merge_size", 2),
            **TOKENS,
        },
        _deepstack,
        architecture=f"{name}ForConditionalGeneration",
        ignores=UNSCALED,
        releases=LATER,
        layers=_layers(Stack(MERGERS, _deepstack, MERGER_PARTS)),
        deviation=GELU,
        signs=(CORE,),
    )


def _earlier(vision: Vision, name: str) -> Vision:
    """Return a class of Qwen3-VL as it was in Megatron-Bridge 0.3.1, whose tower is the module of Hugging Face."""
    text = text_of(f"{vision.kind}.configuration_{vision.kind}.{name}TextConfig")
    return replace(
        vision,
        towers={"model.visual.": "vision_model."},
        fields={**vision.fields, TEXT: text},
        releases=FIRST_RELEASE,
        layers=None,
        deviation=None,
        signs=(),
    )


def _qwen3_5(kind: str, name: str, target: str) -> Vision:
    """Return the class of a kind of Qwen3.5, dense or with experts."""
    return Vision(
        kind,
        f"{QWEN}qwen35_vl_provider.{target}",
        {**DEEP, "mtp.": "mtp."},
        BLOCKS,
        {
            TOWER: tower_of(f"{kind}.configuration_{kind}.{name}VisionConfig"),
            "mrope_section": sections((11, 11, 10)),
            "spatial_merge_size": lambda config: (config.get(TOWER) or {}).get("spatial_merge_size", 2),
            "image_token_id": key_of("image_token_id", 248056),
            "video_token_id": key_of("video_token_id", 248057),
            "vision_start_token_id": key_of("vision_start_token_id", 248053),
            "vision_end_token_id": key_of("vision_end_token_id", 248054),
        },
        fixed={"hetereogenous_dist_checkpoint": True, "qk_layernorm": True},
        releases=LATER,
        ignores=UNSCALED,
        layers=_layers(deepstack_visual_indexes=[]),
        deviation=GELU,
        arguments=LINEAR,
    )


LINEAR = (
    "attention_output_gate", "experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "mtp_num_layers",
)  # fmt: skip
"""The fields of linear attention, and of layers that predict further tokens."""


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


def _gemma3_limit(spec: ModelSpec, tower: Config, config: Config) -> str:
    """What the class of Gemma 3 computes otherwise than transformers, or lacks; empty if nothing.

    Facts: Megatron-Bridge 0.6.2 models/gemma_vl/modeling_gemma3_vl.py (`_compute_attention_biases`; `vision_use_head`);
    transformers 5.23.0 models/gemma3/modeling_gemma3.py, whose windows end to the left alone.
    """
    if tower["vision_use_head"]:
        return "builds its tower without the head that vision_use_head asks for"
    tokens = positive_int(config.get("mm_tokens_per_image", 256), "mm_tokens_per_image", "config.json")
    if spec.sliding_window is None or tokens > spec.sliding_window:
        return (
            f"lets a token of an image see those of its image within the window, on both sides: {tokens} tokens "
            f"of an image and a window of {spec.sliding_window} are beyond it"
        )
    return ""


def _mistral3(config: Config) -> dict[str, Any]:
    """Return the config of a whole Mistral 3, in the form of transformers 5.3 to 5.12, with which Bridge runs."""
    text, ropes, tower = dict(config["text_config"]), ropes_of(config), dict(config.get(TOWER) or {})
    if ropes:
        base = {"rope_theta": text["rope_theta"]} if "rope_theta" in text else {}
        others = {key: value for key, value in text.items() if key not in ("rope_scaling", "rope_theta")}
        text = {**others, "rope_parameters": {**base, **ropes}}
    if rotary := tower.get("rope_parameters"):
        tower["rope_parameters"] = {**rotary, "rope_type": "default"}  # `axial` in transformers 5.23
    return inside("mistral3.configuration_mistral3.Mistral3Config", {**config, "text_config": text, TOWER: tower})


SEES_IMAGES = "is_vision_language"
"""The field of Gemma 3 by which the tokens of an image see all of it: true in models of images from 0.6 on."""
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
                TOWER: tower_of("qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig"),
                "mrope_section": sections((16, 24, 24)),
                **TOKENS,
            },
        ),
        _qwen3("qwen3_vl", "Qwen3VL", "Qwen3VLModelProvider"),
        _qwen3("qwen3_vl_moe", "Qwen3VLMoe", "Qwen3VLMoEModelProvider"),
        _qwen3_5("qwen3_5", "Qwen3_5", "Qwen35VLModelProvider"),
        _qwen3_5("qwen3_5_moe", "Qwen3_5Moe", "Qwen35VLMoEModelProvider"),
        Vision(
            "glm4v_moe",
            "megatron.bridge.models.glm_vl.glm_45v_provider.GLM45VModelProvider",
            DEEP,
            {"model.visual.": "visual."},
            {
                TOWER: tower_of("glm4v_moe.configuration_glm4v_moe.Glm4vMoeVisionConfig"),
                "mrope_section": sections((8, 12, 12)),
                "image_token_id": key_of("image_token_id", 151363),
                "video_token_id": key_of("video_token_id", 151364),
                "image_start_token_id": key_of("image_start_token_id", 151339),
                "image_end_token_id": key_of("image_end_token_id", 151340),
                "video_start_token_id": key_of("video_start_token_id", 151341),
                "video_end_token_id": key_of("video_end_token_id", 151342),
            },
            lacks=("rope_scaling", "sliding_window"),
            fixed={"mtp_num_layers": None},
        ),
        Vision(
            "gemma3",
            f"{GEMMA}gemma3_vl_provider.Gemma3VLModelProvider",
            {"model.": "language_model.model.", HEAD: f"language_model.{HEAD}"},
            {
                "vision_tower.vision_model.": "vision_tower.",
                "vision_tower.": "vision_tower.",  # as transformers 5 saves it
                f"{PROJECTOR}mm_input_projection_weight": f"{PROJECTOR}proj.weight",
                f"{PROJECTOR}mm_soft_emb_norm.": f"{PROJECTOR}mm_soft_embed_norm.",
            },
            {
                TOWER: tower_of("siglip.configuration_siglip.SiglipVisionConfig"),
                "vision_projector_config": _projector,
                "mm_tokens_per_image": key_of("mm_tokens_per_image", 256),
                "image_token_id": key_of("image_token_index", 262144),
                SEES_IMAGES: lambda _: True,
            },
            language=gemma3.PROVIDER.target,
            positions=None,
            lacks=(),
            transposed=frozenset({f"{PROJECTOR}mm_input_projection_weight"}),
            states=tuple(f"{PROJECTOR}{name}._extra_state/shard_0_1" for name in ("mm_soft_embed_norm", "proj")),
            releases=LAST,
            signs=("vision_tower.embeddings.",),
            told={SEES_IMAGES: True},
            limit=_gemma3_limit,
        ),
        Vision(
            "mistral3",
            ministral3.PROVIDER.target,
            {"model.": "language_model.model.", HEAD: f"language_model.{HEAD}"},
            {"vision_tower.": "vision_tower.", PROJECTOR: PROJECTOR},
            {ministral3.WHOLE: _mistral3, "image_token_id": key_of("image_token_index", 10)},
            language=ministral3.PROVIDER.target,
            positions=None,
            lacks=(),
            releases=LATER,
            family=ministral3.PROVIDER.family,
            whole=ministral3.WHOLE,
            architecture="Mistral3ForConditionalGeneration",
        ),
    )
}
"""`model_type`: the class of Megatron-Bridge, in the newest release that is known here."""


def _causal(vision: Vision, **changes: Any) -> Vision:
    """The class of Gemma 3 up to 0.5, in which an image sees what is before it.

    Facts: Megatron-Bridge 0.3.1 to 0.5.1, the files of `_gemma3_limit`, and models/gemma/gemma3_provider.py.
    """
    return replace(
        vision,
        deviation=Deviation(
            IMAGES,
            "in Megatron-Bridge up to 0.5 the tokens of an image see only those before them, in transformers all of "
            "their image",
            "for a training of text, or to continue as the run does",
        ),
        told={},
        limit=lambda *_: "",
        **{"fields": {**vision.fields, SEES_IMAGES: lambda _: False}, **changes},
    )


def _without_head(config: Config) -> Any:
    """The tower's config in files of 0.5, which leave out `vision_use_head`: it is false, whatever a config says."""
    tower = {name: value for name, value in (config.get(TOWER) or {}).items() if name != "vision_use_head"}
    return tower_of("siglip.configuration_siglip.SiglipVisionConfig")({TOWER: tower})


def _earlier_gemma3(vision: Vision) -> tuple[Vision, ...]:
    """The class of Gemma 3 in 0.5, and in 0.4 and 0.3.1, of which the first two are read alone.

    Windows of 0.4 and 0.3.1 are told apart by `gemma3.MARKS`.
    """
    inner = "vision_tower.vision_model."
    towers = {name: inner if name.startswith("vision_tower.") else own for name, own in vision.towers.items()}
    fields = {**vision.fields, TOWER: _without_head, SEES_IMAGES: lambda _: False}
    return _causal(vision, fields=fields), _causal(vision, towers=towers, releases=FIRST_RELEASE, signs=())


EARLIER: Mapping[str, tuple[Vision, ...]] = {
    "qwen3_vl": (_earlier(VISIONS["qwen3_vl"], "Qwen3VL"),),
    "qwen3_vl_moe": (_earlier(VISIONS["qwen3_vl_moe"], "Qwen3VLMoe"),),
    "gemma3": _earlier_gemma3(VISIONS["gemma3"]),
}
"""`model_type`: the class in earlier releases, where it is another one, the newest first and that of 0.3.1 last."""


class Lacking(NamedTuple):
    """Models that Megatron-Bridge has, and that are neither written for it nor read.

    Attributes:
        module: the module of its class, or what the modules of its classes begin with.
        why: the reason.
    """

    module: str
    why: str


STEP = Lacking(
    "megatron.bridge.models.stepfun.",
    "Megatron-Bridge 0.6.2 leaves the rotary base of each layer to megatron-core, of which no release up to 0.19.2 has "
    "one: all layers turn whole heads with the base of the first, and those without a window clamp as the last of them",
)
LACKING: Mapping[str, Lacking] = {
    "kimi_k25": Lacking(
        "megatron.bridge.models.kimi_vl.",
        "Megatron-Bridge 0.4.0 and later load the code of its tower from its repository",
    ),
    "NemotronH_Nano_VL_V2": Lacking(
        "megatron.bridge.models.nemotron_vl.",
        "Megatron-Bridge's NemotronNano12Bv2VLModelProvider has the sizes of its tower in code, and transformers has "
        "no class of it",
    ),
    "step3p5": STEP,
    "step3p7": STEP,
}
"""By `model_type`.

Facts: Megatron-Bridge 0.3.1 to 0.6.2 models/nemotron_vl/nemotron_vl_provider.py; 0.4.2 to 0.6.2
models/kimi_vl/modeling_kimi_k25_vl.py; 0.6.2 models/stepfun/step35_provider.py (`Step35DecoderLayer` sets
`rotary_percent` and a clamp in the config that all layers without a window share), run with megatron-core 0.19.2: other
`rotary_base_per_layer` and `rotary_percents` leave the logits alone, the last layer's clamp changes the first layer.
"""


def lacking(target: str) -> str:
    """Why the models of a class are not read, if it is one of `LACKING`; else empty."""
    return next((of.why for of in LACKING.values() if target.startswith(of.module)), "")


def of_fields(fields: Mapping[str, Any]) -> Vision | None:
    """The class that the fields of a run_config.yaml name; None if it is not in `VISIONS`."""
    return next((vision for vision in VISIONS.values() if fields.get(TARGET) == vision.target), None)


def of_run(vision: Vision, fields: Mapping[str, Any], names: Iterable[str]) -> Vision:
    """The class of a run in the release that wrote it, which its fields and the names of its tensors tell."""
    known, found = tuple(names), (vision, *EARLIER.get(vision.kind, ()))
    return next(
        of
        for of in found
        if all(any(name.startswith(sign) for name in known) for sign in of.signs)
        and all(fields.get(name) == value for name, value in of.told.items())
    )


def of_kind(kind: str, version: str | None) -> Vision:
    """The class that is to compute models of a kind.

    Args:
        kind: their `model_type`.
        version: the megatron-core with which Megatron-Bridge runs; None for that of the newest release.

    Raises:
        RefusedError: no release of Megatron-Bridge that runs with it has the class.
    """
    vision = VISIONS[kind]
    if not is_first(version):
        return vision
    if kind not in EARLIER and vision.releases == LATER:
        raise RefusedError(
            f"a {vision.name} is written for Megatron-Bridge in its {LATER}, which run with no megatron-core {version}",
            "leave --megatron-version out",
        )
    return EARLIER[kind][-1] if kind in EARLIER else vision
