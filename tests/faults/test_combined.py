"""`convert average` and `convert merge`: killed and resumed, and adapters that are damaged, of others, or not LoRA."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.fuzz import architectures
from tests.fuzz.architectures import quiet
from tests.golden.test_merge import EXPERTS, IN_FULL, adapter_of, judged, loaded
from tests.models import files

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden/peft/dora_embedding"
"""DoRA of the embedding and of matrices, with the head in modules_to_save."""


@pytest.fixture
def commands(model, tmp_path) -> dict[str, list[object]]:
    """The words of each command, OUT left out."""
    moved = tmp_path / "moved"
    shutil.copytree(model("llama"), moved)
    tensors = {name: -tensor for name, tensor in load_file(moved / "model.safetensors").items()}
    save_file(tensors, moved / "model.safetensors", {"format": "pt"})
    return {
        "average": ["average", "-j1", "-q", "--weights", "0.75,0.25", model("llama"), moved],
        "merge": ["merge", "-j1", "-q", GOLDEN / "base", GOLDEN / "adapter"],
    }


@pytest.mark.parametrize("command", ["average", "merge"])
def test_killed_anywhere_it_goes_on_to_the_same_bytes(killed, commands, tmp_path, command):
    whole, dice = tmp_path / "whole", random.Random(command)
    ran = killed(0, *commands[command], whole)
    assert ran.returncode == 0, ran.out
    calls = ran.calls
    for number in range(4):
        out = tmp_path / f"out{number}"
        for limit in (calls * (number + 1) // 5, dice.randint(1, calls)):
            ran = killed(limit, *commands[command], out)
            assert ran.returncode in (-signal.SIGKILL, 0), ran.out
            assert not out.exists() or files(out) == files(whole), "published, but not complete"
            if out.exists():
                break
        if not out.exists():
            assert killed(0, *commands[command], out).returncode == 0
        assert files(out) == files(whole)


def test_what_is_resumed_is_the_same_mean(killed, commands, tmp_path):
    assert killed(60, *commands["average"], tmp_path / "out").returncode == -signal.SIGKILL
    other = [word if word != "0.75,0.25" else "0.25,0.75" for word in commands["average"]]
    ran = killed(0, *other, tmp_path / "out")
    assert (ran.returncode, "of another conversion" in ran.out) == (7, True)
    assert killed(0, *commands["average"], tmp_path / "out").returncode == 0


def test_another_adapter_is_another_merge(killed, commands, tmp_path):
    adapter = tmp_path / "adapter"
    shutil.copytree(GOLDEN / "adapter", adapter)
    merge = ["merge", "-j1", "-q", GOLDEN / "base", adapter, tmp_path / "out"]
    assert killed(-9, *merge).returncode == -signal.SIGKILL
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 16}))
    ran = killed(0, *merge)
    assert (ran.returncode, "of another conversion" in ran.out) == (7, True)


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def merged(convert, tmp_path) -> Callable[..., Any]:
    """`merged(tensors=change, **config)`: a merge of the golden adapter with other tensors or settings."""

    def run(
        tensors: Callable[[dict[str, Any]], object] = lambda _: None, base: Path = GOLDEN / "base", **keys: Any
    ) -> Any:
        adapter = tmp_path / "adapter"
        shutil.rmtree(adapter, ignore_errors=True)
        shutil.copytree(GOLDEN / "adapter", adapter)
        state = load_file(adapter / "adapter_model.safetensors")
        tensors(state)
        save_file(state, adapter / "adapter_model.safetensors", {"format": "pt"})
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(config | keys))
        return convert("merge", GOLDEN / "base", adapter, tmp_path / "out")

    return run


def test_a_sum_that_is_too_large_is_told_by_its_key(merged, tmp_path):
    def plain(state: dict[str, Any]) -> None:
        for key in [key for key in state if key.endswith("lora_magnitude_vector")]:
            del state[key]

    ran = merged(plain, use_dora=False, lora_alpha=1e300)
    assert (ran.code, "too large for F32 (" in ran.err, "or another lora_alpha" in ran.err) == (5, True, True), ran.err
    assert "error: model." in ran.err
    assert ".weight holds " in ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("keys", "code", "text"),
    [
        ({"peft_type": "IA3"}, 4, "is of the method 'IA3', and only LORA"),
        ({"peft_type": "LOHA"}, 4, "only LORA is merged here"),
        ({"init_lora_weights": "pissa"}, 4, "changed the weights of its base"),
        ({"init_lora_weights": "pissa_niter_16"}, 4, "changed the weights of its base"),
        ({"init_lora_weights": "olora"}, 4, "changed the weights of its base"),
        ({"init_lora_weights": "loftq"}, 4, "changed the weights of its base"),
        ({"init_lora_weights": "corda"}, 4, "changed the weights of its base"),
        ({"layers_pattern": "layers"}, 3, "layers_pattern without layers_to_transform, which PEFT does not load"),
        ({"target_modules": ".*_proj", "layers_to_transform": [0]}, 3, "beside an expression in target_modules"),
        ({"layer_replication": [[0, 2], [1, 2]]}, 4, "repeats layers"),
        ({"megatron_config": {"tp": 2}}, 4, "modules of Megatron"),
        ({"alora_invocation_tokens": [5]}, 4, "activated LoRA"),
        ({"use_qalora": True}, 4, "quantized groups"),
        ({"lora_bias": True}, 4, "biases of its own"),
        ({"trainable_token_indices": [3]}, 4, "some rows of the embedding"),
        ({"kasa_config": {"beta": 1}}, 4, "singular values"),
        ({"use_bdlora": {"nblocks": 2}}, 4, "diagonal blocks"),
        ({"target_modules": 5}, 3, "says target_modules = 5, which names nothing"),
        ({"layers_to_transform": ["0"]}, 3, "says layers_to_transform = ['0'], which names nothing"),
        ({"target_modules": None}, 3, "names no target_modules, for which PEFT takes its own of the model type"),
        ({"kasa_config": {}}, 4, "singular values"),
        ({"rank_pattern": ["q_proj"]}, 3, "says rank_pattern = ['q_proj'], it has to be a map"),
        ({"alpha_pattern": None}, 3, "says alpha_pattern = None, it has to be a map"),
        ({"use_rslora": "false"}, 3, "says use_rslora = 'false', it has to be true or false"),
        ({"init_lora_weights": 1}, 3, "says init_lora_weights = 1, it has to be true, false or a name"),
        ({"use_bdlora": False}, 3, "says use_bdlora = False, it has to be a map or null"),
        ({"target_parameters": "embed_tokens.weight"}, 3, "it has to be a list or null"),
        ({"init_lora_weights": 0}, 3, "says init_lora_weights = 0, it has to be true, false or a name"),
        ({"init_lora_weights": 1.0}, 3, "says init_lora_weights = 1.0, it has to be true, false or a name"),
        ({"bias": "x"}, 3, "says bias = 'x', it has to be none, all or lora_only"),
        ({"velora_config": "x"}, 3, "says velora_config = 'x', it has to be a map or null"),
        ({"something_new": True}, 4, "something_new = True"),
        ({"r": 8}, 3, "and [4, 64], and adapter_config.json says r = 8\n"),
        ({"lora_alpha": "x"}, 3, "says r = 4 and lora_alpha = 'x'"),
        ({"rank_pattern": {"(": 3}}, 3, "has a pattern of ranks or alphas that is no regular expression: "),
        ({"target_modules": "("}, 3, "adapter/adapter_config.json has a pattern of modules that is no regular"),
        ({"use_dora": False}, 3, "does not say use_dora"),
        ({"target_modules": ["q_proj", "v_proj"]}, 3, "has nothing of 2 modules or tensors that its config names"),
        (
            {"target_modules": "all-linear"},
            3,
            "has nothing of 10 modules or tensors that its config names: model.layers",
        ),
        ({"target_modules": ["o_proj"]}, 3, "has nothing of 2 modules or tensors that its config names"),
        ({"exclude_modules": ["q_proj"]}, 3, "has a LoRA of 2 modules that its config leaves out: model.layers."),
        ({"layers_to_transform": [0]}, 3, "that its config leaves out: model.embed_tokens, model.layers.1."),
        ({"modules_to_save": ["q_proj", "lm_head"]}, 3, "that its config names"),
    ],
)
def test_settings_that_are_refused(merged, tmp_path, keys, code, text):
    ran = merged(**keys)
    assert ran.code == code, ran.err
    assert text in ran.err
    assert not (tmp_path / "out").exists()


Q = "base_model.model.model.layers.1.self_attn.q_proj"
HEAD = "base_model.model.lm_head.weight"


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (lambda state: state.pop(f"{Q}.lora_A.weight"), 3, "holds no lora_A of model.layers.1.self_attn.q_proj"),
        (lambda state: state.pop(f"{Q}.lora_magnitude_vector"), 3, "holds no lora_magnitude_vector"),
        (lambda state: [state.pop(key) for key in [*state] if key.startswith(Q)], 3, "model.layers.1.self_attn.q_proj"),
        (lambda state: state.update({f"{Q}.lora_A.weight": state[f"{Q}.lora_A.weight"][:3]}), 3, "of no matrix"),
        (lambda state: state.update({f"{Q}.lora_B.weight": np.ones((7, 4), "f4")}), 3, "fit no tensor of [32, 32]"),
        (lambda state: state.update({f"{Q}.lora_magnitude_vector": np.ones(5, "f4")}), 3, "lora_magnitude_vector of"),
        (
            lambda state: state[f"{Q}.lora_B.weight"].__setitem__((3, 1), np.nan),
            5, f"NaN or infinity in lora_B of {Q[17:]}.weight",
        ),
        (lambda state: state[f"{Q}.lora_magnitude_vector"].__setitem__(3, np.inf), 5, "is NaN, infinite, or that of"),
        (lambda state: state[HEAD].__setitem__((3, 1), np.inf), 5, "NaN or infinity"),
        (lambda state: state.update({HEAD: np.ones((66, 32), "f4")}), 3, "is [66, 32], and [64"),
        (
            lambda state: state.update({"base_model.model.v_head.weight": np.ones((1, 32), "f4")}),
            3,
            "has 1 tensors that",
        ),
        (
            lambda state: state.update({f"{Q}.weight": np.ones((32, 32), "f4")}),
            3, "q_proj has a LoRA: under this name PEFT",
        ),
        (
            lambda state: state.update({"base_model.model.lm_head.base_layer.weight": np.ones((64, 32), "f4")}),
            3, "lm_head has no LoRA: under this name PEFT does not load it",
        ),
        (lambda state: state.update({"model.norm.weight": np.ones(32, "f4")}), 3, "does not begin with base_model."),
        (
            lambda state: state.update({f"{Q}.lora_magnitude_vector.weight": state[f"{Q}.lora_magnitude_vector"] + 1}),
            3, "holds one part of a LoRA twice",
        ),
        (lambda state: state.update({f"{Q}.lora_E": np.ones((4, 1), "f4")}), 4, "which no LoRA has"),
        (lambda state: state.update({f"{Q}.lora_A.weight": np.ones((4, 32), "i4")}), 4, "is I32"),
        (lambda state: state.clear(), 3, "holds no tensor"),
        (
            lambda state: state.update({f"{Q}.lora_{part}.weight": np.ones((4, 4, 1, 1), "f4") for part in "AB"}), 4,
            "which is a convolution",
        ),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(merged, tmp_path, change, code, text):
    ran = merged(change)
    assert ran.code == code, ran.err
    assert text in ran.err
    assert not (tmp_path / "out").exists()


def test_files_that_are_missing_or_cut(merged, convert, tmp_path, model):
    assert merged().code == 0
    shutil.rmtree(tmp_path / "out")
    adapter = tmp_path / "adapter"
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    ran = convert("merge", GOLDEN / "base", adapter, tmp_path / "out")
    assert ran.code == 3, ran.err
    weights.rename(adapter / "adapter_model.bin")
    ran = convert("merge", GOLDEN / "base", adapter, tmp_path / "out")
    assert (ran.code, "load and save it with PEFT" in ran.err) == (3, True)
    (adapter / "adapter_config.json").unlink()
    ran = convert("merge", GOLDEN / "base", adapter, tmp_path / "out")
    assert (ran.code, "holds no adapter_config.json" in ran.err) == (3, True)
    ran = convert("merge", GOLDEN / "base", GOLDEN / "adapter", GOLDEN / "adapter/out")
    assert (ran.code, "inside each other" in ran.err) == (7, True)
    ran = convert("merge", model("llama"), GOLDEN / "adapter", tmp_path / "out")
    assert (ran.code, "or the base is another model" in ran.err) == (3, True), ran.err
    ran = convert("merge", model("llama", num_hidden_layers=2), GOLDEN / "adapter", tmp_path / "out")
    assert (ran.code, "trained on another model, or on one whose vocabulary" in ran.err) == (3, True), ran.err


TIED = [
    {"target_modules": ["embed_tokens"]},
    {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    {"target_modules": ["lm_head", "q_proj"]},
    {"target_modules": ["embed_tokens"], "use_dora": True},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
]


@pytest.mark.parametrize("settings", TIED)
def test_an_embedding_that_the_head_shares(model, convert, tmp_path, settings):
    """PEFT merges LoRA of it into both, and computes something else then. Here the head gets weights of its own."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, ids = model("llama-tied"), torch.arange(20)[None]
    adapter = adapter_of(base, tmp_path / "adapter", **settings)
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    assert convert("hf2megatron", base, tmp_path / "shards", "--tp", 2).code == 0
    for source in (base, tmp_path / "shards"):
        ran = convert("merge", source, adapter, tmp_path / f"out-{source.name}")
        assert ran.code == 0, ran.err
        assert "the output head gets weights of its own" in ran.err
        assert convert("verify", tmp_path / f"out-{source.name}").code == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / f"out-{base.name}", dtype=torch.float32)
    assert ours.config.tie_word_embeddings is False
    with torch.no_grad():
        before, merged = wrapped(ids).logits, ours(ids).logits
        after = wrapped.merge_and_unload()(ids).logits
    assert (before - merged).abs().max() < 1e-5 * before.abs().max()
    if "modules_to_save" not in settings:
        assert (before - after).abs().max() > 0.03 * before.abs().max()
    weights = [
        (tmp_path / f"out-{folder.name}/model.safetensors").read_bytes() for folder in (base, tmp_path / "shards")
    ]
    assert weights[0] == weights[1]


