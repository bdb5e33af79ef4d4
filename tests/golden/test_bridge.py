"""Checkpoints of Megatron-Bridge, which wrote them itself, and of NeMo 2: read without a config of Hugging Face."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from formats.megatron.args import run_config
from tests.faults.dcp_tools import edit, refused
from tests.megatron_runs import with_args

REAL = Path(__file__).with_name("bridge")
MODELS = ("llama3_tied", "qwen3_moe")


@pytest.mark.parametrize("name", MODELS)
def test_its_logits(convert, tmp_path, name):
    """What it read of Hugging Face comes back: transformers computes the same of it."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    out, golden = tmp_path / "out", np.load(REAL / name / "golden.npz")
    assert convert("megatron2hf", REAL / name, out).code == 0
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        logits = model(torch.tensor(golden["ids"])).logits.numpy()
    assert np.abs(logits - golden["logits"]).max() < 1e-5 < np.abs(logits).max()


def test_into_other_layouts(convert, tmp_path):
    """Its fields are arguments of Megatron-LM in what is written of it, which needs it no more."""
    run = REAL / MODELS[1]
    digest = convert("digest", run / "iter_0000000").out.split()[0]
    for number, options in enumerate((("--format", "torch", "--tp", 2, "--ep", 2), ("--format", "torch_dist"))):
        out = tmp_path / str(number)
        assert convert("reshard", run, out, *options).code == 0
        assert convert("digest", out).out.split()[0] == digest
        assert not list(out.rglob("run_config.yaml"))


@pytest.mark.parametrize(
    ("fields", "rows"),
    [({"vocab_size": 40}, 40), ({"vocab_size": 56, "should_pad_vocab": True, "tensor_model_parallel_size": 1}, 56)],
)
def test_rows_that_its_vocabulary_has_not_are_no_padding(convert, tmp_path, fields, rows):
    """The embedding has 60: what Bridge pads is a multiple of `make_vocab_size_divisible_by` on each rank, here 4."""
    run = Path(shutil.copytree(REAL / MODELS[0], tmp_path / "run"))
    path = run / "iter_0000000/run_config.yaml"
    document = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**document, "model": {**document["model"], **fields}}))
    ran = convert("megatron2hf", run, tmp_path / "out")
    said = f"vocab_size = {fields['vocab_size']}, of which Megatron-Bridge makes {rows} rows, and the embedding has 60"
    refused(ran, 3, "run_config.yaml", said)
    sure = {**document["model"], **fields, "vocab_size": 58, "should_pad_vocab": True}
    path.write_text(yaml.safe_dump({**document, "model": sure}))
    assert convert("megatron2hf", run, tmp_path / "out").code == 0, "two rows of padding"


def test_its_configuration_is_parsed_once(monkeypatch):
    from formats.checkpoint import Settings
    from formats.megatron import torch_dist
    from formats.megatron.args import run_config

    parse, parsed = run_config.yaml.load, []

    def counted(text: str, **options: Any) -> Any:
        parsed.append(text)
        return parse(text, **options)

    monkeypatch.setattr(run_config.yaml, "load", counted)
    settings = {
        MODELS[0]: Settings(), "qwen3_vl": Settings(config=REAL / "qwen3_vl"), "lora_tp2": Settings(adapter="only"),
    }  # fmt: skip
    for name, options in settings.items():
        parsed.clear()
        torch_dist.read(REAL / name, options)
        assert len(parsed) == 1, name


def nemo(at: Path, **fields: Any) -> Path:
    """The same model as NeMo 2 saves it: each name in a module of Lightning, the fields in `context`."""
    iteration = REAL / MODELS[0] / "iter_0000000"
    config = yaml.safe_load((iteration / "run_config.yaml").read_text())["model"]
    shutil.copytree(iteration, at / "weights", ignore=shutil.ignore_patterns("*.yaml", "train_state.pt"))

    def rename(metadata: Any) -> None:
        entries = metadata.state_dict_metadata
        metadata.state_dict_metadata = {f"module.{name}": about for name, about in entries.items()}
        metadata.storage_data = {
            type(index)(f"module.{index.fqn}", index.offset, index.index): where
            for index, where in metadata.storage_data.items()
        }

    edit(at / "weights", rename)
    for name in ("rope_scaling", "rope_scaling_factor", "should_pad_vocab", "hf_model_id"):
        del config[name]
    config |= {"_target_": "nemo.collections.llm.gpt.model.llama.Llama31Config8B", "scale_factor": 8.0}
    config |= {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192, "vocab_size": None} | fields
    (at / "context").mkdir()
    model = {"_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel", "config": config}
    (at / "context/model.yaml").write_text(yaml.safe_dump(model))
    return at


