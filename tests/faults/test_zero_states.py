"""Folders of DeepSpeed in which names, strides or rows are unlike those of every day: right or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import refused, weights

MASTERS = ("--weights", "fp32-master", "--verbatim", "-q")
EMBEDDING = "model.embed_tokens.weight"


def save(root: Path, model: Mapping[str, Any], optimizer: Any = None, stage: int = 2) -> Path:
    """A checkpoint of a model that no table knows, of one rank, in the files that its stage has."""
    import torch

    tag = root / "global_step1"
    tag.mkdir(parents=True)
    (root / "latest").write_text(tag.name)
    config = {"model_type": "foo", "architectures": ["FooForCausalLM"], "eos_token_id": 1}
    (root / "config.json").write_text(json.dumps(config))
    about = {"buffer_names": [], "shared_params": {}, "dp_world_size": 1, "mp_world_size": 1, "global_steps": 1}
    name = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    torch.save(about | {"optimizer": None} | model, tag / f"{name}_model_states.pt")
    if optimizer is not None:
        torch.save({"optimizer_state_dict": optimizer}, tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return root


def partition(flat: Any, stage: int = 2) -> dict[str, Any]:
    """What the only rank of a training keeps of its only group."""
    settings = {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    inner = {"state": {0: {"step": 1, "exp_avg": flat, "exp_avg_sq": flat}}, "param_groups": [settings]}
    if stage == 3:
        return {"zero_stage": 3, "fp32_flat_groups": [flat], "optimizer_state_dict": inner, "partition_count": 1}
    states = {"single_partition_of_fp32_groups": [flat], "group_paddings": [0], "partition_count": [1]}
    return states | {"zero_stage": stage, "base_optimizer_state": inner}


def frozen(name: str, fragment: Any, shape: Sequence[int]) -> dict[str, Any]:
    """What a model file says of a parameter that is not trained."""
    return {"frozen_param_shapes": {name: tuple(shape)}, "frozen_param_fragments": {name: fragment}}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_matrix_comes_back_in_its_own_order(convert, tmp_path, stage):
    """DeepSpeed saves `param.detach().cpu()`, which keeps the strides (engine.py, 0.19.8)."""
    import torch

    embedding, matrix = torch.arange(32.0).reshape(8, 4), torch.arange(12.0).reshape(4, 3).t().bfloat16()
    assert matrix.stride() == (1, 3)
    module = {EMBEDDING: embedding.bfloat16(), "f.weight": matrix}
    model = {"module": module, "param_shapes": [{EMBEDDING: (8, 4)}], **frozen("f.weight", matrix, (3, 4))}
    run = save(tmp_path / "run", model, partition(embedding.flatten(), stage), stage)
    assert convert("zero2hf", run, tmp_path / "out", *MASTERS).code == 0
    assert torch.equal(weights(tmp_path / "out")["f.weight"], matrix)


@pytest.mark.parametrize("kind", ["one row", "every other element", "one element"])
def test_a_part_of_a_frozen_matrix_lies_in_one_row(convert, tmp_path, kind):
    """Of stage 3, whose parts are intervals."""
    import torch

    embedding, flat = torch.arange(32.0), torch.arange(12.0).bfloat16()
    part = {"one row": flat, "every other element": flat.repeat_interleave(2)[::2], "one element": flat[:1].expand(12)}
    stored = {"module": {EMBEDDING: torch.empty(0)}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    model = stored | frozen("f.weight", part[kind], (3, 4))
    ran = convert("zero2hf", save(tmp_path / "run", model, partition(embedding, 3), 3), tmp_path / "out", *MASTERS)
    if kind == "one row":
        assert ran.code == 0
        assert torch.equal(weights(tmp_path / "out")["f.weight"], flat.reshape(3, 4))
    else:
        refused(ran, 3, "holds the frozen f.weight as", "no flat tensor")


@pytest.mark.parametrize("stage", [2, 3])
def test_the_module_is_no_way_out_where_stage_3_lacks_its_optimizer_states(convert, tmp_path, stage):
    import torch

    flat = torch.arange(32.0)
    model = {"module": {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    run = save(tmp_path / "run", model, partition(flat, stage), stage)
    for path in run.glob("*/*optim_states.pt"):
        path.unlink()
    ran = convert("zero2hf", run, tmp_path / "out", *MASTERS)
    refused(ran, 3, "holds no optimizer states of mp_rank_00", "copy them from their nodes")
    assert ("--weights module" in ran.err) == (stage == 2)


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "stages"),
    [(1, ("",), "1 stage"), (2, ("",), "2 stages"), (4, ("model_00-", "model_01-"), "2 stages")],
)
@pytest.mark.parametrize("argv", [("zero2hf", "--verbatim"), ("zero2universal",)])
def test_the_stages_of_a_pipeline_are_named_so(convert, tmp_path, ranks, tensor_parallel, stages, argv):
    """Of torch.nn modules by number, as deepspeed's PipelineModule saves them (runtime/pipe/module.py, 0.19.8)."""
    import torch

    run = save(tmp_path / "run", {"module": None, "param_shapes": [{"0.weight": (8, 4)}], "mp_world_size": ranks})
    tag = run / "global_step1"
    for rank in range(1, ranks):
        shutil.copy(tag / "mp_rank_00_model_states.pt", tag / f"mp_rank_{rank:02d}_model_states.pt")
    for part in tensor_parallel:
        for module in range(3):
            torch.save({"weight": torch.zeros(8, 4)}, tag / f"layer_{module:02d}-{part}model_states.pt")
    ran = convert(argv[0], run, tmp_path / "out", *argv[1:])
    files = f"layer_00-{tensor_parallel[0]}model_states.pt, layer_0"
    refused(ran, 4, f"holds a PipelineModule of {stages}, whose modules have numbers for names ({files}", "to hf")


