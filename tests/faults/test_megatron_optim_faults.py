"""Optimizers of Megatron runs that are damaged, incomplete, or of a kind that cannot be cut again: each is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from formats.errors import UnsupportedError
from formats.megatron import muon
from tests.optimizers import add_optimizer, check

FOLDER = "iter_0000003/mp_rank_{:02d}"


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """Runs at TP 2, or with experts at EP 2, with an optimizer, by what it is: to be copied before they are spoiled."""
    import sys

    from converters.cli import cli

    folders = {}
    for kind, how, name, dtype, cut in (
        ("plain", "plain", "llama", "bfloat16", "--tp"),
        ("distributed", "distributed", "mistral", "float32", "--tp"),
        ("experts", "plain", "mixtral", "bfloat16", "--ep"),
        ("both", "distributed", "mixtral", "float32", "--ep"),
    ):
        folders[kind] = tmp_path_factory.mktemp(kind) / "run"
        argv = ["hf2megatron", str(model(name, dtype)), str(folders[kind]), cut, "2", "--iteration", "3", "-q"]
        cli(argv, standalone_mode=False)
        add_optimizer(folders[kind], how)
    sys.stdout.flush()
    return folders


def spoil(run: Path, change: Any, name: str = "model_optim_rng.pt", rank: int = 1) -> None:
    """Change a file of a rank, given what is in it."""
    import torch

    path = run / FOLDER.format(rank) / name
    path = path if path.exists() else run / "iter_0000003" / f"mp_rank_00_00{rank}" / name
    stored = torch.load(path, weights_only=False)
    change(stored)
    torch.save(stored, path)


def adam(stored: dict[str, Any]) -> dict[str, Any]:
    return stored["optimizer"]["optimizer"]


def twice(stored: dict[str, Any]) -> None:
    """Double the weights and their FP32 master weights, those of experts too, which have an optimizer of their own."""
    weights = [tensor for key, tensor in stored["model"].items() if not key.endswith("_extra_state")]
    masters = [group for optimizer in stored["optimizer"] for group in optimizer["fp32_from_fp16_params"]]
    for tensors in (weights, *masters):
        for tensor in tensors:
            tensor.mul_(2)


def nested(depth: int) -> list[Any]:
    """Lists inside each other."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


