"""A model without a table and its config are one model, or refused: by transformers, by the base, by the config.

Where only the config is left, nothing tells which tensors the model has: `--verbatim` takes those that are there.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from converters.plan import agreement, meta_model
from formats.checkpoint import Settings
from formats.huggingface import own_config
from tests.faults.dcp_tools import refused, save, weights, with_config
from tests.fuzz.architectures import as_shards, build, quiet
from tests.models import settings_of

KINDS = {
    "qwen3_vl": "model.language_model.", "qwen2_5_vl": "model.language_model.", "llava": "model.language_model.",
    "mamba": "backbone.", "qwen3_next": "model.", "gpt_bigcode": "transformer.",
}  # fmt: skip
"""Models without a table: the name of the module that has the embedding."""


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """`plain(kind)`: the folder of a real model without a table, and its tensors as they are in memory."""
    built: dict[str, tuple[Path, dict[str, Any]]] = {}

    def get(kind: str) -> tuple[Path, dict[str, Any]]:
        if kind not in built:
            folder = tmp_path_factory.mktemp(kind) / "hf"
            with quiet():
                model = build(kind, 1)
                assert model is not None
                model.save_pretrained(folder)
            built[kind] = folder, {key: value.detach().contiguous() for key, value in model.state_dict().items()}
        return built[kind]

    return get


WORDS = {"transformers": (), "base": (), "config": ("--verbatim",)}
"""Who judges, and what is said on the command line then."""


@pytest.fixture
def alone(monkeypatch):
    """As on a machine without transformers."""
    monkeypatch.setattr(agreement, "NEEDED", ("not_installed",))


def config_of(folder: Path, to: Path, **changes: Any) -> Path:
    """The config alone, changed."""
    return with_config(to, folder, **changes)


def loads(out: Path) -> dict[str, Any]:
    import transformers

    names = json.loads((out / "config.json").read_text())["architectures"]
    with quiet():
        loaded, info = getattr(transformers, names[0]).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    return loaded.state_dict()


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)


@pytest.mark.parametrize("command", ["hf2hf", "hf2fsdp"])
def test_a_head_that_the_config_ties_and_the_class_does_not(command, convert, tmp_path):
    """The class of BigBird-Pegasus ties nothing: its head is in the files, and stays there."""
    from safetensors.torch import load_file
    from transformers import BigBirdPegasusConfig, BigBirdPegasusForCausalLM

    sizes = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    small = BigBirdPegasusConfig(vocab_size=97, d_model=32, decoder_layers=2, encoder_layers=1, **sizes, **heads)
    assert small.tie_word_embeddings is True
    BigBirdPegasusForCausalLM(small).save_pretrained(tmp_path / "hf")
    words = "config ties lm_head.weight to model.decoder.embed_tokens.weight, and its class in transformers does not"
    for more in ((), ("--allow-missing", "lm_head.weight")):
        refused(convert(command, tmp_path / "hf", tmp_path / "no", *more), 3, words, "--set tied=false")
    assert convert(command, tmp_path / "hf", tmp_path / "out", "--set", "tied=false").code == 0
    if command == "hf2fsdp":
        assert convert("fsdp2hf", tmp_path / "out", tmp_path / "back").code == 0
    back = tmp_path / ("back" if command == "hf2fsdp" else "out")
    assert same(load_file(back / "model.safetensors"), load_file(tmp_path / "hf/model.safetensors"))
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is False


# --- lost shards of torch's Hugging Face writer ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "judge"),
    [*((kind, "transformers") for kind in KINDS), ("qwen3_vl", "base"), ("mamba", "base"), ("qwen3_vl", "config"),
     ("mamba", "config"), ("gpt_bigcode", "config")],
)  # fmt: skip
def test_a_lost_shard(plain, convert, tmp_path, request, kind, judge):
    """The files of one rank are gone, the first, one inside or the last; all of them are the model."""
    base, state = plain(kind)
    if judge != "transformers":
        request.getfixturevalue("alone")
    names, base = base, config_of(base, tmp_path / "base")
    if judge == "base":  # with the names in memory, as newer folders of the Hub have them
        from safetensors.torch import load_file, save_file

        head = "lm_head.weight" in load_file(names / "model.safetensors")
        tensors = {key: value.clone() for key, value in state.items() if head or key != "lm_head.weight"}
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    whole = tmp_path / "whole"
    as_shards(whole, state, random.Random(2))
    shards = sorted(path.name for path in whole.iterdir())
    assert len(shards) > 1
    options = ("--config", base, "-q", *WORDS[judge])
    ran = convert("fsdp2hf", whole, tmp_path / "out", *options)
    assert ran.code == 0, ran.err
    assert f"checked against: {judge}" in ran.err
    assert same(loads(tmp_path / "out"), state)
    for name in {shards[0], shards[len(shards) // 2], shards[-1]}:
        folder = shutil.copytree(whole, tmp_path / f"without {name}")
        (folder / name).unlink()
        refused(convert("fsdp2hf", folder, tmp_path / "lost", *options), 3, folder)
        assert not (tmp_path / "lost").exists()


def test_every_command_sees_a_lost_shard(plain, convert, tmp_path):
    base, state = plain("mamba")
    base = config_of(base, tmp_path / "base")
    folder = tmp_path / "shards"
    as_shards(folder, state, random.Random(2))
    max(folder.iterdir()).unlink()
    argv = (folder, tmp_path / "out", "--config", base)
    for ran in (convert("fsdp2hf", *argv, "-n"), convert("hf2fsdp", *argv), convert("digest", folder, *argv[2:])):
        refused(ran, 3, folder, "backbone.")


def test_shards_of_which_nothing_tells_how_many_there_were(plain, convert, tmp_path, alone):
    """An embedding that no vocabulary is known of proves nothing."""
    base, state = plain("mamba")
    base = config_of(base, tmp_path / "base", vocab_size=None)
    as_shards(tmp_path / "shards", state, random.Random(2))
    ran = convert("fsdp2hf", tmp_path / "shards", tmp_path / "out", "--config", base, "--verbatim")
    refused(ran, 3, "do not record how many there were", "--config BASE")


# --- what is missing, and what is another model's --------------------------------------------------------------------


def without(state: dict[str, Any], *parts: str) -> dict[str, Any]:
    tensors = {key: value for key, value in state.items() if not any(part in key for part in parts)}
    assert len(tensors) < len(state)
    return tensors


LOSSES = {
    "a tensor": ("layers.1.mixer.in_proj.weight",),
    "the last layer": ("layers.2.",),
    "a layer": ("layers.1.",),
    "the final norm": ("norm_f",),
    "the embedding": ("embeddings", "lm_head"),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("judge", ["transformers", "base", "config"])
def test_what_is_missing(plain, convert, tmp_path, request, judge, loss):
    base, state = plain("mamba")
    if judge != "transformers":
        request.getfixturevalue("alone")
    if judge != "base":
        base = config_of(base, tmp_path / "base")
    folder = save(tmp_path / "c", {"model": without(state, *LOSSES[loss])})
    ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", base, "-q", *WORDS[judge])
    refused(ran, 3, folder, "not one whole model", "--allow-missing", "backbone.")
    assert not (tmp_path / "out").exists()


PARTS = {
    "gpt_bigcode": ("wte.weight", "transformer.ln_f.", "ln_f.weight", "ln_f.bias", "1.ln_1.weight"),
    "opt": ("decoder.embed_tokens.weight", "decoder.final_layer_norm.", "decoder.final_layer_norm.bias"),
    "gptj": ("wte.weight", "transformer.ln_f.", "ln_f.bias"),
    "phi": ("embed_tokens.weight", "final_layernorm.", "final_layernorm.bias"),
    "stablelm": ("embed_tokens.weight", "model.norm.", "model.norm.bias", "post_attention_layernorm.bias"),
    "mamba": ("embeddings.weight", "norm_f"),
    "openai-gpt": ("tokens_embed.weight",),
}  # fmt: skip
"""Model type: parts of names, each of which a model without a table cannot lack."""
EVERYWHERE = {"gpt_bigcode": ".ln_2.", "phi": "mlp.fc1.", "mamba": "mixer.in_proj."}
"""Model type: what is missing from every layer, so that nothing shows it but who knows the class."""


@pytest.mark.parametrize("kind", PARTS)
def test_what_the_config_alone_tells(plain, convert, tmp_path, alone, kind):
    """Neither transformers nor weights of the base: --verbatim wants an embedding and a last norm too."""
    base, state = plain(kind)
    base = config_of(base, tmp_path / "base")
    for number, part in enumerate(PARTS[kind]):
        folder = save(tmp_path / f"c{number}", {"model": without(state, part, "lm_head")})
        argv = ("fsdp2hf", folder, tmp_path / "out", "--config", base)
        refused(convert(*argv), 3, "not one whole model", "--allow-missing")
        refused(convert(*argv, "--verbatim"), 3, "not one whole model", "--allow-missing")


@pytest.mark.parametrize("kind", EVERYWHERE)
def test_what_is_missing_from_every_layer(plain, convert, tmp_path, alone, kind):
    """Nothing tells: it is refused, as the whole model is, unless the user says that the tensors are those."""
    base, state = plain(kind)
    base = config_of(base, tmp_path / "base")
    for tensors in (without(state, EVERYWHERE[kind]), state):
        folder = save(tmp_path / f"c{len(tensors)}", {"model": tensors})
        argv = ("fsdp2hf", folder, tmp_path / f"out{len(tensors)}", "--config", base)
        refused(convert(*argv), 4, "nothing here tells whether", kind, "--verbatim")
        ran = convert(*argv, "--verbatim")
        assert ran.code == 0, ran.err
        assert "missing from every layer would not be seen" in ran.err


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize(
    "lost",
    [
        None,
        "encoder.block.1.layer.1.layer_norm.weight",
        "decoder.block.0.layer.2.layer_norm.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
    ],
)
def test_what_only_the_first_layer_has(convert, tmp_path, alone, layers, lost):
    """T5: the first layer's bias of relative positions is that of all layers."""
    from transformers import T5Config, T5ForConditionalGeneration

    with quiet():
        shape = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4)
        T5ForConditionalGeneration(shape).save_pretrained(tmp_path / "hf")
    state = {key: value for key, value in weights(tmp_path / "hf").items() if key != lost}
    assert sum("relative_attention_bias" in key for key in state) == 2
    bare = config_of(tmp_path / "hf", tmp_path / "bare")
    ran = convert("fsdp2hf", save(tmp_path / "c", state), tmp_path / "out", "--config", bare, "--verbatim")
    if lost is None:
        assert ran.code == 0, ran.err
        loaded = loads(tmp_path / "out")
        assert same({key: loaded[key] for key in state}, state)
    else:
        block, name = lost.split(".layer.")
        refused(ran, 3, f"{block} lacks layer.{name}, which other layers have")


