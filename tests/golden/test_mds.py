"""Megatron-DeepSpeed: what its own code saved has its own logits, and its optimizer goes into other frameworks."""

from __future__ import annotations

import enum
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.dcp_tools import refused

HERE = Path(__file__).with_name("mds")
CASES = {
    "llama_gqa_separate_tp2": [],
    "llama_gqa_fused_tp2": [],
    "gpt_layernorm_tied_tp2": ["--gqa-layout", "grouped"],
    "gpt_tied_pp2": ["--gqa-layout", "grouped"],
    "gpt_blocked_tp2": ["--gqa-layout", "blocked"],
    "bloom_tp2": [],
    "bloom_pp2": [],
}
"""Run: what has to be said of it."""
ORDERS = {"llama_gqa_separate_tp2": "separate", "gpt_blocked_tp2": "blocked"}
"""Run: the order of query, key and value in it, of those that are not grouped."""
STAGES = "gpt_tied_pp2"
STAGED = (STAGES, "bloom_pp2")
"""Runs of two pipeline stages."""
ROWS = 64
"""Of the vocabulary, padding included."""
GPT = HERE / "gpt_layernorm_tied_tp2"


@pytest.fixture(autouse=True)
def enums(monkeypatch) -> None:
    """What torch makes the positions of BigScience's tree of (megatron/enums.py)."""
    kinds = enum.Enum("PositionEmbeddingType", "rotary absolute alibi", module="megatron.enums")
    monkeypatch.setitem(sys.modules, "megatron.enums", SimpleNamespace(PositionEmbeddingType=kinds))


def optimizer_of(run: Path) -> list[Any]:
    """What torch reads of the optimizer states of each tensor parallel rank."""
    import torch

    files = sorted((run / "global_step3").glob("*optim_states.pt"))
    return [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]


def logits(folder: Path, ids: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(ids)).logits.numpy()


@pytest.mark.parametrize("inner", [".", "global_step3"])
@pytest.mark.parametrize("name", CASES)
def test_its_logits(convert, tmp_path, name, inner):
    import numpy as np

    out, golden = tmp_path / "out", np.load(HERE / name / "logits.npz")
    ran = convert("zero2hf", HERE / name / inner, out, *CASES[name])
    assert ran.code == 0, ran.err
    computed = logits(out, golden["ids"])
    assert computed.shape[-1] == 60, "the files know the vocabulary without its padding"
    assert np.abs(computed - golden["logits"][..., :60]).max() < 2e-6 < np.abs(computed).max()


def test_the_order_is_asked_for(convert, tmp_path):
    """Where a rank has several groups in one matrix; the other order gives another model."""
    import numpy as np

    refused(convert("zero2hf", GPT, tmp_path / "out"), 3, "in one of two orders", "--gqa-layout grouped", "2024-12-04")
    assert convert("zero2hf", GPT, tmp_path / "out", "--gqa-layout", "blocked").code == 0
    golden = np.load(GPT / "logits.npz")
    assert np.abs(logits(tmp_path / "out", golden["ids"]) - golden["logits"][..., :60]).max() > 1
    output = convert("inspect", HERE / "llama_gqa_separate_tp2", "--gqa-layout", "grouped").out
    assert "--gqa-layout grouped has no effect: there is one order" in output


