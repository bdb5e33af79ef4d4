"""Models that no table knows: every tensor arrives under its own name, and transformers computes the same with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from formats.families import find_family
from tests.faults.dcp_tools import refused, save

pytestmark = pytest.mark.distributed

SMALL: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "num_key_value_heads": 8,
}  # fmt: skip
NEOX = {"vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 211, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
FALCON = {"vocab_size": 211, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_kv_heads": 4,
          "new_decoder_architecture": True}  # fmt: skip
OPT = {"vocab_size": 211, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
       "max_position_embeddings": 64, "word_embed_proj_dim": 64}  # fmt: skip


class Case(NamedTuple):
    """A model, the class that holds it, and whether transformers writes the same file."""

    model_type: str
    settings: dict[str, Any]
    auto: str = "AutoModelForCausalLM"
    same_file: bool = True


CASES = {
    "Phi3ForCausalLM": Case("phi3", SMALL),
    "GlmForCausalLM": Case("glm", SMALL | {"head_dim": 8}),
    "GlmForCausalLM tied": Case("glm", SMALL | {"head_dim": 8, "tie_word_embeddings": True}),
    "FalconForCausalLM": Case("falcon", FALCON),
    "DeepseekV2ForCausalLM": Case("deepseek_v2", SMALL | DEEPSEEK),
    "DeepseekV3ForCausalLM": Case("deepseek_v3", SMALL | DEEPSEEK),
    "GPT2LMHeadModel": Case("gpt2", GPT2),
    "GPT2LMHeadModel untied": Case("gpt2", GPT2 | {"tie_word_embeddings": False}),
    "GPTNeoXForCausalLM": Case("gpt_neox", NEOX),
    "GPTNeoXForCausalLM tied": Case("gpt_neox", NEOX | {"tie_word_embeddings": True}),
    "Gemma2ForCausalLM": Case("gemma2", SMALL | {"head_dim": 16}),
    "Gemma3ForCausalLM": Case("gemma3_text", SMALL | {"head_dim": 16}),
    "MixtralForCausalLM": Case("mixtral", SMALL | EXPERTS),
    "PhimoeForCausalLM": Case("phimoe", SMALL | EXPERTS, same_file=False),
    "OPTForCausalLM": Case("opt", OPT, same_file=False),
    "MambaForCausalLM": Case(
        "mamba", {"vocab_size": 211, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, same_file=False
    ),
    "LlamaForSequenceClassification": Case("llama", SMALL | {"num_labels": 3}, "AutoModelForSequenceClassification"),
    "LlamaModel": Case("llama", SMALL, "AutoModel"),
    "Qwen2ForTokenClassification": Case("qwen2", SMALL | {"num_labels": 3}, "AutoModelForTokenClassification"),
}


def has_table(name: str) -> bool:
    """Whether a table describes the model of a case."""
    family = find_family({"model_type": CASES[name].model_type, "architectures": [name.split(maxsplit=1)[0]]})
    return family is not None and family.architecture == name.split(maxsplit=1)[0]


UNTABLED = next(name for name, case in CASES.items() if case.same_file and not has_table(name))
"""A causal model that no table knows."""


def build(case: Case, folder: Path) -> Any:
    """The model with weights in which every mistake shows, and its Hugging Face folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.model_type, **case.settings)
    model = getattr(transformers, case.auto).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_it_arrives_under_its_own_names(convert, tmp_path, name):
    """Experts that transformers fuses in memory stay fused without a table: it loads them under those names too."""
    import torch
    import transformers

    case = CASES[name]
    model = build(case, tmp_path / "hf")
    folder = save(tmp_path / "c", {"model": model.state_dict()})
    ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", tmp_path / "hf")
    assert ran.code == 0, ran.err
    assert ("no table checks the names" in ran.err) is not has_table(name)
    assert f"next: {case.auto}.from_pretrained(" in ran.out
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [name.split(maxsplit=1)[0]]
    loaded, info = getattr(transformers, case.auto).from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    state, expected = loaded.eval().state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids)[0], model(input_ids=ids)[0], atol=1e-5)
    if case.same_file:
        ours, theirs = (tmp_path / place / "model.safetensors" for place in ("out", "hf"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_it_goes_back_under_its_own_names(convert, tmp_path):
    """A folder without a table becomes a DCP folder, and comes back byte for byte."""
    build(CASES[UNTABLED], tmp_path / "hf")
    assert convert("hf2fsdp", tmp_path / "hf", tmp_path / "c", "--ranks", 3).code == 0
    assert convert("fsdp2hf", tmp_path / "c", tmp_path / "out").code == 0
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_it_goes_nowhere_that_needs_a_table(convert, tmp_path):
    build(CASES[UNTABLED], tmp_path / "hf")
    ran = convert("hf2megatron", tmp_path / "hf", tmp_path / "out", "--tp", 2)
    assert ran.code == 4
    assert CASES[UNTABLED].model_type in ran.err
    assert not (tmp_path / "out").exists()


def test_the_last_rows_that_are_missing_are_noticed(convert, tmp_path):
    """Nothing but the vocabulary tells, when the tensors themselves are shorter."""
    model = build(CASES[UNTABLED], tmp_path / "hf")
    state = {key: value[:-50] if "embed" in key else value for key, value in model.state_dict().items()}
    folder = save(tmp_path / "c", {"model": state})
    ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", tmp_path / "hf")
    assert ran.code == 3
    assert "161 rows, the vocabulary 211" in ran.err


TIED: dict[str, tuple[str, dict[str, Any]]] = {
    "GemmaForCausalLM": ("gemma", SMALL | {"head_dim": 16}),
    "OPTForCausalLM": ("opt", OPT),
    "MptForCausalLM": ("mpt", {"vocab_size": 211, "d_model": 64, "n_layers": 2, "n_heads": 4}),
    "FlexOlmoForCausalLM": ("flex_olmo", SMALL | {"num_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("name", TIED)
def test_what_torch_loads_of_what_no_table_knows(convert, tmp_path, name):
    """A head that the class ties is found though the config says nothing, and experts that memory has fused."""
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers

    kind, settings = TIED[name]
    model = build(Case(kind, settings), tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    ran = convert("hf2fsdp", tmp_path / "hf", tmp_path / "c", "--ranks", 2)
    assert ran.code == 0, ran.err
    assert "no table says which names the model has in memory" not in ran.err
    assert ("does not say whether its head is tied" in ran.err) == (kind != "flex_olmo")
    empty = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings))
    state = {"model": empty.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in state["model"].items())
    assert "lm_head.weight" in state["model"]
    assert convert("verify", tmp_path / "c").code == 0
    assert convert("fsdp2hf", tmp_path / "c", tmp_path / "out").code == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in model.state_dict().items())


MASKED: dict[str, Any] = {
    "DistilBertForMaskedLM": {"vocab_size": 96, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "BertForMaskedLM": {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    },
}  # fmt: skip
"""Classes whose heads share a matrix with the embedding, and one a bias too, under names of no other class."""


@pytest.mark.parametrize("name", MASKED)
def test_states_of_a_tied_parameter_are_under_one_of_its_names(convert, tmp_path, name):
    """torch saves the weight under each name, and its moments under one: so does what is written."""
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    from torch.distributed.checkpoint.state_dict import get_state_dict

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MASKED[name]))
    model.save_pretrained(tmp_path / "hf")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    weights, trained = get_state_dict(model, optimizer)
    assert len(trained["state"]) < len(weights)
    folder = save(tmp_path / "run", {"model": weights, "optim": trained})
    ran = convert("hf2fsdp", folder, tmp_path / "c", "--config", tmp_path / "hf", "--with-optimizer", "--ranks", 2)
    assert ran.code == 0, ran.err
    written = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    moments = {key for key in written if key.startswith("optim.state.")}
    assert moments == {f"optim.state.{key}.{state}" for key, of in trained["state"].items() for state in of}
    empty = {key: {state: torch.zeros_like(each) for state, each in of.items()} for key, of in trained["state"].items()}
    dcp.load({"optim": {"state": empty}}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(torch.equal(each, trained["state"][key][state]) for key in empty for state, each in empty[key].items())
    assert convert("verify", tmp_path / "c").code == 0
    record = json.loads(convert("inspect", tmp_path / "c", "--json").out)
    assert record["optimizer"]["states"] == ["exp_avg", "exp_avg_sq"]
    assert convert("zero2universal", tmp_path / "c", tmp_path / "u").code == 0
    names = {path.name for path in tmp_path.glob("u/*/zero/*") if path.is_dir()}
    assert names == {key for key, _ in model.named_parameters()}


BUFFER = "final_logits_bias"


@pytest.fixture
def mbart(tmp_path: Path) -> tuple[Any, Any]:
    """A model with a persistent buffer and its AdamW, after a step; its Hugging Face folder is `hf`."""
    import torch
    import transformers

    config = transformers.MBartConfig(
        vocab_size=96, d_model=32, max_position_embeddings=64,
        **{f"{part}_{of}": size for part in ("encoder", "decoder")
           for of, size in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))},
    )  # fmt: skip
    model = transformers.MBartForConditionalGeneration(config)
    model.final_logits_bias.normal_()
    model.save_pretrained(tmp_path / "hf")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def test_a_buffer_travels_without_moments(mbart, convert, tmp_path):
    """torch loads all moments of what was written, to the bit, and the value of the buffer."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = mbart
    weights, trained = get_state_dict(model, optimizer)
    assert BUFFER in weights.keys() - trained["state"].keys()
    folder = save(tmp_path / "run", {"model": weights, "optim": trained})
    ran = convert("hf2fsdp", folder, tmp_path / "c", "--config", tmp_path / "hf", "--with-optimizer", "--ranks", 2)
    assert ran.code == 0, ran.err
    assert convert("verify", tmp_path / "c").code == 0
    record = json.loads(convert("inspect", tmp_path / "c", "--json").out)
    assert record["optimizer"] == {"states": ["exp_avg", "exp_avg_sq"], "step": 1}
    other = type(model)(model.config)
    other.final_logits_bias.fill_(7)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    empty = dict(zip(("model", "optim"), get_state_dict(other, fresh), strict=True))
    dcp.load(empty, checkpoint_id=tmp_path / "c", no_dist=True)
    set_state_dict(other, fresh, model_state_dict=empty["model"], optim_state_dict=empty["optim"])
    loaded, states = get_state_dict(other, fresh)
    assert all(torch.equal(each, weights[key]) for key, each in loaded.items())
    assert states["state"].keys() == trained["state"].keys()
    for key, of in states["state"].items():
        assert all(torch.equal(each, trained["state"][key][state]) for state, each in of.items())
    assert fresh.param_groups[0]["lr"] == 1e-3
    (tmp_path / "full").mkdir()
    torch.save(weights, tmp_path / "full/pytorch_model_fsdp.bin")
    torch.save(trained, tmp_path / "full/optimizer.bin")
    ran = convert("verify", tmp_path / "full", "--config", tmp_path / "hf")
    assert ran.code == 0, ran.err
    for place in (folder, tmp_path / "c"):
        out = tmp_path / f"{place.name}-universal"
        ran = convert("zero2universal", place, out, "--config", tmp_path / "hf")
        assert (ran.code, f"1 buffers are not in it, such as {BUFFER}" in ran.err) == (0, True), ran.err
        names = {path.name for path in out.glob("*/zero/*") if path.is_dir()}
        assert names == {key for key, _ in model.named_parameters()}
        ran = convert("verify", out)
        assert ran.code == 0, ran.err


NORM = "model.encoder.layer_norm.weight"
NOT_BUFFERS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "a parameter without moments": (
        lambda optim: optim["state"].pop(NORM), (), (f"1 tensor is missing: {NORM} [32]", "hint: is it frozen"),
    ),
    "a parameter of the training": (
        lambda optim: optim["param_groups"][0]["params"].append(BUFFER), (),
        (f"the groups of its optimizer have {BUFFER}", "its model has no such parameter"),
    ),
    "nobody tells": (
        lambda optim: None, ("--verbatim",), (f"missing: {BUFFER}", "of a buffer", "no --verbatim"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_BUFFERS)
def test_what_is_no_buffer_has_moments(mbart, convert, tmp_path, kind):
    """Moments that are missing make no buffer."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, trained = get_state_dict(*mbart)
    change, options, says = NOT_BUFFERS[kind]
    change(trained)
    folder = save(tmp_path / "run", {"model": weights, "optim": trained})
    ran = convert("hf2fsdp", folder, tmp_path / "c", "--config", tmp_path / "hf", "--with-optimizer", *options)
    refused(ran, 3, *says)


@pytest.mark.parametrize("whole", [False, True])
def test_module_is_the_prefix_of_a_wrapper_only_where_all_names_have_it(convert, tmp_path, whole):
    import torch
    from safetensors.torch import load_file

    shapes = {"embed_tokens.weight": (20, 8), "module.weight": (8, 8), "norm.weight": (8,), "lm_head.weight": (20, 8)}
    state = {name: torch.rand(shape) for name, shape in shapes.items()}
    save(tmp_path / "dcp", {"model": {f"module.{name}" if whole else name: state[name] for name in state}})
    config = {"model_type": "mine", "hidden_size": 8, "vocab_size": 20, "num_hidden_layers": 1}
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    ran = convert("fsdp2hf", tmp_path / "dcp", tmp_path / "out", "--config", tmp_path / "config", "--verbatim")
    assert ran.code == 0, ran.err
    written = load_file(tmp_path / "out/model.safetensors")
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }
