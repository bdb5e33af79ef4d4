"""`--only text`: the language model of a model of images computes by itself what the whole computes of text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from formats.huggingface.language_model import TIED_WHOLES, WHOLES
from tests.fuzz.architectures import smaller
from tests.models import files, settings_of

IMAGES: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
PART = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
VL = {**settings_of("qwen3"), "rope_parameters": IMAGES}
MIXTURE = {**settings_of("qwen3_moe"), "rope_parameters": {**IMAGES, "mrope_interleaved": True}}
TEXTS = {
    "qwen2_5_vl": {**VL, "model_type": "qwen2_5_vl_text", "num_attention_heads": 4},
    "qwen3_vl": {**VL, "model_type": "qwen3_vl_text"},
    "qwen3_vl_moe": {**MIXTURE, "model_type": "qwen3_vl_moe_text"},
    "qwen3_5": settings_of("qwen3_5_text-tied"),
    "qwen3_5_moe": settings_of("qwen3_5_moe_text"),
    "gemma3": settings_of("gemma3"),
    "gemma4": settings_of("gemma4_text"),
    "glm4v_moe": {**settings_of("glm4_moe_air"), "model_type": "glm4v_moe_text", "rope_parameters": PART},
    "gemma4_unified": settings_of("gemma4_unified_text"),
    "mistral3": settings_of("ministral3"),
    "llama4": settings_of("llama4_text"),
    "kimi_k25": settings_of("deepseek_v3"),
    "minimax_m3_vl": settings_of("minimax_m3_vl_text"),
}
"""Model type of the whole: the settings of its text. Five have names of their own, two have a text without a class."""
IDS = range(3, 21)


def build(kind: str, tied: bool, **settings: Any) -> Any:
    """A tiny model with its tower, and its text of other settings than usual."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

    towers = ("gemma4", "gemma4_unified")  # which have none else
    tower = {"vision_config": {"model_type": f"{kind}_vision"}} if kind in towers else {}
    config = smaller(CONFIG_MAPPING[kind](**tower).to_dict())
    text = {**(settings if "model_type" in settings else TEXTS[kind] | settings), "tie_word_embeddings": tied}
    config |= {"text_config": text, "tie_word_embeddings": tied, "architectures": [CLASSES[kind]]}
    if "out_hidden_size" in config["vision_config"]:
        config["vision_config"]["out_hidden_size"] = text["hidden_size"]
    config.pop("projection_hidden_size", None)
    model = getattr(transformers, CLASSES[kind])(CONFIG_MAPPING[kind].from_dict(config)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.08, generator=generator)
    return model