PLAIN = {
    "no moment of a parameter": (lambda s: adam(s)["state"][3].pop("exp_avg_sq"), 3, "holds no exp_avg_sq of decoder"),
    "no step yet": (lambda s: adam(s)["state"].clear(), 3, "holds no exp_avg and no exp_avg_sq of embedding"),
    "frozen": (lambda s: adam(s)["param_groups"][0]["params"].pop(), 3, "has 17 parameters, its model has 18"),
    "no master": (lambda s: s["optimizer"]["fp32_from_fp16_params"][1].pop(), 3, "has 8 parameters, its model has 9"),
    "no master weights": (lambda s: s["optimizer"].pop("fp32_from_fp16_params"), 3, "fp32 of its optimizer: "),
    "another master": (lambda s: s["optimizer"]["fp32_from_fp16_params"][0][2].mul_(1.5), 6, "FP32 master weights"),
    "another shape": (
        lambda s: adam(s)["state"][3].update(exp_avg=adam(s)["state"][3]["exp_avg"][:-1].clone()), 3, "has shape"
    ),
    "another step": (lambda s: [entry["step"].add_(1) for entry in adam(s)["state"].values()], 3, "of different steps"),
    "steps differ": (lambda s: adam(s)["state"][3]["step"].add_(1), 4, "different numbers of steps"),
    "another rate": (lambda s: adam(s)["param_groups"][0].update(lr=0.02), 3, "different steps or settings"),
    "several": (lambda s: s.update(optimizer=[s["optimizer"]]), 4, "several optimizers"),
    "amsgrad": (lambda s: adam(s)["state"][3].update(max=adam(s)["state"][3]["exp_avg"]), 4, "keeps 'max' of"),
    "set to amsgrad": (
        lambda s: [entry.update(amsgrad=True) for entry in adam(s)["param_groups"]], 3, "different steps or settings"
    ),
    "moments exchanged": (
        lambda s: adam(s)["state"][3].update(exp_avg_sq=adam(s)["state"][3]["exp_avg"]), 5, "finite and not negative"
    ),
    "three groups": (lambda s: adam(s)["param_groups"].append(adam(s)["param_groups"][1]), 4, "3 groups of parameters"),
    "copies differ": (lambda s: adam(s)["state"][18]["exp_avg"].add_(1), 6, "differs between its copies"),
    "groups in groups": (lambda s: adam(s)["param_groups"][0].update(lr=nested(300)), 4, "which is no plain data"),
    "no optimizer": (lambda s: s.pop("optimizer"), 3, "holds no optimizer"),
    "of another kind": (lambda s: s.update(optimizer={"optimizer": 5}), 3, "no optimizer of a kind that is known"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLAIN)
def test_a_plain_optimizer_is_whole_or_refused(runs, convert, tmp_path, what):
    change, code, message = PLAIN[what]
    run, out = shutil.copytree(runs["plain"], tmp_path / "run"), tmp_path / "out"
    spoil(run, change)
    ran = convert("reshard", run, out, "--with-optimizer")
    assert (ran.code, message in ran.err, out.exists()) == (code, True, False), ran.err
    assert what in ("another master", "copies differ") or convert("inspect", run).code == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"amsgrad": True}, "says amsgrad = True: such an optimizer keeps max_exp_avg_sq too"),
        ({"momentum_decay": 0.004}, "says momentum_decay = 0.004: such an optimizer keeps mu_product too"),
        ({"maximize": True}, "says maximize = True"),
        ({"max_coeff": 10.0}, "its optimizer is LAMB"),
        ({"bias_correction": False}, "says bias_correction = False"),
        ({"decoupled_weight_decay": False}, "a weight decay of 0.1 is in the gradients"),
        ({"eps": float("inf")}, "its eps is inf"),
    ],
)
def test_settings_of_another_optimizer(runs, model, convert, tmp_path, setting, message):
    """On all ranks. Megatron itself takes the settings along; what else has states than Adam, it cannot go on with."""
    run, out = shutil.copytree(runs["plain"], tmp_path / "run"), tmp_path / "out"
    for rank in (0, 1):
        spoil(run, lambda stored: [group.update(setting) for group in adam(stored)["param_groups"]], rank=rank)
    for command in (["hf2fsdp"], ["zero2universal"], ["reshard", "--tp", 1]):
        ran = convert(command[0], run, out, *command[1:], *(["--with-optimizer"] * (command[0] != "zero2universal")))
        if command[0] == "reshard" and "keeps" not in message and "its eps" not in message:
            assert ran.code == 0, ran.err
        else:
            assert (ran.code, message in ran.err, out.exists()) == (3 if "its eps" in message else 4, True, False), (
                ran.err
            )


def scheduled(count: object) -> Any:
    return lambda stored: stored.update(opt_param_scheduler={**stored["opt_param_scheduler"], "num_steps": count})


def grouped(**settings: object) -> Any:
    return lambda stored: [group.update(settings) for group in adam(stored)["param_groups"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (grouped(step=-1), "the step of its optimizer is -1, which is no count"),
        (grouped(step=3.5), "the step of its optimizer is 3.5, which is no count"),
        (grouped(step="3"), "the step of its optimizer is '3', which is no number"),
        (grouped(step=None), "the step of its optimizer is None, which is no number"),
        (grouped(step=True), "the step of its optimizer is True, which is no number"),
        (grouped(lr="x"), "its lr is 'x', which is no number"),
        (grouped(betas=(0.9,)), "has the betas"),
        (scheduled(-5), "num_steps of its opt_param_scheduler is -5, which is no count"),
        (scheduled("x"), "num_steps of its opt_param_scheduler is 'x', which is no number"),
        (scheduled(None), "num_steps of its opt_param_scheduler is None, which is no number"),
    ],
)
def test_numbers_that_no_training_saves(runs, convert, tmp_path, change, message):
    run, out = shutil.copytree(runs["distributed"], tmp_path / "run"), tmp_path / "out"
    for rank in (0, 1):
        spoil(run, change, rank=rank)
    ran = convert("reshard", run, out, "--with-optimizer", "--tp", 1)
    assert (ran.code, message in ran.err, out.exists()) == (3, True, False), ran.err


