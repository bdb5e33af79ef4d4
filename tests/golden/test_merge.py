"""`convert merge` against PEFT itself: `merge_and_unload` in float64, rounded once, is what we write, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.test_mtp import with_second
from tests.models import nearest_bfloat16

HERE = Path(__file__).parent / "peft"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CONV1D = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
PATTERNS = {
    "rank_pattern": {"down_proj": 3, r"layers.2.*.q_proj": 7},
    "alpha_pattern": {"v_proj": 5, "layers.1.self_attn.k_proj": 2.5},
}
SOME = {"layers_to_transform": [1, 3], "layers_pattern": "layers"}
IN_FULL = {"target_modules": ["v_proj", "lm_head", "model.layers.3.self_attn.q_proj"], "layers_to_transform": [0, 1]}
"""Modules that are named in full, which have a LoRA in spite of `layers_to_transform`."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "every matrix": ("llama", {"target_modules": [*LINEAR, "lm_head"]}),
    "patterns": ("llama", {"target_modules": "all-linear", "use_rslora": True, **PATTERNS}),
    "dora": ("qwen3", {"target_modules": LINEAR, "use_dora": True}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "dora of an embedding": ("llama", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    "some layers": ("llama", {"target_modules": ["q_proj"], **SOME}),
    "some layers and modules in full": ("llama", IN_FULL),
    "excluded": ("llama", {"target_modules": r".*\.(q|k)_proj", "exclude_modules": r".*layers\.0.*"}),
    "biases": ("qwen2", {"target_modules": ["q_proj", "v_proj"], "bias": "all"}),
    "biases of lora": ("starcoder2", {"target_modules": ["q_proj", "c_fc"], "bias": "lora_only"}),
    "input-major": ("gpt2-untied", {**CONV1D, "target_modules": ["c_attn", "c_proj", "c_fc", "lm_head"]}),
    "dora of input-major": ("gpt2-untied", {**CONV1D, "use_dora": True}),
    "fused projections": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"], "use_dora": True}),
    "fused heads": ("gpt_neox", {"target_modules": ["query_key_value", "dense", "dense_h_to_4h"]}),
    "latents": ("deepseek_v3", {"target_modules": ["kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj"]}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "one of experts": ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS[1:], "use_rslora": True}),
    "input-major experts": ("gpt_oss", {"target_modules": [], "target_parameters": EXPERTS}),
}


def adapter_of(base: Path, out: Path, rows: int | None = None, build: Any = None, **settings: Any) -> Path:
    """A trained adapter of a model, with so many rows of its vocabulary, as PEFT saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = (build or AutoModelForCausalLM).from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(7)  # PEFT draws one of the two matrices
    if rows is not None:
        model.resize_token_embeddings(rows)
    config = LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 9, **settings})
    wrapped = get_peft_model(model, config)
    dice = torch.Generator().manual_seed(7)
    for name, tensor in sorted(wrapped.named_parameters()):
        if tensor.requires_grad:
            tensor.data += 0.1 * torch.randn(tensor.shape, generator=dice)
            assert "lora_" in name or "modules_to_save" in name or name.endswith("bias")
    wrapped.save_pretrained(out)
    return out


def judged(base: Path, adapter: Path, dtype: str, rows: int | None = None, build: Any = None) -> dict[str, Any]:
    """What PEFT makes of both, computed in an element type."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = (build or AutoModelForCausalLM).from_pretrained(base, dtype=getattr(torch, dtype))
    if rows is not None:
        model.resize_token_embeddings(rows)
    wrapped = PeftModel.from_pretrained(model, adapter).to(getattr(torch, dtype))
    state: dict[str, Any] = wrapped.merge_and_unload().state_dict()
    return state


def loaded(folder: Path) -> dict[str, Any]:
    """What transformers loads, in the element type of the files."""
    from transformers import AutoModelForCausalLM

    state: dict[str, Any] = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    return state