OF_BITS = "weight weight.absmax weight.quant_map weight.nested_absmax weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    "elements", ["qweight qzeros scales g_idx", "qweight qzeros scales", OF_BITS], ids=["gptq", "awq", "bitsandbytes"]
)
@pytest.mark.parametrize(
    "lost", [None, "layers.1.self_attn", "layers.1.mlp", "layers.1.self_attn.q_proj", "lm_head", "layers.1.mlp post"]
)
def test_matrices_of_several_tensors(convert, tmp_path, elements, lost):
    """Each matrix is three to five tensors, which make one module; and no part of a layer is a head.

    A layer that lacks the norm before its MLP too is of another kind.
    """
    import numpy as np
    from safetensors.numpy import save_file

    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layers = [f"model.layers.{layer}." for layer in range(2)]
    keys = [f"{layer}{name}.{element}" for layer in layers for name in names for element in elements.split()]
    keys += [f"{layer}{norm}_layernorm.weight" for layer in layers for norm in ("input", "post_attention")]
    keys += ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    shapes = {"embed_tokens": (32, 16), "lm_head": (32, 16), "norm.weight": (16,), "g_idx": (32,)}
    packed = ("qweight", "qzeros", "g_idx", *([] if "qweight" in elements else ["_proj.weight"]))
    tensors = {
        key: np.ones(
            next((shape for part, shape in shapes.items() if part in key), (16, 4)),
            np.int32 if key.endswith(packed) else np.float32,
        )
        for key in keys
        if lost is None or (f"{lost.split()[0]}." not in key and ("post" not in lost or "1.post_" not in key))
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }  # fmt: skip
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    if lost != "lm_head":  # what is quantized may differ from layer to layer
        refused(convert("hf2hf", tmp_path / "hf", tmp_path / "out"), 4, "nothing here tells whether", "quantized")
    ran = convert("hf2hf", tmp_path / "hf", tmp_path / "out", "--verbatim")
    if lost is None or "post" in lost:
        assert ran.code == 0, ran.err
    else:
        refused(ran, 3, "no output head" if lost == "lm_head" else f"model.{lost[:8]} lacks {lost[9:]}")


