"""nanotron's optimizer: what is moved is what the memory of its trainer held, bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from converters.common.manifest import remembered_states
from converters.convert import run
from converters.plan.request import Request
from converters.plan.targets import plan_huggingface
from converters.plan.training_state import optimizer_of
from formats.checkpoint import Checkpoint, Settings
from formats.optimizer import Group
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused

HERE = Path(__file__).parent / "nanotron/optimizer"
MASTERS = {
    "bf16": True,
    "tp2": False,
    "pp2_tied": True,
    "dp3_zero": True,
    "tp2_pp2": False,
    "tp2_pp2_dp2_zero": True,
    "moe_dp2_zero": False,
}
"""Run: whether it has master weights beside its weights, and not float32 weights alone."""
TOKENS = {"tp2": 23}
"""Of the runs whose vocabulary is padded."""
NAMES = {
    "token_embedding": "embed_tokens",
    "final_layer_norm": "norm",
    "attn": "self_attn",
    "router": "gate",
    "decoder": "layers",
}
STATES = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""State: what the memory of the trainer calls it, for our code and for the script that kept it."""


def config_of(name: str) -> dict[str, Any]:
    """What the trainer said of its model."""
    return json.loads((HERE / name / "3/model_config.json").read_text())


def in_transformers(key: str, tensor: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A tensor of nanotron under the names that transformers has on the Hub, worked out here and not by a table."""
    heads, groups, hidden = (config[of] for of in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    size = hidden // heads
    *modules, last = key.split(".")
    path = [NAMES.get(part, part) for part in modules if part not in ("pp_block", "token_position_embeddings")]
    if path == ["model", "lm_head"]:
        path = path[1:]
    inner, outer = path[-1], ".".join(path[:-1])
    if inner == "qkv_proj":
        rows, start = {"q_proj": heads * size, "k_proj": groups * size, "v_proj": groups * size}, 0
        for part, count in rows.items():
            value, start = tensor[start : start + count], start + count
            if config["rope_interleaved"] and part != "v_proj":
                value = value.reshape(-1, size // 2, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
            yield f"{outer}.{part}.{last}", value
    elif inner == "gate_up_proj":
        half = len(tensor) // 2
        yield f"{outer}.gate_proj.{last}", tensor[:half]
        yield f"{outer}.up_proj.{last}", tensor[half:]
    elif inner == "experts":
        for number, matrix in enumerate(tensor):
            at = f"{outer}.experts.{number}"
            if last == "merged_down_proj":
                yield f"{at}.down_proj.weight", matrix.T
            else:
                half = matrix.shape[1] // 2
                yield f"{at}.gate_proj.weight", matrix[:, :half].T
                yield f"{at}.up_proj.weight", matrix[:, half:].T
    else:
        yield ".".join([*path, last]), tensor


def memory(name: str, state: str) -> dict[str, Any]:
    """What the trainer had of each parameter, under the names of transformers."""
    import numpy as np

    config, held = config_of(name), np.load(HERE / name / "memory.npz")
    prefix, tensors = f"{STATES[state]}/", {}
    for key in held.files:
        if key.startswith(prefix):
            tensors |= dict(in_transformers(key.removeprefix(prefix), held[key], config))
    rows = TOKENS.get(name)
    return {key: value[:rows] if "embed" in key or "lm_head" in key else value for key, value in tensors.items()}


def opened(name: str) -> Checkpoint:
    """A run, with its true vocabulary."""
    return open_checkpoint(HERE / name, Settings(vocab_size=TOKENS.get(name)))


def options(name: str) -> list[Any]:
    """What has to be said of a run."""
    return ["--vocab-size", TOKENS[name]] if name in TOKENS else []


@pytest.mark.parametrize("name", MASTERS)
def test_states_are_those_of_its_memory(tmp_path, name):
    from safetensors.torch import load_file

    source = opened(name)
    trained = optimizer_of(source)
    metas = json.loads((HERE / name / "3/checkpoint_metadata.json").read_text())["metas"]
    assert (trained.step, trained.samples) == (3, metas["consumed_train_samples"])
    assert [*trained.states] == [state for state in STATES if state != "fp32" or MASTERS[name]]
    for state, checkpoint in trained.states.items():
        request = Request(tmp_path / state, quiet=True)
        run(plan_huggingface(checkpoint, request, 10**9), request)
        ours, theirs = load_file(tmp_path / state / "model.safetensors"), memory(name, state)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert str(tensor.dtype) == "torch.float32"
            assert tensor.numpy().tobytes() == theirs[key].tobytes(), (state, key)


@pytest.mark.parametrize("name", MASTERS)
def test_each_parameter_is_treated_as_there(name):
    """Rate, betas, epsilon and weight decay, by the names of its own parameters."""
    told = json.loads((HERE / name / "groups.json").read_text())
    groups = {
        key: Group(of["lr"], (of["betas"][0], of["betas"][1]), of["eps"], of["weight_decay"])
        for key, of in told.items()
    }
    source = opened(name)
    expected = {
        (tensor, placed.slot.layer): groups[placed.key]
        for placed in source.tensors
        for tensor in placed.slot.rule.pattern.tensors
    }
    assert optimizer_of(source).groups == expected
    assert len({*groups.values()}) == (2 if "tied" in name or name == "tp2_pp2_dp2_zero" else 1)


@pytest.mark.parametrize("name", MASTERS)
def test_torch_and_deepspeed_find_it(convert, tmp_path, name):
    """In FSDP and in a universal checkpoint, as these frameworks read the files."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    ran = convert("hf2fsdp", HERE / name, tmp_path / "fsdp", "--with-optimizer", "--ranks", 3, *options(name))
    assert ran.code == 0, ran.err
    dcp_to_torch_save(tmp_path / "fsdp", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    ran = convert("zero2universal", HERE / name, tmp_path / "universal", *options(name))
    assert ran.code == 0, ran.err
    parameters = next((tmp_path / "universal").glob("*/zero"))
    for state in STATES:
        for key, value in memory(name, state).items():
            if ".experts." in key:
                continue  # fused in memory
            held = torch.load(parameters / key / f"{state}.pt", weights_only=False)["param"]
            assert held.numpy().tobytes() == value.tobytes(), (state, key)
            held = whole["model"][key] if state == "fp32" else whole["optim"]["state"][key][state]
            assert held.float().numpy().tobytes() == value.tobytes(), (state, key)
    assert {float(of["step"]) for of in whole["optim"]["state"].values()} == {3.0}


@pytest.mark.parametrize("name", [name for name in MASTERS if "tied" not in name and name != "tp2_pp2_dp2_zero"])
def test_it_goes_through_megatron(convert, tmp_path, name):
    """Into Megatron and on to FSDP it is what it is in FSDP directly."""
    words = ["--with-optimizer", "--dtype", "bf16" if MASTERS[name] else "fp32", "--format", "torch_dist", "--tp", 2]
    ran = convert("hf2megatron", HERE / name, tmp_path / "megatron", *words, *options(name))
    assert ran.code == 0, ran.err
    args = json.loads(convert("inspect", tmp_path / "megatron", "--json").out)
    assert args["iteration"] == 3
    for source in (HERE / name, tmp_path / "megatron"):
        assert convert("hf2fsdp", source, tmp_path / f"of {source.name}", "--with-optimizer", *options(name)).code == 0
    first, second = (remembered_states(tmp_path / f"of {of}") for of in (name, "megatron"))
    assert first == second != {}


def test_two_weight_decays_are_not_for_megatron(convert, tmp_path):
    """nanotron's own patterns leave out matrices, too: it matches them against the name of the last tied parameter."""
    ran = convert("hf2megatron", HERE / "pp2_tied", tmp_path / "out", "--with-optimizer", "--dtype", "bf16")
    refused(ran, 4, "trains its matrices with different settings", "Megatron has one for all of them")


def test_inspect_shows_it(convert):
    assert "fp32, exp_avg, exp_avg_sq, step 3" in convert("inspect", HERE / "dp3_zero").out


def test_the_mean_is_that_of_the_masters(convert, tmp_path):
    """`average` takes FP32 master weights where there are any."""
    ran = convert("average", HERE / "bf16", HERE / "dp3_zero", tmp_path / "out", "--dtype", "bf16")
    assert ran.code == 0, ran.err
    assert (
        "master" in convert("average", HERE / "bf16", HERE / "dp3_zero", tmp_path / "no", "-n", "--dtype", "bf16").out
    )


# --- what is written -------------------------------------------------------------------------------------------------


def saved_of(folder: Path) -> dict[str, Any]:
    """What torch loads of the file of each rank."""
    import torch

    return {path.name: torch.load(path, weights_only=False) for path in (folder / "optimizer").glob("*.pt")}


WRITTEN = {"bf16": (1, 1), "tp2": (2, 1), "pp2_tied": (1, 2), "moe_dp2_zero": (1, 1), "tp2_pp2": (2, 2)}
"""Run: the parallel sizes that it is written for."""


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_what_nanotron_writes(convert, tmp_path, name, between):
    """The files of all ranks: names in the order of its modules, groups, states and master weights; by way of FSDP."""
    import torch

    tp, pp = WRITTEN[name]
    source = HERE / name
    if between:
        ran = convert("hf2fsdp", source, tmp_path / "fsdp", "--with-optimizer")
        assert ran.code == 0, ran.err
        source = tmp_path / "fsdp"
    words = ["--with-optimizer", "--tp", tp, "--pp", pp, *(["--dtype", "bf16"] if between and MASTERS[name] else [])]
    ran = convert("hf2nanotron", source, tmp_path / "out", *words)
    assert ran.code == 0, ran.err
    assert "load_optimizer: true" in ran.out
    ours, theirs = saved_of(tmp_path / "out"), saved_of(HERE / name / "3")
    if name == "moe_dp2_zero":  # without ZeRO it is one file
        (written,) = ours.values()
        first = next(iter(theirs.values()))
        assert written["names"] == first["names"]
        assert [group["params"] for group in written["param_groups"]] == [[number] for number in first["names"]]
        return
    assert ours.keys() == theirs.keys()
    for file, saved in theirs.items():
        assert [*ours[file]] == [*saved]
        assert [*ours[file]["names"].items()] == [*saved["names"].items()]
        for mine, group in zip(ours[file]["param_groups"], saved["param_groups"], strict=True):
            assert {**mine, "fused": False, "initial_lr": 0.01} == group
        for number, about in saved["state"].items():
            turned = name == "tp2_pp2" and "qkv" in saved["names"][number]  # neighbours, which are written as halves
            for state, tensor in about.items():
                equal = torch.equal(ours[file]["state"][number][state], tensor)
                assert equal != (turned and state != "step"), (number, state)
        for key, master in saved.get("gradient_accumulator", {}).items():
            assert torch.equal(ours[file]["gradient_accumulator"][key], master)
    config, metas = (
        [json.loads((folder / path).read_text()) for folder in (tmp_path / "out", HERE / name / "3")]
        for path in ("optimizer/optimizer_config.json", "checkpoint_metadata.json")
    )
    assert config[0] == config[1]
    assert [of["metas"]["last_train_step"] for of in metas] == [3, 3]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["dp3_zero", "tp2_pp2_dp2_zero", "moe_dp2_zero"])
def test_at_any_topology_it_is_the_same(convert, tmp_path, name, tp, pp):
    words = ["--with-optimizer", "--tp", tp, "--pp", pp]
    ran = convert("hf2nanotron", HERE / name, tmp_path / "out", *words)
    assert ran.code == 0, ran.err
    for source in (HERE / name, tmp_path / "out"):
        assert convert("hf2fsdp", source, tmp_path / f"of {source.name}", "--with-optimizer").code == 0
    first, second = (remembered_states(tmp_path / f"of {of}") for of in (name, "out"))
    assert first == second != {}
    trained, again = (optimizer_of(open_checkpoint(source)) for source in (HERE / name, tmp_path / "out"))
    assert (trained.step, trained.samples, trained.groups) == (again.step, again.samples, again.groups)
    assert convert("verify", tmp_path / "out").code == 0


def test_a_folder_that_is_named_as_another_step_is_refused(convert, tmp_path):
    refused(convert("hf2nanotron", HERE / "bf16", tmp_path / "7", "--with-optimizer"), 2, "this is step 3", "name it 3")
    assert convert("hf2nanotron", HERE / "bf16", tmp_path / "3", "--with-optimizer").code == 0
    assert open_checkpoint(tmp_path / "3").details.shown["step"] == 3


def test_topologies_that_nanotron_has_not(convert, tmp_path):
    for words, message in (
        (["--tp", 4], "--tp 4 does not divide 2 key/value heads"),
        (["--pp", 8], "leaves a stage of 8 without a block"),
        (["--tp", 5], "--tp 5 does not divide 4 heads"),
    ):
        refused(convert("hf2nanotron", HERE / "bf16", tmp_path / "out", "--with-optimizer", *words), 5, message)
    refused(convert("hf2nanotron", HERE / "bf16", tmp_path / "out", "--tp", 2), 2, "--tp is for a training")
    refused(
        convert("hf2nanotron", HERE / "half", tmp_path / "out", "--with-optimizer"), 4, "without FP32 master weights"
    )


# --- what is refused -------------------------------------------------------------------------------------------------

State = dict[str, Any]
EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"


def damaged(tmp_path: Path, name: str, change: Callable[[State], Any], which: str = "*.pt") -> Path:
    """A run whose files of an optimizer are other ones."""
    import torch

    folder = shutil.copytree(HERE / name, tmp_path / "run")
    paths = sorted((folder / "3/optimizer").glob(which))
    assert paths
    for path in paths:
        saved = torch.load(path, weights_only=False)
        change(saved)
        torch.save(saved, path)
    return folder


def frozen(saved: State) -> None:
    """A parameter of a group has made no step."""
    saved["state"].pop(2)
    saved["names"].pop(2)


def left_out(saved: State) -> None:
    """A parameter is in no group, as frozen ones with ZeRO-1."""
    frozen(saved)
    saved["param_groups"].pop(2)
    saved.get("gradient_accumulator", {}).pop("model.decoder.0.pp_block.attn.qkv_proj.weight", None)


def renamed(saved: State) -> None:
    """A layer more, in place of another."""
    saved["names"][2] = saved["names"][2].replace("decoder.0", "decoder.7")


def cut(saved: State) -> None:
    """Moments of another size."""
    for about in saved["state"].values():
        about["exp_avg"] = about["exp_avg"][:-1].clone()


def one_step(saved: State) -> None:
    """One parameter has made another step."""
    saved["state"][max(saved["state"])]["step"] += 1


def all_steps(saved: State) -> None:
    """All parameters have made one step more."""
    for about in saved["state"].values():
        about["step"] += 1


def settings(**words: Any) -> Callable[[State], None]:
    """Groups that say something else; None leaves a word out."""

    def change(saved: State) -> None:
        for group in saved["param_groups"]:
            group.update(words)
            for word in [word for word, value in words.items() if value is None]:
                group.pop(word)

    return change


def lion(saved: State) -> None:
    """What a Lion has: no second moments, and nothing to divide by."""
    settings(eps=None, amsgrad=None)(saved)
    for about in saved["state"].values():
        about.pop("exp_avg_sq")


def largest(saved: State) -> None:
    """What AMSGrad keeps besides."""
    for about in saved["state"].values():
        about["max_exp_avg_sq"] = about["exp_avg_sq"]


def masters(saved: State) -> None:
    """A master weight that does not round to the weight."""
    next(iter(saved["gradient_accumulator"].values())).data.view(-1)[0] += 1


def moment(saved: State) -> None:
    """A moment of a norm that another tensor parallel rank has otherwise."""
    next(about for number, about in saved["state"].items() if "norm" in saved["names"][number])["exp_avg"][0] += 1


def embedding(saved: State) -> None:
    """Moments of the tied embedding that the first stage has otherwise."""
    (number,) = (number for number, name in saved["names"].items() if name == EMBEDDING)
    saved["state"][number]["exp_avg"] += 1


def twice(saved: State) -> None:
    """A parameter in two groups."""
    saved["param_groups"][0]["params"].append(1)


def other_masters(saved: State) -> None:
    """A master weight less."""
    saved["gradient_accumulator"].popitem()


def integers(saved: State) -> None:
    """Moments that are no floating point numbers."""
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].long()


def exchanged(saved: State) -> None:
    """First and second moments under each other's name."""
    for about in saved["state"].values():
        about["exp_avg"], about["exp_avg_sq"] = about["exp_avg_sq"], about["exp_avg"]


LAST = "optimizer_pp-1-of-2_tp-1-of-2_exp-0-of-1.pt"
FAULTS: dict[str, tuple[str, Callable[[State], Any], str, int, tuple[str, ...]]] = {
    "frozen": ("bf16", frozen, "*.pt", 4, ("holds no states of 1 parameters, such as number 2", "is it frozen")),
    "left out": ("dp3_zero", left_out, "*.pt", 4, ("holds no states of 1 parameters, such as model.decoder.0.",
                 "is it frozen")),
    "another model": ("tp2_pp2", renamed, "*pp-0*.pt", 3, ("trains model.decoder.7.", "is it of another model?")),
    "other sizes": ("tp2_pp2", cut, "*.pt", 3, ("with shape [11, 16], its model has [12, 16]", "another model?")),
    "other flat sizes": ("dp3_zero", cut, "*.pt", 3, ("with shape [63], its model has [64] there",)),
    "one step": ("tp2_pp2", one_step, LAST, 4, ("has made 4 steps, others 3",)),
    "steps of a rank": ("tp2_pp2", all_steps, LAST, 3, (LAST, "4 steps, others 3: files of different saves")),
    "steps": ("tp2_pp2", all_steps, "*.pt", 3, ("4 steps", "says last_train_step = 3", "--accept last")),
    "Lion": ("tp2", lion, "*.pt", 4, ("its optimizer is not AdamW",)),
    "AMSGrad": ("tp2", largest, "*.pt", 4, ("(Adam with amsgrad) keeps max_exp_avg_sq",)),
    "AMSGrad's word": ("tp2", settings(amsgrad=True), "*.pt", 4, ("amsgrad = True, and only Adam with False",)),
    "Adam's decay": ("tp2", settings(decoupled_weight_decay=False), "*.pt", 4, ("in the gradients, and not AdamW's",)),
    "NaN": ("tp2", settings(lr=float("nan")), "*.pt", 3, ("its lr is nan, which is no number",)),
    "rates of a rank": ("tp2", settings(lr=0.5), "*tp-1*.pt", 3, ("treat model.", "differently", "lr=0.5")),
    "master weights": ("bf16", masters, "*.pt", 6, ("are not the rounded FP32 master weights",)),
    "other master weights": ("bf16", other_masters, "*.pt", 3, ("master weights of other parameters",)),
    "no master weights": ("dp3_zero", lambda saved: saved.pop("gradient_accumulator"), "*dp-1*.pt", 3,
                          ("do not both keep FP32 master weights",)),
    "norms of a rank": ("tp2", moment, "*tp-1*.pt", 6, ("differs between its copies",)),
    "tied states": ("pp2_tied", embedding, "*pp-1*.pt", 6,
                    ("differs between its copies",)),
    "two groups": ("tp2", twice, "*.pt", 3, ("is in two groups",)),
    "no names": ("tp2", lambda saved: saved.pop("names"), "*.pt", 3, ("in a form that is known",)),
    "no step": ("tp2", lambda saved: saved["state"][0].pop("step"), "*.pt", 3, ("in a form that is known",)),
    "exchanged moments": ("dp3_zero", exchanged, "*.pt", 5, ("exp_avg_sq of model.", "are finite and not negative")),
    "integers": ("tp2", integers, "*.pt", 3, ("holds exp_avg of model.token_position_embeddings",)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_optimizer_that_is_refused(convert, tmp_path, fault):
    name, change, which, code, says = FAULTS[fault]
    folder = damaged(tmp_path, name, change, which)
    refused(convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer", *options(name)), code, *says)
    assert not (tmp_path / "out").exists()
    assert convert("hf2fsdp", folder, tmp_path / "out", "-q", *options(name)).code == 0, "the weights alone"


def test_a_training_that_began_without_the_optimizer_of_the_one_before(convert, tmp_path):
    folder = damaged(tmp_path, "tp2_pp2", all_steps)
    ran = convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer", "--accept", "last_train_step")
    assert ran.code == 0, ran.err
    assert "step 4" in convert("inspect", tmp_path / "out").out


@pytest.mark.parametrize("name", ["tp2", "tp2_pp2", "dp3_zero", "tp2_pp2_dp2_zero"])
def test_the_file_of_each_rank_is_needed(convert, tmp_path, name):
    count = len([*(HERE / name / "3/optimizer").glob("*.pt")])
    for number in range(count):
        folder = shutil.copytree(HERE / name, tmp_path / str(number))
        sorted((folder / "3/optimizer").glob("*.pt"))[number].unlink()
        says = f"holds the files of {count - 1} ranks, and there were {count}"
        refused(convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer", *options(name)), 3, says)


@pytest.mark.parametrize("name", ["tp2", "tp2_pp2", "moe_dp2_zero", "dp3_zero", "tp2_pp2_dp2_zero"])
def test_the_file_of_another_rank(convert, tmp_path, name):
    """It was saved again under the name of the next rank of its stage, so that its archive does not tell."""
    import torch

    folder = shutil.copytree(HERE / name, tmp_path / "run")
    first, second = sorted((folder / "3/optimizer").glob("*.pt"))[:2]
    torch.save(torch.load(first, weights_only=False), second)
    ran = convert("hf2fsdp", folder, tmp_path / "no", "--with-optimizer", *options(name))
    refused(ran, 3, first.name, second.name, "hold the same elements: one is a copy of the other")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", ["tp2", "moe_dp2_zero"])
def test_ranks_whose_moments_are_alike(convert, tmp_path, name):
    """All of them are zeros, as of a training whose gradients were."""

    def zeros(saved: State) -> None:
        for about in saved["state"].values():
            about.update({state: about[state] * 0 for state in ("exp_avg", "exp_avg_sq")})

    folder = damaged(tmp_path, name, zeros)
    ran = convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer", *options(name))
    assert ran.code == 0, ran.err


def test_files_that_are_cut_off_or_have_other_names(convert, tmp_path):
    first, second = (f"optimizer_pp-0-of-1_tp-{rank}-of-2_exp-0-of-1.pt" for rank in (0, 1))

    def exchanged(folder: Path) -> None:
        held = (folder / first).read_bytes()
        shutil.move(folder / second, folder / first)
        (folder / second).write_bytes(held)

    def config(old: str, new: str) -> Callable[[Path], Any]:
        def change(folder: Path) -> None:
            path = folder / "optimizer_config.json"
            assert old in path.read_text()
            path.write_text(path.read_text().replace(old, new))

        return change

    faults: dict[str, Callable[[Path], Any]] = {
        "cut off": lambda folder: os.truncate(folder / second, 9000),
        "files are mixed up": exchanged,
        "holds files of 2 topologies": lambda folder: shutil.copy(
            folder / first, folder / "optimizer_pp-0-of-1_dp-0-of-1_tp-0-of-2_exp-0-of-1.pt"
        ),
        "holds two files of one rank": lambda folder: shutil.copy(
            folder / first, folder / first.replace("tp-0", "tp-00")
        ),
        "says 'ZeroDistributedOptimizer', and the files": config("NamedOptimizer", "ZeroDistributedOptimizer"),
        "optimizer_config.json says '4', the weights are of 2": config('"tp_size": "2"', '"tp_size": "4"'),
        "does not say the class of its optimizer": config("type", "kind"),
        "names an optimizer of the class 'Named'": config("NamedOptimizer", "Named"),
        "optimizer_config.json": lambda folder: (folder / "optimizer_config.json").unlink(),
        "holds no file of a rank": lambda folder: [(folder / name).unlink() for name in (first, second)],
        "several expert parallel ranks": lambda folder: [
            (folder / name).rename(folder / name.replace("exp-0-of-1", "exp-0-of-2")) for name in (first, second)
        ],
    }  # fmt: skip
    for number, (says, change) in enumerate(faults.items()):
        folder = shutil.copytree(HERE / "tp2", tmp_path / str(number))
        change(folder / "3/optimizer")
        ran = convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer", *options("tp2"))
        assert says in ran.err, (says, ran.err)
        assert ran.code in (3, 4)
    assert not (tmp_path / "out").exists()


QKV = "model.decoder.0.pp_block.attn.qkv_proj.weight"
CONFIGS: dict[str, tuple[str, Callable[[State], Any], tuple[str, ...]]] = {
    "an interval": (
        "dp3_zero",
        lambda configs: configs["param_name_to_dp_rank_offsets"][QKV].update({"0": ["0", "44"], "1": ["44", "86"]}),
        (f'offsets of {QKV} = {{"0": ["0", "44"], ', 'in the files it is {"0": ["0", "43"], '),
    ),
    "a rank": (
        "tp2_pp2_dp2_zero",
        lambda configs: configs["param_name_to_dp_rank_offsets"][QKV].pop("1"),
        (f'offsets of {QKV} = {{"0": ["0", "32"]}}, and',),
    ),
    "a parameter": (
        "moe_dp2_zero",
        lambda configs: configs["param_name_to_dp_rank_offsets"].pop(QKV),
        (f"offsets of {QKV} = null, and",),
    ),
    "one of the next stage": (
        "tp2_pp2_dp2_zero",
        lambda configs: configs["param_name_to_dp_rank_offsets"].update({"model.final_layer_norm.pp_block.weight": {}}),
        ("offsets of model.final_layer_norm.pp_block.weight = {}, and in the files it is null",),
    ),
    "a shape": (
        "dp3_zero",
        lambda configs: configs["orig_param_shapes"].update({QKV: ["8", "16"]}),
        (f'orig_param_shapes of {QKV} = ["8", "16"], and in the files it is ["16", "8"]',),
    ),
    "nothing": ("dp3_zero", lambda configs: configs.clear(), ("does not say param_name_to_dp_rank_offsets",)),
}
"""What optimizer_config.json says besides of ZeRO-1: run, change, sentence."""


@pytest.mark.parametrize("fault", CONFIGS)
def test_intervals_that_are_not_those_of_the_files(convert, tmp_path, fault):
    name, change, says = CONFIGS[fault]
    folder = shutil.copytree(HERE / name, tmp_path / "run")
    path = folder / "3/optimizer/optimizer_config.json"
    config = json.loads(path.read_text())
    change(config["configs"])
    path.write_text(json.dumps(config))
    refused(convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer", *options(name)), 3, *says)
    assert not (tmp_path / "out").exists()


class Harm:
    """What runs a command where a pickle is loaded that somebody trusts."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("inside", [False, True])
def test_nothing_in_a_pickle_runs(convert, tmp_path, inside):
    import torch

    folder = shutil.copytree(HERE / "tp2", tmp_path / "run")
    path = next((folder / "3/optimizer").glob("*tp-0*.pt"))
    saved = torch.load(path, weights_only=False)
    if inside:
        saved["state"][0]["exp_avg"] = Harm(tmp_path / "harmed")
        torch.save(saved, path)
        assert b"mkdir" in zipfile.ZipFile(path).read(f"{path.stem}/data.pkl")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{path.stem}/data.pkl", pickle.dumps(Harm(tmp_path / "harmed"), protocol=2))
    ran = convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer", *options("tp2"))
    assert ran.code in (3, 4)
    assert path.name in ran.err
    assert not (tmp_path / "harmed").exists()
    assert not (tmp_path / "out").exists()


def test_a_training_without_moments_is_refused(convert, tmp_path):
    """Of nanotron's two optimizers SGD keeps nothing of a parameter."""
    folder = shutil.copytree(HERE / "half", tmp_path / "run")
    shutil.rmtree(folder / "3/optimizer")
    shutil.copytree(HERE / "sgd", folder / "3/optimizer")
    refused(convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer"), 4, "its optimizer is of an unknown kind")


def test_without_master_weights(convert, tmp_path):
    """bfloat16 alone, moments and all: into FSDP it goes as it is."""
    words = ("--with-optimizer",)
    assert convert("hf2fsdp", HERE / "half", tmp_path / "fsdp", *words).code == 0
    inspected = convert("inspect", tmp_path / "fsdp").out
    assert re.search(r"optimizer +exp_avg, exp_avg_sq, step 3", inspected)
    refused(convert("hf2megatron", HERE / "half", tmp_path / "no", *words), 4, "without FP32 master weights")


def test_an_optimizer_whose_save_no_metadata_tells_is_refused(convert, tmp_path):
    run = Path(shutil.copytree(HERE / "moe_dp2_zero", tmp_path / "run"))
    (run / "3/checkpoint_metadata.json").unlink()
    for command in (["hf2fsdp", "--with-optimizer"], ["zero2universal"]):
        ran = convert(command[0], run, tmp_path / "out", *command[1:])
        refused(ran, 3, "has made 3 steps", "3/checkpoint_metadata.json is not there", "--accept last_train_step")
    assert convert("nanotron2hf", run, tmp_path / "hf").code == 0
    assert convert("zero2universal", run, tmp_path / "out", "--accept", "last_train_step").code == 0
