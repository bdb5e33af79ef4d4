"""Optimizers of FSDP trainings that are damaged, incomplete, or not Adam's: each is refused, and named."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from converters.common.manifest import remembered_states
from formats.optimizer import whose
from tests.faults.dcp_tools import refused, save, save_by_rank, weights

UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
State = dict[str, Any]


@pytest.fixture
def trained(model: Callable[..., Path]) -> tuple[Path, State]:
    """A model, and what a training of it saves."""
    return training(model("llama", num_hidden_layers=1))


def training(source: Path) -> tuple[Path, State]:
    """The same of any model."""
    import torch

    tensors = weights(source)
    state = {
        key: {"step": torch.tensor(3.0), "exp_avg": weight / 2, "exp_avg_sq": weight * weight}
        for key, weight in tensors.items()
    }
    about = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "decoupled_weight_decay": True}
    groups = [
        {
            **about,
            "weight_decay": decay,
            "params": [key for key, tensor in tensors.items() if (tensor.dim() == 1) == norm],
        }
        for decay, norm in ((0.1, False), (0.0, True))
    ]
    return source, {"model": tensors, "optim": {"state": state, "param_groups": groups}}


def of(key: str) -> Callable[[State], State]:
    """The states of a parameter."""
    return lambda saved: saved["optim"]["state"][key]


def flat(saved: State) -> State:
    """The same optimizer, flattened."""
    optim = saved.pop("optim")
    entries = {f"state.{key}.{name}": value for key, about in optim["state"].items() for name, value in about.items()}
    for group in optim["param_groups"]:
        entries |= {
            f"param_groups.{key}.{name}": value
            for key in group["params"]
            for name, value in group.items()
            if name != "params"
        }
    return entries


def every(saved: State, change: Callable[[State], object]) -> None:
    """Change the states of all parameters."""
    for about in saved["optim"]["state"].values():
        change(about)


def muon(saved: State, keys: Collection[str] = (UP,), **changes: Any) -> None:
    """Some matrices are trained with torch's Muon."""
    for key in keys:
        of(key)(saved).pop("step"), of(key)(saved).pop("exp_avg_sq")
        of(key)(saved)["momentum_buffer"] = of(key)(saved).pop("exp_avg")
        saved["optim"]["param_groups"][0]["params"].remove(key)
    group = {
        "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "eps": 1e-7, "ns_steps": 5,
        "ns_coefficients": (3.4445, -4.775, 2.0315), "adjust_lr_fn": None,
    }  # fmt: skip
    group = {name: value for name, value in {**group, **changes}.items() if value != "none"}
    saved["optim"]["param_groups"].append({**group, "params": [*keys]})


def lion(saved: State, **changes: Any) -> None:
    """All is trained with Lion, which keeps one moment and no count."""
    every(saved, lambda one: (one.pop("step"), one.pop("exp_avg_sq")))
    for group in saved["optim"]["param_groups"]:
        for name in ("eps", "amsgrad", "decoupled_weight_decay"):
            group.pop(name)
        group.update(changes)