def test_an_untied_head_that_is_missing(plain, convert, tmp_path, alone):
    base, state = plain("qwen3_next")
    base = config_of(base, tmp_path / "base", tie_word_embeddings=False)
    folder = save(tmp_path / "c", {"model": without(state, "lm_head")})
    refused(convert("fsdp2hf", folder, tmp_path / "out", "--config", base), 3, "lm_head.weight")


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 32}, {"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"vocab_size": 200}], ids=str
)
@pytest.mark.parametrize("judge", ["transformers", "base", "config"])
def test_the_config_of_another_model(plain, convert, tmp_path, request, judge, changes):
    base, state = plain("mamba")
    if judge != "transformers":
        request.getfixturevalue("alone")
    other = config_of(base, tmp_path / "base", **changes)
    if judge == "base":
        shutil.copy(base / "model.safetensors", other)
    folder = save(tmp_path / "c", {"model": state})
    refused(convert("fsdp2hf", folder, tmp_path / "out", "--config", other), 3, folder, "backbone")


def test_the_config_of_another_family(plain, convert, tmp_path):
    _, state = plain("gpt_bigcode")
    folder = save(tmp_path / "c", {"model": state})
    other = config_of(plain("mamba")[0], tmp_path / "base")
    refused(convert("fsdp2hf", folder, tmp_path / "out", "--config", other), 3, folder, "backbone.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "olmo"},
            "architectures names GPTBigCodeForCausalLM, a class of gpt_bigcode, and model_type is olmo",
        ),
        (
            {"architectures": ["GPTNeoForCausalLM"]},
            "names GPTNeoForCausalLM, a class of gpt_neo, and model_type is gpt_",
        ),
    ],
)
def test_a_class_of_another_type(plain, convert, tmp_path, changes, message):
    """AutoModelForCausalLM goes by the model type: the class that the tensors fit is none that it makes."""
    base, state = plain("gpt_bigcode")
    folder = save(tmp_path / "c", {"model": state})
    argv = ("fsdp2hf", folder, tmp_path / "out", "--config", config_of(base, tmp_path / "base", **changes))
    refused(convert(*argv), 3, message, "take config.json from where the weights come from")


