"""Models of images of Megatron-Bridge 0.3.1, whose modules computed tests/golden/bridge: into it and out of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from formats.megatron.args.provider import TARGET
from formats.megatron.args.vision import ASSUMED, TOWER
from formats.megatron.args.visions import VISIONS
from tests.faults.dcp_tools import edit, refused
from tests.golden.test_bridge_lora import contents
from tests.golden.test_only_text import TEXTS, build, save

REAL = Path(__file__).with_name("bridge")
ITERATION = "iter_0000005"
BRIDGE = ("--format", "torch_dist", "--for", "bridge")
FIRST = (*BRIDGE, "--megatron-version", "0.16")
"""For Megatron-Bridge 0.3.1, whose tower of a Qwen3-VL is another one than in later releases."""
KINDS = {"qwen2_5_vl": "Qwen25VLModel", "qwen3_vl": "Qwen3VLModel", "qwen3_vl_moe": "Qwen3VLMoEModel",
         "glm4v_moe": "GLM45VModel"}  # fmt: skip
"""Model type: its class in Megatron-Bridge, without `Provider`."""
TOWERS = {"qwen2_5_vl": "visual.", "qwen3_vl": "vision_model.", "qwen3_vl_moe": "vision_model.",
          "glm4v_moe": "visual."}  # fmt: skip

SCALED = ("qwen2_5_vl", "qwen2_5_vl_0.6", "glm4v_moe", "glm4v_moe_0.6", "qwen3_vl", "qwen3_vl_0.6", "qwen3_vl_moe",
          "qwen3_vl_moe_0.6", "qwen3_5", "qwen3_5_moe")  # fmt: skip
"""Runs of classes that have no llama3 scaling."""


def differences(
    folder: Path, kind: str, change: Callable[[dict[str, Any]], Any] = lambda _: None, golden: Path | None = None
) -> tuple[float, float]:
    """How far the logits of transformers are from those of Bridge's modules: of an image in text, and of text."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = json.loads((folder / "config.json").read_text())
    change(config)
    bridge = {name: torch.tensor(value) for name, value in np.load((golden or REAL / kind) / "golden.npz").items()}
    known, ids = AutoConfig.for_model(**config), bridge["ids"]
    model = AutoModelForImageTextToText.from_pretrained(folder, config=known, dtype=torch.float32).eval()
    image = {"pixel_values": bridge["pixels"], "image_grid_thw": bridge["grid"]}
    image["mm_token_type_ids"] = (ids == config["image_token_id"]).int()
    with torch.no_grad():
        seen, read = model(input_ids=ids, **image).logits, model(input_ids=ids).logits
    return float((seen - bridge["logits"]).abs().max()), float((read - bridge["text"]).abs().max())


def base_of(convert: Any, kind: str, folder: Path) -> Path:
    """The Hugging Face folder that is read of Bridge's run."""
    ran = convert("megatron2hf", REAL / kind, folder, "--config", REAL / kind)
    assert ran.code == 0, ran.err
    return folder


