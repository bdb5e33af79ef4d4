"""Checkpoints of Megatron-DeepSpeed that are incomplete, damaged or mixed, or of what has no layout here: refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import refused

REAL = Path(__file__).parents[1] / "golden/mds"
LLAMA, GPT = REAL / "llama_gqa_separate_tp2", REAL / "gpt_layernorm_tied_tp2"
STEP, LAYER, RANK = "global_step3", "layer_03-model_01-model_states.pt", "mp_rank_01_model_states.pt"
OPTIM = "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
MASTERS = ("--weights", "fp32-master")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(LLAMA, tmp_path / "run")


def changed(run: Path, name: str, change: Callable[[Any], object]) -> Path:
    """A file, read, changed and written by torch."""
    import torch

    path = run / STEP / name
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)
    return run


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (LAYER, (), f"lacks {LAYER}"),
        ("layer_05-model_00-model_states.pt", (), "lacks layer_05-model_00"),
        ("layer_01-model_00-model_states.pt", (), "no word_embeddings.weight"),
        ("mp_rank_00_model_states.pt", (), "lacks mp_rank_00"),
        (RANK, (), "one of 2 model parallel ranks, 1 are there"),
        (OPTIM, MASTERS, "no optimizer states of mp_rank_01"),
    ],
)
def test_a_file_that_is_missing(convert, run, tmp_path, name, options, message):
    (run / STEP / name).unlink()
    refused(convert("zero2hf", run, tmp_path / "out", *options), 3, message)


@pytest.mark.parametrize("layer", [2, 3, 4])
def test_a_layer_that_is_missing_is_named(convert, run, tmp_path, layer):
    """Also the first, whose number is the tree's own: with two layers those are 2 and 3 here, then norm and head."""
    for file in (run / STEP).glob(f"layer_{layer:02d}-*"):
        file.unlink()
    names = ", ".join(f"layer_{layer:02d}-model_{rank:02d}-model_states.pt" for rank in range(2))
    refused(convert("zero2hf", run, tmp_path / "out"), 3, f"lacks {names}, of a model of 2 layers: the files there are")


def test_arguments_of_a_run(convert, run, tmp_path):
    """What every run says that was started with a DeepSpeed config; and norms of queries, which its tables have not."""

    def change_args(**settings: object) -> None:
        for rank in range(2):
            changed(run, f"mp_rank_{rank:02d}_model_states.pt", lambda value: vars(value["args"]).update(settings))

    change_args(
        deepspeed_config="ds_config.json", use_flash_attn_v2=True, train_tokens=10**12, partition_activations=True
    )
    ran = convert("zero2hf", run, tmp_path / "out")
    assert ran.code == 0, ran.err
    change_args(compression_training=True)
    refused(convert("zero2hf", run, tmp_path / "no"), 4, "compression_training = True")
    change_args(compression_training=False, qk_layernorm=True)
    refused(convert("zero2hf", run, tmp_path / "no"), 4, "Megatron-DeepSpeed is read of gpt2, llama, bloom")


@pytest.mark.parametrize(("name", "options"), [(LAYER, ()), (RANK, ()), (OPTIM, MASTERS)])
def test_a_file_that_is_cut_off(convert, run, tmp_path, name, options):
    path = run / STEP / name
    path.write_bytes(path.read_bytes()[:-100])
    refused(convert("zero2hf", run, tmp_path / "out", *options), 3, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options", "code", "message"),
    [(LAYER, (), 3, "CRC-32"), (OPTIM, MASTERS, 6, "rounded FP32 master weights")],
)
def test_a_flipped_bit(convert, run, tmp_path, name, options, code, message):
    import torch

    path = run / STEP / name
    value = torch.load(path, weights_only=False)
    tensor = value["mlp.dense_4h_to_h.weight"] if name == LAYER else None
    tensor = value["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] if tensor is None else tensor
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(raw) + 51] ^= 64
    path.write_bytes(content)
    refused(convert("zero2hf", run, tmp_path / "out", *options), code, message)