def test_two_stages(convert, tmp_path):
    """The last stage has a copy of module 1, no file of it, and positions of its own, with which nothing computes."""
    import torch

    run = shutil.copytree(HERE / STAGES, tmp_path / "run")
    assert "megatron_deepspeed, tp 1, pp 2" in convert("inspect", run, *CASES[STAGES]).out
    path = run / "global_step3/bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    value = torch.load(path, weights_only=False)
    value["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.add_(1)
    torch.save(value, path)
    options = (*CASES[STAGES], "--weights", "fp32-master", "--replicas", "verify", "-j", 1)  # up.1 differs too
    refused(convert("zero2hf", run, tmp_path / "out", *options), 6, "word_embeddings.weight differs between its copies")


def test_numbers_of_bigscience(convert, tmp_path):
    """Its layers begin with 3, its norm comes two later, and its one matrix has one order."""
    import shutil

    import torch

    run = shutil.copytree(GPT, tmp_path / "run")
    folder = run / "global_step3"
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    for rank in (0, 1):
        for old, new in ((4, 6), (3, 4), (2, 3)):
            source = folder / f"layer_0{old}-model_0{rank}-model_states.pt"
            torch.save(torch.load(source), folder / f"layer_0{new}-model_0{rank}-model_states.pt")
        (folder / f"layer_02-model_0{rank}-model_states.pt").unlink()
    assert convert("zero2hf", run, tmp_path / "out").code == 0
    assert convert("zero2hf", GPT, tmp_path / "same", *CASES[GPT.name]).code == 0
    assert convert("diff", tmp_path / "out", tmp_path / "same").code == 0


@pytest.mark.parametrize("name", CASES)
def test_masters_and_moments(convert, tmp_path, name):
    """Of the whole run, bit for bit what torch finds in the files of its ranks; master weights round to the weights."""
    import torch
    from safetensors.torch import load_file

    ranks = optimizer_of(HERE / name)[: 1 if name in STAGED else 2]
    for weights in ("fp32-master", "exp_avg", "exp_avg_sq"):
        out = tmp_path / weights
        ran = convert("zero2hf", HERE / name, out, *CASES[name], "--weights", weights)
        assert ran.code == 0, ran.err
        converted = load_file(out / "model.safetensors")
        flats = [
            state["single_partition_of_fp32_groups"][0]
            if weights == "fp32-master"
            else state["base_optimizer_state"]["state"][0][weights]
            for state in ranks
        ]
        embedding = next(
            tensor
            for key, tensor in converted.items()
            if key.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))
        )
        rows = torch.cat([flat[: ROWS // len(ranks) * 24].reshape(-1, 24) for flat in flats])
        assert embedding.equal(rows[:60])
        assert rows[:60].any()
    assert convert("verify", tmp_path / "fp32-master", HERE / name, *CASES[name], "--weights", "fp32-master").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_gqa_separate_tp2", "llama_gqa_fused_tp2", STAGES])
def test_other_frameworks_resume_from_it(convert, tmp_path, name):
    run, options = HERE / name, ["--with-optimizer", *CASES[name]]
    output = convert("inspect", run, *CASES[name]).out
    assert f"megatron_deepspeed, {'tp 1, pp 2' if name == STAGES else 'tp 2, pp 1'}, global_step3" in output
    assert "fp32, exp_avg, exp_avg_sq, step 3" in output
    assert convert("hf2fsdp", run, tmp_path / "fsdp", *options).code == 0
    assert convert("zero2universal", run, tmp_path / "universal", *CASES[name]).code == 0
    for form in ("torch_dist", "fsdp_dtensor", "torch"):
        out = tmp_path / form
        ran = convert("hf2megatron", run, out, *options, "--format", form, "--tp", 2)
        assert ran.code == 0, ran.err
        assert convert("hf2fsdp", out, tmp_path / f"{form}-fsdp", "--with-optimizer").code == 0
        assert convert("diff", tmp_path / "fsdp", tmp_path / f"{form}-fsdp").code == 0
        assert (tmp_path / f"{form}-fsdp/__0_0.distcp").read_bytes() == (tmp_path / "fsdp/__0_0.distcp").read_bytes()


@pytest.mark.parametrize("name", ["bloom_tp2", "bloom_pp2"])
def test_the_optimizer_of_a_bloom(convert, tmp_path, name):
    """Into FSDP and a universal checkpoint, which have it under the names of transformers."""
    from safetensors.torch import load_file

    run = HERE / name
    assert "fp32, exp_avg, exp_avg_sq, step 3" in convert("inspect", run).out
    assert convert("hf2fsdp", run, tmp_path / "fsdp", "--with-optimizer").code == 0
    ran = convert("zero2universal", run, tmp_path / "universal")
    assert ran.code == 0, ran.err
    config = ["--config", tmp_path / "fp32-master 1"]
    for weights in ("fp32-master", "exp_avg_sq"):
        out = [tmp_path / f"{weights} {number}" for number in (1, 2)]
        assert convert("zero2hf", run, out[0], "--weights", weights).code == 0
        assert convert("zero2hf", tmp_path / "universal", out[1], "--weights", weights, *config).code == 0
        ours, theirs = (load_file(folder / "model.safetensors") for folder in out)
        assert ours.keys() == theirs.keys()
        assert all(tensor.equal(theirs[key]) for key, tensor in ours.items())
    refused(convert("hf2megatron", run, tmp_path / "no"), 4, "megatron-core has no ALiBi")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layernorm_epsilon", 1e-6, "layernorm_epsilon = 1e-06 is not supported, only 1e-05"),
        ("embed_layernorm", False, "embed_layernorm = False is not supported, only True"),
        ("bias_gelu_fusion", False, "bias_gelu_fusion = False is not supported, only True"),
        ("glu_activation", "swiglu", "glu_activation = 'swiglu' is not supported, only None"),
        ("apply_residual_connection_post_layernorm", True, "apply_residual_connection_post_layernorm = True"),
        ("warp_speed", 9, "no Megatron-LM that is known here has these arguments: warp_speed = 9"),
    ],
)
def test_arguments_that_are_not_blooms(convert, tmp_path, name, value, message):
    run = resaved(tmp_path / "run", lambda state: setattr(state["args"], name, value), "mp_rank*", "bloom_tp2")
    refused(convert("zero2hf", run, tmp_path / "out"), 4, message)


@pytest.mark.parametrize("layers", [1, 3, 8])
def test_a_bloom_with_another_number_of_layers(convert, tmp_path, layers):
    run = resaved(tmp_path / "run", lambda state: setattr(state["args"], "num_layers", layers), "mp_rank*", "bloom_tp2")
    message = f"of a model of {layers} layers: the files there are number 1,3-4,6"
    refused(convert("zero2hf", run, tmp_path / "out"), 3, message, "num_layers is that of another model")


def test_arguments_of_blooms_own_scripts(convert, tmp_path):
    """They change how it is trained, or how many rows the embedding has, which the files tell."""
    options = {"sync_tp_duplicated_parameters": True, "kill_switch_path": "kill", "pad_vocab_size_to": 64}
    run = resaved(tmp_path / "run", lambda state: vars(state["args"]).update(options), "mp_rank*", "bloom_tp2")
    assert convert("zero2hf", run, tmp_path / "out").code == 0
    assert convert("diff", tmp_path / "out", HERE / "bloom_tp2").code == 0


@pytest.mark.parametrize("name", ["llama_gqa_separate_tp2", "bloom_tp2"])
def test_a_vocabulary_that_its_files_exclude(convert, tmp_path, name):
    """They record 60 tokens, where DeepSpeed has noted them; a config may have more, for rows without a token."""
    import json

    run, out, hub = HERE / name, tmp_path / "out", tmp_path / "hub"
    assert convert("zero2hf", run, hub).code == 0
    config = json.loads((hub / "config.json").read_text())
    for vocab in (61, 50, 30):
        ran = convert("zero2hf", run, out, "--vocab-size", vocab)
        refused(
            ran, 5, f"a vocabulary of 60, --vocab-size {vocab}: they contradict each other", "leave --vocab-size out"
        )
        (hub / "config.json").write_text(json.dumps(config | {"vocab_size": vocab}))
        ran = convert("zero2hf", run, out, "--config", hub)
        if vocab < 60:
            refused(ran, 5, f"a vocabulary of 60, the config {vocab}: they contradict each other", f"vocab={vocab}")
        else:
            assert ran.code == 0, ran.err
    assert convert("zero2hf", run, out, "--set", "vocab=50", "--force").code == 0


@pytest.mark.parametrize("name", ["llama_gqa_separate_tp2", "bloom_tp2"])
def test_a_vocabulary_that_its_padding_excludes(convert, tmp_path, name):
    """Without a record of the vocabulary: 64 rows are there, padded to multiples of 16 times two ranks."""

    def unrecorded(state: dict[str, Any]) -> None:
        for value in state.values():
            if isinstance(value, dict):
                value.pop("original_vocab_size", None)

    run = resaved(tmp_path / "run", unrecorded, "mp_rank*", name)
    argv = ("zero2hf", run, tmp_path / "out")
    refused(convert(*argv, "--vocab-size", 30), 5, "a vocabulary of 30 would have been padded to 32 rows", "holds 64")
    assert convert(*argv, "--vocab-size", 50).code == 0
    if name == "bloom_tp2":
        stated = lambda state: (unrecorded(state), vars(state["args"]).update(pad_vocab_size_to=64))  # noqa: E731
        run = resaved(tmp_path / "stated", stated, "mp_rank*", name)
        assert convert("zero2hf", run, tmp_path / "other", "--vocab-size", 30).code == 0


def test_other_positions_of_bigscience(convert, tmp_path):
    """Of its enum, and not the same on all ranks."""
    absolute = sys.modules["megatron.enums"].PositionEmbeddingType.absolute
    change = lambda state: setattr(state["args"], "position_embedding_type", absolute)  # noqa: E731
    run = resaved(tmp_path / "run", change, "mp_rank*", "bloom_tp2")
    refused(convert("zero2hf", run, tmp_path / "out"), 4, "ALiBi alone is supported, this is [2]")
    run = resaved(tmp_path / "odd", change, "mp_rank_01*", "bloom_tp2")
    refused(convert("zero2hf", run, tmp_path / "out"), 3, "position_embedding_type", "different models")


def test_a_config_of_another_bloom(model, convert, tmp_path):
    """It counts where nothing contradicts it: its tokens, and its longest sequence, which no weights depend on."""
    import json

    hub, run = tmp_path / "hub", HERE / "bloom_tp2"
    assert convert("zero2hf", run, hub).code == 0
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps(config | {"seq_length": 99}))
    assert convert("zero2hf", run, tmp_path / "out", "--config", hub).code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["seq_length"] == 99
    (hub / "config.json").write_text(json.dumps(config | {"n_head": 2}))
    refused(convert("zero2hf", run, tmp_path / "no", "--config", hub), 5, "contradict each other", "heads: 4 | 2")


