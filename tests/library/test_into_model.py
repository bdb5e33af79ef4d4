"""Weights of any checkpoint into models of transformers, as from_pretrained has them: whole, meta, sharded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM

import vitruvian
import vitruvian.torch
from formats.huggingface.config import from_huggingface
from formats.model.spec import differences
from tests.faults.dcp_tools import save
from tests.models import MODELS, SMALL, settings_of

SCRIPT = Path(__file__).with_name("sharded_model.py")


def made(source: Path, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A model with random weights."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)


@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "gpt2", "gpt_neox", "gpt_oss"])
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_a_model_computes_what_from_pretrained_computes(model, tmp_path, name, meta):
    source = model(name, "bfloat16")
    vitruvian.convert(source, tmp_path / "fsdp", to="fsdp", ranks=2)
    if meta:
        with init_empty_weights(include_buffers=False):
            filled = made(source)
    else:
        filled = made(source)
    loaded = vitruvian.torch.load(filled, tmp_path / "fsdp")
    assert (loaded.missing, loaded.unexpected) == ((), ())
    judge = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        assert torch.equal(filled.eval()(tokens).logits, judge.eval()(tokens).logits)
    if name == "llama-tied":
        assert filled.lm_head.weight is filled.model.embed_tokens.weight


def test_what_does_not_fit_is_refused_before_anything_is_filled(model):
    source, other = model("llama", "bfloat16"), made(model("qwen2-tied", "bfloat16"))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(vitruvian.RefusedError, match="differ in names: the checkpoint lacks") as error:
        vitruvian.torch.load(other, source)
    assert "strict=False" in error.value.hint
    with pytest.raises(vitruvian.RefusedError, match=r"BF16 in the checkpoint, torch\.float16 in the model"):
        vitruvian.torch.load(made(source, torch.float16), source)
    wider = AutoConfig.from_pretrained(source, intermediate_size=48)
    with pytest.raises(vitruvian.RefusedError, match=r"in the checkpoint, \[48, "):
        vitruvian.torch.load(AutoModelForCausalLM.from_config(wider, dtype=torch.bfloat16), source)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_rounding_and_missing_names_are_asked_for(model):
    source, wide = model("llama", "bfloat16"), made(model("llama", "float32"), torch.float32)
    vitruvian.torch.load(wide, source)  # every number of bfloat16 is one of float32
    judge = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert all(torch.equal(tensor, judge.state_dict()[name]) for name, tensor in wide.state_dict().items())
    narrow = made(source)
    with pytest.raises(vitruvian.RefusedError, match=r"F32 in the checkpoint, torch\.bfloat16 in the model"):
        vitruvian.torch.load(narrow, model("llama", "float32"))
    vitruvian.torch.load(narrow, model("llama", "float32"), cast=True)
    judge = AutoModelForCausalLM.from_pretrained(model("llama", "float32"), dtype=torch.bfloat16)
    assert all(torch.equal(tensor, judge.state_dict()[name]) for name, tensor in narrow.state_dict().items())
    grown = made(source)
    grown.extra = torch.nn.Linear(2, 2, bias=False)
    loaded = vitruvian.torch.load(grown, source, strict=False)
    assert loaded.missing == ("extra.weight",)
    assert loaded.unexpected == ()


def test_a_model_of_a_class_without_a_table_is_another_family(model):
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 211}
    opt = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **sizes))
    with pytest.raises(vitruvian.RefusedError, match=r"family: llama \| opt"):
        vitruvian.torch.load(opt, model("llama"), strict=False)


def test_numbers_that_a_type_does_not_have_are_refused(model, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(model("llama", "float32"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e30
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(vitruvian.RefusedError, match=r"model\.norm\.weight holds numbers that are too large"):
        vitruvian.torch.load(made(source, torch.float16), source, cast=True)


def test_wrapped_models_are_refused_with_a_way(model):
    source = model("llama", "bfloat16")
    wrapped = torch.nn.Module()
    wrapped.module = made(source)
    for strict in (True, False):
        with pytest.raises(vitruvian.RefusedError, match="differ in names") as error:
            vitruvian.torch.load(wrapped, source, strict=strict)
        assert error.value.hint == "the model is wrapped: load model.module"
    tied = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(source, tie_word_embeddings=True), dtype=torch.bfloat16
    )
    with pytest.raises(vitruvian.RefusedError, match="one tensor in the model, and several in the checkpoint"):
        vitruvian.torch.load(tied, source)


def test_an_open_checkpoint_takes_no_options_of_opening(model):
    checkpoint = vitruvian.open(model("llama", "bfloat16"))
    for options, message in (({"vocab_size": 7}, "is for opening"), ({"confg": 7}, "there is no option confg")):
        with pytest.raises(vitruvian.UsageError, match=message):
            next(vitruvian.torch.iterate(checkpoint, **options))
        with pytest.raises(vitruvian.UsageError, match=message):
            vitruvian.torch.load(made(checkpoint.path), checkpoint, **options)


def test_tensors_one_by_one(model, tmp_path):
    source = model("llama", "bfloat16")
    vitruvian.convert(source, tmp_path / "run", to="megatron", tp=2, pp=2)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    iterated = dict(vitruvian.torch.iterate(tmp_path / "run", prefetch=3, device="cpu"))
    assert iterated.keys() == expected.keys()
    assert all(torch.equal(iterated[name], tensor) for name, tensor in expected.items())
    checkpoint = vitruvian.open(tmp_path / "run")
    assert {name for name, _ in vitruvian.torch.iterate(checkpoint, to="fsdp")} == iterated.keys()
    shard = dict(vitruvian.torch.iterate(checkpoint, to="megatron", tp=(1, 2)))
    assert shard["output_layer.weight"].shape[0] == 128


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_sharded_models_read_their_own_rows(model, tmp_path):
    source = model("llama", "bfloat16")
    vitruvian.convert(source, tmp_path / "run", to="megatron", tp=2, pp=2)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    ran = subprocess.run(
        [*argv, str(source), str(tmp_path / "run")], capture_output=True, text=True, timeout=180, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("done") == 2


CHANGES = {
    "heads": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "norm_epsilon": {"rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("setting", CHANGES)
def test_a_model_with_other_settings_is_refused(model, tmp_path, setting):
    source = model("llama", "bfloat16")
    vitruvian.convert(source, tmp_path / "run", to="megatron")
    other = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(source, **CHANGES[setting]), dtype=torch.bfloat16
    )
    for folder in (source, tmp_path / "run"):
        for strict in (True, False):
            with pytest.raises(vitruvian.RefusedError, match=f"differ in [1-3] settings: .*{setting}: ") as error:
                vitruvian.torch.load(other, folder, strict=strict)
    accepted = ["heads", "kv_heads", "head_dim"] if setting == "heads" else [setting]
    assert f"accept={accepted}" in error.value.hint
    assert vitruvian.torch.load(other, tmp_path / "run", accept=accepted).missing == ()
    gelu = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, hidden_act="gelu"))
    with pytest.raises(vitruvian.UnsupportedError, match="config of LlamaForCausalLM: hidden_act = 'gelu'"):
        vitruvian.torch.load(gelu, tmp_path / "run", cast=True)


def test_a_longer_limit_is_another_model_where_the_scaling_computes_with_it(model):
    def shorter(source: Path) -> torch.nn.Module:
        config = AutoConfig.from_pretrained(source, max_position_embeddings=64)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    plain = model("llama", "bfloat16")
    assert vitruvian.torch.load(shorter(plain), plain).missing == ()
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    scaled = model("llama", "bfloat16", rope_parameters=rope)
    with pytest.raises(vitruvian.RefusedError, match=r"differ in 1 settings: max_positions: 128 \| 64"):
        vitruvian.torch.load(shorter(scaled), scaled)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "falcon_h1"])
def test_keys_that_the_config_leaves_to_the_class(model, tmp_path, kind):
    """The model has them written out: they were taken for another model's."""
    source = tmp_path / "hf"
    shutil.copytree(model(kind, "bfloat16"), source)
    config = json.loads((source / "config.json").read_text())
    left = {key: config[key] for key in config if key not in ("layer_types", "time_step_limit")}
    (source / "config.json").write_text(json.dumps(left))
    filled = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
    assert vitruvian.torch.load(filled, source).missing == ()
    other = {"layer_types": config["layer_types"][::-1]} if "layer_types" in config else {"time_step_limit": [0.1, 0.2]}
    strange = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, **other), dtype=torch.bfloat16)
    with pytest.raises(vitruvian.RefusedError, match=f"differ in 1 settings: {next(iter(other))}: "):
        vitruvian.torch.load(strange, source)