def test_files_under_each_others_names(convert, run, tmp_path):
    import torch

    paths = [run / STEP / f"mp_rank_0{rank}_model_states.pt" for rank in (0, 1)]
    contents = [torch.load(path, weights_only=False) for path in paths]
    for path, other in zip(paths, reversed(contents), strict=True):
        torch.save(other, path)
    refused(convert("inspect", run), 3, "was saved by rank 1, which belongs elsewhere")


def test_no_ranks_at_all(convert, run):
    import torch

    for path in (run / STEP).glob("mp_rank_*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        state["args"].world_size = 0
        torch.save(state, path)
    assert convert("inspect", run).code == 0  # the files themselves tell their ranks


def argument(name: str, value: Any) -> Callable[[Any], object]:
    return lambda stored: setattr(stored["args"], name, value)


MIXED = {
    "iteration": (RANK, lambda state: state.update(iteration=2), "iteration"),
    "model": (RANK, argument("ffn_hidden_size", 96), "ffn_hidden_size = 96"),
    "rows": (RANK, argument("padded_vocab_size", 128), "padded_vocab_size = 128"),
    "topology": (RANK, argument("tensor_model_parallel_size", 4), "tensor_model_parallel_size = 4"),
    "world": (RANK, lambda state: state.update(mp_world_size=4), "one of 4 model parallel ranks"),
    "no args": (RANK, lambda state: state.pop("args"), "holds no args"),
    "another key": (LAYER, lambda state: state.update({"self_attention.gate.weight": state["input_layernorm.weight"]}),
                    "has no place in this model"),
    "another shape": (
        LAYER, lambda state: state.update({"input_layernorm.weight": state["input_layernorm.weight"][:-1]}),
        "has shape [23]",
    ),
    "no tensor": (LAYER, lambda state: state.pop("mlp.dense_4h_to_h.weight"), "1 tensor is missing"),
}  # fmt: skip
"""What is changed in one file, and what is said of it."""


@pytest.mark.parametrize("kind", MIXED)
def test_files_of_different_saves(convert, run, tmp_path, kind):
    name, change, message = MIXED[kind]
    refused(convert("zero2hf", changed(run, name, change), tmp_path / "out"), 3, message)
    assert not (tmp_path / "out").exists()


def lion(stored: Any) -> None:
    """What Lion keeps."""
    optimizer = stored["optimizer_state_dict"]["base_optimizer_state"]
    for state in optimizer["state"].values():
        state.pop("exp_avg_sq")
    for group in optimizer["param_groups"]:
        group.pop("eps")


@pytest.mark.filterwarnings("ignore")
def test_lion_beside_adam(convert, run, tmp_path):
    changed(run, OPTIM, lion)
    message = (f"{OPTIM} is of the optimizer Lion, ", "mp_rank_00_optim_states.pt of Adam: files of different saves")
    refused(convert("zero2hf", run, tmp_path / "out", *MASTERS), 3, *message)
    refused(convert("zero2universal", run, tmp_path / "out"), 3, *message)


def step(stored: Any) -> None:
    for state in stored["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] = state["step"] + 1


@pytest.mark.filterwarnings("ignore")
def test_optimizer_states_of_another_save(convert, run, tmp_path):
    changed(run, OPTIM, step)
    refused(convert("zero2hf", run, tmp_path / "out", *MASTERS), 3, "files of different saves")
    refused(convert("hf2fsdp", run, tmp_path / "out", "--with-optimizer"), 3, "files of different saves")
    assert convert("zero2hf", run, tmp_path / "out").code == 0


@pytest.mark.filterwarnings("ignore")
def test_masters_of_another_model(convert, run, tmp_path):
    def other(stored: Any) -> None:
        stored["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.add_(1)

    changed(run, OPTIM, other)
    refused(convert("zero2hf", run, tmp_path / "out", *MASTERS), 6, "are not the rounded FP32 master weights")


UNKNOWN = {
    "experts": (argument("num_experts", [4]), "[4] experts"),
    "residual": (argument("mlp_type", "residual"), "mlp_type = 'residual'"),
    "embedding norm": (argument("embed_layernorm", True), "embed_layernorm = True"),
    "compression": (argument("compression_training", True), "compression_training = True"),
    "post norm": (
        argument("apply_residual_connection_post_layernorm", True),
        "apply_residual_connection_post_layernorm",
    ),
    "version": (lambda state: state.update(checkpoint_version=1.0), "before 2.0"),
    "whole": (lambda state: state.update(module={"language_model": {}}), "--no-pipeline-parallel"),
}
"""What has no layout here, in the arguments of every rank."""


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_supported(convert, run, tmp_path, kind):
    change, message = UNKNOWN[kind]
    for rank in (0, 1):
        changed(run, f"mp_rank_0{rank}_model_states.pt", change)
    refused(convert("zero2hf", run, tmp_path / "out"), 4, message)


def test_a_universal_checkpoint_of_another_model(convert, run, tmp_path):
    """Without layer files, which a conversion writes beside it; the folders of parameters are empty."""
    (run / STEP / "zero/1.word_embeddings.weight").mkdir(parents=True)
    for path in (run / STEP).glob("layer_*"):
        path.unlink()
    refused(convert("zero2hf", run, tmp_path / "out"), 3, "zero/1.word_embeddings.weight/fp32.pt: No such file")


def test_a_vocabulary_that_contradicts_it(convert, tmp_path):
    assert convert("zero2hf", LLAMA, tmp_path / "out", "--vocab-size", 60).code == 0
    refused(convert("zero2hf", LLAMA, tmp_path / "more", "--set", "vocab=65"), 3, "holds 64 rows of embeddings")


def test_norms_that_drifted_are_averaged_and_told(convert, run, tmp_path):
    """As in GPT-NeoX, each tensor parallel rank has its own copy of a norm."""
    changed(run, LAYER, lambda stored: stored["input_layernorm.weight"].mul_(1.01))
    ran = convert("zero2hf", run, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "copies" in ran.err
    refused(convert("zero2hf", run, tmp_path / "strict", "--replicas", "verify"), 6, "differs between its copies")


@pytest.mark.parametrize("order", [1, -1])
def test_an_average_tells_of_norms_that_drifted_in_one_of_two_runs(convert, run, tmp_path, order):
    changed(run, LAYER, lambda stored: stored["input_layernorm.weight"].mul_(1.01))
    for masters in (run / STEP).glob("bf16_zero_*"):  # of which copies do not drift
        masters.unlink()
    ran = convert("average", *(run, LLAMA)[::order], tmp_path / "out")
    assert (ran.code, "the copies of 1 tensors differed" in ran.err) == (0, True), ran.err


@pytest.mark.parametrize("options", [(), ("--with-optimizer",)])
def test_a_change_of_what_is_beside_the_weights(model, convert, tmp_path, options):
    """Arguments and the schedule of the learning rate are in files without a tensor: the manifest knows them."""
    order = ("--qkv", "separate") if options else ("--qkv", "grouped")
    source, out = LLAMA if options else model("llama-mha"), tmp_path / "out"
    assert convert("hf2mds", source, out, *order, *options, "--tp", 2).code == 0
    assert convert("verify", out).code == 0
    folder = next(out.glob("global_step*"))
    known = json.loads((folder / "vitruvian.json").read_text())["files"]
    assert {name for name in known if "mp_rank" in name} == {f"mp_rank_0{rank}_model_states.pt" for rank in range(2)}

    def later(value: dict[str, Any]) -> None:
        value["args"].hidden_dropout = 0.5
        if options:
            value["lr_scheduler"]["max_lr"] *= 2

    import torch

    path = folder / "mp_rank_01_model_states.pt"
    value = torch.load(path, weights_only=False)
    later(value)
    torch.save(value, path)
    ran = convert("verify", out)
    assert (ran.code, "mp_rank_01_model_states.pt" in ran.out + ran.err) == (6, True), ran.err
