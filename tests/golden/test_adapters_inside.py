"""Adapters inside the checkpoints of real trainers: `--adapter merged` and `--adapter only`."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vitruvian
from tests.golden.test_merge import adapter_of

HERE = Path(__file__).parent / "peft"
COMMANDS = {"in_fsdp2": "fsdp2hf", "in_zero3": "zero2hf"}


@pytest.fixture(params=COMMANDS)
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The command for a checkpoint, and a copy of the fixture with the adapter_config.json that trainers write."""
    folder = tmp_path / "trained"
    shutil.copytree(HERE / request.param, folder)
    settings = json.loads((folder / "lora_config.json").read_text())["peft"]
    (folder / "checkpoint/adapter_config.json").write_text(json.dumps(settings))
    return COMMANDS[request.param], folder


def logits(folder: Path, trained: Path, adapter: Path | None = None) -> float:
    """How far the logits of a model are from the golden ones."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        computed = model(torch.from_numpy(np.load(trained / "golden_ids.npy"))).logits.numpy()
    return float(np.abs(computed - np.load(trained / "golden_logits.npy")).max())


def test_the_adapter_alone_is_what_peft_loads(trained, convert, tmp_path):
    command, folder = trained
    ran = convert(command, folder / "checkpoint", tmp_path / "adapter", "--adapter", "only")
    assert ran.code == 0, ran.err
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["inference_mode"] is True  # as PEFT saves
    assert convert("merge", folder / "base", tmp_path / "adapter", tmp_path / "out").code == 0
    if command == "fsdp2hf":
        assert logits(folder / "base", folder, tmp_path / "adapter") < 5e-7
        assert logits(tmp_path / "out", folder) < 5e-7


def test_merged(trained, convert, tmp_path):
    command, folder = trained
    options = ["--config", folder / "base", "--adapter", "merged", "--dtype", "fp32"]
    ran = convert(command, folder / "checkpoint", tmp_path / "out", *options)
    assert ran.code == 0, ran.err
    assert "lora_A.default.weight\n" not in ran.err
    # of ZeRO the FP32 master weights of the adapter, where the golden logits are those of its bfloat16 copies
    assert logits(tmp_path / "out", folder) < (5e-7 if command == "fsdp2hf" else 2e-3)
    assert convert("verify", tmp_path / "out").code == 0
    done = vitruvian.convert(
        folder / "checkpoint", tmp_path / "shards", to="megatron", tp=2, config=folder / "base", adapter="merged",
        dtype="fp32",
    )  # fmt: skip
    assert done.digest == vitruvian.digest(tmp_path / "out").digest


def test_biases_that_were_trained_are_in_the_base(model, convert, tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, checkpoint = model("qwen2"), tmp_path / "checkpoint"
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"], bias="all")
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    dcp.save({"model": wrapped.state_dict()}, checkpoint_id=checkpoint, no_dist=True)
    shutil.copyfile(adapter / "adapter_config.json", checkpoint / "adapter_config.json")
    ran = convert("fsdp2hf", checkpoint, tmp_path / "out", "--config", base, "--adapter", "merged")
    assert ran.code == 0, ran.err
    ran = convert("fsdp2hf", checkpoint, tmp_path / "no", "--adapter", "only")
    assert (ran.code, "--adapter merged has them" in ran.err) == (4, True), ran.err
    trained = {key: tensor for key, tensor in wrapped.state_dict().items() if "lora_" in key or "bias" in key}
    dcp.save({"model": trained}, checkpoint_id=tmp_path / "trained", no_dist=True)
    shutil.copyfile(adapter / "adapter_config.json", tmp_path / "trained/adapter_config.json")
    ran = convert("fsdp2hf", tmp_path / "trained", tmp_path / "no", "--adapter", "only")
    assert (ran.code, "its biases are in the base" in ran.err, "save_pretrained(OUT)" in ran.err) == (4, True, True)
    assert convert("merge", base, adapter, tmp_path / "merged").code == 0
    ours, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "merged"))
    assert ours.keys() == merged.keys()
    assert all(np.array_equal(tensor, merged[key]) for key, tensor in ours.items())


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_the_base_has_not(trained, convert, tmp_path, bias):
    """PEFT trains those that there are: where the base has none, the adapter is whole without them."""
    command, folder = trained
    assert convert(command, folder / "checkpoint", tmp_path / "none", "--adapter", "only").code == 0
    config = json.loads((folder / "checkpoint/adapter_config.json").read_text())
    (folder / "checkpoint/adapter_config.json").write_text(json.dumps(config | {"bias": bias}))
    ran = convert(command, folder / "checkpoint", tmp_path / "out", "--adapter", "only")
    assert ran.code == 0, ran.err
    none, ours = (tmp_path / name / "adapter_model.safetensors" for name in ("none", "out"))
    assert none.read_bytes() == ours.read_bytes()
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["bias"] == bias
    assert convert("merge", folder / "base", tmp_path / "out", tmp_path / "merged").code == 0


def test_the_weights_of_zero_as_it_computes_with_them(convert, tmp_path):
    """Both rounded to bfloat16, as the golden logits have them."""
    folder = tmp_path / "trained"
    shutil.copytree(HERE / "in_zero3", folder)
    settings = json.loads((folder / "lora_config.json").read_text())["peft"]
    (folder / "checkpoint/adapter_config.json").write_text(json.dumps(settings))
    assert convert("zero2hf", folder / "checkpoint", tmp_path / "adapter", "--adapter", "only").code == 0
    weights = tmp_path / "adapter/adapter_model.safetensors"
    rounded = {name: array.astype(ml_dtypes.bfloat16).astype(np.float32) for name, array in load_file(weights).items()}
    save_file(rounded, weights, {"format": "pt"})
    assert convert("hf2hf", folder / "base", tmp_path / "base", "--dtype", "bf16").code == 0
    assert convert("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "--dtype", "fp32").code == 0
    assert logits(tmp_path / "out", folder) < 5e-7


def test_a_universal_checkpoint_of_it_is_verified(convert, tmp_path):
    """It has the adapter alone, under the names of the training; what it was made of is what becomes a model."""
    import torch

    source, universal = HERE / "in_zero3/checkpoint", tmp_path / "universal"
    ran = convert("zero2universal", source, universal)
    assert (ran.code, "21 parameters are frozen" in ran.err) == (0, True), ran.err
    ran = convert("verify", universal)
    assert (ran.code, "equals vitruvian.json: 24 tensors" in ran.out) == (0, True), ran.err
    shutil.copy(HERE / "in_zero3/base/config.json", universal)
    assert convert("verify", universal).out == ran.out
    (universal / "config.json").unlink()
    assert convert("inspect", universal).code == convert("diff", universal, universal).code == 0
    base = ["--config", HERE / "in_zero3/base"]
    for options in ([], base, ["--adapter", "only"], ["--adapter", "merged", *base]):
        ran = convert("zero2hf", universal, tmp_path / "out", *options)
        assert (ran.code, (tmp_path / "out").exists()) == (4 if options == base else 3, False), ran.err
    ran = convert("zero2hf", universal, tmp_path / "out")
    assert "--adapter only" in ran.err, ran.err
    settings = json.loads((HERE / "in_zero3/lora_config.json").read_text())["peft"]
    shutil.copytree(source, tmp_path / "source")
    for folder in (universal, tmp_path / "source"):
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        assert convert("zero2hf", folder, tmp_path / f"{folder.name}-adapter", "--adapter", "only").code == 0
    ours, theirs = (
        load_file(tmp_path / f"{name}-adapter/adapter_model.safetensors") for name in ("universal", "source")
    )
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(tensor, theirs[key]) for key, tensor in ours.items())
    file = next(universal.glob("*/zero/*q_proj.lora_A*/exp_avg.pt"))
    content = torch.load(file, weights_only=False)
    content["param"][0, 0] += 1
    torch.save(content, file)
    ran = convert("verify", universal)
    assert (ran.code, "1 of 24 tensors" in ran.err, "exp_avg.base_model" in ran.err) == (6, True, True), ran.err
    ran = convert("zero2hf", universal, tmp_path / "out", "--adapter", "only")
    assert (ran.code, "is not what vitruvian.json says" in ran.err) == (6, True), ran.err


def test_options_that_mean_nothing_to_an_adapter_alone(trained, convert, tmp_path):
    command, folder = trained
    for options in (["--shard-size", "1MB"], ["--chat-template", "chatml"], ["--verbatim"]):
        ran = convert(command, folder / "checkpoint", tmp_path / "out", "--adapter", "only", *options)
        assert (ran.code, f"{options[0]} has no effect on an adapter alone" in ran.err) == (2, True), ran.err
    assert not (tmp_path / "out").exists()


def test_what_is_refused(trained, convert, tmp_path):
    command, folder = trained
    checkpoint, base = folder / "checkpoint", ["--config", folder / "base"]
    ran = convert(command, checkpoint, tmp_path / "out", *base)
    assert (ran.code, "--adapter merged" in ran.err) == (4, True), ran.err
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    (checkpoint / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    ran = convert(command, checkpoint, tmp_path / "out", "--adapter", "only")
    assert (ran.code, "changed the weights of its base" in ran.err) == (4, True), ran.err
    (checkpoint / "adapter_config.json").unlink()
    for options in (["--adapter", "only"], [*base, "--adapter", "merged"]):
        ran = convert(command, checkpoint, tmp_path / "out", *options)
        assert (ran.code, "holds no adapter_config.json" in ran.err) == (3, True), ran.err
    with pytest.raises(vitruvian.UsageError, match="not written as fsdp"):
        vitruvian.convert(checkpoint, tmp_path / "out", to="fsdp", adapter="only")
    assert not (tmp_path / "out").exists()


def test_without_an_adapter(model, convert, tmp_path):
    assert convert("hf2fsdp", model("llama"), tmp_path / "fsdp").code == 0
    ran = convert("fsdp2hf", tmp_path / "fsdp", tmp_path / "out", "--adapter", "merged")
    assert (ran.code, "holds no adapter" in ran.err) == (2, True), ran.err
    with pytest.raises(vitruvian.UsageError, match="--adapter has no effect"):
        vitruvian.convert(model("llama"), tmp_path / "out", adapter="only")


def test_an_adapter_cut_by_columns(convert, tmp_path):
    """As tensor parallel ranks hold it: `--adapter only` makes it whole, which the refusal of `merged` says."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    trained, folder = shutil.copytree(HERE / "in_fsdp2", tmp_path / "trained"), tmp_path / "c"
    dcp_to_torch_save(trained / "checkpoint", tmp_path / "whole.pt")
    parts: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    offsets: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for key, tensor in torch.load(tmp_path / "whole.pt")["model"].items():
        axis = int("lora_A" in key)
        for rank, part in enumerate(tensor.chunk(2, axis)):
            parts[rank][key] = part.contiguous().numpy()
            start = rank * -(-tensor.shape[axis] // 2)
            offsets[rank][key] = {"saved_offsets": [start if i == axis else 0 for i in range(tensor.dim())]}
    folder.mkdir()
    for rank in range(2):
        about = {"DCP_VERSION": "1.0", "format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets[rank])}
        save_file(parts[rank], folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata=about)
    settings = json.loads((trained / "lora_config.json").read_text())["peft"]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    merged = ("--config", trained / "base", "--adapter", "merged")
    ran = convert("fsdp2hf", folder, tmp_path / "no", *merged)
    assert (ran.code, "holds some columns of" in ran.err, "take --adapter only first" in ran.err) == (4, True, True)
    assert not (tmp_path / "no").exists()
    assert convert("fsdp2hf", folder, tmp_path / "adapter", "--adapter", "only").code == 0
    assert convert("merge", trained / "base", tmp_path / "adapter", tmp_path / "out", "--dtype", "fp32").code == 0
    assert logits(tmp_path / "out", trained) < 5e-7


def settings_of(folder: Path) -> dict[str, Any]:
    """The adapter_config.json beside a checkpoint."""
    settings: dict[str, Any] = json.loads((folder / "checkpoint/adapter_config.json").read_text())
    return settings


CONTRADICTIONS = {
    "too few modules": ({"target_modules": ["q_proj"]}, "that its config leaves out"),
    "too many modules": ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]}, "has nothing of"),
    "layers": ({"layers_to_transform": [0]}, "that its config leaves out"),
    "excluded": ({"exclude_modules": ["q_proj"]}, "that its config leaves out"),
    "DoRA": ({"use_dora": True}, "holds no lora_magnitude_vector"),
    "rank": ({"r": 8}, "says r = 8"),
    "rank of a pattern": ({"rank_pattern": {"q_proj": 2}}, "says r = 2"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha = None"),
    "saved module": ({"modules_to_save": ["lm_head"]}, "has nothing of"),
}
"""Settings that contradict the tensors of the fixtures: those settings, and the words of the refusal."""


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_settings_that_contradict_the_tensors(kind, convert, tmp_path):
    """PEFT loads most of them, and another model than the trained one; without --config the checkpoint has the base."""
    given, words = CONTRADICTIONS[kind]
    folder = shutil.copytree(HERE / "in_zero3", tmp_path / "trained")
    settings = json.loads((folder / "lora_config.json").read_text())["peft"] | given
    (folder / "checkpoint/adapter_config.json").write_text(json.dumps(settings))
    for config in ([], ["--config", folder / "base"]):
        ran = convert("zero2hf", folder / "checkpoint", tmp_path / "out", "--adapter", "only", *config)
        assert (ran.code, words in ran.err, (tmp_path / "out").exists()) == (3, True, False), ran.err