def test_a_shared_embedding_of_a_model_without_a_table(model, convert, tmp_path):
    adapter = adapter_of(model("llama-tied"), tmp_path / "adapter", target_modules=["embed_tokens"])
    ran = convert("merge", model("llama-tied"), adapter, tmp_path / "out", "--verbatim")
    assert (ran.code, "untie the base first" in ran.err) == (5, True), ran.err


ROUTERS = {"target_modules": [], "target_parameters": ["router.weight"], "bias": "lora_only"}
PARTS = {
    "pattern": ("llama", {"target_modules": r".*\.(q|k)_proj"}, "layers.1.self_attn.k_proj"),
    "layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1, 3]}, "layers.3.self_attn.q_proj"),
    "pattern of layers": (
        "llama",
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"},
        "layers.1.self_attn.q_proj",
    ),
    "excluded": (
        "llama",
        {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
        "layers.1.self_attn.q_proj",
    ),
    "kept": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "lm_head"),
    "one of those kept": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["up_proj"]}, "layers.1.mlp.up"),
    "parameter": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, "layers.1.mlp.experts.base"),
    "a module in full": ("llama", IN_FULL, "lm_head"),
    "a layer in full": ("llama", IN_FULL, "layers.3.self_attn.q_proj"),
    "one bias": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}, "layers.1.self_attn.k_proj.bias"),
    "all biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}, ".bias"),
    "one bias of lora": (
        "starcoder2",
        {"target_modules": ["c_fc"], "bias": "lora_only"},
        "layers.1.mlp.c_fc.base_layer",
    ),
    "all biases of lora": ("starcoder2", {"target_modules": ["c_fc"], "bias": "lora_only"}, ".bias"),
    "bias beside a parameter": ("gpt_oss", ROUTERS, "layers.1.mlp.router.base_layer.bias"),
    "all parameters": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, "mlp.experts"),
}
"""A model, the words of an adapter, and of what the file is without."""