def test_a_config_that_names_no_class_is_that_of_text(plain, convert, tmp_path):
    """Config and weights are compared all the same; a model of images has no such class."""
    base, state = plain("gpt_bigcode")
    other = config_of(base, tmp_path / "base", architectures=None)
    ran = convert("fsdp2hf", save(tmp_path / "c", {"model": state}), tmp_path / "out", "--config", other)
    assert ran.code == 0, ran.err
    assert "cannot be asked" not in ran.err
    lost = {key: value for key, value in state.items() if "h.0.ln_1" not in key}
    folder = save(tmp_path / "less", {"model": lost})
    refused(convert("fsdp2hf", folder, tmp_path / "none", "--config", other), 3, folder, "h.0.ln_1.")
    report = meta_model.report({"config": {"model_type": "siglip"}, "shapes": {}})
    assert "does not know a class that generates text with siglip" in report["why"]


@pytest.mark.parametrize(("kind", "name"), [("llama4", "Llama4ForCausalLM"), ("internlm3", "LlamaForCausalLM")])
def test_a_class_that_belongs_to_several_types(kind, name):
    assert meta_model._is_paired(kind, name)
    assert not meta_model._is_paired("olmo", name)


def test_a_sub_model_of_another_size(plain, convert, tmp_path, alone):
    """The depth of the vision tower, without transformers."""
    base, state = plain("qwen3_vl")
    inner = json.loads((base / "config.json").read_text())["vision_config"]
    other = config_of(base, tmp_path / "base", vision_config={**inner, "depth": inner["depth"] + 1})
    folder = save(tmp_path / "c", {"model": state})
    refused(convert("fsdp2hf", folder, tmp_path / "out", "--config", other), 3, "visual.blocks has 3 layers")


def test_hugging_face_and_deepspeed_are_checked_too(plain, convert, tmp_path):
    from safetensors.torch import load_file, save_file

    base, state = plain("mamba")
    folder = config_of(base, tmp_path / "hf")
    save_file(without(load_file(base / "model.safetensors"), "norm_f"), folder / "model.safetensors", {"format": "pt"})
    refused(convert("hf2hf", folder, tmp_path / "out"), 3, folder, "backbone.norm_f.weight is missing")
    refused(convert("hf2fsdp", folder, tmp_path / "out"), 3, folder, "backbone.norm_f.weight is missing")
    import torch

    zero = tmp_path / "zero"
    (zero / "global_step1").mkdir(parents=True)
    (zero / "latest").write_text("global_step1")
    stored = {"module": without(state, "norm_f"), "dp_world_size": 1, "mp_world_size": 1, "global_steps": 1}
    torch.save(stored, zero / "global_step1/mp_rank_00_model_states.pt")
    ran = convert("zero2hf", zero, tmp_path / "out", "--config", config_of(base, tmp_path / "base"))
    refused(ran, 3, zero, "backbone.norm_f.weight is missing")


# --- who means it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["backbone.norm_f.weight", "*.norm_f.*"])
def test_what_is_allowed_to_be_missing(plain, convert, tmp_path, name):
    base, state = plain("mamba")
    folder, base = save(tmp_path / "c", {"model": without(state, "norm_f")}), config_of(base, tmp_path / "base")
    argv = ("fsdp2hf", folder, tmp_path / "out", "--config", base, "-q")
    refused(convert(*argv, "--allow-missing", "backbone.norm.weight"), 3, "backbone.norm_f.weight is missing")
    assert convert(*argv, "--allow-missing", name).code == 0
    assert weights(tmp_path / "out").keys() == without(state, "norm_f", "lm_head").keys()  # which is the embedding


def test_a_name_that_allows_nothing_is_told(plain, model, convert, tmp_path):
    """And refused where a table knows the model, which is never compared."""
    base, state = plain("mamba")
    folder, base = save(tmp_path / "c", {"model": without(state, "norm_f")}), config_of(base, tmp_path / "base")
    argv = ("fsdp2hf", folder, tmp_path / "out", "--config", base)
    ran = convert(*argv, "--allow-missing", "*.norm_f.*", "--allow-missing", "x*")
    assert ran.code == 0, ran.err
    assert "note: --allow-missing x*: no such tensor is missing, left over or of another shape" in ran.err
    assert "--allow-missing *.norm_f" not in ran.err
    ran = convert("hf2hf", model("llama"), tmp_path / "no", "--allow-missing", "x*")
    refused(ran, 2, "--allow-missing has no effect on", "a table says which tensors a llama has", "leave it out")