def with_fields(kind: str, at: Path, **changes: Any) -> Path:
    """Bridge's run with other fields; those of a config inside by its name and theirs."""
    run = shutil.copytree(REAL / kind, at)
    path = run / ITERATION / "run_config.yaml"
    document = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        if name in ("vision_config", "hf_text_config") and value is not None:
            document["model"][name]["config_dict"] |= value
        else:
            document["model"][name] = value
    path.write_text(yaml.safe_dump(document))
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_its_logits(convert, tmp_path, kind):
    """What Bridge's modules compute of an image and of text, transformers does of what is read; and settings show."""
    base = base_of(convert, kind, tmp_path / "base")
    assert max(differences(base, kind)) < 5e-6

    def another_tower(config: dict[str, Any]) -> None:
        config["vision_config"] |= {"hidden_act": "relu", "deepstack_visual_indexes": [1, 0]}

    def other_sections(config: dict[str, Any]) -> None:
        (config.get("text_config") or config)["rope_scaling"]["mrope_section"] = {
            "qwen2_5_vl": [0, 1, 1],
            "glm4v_moe": [0, 1, 1],
        }.get(kind, [4, 0, 0])

    for change in (another_tower, other_sections):
        seen, read = differences(base, kind, change)
        assert seen > 1e-3
        assert read < 5e-6  # of text alone no position has height or width


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", [(), ("--tp", 2), ("--pp", 2), ("--tp", 2, "--pp", 2), ("--archive",)])
def test_what_it_loads(convert, tmp_path, kind, topology):
    """Every tensor that Bridge saves, and every state that it asks for; the fields as it has written them.

    Its modules loaded these files with strict="raise_all" (tests/golden/bridge/README.md).
    """
    base, run = base_of(convert, kind, tmp_path / "base"), tmp_path / "run"
    ran = convert("hf2megatron", base, run, *FIRST, *topology)
    assert ran.code == 0, ran.err
    assert f"for Megatron-Bridge's {KINDS[kind]}Provider alone" in ran.err
    ours, theirs = contents(run / "iter_0000000"), contents(REAL / kind / ITERATION)
    assert all("_extra_state" in name and name.startswith("language_model.") for name in ours.keys() - theirs.keys())
    assert not theirs.keys() - ours.keys()
    assert all(tensor is None or np.array_equal(tensor, ours[key]) for key, tensor in theirs.items())
    written, known = (
        dict(yaml.safe_load(next(folder.glob("iter_*/run_config.yaml")).read_text())["model"])
        for folder in (run, REAL / kind)
    )
    for name in ("vision_config", "hf_text_config"):
        mine, its = (fields.pop(name, None) for fields in (written, known))
        assert (mine or {}).get("_target_") == (its or {}).get("_target_")
        config = (mine or {}).get("config_dict", {})
        assert {key for key, value in config.items() if its["config_dict"].get(key) != value} <= {
            "dtype",
            "torch_dtype",
        }
    sizes = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "rope_scaling_factor"}  # which is of nothing
    sizes |= {"mtp_num_layers"} if kind == "glm4v_moe" else set()  # none, which is no number of layers
    assert {name for name in written if written[name] != known[name]} <= sizes
    assert not (run / "megatron_flags.txt").exists()
    assert convert("megatron2hf", run, tmp_path / "back").code == 0
    assert convert("diff", tmp_path / "back", base, "--tensors").code == 0
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert convert("reshard", run, tmp_path / "again", *FIRST[2:], "--tp", 2).code == 0
    digests = {convert("digest", folder).out.split()[0] for folder in (run, tmp_path / "again", base)}
    assert len(digests) == 1
    assert convert("diff", run, base, "--tensors").code == 0