def test_a_bloom_that_bigscience_has_not(model, convert, tmp_path):
    argv = ("hf2mds", model("bloom"), tmp_path / "out", "--qkv", "blocked")
    refused(convert(*argv), 2, "BigScience's tree has one order, not blocked")
    refused(convert("hf2mds", model("bloom-untied"), tmp_path / "out"), 5, "no output head of its own")
    odd = model("bloom", layer_norm_epsilon=1e-6)
    refused(convert("hf2mds", odd, tmp_path / "out"), 5, "an epsilon of 1e-05 after the embedding, this model 1e-06")


def test_every_command_reads_it(convert, tmp_path):
    run = HERE / "llama_gqa_separate_tp2"
    for command in ("zero2hf", "hf2megatron", "hf2neox", "hf2fsdp"):
        assert convert(command, run, tmp_path / command).code == 0
        assert convert("verify", tmp_path / command).code == 0
    places = (run, *(tmp_path / name for name in ("zero2hf", "hf2megatron", "hf2neox", "hf2fsdp")))
    assert len({convert("digest", place).out.split()[0] for place in places}) == 1
    assert convert("verify", run).code == 0, "its own checksums"
    refused(convert("neox2hf", run, tmp_path / "out"), 2, "megatron_deepspeed", "convert zero2hf")