def held(folder: Path) -> dict[str, Any]:
    """The tensors of a checkpoint of FSDP."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / "checkpoint", folder / "whole.pt")
    tensors: dict[str, Any] = torch.load(folder / "whole.pt")["model"]
    return tensors


def save(tensors: dict[str, Any], settings: dict[str, Any], to: Path) -> Path:
    """Save a checkpoint of FSDP with its adapter_config.json."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": tensors}, checkpoint_id=to, no_dist=True)
    (to / "adapter_config.json").write_text(json.dumps(settings))
    return to


@pytest.fixture
def trained_by_fsdp(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Tensors, adapter_config.json and base of the checkpoint of FSDP."""
    folder = shutil.copytree(HERE / "in_fsdp2", tmp_path / "trained")
    return held(folder), json.loads((folder / "lora_config.json").read_text())["peft"], folder / "base"


def test_an_adapter_that_is_not_complete(trained_by_fsdp, convert, tmp_path):
    import torch

    tensors, settings, base = trained_by_fsdp
    first, second = [key for key in tensors if "lora_" in key][:2]
    assert (first.replace("lora_A", "lora_B"), tensors[first].shape[0]) == (second, settings["r"])
    strange = {key.replace("q_proj", "p_proj") if "layers.0" in key and "lora_" in key else key: t
               for key, t in tensors.items()}  # fmt: skip
    damages = {
        "no_lora_B": ({key: t for key, t in tensors.items() if key != second}, 3, "holds no lora_B"),
        "no_layer": (
            {key: t for key, t in tensors.items() if not ("lora_" in key and "layers.1." in key)}, 3, "has nothing of",
        ),
        "ranks": (tensors | {first: tensors[first][:2].clone()}, 3, "of no matrix"),
        "integers": (tensors | {first: tensors[first].to(torch.int32)}, 4, "LoRA has floating point numbers"),
        "strange": (strange, 3, "p_proj"),
    }  # fmt: skip
    for name, (damaged, code, words) in damages.items():
        checkpoint = save(damaged, settings, tmp_path / name)
        ran = convert("fsdp2hf", checkpoint, tmp_path / "out", "--adapter", "only")
        assert (name, ran.code, words in ran.err, (tmp_path / "out").exists()) == (name, code, True, False), ran.err
    only = save({key: t for key, t in damages["no_layer"][0].items() if "lora_" in key}, settings, tmp_path / "alone")
    ran = convert("fsdp2hf", only, tmp_path / "out", "--adapter", "only", "--config", base)
    assert (ran.code, "has nothing of" in ran.err) == (3, True), ran.err


def test_a_save_of_the_adapter_alone(trained_by_fsdp, convert, tmp_path):
    """No base is known: the config has to fit the modules that the adapter has."""
    tensors, settings, base = trained_by_fsdp
    alone = {key: tensor for key, tensor in tensors.items() if "lora_" in key}
    checkpoint = save(alone, settings, tmp_path / "checkpoint")
    for name, options in (("one", []), ("two", ["--config", base])):
        ran = convert("fsdp2hf", checkpoint, tmp_path / name, "--adapter", "only", *options)
        assert ran.code == 0, ran.err
    assert convert("merge", base, tmp_path / "one", tmp_path / "out", "--dtype", "fp32").code == 0
    assert logits(tmp_path / "out", base.parent) < 5e-7
    for given, words in ({"r": 2}, "says r = 2"), ({"target_modules": ["q_proj"]}, "that its config leaves out"):
        (checkpoint / "adapter_config.json").write_text(json.dumps(settings | given))
        ran = convert("fsdp2hf", checkpoint, tmp_path / "no", "--adapter", "only")
        assert (ran.code, words in ran.err) == (3, True), ran.err
    (checkpoint / "adapter_config.json").write_text(json.dumps(settings | {"target_parameters": ["q_proj.weight"]}))
    ran = convert("fsdp2hf", checkpoint, tmp_path / "no", "--adapter", "only")
    assert (ran.code, "--config BASE" in ran.err) == (4, True), ran.err


def saved_by_accelerate(base: Path, tmp_path: Path, rows: int | None = None, **settings: Any) -> tuple[Path, Path]:
    """An adapter as PEFT saves it, and as accelerate saves it alone in a checkpoint of FSDP (`adapter_only`)."""
    import torch
    import torch.distributed.checkpoint as dcp
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    adapter, checkpoint = adapter_of(base, tmp_path / "peft", rows, **settings), tmp_path / "checkpoint"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if rows is not None:
        model.resize_token_embeddings(rows)
    wrapped = PeftModel.from_pretrained(model, adapter)
    tensors = get_peft_model_state_dict(wrapped, adapter_name=wrapped.active_adapter)
    dcp.save({"model": tensors}, checkpoint_id=checkpoint / "pytorch_model_fsdp_0", no_dist=True)
    shutil.copyfile(adapter / "adapter_config.json", checkpoint / "adapter_config.json")
    return adapter, checkpoint


SAVED_ALONE = {
    "head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "embedding": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "norms": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "LoRA of the embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}),
    "LoRA of the head": ("llama", {"target_modules": ["q_proj", "lm_head"], "use_dora": True}),
    "biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}),
}
"""Model and settings of adapters whose file has tensors that replace some of the base."""


@pytest.mark.parametrize("kind", SAVED_ALONE)
def test_an_adapter_that_accelerate_saves_alone(kind, model, convert, tmp_path):
    """Its tensors have the names of PEFT's files, in which a replaced tensor has its name in the base."""
    name, settings = SAVED_ALONE[kind]
    base = model(name)
    adapter, checkpoint = saved_by_accelerate(base, tmp_path, **settings)
    expected = load_file(adapter / "adapter_model.safetensors")
    assert any("lora_" not in key for key in expected)
    for number, options in enumerate(([], ["--config", base])):
        ran = convert("fsdp2hf", checkpoint, tmp_path / str(number), "--adapter", "only", *options)
        assert ran.code == 0, ran.err
        written = load_file(tmp_path / str(number) / "adapter_model.safetensors")
        assert written.keys() == expected.keys()
        assert all(np.array_equal(tensor, expected[key]) for key, tensor in written.items())
    assert convert("merge", base, tmp_path / "0", tmp_path / "out").code == 0


@pytest.mark.parametrize("extra", ["model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_what_peft_saves_with_no_adapter_of_these_settings(extra, trained_by_fsdp, convert, tmp_path):
    """A tensor of the base that no setting names, beside an adapter with the names of PEFT's files."""
    tensors, settings, base = trained_by_fsdp
    alone = {key.replace(".default", ""): tensor for key, tensor in tensors.items() if "lora_" in key}
    whole = next(tensor for key, tensor in tensors.items() if key.replace(".base_layer", "").endswith(extra))
    checkpoint = save(alone | {f"base_model.model.{extra}": whole}, settings, tmp_path / "checkpoint")
    for options in ([], ["--config", base]):
        ran = convert("fsdp2hf", checkpoint, tmp_path / "no", "--adapter", "only", *options)
        assert (ran.code, extra in ran.err, (tmp_path / "no").exists()) == (3, True, False), ran.err


def test_there_is_no_base_to_merge_into(model, convert, tmp_path):
    """The weights in the folder of --config are no base, whether a table describes their model or none does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    config, untabled = AutoConfig.for_model("opt", num_hidden_layers=2, **sizes), tmp_path / "opt"
    AutoModelForCausalLM.from_config(config).save_pretrained(untabled)
    for base, words in (model("llama"), "tensors are missing"), (untabled, "holds no base"):
        _, checkpoint = saved_by_accelerate(base, tmp_path / base.name, target_modules=["q_proj"])
        ran = convert("fsdp2hf", checkpoint, tmp_path / "no", "--adapter", "merged", "--config", base)
        assert (ran.code, words in ran.err, (tmp_path / "no").exists()) == (3, True, False), ran.err


@pytest.mark.parametrize("adapter", ["merged", "only"])
def test_frozen_parameters_of_another_rank(adapter, convert, tmp_path):
    """The model file of one rank, saved again as that of the next: both hold the same half of each frozen parameter."""
    import torch

    folder = shutil.copytree(HERE / "in_zero3", tmp_path / "trained")
    settings = json.loads((folder / "lora_config.json").read_text())["peft"]
    (folder / "checkpoint/adapter_config.json").write_text(json.dumps(settings))
    first, second = sorted(folder.glob("checkpoint/*/zero_pp_rank_*_model_states.pt"))
    options = ("--adapter", adapter, "--config", folder / "base", "--dtype", "fp32")
    options = options if adapter == "merged" else options[:4]
    content = torch.load(first, weights_only=False)
    torch.save(content, second)
    ran = convert("zero2hf", folder / "checkpoint", tmp_path / "no", *options)
    words = (first.name, second.name, "hold the same elements: one is a copy of the other")
    assert (ran.code, *(word in ran.err for word in words)) == (3, True, True, True), ran.err
    assert not (tmp_path / "no").exists()
    for name, fragment in content["frozen_param_fragments"].items():
        content["frozen_param_fragments"][name] = torch.ones_like(fragment)
    torch.save(content, first)
    torch.save(content, second)
    ran = convert("zero2hf", folder / "checkpoint", tmp_path / "ones", *options)
    assert ran.code == 0, ran.err


TRUST = "nothing in the model files of ZeRO-3 says whose parts of the frozen parameters they hold"


def test_frozen_parameters_of_two_ranks_exchanged(convert, tmp_path):
    """The model files of two ranks, each saved again as the other's: the values of the base tell."""
    import torch

    folder = shutil.copytree(HERE / "in_zero3", tmp_path / "trained")
    settings = json.loads((folder / "lora_config.json").read_text())["peft"]
    (folder / "checkpoint/adapter_config.json").write_text(json.dumps(settings))
    config, base = tmp_path / "config", folder / "base"
    config.mkdir()
    shutil.copy(base / "config.json", config)
    export = ("zero2hf", folder / "checkpoint")
    options = ("--adapter", "merged", "--dtype", "fp32", "--config")
    ran = convert(*export, tmp_path / "right", *options, base)
    assert (ran.code, TRUST in ran.err) == (0, False), ran.err
    ran = convert(*export, tmp_path / "trusted", *options, config)
    assert (ran.code, f"{TRUST}: they are taken on trust; --config BASE" in ran.err) == (0, True), ran.err

    first, second = sorted(folder.glob("checkpoint/*/zero_pp_rank_*_model_states.pt"))
    contents = [torch.load(path, weights_only=False) for path in (first, second)]
    for path, content, other in zip((first, second), contents, contents[::-1], strict=True):
        torch.save({**content, "frozen_param_fragments": other["frozen_param_fragments"]}, path)
    ran = convert(*export, tmp_path / "no", *options, base)
    assert (ran.code, f"{first.name} holds the part of" in ran.err) == (3, True), ran.err
    assert not (tmp_path / "no").exists()

    weights = load_file(base / "model.safetensors")
    save_file({key: tensor + 1 for key, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    ran = convert(*export, tmp_path / "other", *options, base)
    assert (ran.code, f"{TRUST}, and they are not those of {base}" in ran.err) == (0, True), ran.err


def test_the_settings_in_the_folder_of_the_config(trained, convert, tmp_path):
    command, folder = trained
    (folder / "checkpoint/adapter_config.json").rename(folder / "base/adapter_config.json")
    shutil.copy(folder / "base/model.safetensors", folder / "base/adapter_model.safetensors")  # not of this adapter
    options = ["--config", folder / "base", "--adapter"]
    ran = convert(command, folder / "checkpoint", tmp_path / "out", *options, "merged", "--dtype", "fp32")
    assert ran.code == 0, ran.err
    assert not [*(tmp_path / "out").glob("adapter*")]
    assert logits(tmp_path / "out", folder) < (5e-7 if command == "fsdp2hf" else 2e-3)
    assert convert(command, folder / "checkpoint", tmp_path / "adapter", *options, "only").code == 0


def test_settings_in_several_places(trained, convert, tmp_path):
    command, folder = trained
    settings = settings_of(folder)
    same = settings | {"target_modules": settings["target_modules"][::-1], "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(same))
    options = ["--config", folder / "base", "--adapter"]
    assert convert(command, folder / "checkpoint", tmp_path / "out", *options, "merged").code == 0
    for place, change in product((folder, folder / "base"), ({"lora_alpha": 16}, {"bias": "lora_only"})):
        (place / "adapter_config.json").write_text(json.dumps(settings | change))
        for adapter in ("merged", "only"):
            ran = convert(command, folder / "checkpoint", tmp_path / "no", *options, adapter)
            paths = [str(part / "adapter_config.json") in ran.err for part in (place, folder / "checkpoint")]
            assert (ran.code, paths, f"differ in {next(iter(change))}" in ran.err) == (5, [True, True], True), ran.err
        (place / "adapter_config.json").unlink()


def test_a_saved_module_is_not_said_to_be_left_out(trained_by_fsdp, convert, tmp_path):
    tensors, settings, base = trained_by_fsdp
    head = tensors.pop("base_model.model.lm_head.weight")
    tensors["base_model.model.lm_head.original_module.weight"] = head
    tensors["base_model.model.lm_head.modules_to_save.default.weight"] = head * 2
    checkpoint = save(tensors, settings | {"modules_to_save": ["lm_head"]}, tmp_path / "checkpoint")
    options = ["--config", base, "--dtype", "fp32", "--adapter"]
    ran = convert("fsdp2hf", checkpoint, tmp_path / "out", *options, "merged")
    assert (ran.code, "not carried" in ran.err) == (0, False), ran.err
    assert (load_file(tmp_path / "out/model.safetensors")["lm_head.weight"] == 2 * head.float().numpy()).all()
    assert convert("fsdp2hf", checkpoint, tmp_path / "adapter", "--adapter", "only").code == 0


SECOND = {
    "without the wrapper of a module": (".q_proj.base_layer.weight", ".q_proj.weight"),
    "without PEFT's prefix": ("base_model.model.model.norm.weight", "model.norm.weight"),
    "as it was before": ("lm_head.weight", "lm_head.original_module.weight"),
    "without the adapter's name": (".lora_A.default.weight", ".lora_A.weight"),
}
"""The end of the names of tensors in a training, and that of second ones, which have the same name in files."""


@pytest.mark.parametrize("kind", SECOND)
def test_a_tensor_under_two_names(kind, trained_by_fsdp, convert, tmp_path):
    """Nothing tells which of them the training meant."""
    tensors, settings, base = trained_by_fsdp
    end, other = SECOND[kind]
    second = {key.removesuffix(end) + other: tensor + 1 for key, tensor in tensors.items() if key.endswith(end)}
    assert second
    assert not second.keys() & tensors.keys()
    checkpoint = save(tensors | second, settings, tmp_path / "checkpoint")
    for adapter in ("merged", "only"):
        ran = convert("fsdp2hf", checkpoint, tmp_path / "no", "--config", base, "--adapter", adapter)
        assert (ran.code, "twice: " in ran.err, (tmp_path / "no").exists()) == (3, True, False), ran.err
        assert any(key in ran.err and key.removesuffix(other) + end in ran.err for key in second), ran.err


@pytest.mark.parametrize("kept", [["embed_tokens", "lm_head"], ["lm_head"], None])
def test_a_resized_vocabulary_that_accelerate_saves_alone(kept, model, convert, tmp_path):
    """PEFT saves embedding and head twice, and what they were: none of it is a second tensor of one name."""
    settings = {"target_modules": ["q_proj"], "modules_to_save": kept}
    adapter, checkpoint = saved_by_accelerate(model("llama"), tmp_path, rows=259, **settings)
    ran = convert("fsdp2hf", checkpoint, tmp_path / "out", "--adapter", "only")
    assert ran.code == 0, ran.err
    assert convert("merge", model("llama"), tmp_path / "out", tmp_path / "ours").code == 0
    assert convert("merge", model("llama"), adapter, tmp_path / "theirs").code == 0
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("kind", ["lora_A", "modules_to_save"])
def test_an_adapter_that_is_not_finite(kind, value, trained_by_fsdp, convert, tmp_path):
    tensors, settings, base = trained_by_fsdp
    head = "base_model.model.lm_head"
    tensors[f"{head}.modules_to_save.default.weight"] = tensors[f"{head}.weight"].clone()
    settings |= {"modules_to_save": ["lm_head"]}
    next(tensor for key, tensor in tensors.items() if kind in key)[1, 2] = value
    checkpoint = save(tensors, settings, tmp_path / "checkpoint")
    for adapter in ("merged", "only"):
        ran = convert("fsdp2hf", checkpoint, tmp_path / "no", "--config", base, "--adapter", adapter)
        assert (ran.code, "NaN or infinity" in ran.err, (tmp_path / "no").exists()) == (5, True, False), ran.err


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_an_adapter_of_a_quantized_base(storage, trained_by_fsdp, convert, tmp_path):
    """QLoRA: bitsandbytes packs two elements in a byte, in one column of bytes or of the type that FSDP wants."""
    import torch

    tensors, settings, base = trained_by_fsdp
    for key in [key for key in tensors if key.endswith("base_layer.weight")]:
        packed = torch.zeros(tensors[key].numel() // 2, dtype=torch.uint8).view(getattr(torch, storage))
        tensors |= {key: packed[:, None].clone(), f"{key}.absmax": torch.ones(9)}
    checkpoint = save(tensors, settings, tmp_path / "checkpoint")
    for name, options in (("one", []), ("two", ["--config", base])):
        ran = convert("fsdp2hf", checkpoint, tmp_path / name, "--adapter", "only", *options)
        assert ran.code == 0, ran.err
    assert convert("merge", base, tmp_path / "one", tmp_path / "out", "--dtype", "fp32").code == 0
    assert logits(tmp_path / "out", base.parent) < 5e-7
    (checkpoint / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["q_proj", "up_proj"]}))
    ran = convert("fsdp2hf", checkpoint, tmp_path / "no", "--adapter", "only")
    assert (ran.code, "has nothing of" in ran.err) == (3, True), ran.err
