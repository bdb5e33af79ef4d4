"""The optimizer of DeepSpeed and GPT-NeoX in no framework's terms is the one in the engine's memory, and trains on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converters.convert import run
from converters.plan.request import Request
from converters.plan.targets import plan_huggingface
from converters.plan.training_state import optimizer_of
from formats.checkpoint import Settings
from formats.errors import RefusedError, SourceError, UnsupportedError
from formats.optimizer import Group, Optimizer
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused
from tests.golden.test_zero import ALONE, FOUR, ODD, TIED, TWO, differences, name
from tests.golden.zero_worlds import PARALLEL, checkpoint
from tests.optimizers import add_optimizer, of

pytestmark = pytest.mark.distributed
NEOX = Path(__file__).parent / "neox"
DECAY, NONE = (Group(0.01, (0.9, 0.999), 1e-8, decay) for decay in (0.1, 0.0))
CASES = (
    (ALONE, "zero2"), (TWO, "zero1"), (TWO, "zero1-fp32"), (TWO, "bf16-optimizer"), (TWO, "zero3-sub-groups"),
    (TIED, "zero3"), (ODD, "zero3"), (ODD, "zero1"), (FOUR, "zero2-round-robin"),
)  # fmt: skip


def optimizer(path: Path, **settings: Any) -> Optimizer:
    return optimizer_of(open_checkpoint(path, Settings(**settings)))


@pytest.mark.parametrize(("world", "kind"), CASES, ids=name)
def test_states_are_those_of_the_engine(made, tmp_path, world, kind):
    """Every master and both moments, bit for bit; and how each parameter is treated."""
    source = open_checkpoint(checkpoint(made(world), kind), Settings(config=made(world) / "hf"))
    adam = optimizer_of(source)
    assert (adam.step, adam.samples) == (3, 3 * world.ranks)
    assert ("fp32" in adam.states) is not kind.startswith("zero3")  # which has no other weights
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        request = Request(tmp_path / state, quiet=True)
        run(plan_huggingface(adam.states.get(state, source), request, 10**9), request)
        assert differences(tmp_path / state, made(world) / f"{kind}.truth.safetensors", state) == []
    vectors = {key for key in adam.groups if "norm" in key[0]}
    assert adam.groups == {key: NONE if key in vectors else DECAY for key in source.dtypes()}
    assert list(dict.fromkeys(adam.groups.values())) == [DECAY, NONE]  # as the training has them


@pytest.mark.parametrize(
    ("source", "gqa"),
    [
        ("tp2", "blocked"),
        ("pp2-tp2", "blocked"),
        ("pp2-tied", "blocked"),
        ("llama-grouped-tp2", "grouped"),
        ("llama-tp2-dp2", "blocked"),
    ],
)
def test_states_of_neox(made, source, gqa, tmp_path):
    """They lie where `--weights` finds them, which test_universal.py compares with the engine's memory."""
    real = (NEOX / source).is_dir()
    path, settings = NEOX / source, {"gqa_layout": gqa, "vocab_size": 101 if real else 96}
    if not real:
        from tests.golden.test_universal import YML

        path, settings["config"] = made(PARALLEL) / source, tmp_path / "run.yml"
        settings["config"].write_text(json.dumps(YML | {"no_weight_tying": "tied" not in source}))
    adam = optimizer(path, **settings)
    for state, weights in (("fp32", "fp32-master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        again = open_checkpoint(path, Settings(**settings, weights=weights))
        assert list(adam.states[state].fragments()) == list(again.fragments())
    assert adam.step == (6 if real else 3)
    decay = {key[0] for key, group in adam.groups.items() if group.weight_decay}
    assert {key for key, _ in adam.groups} - decay == {"input_norm", "post_norm", "final_norm"}
    assert decay


def test_a_universal_checkpoint_of_any_optimizer(made, convert, tmp_path):
    """What is made of the optimizer alone holds the very files that real DeepSpeed loads at every stage."""
    first, second, third = (tmp_path / number for number in ("first", "second", "third"))
    inspected = convert("inspect", made(TWO) / "zero1", "--config", made(TWO) / "hf")
    assert "fp32, exp_avg, exp_avg_sq, step 3" in inspected.out
    assert convert("zero2universal", made(TWO) / "zero1", first).code == 0
    ran = convert("zero2universal", first, second, "--config", made(TWO) / "hf")
    assert ran.code == 0, ran.err
    assert "weight_decay 0.1 (30 parameters); lr 0.01, betas (0.9, 0.999), eps 1e-08, weight_decay 0.0 (9 " in ran.err
    assert convert("digest", second).out.split()[0] in ran.out  # the model's config lies beside it
    assert convert("zero2universal", second, third).code == 0
    for other in (first, third):
        files = {path.relative_to(other): path for path in other.rglob("zero/*/*.pt")}
        assert len(files) == 39 * 4
        assert all((second / name).read_bytes() == path.read_bytes() for name, path in files.items())
    optimizers = [optimizer(folder, config=made(TWO) / "hf") for folder in (first, second, third)]
    assert [adam.groups for adam in optimizers] == [optimizer(made(TWO) / "zero1", config=made(TWO) / "hf").groups] * 3
    assert [(adam.step, adam.samples) for adam in optimizers] == [(3, 6)] * 3
    assert convert("verify", second, first, "--config", made(TWO) / "hf", "--weights", "exp_avg").code == 0
    ran = convert("zero2hf", first, tmp_path / "model", "--config", made(TWO) / "hf")
    assert (ran.code, "which lists them by other names" in ran.err, "None" in ran.err) == (0, True, False), ran.err


def test_the_training_goes_on_as_if_it_had_not_stopped(made, zero, convert, tmp_path):
    """Real DeepSpeed, three steps more in each stage: every loss is that of the training that never stopped."""
    assert convert("zero2universal", made(TWO) / "zero1", tmp_path / "one").code == 0
    ran = convert("zero2universal", tmp_path / "one", tmp_path / "universal", "--config", made(TWO) / "hf")
    assert ran.code == 0, ran.err
    code, out = zero("go-on", tmp_path / "universal", made(TWO) / "hf", 2, 1, 2, 3, "bf16-optimizer")
    assert code == 0, out[-4000:]
    unbroken, *parts = map(json.loads, out.splitlines())
    assert len(unbroken) == 2
    assert len({loss for rank in unbroken for loss in rank}) == 6
    assert parts == [unbroken] * 4


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_loads_a_model_with_a_bias_that_nothing_trains(zero, model, convert, tmp_path, stage):
    """Of DeepSeek-V3, out of Megatron: every master, both moments and the rate; the bias is that of the model."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    source = model("deepseek_v3", "float32")
    assert convert("hf2megatron", source, tmp_path / "run", "--norm", "local", "--iteration", 3).code == 0
    add_optimizer(tmp_path / "run", "plain")
    assert convert("zero2universal", tmp_path / "run", tmp_path / "universal").code == 0
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    expected = {f"module.{key}": weight.contiguous() for key, weight in loaded.state_dict().items()}
    for key, weight in loaded.named_parameters():
        expected |= {f"fp32.{key}": weight.data.clone()}
        expected |= {f"{state}.{key}": of(weight.data, state) for state in ("exp_avg", "exp_avg_sq")}
    save_file(expected, tmp_path / "truth.safetensors")
    code, output = zero("load-universal", tmp_path / "universal", source, 2, stage, tmp_path / "truth.safetensors")
    assert code == 0, output[-4000:]


def test_a_scheduler_goes_on_too(made, convert, tmp_path):
    """DeepSpeed hands it what the model file says, torch's or its own."""
    import torch
    from deepspeed.runtime.lr_schedules import WarmupDecayLR
    from torch.optim.lr_scheduler import CosineAnnealingLR

    assert convert("zero2universal", made(TWO) / "zero1", tmp_path / "one").code == 0
    assert convert("zero2universal", tmp_path / "one", tmp_path / "two", "--config", made(TWO) / "hf").code == 0
    (path,) = tmp_path.glob("two/*/mp_rank_00_model_states.pt")
    state = torch.load(path, weights_only=False)["lr_scheduler"]
    for make_one in (lambda adam: CosineAnnealingLR(adam, 10), lambda adam: WarmupDecayLR(adam, 10, 0, 0.01, 2)):
        rates = []
        for stopped in (False, True):
            adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.01)
            scheduler = make_one(adam)
            for number in range(6):
                if stopped and number == 3:
                    rate, scheduler = adam.param_groups[0]["lr"], make_one(adam)
                    scheduler.load_state_dict(state)
                    adam.param_groups[0]["lr"] = rate
                adam.step()
                scheduler.step()
            rates.append(adam.param_groups[0]["lr"])
        assert rates[0] == rates[1] != 0.01


def test_parameter_groups_that_are_alike_are_written_as_often_as_trainings_have_them(made, convert, tmp_path):
    """The loader passes over the parameters of a group that it is not told of."""
    import torch

    ran = convert("zero2universal", checkpoint(made(TWO), "trainer3"), tmp_path / "one")
    assert ran.code == 0, ran.err
    ran = convert("zero2universal", tmp_path / "one", tmp_path / "two", "--config", made(TWO) / "hf")
    assert ran.code == 0, ran.err
    state = torch.load(next(tmp_path.glob("two/*/zero/optimizer_state.pt")), weights_only=False)
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["zero2-buffers", "zero3-buffers"])
def test_buffers_have_no_states(made, convert, tmp_path, kind):
    """Of a model that no table knows: DeepSpeed records which names are buffers, which are carried as values."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    truth, about = made(TWO) / f"{kind}.truth.safetensors", ("--config", made(TWO) / "hf", "--verbatim")
    ran = convert("hf2fsdp", made(TWO) / kind, tmp_path / "c", "--with-optimizer", *about)
    assert ran.code == 0, ran.err
    assert convert("verify", tmp_path / "c").code == 0
    assert convert("fsdp2hf", tmp_path / "c", tmp_path / "fp32", *about).code == 0
    assert differences(tmp_path / "fp32", truth, "fp32") == []
    stored = load_file(truth)
    moments = {key: torch.zeros_like(tensor) for key, tensor in stored.items() if key.startswith("exp_avg")}
    places = {key: "optim.state.{2}.{0}".format(*key.partition(".")) for key in moments}
    saved = {places[key]: tensor for key, tensor in moments.items()}
    dcp.load(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    assert len(moments) == 2 * 39
    assert all(torch.equal(tensor, stored[key]) for key, tensor in moments.items())


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("zero1-frozen", r"of 3 tensors, such as model\.embed_tokens\.weight: they were not trained"),
        ("zero0", "no names"),
    ],
)
def test_what_is_not_whole_is_refused(made, kind, says):
    with pytest.raises(UnsupportedError, match=says):
        optimizer(made(TWO) / kind, config=made(TWO) / "hf")


def test_moments_are_no_weights(made):
    with pytest.raises(RefusedError, match="--weights exp_avg takes moments"):
        optimizer(made(TWO) / "zero1", config=made(TWO) / "hf", weights="exp_avg")


def test_a_sum_over_ranks_has_no_moments():
    with pytest.raises(UnsupportedError, match=r"dense\.bias is a sum over tensor parallel ranks"):
        optimizer(NEOX / "neox-parallel-tp2", vocab_size=101)


def inner(stored: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = stored["optimizer_state_dict"]["base_optimizer_state"]
    return state


L2 = {"weight_decay": 0.1, "decoupled_weight_decay": False}
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "amsgrad": (lambda s: inner(s)["state"][0].update(max_exp_avg_sq=1.0), UnsupportedError, "keeps max_exp_avg_sq"),
    "lamb": (lambda s: inner(s)["param_groups"][1].update(max_coeff=10.0), UnsupportedError, "is LAMB"),
    "radam": (lambda s: inner(s)["param_groups"][0].pop("amsgrad"), UnsupportedError, "of an unknown kind"),
    "maximize": (lambda s: inner(s)["param_groups"][0].update(maximize=True), UnsupportedError, "says maximize = True"),
    "set to amsgrad": (lambda s: inner(s)["param_groups"][0].update(amsgrad=True), UnsupportedError, "says amsgrad"),
    "no correction": (
        lambda s: inner(s)["param_groups"][0].update(bias_correction=False),
        UnsupportedError,
        "bias_correction = False",
    ),
    "a group's parameters": (lambda s: inner(s)["param_groups"][1].update(params=[]), SourceError, "of group 1"),
    "L2": (lambda s: inner(s)["param_groups"][0].update(L2), UnsupportedError, "decay of 0.1 is in the gradients"),
    "no rate": (lambda s: inner(s)["param_groups"][0].pop("lr"), SourceError, "its lr is None"),
    "steps": (lambda s: inner(s)["state"][1].update(step=4.0), UnsupportedError, r"have made \[3.0, 4.0\] steps"),
    "no step": (lambda s: inner(s)["state"][1].pop("step"), SourceError, "how many steps"),
    "no groups": (lambda s: inner(s).pop("param_groups"), SourceError, "of a version that is known"),
    "lion": (lambda s: inner(s)["state"][0].pop("exp_avg_sq"), SourceError, "holds no exp_avg_sq"),
}


@pytest.mark.parametrize("command", ["hf2fsdp", "hf2megatron", "zero2universal"])
def test_masters_of_another_save_are_noticed_in_float32_too(made, convert, tmp_path, command):
    import shutil

    import torch

    shutil.copytree(checkpoint(made(TWO), "zero1-fp32"), tmp_path / "run")
    for path in tmp_path.rglob("*optim_states.pt"):
        stored = torch.load(path, weights_only=False)
        stored["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.mul_(1.01)
        torch.save(stored, path)
    options = [] if command == "zero2universal" else ["--with-optimizer", "--config", made(TWO) / "hf"]
    ran = convert(command, tmp_path / "run", tmp_path / "out", *options)
    refused(ran, 6, "are not the rounded FP32 master weights")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_adam_or_damaged_is_refused(made, tmp_path, fault):
    import shutil

    import torch

    change, error, says = FAULTS[fault]
    shutil.copytree(made(ALONE) / "zero1", tmp_path / "run")
    (path,) = tmp_path.glob("run/*/*optim_states.pt")
    stored = torch.load(path, weights_only=False)
    change(stored)
    torch.save(stored, path)
    with pytest.raises(error, match=says):
        optimizer(tmp_path / "run", config=made(ALONE) / "hf")


def with_config(run: Path, kind: str, *, said: bool = False, **params: object) -> None:
    """Another optimizer in the `ds_config` of each file, and groups that need not say whose weight decay theirs is."""
    import torch

    for path in run.rglob("*_states.pt"):
        stored = torch.load(path, weights_only=False)
        stored["ds_config"] = {**stored["ds_config"], "optimizer": {"type": kind, "params": params}}
        for group in inner(stored)["param_groups"] if "optimizer_state_dict" in stored and not said else ():
            del group["decoupled_weight_decay"]
        torch.save(stored, path)


CONFIGURED: list[tuple[str, dict[str, object], bool, str | None]] = [
    ("Adam", {"adam_w_mode": False}, False, "adam_w_mode = False"),
    ("Adam", {"adam_w_mode": None}, False, "adam_w_mode = None"),
    ("Adam", {"adam_w_mode": False}, True, None),
    ("Adam", {"adam_w_mode": True}, False, None),
    ("Adam", {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8}, False, None),
    ("AdamW", {"adam_w_mode": False}, False, None),
    ("CPU_Adam", {"adamw_mode": False}, False, "adamw_mode = False"),
    ("CPU_Adam", {}, False, None),
    ("FusedAdam", {}, False, None),
    ("MuAdam", {}, False, "type = MuAdam"),
    ("MuAdam", {}, True, None),
    ("MuAdamW", {}, False, None),
]
"""Type and `params` of the optimizer in a configuration, whether the groups say whose weight decay theirs is, and what
puts it into the gradients."""
OTHERS = ("Lamb", "OneBitAdam", "ZeroOneAdam", "Lion", "Muon", "Adagrad", "sgd", "sm3", "madgrad_wd", "MuSGD")


def in_gradients(said: str) -> str:
    return rf"says {said}, by which a weight decay of 0\.1 is in the gradients"


@pytest.mark.parametrize("universal", [False, True])
def test_weight_decay_that_the_configuration_puts_into_the_gradients(made, convert, tmp_path, universal):
    """What DeepSpeed's own Adams take, which no group of theirs has; torch's groups say it themselves."""
    import shutil

    for number, (kind, params, said, refusal) in enumerate(CONFIGURED):
        run = tmp_path / str(number)
        shutil.copytree(made(ALONE) / "zero1", run)
        with_config(run, kind, said=said, **params)
        if universal:
            assert convert("zero2universal", run, run / "universal").code == 0
            run /= "universal"
        options = {"config": made(ALONE) / "hf"}
        if refusal:
            with pytest.raises(UnsupportedError, match=f"its ds_config {in_gradients(refusal)}") as refused_by_name:
                optimizer(run, **options)
            assert "--accept adam_w_mode" in str(refused_by_name.value.hint)
            options["accept"] = ("adam_w_mode",)
        assert {*optimizer(run, **options).groups.values()} == {DECAY, NONE}


def test_another_optimizer_in_the_configuration_than_in_the_groups(made, tmp_path):
    import shutil

    run = Path(shutil.copytree(made(ALONE) / "zero1", tmp_path / "run"))
    for kind in OTHERS:
        shutil.copytree(made(ALONE) / "zero1", run, dirs_exist_ok=True)
        with_config(run, kind)
        with pytest.raises(UnsupportedError, match=f"its ds_config says that its optimizer is '{kind}'"):
            optimizer(run, config=made(ALONE) / "hf")
        with_config(run, kind, said=True)
        accepted = optimizer(run, config=made(ALONE) / "hf", accept=("adam_w_mode",))
        assert {*accepted.groups.values()} == {DECAY, NONE}


@pytest.mark.parametrize("kept", [True, False])
def test_the_optimizer_in_the_yml_of_gpt_neox(tmp_path, kept):
    """GPT-NeoX makes its optimizer of it, and DeeperSpeed of old saved no `ds_config`."""
    import shutil

    import torch
    import yaml

    run = Path(shutil.copytree(NEOX / "llama-gqa-tp2", tmp_path / "run"))
    with_config(run, "Adam")
    for path in () if kept else run.rglob("*_states.pt"):
        stored = torch.load(path, weights_only=False)
        del stored["ds_config"]
        torch.save(stored, path)
    (yml,) = run.rglob("*.yml")
    settings = yaml.safe_load(yml.read_text())
    options = {"gqa_layout": "blocked", "vocab_size": 101}
    for kind, params, says in (
        ("Adam", {}, None),
        ("CPU_Adam", {}, None),
        ("Adam", {"adam_w_mode": False}, in_gradients("adam_w_mode = False")),
        ("CPU_Adam", {"adamw_mode": False}, in_gradients("adamw_mode = False")),
        ("sm3", {}, "says that its optimizer is 'sm3'"),
    ):
        settings["optimizer"] = {"type": kind, "params": {"lr": 0.02, **params}}
        yml.write_text(yaml.safe_dump(settings))
        if says:
            with pytest.raises(UnsupportedError, match=f"its yml {says}"):
                optimizer(run, **options)
        else:
            assert {group.weight_decay for group in optimizer(run, **options).groups.values()} == {0.1, 0.0}


def test_weight_decay_in_the_gradients_of_gpt_neox(tmp_path):
    import shutil

    run = Path(shutil.copytree(NEOX / "llama-gqa-tp2", tmp_path / "run"))
    with_config(run, "Adam", adam_w_mode=False)
    with pytest.raises(UnsupportedError, match=f"its ds_config {in_gradients('adam_w_mode = False')}"):
        optimizer(run, gqa_layout="blocked", vocab_size=101)


def test_what_is_wrong_with_a_universal_checkpoint(made, convert, tmp_path):
    """Exit codes and names."""
    import shutil

    import torch

    assert convert("zero2universal", made(ALONE) / "zero1", tmp_path / "run").code == 0
    config = ["--config", made(ALONE) / "hf"]
    folder = tmp_path / "run" / "global_step3" / "zero" / "model.norm.weight"

    def says(code: int, *messages: str) -> None:
        refused(convert("zero2universal", tmp_path / "run", tmp_path / "out", *config), code, *messages)

    step = (folder / "step.pt").read_bytes()
    torch.save(torch.tensor(5.0), folder / "step.pt")
    says(4, "different numbers of steps", "model.norm.weight 5")
    torch.save("five", folder / "step.pt")
    says(3, f"{folder / 'step.pt'} says that its optimizer has made 'five' steps")
    for made_steps in (float("nan"), 2.5, -1.0):
        torch.save(torch.tensor(made_steps), folder / "step.pt")
        says(3, f"{folder / 'step.pt'} says that its optimizer has made {made_steps} steps")
    (folder / "step.pt").write_bytes(step)
    torch.save(torch.zeros(64), folder / "max_exp_avg_sq.pt")
    says(4, f"{folder}: its optimizer (Adam with amsgrad) keeps max_exp_avg_sq")
    (folder / "max_exp_avg_sq.pt").unlink()
    moment = (folder / "exp_avg.pt").read_bytes()
    (folder / "exp_avg.pt").write_bytes(moment[:-200])
    says(3, str(folder / "exp_avg.pt"))
    (folder / "exp_avg.pt").unlink()
    says(3, str(folder / "exp_avg.pt"))
    (folder / "exp_avg.pt").write_bytes(moment)
    shutil.copytree(folder, folder.with_name("rotary.scale"))
    config.append("--verbatim")
    says(3, "1 parameters, such as rotary.scale, are in its model file or in zero/, not in both")
    refused(convert("zero2universal", made(ALONE) / "hf", tmp_path / "out"), 4, "of which no optimizer is read")
    assert not (tmp_path / "out").exists()