QUANTIZED = "__bnb_optimizer_quant_state__"
UP_LOST = (f"{UP} [96, 64]", "is it frozen, or has it made no step yet?")
REFUSED: dict[str, tuple[Callable[[State], object], int, tuple[str, ...]]] = {
    "no first moment": (lambda s: of(UP)(s).pop("exp_avg"), 3, ("exp_avg of its optimizer", *UP_LOST)),
    "no second moment": (lambda s: of(UP)(s).pop("exp_avg_sq"), 3, ("exp_avg_sq of its optimizer", *UP_LOST)),
    "no second moments": (
        lambda s: every(s, lambda entry: entry.pop("exp_avg_sq")), 4,
        ("are for exp_avg and exp_avg_sq of Adam, and its optimizer keeps exp_avg of it",),
    ),
    "no step of one": (lambda s: of(UP)(s).pop("step"), 3, (f"holds no step of {UP}",)),
    "no step yet": (lambda s: of(UP)(s)["step"].zero_(), 3, (f"{UP} has made 0 steps",)),
    "steps differ": (lambda s: of(UP)(s)["step"].add_(1), 4, ("different numbers of steps", f"{UP} 4")),
    "a strange step": (lambda s: of(UP)(s).update(step="three"), 3, (f"the step of {UP} is 'three'",)),
    "a large step": (lambda s: of(UP)(s).update(step=of(UP)(s)["exp_avg"]), 4, ("where a number should be",)),
    "frozen": (lambda s: s["optim"]["state"].pop(UP), 3, UP_LOST),
    "fused in the optimizer alone": (
        lambda s: s["optim"]["state"].update({"fused.weight": s["optim"]["state"].pop(UP)}), 3,
        (UP_LOST[0], "it has states of fused.weight, which are no tensors of the model"),
    ),
    "of a larger model": (
        lambda s: s["optim"]["state"].update(more=of(UP)(s)), 3, ("exp_avg of its optimizer", "more in"),
    ),
    "another shape": (
        lambda s: of(UP)(s).update(exp_avg=of(UP)(s)["exp_avg"][:-1].clone()), 3, (UP, "[95, 64]", "[96, 64]"),
    ),
    "amsgrad": (lambda s: of(UP)(s).update(max_exp_avg_sq=of(UP)(s)["exp_avg"]), 4, ("it keeps max_exp_avg_sq",)),
    "a number of NAdam": (lambda s: of(UP)(s).update(mu_product=0.5), 4, ("it keeps mu_product",)),
    "set to amsgrad": (lambda s: s["optim"]["param_groups"][1].update(amsgrad=True), 4, ("says amsgrad",)),
    "maximize": (lambda s: s["optim"]["param_groups"][0].update(maximize=True), 4, ("says maximize",)),
    "no correction": (
        lambda s: s["optim"]["param_groups"][0].update(bias_correction=False), 4, ("says bias_correction = False",),
    ),
    "lamb": (lambda s: s["optim"]["param_groups"][0].update(max_coeff=10.0), 4, ("its optimizer is LAMB",)),
    "radam": (lambda s: s["optim"]["param_groups"][0].pop("amsgrad"), 4, ("its optimizer is of an unknown kind",)),
    "not AdamW": (
        lambda s: s["optim"]["param_groups"][0].update(decoupled_weight_decay=False), 4,
        ("a weight decay of 0.1 is in the gradients, and not AdamW's",),
    ),
    "not AdamW, as apex says it": (
        lambda s: s["optim"]["param_groups"][0].update(adam_w_mode=False), 4, ("a weight decay of 0.1 is in the grad",),
    ),
    "timm's cautious AdamW": (
        lambda s: s["optim"]["param_groups"][1].update(caution=True), 4, ("group 1", "says caution = True"),
    ),
    "rates by layer": (lambda s: s["optim"]["param_groups"][0].update(lr_scale=0.5), 4, ("says lr_scale = 0.5",)),
    "a negative rate": (lambda s: s["optim"]["param_groups"][0].update(lr=-0.1), 3, ("group 0", "its lr is -0.1")),
    "a beta of one": (lambda s: s["optim"]["param_groups"][0].update(betas=(0.9, 1.0)), 3, ("its betas is 1, which",)),
    "a negative eps": (lambda s: s["optim"]["param_groups"][0].update(eps=-1e-8), 3, ("its eps is -1e-08",)),
    "momentum": (
        lambda s: every(s, lambda entry: entry.update(momentum_buffer=entry.pop("exp_avg"))), 4,
        ("its optimizer (Muon or SGD with momentum) is not Adam, AdamW or Lion: it keeps momentum_buffer",),
    ),
    "momentum of an unknown optimizer": (
        lambda s: muon(s, ns_steps="none", ns_coefficients="none"), 4, ("group 2", "is of an unknown kind"),
    ),
    "another Muon": (lambda s: muon(s, ns_coefficients="none"), 4, ("does not say its ns_coefficients",)),
    "a rate that no Muon has": (lambda s: muon(s, adjust_lr_fn="spectral"), 3, ("adjust_lr_fn 'spectral'",)),
    "a Muon that counts": (
        lambda s: (muon(s), of(UP)(s).update(step=3.0)), 4, (f"momentum_buffer and step of {UP}",),
    ),
    "Muon's group for Adam's moments": (
        lambda s: (muon(s), of(UP)(s).clear(), of(UP)(s).update(of(f"{UP}".replace("up", "gate"))(s))), 4,
        (f"the settings of {UP} are for momentum_buffer",),
    ),
    "no moment of Lion": (
        lambda s: (lion(s), of(UP)(s).pop("exp_avg")), 3, ("exp_avg of its optimizer", *UP_LOST),
    ),
    "a Lion that counts the steps of one": (
        lambda s: (lion(s), of(UP)(s).update(step=3.0)), 3, ("holds no step of model.",),
    ),
    "Lion's settings, Adam's moments": (
        lambda s: groups(s)[1].pop("eps"), 4,
        ("layernorm.weight are for exp_avg of Lion, and its optimizer keeps exp_avg and exp_avg_sq of it",),
    ),
    "a cautious Lion": (lambda s: lion(s, caution=True), 4, ("says caution = True", "to Lion's step")),
    "a Lion with a decay in the gradients": (
        lambda s: lion(s, weight_decouple=False), 4, ("a weight decay of 0.1 is in the gradients",),
    ),
    "a Lion that climbs": (lambda s: lion(s, maximize=True), 4, ("says maximize", "only Lion with False")),
    "a Lion of three betas": (lambda s: lion(s, betas=(0.9, 0.9, 0.9)), 3, ("has the betas",)),
    "a Lion without a rate": (lambda s: (lion(s), groups(s)[0].pop("lr")), 3, ("its lr is None",)),
    "a Lion of nobody": (lambda s: (lion(s), s["optim"].pop("param_groups")), 4, ("whether it is Lion's",)),
    "some of it Adam's": (
        lambda s: (lion(s), of(UP)(s).update(exp_avg_sq=of(UP)(s)["exp_avg"])), 3, ("exp_avg_sq of its optimizer",),
    ),
    "Lion beside Muon": (
        lambda s: (lion(s), of(UP)(s).update(momentum_buffer=of(UP)(s).pop("exp_avg"))), 3,
        ("holds no exp_avg_sq beside momentum_buffer",),
    ),
    "bitsandbytes": (
        lambda s: every(s, lambda one: one.update({QUANTIZED: {"state1": one.pop("exp_avg"), "state2": UP}})), 4,
        ("an 8-bit optimizer of bitsandbytes",),
    ),
    "numbered": (
        lambda s: s["optim"].update(state=dict(enumerate(s["optim"]["state"].values()))), 4,
        ("numbers its parameters", "hint: convert the weights without --with-optimizer"),
    ),
    "two optimizers": (lambda s: s.update(critic=s["optim"]), 4, ("several optimizers: critic, optim",)),
    "in no group": (lambda s: s["optim"]["param_groups"][1]["params"].pop(), 3, (f"{NORM} is in no group",)),
    "no rate": (lambda s: s["optim"]["param_groups"][0].pop("lr"), 3, ("group 0", "its lr is None")),
    "a rate that is none": (
        lambda s: s["optim"]["param_groups"][0].update(lr=float("nan")), 3, ("group 0", "its lr is nan"),
    ),
    "in two groups": (lambda s: s["optim"]["param_groups"][1]["params"].append(UP), 3, (f"{UP} is in two groups",)),
    "no betas": (lambda s: s["optim"]["param_groups"][0].update(betas=0.9), 3, ("group 0", "the betas 0.9")),
    "a group of another model": (
        lambda s: s["optim"]["param_groups"][0]["params"].append("model.ghost.weight"), 3,
        ("the groups of its optimizer have model.ghost.weight, its model has no such parameter",),
    ),
    "none": (lambda s: s.pop("optim"), 3, ("holds no optimizer", "without --with-optimizer")),
    "flat, no moment": (
        lambda s: s.update(optimizer={k: v for k, v in flat(s).items() if k != f"state.{UP}.exp_avg"}), 3, UP_LOST,
    ),
    "flat, in no group": (
        lambda s: s.update(optimizer={k: v for k, v in flat(s).items() if not k.startswith(f"param_groups.{UP}.")}),
        3, (f"{UP} is in no group",),
    ),
    "key twice": (
        lambda s: s["optim"]["state"].update({f"_orig_mod.{UP}": of(UP)(s)}), 3, (f"of {UP} twice",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_an_optimizer_is_whole_or_refused(trained, convert, tmp_path, what):
    (source, saved), (change, code, parts) = trained, REFUSED[what]
    change(saved)
    folder = save(tmp_path / "c", saved)
    ran = convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer", "--config", source)
    refused(ran, code, folder, *parts)
    assert not (tmp_path / "out").exists()
    stdout = convert("inspect", folder, "--config", source).out
    assert ("cannot be converted" in stdout) == (what != "none")
    assert convert("hf2fsdp", folder, tmp_path / "out", "--config", source, "-q").code == 0, "the weights alone"


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize(("settings", "noted"), [({}, True), ({"weight_decay": 0.0}, False)])
def test_adam_and_adamw_of_older_torch_are_not_told_apart(trained, convert, tmp_path, settings, noted, flattened):
    """Up to torch 2.6 no group has `decoupled_weight_decay`."""
    source, saved = trained
    for number, (said, due) in enumerate(((True, False), (False, noted))):
        for group in saved["optim"]["param_groups"]:
            group.update(settings)
            if not said:
                del group["decoupled_weight_decay"]
        kept = {"model": saved["model"], "optimizer": flat(copy.deepcopy(saved))} if flattened else saved
        checkpoint = save(tmp_path / f"c{number}", kept)
        options = ("--with-optimizer", "--config", source, "-n")
        for command, *more in (["hf2megatron"], ["hf2fsdp"], ["hf2nanotron"], ["hf2mds", "--qkv", "grouped"]):
            ran = convert(command, checkpoint, tmp_path / "out", *options, *more)
            assert (ran.code, ran.out.count("its weight decay is taken for AdamW's")) == (0, due), ran.err


def test_optimizers_are_told_by_what_they_keep():
    """Of each that torch and transformers have the states are those by which it is named, and Adam is none of them."""
    import torch
    from transformers import Adafactor

    kinds = {
        torch.optim.Muon: "Muon or SGD with momentum", torch.optim.Adafactor: "Adafactor, of torch",
        Adafactor: "Adafactor, of transformers", torch.optim.Adamax: "Adamax", torch.optim.NAdam: "NAdam",
        torch.optim.RMSprop: "RMSprop or Adadelta", torch.optim.Adagrad: "Adagrad",
        torch.optim.Adadelta: "RMSprop or Adadelta",
        torch.optim.AdamW: "", partial(torch.optim.RMSprop, momentum=0.9): "RMSprop or Adadelta",
    }  # fmt: skip
    for kind, name in kinds.items():
        weight = torch.nn.Parameter(torch.ones(4, 4))
        optimizer = kind([weight])
        weight.grad = torch.ones(4, 4)
        optimizer.step()
        named = whose(optimizer.state[weight])
        assert named == (f" ({name})" if name else ""), kind


def test_momentum_goes_where_it_was_seen_to_be_loaded(trained, convert, tmp_path):
    source, saved = trained
    muon(saved)
    checkpoint = save(tmp_path / "c", saved)
    ran = convert("hf2fsdp", checkpoint, tmp_path / "fsdp", "--with-optimizer", "--config", source)
    assert (ran.code, "get_state_dict(model, [adamw, muon])" in ran.err) == (0, True), "in the order of the source"
    ran = convert("zero2universal", checkpoint, tmp_path / "out", "--config", source)
    refused(ran, 4, "momentum_buffer is not carried there")
    options = ["--with-optimizer", "--lr", 0.01, "--config", source]
    dist = [*options, "--format", "torch_dist"]
    refused(convert("hf2megatron", checkpoint, tmp_path / "out", *dist), 4, "at the rate 0.02", "one for all of them")
    groups(saved)[2]["lr"] = 0.01
    checkpoint = save(tmp_path / "d", saved)
    refused(
        convert("hf2megatron", checkpoint, tmp_path / "out", *dist), 4, "was trained with Adam, and Megatron trains all"
    )
    refused(
        convert("hf2megatron", checkpoint, tmp_path / "out", *options),
        4,
        "momentum_buffer is written to torch_dist alone",
    )
    refused(convert("hf2megatron", checkpoint, tmp_path / "out", options[0], *dist[3:]), 2, "--lr, and --min-lr")
    of(UP)(saved)["momentum_buffer"][0, 0] = float("nan")
    checkpoint = save(tmp_path / "e", saved)
    ran = convert("hf2fsdp", checkpoint, tmp_path / "out", "--with-optimizer", "--config", source)
    refused(ran, 5, "holds nan", "Muon's momentum is finite", "--accept momentum_buffer")


def test_lion_goes_where_it_was_seen_to_be_loaded(trained, convert, tmp_path):
    source, saved = trained
    lion(saved)
    checkpoint, options = save(tmp_path / "c", saved), ["--with-optimizer", "--config", source]
    assert "exp_avg; `convert hf2fsdp --with-optimizer`" in convert("inspect", checkpoint, "--config", source).out
    out, again = tmp_path / "fsdp", tmp_path / "again"
    assert convert("hf2fsdp", checkpoint, out, "--ranks", 3, *options).code == 0
    assert convert("hf2fsdp", out, again, "--ranks", 2, "--with-optimizer").code == 0
    assert convert("verify", again).code == convert("diff", again, out).code == 0
    assert remembered_states(again) == remembered_states(out)
    assert {name.partition(".")[0] for name in remembered_states(out)} == {"exp_avg"}
    refused(
        convert("hf2megatron", checkpoint, tmp_path / "out", *options), 4,
        "was trained with Lion, and Megatron trains the matrices of the layers alone with it",
    )  # fmt: skip
    refused(
        convert("hf2mds", checkpoint, tmp_path / "out", *options, "--qkv", "grouped"), 4,
        "was trained with Lion, and Megatron-DeepSpeed trains with Adam alone: exp_avg is not carried there",
    )  # fmt: skip
    refused(
        convert("zero2universal", checkpoint, tmp_path / "out", "--config", source), 4, "does not say how many steps"
    )
    every(saved, lambda one: one.update(step=3.0))
    counted = save(tmp_path / "d", saved)
    ran = convert("zero2universal", counted, tmp_path / "universal", "--config", source)
    assert (ran.code, "in 3 it asks for exp_avg_sq" in ran.err) == (0, True), ran.err
    assert convert("hf2fsdp", tmp_path / "universal", tmp_path / "back", "--with-optimizer").code == 0
    assert remembered_states(tmp_path / "back") == remembered_states(out)
    of(UP)(saved)["exp_avg"][0, 0] = float("nan")
    ran = convert("hf2fsdp", save(tmp_path / "e", saved), tmp_path / "out", *options)
    refused(ran, 5, "holds nan", "the first moments of Adam and Lion are finite", "--accept exp_avg")
    assert not (tmp_path / "out").exists()


def test_more_steps_than_a_float32_counts_are_not_written(trained, convert, tmp_path):
    source, saved = trained
    every(saved, lambda state: state.update(step=2**24 + 1))
    ran = convert("hf2fsdp", save(tmp_path / "c", saved), tmp_path / "out", "--with-optimizer", "--config", source)
    refused(ran, 4, "counts steps in float32, and 16777217 is not one")
    assert not (tmp_path / "out").exists()


def test_a_momentum_that_is_missing_is_named(model, convert, tmp_path):
    source, saved = training(model("llama"))
    muon(saved, [UP.replace("layers.0", f"layers.{layer}") for layer in range(4)])
    saved["optim"]["state"].pop(UP)
    ran = convert("hf2fsdp", save(tmp_path / "c", saved), tmp_path / "out", "--with-optimizer", "--config", source)
    refused(ran, 3, f"has neither momentum_buffer nor exp_avg of {UP}", "is it frozen, or has it made no step yet?")


MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")


def test_embedding_and_head_are_trained_with_adam_in_megatron(trained, convert, tmp_path):
    source, saved = trained
    muon(saved, [key for key, tensor in saved["model"].items() if tensor.dim() == 2], lr=0.01)
    checkpoint, options = save(tmp_path / "c", saved), ["--with-optimizer", "--lr", 0.01, "--format", "torch_dist"]
    ran = convert("hf2megatron", checkpoint, tmp_path / "out", *options, "--config", source)
    refused(ran, 4, "trains all of its matrices with Muon, and Megatron trains embedding and head with Adam")


@pytest.mark.parametrize(("name", "fused"), [("phi3", "key and query and value"), ("starcoder2", "")])
def test_what_is_one_matrix_to_muon_on_one_side_alone(model, convert, tmp_path, name, fused):
    """Megatron's Muon takes query, key and value apart, wherever they are."""
    source, saved = training(model(name))
    keys = [key for key in saved["model"] if key.split(".")[-2] in (*MATRICES, "c_fc", "c_proj") and "bias" not in key]
    muon(saved, keys, lr=0.01)
    checkpoint, options = save(tmp_path / "c", saved), ["--with-optimizer", "--lr", 0.01, "--format", "torch_dist"]
    ran = convert("hf2megatron", checkpoint, tmp_path / "run", *options, "--config", source)
    assert ran.code == 0, ran.err
    assert (f"to Muon {fused} are one matrix on one side" in ran.err) == bool(fused), ran.err
    ran = convert(
        "hf2megatron", checkpoint, tmp_path / "no", *options, "--config", source, "--optimizer", "distributed"
    )
    refused(ran, 4, "Megatron's layer-wise Muon trains in bf16 alone", "--optimizer plain")
    ran = convert("hf2fsdp", tmp_path / "run", tmp_path / "back", "--with-optimizer")
    assert ran.code == 0, ran.err
    assert (f"to Muon {fused} are one matrix on one side" in ran.err) == bool(fused), ran.err


def groups(saved: State) -> list[State]:
    """The parameter groups."""
    return saved["optim"]["param_groups"]


def as_tensor(rate: float) -> Any:
    """As a training on a GPU keeps it that records graphs."""
    import torch

    return torch.tensor(rate, dtype=torch.float64)


ACCEPTED: dict[str, Callable[[State], object]] = {
    "as it is": lambda s: None,
    "steps as numbers": lambda s: every(s, lambda entry: entry.update(step=3)),
    "whole steps": lambda s: every(s, lambda entry: entry.update(step=entry["step"].long())),
    "a rate as a tensor": lambda s: [entry.update(lr=as_tensor(entry["lr"])) for entry in groups(s)],
    "compiled": lambda s: s["optim"].update(
        state={f"_orig_mod.{key}": entry for key, entry in s["optim"]["state"].items()}
    ),
    "flat": lambda s: s.update(optimizer=flat(s)),
    "as torch 2.3 did": lambda s: None,
    "of `train run` once": lambda s: s.update(optim=s["optim"]["state"]),
}


def test_ranks_that_save_other_settings_of_a_group(trained, convert, tmp_path):
    """Each rank saves its own metadata and objects with `use_collectives=False`; those of the last one counted."""
    source, saved = trained
    other = copy.deepcopy(saved)
    argv = "--with-optimizer", "--config", source
    assert convert("hf2fsdp", save_by_rank(tmp_path / "a", saved, other), tmp_path / "out", *argv).code == 0
    groups(other)[1]["lr"] = 0.5
    ran = convert("hf2fsdp", save_by_rank(tmp_path / "b", saved, other), tmp_path / "no", *argv)
    refused(ran, 3, "__0_0.distcp and ", "__1_0.distcp contradict each other: optim.param_groups", "0.01", "0.5")


@pytest.mark.parametrize("what", ACCEPTED)
def test_an_optimizer_is_the_same_however_it_was_saved(trained, convert, tmp_path, monkeypatch, what):
    """torch's own dcp.load finds each moment beside its weight, and the groups where they were known."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _version

    source, saved = trained
    expected = {key: dict(about) for key, about in saved["optim"]["state"].items()}
    ACCEPTED[what](saved)
    with monkeypatch.context() as patch:
        if "2.3" in what:  # torch remembers how it once took dictionaries apart
            patch.setattr(_version, "_derived_version", "2_3")
        folder = save(tmp_path / "c", saved, single_file_per_rank=what != "flat")
    ran = convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer", "--ranks", 3, "--config", source)
    assert ran.code == 0, ran.err
    known = "once" not in what
    assert ("no rate, betas and weight decay" in ran.err) == (not known)
    nothing = {key: {name: torch.zeros_like(value) for name, value in about.items()} for key, about in expected.items()}
    loaded: State = {"optim": {"state": nothing}}
    if known:
        loaded["optim"]["param_groups"] = [{"lr": 0, "params": 0}, {"lr": 0, "params": 0}]
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    for key, about in expected.items():
        assert all(torch.equal(nothing[key][name], value) for name, value in about.items()), key
    if known:
        members = [{key for key in expected if ("norm" in key) == norm} for norm in (False, True)]
        assert [(value["lr"], set(value["params"])) for value in groups(loaded)] == [(0.01, keys) for keys in members]


@pytest.mark.parametrize(
    ("state", "value", "fine"),
    [
        ("exp_avg", float("nan"), False),
        ("exp_avg", float("-inf"), False),
        ("exp_avg", -3.0, True),
        ("exp_avg_sq", float("nan"), False),
        ("exp_avg_sq", float("inf"), False),
        ("exp_avg_sq", -3.0, False),
        ("exp_avg_sq", -0.0, True),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_moments_that_no_adam_computes_are_refused(trained, convert, tmp_path, state, value, fine, dtype):
    import torch

    source, saved = trained
    moment = of(UP)(saved)[state].to(getattr(torch, dtype))
    moment[7, 3] = moment[90, 1] = value
    of(UP)(saved)[state] = moment
    argv = ("hf2fsdp", save(tmp_path / "c", saved), tmp_path / "out", "--with-optimizer", "--config", source, "-q")
    ran = convert(*argv)
    if fine:
        assert ran.code == 0, ran.err
        return
    message = (
        f"{state} of model.layers.0.mlp.up_proj.weight in ",
        f"holds {value:g}, and 2 of {96 * 64} elements are such",
        f"--accept {state}",
    )
    refused(ran, 5, *message)
    assert not (tmp_path / "out").exists()
    assert convert(*argv, "--accept", state).code == 0
    assert convert("verify", tmp_path / "out").code == 0


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda optim: None, ()),
        (lambda optim: optim["state"][UP]["step"].add_(1), ("different steps",)),
        (lambda optim: optim["param_groups"][1].update(lr=0.02), ("other settings", "optimizer_0_rank1.bin")),
        (lambda optim: optim["state"][UP]["exp_avg"].mul_(2), ("differs between its copies",)),
    ],
    ids=["sound", "another step", "another rate", "another moment"],
)
def test_dumps_of_ranks_agree(trained, convert, tmp_path, change, parts):
    """Copies of replicas, of which those of one rank are of another save."""
    import torch

    (source, saved), folder = trained, tmp_path / "c"
    folder.mkdir()
    for rank in (0, 1):
        torch.save(saved["model"], folder / f"pytorch_model_fsdp_0_rank{rank}.bin")
        torch.save(saved["optim"], folder / f"optimizer_0_rank{rank}.bin")
        change(saved["optim"])
    ran = convert("hf2fsdp", folder, tmp_path / "out", "--with-optimizer", "--config", source)
    if parts:
        refused(ran, 6 if "copies" in parts[0] else 3, *parts)
    else:
        assert ran.code == 0, ran.err


def test_a_truncated_file_is_noticed(trained, convert, tmp_path):
    source, saved = trained
    folder = save(tmp_path / "c/optimizer_0", {"optimizer": saved.pop("optim")})
    save(tmp_path / "c/pytorch_model_fsdp_0", saved)
    argv = (tmp_path / "c", tmp_path / "out", "--with-optimizer", "--config", source)
    assert convert("hf2fsdp", *argv, "-n").code == 0
    file = folder / "__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    refused(convert("hf2fsdp", *argv), 3, file, "cut off")
    file.unlink()
    refused(convert("hf2fsdp", *argv), 3, folder, "lacks 1 of 1 files")


def test_a_moment_that_is_damaged_is_noticed(trained, convert, tmp_path):
    """Of what we wrote: the manifest knows every moment, and step and groups are read back."""
    source, saved = trained
    out = tmp_path / "out"
    options = ("--with-optimizer", "--config", source)
    assert convert("hf2fsdp", save(tmp_path / "c", saved), out, *options).code == 0
    stored = pickle.loads((out / ".metadata").read_bytes()).storage_data
    places = {index.fqn: info for index, info in stored.items()}
    for name in (f"optim.state.{UP}.exp_avg", f"model.{UP}"):
        info = places[name]
        with (out / info.relative_path).open("r+b") as file:
            file.seek(info.offset + info.length // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
            file.flush()
            refused(convert("verify", out), 6, "differ from vitruvian.json")
            refused(convert("hf2fsdp", out, tmp_path / "two", *options), 3, "is damaged")
            file.seek(-1, 1)
            file.write(bytes([byte]))
    assert convert("verify", out).code == 0


def test_what_verl_saves_beside_its_model_is_told(model, convert, tmp_path):
    """On one rank nothing is sharded. What it saves on several is in tests/golden/test_verl.py."""
    import torch

    source, actor = model("llama", num_hidden_layers=1), tmp_path / "actor"
    module = torch.nn.ParameterDict({key.replace(".", "/"): tensor for key, tensor in weights(source).items()})
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    actor.mkdir()
    tensors = {key.replace("/", "."): tensor.detach() for key, tensor in module.items()}
    torch.save(tensors, actor / "model_world_size_1_rank_0.pt")
    torch.save(optimizer.state_dict(), actor / "optim_world_size_1_rank_0.pt")
    config = ("--config", source)
    refused(convert("hf2fsdp", actor, tmp_path / "out", "--with-optimizer", *config), 4, "numbers its parameters")
    assert "optimizer       cannot be converted" in convert("inspect", actor, *config).out
    assert convert("fsdp2hf", actor, tmp_path / "hf", *config).code == 0


CONTAINERS = {
    "of another model": ({"policy": ["model"], "value": ["model", "optim"]}, "policy.model", "value.optim is of value"),
    "of its own model": ({"policy": ["model"], "value": ["model", "optim"]}, "value.model", None),
    "of the model beside an average": ({"": ["model", "ema", "optim"]}, "model", None),
    "not of the average": ({"": ["model", "ema", "optim"]}, "ema", "optim is of model"),
    "beside an average in a folder of its own": ({"": ["model", "optim"], "ema": ["model"]}, "model", None),
    "not of an average in a folder of its own": (
        {"": ["model", "optim"], "ema": ["model"]},
        "ema.model",
        "optim is of model",
    ),
    "of an application's": ({"app": ["model", "optim"]}, "app.model", None),
    "not of an application's average": ({"app": ["model", "ema", "optim"]}, "app.ema", "app.optim is of app.model"),
    "of a model at the top level": ({"": ["", "optim"]}, "", None),
    "beside an average, of a model at the top level": ({"": ["", "ema", "optim"]}, "", None),
    "not of the average of such a model": ({"": ["", "ema", "optim"]}, "ema", "optim is of the top level"),
    "of Lightning's": ({"": ["state_dict", "optimizer_states"]}, "state_dict", None),
    "in another folder of the dictionary": ({"": ["model"], "app": ["optim"]}, "model", None),
    "named after another model": ({"": ["model", "critic", "critic_optim"]}, "model", "critic_optim is of critic"),
    "named after its own model": ({"": ["model", "critic", "critic_optim"]}, "critic", None),
    "of one of two": ({"": ["actor", "critic", "optim"]}, "actor", "optim may be of actor or critic"),
    "beside a reference": ({"": ["actor", "ref", "optim"]}, "actor", None),
}
"""The models and optimizers by the path before them, the container of the model, and what is said where it is not the
optimizer's."""


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("what", CONTAINERS)
def test_the_optimizer_is_that_of_the_container(trained, convert, tmp_path, what, flattened):
    held, container, said = CONTAINERS[what]
    source, saved = trained
    optim = flat(copy.deepcopy(saved)) if flattened else saved["optim"]
    state: State = {}
    for outer, names in held.items():
        place: State = state.setdefault(outer, {}) if outer else state
        for name in names:
            entry: Any = optim if "optim" in name else saved["model"]
            place |= {name: [entry] if name == "optimizer_states" else entry} if name else entry
    options = ("--config", source, "--container", container)
    folder = save(tmp_path / "c", state)
    assert convert("fsdp2hf", folder, tmp_path / "weights", *options).code == 0
    for command, more in (("hf2fsdp", ("--with-optimizer",)), ("zero2universal", ())):
        ran = convert(command, folder, tmp_path / command, *more, *options)
        if said:
            refused(ran, 4, f"{folder}: its optimizer {said}", f"and not of {container!r}", "without --with-optimizer")
        else:
            assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("weights_of", "optimizer_of"),
    [
        ("pytorch_model_fsdp_0_rank{}.bin", "optimizer_0_rank{}.bin"),
        ("model_world_size_2_rank_{}.pt", "optim_world_size_1_rank_{}.pt"),
    ],
)
def test_dumps_of_an_optimizer_of_other_ranks(trained, convert, tmp_path, weights_of, optimizer_of):
    """As where a training went on with fewer ranks, and only its optimizer was copied."""
    import torch

    source, saved = trained
    run = tmp_path / "run"
    run.mkdir()
    for rank in range(2):
        torch.save(saved["model"], run / weights_of.format(rank))
    torch.save(saved["optim"], run / optimizer_of.format(0))
    assert convert("fsdp2hf", run, tmp_path / "weights", "--config", source).code == 0
    ran = convert("hf2fsdp", run, tmp_path / "out", "--with-optimizer", "--config", source)
    refused(ran, 3, f"{run} holds 1 dumps of an optimizer and 2 of its model")