@pytest.mark.parametrize("name", ["rope_theta", "layernorm_epsilon", "swiglu"])
def test_ranks_agree_in_every_argument_that_changes_the_model(convert, tmp_path, name):
    run = resaved(tmp_path / "run", lambda value: setattr(value["args"], name, 777), "mp_rank_01_model_states.pt")
    refused(convert("zero2hf", run, tmp_path / "out"), 3, f"mp_rank_01_model_states.pt says {name} = 777")


def test_positions_that_are_not_known(convert, tmp_path):
    """Also beside `use_rotary_position_embeddings`."""
    run = resaved(
        tmp_path / "run", lambda value: setattr(value["args"], "position_embedding_type", "alibi"), "mp_rank*"
    )
    refused(convert("zero2hf", run, tmp_path / "out"), 4, "position_embedding_type = 'alibi' is not supported")


def test_a_gelu_that_is_exact_for_onnx(convert, tmp_path):
    """Of --onnx-safe the tree makes no fused GELU (megatron/model/transformer.py:135), whatever its arguments say."""
    run = resaved(tmp_path / "run", lambda value: setattr(value["args"], "onnx_safe", True), "mp_rank*", GPT.name)
    argv = ["zero2hf", run, tmp_path / "out", "--gqa-layout", "grouped"]
    refused(convert(*argv), 4, "onnx_safe = True is not supported", "--accept onnx_safe")
    assert convert(*argv, "--accept", "onnx_safe").code == 0