@pytest.mark.filterwarnings("ignore")
def test_nemo_2(convert, tmp_path):
    run = nemo(tmp_path / "nemo")
    refused(convert("megatron2hf", run, tmp_path / "out"), 5, "true vocabulary")
    for number, place in enumerate((run, run / "weights")):
        assert convert("megatron2hf", place, tmp_path / str(number), "--vocab-size", 60).code == 0
        assert convert("diff", tmp_path / str(number), REAL / MODELS[0]).code == 0


def test_what_the_fields_do_not_tell(convert, tmp_path):
    """A class with code of its own, an adapter alone, another scaling, a file that is none."""
    adapter, field = {"peft": {"dim": 8}}, "rotary_interleaved"
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "not known to compute": lambda run: run["model"].update(_target_="megatron.bridge.models.gemma.G"),
        "an adapter of Megatron-Bridge": lambda run: run.update(adapter),
        f"{field} = True": lambda run: run["model"].update({field: True}),
        "activation_func": lambda run: run["model"].update(activation_func=None),
        "own_field": lambda run: run["model"].update(own_field=3),
    }
    for number, (message, change) in enumerate(changes.items()):
        run = shutil.copytree(REAL / MODELS[0], tmp_path / str(number))
        path = run / "iter_0000000/run_config.yaml"
        config = yaml.safe_load(path.read_text())
        change(config)
        path.write_text(yaml.safe_dump(config))
        refused(convert("inspect", run), 4, message)
    path.write_text("model: 3")
    refused(convert("inspect", run), 3, "no fields of a model")
    other = nemo(tmp_path / "nemo", high_freq_factor=8)
    refused(convert("inspect", other), 5, "high_freq_factor = 8")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ({"_target_": "my_module.silu", "_call_": False}, "my_module.silu"),
        ({"_target_": "megatron.core.fusions.my_silu.silu"}, "megatron.core.fusions.my_silu.silu"),
        ({"_target_": "torch.nn.functional.silu", "_partial_": True, "_args_": [], "inplace": True},
         "torch.nn.functional.silu(inplace)"),
        ("silu", "silu"),
    ],
)  # fmt: skip
def test_an_activation_of_unknown_code(convert, tmp_path, function, said):
    """A function of another module may compute anything, whatever its last name."""
    run = shutil.copytree(REAL / MODELS[0], tmp_path / "run")
    path = run / "iter_0000000/run_config.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"]["activation_func"] = function
    path.write_text(yaml.safe_dump(config))
    refused(convert("inspect", run), 4, f"activation_func = '{said}' with gated_linear_unit = True")


def test_activations_are_known_by_the_names_that_torch_gives_them():
    from torch.nn import functional

    for name in ("silu", "gelu"):
        function = getattr(functional, name)
        assert run_config.NAMED[f"{function.__module__}.{function.__qualname__}"] == name


MODELS_OF_BRIDGE = "megatron.bridge.models"


@pytest.mark.parametrize("name", ["own_maps", "rotary_interleaved", "normalization"])
def test_a_map_that_is_no_setting_of_kernels(convert, tmp_path, name):
    """A field that is a map is refused by name, unless it changes no more than rounding."""
    run = shutil.copytree(REAL / "llama3_tied", tmp_path / "run")
    path = next(run.glob("iter_*/run_config.yaml"))
    document = yaml.safe_load(path.read_text())
    document["model"][name] = {"_target_": "mine.Maps", "_call_": True}
    path.write_text(yaml.safe_dump(document))
    ran = convert("megatron2hf", run, tmp_path / "no")
    assert ran.code in (3, 4), ran.err
    assert name in ran.err


CORE = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"


def partial(name: str, *given: Any, **arguments: Any) -> dict[str, Any]:
    """A function with arguments, as Bridge's `_partial_representer` writes one."""
    return {"_target_": name, "_partial_": True, "_args_": [*given], **arguments}