def apart(tensor: Any, other: Any) -> float:
    """The largest difference of two tensors."""
    return (tensor.double() - other.double()).abs().max().item()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_peft_in_float64_rounded_once(model, convert, tmp_path, name):
    import torch

    family, settings = CASES[name]
    base = model(family)
    adapter = adapter_of(base, tmp_path / "adapter", **settings)
    ran = convert("merge", base, adapter, tmp_path / "out", "--memory", "192KiB")
    assert ran.code == 0, ran.err
    ours, before = loaded(tmp_path / "out"), loaded(base)
    exact, single = judged(base, adapter, "float64"), judged(base, adapter, "float32")
    assert exact.keys() == ours.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, exact[key].float()), key
        # PEFT's own float32 rounds each term of the product, the norm of a row of DoRA, and the sum
        assert apart(tensor, single[key]) <= 2**-21 * tensor.abs().max().item(), key
    assert sum(not torch.equal(tensor, before[key]) for key, tensor in ours.items()) > 1
    assert convert("verify", tmp_path / "out").code == 0


WORDS = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("family", "rows", "kept"),
    [("llama", 259, WORDS), ("llama", 208, WORDS[1:]), ("llama", 259, None), ("llama-tied", 259, WORDS)],
)
def test_a_vocabulary_that_was_resized(model, convert, tmp_path, family, rows, kept):
    """New tokens of a chat; or fewer rows than were padded. PEFT saves what it was before too, and twice."""
    import torch

    base = model(family)
    adapter = adapter_of(base, tmp_path / "adapter", rows, target_modules=["q_proj"], modules_to_save=kept)
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert f"the vocabulary has {rows} rows, as the adapter was trained with, and 211 in the base" in ran.err
    ours, exact = loaded(tmp_path / "out"), judged(base, adapter, "float64", rows)
    assert exact.keys() == ours.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, exact[key].float()), key
    assert convert("hf2megatron", base, tmp_path / "run", "--tp", 2).code == 0
    ran = convert("merge", tmp_path / "run", adapter, tmp_path / "from")
    assert ran.code == 0, ran.err
    assert (tmp_path / "from/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_a_head_that_was_tied_with_a_vocabulary_that_was_resized(model, convert, tmp_path):
    """Its LoRA is not the embedding's, to which PEFT's own merge adds it too."""
    import torch
    from safetensors.torch import load_file

    base = model("llama-tied")
    adapter = adapter_of(base, tmp_path / "adapter", 259, target_modules=["lm_head"])
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err
    ours, exact = loaded(tmp_path / "out"), judged(base, adapter, "float64", 259)
    before = load_file(adapter / "adapter_model.safetensors")["base_model.model.lm_head.base_layer.weight"]
    assert torch.equal(ours["lm_head.weight"], exact["lm_head.weight"].float())
    assert torch.equal(ours["model.embed_tokens.weight"], before)


def test_a_vocabulary_of_which_the_adapter_has_a_half(model, convert, tmp_path):
    from safetensors.torch import load_file, save_file

    adapter = adapter_of(model("llama"), tmp_path / "adapter", 259, target_modules=["q_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, adapter / "adapter_model.safetensors")
    ran = convert("merge", model("llama"), adapter, tmp_path / "out")
    assert (ran.code, "embed_tokens.weight is [259, 64], and [211, 64] in" in ran.err) == (3, True), ran.err


@pytest.mark.parametrize("family", ["llama", "dots1", "qwen3_next"])
def test_all_linear_is_what_peft_takes_it_for(model, convert, tmp_path, family):
    """PEFT writes the list that it makes of the word; what it is not, such as `mlp` beside experts, may be missing."""
    from safetensors.numpy import load_file, save_file

    base = model(family)
    adapter = adapter_of(base, tmp_path / "adapter", target_modules="all-linear")
    assert convert("merge", base, adapter, tmp_path / "listed").code == 0
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": "all-linear"}))
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err
    listed, other = (tmp_path / name / "model.safetensors" for name in ("listed", "out"))
    assert listed.read_bytes() == other.read_bytes()
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "v_proj" not in name}, file)
    for more in ([], ["--verbatim"]) if family == "llama" else ([],):
        ran = convert("merge", base, adapter, tmp_path / "some", *more)
        assert (ran.code, "self_attn.v_proj" in ran.err) == (3, True), ran.err
        assert "then name those that were in target_modules" in ran.err


def test_the_output_head_is_not_in_all_linear(model, convert, tmp_path):
    """PEFT would not load its LoRA."""
    listed = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    adapter = adapter_of(model("llama"), tmp_path / "adapter", target_modules=listed)
    assert convert("merge", model("llama"), adapter, tmp_path / "listed").code == 0
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": "all-linear"}))
    ran = convert("merge", model("llama"), adapter, tmp_path / "out")
    assert (ran.code, "a LoRA of 1 modules that its config leaves out: lm_head" in ran.err) == (3, True), ran.err


SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
UNTABLED_EXPERTS = {
    "jetmoe": ("router.layer", True, True, {"num_local_experts": 4}),
    "doge": ("router_gate", True, False, {"is_moe": True, "num_experts": 4}),
    "aria_text": ("router", False, False, {"moe_num_experts": 4, "moe_topk": 2}),
    "jamba": (
        "router", False, False,
        {"num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
         "expert_layer_period": 1, "expert_layer_offset": 0},
    ),
}  # fmt: skip
"""Model type without a table: its router, whether it is a linear layer, whether all its matrices are, and settings.
Doge has matrices of experts that are embeddings."""


@pytest.mark.parametrize("kind", UNTABLED_EXPERTS)
def test_routers_in_all_linear_of_a_model_without_a_table(convert, tmp_path, kind):
    """Whether PEFT gives a router a LoRA depends on its class: where it did not, the word is refused, by name."""
    from safetensors.numpy import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    router, is_linear, all_are, settings = UNTABLED_EXPERTS[kind]
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **settings)).save_pretrained(base)
    adapter = adapter_of(base, tmp_path / "adapter", target_modules="all-linear")
    names = load_file(adapter / "adapter_model.safetensors").keys()
    assert any(f".{router}.lora_A" in name for name in names) == is_linear
    config = json.loads((adapter / "adapter_config.json").read_text())
    listed = convert("merge", base, adapter, tmp_path / "listed")
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": "all-linear"}))
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert listed.code == 0, listed.err
    if all_are:
        assert ran.code == 0, ran.err
        out, other = (tmp_path / name / "model.safetensors" for name in ("out", "listed"))
        assert out.read_bytes() == other.read_bytes()
    else:
        assert (ran.code, "no table tells which matrices" in ran.err) == (3, True), ran.err
        assert "then name those that were in target_modules" in ran.err