def test_norms_of_which_the_last_is_whole(convert, tmp_path):
    """With --apply-layernorm-1p GPTModelPipe adds 1 in its layers, not in its final norm (gpt_model.py, 4efb479d)."""
    run = resaved(
        tmp_path / "run", lambda value: setattr(value["args"], "apply_layernorm_1p", True), "mp_rank*", GPT.name
    )
    refused(
        convert("zero2hf", run, tmp_path / "out", "--gqa-layout", "grouped"), 4, "apply_layernorm_1p = True", "final"
    )


def test_a_rotation_by_the_cosine_of_an_angle(convert, tmp_path):
    """deepspeedai's tree since 676a482c takes cosine and sine for angles (4efb479d, model/rotary_pos_embedding.py)."""
    name = "llama_gqa_fused_tp2"
    run = resaved(
        tmp_path / "run", lambda value: setattr(value["args"], "ds_sequence_parallel_fpdt", False), "mp_rank*", name
    )
    accepted = ("--accept", "use_rotary_position_embeddings")
    refused(convert("zero2hf", run, tmp_path / "out"), 4, "the cosine of the angle", " ".join(accepted))
    ran = convert("zero2hf", run, tmp_path / "out", *accepted)
    assert ran.code == 0, ran.err
    assert "rotates by the angle" in ran.err
    assert convert("diff", tmp_path / "out", HERE / name).code == 0


def test_the_optimizer_has_made_the_steps_that_the_engine_counts(convert, tmp_path):
    run = resaved(tmp_path / "run", lambda value: value.update(global_steps=4), "mp_rank*")
    argv = ["zero2hf", run, tmp_path / "out", "--weights", "fp32-master"]
    refused(convert(*argv), 3, "has made 3 steps", "counts 4: files of different saves", "--accept global_steps")
    ran = convert(*argv, "--accept", "global_steps")
    assert ran.code == 0, ran.err
    assert "counts 4: accepted" in ran.err


# --- writing ---------------------------------------------------------------------------------------------------------


def layers_of(run: Path) -> dict[str, dict[str, Any]]:
    """The tensors of each layer file, as torch reads them, without the rows that belong to no token."""
    import torch

    (folder,) = run.glob("global_step*")
    layers = {path.name: torch.load(path) for path in sorted(folder.glob("layer_*"))}
    for name, tensors in layers.items():
        for key in tensors.keys() & {"word_embeddings.weight", "lm_head.weight"}:
            first = int(name[15:17]) * len(tensors[key])
            tensors[key] = tensors[key][: max(0, 60 - first)]
    return layers