@pytest.mark.parametrize("kind", ["fp32-master", "exp_avg"])
@pytest.mark.parametrize("policy", ["verify", "first", "mean"])
def test_states_without_names_are_compared_whatever_is_asked(convert, tmp_path, kind, policy):
    """Stage 0, with weights that decay in one group and biases of the same shape in another: shapes do not tell."""
    import torch

    values = {"a.weight": 1.0, "a.bias": 2.0, "b.weight": 3.0}
    module = {name: torch.full((4,), value).bfloat16() for name, value in values.items()}
    module[EMBEDDING] = torch.arange(32.0).reshape(8, 4).bfloat16()
    groups = [[module[name].float() for name in names] for names in (("a.weight", "b.weight", EMBEDDING), ("a.bias",))]
    flat = [tensor for group in groups for tensor in group]
    state = {number: {"step": 1, "exp_avg": tensor * 10, "exp_avg_sq": tensor} for number, tensor in enumerate(flat)}
    inner = {"state": state, "param_groups": [{"params": [0, 1, 2]}, {"params": [3]}]}
    model = {"module": module, "optimizer": {"fp32_groups": groups, "optimizer_state_dict": inner}}
    argv = [save(tmp_path / "run", model), tmp_path / "out", "--weights", kind, "--replicas", policy, "--verbatim"]
    ran = convert("zero2hf", *argv)
    refused(ran, 6, "are not the rounded FP32 master weights", "--weights module")
    assert "--replicas" not in ran.err


def test_a_manifest_of_a_universal_checkpoint_knows_shared_parameters(convert, tmp_path):
    """Its tensors are listed by the names of the parameters; a config brings second names of them."""
    import torch

    flat, names = torch.arange(32.0), {"decoder.embed.weight": EMBEDDING}
    module = {name: flat.reshape(8, 4).bfloat16() for name in (EMBEDDING, *names)}
    model = {"module": module, "param_shapes": [{EMBEDDING: (8, 4)}], "shared_params": names}
    run, universal = save(tmp_path / "run", model, partition(flat)), tmp_path / "universal"
    assert convert("zero2universal", run, universal).code == 0
    ran = convert("zero2hf", universal, tmp_path / "out", "--config", run, "--verbatim", "-q")
    assert ran.code == 0, ran.err
    written = weights(tmp_path / "out")
    assert all(torch.equal(written[name], flat.reshape(8, 4)) for name in module)


@pytest.mark.parametrize("step", [1, 4])
def test_a_folder_with_the_name_of_another_step_is_told(convert, tmp_path, step):
    import torch

    module = {EMBEDDING: torch.arange(32.0).reshape(8, 4)}
    run = save(tmp_path / "run", {"module": module, "global_steps": step})
    ran = convert("zero2hf", run, tmp_path / "out", "--verbatim")
    assert (ran.code, "global_step1 holds step 4, as its files say" in ran.err) == (0, step == 4), ran.err


