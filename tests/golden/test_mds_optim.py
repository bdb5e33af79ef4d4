"""Megatron-DeepSpeed's optimizer is written: DeepSpeed's pipeline engine resumes from it, at any topology.

The trees themselves were asked once: in float32, with `--universal-checkpoint`, the next losses of a Llama (6acc370a,
TP 2 to TP 2, TP 1 and PP 2) and of a GPT (4efb479d, TP 2 to TP 2, PP 2 and TP 4) are those of the training that no one
moved, to 2e-7; where the vocabulary has padding, those of DeepSpeed's own universal checkpoint. Of a BLOOM so too, in
BigScience's tree at 8387ae17: mds/README.md says how.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converters.plan.training_state import optimizer_of
from formats.checkpoint import Settings
from formats.deepspeed.mds.optimizer import SAMPLES, Resumed, progress_keys
from formats.deepspeed.universal import scalar
from formats.optimizer import Group
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused
from tests.golden.test_mds import CASES, HERE, ORDERS, STAGES, enums, layers_of
from tests.golden.test_universal import loaded

__all__ = ["enums"]


def resumed(zero: Any, run: Path, like: Path, out: Path, pp: int, tp: int, how: str) -> tuple[dict[str, Any], Any]:
    """What DeepSpeed's engine has loaded, and the losses of its next steps."""
    from safetensors.torch import load_file

    code, output = zero(run, like, out, pp, tp, how, script=Path(__file__).with_name("mds_world.py"))
    assert code == 0, output[-4000:]
    return load_file(out), json.loads(out.with_suffix(".json").read_text())


STATES = {"fp32": "fp32-master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def cut_by_the_layout(
    convert: Any, run: Path, folder: Path, name: str, sizes: tuple[int, int], order: str = ""
) -> dict[str, Any]:
    """What each model parallel rank of a topology has of each state, as layer files of such a model would have it."""
    (pp, tp), expected = sizes, dict[str, Any]()
    for state, weights in STATES.items():
        hub, out = folder / f"{state}-hub", folder / state
        assert convert("zero2hf", run, hub, *CASES[name], "--weights", weights, "--dtype", "fp32").code == 0
        argv = ("--qkv", order or ORDERS.get(name, "grouped"), "--tp", tp, "--pp", pp)
        argv += ("--make-vocab-size-divisible-by", 8)
        assert convert("hf2mds", hub, out, *argv).code == 0
        expected |= {
            f"{state}.{int(file[15:17])}.{int(file[6:8])}.{key}": tensor
            for file, tensors in layers_of(out).items()
            for key, tensor in tensors.items()
        }
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_gqa_separate_tp2", STAGES, "bloom_tp2"])
def test_the_optimizer_written_is_read_again(convert, tmp_path, name):
    """Into other frameworks it goes as from the partitions, and back it is the same, bit for bit."""
    run, out, qkv = HERE / name, tmp_path / "run", ["--qkv", ORDERS.get(name, "grouped"), "--consumed-samples", 6]
    padded = ["--make-vocab-size-divisible-by", 16]
    assert convert("hf2mds", run, out, *CASES[name], "--with-optimizer", *padded, "--tp", 2).code == 0
    assert "fp32, exp_avg, exp_avg_sq, step 3" in convert("inspect", out).out
    assert optimizer_of(open_checkpoint(out, Settings())).samples == 6
    assert convert("verify", out).code == 0
    assert convert("verify", out, run, *CASES[name], "--weights", "exp_avg_sq").code == 0
    fsdp = [tmp_path / "fsdp1", tmp_path / "fsdp2"]
    assert convert("hf2fsdp", run, fsdp[0], *CASES[name], "--with-optimizer").code == 0
    assert convert("hf2fsdp", out, fsdp[1], "--with-optimizer").code == 0
    assert (fsdp[0] / "__0_0.distcp").read_bytes() == (fsdp[1] / "__0_0.distcp").read_bytes()
    for source, again in ((out, tmp_path / "topology"), (fsdp[1], tmp_path / "fsdp2mds")):
        ran = convert("hf2mds", source, again, "--with-optimizer", *qkv, *padded, "--pp", 2)
        assert ran.code == 0, ran.err
        files = sorted(path.relative_to(again) for path in again.glob("global_step3/zero/**/*.pt"))
        assert files == sorted(path.relative_to(out) for path in out.glob("global_step3/zero/**/*.pt")) != []
        assert all((again / path).read_bytes() == (out / path).read_bytes() for path in files)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "topologies"), [
    ("llama_gqa_separate_tp2", [(1, 2), (2, 1)]), ("gpt_blocked_tp2", [(1, 2), (1, 4)]),
    (STAGES, [(2, 1), (1, 1), (1, 2)]), ("bloom_tp2", [(1, 2), (2, 2)]),
])  # fmt: skip
def test_deepspeed_goes_on_from_what_we_write(zero, convert, tmp_path, name, topologies):
    """Every state bit for bit, at the same topology and at others; and the losses of a training that was not moved."""
    run, out, saved = HERE / name, tmp_path / "run", HERE / name / "global_step3"
    before, losses = resumed(
        zero, run, saved, tmp_path / "before", *((2, 1) if name == STAGES else (1, 2)), "partitions"
    )
    assert len({*losses}) == 3
    for pp, tp in topologies:
        argv = (*CASES[name], "--with-optimizer", "--tp", tp, "--pp", pp, "--make-vocab-size-divisible-by", 8)
        ran = convert("hf2mds", run, out, *argv, "--force")
        assert ran.code == 0, ran.err
        held, after = resumed(zero, out, out / "global_step3", tmp_path / f"{pp} {tp}", pp, tp, "universal")
        expected = cut_by_the_layout(convert, run, tmp_path / f"cut {pp} {tp}", name, (pp, tp))
        seen = set()
        for key, tensor in held.items():
            state, rank, parameter = key.split(".", 2)
            place = f"{state}.{int(rank) % tp}.{parameter.replace('tied_modules.embed.', '1.')}"
            if name == STAGES and rank == str((pp - 1) * tp) != "0" and "position_embeddings" in place:
                continue
            assert tensor[: len(expected[place])].equal(expected[place]), (key, pp, tp)
            seen.add(place)
        assert seen == expected.keys()
        if tp == 1 if name == STAGES else (pp, tp) == (1, 2):  # elsewhere these modules compute something else
            assert after == losses, (pp, tp)
        if (pp, tp) == topologies[0]:
            assert held.keys() == before.keys()