def test_files_of_a_distributed_optimizer(runs, convert, tmp_path):
    def refused(run: Path, message: str, code: int = 3) -> None:
        ran = convert("reshard", run, tmp_path / "out", "--with-optimizer")
        assert (ran.code, message in ran.err) == (code, True), ran.err

    def copy(name: str) -> Path:
        return shutil.copytree(runs["distributed"], tmp_path / name)

    run = copy("cut")
    path = run / FOLDER.format(0) / "distrib_optim.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(run, "distrib_optim.pt is not a sound torch.save archive")
    path.unlink()
    refused(run, "holds no distrib_optim.pt")
    other = copy("other")
    spoil(other, lambda stored: next(iter(stored[0].values()))["param"][:100].add_(1), "distrib_optim.pt")
    refused(other, "rounded FP32 master weights", 6)
    short = copy("short")
    spoil(
        short,
        lambda stored: next(iter(stored[0].values())).update(
            exp_avg=next(iter(stored[0].values()))["exp_avg"][1:].clone()
        ),
        "distrib_optim.pt",
    )
    refused(short, "elements of exp_avg, its model has")
    amsgrad = copy("amsgrad")
    spoil(
        amsgrad,
        lambda stored: next(iter(stored[0].values())).update(
            max_exp_avg_sq=next(iter(stored[0].values()))["exp_avg_sq"]
        ),
        "distrib_optim.pt",
    )
    refused(amsgrad, "the optimizer keeps 'max_exp_avg_sq'", 4)
    larger = copy("more")
    spoil(larger, lambda stored: stored.update({1: stored[0]}), "distrib_optim.pt")
    refused(larger, "more than one buffer", 4)


def of_experts(stored: dict[str, Any]) -> dict[str, Any]:
    return stored["optimizer"][1]["optimizer"]


EXPERTS = {
    "another rate": (lambda s: of_experts(s)["param_groups"][0].update(lr=0.02), 4, "experts are trained with other"),
    "another step": (lambda s: of_experts(s)["state"][3]["step"].add_(1), 4, "different numbers of steps"),
    "one for all": (lambda s: s.update(optimizer=s["optimizer"][0]), 4, "holds one optimizer"),
    "three": (lambda s: s["optimizer"].append(s["optimizer"][0]), 4, "holds several optimizers"),
    "the wrong way round": (lambda s: s["optimizer"].reverse(), 4, "groups of parameters, not one with"),
    "no groups": (lambda s: s["optimizer"][0]["optimizer"]["param_groups"].clear(), 4, "0 groups of parameters"),
    "no entries": (lambda s: s.update(optimizer=[1, 2]), 4, "holds several optimizers"),
    "another scaler": (lambda s: s["optimizer"][1].update(grad_scaler={"growth": 7}), 3, "scale losses otherwise"),
    "no moment": (lambda s: of_experts(s)["state"][3].pop("exp_avg"), 3, "holds no exp_avg of decoder.layers."),
    "copies differ": (lambda s: s["optimizer"][0]["optimizer"]["state"][1]["exp_avg"].add_(1), 6, "between its copies"),
    "another master": (lambda s: s["optimizer"][1]["fp32_from_fp16_params"][0][2].mul_(1.5), 6, "FP32 master weights"),
}  # fmt: skip


@pytest.mark.parametrize("what", EXPERTS)
def test_an_optimizer_of_experts_is_whole_or_refused(runs, convert, tmp_path, what):
    change, code, message = EXPERTS[what]
    run, out = shutil.copytree(runs["experts"], tmp_path / "run"), tmp_path / "out"
    spoil(run, change)
    ran = convert("reshard", run, out, "--with-optimizer")
    assert (ran.code, message in ran.err, out.exists()) == (code, True, False), ran.err


def test_files_of_two_distributed_optimizers(runs, convert, tmp_path):
    for number, (change, rank, code, message) in enumerate(
        (
            (lambda stored: stored.__setitem__(1, None), 1, 3, "tensors are missing"),
            (lambda stored: stored.__setitem__(0, None), 0, 3, "tensors are missing"),
            (lambda stored: stored.pop(), 0, 4, "holds 1 optimizers, model_optim_rng.pt 2"),
            (lambda stored: next(iter(stored[1][0].values()))["param"][:100].add_(1), 1, 6, "FP32 master weights"),
        )
    ):
        run = shutil.copytree(runs["both"], tmp_path / f"run{number}")
        spoil(run, change, "distrib_optim.pt", rank)
        for kind in ("plain", "distributed"):
            ran = convert("reshard", run, tmp_path / "out", "--with-optimizer", "--optimizer", kind)
            assert (ran.code, message in ran.err) == (code, True), ran.err


