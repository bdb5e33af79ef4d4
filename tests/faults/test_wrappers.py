"""What is no model by itself is recognised in whichever container, and refused by name: PEFT, TRL, several models."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from formats.errors import RefusedError, UnsupportedError
from formats.model.adapters import require_plain, select
from tests.faults.dcp_tools import refused, save, weights, with_config

peft = pytest.importorskip("peft")

ARGUMENTS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1, "target_modules": "self_attn"},
    "C3A": {"block_size": 8},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "P_TUNING": {"encoder_hidden_size": 16},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
    "VBLORA": {"vector_length": 8},
    "WAVEFT": {"n_frequency": 8},
}
"""What the configuration of a method needs besides the usual, for a model this small."""
ELSEWHERE = {
    "ADAMSS": "needs scikit-learn",
    "BOFT": "compiles a CUDA extension",
    "XLORA": "needs trained adapters; each of them is LoRA",
}
"""Methods that do not run here."""
NAMED = {
    "LORA": "LoRA", "ADALORA": "AdaLoRA", "IA3": "IA3", "LN_TUNING": "LN tuning", "PROMPT_TUNING": "prompt",
    "PREFIX_TUNING": "prefix", "P_TUNING": "p-tuning", "VERA": "VeRA", "OFT": "OFT", "LOHA": "LoHa", "LOKR": "LoKr",
    "FOURIERFT": "FourierFT", "HRA": "HRA", "SHIRA": "SHiRA", "TRAINABLE_TOKENS": "trainable tokens",
}  # fmt: skip
"""Methods that a refusal calls by their names; the others are adapters of PEFT."""


def wrapped(base: Path, method: str, **changes: Any) -> Any:
    """A real model of PEFT, for a method by its name."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from transformers import AutoModelForCausalLM

    kind = next(kind for name, kind in PEFT_TYPE_TO_CONFIG_MAPPING.items() if name.name == method)
    known = inspect.signature(kind).parameters
    usual = {"target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 3}
    given = {name: value for name, value in usual.items() if name in known}
    config = kind(task_type="CAUSAL_LM", **{**given, **ARGUMENTS.get(method, {}), **changes})
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


@pytest.mark.parametrize("method", [kind.name for kind in peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING])
def test_every_method_of_peft(model, tmp_path, method):
    """All that the installed PEFT has: what a new one adds is seen. The wrapper's tensors, and those inside it."""
    if method in ELSEWHERE:
        pytest.skip(ELSEWHERE[method])
    adapted = wrapped(model("llama"), method)
    states = [adapted.state_dict(), peft.get_peft_model_state_dict(adapted)]
    inner = adapted.get_base_model().state_dict()
    states += [inner] if inner.keys() != weights(model("llama")).keys() else []
    for state in states:
        with pytest.raises(UnsupportedError, match="PEFT") as error:
            require_plain(state, tmp_path)
        assert NAMED.get(method, "") in str(error.value)
        assert error.value.hint


@pytest.mark.parametrize("adapter", ["only", "merged"])
def test_one_of_two_adapters_is_not_taken_for_both(tmp_path, adapter):
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    base = {f"{place}.base_layer.weight": 0}
    loras = {name: {f"{place}.lora_{end}.{name}.weight": 1 for end in "AB"} for name in ("first", "second")}
    assert len(select(base | loras["first"], adapter, tmp_path)) == (2 if adapter == "only" else 1)
    with pytest.raises(RefusedError, match="holds 2 adapters: first, second"):
        select(base | loras["first"] | loras["second"], adapter, tmp_path)


@pytest.fixture(params=["table", "verbatim"])
def base(request, model, tmp_path) -> tuple[Path, list[str]]:
    """A folder with the config, and the flags that are needed with it."""
    folder = with_config(tmp_path / "base", model("llama"))
    return folder, ["--config", str(folder), *(["--verbatim"] if request.param == "verbatim" else [])]


def in_huggingface(folder: Path, config: Path, state: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    with_config(folder, config)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def in_dump(folder: Path, _: Path, state: dict[str, Any]) -> Path:
    import torch

    folder.mkdir()
    torch.save(state, folder / "pytorch_model_fsdp.bin")
    return folder


def in_zero(folder: Path, _: Path, state: dict[str, Any]) -> Path:
    import torch

    (folder / "global_step1").mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    stored = {"module": state, "dp_world_size": 1, "mp_world_size": 1, "global_steps": 1, "ds_version": "0.19.8"}
    torch.save(stored, folder / "global_step1/mp_rank_00_model_states.pt")
    return folder


CONTAINERS = {
    "hf2hf": in_huggingface,
    "fsdp2hf": lambda folder, _, state: save(folder, {"model": state}),
    "fsdp2hf of a dump": in_dump,
    "zero2hf": in_zero,
}
OTHERS = {
    "TRL's value head": {"v_head.summary.weight": (1, 64), "v_head.summary.bias": (1,)},
    "policy beside other models": {},
    "TRL's wrapper": {},
    "modules_to_save": {"lm_head.modules_to_save.default.weight": (256, 64)},
    "LoRA of an embedding": {"model.embed_tokens.lora_embedding_A.default": (4, 256)},
    "LoRA of torchtitan": {"model.layers.0.self_attn.q_proj.lora_a.weight": (2, 64)},
    "IA3": {"model.layers.0.mlp.down_proj.ia3_l.default": (1, 128)},
}
PREFIXES = {"policy beside other models": ("policy.", "reference."), "TRL's wrapper": ("pretrained_model.",)}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("sign", OTHERS)
def test_every_sign_in_every_container(base, model, convert, tmp_path, container, sign):
    import torch

    tensors = weights(model("llama"))
    state = {f"{prefix}{key}": value.clone() for prefix in PREFIXES.get(sign, ("",)) for key, value in tensors.items()}
    state |= {key: torch.zeros(shape) for key, shape in OTHERS[sign].items()}
    folder = CONTAINERS[container](tmp_path / "source", base[0], state)
    ran = convert(container.split()[0], folder, tmp_path / "out", *base[1])
    refused(ran, 4, folder, sign)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "key",
    ["model.base_model_layer.weight", "prompt_encoder_layer.weight", "policy.model.embed_tokens.weight",
     "reward_model.v_head_norm.weight", "model.layers.0.mlp.hada.weight", "prompt_encoder.point_embed.0.weight",
     "prompt_encoder.shared_embedding.positional_embedding", "prompt_encoder.mask_embed.conv1.weight"],
)  # fmt: skip
def test_names_that_only_look_like_one(key, tmp_path):
    """They pass, and hide no real one beside them."""
    assert require_plain([key], tmp_path) is None
    with pytest.raises(UnsupportedError, match="lora_A"):
        require_plain([key, "model.layers.0.self_attn.q_proj.lora_A.weight"], tmp_path)


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}
DECODER = {"hidden_size": 16, "num_attention_heads": 2, "mlp_dim": 16}


def test_a_sam_is_no_prompt_of_peft(convert, tmp_path):
    """Its prompt encoder is a part of the model."""
    from transformers import SamConfig, SamModel

    prompts = {"hidden_size": 16, "image_size": 32, "patch_size": 16, "mask_input_channels": 4}
    vision = {**TINY, "output_channels": 16, "mlp_dim": 16, "global_attn_indexes": [0]}
    config = SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=DECODER)
    SamModel(config).save_pretrained(tmp_path / "sam")
    for command in ("hf2hf", "hf2fsdp"):
        ran = convert(command, tmp_path / "sam", tmp_path / command)
        assert ran.code == 0, ran.err
    ran = convert("fsdp2hf", tmp_path / "hf2fsdp", tmp_path / "back")
    assert ran.code == 0, ran.err
    assert convert("diff", tmp_path / "back", tmp_path / "sam").code == 0