def test_a_model_without_a_table_with_other_settings_is_refused(tmp_path):
    config = AutoConfig.for_model("stablelm", **SMALL, partial_rotary_factor=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    assert vitruvian.open(tmp_path / "hf").family == "stablelm"

    def like_it(**changes: object) -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "hf", **changes))

    assert vitruvian.torch.load(like_it(), tmp_path / "hf").missing == ()
    for key, value in (("layer_norm_eps", 0.1), ("hidden_act", "gelu")):
        with pytest.raises(vitruvian.RefusedError, match=f"differ in 1 settings: {key}: "):
            vitruvian.torch.load(like_it(**{key: value}), tmp_path / "hf")


@pytest.mark.parametrize("name", MODELS)
def test_the_config_of_a_model_in_memory_is_that_of_its_file(tmp_path, name):
    """What a config object adds to its file, such as defaults and nulls, is no difference."""
    config = AutoConfig.for_model(**settings_of(name))
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    in_memory = json.loads(AutoConfig.from_pretrained(tmp_path).to_json_string(use_diff=False))
    first, second = (from_huggingface(each, {}, name) for each in (written, in_memory))
    assert differences(first, second) == []


def test_layers_that_share_a_block_are_one_in_the_model_and_in_the_file(tmp_path):
    """Zamba2 has a shared block in several layers, the file in the first of them alone."""
    config = AutoConfig.for_model(
        "zamba2", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6, hybrid_layer_ids=[1, 3, 5],
        num_attention_heads=4, num_key_value_heads=4, attention_head_dim=16, kv_channels=8, num_mem_blocks=1,
        mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=4, mamba_expand=2, adapter_rank=4, use_mem_rope=False,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid"], use_mamba_kernels=False,
    )  # fmt: skip
    judge = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    judge.save_pretrained(tmp_path / "hf")
    filled = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    vitruvian.torch.load(filled, tmp_path / "hf")
    assert all(torch.equal(tensor, judge.state_dict()[name]) for name, tensor in filled.state_dict().items())


TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
DECODER = {"vocab_size": 96, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
WITHOUT_TABLE: dict[str, dict[str, Any]] = {
    "Qwen2ForSequenceClassification": {**TEXT, "tie_word_embeddings": True, "num_labels": 1},
    "GemmaForSequenceClassification": {**TEXT, "head_dim": 8, "num_labels": 1},
    "LlamaForTokenClassification": {**TEXT, "tie_word_embeddings": True},
    "TrOCRForCausalLM": DECODER,
    "T5ForConditionalGeneration": {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2},
    "MambaForCausalLM": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}
"""Models without a table whose config ties: those that have no head, and those that have it under some name."""


def without_table(name: str, folder: Path) -> torch.nn.Module:
    """A model without a table, its Hugging Face folder in `hf`, and what `dcp.save` makes of it in `dcp`."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**WITHOUT_TABLE[name]))
    model.save_pretrained(folder / "hf")
    save(folder / "dcp", {"model": model.state_dict()})
    shutil.copy(folder / "hf/config.json", folder / "dcp")
    return model


@pytest.mark.parametrize("name", WITHOUT_TABLE)
def test_names_of_one_tensor_are_those_of_the_model(tmp_path, name):
    """No head is written that the model lacks, and equal tensors of a checkpoint fill one of the model."""
    model = without_table(name, tmp_path)
    expected = model.state_dict()
    for source in (tmp_path / "hf", tmp_path / "dcp"):
        out = tmp_path / f"{source.name} in fsdp"
        vitruvian.convert(source, out, to="fsdp")
        written = FileSystemReader(out).read_metadata().state_dict_metadata
        assert written.keys() == {f"model.{key}" for key in expected}
        for each in (source, out):
            filled = type(model)(model.config)
            loaded = vitruvian.torch.load(filled, each)
            assert (loaded.missing, loaded.unexpected) == ((), ())
            assert all(torch.equal(tensor, expected[key]) for key, tensor in filled.state_dict().items())


def test_tensors_that_differ_do_not_fill_one_of_the_model(tmp_path):
    model = without_table("MambaForCausalLM", tmp_path)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state["lm_head.weight"][95, 31] += 1
    save(tmp_path / "dcp", {"model": state})
    words = r"backbone\.embeddings\.weight and lm_head\.weight are one tensor in the model, and several"
    with pytest.raises(vitruvian.RefusedError, match=words):
        vitruvian.torch.load(model, tmp_path / "dcp")