def as_on_the_hub(folder: Path) -> Path:
    """The folder with fused experts as files of the Hub have them, input before output; transformers 5.23 saves a model
    that it did not load the other way round."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    turned = {key for key in tensors if key.endswith((".experts.gate_up_proj", ".experts.down_proj"))}
    tensors |= {key: tensors[key].transpose(1, 2).contiguous() for key in turned}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back(convert, tmp_path, kind, tied):
    """Files as the Hub has them, and weights of a training with FSDP: byte by byte."""
    saved = save(build(kind, tied, vocab_size=64, **unlike(kind)), tmp_path / "saved")
    source, run = as_on_the_hub(shutil.copytree(saved, tmp_path / "whole")), tmp_path / "run"
    ran = convert("hf2megatron", source, run, *FIRST, "--tp", 2, "--dtype", "bf16")
    assert ran.code == 0, ran.err
    assert convert("hf2hf", source, tmp_path / "half", "--dtype", "bf16").code == 0
    ran = convert("megatron2hf", run, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "names and shapes checked against: transformers" in ran.err
    assert "experts are fused" not in ran.err
    for name in ("model.safetensors", "processor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "half" / name).read_bytes()
    assert convert("hf2fsdp", source, tmp_path / "fsdp", "--ranks", 2).code == 0
    digest = convert("digest", source).out.split()[0]
    for number, folder in enumerate((tmp_path / "fsdp", saved)):
        ran = convert("hf2megatron", folder, tmp_path / str(number), *FIRST)
        assert ran.code == 0, ran.err
        assert convert("digest", tmp_path / str(number)).out.split()[0] == digest


def test_experts_either_way_round_are_one_model(convert, tmp_path):
    """As transformers saves a model that it made, as the Hub has it, and each in other formats: one digest, and each
    stays the way round that it is where its format has both."""
    from safetensors.torch import load_file

    saved = save(build("qwen3_vl_moe", False, vocab_size=64, **unlike("qwen3_vl_moe")), tmp_path / "saved")
    hub = as_on_the_hub(shutil.copytree(saved, tmp_path / "hub"))
    key = "model.language_model.layers.0.mlp.experts.down_proj"
    shapes = [list(load_file(folder / "model.safetensors")[key].shape) for folder in (saved, hub)]
    assert shapes == [[4, 64, 12], [4, 12, 64]]
    places = [saved, hub]
    for number, source in enumerate((saved, hub)):
        run, back, fsdp, same = (tmp_path / f"{name}{number}" for name in ("run", "back", "fsdp", "same"))
        assert convert("hf2megatron", source, run, *FIRST, "--tp", 2).code == 0
        assert convert("megatron2hf", run, back).code == 0
        assert convert("hf2fsdp", source, fsdp, "--ranks", 3).code == 0
        assert convert("fsdp2hf", fsdp, same).code == 0
        assert (same / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
        assert (back / "model.safetensors").read_bytes() == (hub / "model.safetensors").read_bytes()
        for place in (run, back, fsdp, same):
            assert convert("verify", place).code == 0
        places += [run, back, fsdp, same]
    assert len({convert("digest", place).out.split()[0] for place in places}) == 1
    for place in places:
        ran = convert("verify", place, saved)
        assert ran.code == 0, ran.err
        assert convert("diff", hub, place, "--tensors").code == 0
    ran = convert("average", saved, hub, tmp_path / "mean")
    assert ran.code == 0, ran.err
    assert (tmp_path / "mean/model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


def test_experts_of_another_model_differ(convert, tmp_path):
    """A change of one element is found whichever way round the other checkpoint is."""
    from safetensors.torch import load_file, save_file

    saved = save(build("qwen3_vl_moe", False, vocab_size=64, **unlike("qwen3_vl_moe")), tmp_path / "saved")
    changed = as_on_the_hub(shutil.copytree(saved, tmp_path / "changed"))
    tensors = load_file(changed / "model.safetensors")
    tensors["model.language_model.layers.0.mlp.experts.down_proj"][3, 5, 7] += 1
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    ran = convert("verify", changed, saved)
    assert (ran.code, "1 of 110 tensors" in ran.err, "layers.0.mlp.experts.down_proj" in ran.err) == (6, True, True)
    ran = convert("diff", saved, changed, "--tensors")
    assert (ran.code, "layers.0.mlp.experts.down_proj" in ran.out) == (6, True)


def unlike(kind: str) -> dict[str, Any]:
    """Settings of a text that its class in Bridge has too: experts in every layer, and not as wide as the model."""
    return {"moe_intermediate_size": 12, "mlp_only_layers": []} if kind == "qwen3_vl_moe" else {}


@pytest.mark.parametrize("kind", KINDS)
def test_its_language_model_alone(convert, tmp_path, kind):
    """Without the config of the whole, and the same as of the whole's files."""
    base = base_of(convert, kind, tmp_path / "base")
    assert convert("hf2hf", base, tmp_path / "text", "--only", "text").code == 0
    ran = convert("megatron2hf", REAL / kind, tmp_path / "alone", "--only", "text")
    assert ran.code == 0, ran.err
    assert "--only text leaves out" in ran.err
    assert TOWERS[kind].rstrip(".") in ran.err
    assert convert("diff", tmp_path / "alone", tmp_path / "text", "--tensors").code == 0
    ran = convert("megatron2hf", without_text_config(kind, tmp_path / "run"), tmp_path / "no")
    refused(ran, 3, "the config of its tower is missing", "--config acme/tiny")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *((name, "rope_scaling", True) for name in SCALED),
        *((name, "seq_len_interpolation_factor", 2.0) for name in SCALED if "qwen3" in name),
    ],
)
def test_a_scaling_that_the_class_ignores(convert, tmp_path, name, field, value):
    """Read of the text alone too: the text that the class trained has no scaling."""
    run = shutil.copytree(REAL / name, tmp_path / "run")
    path = next(run.rglob("run_config.yaml"))
    fields = yaml.safe_load(path.read_text())
    fields["model"][field] = value
    path.write_text(yaml.safe_dump(fields))
    words = ["megatron2hf", run, tmp_path / "out", "--only", "text"]
    refused(convert(*words), 4, f"{field} = {value}, which", "--set rope_scaling=none")
    ran = convert(*words, "--set", "rope_scaling=none")
    assert ran.code == 0, ran.err
    assert convert("megatron2hf", REAL / name, tmp_path / "stock", "--only", "text").code == 0
    config, stock = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "stock"))
    assert config == stock