def test_what_is_left_over(plain, convert, tmp_path):
    import torch

    base, state = plain("mamba")
    folder, base = (
        save(tmp_path / "c", {"model": state | {"probe.weight": torch.ones(3, 3)}}),
        config_of(base, tmp_path / "b"),
    )
    argv = ("fsdp2hf", folder, tmp_path / "out", "--config", base, "-q")
    refused(convert(*argv), 3, "probe.weight is no tensor of the model", "--allow-missing 'probe.weight'")
    assert convert(*argv, "--allow-missing", "probe.*").code == 0


@pytest.mark.parametrize(("kind", "prefix"), [("llava", "language_model.model."), ("gpt_bigcode", ""), ("mamba", "")])
def test_a_tensor_under_two_names(plain, convert, tmp_path, kind, prefix):
    """transformers takes an older name too, and one without the model's prefix, and loads one if a file has both."""
    base, state = plain(kind)
    name = next(key for key in state if key.startswith(KINDS[kind]) and ("norm" in key or "ln" in key))
    second = prefix + name.removeprefix(KINDS[kind])
    folder = save(tmp_path / "c", {"model": {**state, second: state[name] + 1}})
    argv = ("fsdp2hf", folder, tmp_path / "out", "--config", config_of(base, tmp_path / "b"), "-q")
    refused(convert(*argv), 3, f"are both loaded as {name}", "--allow-missing")


def test_a_shared_head_that_is_cut(plain, convert, tmp_path, alone):
    """The base has no head, as it is the embedding; that of the checkpoint has fewer rows."""
    base, state = plain("gpt_bigcode")
    cut = state | {"lm_head.weight": state["lm_head.weight"][:54].clone()}
    argv = ("fsdp2hf", save(tmp_path / "c", {"model": cut}), tmp_path / "out", "--config", base, "-q")
    refused(convert(*argv), 3, "lm_head.weight is [54, ", "--allow-missing 'lm_head.weight'")


def test_a_head_that_is_no_copy_of_the_embedding(plain, convert, tmp_path, alone):
    """A config that says that both are one, and a head of its own all the same: the embedding has more rows."""
    base, state = plain("cpmant")
    assert state["lm_head.weight"].shape != state["cpmant.input_embedding.weight"].shape
    source = save(tmp_path / "c", {"model": without(state, "lm_head")})
    ran = convert("fsdp2hf", source, tmp_path / "out", "--config", base, "-q")
    refused(ran, 3, "lm_head.weight is missing")


def test_a_vocabulary_that_the_user_says(plain, convert, tmp_path, alone):
    """More rows than the base has are right with --vocab-size; the config of the language model says so then."""
    import torch

    base, state = plain("qwen3_vl")
    rows = state["model.language_model.embed_tokens.weight"].shape[0] + 8
    grown = {
        key: torch.cat([value, value[:8]]) if key.endswith(("embed_tokens.weight", "lm_head.weight")) else value
        for key, value in state.items()
    }
    folder, bare = save(tmp_path / "c", {"model": grown}), config_of(base, tmp_path / "b")
    options = ("--config", bare, "--vocab-size", rows, "-q", "--verbatim")
    assert convert("fsdp2hf", folder, tmp_path / "out", *options).code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["text_config"]["vocab_size"] == rows
    assert same(loads(tmp_path / "out"), grown)


# --- the process that is asked ---------------------------------------------------------------------------------------


def test_transformers_is_asked_in_a_process_of_its_own(plain, tmp_path):
    """The interpreter that converts imports nothing of it; and the answer is the same."""
    base, state = plain("qwen3_vl")
    folder = save(tmp_path / "lost", {"model": without(state, "visual.merger.linear_fc1.weight")})
    code = (
        "import sys\nfrom converters import cli\ntry:\n    cli.main()\nfinally:\n"
        "    print('LOADED', [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    argv = ["fsdp2hf", str(folder), str(tmp_path / "out"), "--config", str(config_of(base, tmp_path / "base"))]
    ran = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    assert ran.returncode == 3, ran.stderr
    assert "model.visual.merger.linear_fc1.weight is missing" in ran.stderr
    assert "LOADED []" in ran.stdout


SPELLINGS = {
    "gemma": ("hidden_act", "gelu_pytorch_tanh", "gelu", "relu"),
    "deberta-v2": ("pos_att_type", ["p2c", "c2p"], "p2c|c2p", "p2c"),
}
"""Model type: a key, a value of it, an earlier spelling that its class reads as the same, and another value."""


@pytest.fixture(params=SPELLINGS)
def spelled(request, tmp_path):
    """`spelled(value)`: a command that names a config with that value for a run whose own config has another one."""
    import transformers

    kind, key, value = request.param, *SPELLINGS[request.param][:2]
    small = transformers.AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, **{key: value},
    )  # fmt: skip
    auto = transformers.AutoModelForCausalLM if kind == "gemma" else transformers.AutoModelForMaskedLM
    with quiet():
        model = auto.from_config(small)
        model.save_pretrained(tmp_path / "hf")
    run = save(tmp_path / "run", model.state_dict())
    assert json.loads((config_of(tmp_path / "hf", run) / "config.json").read_text())[key] == value

    def argv(other):
        base = config_of(tmp_path / "hf", tmp_path / "base", **{key: other})
        return "fsdp2hf", run, tmp_path / "out", "--config", base

    return request.param, argv