@pytest.mark.parametrize("command", [("zero2hf", "--verbatim"), ("zero2universal",)])
def test_a_model_of_another_step_than_the_trainer_counts(convert, tmp_path, command):
    """A half copied checkpoint-N of the Trainer of transformers."""
    import torch

    flat = torch.arange(32.0)
    model = {"module": {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    run = save(tmp_path / "checkpoint-4", model | {"global_steps": 1}, partition(flat))
    for counted in (1, 4):
        (run / "trainer_state.json").write_text(f'{{"global_step": {counted}}}')
        ran = convert(*command[:1], run, tmp_path / f"out{counted}", *command[1:], "-q")
        if counted == 1:
            assert ran.code == 0, ran.err
    refused(ran, 3, "counts 1 steps", "trainer_state.json 4: files of different saves", "--accept trainer_step")
    ran = convert(*command[:1], run, tmp_path / "out", *command[1:], "--accept", "trainer_step")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("counted", "skipped", "fine"), [(1, 0, True), (4, 3, True), (4, 0, False), (0, 0, False)])
def test_files_of_an_optimizer_of_another_step_are_refused(convert, tmp_path, stage, counted, skipped, fine):
    """The engine counts its steps and those that it skipped; Adam counts the others."""
    import torch

    flat = torch.arange(32.0)
    module = {} if stage == 3 else {EMBEDDING: flat.reshape(8, 4).bfloat16()}
    counts = {"global_steps": counted, "skipped_steps": skipped}
    model = {"module": module, "param_shapes": [{EMBEDDING: (8, 4)}], **counts}
    run = save(tmp_path / "run", model, partition(flat, stage), stage)
    commands = [
        ("zero2hf", *MASTERS),
        ("zero2universal", "-q"),
        *([("zero2hf", "--verbatim", "-q")] if stage < 3 else []),
    ]
    for number, (command, *options) in enumerate(commands):
        ran = convert(command, run, tmp_path / f"out{number}", *options)
        if fine:
            assert ran.code == 0, ran.err
            continue
        refused(ran, 3, "has made 1 steps", f"counts {counted}", "files of different saves", "--accept global_steps")
        assert convert(command, run, tmp_path / f"out{number}", *options, "--accept", "global_steps").code == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("state", ["max_exp_avg_sq", "mu_product", "momentum_buffer"])
def test_states_that_a_universal_checkpoint_cannot_hold_are_refused(convert, tmp_path, stage, state):
    """Those of AMSGrad, NAdam and others: an optimizer that goes on without them computes something else."""
    import torch

    flat = torch.arange(32.0)
    states = partition(flat, stage)
    inner = states["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    inner["state"][0][state] = flat
    model = {"module": {} if stage == 3 else {EMBEDDING: flat.reshape(8, 4).bfloat16()}}
    run = save(tmp_path / "run", model | {"param_shapes": [{EMBEDDING: (8, 4)}]}, states, stage)
    ran = convert("zero2universal", run, tmp_path / "out", "-q")
    refused(ran, 4, f"keeps {state} of each parameter")
    assert not (tmp_path / "out").exists()
    assert convert("zero2hf", run, tmp_path / "out", *MASTERS).code == 0, "the weights alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda master: master.bfloat16(), "holds BF16, a master is F32"),
        (lambda master: master[:-1].clone(), "holds 28 elements, its model has [8, 4]"),
        (lambda master: master.T.contiguous(), "holds [4, 8], its model has [8, 4]"),
    ],
)
@pytest.mark.parametrize("command", ["zero2universal", "zero2hf"])
def test_masters_of_a_universal_checkpoint_are_those_of_its_model(convert, tmp_path, command, change, message):
    import torch

    flat = torch.arange(32.0)
    model = {"module": {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    run = tmp_path / "universal"
    assert convert("zero2universal", save(tmp_path / "run", model, partition(flat)), run, "-q").code == 0
    (path,) = run.glob(f"*/zero/{EMBEDDING}/fp32.pt")
    content = torch.load(path, weights_only=True)
    torch.save(content | {"param": change(content["param"].reshape(8, 4))}, path)
    refused(convert(command, run, tmp_path / "out", *(MASTERS if command == "zero2hf" else ())), 3, message)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda states: states["param_groups"][0].update(amsgrad=True), 4, "says amsgrad = True"),
        (
            lambda states: states["state"].update({1: states["state"][0]}),
            3,
            "of group 1, and master weights of 1 groups",
        ),
        (lambda states: states["state"][0]["exp_avg_sq"].neg_(), 5, "holds -1, and 31 of 32 elements are such"),
        (lambda states: states["state"][0]["exp_avg"].fill_(float("nan")), 5, "holds nan, and 32 of 32 elements"),
    ],
    ids=["amsgrad", "a state of no group", "negative", "NaN"],
)
def test_what_an_optimizer_cannot_hold_is_refused(convert, tmp_path, change, code, message):
    import torch

    flat, states = torch.arange(32.0), partition(torch.arange(32.0))
    for name in ("exp_avg", "exp_avg_sq"):
        states["base_optimizer_state"]["state"][0][name] = flat.clone()
    change(states["base_optimizer_state"])
    model = {"module": {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    refused(convert("zero2universal", save(tmp_path / "run", model, states), tmp_path / "out", "-q"), code, message)


@pytest.mark.parametrize(("state", "value"), [("exp_avg_sq", "-1"), ("exp_avg", "nan")])
def test_moments_in_place_of_the_weights_are_judged_too(convert, tmp_path, state, value):
    import torch

    flat, states = torch.arange(32.0), partition(torch.arange(32.0))
    states["base_optimizer_state"]["state"][0][state] = torch.full((32,), float(value))
    model = {"module": {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    run, out = save(tmp_path / "run", model, states), tmp_path / "out"
    argv = ("zero2hf", run, out, "--weights", state, "--verbatim", "-q")
    refused(convert(*argv), 5, f"holds {value}, and 32 of 32 elements are such", f"--accept {state}")
    assert not out.exists()
    assert convert("digest", run, *argv[3:6]).code == 0, "moments that are only read"
    assert convert(*argv, "--accept", state).code == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", 0.5, "has lr = 0.5 in group 0"),
        ("betas", (0.9, 0.999), "has betas = [0.9, 0.999] in group 0"),
        ("eps", 1e-5, "has eps = 1e-05 in group 0"),
        ("weight_decay", 0.1, "has weight_decay = 0.1 in group 0"),
        ("initial_lr", 0.1, "has initial_lr = 0.1 in group 0"),
        ("lr", "a tensor", "has lr = 0.5 in group 0"),
    ],
)
def test_ranks_treat_the_parameters_of_a_group_alike(convert, tmp_path, stage, name, value, message):
    import torch

    flat = torch.arange(32.0)
    model = {"module": {} if stage == 3 else {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "dp_world_size": 2}
    run = save(tmp_path / "run", model | {"param_shapes": [{EMBEDDING: (8, 4)}]}, None, stage)
    for rank, part in enumerate(flat.split(16)):
        states = partition(part.clone(), stage)
        states["partition_count"] = 2 if stage == 3 else [2]
        inner = states["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        if rank:
            inner["param_groups"][0][name] = torch.tensor(0.5) if value == "a tensor" else value
        torch.save(
            {"optimizer_state_dict": states}, run / f"global_step1/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )
    if stage == 3:
        first = run / "global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt"
        torch.save(torch.load(first), first.with_name("zero_pp_rank_1_mp_rank_00_model_states.pt"))
    ran = convert("zero2universal", run, tmp_path / "out", "-q")
    refused(ran, 3, "zero_pp_rank_1", message, "zero_pp_rank_0_mp_rank_00_optim_states.pt has ")
    of_weights = convert("zero2hf", run, tmp_path / "out", *MASTERS)
    assert of_weights.code == (3 if stage == 3 else 0), "the weights alone, which a module proves but in stage 3"


@pytest.mark.parametrize("stage", [1, 2])
def test_masters_with_names_may_be_taken_unchecked(convert, tmp_path, stage):
    """A training in which the two drifted apart: who asks for the master weights gets them."""
    import torch

    flat = torch.arange(32.0)
    model = {"module": {EMBEDDING: flat.reshape(8, 4).bfloat16() + 1}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    argv = [save(tmp_path / "run", model, partition(flat, stage)), tmp_path / "out", *MASTERS]
    refused(convert("zero2hf", *argv), 6, "32 of 32 elements", "--replicas first takes the master weights unchecked")
    ran = convert("zero2hf", *argv, "--replicas", "first")
    assert (ran.code, "the FP32 master weights are not compared with the weights" in ran.err) == (0, True), ran.err
    assert torch.equal(weights(tmp_path / "out")[EMBEDDING], flat.reshape(8, 4))


def test_rows_that_a_chat_template_adds_have_no_masters_to_be_compared(convert, tmp_path):
    """In the second of two tiles: what the first one left in memory is compared with nothing."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    rows = 8190
    embedding = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    model = {"module": {EMBEDDING: embedding.bfloat16()}, "param_shapes": [{EMBEDDING: (rows, 64)}]}
    run = save(tmp_path / "run", model, partition(embedding.flatten()))
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(rows)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(run / "tokenizer.json"))
    (run / "tokenizer_config.json").write_text('{"eos_token": "w1"}')
    options = [*MASTERS, "--chat-template", "chatml", "--memory", "3MiB", "-j", 1]
    ran = convert("zero2hf", run, tmp_path / "out", *options)
    assert ran.code == 0, ran.err
    merged = weights(tmp_path / "out")[EMBEDDING]
    assert len(merged) > rows
    assert torch.equal(merged[:rows], embedding)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": None}, "holds no module"),
        ({"module": {EMBEDDING: [1.0]}}, "which is not a tensor"),
        ({"param_shapes": None}, "holds no param_shapes"),
        ({"param_shapes": [5]}, "holds no param_shapes"),
        ({"param_shapes": [{EMBEDDING: [8, 4]}]}, "holds param_shapes that are none"),
        ({"param_shapes": [{EMBEDDING: (8, -4)}]}, "holds param_shapes that are none"),
        ({"param_shapes": [{EMBEDDING: (8, 5)}]}, "[8, 5], which is [8, 4] in its module"),
        ({"param_shapes": [{EMBEDDING: (8, 4)}, {}]}, "has 1 flat parameter groups, the model files 2"),
        (frozen("f.weight", None, (3, 4)), "holds no fragment of f.weight"),
        (frozen("f.weight", None, (3.0, 4)), "holds a frozen parameter of the shape"),
    ],
    ids=str,
)
def test_a_model_file_that_says_what_cannot_be_is_refused(convert, tmp_path, changes, message):
    import torch

    flat = torch.arange(32.0)
    model = {"module": {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}], **changes}
    ran = convert("zero2hf", save(tmp_path / "run", model, partition(flat)), tmp_path / "out", *MASTERS)
    assert (ran.code in (3, 4), message in ran.err) == (True, True), ran.err


@pytest.mark.parametrize("alone", [False, True])
def test_a_second_model_parallel_rank_of_stage_3_is_not_taken_for_the_first(convert, tmp_path, alone):
    import torch

    model = {"module": {EMBEDDING: torch.empty(0)}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    run = save(tmp_path / "run", model, partition(torch.arange(32.0), 3), 3)
    first = run / "global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt"
    second = Path(shutil.copy(first, first.with_name("zero_pp_rank_0_mp_rank_01_model_states.pt")))
    if alone:
        first.unlink()
    refused(convert("zero2hf", run, tmp_path / "out", *MASTERS), 4, f"{second} is of a second model parallel rank")


def test_a_model_file_of_stage_3_without_optimizer_states(convert, tmp_path):
    """Each rank has both: the optimizer states are of a save with fewer ranks."""
    import torch

    model = {"module": {EMBEDDING: torch.empty(0)}, "param_shapes": [{EMBEDDING: (8, 4)}], "dp_world_size": 2}
    run = save(tmp_path / "run", model, partition(torch.arange(32.0), 3), 3)
    first = run / "global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save(torch.load(first), first.with_name("zero_pp_rank_1_mp_rank_00_model_states.pt"))
    ran = convert("zero2hf", run, tmp_path / "out", *MASTERS)
    refused(ran, 3, "holds 2 model files and 1 files of optimizer states")


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("listed", [True, False])
def test_a_frozen_parameter_has_no_moments(convert, tmp_path, state, listed):
    """DeepSpeed lists what is frozen, but not with `exclude_frozen_parameters` (engine.py, 0.19.8)."""
    import torch

    matrix = torch.arange(12.0).reshape(3, 4).bfloat16()
    module = {EMBEDDING: torch.arange(32.0).reshape(8, 4).bfloat16(), "f.weight": matrix}
    about = frozen("f.weight", matrix, (3, 4)) if listed else {}
    model = {"module": module, "param_shapes": [{EMBEDDING: (8, 4)}], **about}
    run = save(tmp_path / "run", model, partition(torch.arange(32.0)))
    refused(
        convert("zero2hf", run, tmp_path / "out", "--weights", state, "--verbatim"),
        4, f"no {state} of frozen parameters: f.weight", "--weights module",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_masters_of_any_type_are_compared_with_the_module(convert, tmp_path, dtype):
    import torch

    embedding = torch.arange(32.0)
    model = {"module": {EMBEDDING: embedding.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    for name, flat in {"sound": embedding, "zeros": torch.zeros(32)}.items():
        run = save(tmp_path / name, model, partition(flat.to(getattr(torch, dtype))))
        ran = convert("zero2hf", run, tmp_path / f"{name}-out", *MASTERS)
        if name == "sound":
            assert ran.code == 0, ran.err
        else:
            refused(ran, 6, EMBEDDING)


def test_a_frozen_parameter_is_that_of_the_module(convert, tmp_path):
    import torch

    embedding, matrix = torch.arange(32.0), torch.ones(3, 4).bfloat16()
    module = {EMBEDDING: embedding.reshape(8, 4).bfloat16(), "f.weight": matrix}
    model = {"module": module, "param_shapes": [{EMBEDDING: (8, 4)}], **frozen("f.weight", matrix * 0, (3, 4))}
    run = save(tmp_path / "run", model, partition(embedding))
    refused(convert("zero2hf", run, tmp_path / "out", *MASTERS), 6, "f.weight")


@pytest.mark.parametrize(("command", "named"), [("hf2megatron", "no Megatron layout"), ("hf2mds", "no layout of")])
def test_a_buffer_of_a_model_that_no_table_knows(convert, tmp_path, command, named):
    """It has no group in the optimizer; the model is refused for what it is."""
    import torch

    embedding, bias = torch.arange(32.0), "model.layers.1.mlp.gate.e_score_correction_bias"
    module = {EMBEDDING: embedding.reshape(8, 4).bfloat16(), bias: torch.ones(4)}
    model = {"module": module, "param_shapes": [{EMBEDDING: (8, 4)}], "buffer_names": [bias]}
    trained = partition(embedding)
    trained["base_optimizer_state"]["param_groups"][0]["bias_correction"] = True
    run = save(tmp_path / "run", model, trained)
    for options in ((), ("--with-optimizer",)):
        refused(convert(command, run, tmp_path / "out", *options), 4, named, "foo")


def test_ranks_of_stage_3_lay_out_the_same_parameters(convert, tmp_path):
    """Nothing else tells of which parameter a part of a flat partition is."""
    import torch

    flat, shapes = torch.arange(32.0), {EMBEDDING: (4, 4), "b.weight": (4, 4)}
    module = {name: torch.empty(0) for name in shapes}
    about = {"module": module, "dp_world_size": 2}
    run = save(
        tmp_path / "run", about | {"param_shapes": [shapes]}, partition(flat[:16], 3) | {"partition_count": 2}, 3
    )
    first = run / "global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt"
    saved = torch.load(first, weights_only=False) | {"param_shapes": [dict(reversed(shapes.items()))]}
    torch.save(saved, first.with_name(first.name.replace("rank_0", "rank_1", 1)))
    refused(convert("zero2hf", run, tmp_path / "out", *MASTERS), 3, "lay out different parameters", "b.weight")


@pytest.mark.parametrize("command", ["zero2hf", "zero2universal"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_partition_that_is_a_copy_of_anothers_is_refused(convert, tmp_path, stage, command):
    """It was saved again under the other's name; what is one value throughout may be alike."""
    import torch

    def run_of(name: str, flats: Sequence[Any]) -> Path:
        flat = torch.cat([*flats])
        model = {"module": {} if stage == 3 else {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "dp_world_size": 2}
        run = save(tmp_path / name, model | {"param_shapes": [{EMBEDDING: (8, 4)}]}, None, stage)
        for rank, part in enumerate(flats):
            states = partition(part.clone(), stage) | {"partition_count": 2 if stage == 3 else [2]}
            name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": states}, run / "global_step1" / name)
        if stage == 3:
            first = run / "global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt"
            torch.save(torch.load(first), first.with_name("zero_pp_rank_1_mp_rank_00_model_states.pt"))
        return run

    flags = MASTERS if command == "zero2hf" else ("-q",)
    ran = convert(command, run_of("copied", [torch.arange(16.0)] * 2), tmp_path / "out", *flags)
    refused(
        ran, 3, "zero_pp_rank_1_mp_rank_00_optim_states.pt and ", "hold the same elements: one is a copy of the other"
    )
    ran = convert(command, run_of("ones", [torch.ones(16)] * 2), tmp_path / "out", *flags)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inner: inner["state"][0].update(step=[3.0, 2.0]), "a tensor of 2 elements where one number"),
        (lambda inner: inner["param_groups"].clear(), "without a group of parameters"),
    ],
    ids=["step", "groups"],
)
def test_numbers_and_groups_of_an_optimizer_are_some(convert, tmp_path, change, message):
    import torch

    embedding = torch.arange(32.0)
    model = {"module": {EMBEDDING: embedding.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    states = partition(embedding)
    inner = states["base_optimizer_state"]
    change(inner)
    if isinstance(inner["state"][0]["step"], list):
        inner["state"][0]["step"] = torch.tensor(inner["state"][0]["step"])
    refused(convert("zero2hf", save(tmp_path / "run", model, states), tmp_path / "out", *MASTERS), 3, message)


@pytest.mark.parametrize(
    "change",
    [
        lambda inner: inner["param_groups"][0].update(step=None),
        lambda inner: inner["param_groups"][0].update(step=1, params=None),
        lambda inner: inner.update(param_groups=[3]),
        lambda inner: inner.update(state={0: None}),
    ],
    ids=["step", "params", "group", "state"],
)
def test_an_optimizer_of_another_form(convert, tmp_path, change):
    """It tells no steps: the weights are read, its states are not."""
    import torch

    flat = torch.arange(32.0)
    model = {"module": {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    states = partition(flat)
    change(states["base_optimizer_state"])
    run = save(tmp_path / "run", model, states)
    refused(convert("zero2hf", run, tmp_path / "no", "--weights", "exp_avg", "--verbatim", "-q"), 3, "optim_states.pt")
    assert convert("zero2hf", run, tmp_path / "out", "--verbatim", "-q").code == 0


@pytest.mark.parametrize("command", ["zero2universal", "zero2hf"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"param_shapes": [{"other.weight": (8, 4)}]}, "lays out 'other.weight' [8, 4], which its module lacks"),
        ({"param_shapes": [{EMBEDDING: (4, 8)}]}, f"lays out {EMBEDDING!r} [4, 8], which is [8, 4] in its module"),
        ({"frozen_param_shapes": {EMBEDDING: (8, 4)}}, f"calls {EMBEDDING!r} both trained and frozen"),
        ({"frozen_param_shapes": {}}, "holds 'f.weight', which it calls neither trained nor frozen nor a buffer"),
    ],
)
def test_what_is_laid_out_is_of_the_module(convert, tmp_path, command, change, message):
    """Whoever renames a parameter in one of both has another model in each."""
    import torch

    flat, frozen_tensor = torch.arange(32.0), torch.ones(3).bfloat16()
    model = {
        "module": {EMBEDDING: flat.reshape(8, 4).bfloat16(), "f.weight": frozen_tensor},
        "param_shapes": [{EMBEDDING: (8, 4)}],
    }
    options = MASTERS if command == "zero2hf" else ()
    run = save(tmp_path / "sound", model | frozen("f.weight", frozen_tensor, (3,)), partition(flat))
    assert convert(command, run, tmp_path / "out", *options).code == 0
    run = save(tmp_path / "run", model | change, partition(flat))
    refused(convert(command, run, tmp_path / "none", *options), 3, message)


@pytest.mark.parametrize("name", [f"_orig_mod.{EMBEDDING}", f"module.{EMBEDDING}"])
def test_a_module_that_holds_a_tensor_twice_is_refused(convert, tmp_path, name):
    """With the name that a wrapper gives it, and without."""
    import torch

    tensor = torch.arange(32.0).reshape(8, 4).bfloat16()
    argv = (save(tmp_path / "run", {"module": {EMBEDDING: tensor, name: tensor * 2}}), tmp_path / "out", "--verbatim")
    refused(convert("zero2hf", *argv), 3, f"holds {EMBEDDING} twice", name)


def test_a_universal_checkpoint_says_what_it_leaves_out(convert, tmp_path):
    """What a model file of a DeepSpeed that lists nothing as frozen has: without a table nothing else tells."""
    import torch

    flat = torch.arange(32.0)
    module = {EMBEDDING: flat.reshape(8, 4).bfloat16(), "f.weight": torch.ones(3).bfloat16()}
    run = save(tmp_path / "run", {"module": module, "param_shapes": [{EMBEDDING: (8, 4)}]}, partition(flat))
    ran = convert("zero2universal", run, tmp_path / "out")
    assert (ran.code, "1 parameters are frozen, such as f.weight" in ran.err) == (0, True), ran.err
    ran = convert("zero2hf", tmp_path / "out", tmp_path / "none", "--config", run, *MASTERS)
    refused(ran, 3, "holds no parameters that were not trained: it lacks f.weight")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("command", ["zero2universal", "zero2hf"])
@pytest.mark.parametrize("which", ["fp32", "exp_avg"])
def test_states_of_an_optimizer_are_floats(convert, tmp_path, stage, command, which):
    import torch

    flat = torch.arange(32.0)
    states = partition(flat, stage)
    if which == "fp32":
        states["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] = [flat.int()]
    else:
        states["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"][0][which] = flat.int()
    weight = torch.empty(0) if stage == 3 else flat.reshape(8, 4).bfloat16()
    model = {"module": {EMBEDDING: weight}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    options = (
        () if command == "zero2universal" else ("--weights", {"fp32": "fp32-master"}.get(which, which), "--verbatim")
    )
    ran = convert(command, save(tmp_path / "run", model, states, stage), tmp_path / "out", *options)
    refused(ran, 3, f"holds {which} as I32, which is no float")


@pytest.mark.parametrize("weights", ["module", "fp32-master"])
def test_weights_beside_the_module_are_told(convert, tmp_path, weights):
    """In `client_state` of save_checkpoint trainings keep a moving average; a loss or a random state is no weight."""
    import torch

    flat = torch.arange(32.0)
    average = {"shadow": {EMBEDDING: flat.reshape(8, 4)}, "more": [flat]}
    beside = {"ema": average, "loss": torch.tensor(1.5), "rng": flat.byte(), "step": 3}
    model = {"module": {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    run = save(tmp_path / "run", model | beside, partition(flat))
    ran = convert("zero2hf", run, tmp_path / "out", "--weights", weights, "--verbatim", "-q")
    message = (
        f"note: 'ema' in {run}/global_step1/mp_rank_00_model_states.pt, 2 tensors beside the module, is not carried"
    )
    assert (ran.code, ran.err.count("not carried"), message in ran.err) == (0, 1, True), ran.err


@pytest.mark.parametrize(
    "about", [{"num_experts": [4, 4]}, {"num_experts": [2], "ds_autoep_layers": [{}]}, {"ds_autoep_layers": [{}]}]
)
def test_experts_whose_files_are_lost_are_missed(convert, tmp_path, about):
    """The module alone says that it had some, also where every tensor is carried under its own name."""
    import torch

    flat = torch.arange(32.0)
    model = {"module": {EMBEDDING: flat.reshape(8, 4).bfloat16()}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    run = save(tmp_path / "run", model | about, partition(flat))
    sign = "num_experts = [" if "num_experts" in about else "ds_autoep_layers)"
    for argv in (["zero2hf", run, tmp_path / "out", "--verbatim"], ["zero2universal", run, tmp_path / "out"]):
        refused(convert(*argv), 4, f"of a model with DeepSpeed's MoE layers (it has {sign}", "save the whole model")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "name", ["layer_1_expert_0_mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"]
)
@pytest.mark.parametrize("command", ["zero2hf", "zero2universal", "digest"])
def test_experts_in_files_of_their_own_are_refused(convert, tmp_path, stage, name, command):
    """Those of DeepSpeed's MoE layers, without which the module is another model."""
    import torch

    flat = torch.arange(32.0)
    weight = torch.empty(0) if stage == 3 else flat.reshape(8, 4).bfloat16()
    model = {"module": {EMBEDDING: weight}, "param_shapes": [{EMBEDDING: (8, 4)}]}
    run = save(tmp_path / "run", model, partition(flat, stage), stage)
    torch.save({"expert.weight": flat}, run / "global_step1" / name)
    out, options = ([], []) if command == "digest" else ([tmp_path / "out"], list(MASTERS[:3]) * (command == "zero2hf"))
    refused(convert(command, run, *out, *options), 4, f"experts in files of their own ({name})", "save the whole model")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [("zero2hf", "--weights", "exp_avg_sq", "--verbatim"), ("zero2universal",)], ids=str
)
def test_second_moments_that_are_negative(convert, tmp_path, options, stage):
    import torch

    flat = torch.arange(32.0) - 1
    module = {EMBEDDING: torch.empty(0) if stage == 3 else flat.reshape(8, 4).bfloat16()}
    model = {"module": module, "param_shapes": [{EMBEDDING: (8, 4)}]}
    run = save(tmp_path / "run", model, partition(flat, stage), stage)
    ran = convert(options[0], run, tmp_path / "out", *options[1:])
    refused(ran, 5, "holds -1, and 1 of 32 elements are such", "--accept exp_avg_sq")
    assert not (tmp_path / "out").exists()
    assert convert(options[0], run, tmp_path / "out", *options[1:], "--accept", "exp_avg_sq").code == 0


def fused_experts(folder: Path, ranks: int) -> tuple[Path, dict[str, Any]]:
    """A run of stage 3 of a model that no table knows, whose moments are its weights; `hf` is its HF folder."""
    import torch
    import transformers
    from torch.nn.functional import pad

    config = transformers.JambaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        num_experts=3, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
    )  # fmt: skip
    model = transformers.JambaForCausalLM(config)
    model.save_pretrained(folder / "hf")
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    assert weights["model.layers.1.feed_forward.experts.gate_up_proj"].shape == (3, 24, 16)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    about = {"module": {name: torch.empty(0) for name in shapes}, "param_shapes": [shapes], "dp_world_size": ranks}
    run = save(folder / "run", about, stage=3)
    (run / "config.json").unlink()
    (first,) = run.glob("*/*model_states.pt")
    for rank in range(ranks):
        parts = [pad(each.flatten(), (0, -each.numel() % ranks)).chunk(ranks)[rank] for each in weights.values()]
        states = partition(torch.cat(parts), 3) | {"partition_count": ranks}
        place = first.with_name(first.name.replace("rank_0", f"rank_{rank}", 1))
        torch.save({"optimizer_state_dict": states}, place.with_name(place.name.replace("model", "optim")))
        torch.save(torch.load(first, weights_only=False), place)
    return run, weights


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_flat_pieces_of_experts_that_memory_has_fused(convert, tmp_path, ranks):
    """transformers loads what it had, however the ranks cut its experts."""
    import torch
    import transformers

    run, weights = fused_experts(tmp_path, ranks)
    for name in ("fp32-master", "exp_avg"):
        ran = convert("zero2hf", run, tmp_path / name, "--config", tmp_path / "hf", "--weights", name)
        assert ran.code == 0, ran.err
        loaded, info = transformers.JambaForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values()), info
        assert all(torch.equal(each, weights[key]) for key, each in loaded.named_parameters())
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("fp32-master", "hf"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_experts_in_8_bits_that_memory_has_fused(convert, tmp_path):
    """They are refused where they would be cut, and go the way that the refusal names."""
    import torch

    run, _ = fused_experts(tmp_path, 2)
    for path in run.glob("*/*optim_states.pt"):
        saved = torch.load(path, weights_only=False)
        kept = saved["optimizer_state_dict"]["optimizer_state_dict"]["state"]
        size = kept[0]["exp_avg"].numel()
        codes = {"state": torch.arange(size).to(torch.uint8), "qmap": torch.linspace(-1, 1, 256)}
        codes["absmax"] = torch.ones(-(-size // 256))
        eight = {f"{name}{moment}": value for moment in "12" for name, value in codes.items()}
        kept[0] = {"step": 1, "__bnb_optimizer_quant_state__": eight}
        torch.save(saved, path)
    about = ("--config", tmp_path / "hf", "--weights", "exp_avg")
    ran = convert("zero2hf", run, tmp_path / "8", *about)
    refused(ran, 4, "experts.gate_up_proj in 8 bits", "convert hf2fsdp", "convert fsdp2hf")
    assert convert("hf2fsdp", run, tmp_path / "c", *about).code == 0
    assert convert("fsdp2hf", tmp_path / "c", tmp_path / "8").code == 0