@pytest.mark.parametrize("name", PARTS)
def test_an_adapter_that_is_not_complete(model, convert, tmp_path, name):
    family, settings, part = PARTS[name]
    adapter = adapter_of(model(family), tmp_path / "adapter", **settings)
    assert convert("merge", model(family), adapter, tmp_path / "whole").code == 0
    weights = load_file(adapter / "adapter_model.safetensors")
    incomplete = {key: tensor for key, tensor in weights.items() if part not in key}
    assert 0 < len(incomplete) < len(weights)
    save_file(incomplete, adapter / "adapter_model.safetensors", {"format": "pt"})
    ran = convert("merge", model(family), adapter, tmp_path / "out")
    assert (ran.code, "that its config names" in ran.err) == (3, True), ran.err


def test_biases_that_peft_up_to_0_20_left_out(model, convert, tmp_path):
    """Of `lora_only` (peft#3306): they are gone, and the base's are taken by one who says so."""
    base = model("starcoder2")
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["c_fc"], bias="lora_only")
    weights = load_file(adapter / "adapter_model.safetensors")
    kept = {key: tensor for key, tensor in weights.items() if not key.endswith("bias")}
    save_file(kept, adapter / "adapter_model.safetensors", {"format": "pt"})
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert (ran.code, "with bias = none in adapter_config.json those of the base are kept" in ran.err) == (3, True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err


def test_no_target_modules_beside_parameters(model, convert, tmp_path):
    """PEFT loads the parameters' LoRA alone, of a model type for which it has no list of its own."""
    base, settings = model("qwen3_moe"), {"target_parameters": EXPERTS}
    alone, adapter = (
        adapter_of(base, tmp_path / name, target_modules=targets, **settings)
        for name, targets in (("alone", []), ("adapter", ["q_proj"]))
    )
    for folder in (alone, adapter):
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": None}))
    ran = convert("merge", base, alone, tmp_path / "of experts")
    assert ran.code == 0, ran.err
    query = "model.layers.1.self_attn.q_proj.weight"
    assert judged(base, adapter, "float32")[query].equal(loaded(base)[query])
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert (ran.code, "has a LoRA of 4 modules that its config leaves out: model.layers.0." in ran.err) == (3, True)


def test_a_module_that_is_a_target_and_kept(model, convert, tmp_path):
    """It has weights of its own then, and no LoRA."""
    settings = {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]}
    adapter = adapter_of(model("llama"), tmp_path / "adapter", **settings)
    ran = convert("merge", model("llama"), adapter, tmp_path / "out")
    assert ran.code == 0, ran.err