def test_an_earlier_spelling_in_one_of_two_configs(convert, tmp_path, spelled):
    """One model for its class, as the configs of Gemma and DeBERTa on the Hub are beside those that trainers save."""
    kind, argv = spelled
    ran = convert(*argv(SPELLINGS[kind][2]))
    assert ran.code == 0, ran.err
    assert loads(tmp_path / "out")


def test_a_value_that_the_class_makes_null_in_one_of_two_configs():
    ours, theirs = ({"model_type": "mine", "window": window} for window in (0, 4))
    settings = Settings(as_read=lambda config: config | {"window": config["window"] or None})
    assert own_config._key_differences(ours, theirs, settings) == ["window: None | 4"]


@pytest.mark.parametrize(
    ("removed", "base", "told"),
    [
        (
            "use_cache",
            {"rope_parameters": None, "rope_theta": 10000.0},
            "rope_parameters.rope_theta: 8000000.0 | 10000.0",
        ),
        ("logit_scale", {"logit_scale": 1.0}, "logit_scale: 0.0625 | 1.0"),
        ("logit_scale", {"logit_scale": 0.0625, "rope_parameters": None, "rope_theta": 8e6}, ""),
    ],
)
def test_a_value_under_a_key_that_the_other_config_lacks(convert, tmp_path, removed, base, told):
    """Another spelling, or the default of the class: only what transformers reads of the two can be compared."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 8e6}
    small = transformers.CohereConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        rope_parameters=rope, logit_scale=0.0625,
    )  # fmt: skip
    with quiet():
        model = transformers.CohereForCausalLM(small)
        model.save_pretrained(tmp_path / "hf")
    run, base = save(tmp_path / "run", model.state_dict()), config_of(tmp_path / "hf", tmp_path / "base", **base)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (run / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != removed}))
    ran = convert("fsdp2hf", run, tmp_path / "out", "--config", base)
    if told:
        refused(ran, 5, "contradict each other (run | base)", told)
    else:
        assert ran.code == 0, ran.err
        assert convert("verify", tmp_path / "out", run).code == 0
        assert convert("diff", tmp_path / "out", run).code == 0


@pytest.mark.parametrize("command", ["fsdp2hf", "hf2hf"])
def test_kinds_of_layers_that_one_of_two_configs_lacks(model, convert, tmp_path, command):
    """Their class derives them, from the step that the config has or from its default."""
    source, run, base = model("cohere2"), tmp_path / "run", config_of(model("cohere2"), tmp_path / "base")
    assert convert("hf2fsdp" if command == "fsdp2hf" else "hf2hf", source, run).code == 0
    written = json.loads((run / "config.json").read_text())
    lacking = {key: value for key, value in written.items() if key not in ("layer_types", "sliding_window_pattern")}
    kinds = {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}
    for ours, theirs, code in (({}, kinds, 0), (kinds, {}, 0), ({}, {"sliding_window_pattern": 2}, 5)):
        (run / "config.json").write_text(json.dumps(lacking | ours))
        (base / "config.json").write_text(json.dumps(lacking | theirs))
        ran = convert(command, run, tmp_path / "out", "--config", base, "--force")
        assert (ran.code, "contradict each other (run | base): layer_types" in ran.err) == (code, code == 5), ran.err


def test_kinds_of_layers_that_one_of_two_models_lacks(model, convert, tmp_path):
    """A trainer spells out what the config of the Hub leaves to the class: `diff` of the two finds nothing."""
    folders = {}
    full = [*["sliding_attention"] * 3, "full_attention"]
    for name, kinds in {"hub": {}, "run": {"layer_types": full}, "other": {"sliding_window_pattern": 2}}.items():
        folders[name] = shutil.copytree(model("cohere2"), tmp_path / name)
        config = json.loads((folders[name] / "config.json").read_text())
        config = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window_pattern")}
        (folders[name] / "config.json").write_text(json.dumps(config | kinds))
    for command in ("diff", "verify"):
        assert convert(command, folders["hub"], folders["run"]).code == 0
        for name in ("hub", "run"):
            ran = convert(command, folders[name], folders["other"])
            assert (ran.code, "layer_types: [" in ran.out + ran.err) == (6, True), ran.err


LM = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
OF_VERSION_4 = [
    {"model_type": "cohere", **LM, "rope_theta": 8e6, "model_max_length": 131072},
    {"model_type": "olmo", **LM, "rope_theta": 10000.0, "rope_scaling": None, "clip_qkv": None},
    {"model_type": "phi", **LM, "partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_scaling": None},
    {"model_type": "stablelm", **LM, "partial_rotary_factor": 0.5, "rope_theta": 10000, "use_qkv_bias": True},
    {"model_type": "gptj", "n_embd": 32, "n_head": 4, "n_layer": 1, "rotary": True, "rotary_dim": 8, "n_inner": None},
    {"model_type": "bloom", "n_embed": 32, "num_attention_heads": 4, "n_layer": 1, "n_inner": None, "seq_length": 64},
    {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 1, "attn_config": {"alibi": True, "clip_qkv": None}},
    {"model_type": "xglm", "d_model": 32, "attention_heads": 4, "ffn_dim": 48, "num_layers": 1},
    {"model_type": "mixtral", **LM, "num_key_value_heads": 2, "rope_theta": 1e6, "head_dim": None},
    {
        "model_type": "qwen2_vl", **LM, "num_key_value_heads": 2, "rope_theta": 1e6, "sliding_window": 32768,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 4, "in_chans": 3, "hidden_size": 32},
    },
    {
        "model_type": "llava", "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5, "torch_dtype": "float16"},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 336}, "vision_feature_layer": -2,
    },
]  # fmt: skip
"""Configs as transformers 4 wrote them, with keys that only code of the Hub read."""


@pytest.mark.parametrize("old", OF_VERSION_4, ids=lambda config: config["model_type"])
def test_what_transformers_5_makes_of_a_config_is_the_same(tmp_path, old):
    import transformers

    (tmp_path / "config.json").write_text(json.dumps(old))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    asked = list[str]()

    def as_read(config):
        asked.append(config["model_type"])
        return meta_model.report({"config": config})["config"]

    assert own_config._key_differences(new, old, Settings(as_read=as_read)) == []
    assert asked == [old["model_type"]] * 2
    other = old | ({"head_dim": 8} if "head_dim" in old else {"n_inner": 128} if old["model_type"] == "gptj" else {})
    assert own_config._key_differences(other, new, Settings(as_read=as_read)) == []


def test_the_token_of_an_image_is_no_special_token():
    """A model looks for it in its input; tokens that begin, end or fill a text may differ."""
    run = {"model_type": "mine", "image_token_id": 120, "pad_token_id": 0}
    for settings in (Settings(as_read=dict), Settings()):
        base = {"model_type": "mine", "image_token_id": 99, "pad_token_id": 1}
        assert own_config._key_differences(run, base, settings) == ["image_token_id: 120 | 99"]
        audio = [{"model_type": "mine", "audio_bos_token_id": number} for number in (11, 12)]
        assert own_config._key_differences(*audio, settings) == ["audio_bos_token_id: 11 | 12"]
        kinds = {
            kind: own_config._key_differences(run | {"model_type": kind}, base | {"model_type": kind}, settings)
            for kind in ("roberta", "bert")
        }
        assert kinds == {
            "roberta": ["image_token_id: 120 | 99", "pad_token_id: 0 | 1"],
            "bert": ["image_token_id: 120 | 99"],
        }


def test_settings_of_a_generation_are_no_settings_of_a_model():
    """Whisper's recipe puts null in place of two lists; `auto_map` begins with the repository of its code."""
    run = {"model_type": "whisper", "forced_decoder_ids": None, "suppress_tokens": None, "auto_map": {"C": "a--c.C"}}
    base = {"model_type": "whisper", "forced_decoder_ids": [[1, 2]], "suppress_tokens": [9], "auto_map": {"C": "c.C"}}
    for settings in (Settings(as_read=dict), Settings()):
        assert own_config._key_differences(run, base, settings) == []