def same(ours: Path, theirs: Path) -> bool:
    """Whether two runs have the same files of layers, with the same names, types, shapes and bits in them."""
    first, second = layers_of(ours), layers_of(theirs)
    assert first.keys() == second.keys()
    assert all(first[name].keys() == second[name].keys() for name in first)
    return all(tensor.dtype == second[name][key].dtype and tensor.equal(second[name][key])
               for name in first for key, tensor in first[name].items())  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_what_the_trainer_wrote(convert, tmp_path, name):
    """From Hugging Face, and back from another topology; with `--finetune` the trainer loads these files alone."""
    import torch

    run, order = HERE / name, ORDERS.get(name, "grouped")
    sizes, others = ["--tp", 2], ["--pp", 2]
    sizes, others = (others, sizes) if name in STAGED else (sizes, others)
    padded = ["--make-vocab-size-divisible-by", 16]
    hub = tmp_path / "hub"
    assert convert("zero2hf", run, hub, *CASES[name]).code == 0
    ran = convert("hf2mds", hub, tmp_path / "run", "--qkv", order, *sizes, *padded, "--iteration", 3)
    assert ran.code == 0, ran.err
    assert same(tmp_path / "run", run)
    assert convert("hf2mds", tmp_path / "run", tmp_path / "other", *others).code == 0, "it knows its own order"
    assert convert("hf2mds", tmp_path / "other", tmp_path / "back", *sizes).code == 0
    assert same(tmp_path / "back", run)
    assert convert("verify", tmp_path / "other", hub).code == 0

    for path in sorted((run / "global_step3").glob("mp_rank_*")):
        ours = torch.load(tmp_path / "run/global_step3" / path.name, weights_only=False)
        theirs = torch.load(path, weights_only=False)
        for key in ("module", "dp_world_size", "mp_world_size", "global_steps", "iteration", "checkpoint_version"):
            assert ours[key] == theirs[key], key
        args = {key: value for key, value in vars(ours["args"]).items() if vars(theirs["args"])[key] != value}
        assert args == {}


def test_each_order_is_the_same_model(convert, tmp_path):
    """The order has to be said: no tree looks whether it is its own."""
    run = HERE / "llama_gqa_fused_tp2"
    assert convert("zero2hf", run, tmp_path / "hub").code == 0
    refused(convert("hf2mds", tmp_path / "hub", tmp_path / "out"), 2, "in different orders", "--qkv blocked")
    refused(
        convert("hf2mds", run, tmp_path / "out", "--tp", 1), 2, "in different orders"
    )  # at TP 2 all have these bytes
    for order in ("grouped", "blocked", "separate"):
        assert convert("hf2mds", run, tmp_path / order, "--qkv", order).code == 0
        assert convert("diff", tmp_path / order, run).code == 0
    assert not same(tmp_path / "grouped", tmp_path / "blocked")
    grouped = {key for tensors in layers_of(tmp_path / "grouped").values() for key in tensors}
    parts = {key for tensors in layers_of(tmp_path / "separate").values() for key in tensors}
    assert parts - grouped == {"self_attention.query.weight", "self_attention.key_value.weight"}
    argv = ("hf2mds", GPT, tmp_path / "no", "--gqa-layout", "grouped", "--qkv", "separate")
    refused(convert(*argv), 5, "each of 4 heads has its own", "--qkv grouped")