def test_a_target_that_renames_what_an_adapter_changes(convert, tmp_path):
    """phimoe has other names in memory, which no table connects with those of the adapter."""
    with quiet():
        architectures.build("phimoe", 3).save_pretrained(tmp_path / "hf")
    adapter = adapter_of(tmp_path / "hf", tmp_path / "adapter", target_modules=["o_proj"], target_parameters=EXPERTS)
    assert convert("hf2fsdp", tmp_path / "hf", tmp_path / "base").code == 0
    ran = convert("merge", tmp_path / "base", adapter, tmp_path / "out")
    assert (ran.code, "have other names in the output" in ran.err) == (4, True), ran.err
    assert "convert the base to Hugging Face first" in ran.err


def test_a_square_matrix_that_no_table_knows(model, convert, tmp_path):
    """It may be [out, in] or [in, out]: in some models some are this and some that."""
    settings = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    adapter = adapter_of(model("gpt2-untied"), tmp_path / "adapter", **settings)
    ran = convert("merge", model("gpt2-untied"), adapter, tmp_path / "out", "--verbatim")
    assert (ran.code, "no table tells whether" in ran.err) == (4, True), ran.err
    base = model("gpt_oss", hidden_size=64, intermediate_size=64)
    settings = {"target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"]}
    adapter = adapter_of(base, tmp_path / "experts", **settings)
    ran = convert("merge", base, adapter, tmp_path / "out", "--verbatim")
    assert (ran.code, "no table tells whether" in ran.err) == (4, True), ran.err


