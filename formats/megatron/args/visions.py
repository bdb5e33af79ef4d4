"""The classes of Megatron-Bridge with a vision tower that are known here, and why other models have none.

Facts: as in `vision.py`, and of each class in the file that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.megatron.args import gemma3
from formats.megatron.args.provider import TARGET
from formats.megatron.args.tower import Layers
from formats.megatron.args.vision import (
    HEAD,
    TEXT,
    TOWER,
    Config,
    Deviation,
    Vision,
    key_of,
    sections,
    text_of,
    tower_of,
)
from formats.model.accepted import IMAGES, MERGER

TOKENS = {
    "image_token_id": key_of("image_token_id", 151655),
    "video_token_id": key_of("video_token_id", 151656),
    "vision_start_token_id": key_of("vision_start_token_id", 151652),
    "vision_end_token_id": key_of("vision_end_token_id", 151653),
}
"""Token ids that mark images and videos, with the defaults of Qwen's configs."""
QWEN = "megatron.bridge.models.qwen_vl."
DEEP = {"model.": "model.language_model.", HEAD: HEAD}


def _qwen3(kind: str, name: str, target: str) -> Vision:
    """Return the class of a kind of Qwen3-VL, dense or with experts."""
    module = f"{kind}.configuration_{kind}.{name}"
    fields = {
        TOWER: tower_of(f"{module}VisionConfig"),
        TEXT: text_of(f"{module}TextConfig"),
        "mrope_section": sections((24, 20, 20)),
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


CORE = "vision_model.decoder.layers."
QWEN3_5_TOWER = {
    "model.visual.blocks.{layer}.norm1.": f"{CORE}{{layer}}.self_attention.linear_qkv.layer_norm_",
    "model.visual.blocks.{layer}.attn.qkv.": f"{CORE}{{layer}}.self_attention.linear_qkv.",
    "model.visual.blocks.{layer}.attn.proj.": f"{CORE}{{layer}}.self_attention.linear_proj.",
    "model.visual.blocks.{layer}.norm2.": f"{CORE}{{layer}}.mlp.linear_fc1.layer_norm_",
    "model.visual.blocks.{layer}.mlp.": f"{CORE}{{layer}}.mlp.",
    "model.visual.merger.norm.": "vision_model.merger.patch_norm.",
    **{f"model.visual.{name}.": f"vision_model.{name}." for name in ("merger", "patch_embed", "pos_embed")},
}
QWEN3_5_LAYERS = Layers(
    stack=CORE,
    count="depth",
    heads="num_heads",
    by_head="model.visual.blocks.{layer}.attn.qkv.",
    divided={
        "heads": lambda tower: tower["num_heads"],
        "rows of the MLP": lambda tower: tower["intermediate_size"],
        "rows of the merger": lambda tower: tower["hidden_size"] * tower["spatial_merge_size"] ** 2,
    },
    fixed={"hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": []},
    modules=(
        "self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj", "mlp.linear_fc1",
        "mlp.linear_fc2",
    ),
    once=tuple(f"vision_model.merger.{name}" for name in ("patch_norm", "linear_fc1", "linear_fc2")),
)  # fmt: skip


def _qwen3_5(kind: str, name: str, target: str) -> Vision:
    """Return the class of a kind of Qwen3.5, dense or with experts."""
    return Vision(
        kind,
        f"{QWEN}qwen35_vl_provider.{target}",
        {**DEEP, "mtp.": "mtp."},
        QWEN3_5_TOWER,
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
        layers=QWEN3_5_LAYERS,
        deviation=Deviation(
            MERGER,
            "in stock Megatron-Bridge the merger behind the tower has the gelu that tanh approximates, in transformers "
            "the exact one",
            "which changes little, or for a training of text",
        ),
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
                "vision_tower.vision_model.": "vision_tower.vision_model.",
                "vision_tower.": "vision_tower.vision_model.",  # as transformers 5 saves it
                f"{PROJECTOR}mm_input_projection_weight": f"{PROJECTOR}proj.weight",
                f"{PROJECTOR}mm_soft_emb_norm.": f"{PROJECTOR}mm_soft_embed_norm.",
            },
            {
                TOWER: tower_of("siglip.configuration_siglip.SiglipVisionConfig"),
                "vision_projector_config": _projector,
                "mm_tokens_per_image": key_of("mm_tokens_per_image", 256),
                "image_token_id": key_of("image_token_index", 262144),
            },
            language=gemma3.PROVIDER.target,
            positions=None,
            lacks=(),
            transposed=frozenset({f"{PROJECTOR}mm_input_projection_weight"}),
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
LACKING: Mapping[str, str] = {
    "kimi_k25": "Megatron-Bridge 0.4.0 and later load the code of its tower from its repository",
    "mistral3": "Megatron-Bridge 0.3.1 runs with transformers 4, and its Ministral3Model calls what 5 alone has; what "
    "that of 0.4.0 and later computes is not known here",
    "NemotronH_Nano_VL_V2": "Megatron-Bridge's NemotronNano12Bv2VLModelProvider has the sizes of its tower in code, "
    "and transformers has no class of it",
}
"""`model_type`: why such models are not written for Megatron-Bridge.

Facts: 0.3.1 models/ministral3/modeling_ministral3.py (`pooler_output`), nemotron_vl/nemotron_vl_provider.py; 0.4.2
models/qwen_vl/qwen35_vl_bridge.py, kimi_vl/modeling_kimi_k25_vl.py.
"""


def of_fields(fields: Mapping[str, Any]) -> Vision | None:
    """The class that the fields of a run_config.yaml name; None if it is not in `VISIONS`."""
    return next((vision for vision in VISIONS.values() if fields.get(TARGET) == vision.target), None)