def logits(model: Any) -> Any:
    """What it computes of text."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([list(IDS)])).logits


def save(model: Any, folder: Path) -> Path:
    """The folder of the whole, with files that travel and files that do not."""
    model.save_pretrained(folder)
    for name in (
        "generation_config.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "processor_config.json",
    ):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("kind", TEXTS)
def test_it_computes_what_the_whole_computes_of_text(convert, tmp_path, kind):
    import torch
    import transformers

    model = build(kind, tied=kind in ("gemma3", "qwen3_5"))
    source = save(model, tmp_path / "whole")
    summary = json.loads(convert("hf2hf", source, tmp_path / "text", "--only", "text", "-n", "--json").out)
    assert any("--only text leaves out" in note for note in summary["notes"])
    ran = convert("hf2hf", source, tmp_path / "text", "--only", "text")
    assert ran.code == 0, ran.err
    alone, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(logits(alone.eval()), logits(model), atol=1e-5, rtol=0)
    state = {key.replace("language_model.", "", 1): value for key, value in model.state_dict().items()}
    state = {key.replace("model.model.", "model."): value for key, value in state.items()}
    assert all(torch.equal(value, state[key]) for key, value in alone.state_dict().items())
    names = set(files(tmp_path / "text"))
    assert names == {"config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"}
    left = json.loads((tmp_path / "text/vitruvian.json").read_text())["source"]["left_out"]
    assert left, "the manifest names no tower"
    assert not any("language" in name for name in left)
    assert convert("verify", tmp_path / "text", source, "--only", "text").code == 0


SCALED = [
    ("llava_next", "granite", {"logits_scaling": 8.0}),
    ("llava", "granitemoe", {"logits_scaling": 8.0}),
    ("idefics3", "granitemoehybrid", {"logits_scaling": 8.0}),
    ("llava", "cohere2", {"logit_scale": 0.25}),
    ("aya_vision", "cohere2", {"logit_scale": 0.25}),
    ("cohere2_vision", "cohere2", {"logit_scale": 0.25}),
    ("llava", "falcon_h1", {"lm_head_multiplier": 0.1}),
    ("llava", "gemma2", {"final_logit_softcapping": 1.0}),
    ("llava", "gemma4_text", {"final_logit_softcapping": 1.0}),
    ("gemma3", "gemma3", {"final_logit_softcapping": 1.0}),
]
"""A whole that leaves out what the class of its text does to the logits (transformers 5.23.0)."""


@pytest.mark.parametrize(("kind", "text", "changes"), SCALED)
def test_logits_that_the_whole_does_not_scale(convert, tmp_path, kind, text, changes):
    """The text alone has a neutral value in its place, and a note says so."""
    import torch
    import transformers

    model = build(kind, tied=False, **{**settings_of(text), **changes})
    source = save(model, tmp_path / "whole")
    ran = convert("hf2hf", source, tmp_path / "text", "--only", "text")
    ((key, value),) = changes.items()
    assert (ran.code, f"{kind} leaves {key} out of its logits" in ran.err, f"not {value}" in ran.err) == (0, True, True)
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    torch.testing.assert_close(logits(alone), logits(model), atol=1e-5, rtol=0)


def test_a_cap_that_the_whole_has_too(convert, tmp_path):
    import torch
    import transformers

    model = build("paligemma", tied=False, **settings_of("gemma2"), final_logit_softcapping=1.0)
    ran = convert("hf2hf", save(model, tmp_path / "whole"), tmp_path / "text", "--only", "text")
    assert (ran.code, "leaves final_logit" in ran.err) == (0, False), ran.err
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    torch.testing.assert_close(logits(alone), logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("first", ["full_attention", "sliding_attention"])
def test_kinds_of_layers_that_only_a_text_alone_has(convert, tmp_path, first):
    """AutoConfig takes a Mistral with `layer_types` for a Ministral. As a `text_config` its class ignores them."""
    import torch
    import transformers

    source = save(build("mistral3", tied=False, **settings_of("mistral")), tmp_path / "whole")
    config = json.loads((source / "config.json").read_text())
    config["text_config"] |= {"layer_types": [first, *["full_attention"] * 3], "sliding_window": 8}
    (source / "config.json").write_text(json.dumps(config))
    whole = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    ran = convert("hf2hf", source, tmp_path / "text", "--only", "text")
    assert ran.code == 0, ran.err
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    torch.testing.assert_close(logits(alone), logits(whole), atol=1e-5, rtol=0)


def test_a_text_that_looks_both_ways(convert, tmp_path):
    source = save(build("gemma3", tied=True), tmp_path / "whole")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = True
    (source / "config.json").write_text(json.dumps(config))
    ran = convert("hf2hf", source, tmp_path / "text", "--only", "text")
    assert (ran.code, "with use_bidirectional_attention = True gemma3 computes" in ran.err) == (4, True), ran.err


def test_a_head_of_which_the_config_says_two_things(convert, tmp_path):
    """The whole says that it has one, its text that it has none, and no file holds one."""
    source = save(build("gemma3", tied=True), tmp_path / "whole")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    ran = convert("hf2hf", source, tmp_path / "out")
    assert (ran.code, "lm_head.weight is missing" in ran.err) == (3, True), ran.err
    ran = convert("hf2hf", source, tmp_path / "text", "--only", "text")
    assert (ran.code, "fills a head with random numbers" in ran.err) == (5, True), ran.err
    assert "--set tied=true" in ran.err
    ran = convert("hf2hf", source, tmp_path / "text", "--only", "text", "--set", "tied=true")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "text/config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v_moe", "llama4"])
@pytest.mark.parametrize("said", [None, False])
def test_a_lost_head_of_a_class_that_does_not_tie(convert, tmp_path, kind, said):
    """The config does not say it of the whole."""
    from safetensors.torch import load_file, save_file

    source = save(build(kind, tied=False), tmp_path / "whole")
    tensors = load_file(source / "model.safetensors")
    del tensors[next(name for name in tensors if name.endswith("lm_head.weight"))]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    for place in (config, config["text_config"]):
        place.pop("tie_word_embeddings", None)
    config["text_config"] |= {} if said is None else {"tie_word_embeddings": said}
    (source / "config.json").write_text(json.dumps(config))
    words = ["hf2hf", source, tmp_path / "out", "--only", "text"]
    ran = convert(*words)
    assert (ran.code, f"a {kind} is not tied by default" in ran.err) == (5, True), ran.err
    ran = convert(*words, "--set", "tied=true")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("kind", WHOLES)
def test_what_a_class_ties_by_default(kind):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such class")
    assert (getattr(CONFIG_MAPPING[kind](), "tie_word_embeddings", False) is True) == (kind in TIED_WHOLES)


def adapter_of(source: Path, out: Path, **settings: Any) -> Any:
    """An adapter of the whole model, as PEFT saves it, and what PEFT merges it to."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(r=2, lora_alpha=3, **settings))
    dice = torch.Generator().manual_seed(7)
    for name, tensor in sorted(wrapped.named_parameters()):
        if "lora_" in name:
            tensor.data.normal_(0, 0.1, generator=dice)
    wrapped.save_pretrained(out)
    return wrapped.merge_and_unload()


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_an_adapter_that_knows_the_names_in_memory(convert, tmp_path, kind):
    """They are not those of the files; and the patterns of its config are of them."""
    from safetensors.numpy import load_file

    source = save(build(kind, tied=kind == "gemma3"), tmp_path / "whole")
    pattern = {"model.language_model.layers.0.self_attn.q_proj": 3}
    settings = {"target_modules": r"model\.language_model\..*\.(q|up)_proj", "rank_pattern": pattern}
    adapter_of(source, tmp_path / "adapter", **settings).save_pretrained(tmp_path / "judge")
    ran = convert("merge", source, tmp_path / "adapter", tmp_path / "out")
    assert ran.code == 0, ran.err
    ours, theirs, base = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "judge", "whole"))
    assert ours.keys() == theirs.keys() == base.keys()
    assert all(abs(tensor - theirs[key]).max() < 1e-6 for key, tensor in ours.items())
    assert {key.rpartition(".layers.")[2] for key, tensor in ours.items() if (tensor != base[key]).any()} == {
        f"{layer}.{module}.weight"
        for layer in range(build(kind, tied=False).config.text_config.num_hidden_layers)
        for module in ("self_attn.q_proj", "mlp.up_proj")
    }
    for command in ("merge", "peft2megatron"):
        ran = convert(command, source, tmp_path / "adapter", tmp_path / "text", "--only", "text")
        assert (ran.code, "without --only text" in ran.err) == (3, True), ran.err