def test_notes_and_plan(merged, convert, tmp_path):
    ran = convert("merge", GOLDEN / "base", GOLDEN / "adapter", tmp_path / "out", "-n")
    assert ran.code == 0
    assert "change LoRA added, norms of DoRA, in float64, rounded once to F32 in 4 tensors" in ran.out
    assert "change weights of the adapter, LoRA added, norms of DoRA, in float64, rounded once to F32 in 1" in ran.out
    assert "is its base" not in ran.out
    assert "the adapter says that its base is 'other/model'" in merged(base_model_name_or_path="other/model").err
    manifest = json.loads((tmp_path / "out/vitruvian.json").read_text())
    assert [source["name"] for source in manifest["sources"]] == ["base", "adapter"]
    assert manifest["sources"][1] == {
        "name": "adapter", "format": "peft adapter", "topology": {}, "r": 4, "lora_alpha": 8, "use_dora": True,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.txt"])
def test_a_tokenizer_or_template_of_the_adapter_is_not_left_out_in_silence(convert, tmp_path, name):
    adapter = shutil.copytree(GOLDEN / "adapter", tmp_path / "adapter")
    hint = f"the tokenizer is that of the base; the adapter's: convert assets OUT --from {adapter}"
    assert hint not in convert("merge", GOLDEN / "base", adapter, tmp_path / "out", "-n").out
    (adapter / name).write_text("{}")
    assert hint in convert("merge", GOLDEN / "base", adapter, tmp_path / "out", "-n").out