def test_experts_one_by_one_in_files_are_no_modules(convert, tmp_path):
    """A model without a table has them as one tensor in memory, so PEFT finds the names in dense layers alone."""
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    base, settings = tmp_path / "base", UNTABLED_EXPERTS["jamba"][3] | {"expert_layer_period": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("jamba", **SMALL, **settings)).save_pretrained(base)
    assert any(".experts.0.down_proj" in key for key in load_file(base / "model.safetensors"))
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["gate_proj", "up_proj", "down_proj"])
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err
    want = tmp_path / "want"
    build = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    build.load_state_dict({key: tensor.float() for key, tensor in judged(base, adapter, "float64").items()})
    build.save_pretrained(want)
    exact = loaded(want)
    for key, tensor in loaded(tmp_path / "out").items():
        assert torch.equal(tensor, exact[key]), key
    factors = load_file(adapter / "adapter_model.safetensors")
    kept = {key: tensor for key, tensor in factors.items() if ".up_proj." not in key}
    save_file(kept, adapter / "adapter_model.safetensors")
    ran = convert("merge", base, adapter, tmp_path / "less")
    assert (ran.code, "has nothing of 1 modules" in ran.err, ".experts." in ran.err) == (3, True, False), ran.err


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}])
def test_an_embedding_that_is_square(model, convert, tmp_path, settings):
    """Its shape tells no longer that LoRA of an embedding is added transposed, table or none."""
    import torch

    base = model("llama", vocab_size=64)
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"], **settings)
    exact = judged(base, adapter, "float64")
    assert exact["model.embed_tokens.weight"].shape == (64, 64)
    for name, more in (("table", []), ("none", ["--verbatim"])):
        ran = convert("merge", base, adapter, tmp_path / name, *more)
        assert ran.code == 0, ran.err
        for key, tensor in loaded(tmp_path / name).items():
            assert torch.equal(tensor, exact[key].float()), key


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "mixtral"])
def test_experts_that_are_square(model, convert, tmp_path, family):
    """Both [in, out] in GPT-OSS and Llama 4, of which PEFT takes those of Llama 4 for [out, in]."""
    import torch

    base = model(family, intermediate_size=64)
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=[], target_parameters=EXPERTS[1:])
    exact = judged(base, adapter, "float64")
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err
    for key, tensor in loaded(tmp_path / "out").items():
        assert torch.equal(tensor, exact[key].float()), key