def test_an_adapter_of_an_embedding_that_the_head_shares(convert, tmp_path):
    """PEFT trains one of both; no table tells that they are one tensor, transformers does."""
    from safetensors.numpy import load_file, save_file

    source, file = save(build("gemma3", tied=True), tmp_path / "whole"), tmp_path / "adapter/adapter_model.safetensors"
    adapter_of(source, tmp_path / "adapter", target_modules=["embed_tokens"])
    for turned in ("model.language_model.", "language_model.model."):  # as transformers 5 and 4 call it in memory
        tensors = load_file(file)
        save_file({key.replace("model.language_model.", turned): tensor for key, tensor in tensors.items()}, file)
        ran = convert("merge", source, tmp_path / "adapter", tmp_path / "out")
        assert (ran.code, "which embedding and output head" in ran.err) == (5, True), ran.err
    ran = convert("merge", source, tmp_path / "adapter", tmp_path / "out", "--verbatim")
    assert (ran.code, "which embedding and output head" in ran.err) == (5, True), ran.err
    save_file({key.replace(".language_model.", ".words."): tensor for key, tensor in load_file(file).items()}, file)
    ran = convert("merge", source, tmp_path / "adapter", tmp_path / "out")
    assert (ran.code, "names that are not known here: merge it with PEFT, if it can" in ran.err) == (3, True), ran.err