def test_a_setting_of_single_layers_that_one_of_two_configs_lacks():
    """The class of Gemma 4 makes such settings itself, which it spells out as it saves a config."""
    from transformers import AutoConfig

    base = settings_of("gemma4_text")
    spelled = json.loads(AutoConfig.for_model(**base).to_json_string())["per_layer_config"]
    assert spelled
    layer = next(str(number) for number in range(base["num_hidden_layers"]) if str(number) not in spelled)
    run = base | {"per_layer_config": {**spelled, layer: {"rms_norm_eps": 0.3}}}
    written = base | {"per_layer_config": spelled}
    settings = Settings(as_read=lambda config: meta_model.report({"config": config})["config"])
    for other in (base, written):
        assert own_config._key_differences(run, other, settings) == [f"per_layer_config.{layer}: a dict | None"]
    assert own_config._key_differences(run, written, Settings()) == [f"per_layer_config.{layer}: a dict | None"]
    assert own_config._key_differences(base, written, settings) == []


def test_a_rotary_setting_that_one_of_two_configs_lacks():
    """No class fills in a default of the settings of a rotary embedding; `type` is `rope_type` in transformers 4."""
    yarn = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}
    base = {"model_type": "mine", "rope_parameters": {**yarn, "type": "yarn", "attention_factor": 2.0}}
    run = {"model_type": "mine", "rope_parameters": yarn}
    assert own_config._key_differences(run, base, Settings(as_read=dict)) == [
        "rope_parameters.attention_factor: None | 2.0"
    ]
    assert own_config._key_differences(run, base, Settings()) == []