@pytest.mark.parametrize("name", SCALED)
def test_a_field_whose_default_is_the_class_own(convert, tmp_path, name):
    run = shutil.copytree(REAL / name, tmp_path / "run")
    path = next(run.rglob("run_config.yaml"))
    fields = yaml.safe_load(path.read_text())
    del fields["model"]["rotary_percent"]
    path.write_text(yaml.safe_dump(fields))
    refused(convert("megatron2hf", run, tmp_path / "out", "--only", "text"), 3, "run_config.yaml lacks rotary_percent")


def without_text_config(kind: str, at: Path) -> Path:
    """Bridge's run, imported by a name, whose fields hold no config of the text, as most classes have none."""
    return with_fields(kind, at, hf_model_id="acme/tiny", hf_text_config=None)


@pytest.mark.parametrize("kind", KINDS)
def test_where_it_does_not_go(convert, tmp_path, kind):
    """Megatron-LM has no tower; and Bridge not every model of the family."""
    base, no = base_of(convert, kind, tmp_path / "base"), tmp_path / "no"
    for options in ((), ("--format", "torch_dist"), ("--format", "fsdp_dtensor")):
        refused(
            convert("hf2megatron", base, no, *options), 4, "has no Megatron layout", " ".join(BRIDGE), "--only text"
        )
    refused(convert("hf2megatron", base, no, *FIRST, "--tp", 3), 5, "do not divide")
    source = save(build(kind, False, vocab_size=63, **unlike(kind)), tmp_path / "odd")
    refused(convert("hf2megatron", source, no, *FIRST, "--tp", 2), 5, "63 tokens", "pads none")
    config = json.loads((base / "config.json").read_text())
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    (config.get("text_config") or config)["rope_scaling"] |= scaled
    (base / "config.json").write_text(json.dumps(config))
    refused(convert("hf2megatron", base, no, *FIRST), 5, f"{KINDS[kind]}Provider has no rope_scaling")
    assert not no.exists()


def test_other_models_of_images(convert, tmp_path):
    """Each for a reason of its own."""
    ran = convert("hf2megatron", save(build("kimi_k25", False), tmp_path / "kimi_k25"), tmp_path / "no", *BRIDGE)
    refused(ran, 4, "has no Megatron layout", "from its repository", "--only text")
    assert "writes it for Megatron-Bridge" not in ran.err
    path = tmp_path / "kimi_k25/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "NemotronH_Nano_VL_V2"}))
    refused(convert("hf2megatron", path.parent, tmp_path / "no", *BRIDGE), 4, "the sizes of its tower in code")