def test_it_comes_out_of_trainings_and_goes_into_megatron(convert, tmp_path):
    """Names and experts as memory has them; and Megatron holds what it has no tower for."""
    import torch
    import torch.distributed.checkpoint as dcp

    model = build("qwen3_vl_moe", tied=False)
    source = save(model, tmp_path / "whole")
    assert convert("hf2hf", source, tmp_path / "text", "--only", "text").code == 0
    expected = files(tmp_path / "text")["model.safetensors"]
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    tag = tmp_path / "run/global_step1"
    tag.mkdir(parents=True)
    head = {"dp_world_size": 1, "mp_world_size": 1, "global_steps": 1, "ds_version": "0.19.8"}
    states = {**head, "module": model.state_dict(), "buffer_names": [], "shared_params": {}}
    torch.save(states, tag / "mp_rank_00_model_states.pt")
    for command, folder in (("fsdp2hf", tmp_path / "dcp"), ("zero2hf", tag)):
        ran = convert(command, folder, tmp_path / command, "--config", source, "--only", "text")
        assert ran.code == 0, ran.err
        assert files(tmp_path / command)["model.safetensors"] == expected
    for command in ("hf2megatron", "hf2fsdp"):
        ran = convert(command, source, tmp_path / command, "--only", "text")
        assert ran.code == 0, ran.err
        back = tmp_path / f"back from {command}"
        assert (
            convert({"hf2megatron": "megatron2hf", "hf2fsdp": "fsdp2hf"}[command], tmp_path / command, back).code == 0
        )
        assert files(back)["model.safetensors"] == expected
    ran = convert("hf2hf", tmp_path / "text", tmp_path / "again", "--only", "text")
    assert (ran.code, "of which no part but text is known" in ran.err) == (2, True)


def test_a_released_config_has_its_text_beside_the_rest(convert, tmp_path):
    """Qwen2.5-VL of the Hub: one flat config, older names, and `mrope`."""
    import torch
    import transformers

    model = build("qwen2_5_vl", tied=False)
    source = save(model, tmp_path / "whole")
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    flat = {
        **text,
        **config,
        "rope_theta": 1e6,
        "rope_scaling": rope,
        "use_sliding_window": False,
        "sliding_window": 64,
    }
    del flat["layer_types"]
    (source / "config.json").write_text(json.dumps(flat))
    ran = convert("hf2hf", source, tmp_path / "text", "--only", "text")
    assert ran.code == 0, ran.err
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    assert torch.equal(logits(alone), logits(model))


REFUSED = {
    "unknown": ("mllama", 4, "does not know how 'mllama' has its language model"),
    "classless": ("llava", 4, "has no class of its own in transformers"),
    "step": ("step3p7", 4, "has no class of its own in transformers"),
}


def test_the_names_of_quantized_modules_are_those_of_the_whole(convert, tmp_path):
    """`modules_to_not_convert` would name none of the text's: transformers would take plain matrices for FP8."""
    source = save(build("gemma3", tied=False), tmp_path / "whole")
    config = json.loads((source / "config.json").read_text())
    skipped = {"quant_method": "fp8", "modules_to_not_convert": ["model.language_model.layers.1.mlp.down_proj"]}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": skipped}))
    ran = convert("hf2hf", source, tmp_path / "out", "--only", "text", "--verbatim")
    assert (ran.code, "names modules of the whole, and those of the text have other names" in ran.err) == (4, True)


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_none_is_refused(convert, tmp_path, case):
    import numpy as np
    from safetensors.numpy import save_file

    kind, code, why = REFUSED[case]
    text = {"model_type": "glm_ocr_text", "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    save_file({"model.language_model.norm.weight": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    ran = convert("hf2hf", tmp_path, tmp_path / "out", "--only", "text")
    assert (ran.code, why in ran.err) == (code, True), ran.err


def test_experts_that_the_hub_has_the_other_way_round(convert, tmp_path):
    """Qwen's own files of Qwen3-VL-MoE are (expert, in, out), of which transformers 5 makes (expert, out, in)."""
    from safetensors.torch import load_file, save_file

    source = save(build("qwen3_vl_moe", tied=False), tmp_path / "whole")
    hub = shutil.copytree(source, tmp_path / "hub")
    path = hub / "model.safetensors"
    tensors = {key: value.mT.contiguous() if ".experts." in key else value for key, value in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    for folder, out in ((source, tmp_path / "text"), (hub, tmp_path / "from the hub")):
        assert convert("hf2hf", folder, out, "--only", "text").code == 0
    assert files(tmp_path / "from the hub") == files(tmp_path / "text")