@pytest.mark.parametrize("told", [True, False])
def test_another_value_in_one_of_two_configs(convert, monkeypatch, spelled, told):
    """Without transformers another spelling is another value; no setting decides a key of a model without a table."""
    kind, argv = spelled
    key, _, spelling, another = SPELLINGS[kind]
    if not told:
        monkeypatch.setattr(agreement, "NEEDED", ("not_installed",))
    for value in (another, *([] if told else [spelling])):
        ran = convert(*argv(value))
        refused(ran, 5, "contradict each other (run | base)", f"{key}: ", "leave --config out, or correct one of them")
        assert "--set" not in ran.err


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize(
    ("program", "why"),
    [("import sys; sys.exit(3)", "gave no answer)"), ("import time; time.sleep(9)", "gave no answer in 1 seconds)")],
)
def test_a_process_that_gives_no_answer(plain, convert, tmp_path, monkeypatch, program, why):
    base, state = plain("mamba")
    agreement._answer_of_program.cache_clear()
    monkeypatch.setattr(agreement, "SECONDS", 1)
    monkeypatch.setattr(agreement, "PROGRAM", ("-c", program))
    folder = save(tmp_path / "c", {"model": state})
    argv = ("fsdp2hf", folder, tmp_path / "out", "--config", config_of(base, tmp_path / "b"))
    refused(convert(*argv), 4, "nothing here tells whether", f"transformers {why[:-1]}", "--verbatim")
    ran = convert(*argv, "--verbatim")
    assert ran.code == 0, ran.err
    assert f"checked against: config only (transformers {why}" in ran.err
    ran = convert("hf2fsdp", tmp_path / "out", tmp_path / "dcp")  # the next judges, in their order
    assert (ran.code, f"checked against: manifest (transformers {why}" in ran.err) == (0, True), ran.err
    ran = convert(*argv[:2], tmp_path / "again", "--config", base)
    assert (ran.code, f"checked against: base (transformers {why}" in ran.err) == (0, True), ran.err


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"model_type": "mine"}, "does not know mine"), ({"architectures": ["MineForCausalLM"]}, "does not know MineFor"),
     ({"quantization_config": {"quant_method": "mine"}}, "quantized")],
)  # fmt: skip
def test_what_transformers_does_not_know(plain, convert, tmp_path, changes, why):
    base, state = plain("mamba")
    folder = save(tmp_path / "c", {"model": state})
    argv = ("fsdp2hf", folder, tmp_path / "out", "--config", config_of(base, tmp_path / "b", **changes))
    refused(convert(*argv), 4, "nothing here tells whether", why, "--config BASE", "--verbatim")
    assert not (tmp_path / "out").exists()
    ran = convert(*argv, "--verbatim")
    assert ran.code == 0, ran.err
    assert "checked against: config only" in ran.err
    assert "missing from every layer would not be seen" in ran.err
    assert why in ran.err
    again = convert("hf2fsdp", tmp_path / "out", tmp_path / "dcp")
    assert again.code == 0, again.err
    assert "checked against: manifest" in again.err


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_a_lost_layer_of_those_that_predict_further_tokens_is_told(model, convert, tmp_path, name):
    """`num_nextn_predict_layers` says how many there are; what transformers saves has none, whatever it says."""
    from safetensors.torch import load_file, save_file

    from tests.golden.test_mtp import with_second

    source, file = with_second(model(name), tmp_path / "source"), tmp_path / "source/config.json"
    config, tensors = json.loads(file.read_text()), load_file(source / "model.safetensors")
    first = f"model.layers.{config['num_hidden_layers']}."
    file.write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    refused(convert("hf2hf", source, tmp_path / "none"), 3, "num_nextn_predict_layers = 2", "1 of these layers")
    refused(convert("hf2megatron", source, tmp_path / "none"), 3, "num_nextn_predict_layers = 2", "--drop mtp")
    dropped = convert("hf2hf", source, tmp_path / "dropped", "--drop", "mtp")
    assert (dropped.code, "(MTP)" in dropped.err) == (0, False), dropped.err
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith(first)}
    save_file(kept, source / "model.safetensors", {"format": "pt"})
    for command in ("hf2hf", "hf2fsdp", "hf2megatron"):
        ran = convert(command, source, tmp_path / command)
        assert (ran.code, "num_nextn_predict_layers = 2, and there is no layer that" in ran.err) == (0, True), ran.err


def test_the_config_counts_the_layers_that_predict_further_tokens(model, convert, tmp_path):
    from tests.golden.test_mtp import with_second

    source = with_second(model("glm4_moe"), tmp_path / "source")
    assert convert("hf2megatron", source, tmp_path / "run").code == 0
    shutil.rmtree(next((tmp_path / "run").rglob("huggingface")))
    next((tmp_path / "run").rglob("vitruvian.json")).unlink()
    base = tmp_path / "base"
    shutil.copytree(model("glm4_moe"), base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    assert convert("megatron2hf", tmp_path / "run", tmp_path / "out", "--config", base).code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 1
