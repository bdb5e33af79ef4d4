"""Mixtures of experts with something missing, mixed up, or that the other side cannot say: all of it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.dcp_tools import refused
from tests.golden.test_mtp import with_second
from tests.models import files


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run with two expert ranks."""
    from converters.convert import run as execute
    from converters.plan.request import Request
    from converters.plan.targets import plan_megatron
    from formats.megatron.args.options import Options
    from formats.registry import open_checkpoint

    out = tmp_path_factory.mktemp("experts") / "run"
    request = Request(out, quiet=True)
    execute(plan_megatron(open_checkpoint(model("mixtral")), request, Options(ep=2), None), request)
    return out


@pytest.fixture
def copy(run, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def change(path: Path, edit) -> None:
    """Edit the state dict and the args of a rank's file."""
    import torch

    stored = torch.load(path, weights_only=False)
    edit(stored["model"], stored["args"])
    torch.save(stored, path)


def file_of(run: Path, rank: int) -> Path:
    """The file of an expert rank."""
    return run / f"release/mp_rank_00_{rank:03d}/model_optim_rng.pt"


EXPERT = "decoder.layers.2.mlp.experts.linear_fc1.weight1"
ROUTER = "decoder.layers.2.mlp.router.weight"


def test_a_missing_expert_rank_is_noticed(copy, convert):
    shutil.rmtree(copy / "release/mp_rank_00_001")
    refused(convert("digest", copy), 3, "args say expert parallel size 2, 1 ranks are there")


def test_a_missing_expert_and_one_too_many_are_noticed(copy, convert):
    change(file_of(copy, 1), lambda state, args: state.pop(EXPERT))
    refused(convert("digest", copy), 3, "1 tensor is missing", EXPERT, "mp_rank_00_001")
    change(file_of(copy, 1), lambda state, args: state.update({EXPERT: state[f"{EXPERT[:-1]}0"]}))
    change(file_of(copy, 0), lambda state, args: state.update({f"{EXPERT}7": state[EXPERT]}))
    refused(convert("digest", copy), 3, "no place in this model", f"{EXPERT}7")


def test_expert_ranks_in_each_others_place_are_noticed(copy, convert):
    first, second = (file_of(copy, rank).parent for rank in (0, 1))
    for source, target in ((first, copy / "x"), (second, first), (copy / "x", second)):
        source.rename(target)
    refused(convert("digest", copy), 3, "was written by rank 1", "files are mixed up")


@pytest.mark.parametrize("at", [0, 1])
def test_an_expert_rank_that_was_copied_over_another_is_noticed(copy, convert, at):
    """Also where args record no rank, and without a manifest."""
    for path in copy.rglob("vitruvian.json"):
        path.unlink()
    shutil.copy(file_of(copy, at), file_of(copy, 1 - at))
    for command in (["digest", copy], ["verify", copy], ["megatron2hf", copy, copy.parent / "out"]):
        refused(
            convert(*command), 3, "files are mixed up" if at else "the file of one rank was copied over that of another"
        )


def test_experts_that_are_all_alike_are_right(copy, convert):
    """Those of a model that was made of a dense one, before its first step."""
    import torch

    def edit(state, args):
        for key in (key for key in state if ".experts." in key):
            state[key] = torch.arange(state[key].numel()).to(state[key].dtype).reshape(state[key].shape)

    for rank in (0, 1):
        change(file_of(copy, rank), edit)
    assert convert("digest", copy).code == 0


def test_a_matrix_of_one_number_is_no_copy(model, convert, tmp_path):
    """Its parts are equal on all tensor parallel ranks."""
    run = tmp_path / "run"
    assert convert("hf2megatron", model("llama"), run, "--tp", 2).code == 0

    def edit(state, args):
        for key in (key for key in state if key.startswith("decoder.layers.0.")):
            state[key].fill_(0.5)

    for rank in (0, 1):
        change(run / f"release/mp_rank_{rank:02d}/model_optim_rng.pt", edit)
    for path in run.rglob("vitruvian.json"):
        path.unlink()
    assert convert("digest", run).code == 0


def test_copies_of_a_router_that_differ_are_noticed(copy, convert):
    change(file_of(copy, 1), lambda state, args: state[ROUTER][0].add_(1))
    refused(convert("digest", copy), 6, "decoder.layers.2.mlp.router.weight differs between its copies", "ep rank 1")


@pytest.mark.parametrize(
    ("claims", "code", "parts"),
    [
        ({"moe_router_topk": 9}, 3, ["9 of 4 experts"]),
        ({"moe_router_topk": None}, 3, ["does not say top_k"]),
        ({"num_experts": 6}, 3, ["has shape [4, 64], but the configuration implies [6, 64]"]),
        ({"num_experts": 5}, 3, ["5 experts do not divide over ep = 2"]),
        ({"moe_layer_freq": 0}, 4, ["moe_layer_freq = 0"]),
        ({"moe_router_pre_softmax": True}, 4, ["router_normalized = False is not supported for mixtral"]),
        ({"moe_expert_capacity_factor": 1.0}, 4, ["moe_expert_capacity_factor = 1.0"]),
        ({"expert_tensor_parallel_size": 2}, 3, ["do not hold all of the model"]),
        ({"expert_tensor_parallel_size": "x"}, 3, ["expert_tensor_parallel_size = 'x'"]),
        ({"qk_layernorm": True, "add_qkv_bias": True}, 4, ["no known family"]),
    ],
)
def test_arguments_that_fit_no_model_are_refused(copy, convert, claims, code, parts):
    shutil.rmtree(copy / "huggingface")
    for rank in (0, 1):
        change(file_of(copy, rank), lambda state, args: vars(args).update(claims))
    refused(convert("digest", copy, "--vocab-size", 211), code, *parts)


def test_arguments_and_config_contradict_each_other(copy, convert):
    for rank in (0, 1):
        change(file_of(copy, rank), lambda state, args: setattr(args, "moe_router_topk", 1))
    refused(convert("digest", copy), 5, "top_k: 1 | 2")


@pytest.mark.parametrize(
    ("name", "changes", "options", "code", "reason"),
    [
        ("mixtral", {}, ["--ep", 3], 5, "4 experts do not divide over ep = 3"),
        ("mixtral", {}, ["--tp", 2, "--etp", 1], 5, "do not hold all of a model"),
        ("mixtral", {}, ["--etp", 2, "--ep", 2], 5, "do not hold all of a model"),
        ("mixtral", {}, ["--format", "torch_dist", "--tp", 4, "--ep", 2, "--etp", 3], 5, "one must divide the other"),
        ("llama", {}, ["--ep", 2], 5, "a llama has no experts"),
        ("mixtral", {}, ["--format", "megatron-llm"], 5, "its MLP has no experts"),
        ("mixtral", {"num_experts_per_tok": 1}, [], 5, "of a single expert it has no weight that is normalized"),
        ("dots1", {"norm_topk_prob": False}, [], 5, "weights always add up to 1"),
        ("dots1-tied", {"num_experts_per_tok": 2}, [], 5, "it ranks groups by 2 // 2 of their experts"),
        ("dots1", {"max_window_layers": 2}, [], 4, "sliding_attention"),
        ("gpt_oss", {}, ["--tp", 2], 5, "cuts no experts that have biases: etp = 2"),
        ("deepseek_v3", {}, ["--tp", 2, "--norm", "local"], 5, "cut the down projections of a deepseek_v3 over tp = 2"),
        ("deepseek_v2-grouped", {"num_experts_per_tok": 4}, [], 5, "it ranks groups by 4 // 2 of their experts, not 1"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, [], 4, "it is greedy or group_limited_greedy"),
        ("qwen2_moe", {"qkv_bias": False}, [], 4, "qkv_bias"),
        ("qwen3_moe", {"decoder_sparse_step": 5}, [], 4, "none of 4 layers has experts"),
    ],
)
def test_what_megatron_cannot_hold_is_refused(model, convert, tmp_path, name, changes, options, code, reason):
    refused(convert("hf2megatron", model(name, **changes), tmp_path / "out", *options), code, reason)


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("qwen3_moe", {"num_experts": 8}, ["num_local_experts = 4 and num_experts = 8", "num_experts = 8"]),
        ("qwen3_moe", {"mlp_only_layers": "0"}, ["mlp_only_layers"]),
        ("qwen3_moe", {"decoder_sparse_step": "x"}, ["decoder_sparse_step"]),
        ("qwen3_moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step = 0", "how far layers are apart: 1 or more"]),
        ("ernie4_5_moe_300b", {"moe_layer_interval": 0}, ["moe_layer_interval = 0"]),
        ("llama4_text", {"interleave_moe_layer_step": 0, "moe_layers": None}, ["interleave_moe_layer_step = 0"]),
        ("qwen3_moe", {"norm_topk_prob": "x"}, ["router_normalized"]),
        ("dots1", {"n_group": 3}, ["4 experts do not divide into 3 groups"]),
        ("dots1", {"n_shared_experts": None}, ["n_shared_experts = null"]),
        ("mixtral", {"num_local_experts": 3}, ["[4, 64]", "[3, 64]"]),
        ("mixtral", {"num_local_experts": 1e9}, ["experts"]),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(model, convert, tmp_path, name, changes, parts):
    folder = Path(shutil.copytree(model(name), tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    ran = convert("digest", folder)
    assert ran.code == 3
    assert any(part in ran.err for part in parts), ran.err


def test_layers_with_a_window_behind_the_full_ones_are_refused(model, convert, tmp_path):
    folder = Path(shutil.copytree(model("dots1"), tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config | {"max_window_layers": 3}))
    assert "max_window_layers = 3 of 4 layers" in convert("inspect", folder).out
    refused(convert("hf2megatron", folder, tmp_path / "m"), 4, "max_window_layers = 3 of 4 layers")


def test_what_predicts_a_second_token_is_there_as_a_whole_or_refused(model, convert, tmp_path):
    """One norm of it is no layer. Of AWQ there is no table."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(model("deepseek_v3"), tmp_path / "hf"))
    weights, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    norm = weights["model.norm.weight"].clone()
    refused(convert("hf2megatron", folder, tmp_path / "m", "--drop", "mtp"), 2, "no layer that predicts further tokens")
    save_file(weights | {"model.layers.4.enorm.weight": norm}, file)
    refused(convert("hf2megatron", folder, tmp_path / "m2"), 3, "no place in this model: model.layers.4.enorm.weight")
    refused(convert("inspect", folder), 3, "a layer that predicts further tokens is in no table", "--verbatim")
    ran = convert("hf2megatron", folder, tmp_path / "m", "--drop", "mtp")
    assert ran.code == 0, ran.err
    assert "is not carried: 1 such as model.layers.4.enorm.weight" in ran.err
    assert convert("hf2hf", folder, tmp_path / "h", "--verbatim").code == 0
    assert "model.layers.4.enorm.weight" in load_file(tmp_path / "h/model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    refused(convert("hf2megatron", folder, tmp_path / "m3"), 4, "models with a quantization_config are not supported")


def test_a_copy_of_a_tied_head_in_the_layer_that_predicts_a_second_token(model, convert, tmp_path):
    """The Hub's files hold one there. It is not the embedding of the model: transformers leaves that layer out."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = with_second(model("deepseek_v3", tie_word_embeddings=True), tmp_path / "hf")
    file = folder / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    copies = {f"model.layers.4.{name}.weight": embedding.clone() for name in ("shared_head.head", "embed_tokens")}
    save_file(weights | copies, file, {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.lm_head.weight.equal(embedding.float())
    for command, back in (("hf2hf", ""), ("hf2fsdp", "fsdp2hf"), ("hf2megatron", "megatron2hf")):
        ran = convert(command, folder, tmp_path / command)
        assert ran.code == 0, ran.err
        out = tmp_path / command
        if back:
            assert convert(back, out, tmp_path / back, "--config", folder).code == 0
            out = tmp_path / back
        after = load_file(out / "model.safetensors")
        assert all(value.equal(after[key]) for key, value in weights.items())
        assert after.keys() == weights.keys() | copies.keys()
    head, _ = copies
    save_file(weights | copies | {head: embedding + 1}, file, {"format": "pt"})
    said = "model.embed_tokens.weight differs between its copies", "head of MTP layer 1"
    refused(convert("hf2megatron", folder, tmp_path / "other"), 6, *said)
    alone = {key: value for key, value in weights.items() if key != "model.embed_tokens.weight"}
    save_file(alone | copies, file, {"format": "pt"})
    refused(convert("hf2hf", folder, tmp_path / "none"), 3, "1 tensor is missing: model.embed_tokens.weight")


def test_what_is_left_out_takes_nothing_with_it(model, convert, tmp_path):
    """Three layers that predict further tokens, their tensors spread over files that hold others too.

    AReaL#1403 and Megatron-Bridge#4188 lost those files whole, Megatron-Bridge#5495 knew one such layer alone.
    """
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(model("deepseek_v3"), tmp_path / "hf"))
    weights, other = load_file(folder / "model.safetensors"), {}
    for layer in (4, 5, 6):
        layer_weights = {key: value for key, value in weights.items() if key.startswith("model.layers.3.")}
        other |= {key.replace("layers.3.", f"layers.{layer}."): value.clone() for key, value in layer_weights.items()}
        norm = weights["model.norm.weight"]
        names = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), norm) | {"eh_proj": norm.repeat(64, 2)}
        other |= {f"model.layers.{layer}.{name}.weight": value.clone() for name, value in names.items()}
    every = [*(weights | other).items()]
    for number in range(3):
        save_file(dict(every[number::3]), folder / f"model-{number + 1:05d}-of-00003.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {key: f"model-{place % 3 + 1:05d}-of-00003.safetensors" for place, (key, _) in enumerate(every)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert convert("hf2hf", folder, tmp_path / "all").code == 0
    assert load_file(tmp_path / "all/model.safetensors").keys() == weights.keys() | other.keys()
    for argv in (("hf2hf", folder, tmp_path / "out"), ("hf2megatron", folder, tmp_path / "m", "--tp", 2)):
        ran = convert(*argv, "--drop", "mtp")
        assert ran.code == 0, ran.err
        assert f"is not carried: {len(other)} such as" in ran.err
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "back").code == 0
    for out in ("out", "back"):
        after = load_file(tmp_path / out / "model.safetensors")
        assert after.keys() == weights.keys()
        assert all(value.equal(weights[key]) for key, value in after.items())


def test_the_width_of_no_layer_is_that_of_the_config(model, convert, tmp_path):
    """Without a dense layer Megatron may say any --ffn-hidden-size."""
    source, out = model("qwen3_moe"), tmp_path / "m"
    assert convert("hf2megatron", source, out).code == 0
    change(out / "release/mp_rank_00/model_optim_rng.pt", lambda state, args: setattr(args, "ffn_hidden_size", 48))
    assert convert("megatron2hf", out, tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)