@pytest.mark.parametrize("argv", [("zero2universal", "RUN", "OUT"), ("hf2fsdp", "RUN", "OUT", "--ranks", "2")])
def test_weights_of_two_runs_beside_the_master_weights_of_one(runs, convert, tmp_path, argv):
    """Masters that are read in place of the weights are of every copy of them, also on the other ranks of experts."""
    run = shutil.copytree(runs["both"], tmp_path / "run")
    (run / "iter_0000003/vitruvian.json").unlink()
    spoil(run, lambda stored: stored["model"]["decoder.final_layernorm.weight"].mul_(2))
    words = [*argv, *(["--with-optimizer"] if argv[0] == "hf2fsdp" else [])]
    ran = convert(*({"RUN": run, "OUT": tmp_path / "out"}.get(word, word) for word in words))
    told = "decoder.final_layernorm.weight" in ran.err and "mp_rank_00_001/model_optim_rng.pt are not the" in ran.err
    assert (ran.code, told) == (6, True), ran.err


def test_a_buffer_with_gaps_is_refused(model, convert, tmp_path):
    """Where they are depends on the buckets of the training, of which the file tells nothing."""
    run = tmp_path / "run"
    convert("hf2megatron", model("starcoder2"), run, "--tp", 2, "--iteration", 3)  # a bias has 96 / 2 elements
    add_optimizer(run, "distributed")
    ran = convert("reshard", run, tmp_path / "out", "--with-optimizer")
    assert (ran.code, "[48] is no multiple of 64 elements" in ran.err) == (4, True), ran.err
    next(run.rglob("vitruvian.json")).unlink()
    assert convert("verify", run).code == 0
    (run / FOLDER.format(1) / "distrib_optim.pt").unlink()  # of the last rank: of the first one it is missed anyway
    for argv in (("verify", run), ("reshard", run, tmp_path / "out", "--with-optimizer")):
        ran = convert(*argv)
        message = f"{run / FOLDER.format(1)} holds no distrib_optim.pt, which model_optim_rng.pt says there is"
        assert (ran.code, message in ran.err) == (3, True), ran.err