@pytest.mark.parametrize(
    ("builder", "said"),
    [
        ({"_target_": "my_fork.specs.parallel_residual_layer_spec", "_call_": False}, "my_fork.specs.parallel"),
        ({"_target_": f"{MODELS_OF_BRIDGE}.gemma.gemma2_provider.gemma2_layer_spec"}, f"{MODELS_OF_BRIDGE}.gemma"),
        (partial(CORE, qk_l2_norm=True, use_transformer_engine=True), f"{CORE}(qk_l2_norm)"),
        (partial(CORE, 3), f"{CORE}(_args_)"),
        ({"_target_": "megatron.core.transformer.spec_utils.ModuleSpec", "module": {}}, "megatron.core.transformer"),
        ("my_fork.layer", "my_fork.layer"),
    ],
)
def test_layers_of_unknown_code(convert, tmp_path, builder, said):
    """What a function of another tree builds may compute anything: parallel residuals, norms elsewhere."""
    run = shutil.copytree(REAL / MODELS[0], tmp_path / "run")
    path = run / "iter_0000000/run_config.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"]["transformer_layer_spec"] = builder
    path.write_text(yaml.safe_dump(config))
    refused(convert("inspect", run), 4, f"transformer_layer_spec = '{said}", "--accept transformer_layer_spec")
    refused(convert("inspect", run, "--accept", "unknown-arguments"), 4, f"transformer_layer_spec = '{said}")
    assert convert("inspect", run, "--accept", "transformer_layer_spec").code == 0
    for known in (partial(CORE, use_transformer_engine=True), None):
        config["model"]["transformer_layer_spec"] = known
        path.write_text(yaml.safe_dump(config))
        assert convert("inspect", run).code == 0
    del config["model"]["transformer_layer_spec"]
    path.write_text(yaml.safe_dump(config))
    assert convert("inspect", run).code == 0


ELSEWHERE = {"make_vocab_size_divisible_by", "should_pad_vocab"}
"""Of the padding, which Bridge leaves out where it imports and we have as Megatron-LM does."""


@pytest.mark.parametrize("name", MODELS)
def test_what_bridge_loads(convert, tmp_path, name):
    """Each field that is written for Bridge is as it has written it, and the counters are tensors of torch."""
    import torch

    out = tmp_path / "out"
    assert convert("megatron2hf", REAL / name, tmp_path / "hf").code == 0
    options = ("--format", "torch_dist", "--norm", "local")
    assert convert("hf2megatron", tmp_path / "hf", out, *options, "--for", "bridge").code == 0
    ours, theirs = (yaml.safe_load((run / "iter_0000000/run_config.yaml").read_text()) for run in (out, REAL / name))
    differing = {field for field in ours["model"] if ours["model"][field] != theirs["model"][field]}
    scaled = set() if ours["model"]["rope_scaling"] else {"rope_scaling_factor"}  # which then is for nothing
    assert differing == ELSEWHERE | scaled
    keys = ("save_optim", "save_rng", "ckpt_format", "_target_")
    assert {key: theirs["checkpoint"][key] for key in keys} == {key: ours["checkpoint"][key] for key in keys}
    state, own = (torch.load(run / "latest_train_state.pt") for run in (out, REAL / name))
    assert {key: tensor.item() for key, tensor in state.items()} == {key: own[key].item() for key in own}
    assert (out / "iter_0000000/train_state.pt").read_bytes() == (out / "latest_train_state.pt").read_bytes()
    assert convert("reshard", out, tmp_path / "again", "--for", "bridge", "--tp", 2).code == 0
    refused(convert("hf2megatron", tmp_path / "hf", tmp_path / "no", "--for", "bridge"), 2, "--for", "torch_dist")
    both = ("--for", "bridge", "--with-optimizer", *options)
    refused(convert("hf2megatron", tmp_path / "hf", tmp_path / "no", *both), 2, "weights alone")


def test_bridge_goes_on_with_the_samples_of_the_training(convert, model, tmp_path):
    """It skips the data that the run has seen: with none counted it would train on them again."""
    import torch

    assert convert("hf2megatron", model(), tmp_path / "run", "--iteration", 100).code == 0
    run = with_args(tmp_path / "run", tmp_path / "trained", consumed_train_samples=1600)
    ran = convert("reshard", run, tmp_path / "out", "--format", "torch_dist", "--for", "bridge")
    assert ran.code == 0, ran.err
    state = torch.load(tmp_path / "out/latest_train_state.pt")
    assert (state["step"].item(), state["consumed_train_samples"].item()) == (100, 1600)


def test_what_bridge_would_compute_otherwise(convert, model, tmp_path):
    ran = convert("hf2megatron", model("deepseek_v3"), tmp_path / "out", "--format", "torch_dist", "--for", "bridge")
    refused(ran, 5, "multi_latent_attention = True", "import_ckpt")
    both = ("--format", "torch_dist", "--for", "bridge", "--glu-interleave", 2)  # megatron-core has it since 0.18
    ran = convert("hf2megatron", model("mixtral"), tmp_path / "out", *both)
    refused(ran, 5, "moe_mlp_glu_interleave_size = 2", "leave --for bridge out")