def test_a_step_3_7(convert, tmp_path):
    """Which parts megatron-core lacks, and what Bridge makes of them; no class of transformers has its text alone."""
    import torch
    from transformers import Step3p7Config, Step3p7ForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "n_routed_experts": 4, "sliding_window": 4}
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "share_expert_dim": 16}
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    config = Step3p7Config(text_config=sizes, vision_config=tower, image_token_id=60)
    source = save(Step3p7ForConditionalGeneration(config), tmp_path / "step")
    lacks = ("one number of heads, one rotary base, one rotated part of a head", "a gate of whole heads")
    ran = convert("hf2megatron", source, tmp_path / "no")
    refused(ran, 4, "has no Megatron layout", *lacks)
    assert "--only text" not in ran.err
    ran = convert("hf2megatron", source, tmp_path / "no", *BRIDGE)
    refused(ran, 4, *lacks, "turn whole heads with the base of the first")
    assert "--only text" not in ran.err


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("stepfun.step37_provider.Step37ModelProvider", "turn whole heads with the base of the first"),
        ("stepfun.step35_provider.Step35ModelProvider", "turn whole heads with the base of the first"),
        ("kimi_vl.kimi_k25_vl_provider.KimiK25VLModelProvider", "from its repository"),
        ("nemotron_vl.nemotron_vl_provider.NemotronNano12Bv2VLModelProvider", "the sizes of its tower in code"),
    ],
)
def test_runs_of_other_models_of_images(convert, tmp_path, target, why):
    run = with_fields("qwen3_vl", tmp_path / "run", **{TARGET: f"megatron.bridge.models.{target}"})
    ran = convert("megatron2hf", run, tmp_path / "no", "--config", REAL / "qwen3_vl")
    refused(ran, 4, "is not known to compute what its fields say", why, "AutoBridge.export_ckpt")


def test_features_behind_the_first_stage(convert, tmp_path):
    """Bridge adds features of an image after the first layers, and asks for all of these on the first stage."""
    base = base_of(convert, "qwen3_vl", tmp_path / "base")
    assert convert("hf2megatron", base, tmp_path / "run", *FIRST, "--pp", 2).code == 0
    refused(convert("hf2megatron", base, tmp_path / "no", *FIRST, "--pp", 4), 5, "after the first 2 layers", "has 1")


def test_experts_that_may_be_either_way_round(convert, tmp_path):
    """transformers goes by their shape; where both ways have the same nothing tells."""
    hidden = TEXTS["qwen3_vl_moe"]["hidden_size"]
    for width in (hidden, hidden // 2):
        source = save(
            build("qwen3_vl_moe", False, moe_intermediate_size=width, mlp_only_layers=[]), tmp_path / str(width)
        )
        refused(convert("hf2megatron", source, tmp_path / "no", *FIRST), 5, "may be either way round")
    source = save(build("qwen3_vl_moe", False, moe_intermediate_size=12, mlp_only_layers=[0]), tmp_path / "dense")
    refused(convert("hf2megatron", source, tmp_path / "no", *FIRST), 5, "has no dense_layers = [0]")


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "image_token_id: 59 | 60": {"image_token_id": 59},
    "mrope_section: [2, 2, 0] | [2, 1, 1]": {"mrope_section": [2, 2, 0]},
    "spatial_merge_size: 4 | 2": {"spatial_merge_size": 4},
    "vision_config.deepstack_visual_indexes: [1, 0] | [0, 1]": {"vision_config": {"deepstack_visual_indexes": [1, 0]}},
    "vision_config.num_heads: 4 | 2": {"vision_config": {"num_heads": 4}},
    "hf_text_config.rope_theta: 10000.0 | 20000.0": {"rotary_base": 1e4, "hf_text_config": {"rope_theta": 1e4}},
    "rope_theta": {"rotary_base": 1e4},
    "norm_epsilon: 1e-05 | 1e-06": {"layernorm_epsilon": 1e-5},
    "position_embedding_type = 'rope'": {"position_embedding_type": "rope"},
    "own_field": {"own_field": 3},
    "qk_layernorm": {"qk_layernorm": False},
}
"""Part of an error: fields of a file that its config does not say, or that no model of the class has."""


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_fields_that_the_config_contradicts(convert, tmp_path, message):
    run = with_fields("qwen3_vl", tmp_path / "run", **CONTRADICTIONS[message])
    ran = convert("megatron2hf", run, tmp_path / "no", "--config", REAL / "qwen3_vl")
    assert ran.code in (3, 4, 5), ran.err
    assert message in ran.err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("video_start_token_id: 151341 | 56", {"video_start_token_id": 151341}),
        ("mrope_section: [8, 12, 12] | [1, 0, 1]", {"mrope_section": [8, 12, 12]}),
        ("vision_config.image_size: 336 | 16", {"vision_config": {"image_size": 336}}),
        ("mtp", {"mtp_num_layers": 1}),
        ("moe_router_score_function", {"moe_router_score_function": "softmax"}),
    ],
)
def test_what_bridge_imports_of_other_models(convert, tmp_path, message, changes):
    """Bridge's import of a GLM-4.5V has the tokens and sections of the released one, whatever its config says."""
    run = with_fields("glm4v_moe", tmp_path / "run", **changes)
    ran = convert("megatron2hf", run, tmp_path / "no", "--config", REAL / "glm4v_moe")
    assert ran.code in (3, 4, 5), ran.err
    assert message in ran.err
    assert not (tmp_path / "no").exists()