def test_several_parameters_of_a_module_that_no_table_knows(convert, tmp_path):
    """PEFT goes by their order in memory: q, k, v. That of the files is k, q, v."""
    import torch
    from transformers import XLNetConfig, XLNetLMHeadModel

    config = XLNetConfig(vocab_size=96, d_model=32, n_layer=1, n_head=4, d_inner=48)
    base = tmp_path / "base"
    XLNetLMHeadModel(config).save_pretrained(base)
    attention = ["rel_attn.q", "rel_attn.k", "rel_attn.v"]
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=[], target_parameters=attention)
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err
    exact = judged(base, adapter, "float64")
    for key, tensor in loaded(tmp_path / "out").items():
        assert torch.equal(tensor, exact[key].float()), key
    ran = convert("merge", base, adapter, tmp_path / "unknown", "--verbatim")
    assert (ran.code, "PEFT names them by the order in which" in ran.err) == (4, True), ran.err


def test_experts_of_a_model_that_no_table_knows(convert, tmp_path):
    """Of two shapes: `down_proj` is before `gate_up_proj` in the files."""
    import torch
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    base, build = tmp_path / "base", Qwen3VLMoeForConditionalGeneration
    build(Qwen3VLMoeConfig(text_config=text, vision_config=vision)).save_pretrained(base)
    adapter = adapter_of(base, tmp_path / "adapter", build=build, target_modules=[], target_parameters=EXPERTS)
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err
    exact = judged(base, adapter, "float64", build=build)
    for key, tensor in build.from_pretrained(tmp_path / "out", dtype="auto").state_dict().items():
        assert torch.equal(tensor, exact[key].float()), key


@pytest.mark.parametrize("name", ["every matrix", "dora", "input-major", "experts"])
def test_one_rounding_to_bfloat16(model, convert, tmp_path, name):
    """PEFT's float32 rounds before that: where it comes to lie in the middle of two, its own rounding goes astray."""
    import torch

    family, settings = CASES[name]
    base = model(family, "bfloat16")
    adapter = adapter_of(base, tmp_path / "adapter", **settings)
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err
    exact, single = judged(base, adapter, "float64"), judged(base, adapter, "float32")
    odd = total = 0
    for key, tensor in loaded(tmp_path / "out").items():
        want = torch.from_numpy(nearest_bfloat16(exact[key].double().numpy()).view(np.int16)).view(torch.bfloat16)
        assert torch.equal(tensor, want), key
        odd += int((tensor != single[key].bfloat16()).sum())
        total += tensor.numel()
    assert odd <= 1e-4 * total


@pytest.mark.parametrize("name", ["dora_embedding", "rslora_patterns"])
def test_golden_logits(convert, tmp_path, name):
    """Written by peft 0.21.2 and transformers 5.23.0, elsewhere."""
    import torch
    from transformers import AutoModelForCausalLM

    ran = convert("merge", HERE / name / "base", HERE / name / "adapter", tmp_path / "out")
    assert ran.code == 0, ran.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(np.load(HERE / name / "golden_ids.npy"))).logits.numpy()
    assert np.abs(logits - np.load(HERE / name / "golden_logits.npy")).max() < 5e-7


@pytest.mark.parametrize("to", ["hf2megatron --tp 2 --pp 2", "hf2fsdp --ranks 3"])
def test_a_base_of_any_format_gives_the_same_bytes(model, convert, tmp_path, to):
    base = model("qwen3", "bfloat16")
    adapter = adapter_of(base, tmp_path / "adapter", **CASES["dora"][1])
    command, *options = to.split()
    assert convert(command, base, tmp_path / "moved", *options).code == 0
    for number, folder in enumerate((base, tmp_path / "moved")):
        assert (
            convert("merge", folder, adapter, tmp_path / f"out{number}", "--memory", f"{number * 3 + 1}MiB").code == 0
        )
    first, second = ((tmp_path / f"out{number}/model.safetensors").read_bytes() for number in range(2))
    assert first == second