@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["llama_gqa_separate_tp2", STAGES, "bloom_tp2"])
def test_deepspeed_loads_what_we_write(zero, convert, tmp_path, name):
    """Its pipeline engine, strictly and without an optimizer: what a training does with `--finetune`."""
    from safetensors.torch import load_file

    pp, tp = (2, 1) if name == STAGES else (1, 2)
    assert convert("zero2hf", HERE / name, tmp_path / "hub", *CASES[name]).code == 0
    sizes = ["--tp", tp, "--pp", pp, "--make-vocab-size-divisible-by", 16, "--iteration", 3]
    ran = convert("hf2mds", tmp_path / "hub", tmp_path / "run", "--qkv", ORDERS.get(name, "grouped"), *sizes)
    assert ran.code == 0, ran.err
    argv = (tmp_path / "run", HERE / name / "global_step3", tmp_path / "held", pp, tp)
    code, output = zero(*argv, script=Path(__file__).with_name("mds_world.py"))
    assert code == 0, output[-4000:]
    loaded, expected = load_file(tmp_path / "held"), layers_of(HERE / name)
    for key, tensor in loaded.items():
        rank, index, parameter = key.replace("tied_modules.embed", "1").split(".", 2)
        if name == STAGES and rank == "1" and parameter == "position_embeddings.weight":
            continue  # nothing computes with those of the last stage
        file = expected[f"layer_{int(index):02d}-model_{int(rank) % tp:02d}-model_states.pt"]
        assert tensor[: len(file[parameter])].equal(file[parameter]), key
    assert {key.split(".", 1)[1].replace("tied_modules.embed", "1") for key in loaded} == {
        f"{int(file[6:8])}.{parameter}" for file, tensors in expected.items() for parameter in tensors
    }


SIZES = """--deepspeed --finetune --bf16 --num-layers 2 --hidden-size 24 --ffn-hidden-size 48 --num-attention-heads 4
--kv-channels 6 --max-position-embeddings 32 --layernorm-epsilon 1e-05 --make-vocab-size-divisible-by 16
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"""
FLAGS = {
    "llama_gqa_separate_tp2": """--num-key-value-heads 2 --normalization rmsnorm --swiglu --disable-bias-linear
    --use-rotary-position-embeddings --rotary-position-embeddings-theta 500000 --rotary-percent 1.0
    --untie-embeddings-and-output-weights""",
    "gpt_blocked_tp2": "--num-key-value-heads 4 --normalization layernorm --no-bias-gelu-fusion",
    "bloom_tp2": "--no-load-optim --override-lr-scheduler --position-embedding-type alibi --embed-layernorm",
}
"""What the command line of each model has besides `SIZES`. Its own parser makes its own arguments of them."""


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_of_the_training(convert, tmp_path, name):
    """Nothing of the model is taken from a checkpoint, and nothing compares."""
    ran = convert("hf2mds", HERE / name, tmp_path / "run", *CASES[name], "--tp", 2, "--pp", 2)
    assert ran.code == 0, ran.err
    assert f"--load {tmp_path / 'run'} and the flags in {tmp_path / 'run'}/megatron_flags.txt" in ran.out
    written = (tmp_path / "run/megatron_flags.txt").read_text()
    sizes = SIZES.replace("size 48", "size 96").replace("embeddings 32", "embeddings 16") if "bloom" in name else SIZES
    assert sorted(written.split()) == sorted(f"{sizes} {FLAGS[name]}".split())


def test_a_base_of_rotary_embeddings_is_a_whole_number(model, convert, tmp_path):
    """As the option of deepspeedai's trees is. The Hub's are floats."""
    options = ["--qkv", "grouped"]
    assert convert("hf2mds", model("llama", rope_theta=500000.0), tmp_path / "run", *options).code == 0
    assert "--rotary-position-embeddings-theta 500000\n" in (tmp_path / "run/megatron_flags.txt").read_text()
    ran = convert("hf2mds", model("llama", rope_theta=12345.5), tmp_path / "out", *options)
    refused(ran, 5, "Megatron-DeepSpeed has no rotary_base = 12345.5")


def resaved(
    run: Path, change: Callable[[dict[str, Any]], object], pattern: str, name: str = "llama_gqa_separate_tp2"
) -> Path:
    """A run of which some files were changed."""
    import torch

    shutil.copytree(HERE / name, run)
    for file in (run / "global_step3").glob(pattern):
        value = torch.load(file, weights_only=False)
        change(value)
        torch.save(value, file)
    return run