# --- what is wrong with it -------------------------------------------------------------------------------------------

LLAMA = HERE / "llama_gqa_separate_tp2"


def changed(path: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change what a file of the tag holds."""

    def edit(tag: Path) -> None:
        import torch

        value = torch.load(tag / path, weights_only=False)
        change(value)
        torch.save(value, tag / path)

    return edit


def swapped(tag: Path) -> None:
    """The moments of two layers in each other's place, in a training's save, which has no manifest."""
    (tag / "vitruvian.json").unlink()
    first, second = (tag / f"zero/{layer}.mlp.dense_4h_to_h.weight" for layer in (2, 3))
    first.rename(tag / "other")
    second.rename(first)
    (tag / "other").rename(second)


NORM, GROUPS = "zero/2.input_layernorm.weight", "zero/optimizer_state.pt"
FAULTS: dict[str, tuple[Callable[[Path], Any], int, tuple[str, ...]]] = {
    "a parameter is missing": (lambda tag: shutil.rmtree(tag / NORM), 3, ("missing: 2.input_layernorm.weight [24]",)),
    "a moment is missing": (lambda tag: (tag / NORM / "exp_avg.pt").unlink(), 3, ("exp_avg.pt",)),
    "another step": (
        lambda tag: (tag / NORM / "step.pt").write_bytes(scalar(4.0)), 4, ("made different numbers of steps",),
    ),
    "a truncated file": (
        lambda tag: (tag / NORM / "exp_avg.pt").write_bytes((tag / NORM / "exp_avg.pt").read_bytes()[:300]),
        3, ("exp_avg.pt",),
    ),
    "no groups": (lambda tag: (tag / GROUPS).unlink(), 3, ("optimizer_state.pt",)),
    "one group": (changed(GROUPS, lambda value: value["param_groups"].pop()), 3, ("holds the parameters of group 1",)),
    "another optimizer": (
        changed(GROUPS, lambda value: value["param_groups"][0].update(amsgrad=True)), 4, ("amsgrad = True",),
    ),
    "a rank is missing": (lambda tag: (tag / "mp_rank_01_model_states.pt").unlink(), 3, ("2 model parallel ranks",)),
    "layers of another training": (swapped, 6, ("are not the rounded FP32 master weights",)),
    "more steps": (changed("mp_rank_00_model_states.pt", lambda value: value.update(skipped_steps=1)), 3, ("skipped",)),
}  # fmt: skip
"""What is done to a tag, the exit code, and what the message says."""


def test_without_its_layer_files(convert, tmp_path):
    """The master weights are the weights then, in the layout in which they were written."""
    written, out = tmp_path / "run", tmp_path / "out"
    assert convert("hf2mds", LLAMA, written, "--with-optimizer", "--tp", 2).code == 0
    assert convert("hf2fsdp", written, tmp_path / "with", "--with-optimizer").code == 0
    for path in written.glob("*/layer_*"):
        path.unlink()
    (written / "global_step3/vitruvian.json").unlink()
    assert convert("hf2fsdp", written, out, "--with-optimizer").code == 0
    assert (out / "__0_0.distcp").read_bytes() == (tmp_path / "with/__0_0.distcp").read_bytes()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_optimizer(convert, tmp_path, fault):
    edit, code, parts = FAULTS[fault]
    assert convert("hf2mds", LLAMA, tmp_path / "run", "--with-optimizer", "--tp", 2).code == 0
    edit(tmp_path / "run/global_step3")
    refused(convert("hf2fsdp", tmp_path / "run", tmp_path / "out", "--with-optimizer"), code, *parts)
    assert not (tmp_path / "out").exists()


def test_what_is_not_written(model, convert, tmp_path):
    """Steps that contradict each other, options of another conversion, rows that DeepSpeed would take for others."""
    argv = ("hf2mds", LLAMA, tmp_path / "out", "--with-optimizer")
    refused(convert(*argv, "--iteration", 2), 2, "--iteration 2 is less than the 3 steps")
    refused(convert("hf2mds", LLAMA, tmp_path / "out", "--consumed-samples", 1), 2, "add --with-optimizer")
    ran = convert(*argv, "--tp", 2, "--make-vocab-size-divisible-by", 60)
    refused(ran, 5, "each of 2 tensor parallel ranks has 60 rows", "the model has 60 tokens")
    refused(
        convert("hf2mds", model("llama"), tmp_path / "out", "--qkv", "grouped", "--with-optimizer"), 4, "huggingface"
    )
    assert convert(*argv, "--iteration", 5, "--consumed-samples", 9).code == 0
    assert convert("hf2fsdp", tmp_path / "out", tmp_path / "fsdp", "--with-optimizer").code == 0


@pytest.mark.parametrize("order", ["grouped", "blocked", "separate"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_loader_cuts_shared_keys_as_the_layout_does(convert, tmp_path, order, tp):
    """Queries and fewer keys in one matrix, in which each is cut by itself; seen with DeepSpeed's loader alone."""
    argv = ("hf2mds", LLAMA, tmp_path / "run", "--qkv", order, "--with-optimizer", "--tp", tp)
    assert convert(*argv, "--make-vocab-size-divisible-by", 16).code == 0
    expected = cut_by_the_layout(convert, LLAMA, tmp_path, LLAMA.name, (1, tp), order)
    for place, tensor in expected.items():
        state, rank, name = place.split(".", 2)
        if not name.startswith(("1.", "5.")):  # whose padding rows are only in a layer file
            part = loaded(tmp_path / "run/global_step3/zero" / name, state, tuple(tensor.shape), int(rank), tp)
            assert part.equal(tensor), place


def test_flags_of_a_training_that_goes_on(convert, tmp_path):
    for name, override in (("llama_gqa_separate_tp2", "opt_param"), ("bloom_tp2", "lr")):
        assert convert("hf2mds", HERE / name, tmp_path / name, "--with-optimizer").code == 0
        flags = (tmp_path / name / "megatron_flags.txt").read_text().split()
        assert flags[:4] == [
            "--deepspeed",
            "--universal-checkpoint",
            "--no-load-rng",
            f"--override-{override}-scheduler",
        ]
        assert "--finetune" not in flags


@pytest.mark.parametrize(("family", "keys"), [("llama", {"lr_decay_style", "start_wd"}), ("bloom", {"decay_style"})])
def test_the_schedule_of_each_tree_goes_on_at_the_sample_of_the_training(family, keys):
    """megatron/optimizer_param_scheduler.py and megatron/learning_rates.py `load_state_dict`; it is constant."""
    group = Group(lr=0.5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    progress = progress_keys(Resumed(("exp_avg",), (group, group), 3, {SAMPLES: 96}), family)
    schedule = progress["lr_scheduler"]
    assert (schedule["max_lr"], schedule["num_steps"], progress["global_samples"]) == (0.5, 96, 96)
    assert schedule.keys() & {"lr_decay_style", "start_wd", "decay_style"} == keys
    assert progress_keys(Resumed(("exp_avg",), (group, group), 3, {}), family)["lr_scheduler"]["num_steps"] == 0


@pytest.mark.parametrize("name", ["llama_gqa_separate_tp2", "bloom_tp2"])
def test_weights_alone_begin_a_schedule(convert, tmp_path, name):
    """BigScience's tree loads it with `--finetune` too (megatron/learning_rates.py `load_state_dict`)."""
    import torch

    order = ["--qkv", ORDERS[name]] if name in ORDERS else []
    assert convert("hf2mds", HERE / name, tmp_path / "run", *order).code == 0
    state = torch.load(tmp_path / "run/global_step3/mp_rank_00_model_states.pt", weights_only=False)
    schedule = state.get("lr_scheduler")
    assert (schedule is not None) is (name == "bloom_tp2")
    if schedule is not None:
        assert schedule.keys() == {"max_lr", "min_lr", "warmup_steps", "decay_steps", "decay_style", "num_steps"}
        assert schedule["num_steps"] == 0


# --- a training with Apex' FusedAdam ---------------------------------------------------------------------------------

APEX = HERE / "bloom_apex_tp2"


def universal_files(run: Path) -> dict[Path, bytes]:
    """What a universal checkpoint holds of each parameter, by path."""
    return {path.relative_to(run): path.read_bytes() for path in run.glob("global_step3/zero/*/*.pt")}


def test_a_run_of_the_trees_own_script(convert, tmp_path):
    """Nothing has to be accepted of what training.py adds to the arguments; the step is in the groups."""
    import torch

    states = torch.load(APEX / "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    adam = states["optimizer_state_dict"]["base_optimizer_state"]
    assert [group["step"] for group in adam["param_groups"]] == [3, 3, 3]
    assert not any("step" in state for state in adam["state"].values())
    assert "fp32, exp_avg, exp_avg_sq, step 3" in convert("inspect", APEX).out
    first, fsdp, second = (tmp_path / name for name in ("first", "fsdp", "second"))
    assert convert("hf2mds", APEX, first, "--with-optimizer").code == 0
    assert convert("hf2fsdp", APEX, fsdp, "--with-optimizer").code == 0
    assert convert("hf2mds", fsdp, second, "--with-optimizer").code == 0
    assert universal_files(first) == universal_files(second) != {}
    groups = torch.load(second / "global_step3" / GROUPS, weights_only=False)["param_groups"]
    assert [group["step"] for group in groups] == [3, 3, 3]


@pytest.mark.parametrize(("state", "group"), [(2.0, 3), (3.0, 2), (3.0, 0)])
def test_a_training_that_resumed_counts_in_one_of_two_places(convert, tmp_path, state, group):
    """The loader of universal checkpoints fills both, of which the optimizer knows one."""
    import torch

    run = shutil.copytree(APEX, tmp_path / "run")
    for path in run.glob("global_step3/*optim_states.pt"):
        value = torch.load(path, weights_only=False)
        adam = value["optimizer_state_dict"]["base_optimizer_state"]
        for each in adam["state"].values():
            each["step"] = torch.tensor(state)
        for each in adam["param_groups"]:
            each["step"] = group
        torch.save(value, path)
    assert convert("zero2hf", run, tmp_path / "hub", "--weights", "fp32-master").code == 0
    for source, out in ((run, tmp_path / "ours"), (APEX, tmp_path / "same")):
        assert convert("hf2mds", source, out, "--with-optimizer").code == 0
    assert universal_files(tmp_path / "ours") == universal_files(tmp_path / "same") != {}


def test_arguments_that_scripts_add(convert, tmp_path):
    """Of a curriculum, of weighted data, of a schedule, and deepspeedai's (megatron/training.py, pretrain_gpt.py)."""
    import torch

    run = shutil.copytree(APEX, tmp_path / "run")
    added = {
        "curriculum_scheduler": torch.nn.Identity(), "curriculum_seqlen": 16, "data_prefixes": ["a", "b"],
        "data_weights": [1.0, 2.0], "valid_weighted_split_names": [["a"]], "valid_weighted_split_splits": [["0:1"]],
        "valid_weighted_split_weights": [["1"]], "deepspeed_config_dict": {"train_batch_size": 4},
        "actual_seq_length": 16, "logger_iteration": 1, "random_ltd_layer_num": 1, "random_ltd_reserved_length": 8,
        "data_efficiency_curriculum_learning_numel": 64, "teacher_forward": True,
        "override_lr_scheduler": True, "use_checkpoint_lr_scheduler": True, "eval_only": True,
        "data_efficiency_curriculum_learning_seqlen_type": "seqlen_reshape",
    }  # fmt: skip
    for path in run.glob("global_step3/mp_rank*"):
        changed(path.name, lambda value: vars(value["args"]).update(added))(run / "global_step3")
    ran = convert("zero2hf", run, tmp_path / "out")
    assert ran.code == 0, ran.err