def test_a_tower_that_lacks_a_tensor(convert, tmp_path):
    """Into Bridge and out of it: no table tells what a tower has, and transformers does."""
    from safetensors.torch import load_file, save_file

    base, name = base_of(convert, "qwen3_vl", tmp_path / "base"), "merger.norm.weight"
    tensors = load_file(base / "model.safetensors")
    del tensors[f"model.visual.{name}"]
    (base / "vitruvian.json").unlink()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    refused(convert("hf2megatron", base, tmp_path / "no", *FIRST), 3, f"visual.{name}")
    run = shutil.copytree(REAL / "qwen3_vl", tmp_path / "run")

    def drop(metadata: Any) -> None:
        del metadata.state_dict_metadata[f"vision_model.{name}"]
        stored = metadata.storage_data.items()
        metadata.storage_data = {index: where for index, where in stored if index.fqn != f"vision_model.{name}"}

    edit(run / ITERATION, drop)
    refused(convert("megatron2hf", run, tmp_path / "no", "--config", REAL / "qwen3_vl"), 3, f"visual.{name}")


def test_a_training_is_not_carried(convert, tmp_path):
    for command in (("hf2fsdp", "--with-optimizer"), ("reshard", "--with-optimizer")):
        run = trained(tmp_path / command[0])
        ran = convert(command[0], run, tmp_path / "no", "--config", REAL / "qwen3_vl", *command[1:])
        refused(ran, 4, "the optimizer of a model of images is not read")
    ran = convert("megatron2hf", run, tmp_path / "weights", "--config", REAL / "qwen3_vl")
    assert (ran.code, "optimizer" in ran.err) == (0, True), ran.err
    inspected = convert("inspect", run, "--config", REAL / "qwen3_vl")
    assert (inspected.code, "optimizer" in inspected.out + inspected.err) == (0, True), inspected.err


def trained(at: Path) -> Path:
    """Bridge's run, with a moment of each weight."""
    run = shutil.copytree(REAL / "qwen3_vl", at)
    for number in range(2):
        shutil.copy(run / ITERATION / f"__0_{number}.distcp", run / ITERATION / f"__1_{number}.distcp")

    def add(metadata: Any) -> None:
        for name in [name for name in metadata.state_dict_metadata if name.endswith(".weight")]:
            new = f"optimizer.state.exp_avg.{name}"
            metadata.state_dict_metadata[new] = metadata.state_dict_metadata[name]
            for index, where in [item for item in metadata.storage_data.items() if item[0].fqn == name]:
                moved = replace(where, relative_path=where.relative_path.replace("__0", "__1"))
                metadata.storage_data[type(index)(new, index.offset, index.index)] = moved

    edit(run / ITERATION, add)
    return run