def test_the_layer_that_predicts_a_second_token_is_kept(model, convert, tmp_path):
    """ms-swift#6447 merged GLM-4.5 in transformers, which loads no such layer: the merged model came out without it.

    Its attention has LoRA of its own here, as a training in Megatron gives it.
    """
    import torch
    from safetensors.torch import load_file, save_file

    base = with_second(model("glm4_moe"), tmp_path / "base")
    layers, second = "model.layers.3.self_attn.q_proj", "model.layers.4.self_attn.q_proj"
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    path = adapter / "adapter_model.safetensors"
    factors = load_file(path)
    factors |= {
        name.replace("layers.3.", "layers.4."): -tensor for name, tensor in factors.items() if "layers.3." in name
    }
    save_file(factors, path, {"format": "pt"})
    before, kept = load_file(base / "model.safetensors"), judged(base, adapter, "float32")
    assert not any(name.startswith("model.layers.4.") for name in kept)
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err
    after = load_file(tmp_path / "out/model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(5)}
    deltas = [after[f"{name}.weight"].double() - before[f"{name}.weight"].double() for name in (layers, second)]
    assert apart(*deltas) < 1e-6 < deltas[0].abs().max().item()


@pytest.mark.parametrize("rows", [None, 259])
def test_an_adapter_of_a_model_without_the_layer_that_predicts_a_second_token(model, convert, tmp_path, rows):
    """As transformers trains it; copies of embedding and head in that layer are what those become."""
    from safetensors.torch import load_file, save_file

    base = with_second(model("deepseek_v3"), tmp_path / "base")
    before = load_file(base / "model.safetensors")
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    before |= {f"model.layers.4.{name}.weight": before[key].clone() for name, key in copies.items()}
    save_file(before, base / "model.safetensors", {"format": "pt"})
    settings = {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    adapter = adapter_of(base, tmp_path / "adapter", rows, **settings)
    ran = convert("merge", base, adapter, tmp_path / "out")
    assert ran.code == 0, ran.err
    after, exact = load_file(tmp_path / "out/model.safetensors"), judged(base, adapter, "float64", rows)
    assert after.keys() == before.keys()
    for name, key in copies.items():
        assert after[f"model.layers.4.{name}.weight"].equal(after[key])
        assert after[key].equal(exact[key].float())
    assert convert("merge", base, adapter, tmp_path / "less", "--drop", "mtp").code == 0


def test_a_matrix_larger_than_the_memory(model, convert, tmp_path):
    """peft#1939: `merge_and_unload` of 70 B on a CPU grew by far more than an adapter until the system ended it."""
    import tracemalloc

    from safetensors.numpy import save_file

    base, adapter, layer = tmp_path / "base", tmp_path / "adapter", "model.layers.0."
    base.mkdir()
    adapter.mkdir()
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False}
    config = json.loads((model("llama") / "config.json").read_text()) | sizes | heads
    (base / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (64, 512), "lm_head": (64, 512), "model.norm": (512,)}
    shapes |= {f"{layer}{name}_layernorm": (512,) for name in ("input", "post_attention")}
    shapes |= {f"{layer}self_attn.{name}_proj": (512, 512) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj": (4096, 512) for name in ("gate", "up")}
    shapes[f"{layer}mlp.down_proj"] = (512, 4096)
    weights = {f"{name}.weight": np.zeros(shape, "f4") for name, shape in shapes.items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    module = f"base_model.model.{layer}mlp.up_proj."
    factors = {f"{module}lora_A.weight": np.ones((4, 512), "f4"), f"{module}lora_B.weight": np.ones((4096, 4), "f4")}
    save_file(factors, adapter / "adapter_model.safetensors")
    tracemalloc.start()
    try:
        ran = convert("merge", base, adapter, tmp_path / "out", "-j1", "--memory", "1MiB")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ran.code == 0, ran.err
    assert peak < 6 << 20 < weights[f"{layer}mlp.up_proj.weight"].nbytes


def test_experts_one_by_one(model, convert, tmp_path):
    """As transformers 4 has them in memory, and the Hub's files still: no PEFT of today loads such an adapter."""
    from safetensors.numpy import load_file, save_file

    base, dice = model("mixtral"), np.random.default_rng(5)
    before, tensors = load_file(base / "model.safetensors"), {}
    for key in [key for key in before if key.endswith((".w1.weight", "q_proj.weight"))]:
        module = key.removesuffix(".weight")
        out, wide = before[key].shape
        tensors[f"base_model.model.{module}.lora_A.weight"] = dice.standard_normal((3, wide)).astype("f4")
        tensors[f"base_model.model.{module}.lora_B.weight"] = dice.standard_normal((out, 3)).astype("f4")
        tensors[f"base_model.model.{module}.lora_magnitude_vector"] = dice.uniform(0.5, 2, out).astype("f4")
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": ["w1", "q_proj"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    ran = convert("merge", base, tmp_path / "adapter", tmp_path / "out")
    assert ran.code == 0, ran.err
    for key, after in load_file(tmp_path / "out/model.safetensors").items():
        parts = [tensors.get(f"base_model.model.{key.removesuffix('.weight')}.lora_{name}.weight") for name in "AB"]
        want = before[key].astype(np.float64)
        if parts[0] is not None:
            want = want + parts[1].astype(np.float64) @ parts[0].astype(np.float64) * 2
            magnitude = tensors[f"base_model.model.{key.removesuffix('.weight')}.lora_magnitude_vector"]
            want *= (magnitude / np.linalg.norm(want, axis=1))[:, None]
        assert (after == want.astype(np.float32)).all(), key


def test_what_was_learned_of_all_experts_one_by_one_and_is_lost_is_told(model, convert, tmp_path):
    """In memory transformers 5 has no such modules, so that nothing but the config names them."""
    from safetensors.numpy import load_file, save_file

    base, adapter = model("mixtral"), tmp_path / "adapter"
    adapter.mkdir()
    shapes = {key: tensor.shape for key, tensor in load_file(base / "model.safetensors").items()}
    tensors = {}
    for key in [key for key in shapes if key.endswith("q_proj.weight")]:
        module = f"base_model.model.{key.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = np.ones((3, shapes[key][1]), "f4")
        tensors[f"{module}.lora_B.weight"] = np.ones((shapes[key][0], 3), "f4")
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "w1", "w2"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    told = "the adapter names w1, w2 in target_modules, of which neither it nor the base has a module"
    for command in ("merge", "peft2megatron"):
        ran = convert(command, base, adapter, tmp_path / command)
        assert (ran.code, told in ran.err) == (0, True), ran.err
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    assert "target_modules" not in convert("merge", base, adapter, tmp_path / "sound").err


def test_peft_drops_the_dense_layers_of_experts_one_by_one(model, convert, tmp_path):
    """It takes their names for those of the experts, which it turns into parameters, and gives no warning."""
    import warnings

    import torch
    from safetensors.torch import load_file, save_file

    base, dense = model("qwen3_moe-tied"), {f"model.layers.{layer}.mlp" for layer in (0, 2)}
    before, tensors, dice = load_file(base / "model.safetensors"), {}, torch.Generator().manual_seed(3)
    names = ["gate_proj", "up_proj", "down_proj"]
    for key in [key for key in before if key.endswith(tuple(f".{name}.weight" for name in names))]:
        module, (out, wide) = "base_model.model." + key.removesuffix(".weight"), before[key].shape
        tensors[f"{module}.lora_A.weight"] = torch.randn((2, wide), generator=dice)
        tensors[f"{module}.lora_B.weight"] = torch.randn((out, 2), generator=dice)
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": names}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    ran = convert("merge", base, tmp_path / "adapter", tmp_path / "out")
    assert ran.code == 0, ran.err
    with warnings.catch_warnings(record=True) as told:
        exact = judged(base, tmp_path / "adapter", "float64")
    assert not any("gate_proj" in str(warning.message) for warning in told)
    ours = loaded(tmp_path / "out")
    assert ours.keys() == exact.keys()
    apart_from_peft = {key for key, tensor in ours.items() if not torch.equal(tensor, exact[key].float())}
    assert apart_from_peft == {f"{module}.{name}.weight" for module in dense for name in names}
    for key in apart_from_peft:
        left, right = (tensors[f"base_model.model.{key.removesuffix('.weight')}.lora_{part}.weight"] for part in "BA")
        assert torch.equal(exact[key].float(), before[key])
        assert torch.equal(ours[key], (before[key].double() + 2 * left.double() @ right.double()).float())