def test_states_of_a_distributed_checkpoint(runs, convert, tmp_path):
    run = tmp_path / "run"
    convert("reshard", runs["plain"], run, "--format", "torch_dist", "--with-optimizer")
    metadata, manifest = run / "iter_0000003/.metadata", run / "iter_0000003/vitruvian.json"
    original = metadata.read_bytes()
    for old, new, code, message in (
        (b"exp_avg.output_layer", b"exp_avg.output_lazer", 3, "1 tensor is missing"),
        (b"state.fp32_param.", b"state.fp32_parax.", 4, "the optimizer keeps fp32_parax"),
    ):
        assert old in original
        metadata.write_bytes(original.replace(old, new))
        ran = convert("reshard", run, tmp_path / "out", "--with-optimizer")
        assert (ran.code, message in ran.err) == (code, True), ran.err
    metadata.write_bytes(original)
    manifest.write_text(manifest.read_text().replace('"exp_avg.final_norm": {', '"exp_avg.final_norm": {"x": 1,'))
    assert convert("verify", run).code == 0
    path = sorted((run / "iter_0000003").glob("*.distcp"))[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert convert("verify", run).code == 6
    assert convert("reshard", run, tmp_path / "out", "--with-optimizer").code == 3


def test_a_sharding_that_megatron_gave_up(runs, convert, tmp_path):
    """Flattened slices under the names of whole states: megatron-core up to 0.13 and AReaL saved them, Megatron-LM#2126
    took them out, and AReaL#1468 tells of moments that were then dropped without a word."""
    import torch

    run = tmp_path / "run"
    convert("reshard", runs["plain"], run, "--format", "torch_dist", "--with-optimizer")
    (run / "iter_0000003/vitruvian.json").unlink()
    path = run / "iter_0000003/common.pt"
    stored = torch.load(path, weights_only=False)
    for kind in ("fully_sharded_model_space", "dp_zero_gather_scatter"):
        stored["content_metadata"]["distrib_optim_sharding_type"] = kind
        torch.save(stored, path)
        ran = convert("reshard", run, tmp_path / "out", "--with-optimizer")
        assert (ran.code, f"keeps its optimizer as '{kind}', which is not known" in ran.err) == (4, True), ran.err


def test_muon_in_files_beside_those_of_the_ranks(runs, convert, tmp_path):
    """`layer_wise_optimizer_*.pt` of Megatron-Bridge#2307 is in the run, and overwritten by each save: the states of
    one iteration are found with the weights of another, so none are taken. Megatron-LM 0.19.2 has it beside a rank."""
    import torch

    run = tmp_path / "run"
    shutil.copytree(runs["plain"], run)

    def of_muon(stored: dict[str, Any]) -> None:
        stored["args"].optimizer = "muon"
        del stored["optimizer"]

    for rank in range(2):
        spoil(run, of_muon, rank=rank)
        torch.save([{}], run / f"layer_wise_optimizer_{rank}.pt")
    torch.save([{}], run / FOLDER.format(0) / "layer_wise_optimizer_2.pt")
    ran = convert("reshard", run, tmp_path / "out", "--with-optimizer")
    assert (ran.code, "its optimizer is 'muon'" in ran.err) == (4, True), ran.err
    ran = convert("reshard", run, tmp_path / "out", "-n")
    left = ", ".join(f"layer_wise_optimizer_{rank}.pt" for rank in range(3))
    assert (ran.code, f"only the weights are converted, not {left}, opt_param" in ran.out) == (0, True), ran.out


@pytest.mark.parametrize("argv", [("digest", "RUN"), ("zero2universal", "RUN", "OUT")])
def test_a_vocabulary_that_nothing_tells_is_asked_for(runs, convert, tmp_path, argv):
    run, out = shutil.copytree(runs["plain"], tmp_path / "run"), tmp_path / "out"
    shutil.rmtree(run / "huggingface")
    for manifest in run.rglob("vitruvian.json"):
        manifest.unlink()
    for rank in (0, 1):
        spoil(run, lambda stored: delattr(stored["args"], "true_vocab_size"), rank=rank)
    ran = convert(*[{"RUN": run, "OUT": out}.get(word, word) for word in argv])
    assert (ran.code, "--vocab-size N" in ran.err, out.exists()) == (5, True, False), ran.err


def test_muon_of_experts_is_read_from_one_rank_alone():
    args = {"num_experts": 4, "expert_model_parallel_size": 1}
    muon.require_known(args, "run")
    with pytest.raises(UnsupportedError, match="Muon of experts that are on 2 ranks"):
        muon.require_known(args | {"expert_model_parallel_size": 2}, "run")


def test_a_muon_that_sees_the_parts_of_a_rank_takes_other_steps_at_another_size():
    args = {"optimizer": "muon", "muon_tp_mode": "blockwise", "tensor_model_parallel_size": 2}
    assert muon.notes(args, 2) == []
    (note,) = muon.notes(args, 4)
    assert "at another --tp its steps differ" in note
    assert muon.notes(args | {"muon_tp_mode": "duplicated"}, 4) == []
    assert muon.notes(args | {"optimizer": "adam"}, 4) == []


def test_an_optimizer_of_another_kind_asks_for_one(runs, convert, tmp_path):
    ran = convert("reshard", runs["plain"], tmp_path / "out", "--optimizer", "plain")
    assert (ran.code, "add --with-optimizer" in ran.err) == (2, True), ran.err


def test_what_cannot_go_on(runs, model, convert, tmp_path):
    def refused(code: int, message: str, *argv: object) -> None:
        ran = convert("reshard", *argv, "--with-optimizer")
        assert (ran.code, message in ran.err) == (code, True), ran.err

    refused(2, "--with-optimizer excludes --dtype fp32", runs["plain"], tmp_path / "out", "--dtype", "fp32")
    refused(
        2,
        "--with-optimizer has no effect on the format megatron-llm",
        runs["plain"],
        tmp_path / "out",
        "--format",
        "megatron-llm",
    )
    convert("hf2megatron", model("llama"), tmp_path / "release")
    refused(3, "is a release, of which Megatron loads no optimizer", tmp_path / "release", tmp_path / "out")
    uneven = tmp_path / "uneven"
    convert("hf2megatron", model("dots1", "bfloat16"), uneven, "--ep", 2, "--iteration", 3)
    add_optimizer(uneven, "plain")
    options = ["--format", "torch_dist", "--ep", 2, "--pp", 2, "--first-stage-layers", 1]
    refused(5, "stage 0 has no experts", uneven, tmp_path / "out", *options)
    assert convert("reshard", uneven, tmp_path / "out", *options[:-2], "--with-optimizer", "-n").code == 0
    convert("hf2neox", model("llama"), tmp_path / "neox")
    refused(2, "--with-optimizer is for Megatron", tmp_path / "neox", tmp_path / "out")


def test_steps_that_the_groups_have(runs, convert, tmp_path):
    """Transformer Engine's and Apex's Adam count there, that of torch in each parameter's state."""
    import torch

    run, dist, back = shutil.copytree(runs["plain"], tmp_path / "run"), tmp_path / "dist", tmp_path / "back"

    def move(stored: dict[str, Any]) -> None:
        for state in adam(stored)["state"].values():
            del state["step"]
        for group in adam(stored)["param_groups"]:
            group["step"] = 3

    for rank in (0, 1):
        spoil(run, move, rank=rank)
    assert convert("reshard", run, dist, "--format", "torch_dist", "--with-optimizer").code == 0
    inner = torch.load(dist / "iter_0000003/common.pt", weights_only=False)["optimizer"]["optimizer"]
    assert (inner["state"], [group["step"] for group in inner["param_groups"]]) == ({}, [3, 3])
    assert convert("reshard", dist, back, "--tp", 2, "--format", "torch", "--with-optimizer").code == 0
    stored = torch.load(back / FOLDER.format(1) / "model_optim_rng.pt", weights_only=False)
    assert {tuple(state) for state in adam(stored)["state"].values()} == {("exp_avg", "exp_avg_sq")}
    assert [group["step"] for group in adam(stored)["param_groups"]] == [3, 3]

    other, plain = tmp_path / "other", tmp_path / "plain"
    assert convert("reshard", run, other, "--with-optimizer", "--optimizer", "distributed").code == 0
    stored = torch.load(other / "iter_0000003/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert [group["step"] for group in adam(stored)["param_groups"]] == [3, 3]
    assert convert("reshard", other, plain, "--tp", 2, "--with-optimizer", "--optimizer", "plain").code == 0
    stored = torch.load(plain / FOLDER.format(1) / "model_optim_rng.pt", weights_only=False)
    assert [group["step"] for group in adam(stored)["param_groups"]] == [3, 3]
    assert {tuple(state) for state in adam(stored)["state"].values()} == {("exp_avg", "exp_avg_sq")}


def test_a_scaler_of_losses_travels(runs, convert, tmp_path):
    import torch

    run, out = shutil.copytree(runs["plain"], tmp_path / "run"), tmp_path / "out"
    for rank in (0, 1):
        spoil(
            run,
            lambda stored: stored["optimizer"].update(grad_scaler={"scale": torch.tensor([4.0]), "growth": 7}),
            rank=rank,
        )
    assert convert("reshard", run, out, "--with-optimizer").code == 0
    stored = torch.load(out / FOLDER.format(0) / "model_optim_rng.pt", weights_only=False)
    assert stored["optimizer"]["grad_scaler"] == {"scale": torch.tensor([4.0]), "growth": 7}
    del stored["optimizer"]["grad_scaler"]
    torch.save(stored, out / FOLDER.format(0) / "model_optim_rng.pt")
    check(out, "plain", 0)


def test_steps_that_contradict_each_other_are_refused(runs, convert, tmp_path):
    """One group says another number of updates than the states, on all ranks."""
    run = shutil.copytree(runs["plain"], tmp_path / "run")
    for rank in (0, 1):
        spoil(run, lambda stored: adam(stored)["param_groups"][0].update(step=99), rank=rank)
    for argv in (("reshard", run), ("hf2fsdp", run)):
        ran = convert(*argv, tmp_path / "out", "--with-optimizer")
        assert (ran.code, "different numbers of steps: " in ran.err, ", 99" in ran.err) == (4, True, True), ran.err


def test_sound_files_that_make_no_checkpoint_are_not_verified(runs, convert, tmp_path):
    """Each has its CRC-32, and none has a manifest: one is missing, or of another training than its copy."""
    for kind in ("distributed", "experts", "both"):
        run = shutil.copytree(runs[kind], tmp_path / kind)
        (run / "iter_0000003/vitruvian.json").unlink()
        ran = convert("verify", run)
        assert (ran.code, "each with its CRC-32" in ran.out, ran.err) == (0, True, "")
    spoil(tmp_path / "experts", twice)
    ran = convert("verify", tmp_path / "experts")
    assert (ran.code, "differs between its copies in 1 of 1 places" in ran.err) == (6, True), ran.err
    ours, theirs = sorted((tmp_path / "distributed").rglob("distrib_optim.pt"))
    shutil.copy(ours, theirs)
    ran = convert("verify", tmp_path / "distributed")
    assert (ran.code, "are not the rounded FP32 master weights of" in ran.err) == (6, True), ran.err
    ours.unlink()
    ran = convert("verify", tmp_path / "distributed")
    assert (ran.code, "holds no distrib_optim.pt, which model_optim_rng.pt says there is" in ran.err) == (3, True)