def test_a_setting_that_the_config_of_the_whole_does_not_say(convert, tmp_path):
    """It has no place to go to; one that decides for what the config says is heeded."""
    changed = with_fields("qwen3_vl", tmp_path / "run", layernorm_epsilon=1e-5)
    config = ("--config", REAL / "qwen3_vl")
    ran = convert("megatron2hf", changed, tmp_path / "no", *config, "--set", "norm_epsilon=1e-5")
    refused(ran, 5, "norm_epsilon: 1e-05 | 1e-06", "correct config.json")
    ran = convert("megatron2hf", REAL / "qwen3_vl", tmp_path / "no", *config, "--set", "rope_theta=77")
    refused(ran, 5, "rope_theta: 77.0 | 20000.0")
    ran = convert("megatron2hf", changed, tmp_path / "out", *config, "--set", "norm_epsilon=1e-6")
    assert ran.code == 0, ran.err
    ran = convert("megatron2hf", changed, tmp_path / "text", *config, "--only", "text", "--set", "norm_epsilon=1e-5")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "text/config.json").read_text())["rms_norm_eps"] == 1e-5


def test_a_config_of_another_model(convert, tmp_path):
    ran = convert("megatron2hf", REAL / "qwen3_vl", tmp_path / "no", "--config", REAL / "qwen2_5_vl")
    refused(ran, 3, "'qwen2_5_vl'", "is of a qwen3_vl", "--config")


@pytest.mark.parametrize(
    ("new", "code", "message"),
    [
        ("audio.norm.weight", 3, "audio.norm.weight, which is of no part of a qwen3_vl"),
        (
            "vision_model.decoder.layers.mlp.linear_fc1.weight",
            3,
            "vision_model.blocks.0.attn.proj.bias, which is of no",
        ),
    ],
)
def test_tensors_of_no_tower(convert, tmp_path, new, code, message):
    """Of none at all, and of both that releases have."""
    run = shutil.copytree(REAL / "qwen3_vl", tmp_path / "run")
    name = "vision_model.merger.norm.weight"

    def rename(metadata: Any) -> None:
        metadata.state_dict_metadata = {
            new if key == name else key: about for key, about in metadata.state_dict_metadata.items()
        }
        metadata.storage_data = {
            (type(index)(new, index.offset, index.index) if index.fqn == name else index): where
            for index, where in metadata.storage_data.items()
        }

    edit(run / ITERATION, rename)
    refused(convert("megatron2hf", run, tmp_path / "no", "--config", REAL / "qwen3_vl"), code, message)


def test_no_adapter_of_it(convert, tmp_path):
    refused(convert("megatron2hf", REAL / "qwen3_vl", tmp_path / "no", "--adapter", "only"), 4, "is not read")


def test_what_a_config_leaves_out_is_assumed():
    """The defaults of each tower are those of its class in transformers."""
    from importlib import import_module

    from transformers import PreTrainedConfig

    for kind, vision in ((kind, vision) for kind, vision in VISIONS.items() if TOWER in vision.fields):
        target = vision.fields[TOWER]({})[TARGET].removesuffix(".from_dict")
        module, _, name = target.rpartition(".")
        made = getattr(import_module(module), name)().to_dict()
        assert {key: made[key] for key in ASSUMED[name]} == dict(ASSUMED[name]), kind
        later = {"rope_parameters", "model_type", "initializer_range"}  # of transformers 5 alone, or of no tensor
        base = {*PreTrainedConfig().to_dict(), *later}
        assert {*made} - base == {*ASSUMED[name]}, kind


def test_a_tower_that_the_run_leaves_out(convert, tmp_path):
    run = shutil.copytree(REAL / "qwen3_vl", tmp_path / "run")
    path = run / ITERATION / "run_config.yaml"
    document = yaml.safe_load(path.read_text())
    document["model"]["vision_config"] = None
    path.write_text(yaml.safe_dump(document))
    refused(convert("megatron2hf", run, tmp_path / "no", "--config", REAL / "qwen3_vl"), 5, "vision_config: None | ")


@pytest.mark.parametrize(
    ("kind", "key"), [("qwen2_5_vl", "window_size"), ("qwen3_vl", "num_heads"), ("glm4v_moe", "depth")]
)
def test_a_tower_that_the_config_leaves_out_in_part(convert, tmp_path, kind, key):
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((REAL / kind / "config.json").read_text())
    assert config["vision_config"].pop(key) is not None
    (base / "config.json").write_text(json.dumps(config))
    refused(convert("megatron2hf", REAL / kind, tmp_path / "no", "--config", base), 5, f"vision_config.{key}: ")
