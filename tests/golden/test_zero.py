"""What real DeepSpeed saves comes back whole: stages 0 to 3, every padding, HF Trainer, accelerate.

The truth beside each checkpoint is what the engine held in memory (zero_world.py); it owes nothing to the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import refused
from tests.golden.zero_worlds import MUON_PAIR, WORLDS, World, checkpoint, swap

pytestmark = pytest.mark.distributed
CASES = [(world, kind) for world in WORLDS for kind in world.kinds]
ALONE, TWO, TIED, ODD, FOUR = WORLDS
STATES = {"fp32-master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def name(value: Any) -> str:
    return value.name if isinstance(value, World) else str(value)


def third(kind: str) -> bool:
    """Whether a kind is of stage 3."""
    return kind.partition("-")[0] in ("zero3", "trainer3", "accelerate3")


def flags(folder: Path, kind: str) -> list[Any]:
    strange = any(word in kind for word in ("buffers", "odd", "aligned"))  # tensors that no Llama has
    return ["--config", folder / "hf", "-q", *(["--verbatim"] if strange else [])]


def bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)


def differences(out: Path, truth: Path, state: str) -> list[str]:
    """How a converted model differs from the truth. What is not trained has no master: it is the module's."""
    import torch
    from safetensors.torch import load_file

    converted, stored = load_file(out / "model.safetensors"), load_file(truth)
    shared = {"lm_head.weight"} if torch.equal(*(stored[f"module.{key}"] for key in HEADS)) else set()
    names = {key.removeprefix("module.") for key in stored if key.startswith("module.")}
    lines = [f"{key} is missing" for key in names - set(converted) - shared]
    for key, tensor in converted.items():
        expected = stored.get(f"{state}.{key}", stored.get(f"module.{key}"))
        if expected is None:
            lines.append(f"{key} is unexpected")
        elif (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
            lines.append(f"{key} is {tensor.dtype} {list(tensor.shape)}")
        elif not torch.equal(bits(tensor), bits(expected)):
            lines.append(f"{key} differs in {int((tensor != expected).sum())} elements")
    return lines


HEADS = ("lm_head.weight", "model.embed_tokens.weight")


@pytest.mark.parametrize(("world", "kind"), CASES, ids=name)
def test_every_kind_comes_back(made, convert, tmp_path, world, kind):
    """Module, master weights and both moments, bit for bit."""
    folder, truth = checkpoint(made(world), kind), made(world) / f"{kind}.truth.safetensors"
    module = convert("zero2hf", folder, tmp_path / "module", *flags(made(world), kind), "--weights", "module")
    if third(kind):
        refused(module, 3, "of stage 3", "--weights fp32-master")
    else:
        assert module.code == 0, module.err
        assert differences(tmp_path / "module", truth, "module") == []
    for weights, state in STATES.items():
        if kind == "zero0-fp32" and state == "fp32":
            continue  # whose module is in float32, and has no master
        if kind == "zero0-fp32":
            ran = convert("zero2hf", folder, tmp_path / state, *flags(made(world), kind), "--weights", weights)
            refused(ran, 4, f"does not say whose {state} is whose")
            continue
        ran = convert("zero2hf", folder, tmp_path / state, *flags(made(world), kind), "--weights", weights)
        if "frozen" in kind and state != "fp32":
            refused(ran, 4, f"no {state} of frozen parameters")
            continue
        assert ran.code == 0, ran.err
        assert differences(tmp_path / state, truth, state) == []


@pytest.mark.parametrize("kind", ["zero2", "zero3", "trainer3", "accelerate3"])
def test_without_being_told_transformers_gets_the_model(made, convert, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    place = made(TWO)
    own = [] if "trainer" in kind else ["--config", place / "hf"]
    ran = convert("zero2hf", checkpoint(place, kind), tmp_path / "out", *own, "--dtype", "bf16")
    assert ran.code == 0, ran.err
    assert ("it holds no module" in ran.err) == third(kind)
    assert differences(tmp_path / "out", place / f"{kind}.truth.safetensors", "module") == []
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


def test_masters_of_16_bits_are_called_that(made, convert, tmp_path):
    """DeepSpeed's `bf16_master_weights_and_grads` keeps them in the type of the model, under the same name."""
    import shutil

    import torch

    source, folder = checkpoint(made(TWO), "zero3"), tmp_path / "zero3"
    shutil.copytree(source, folder)
    paths = list(folder.rglob("*optim_states.pt"))
    for path in paths:
        stored = torch.load(path, weights_only=False)
        masters = stored["optimizer_state_dict"]["fp32_flat_groups"]
        stored["optimizer_state_dict"]["fp32_flat_groups"] = [master.bfloat16() for master in masters]
        torch.save(stored, path)
    assert paths
    for place, masters in ((source, "float32"), (folder, "BF16")):
        ran = convert("zero2hf", place, tmp_path / masters, "--config", made(TWO) / "hf")
        assert ran.code == 0, ran.err
        assert f"these are the {masters} master weights" in ran.err
        assert json.loads(convert("inspect", tmp_path / masters, "--json").out)["dtypes"].keys() == {
            "F32" if masters == "float32" else masters
        }


def test_the_trainers_own_weights_are_not_preferred(made, convert, tmp_path):
    """checkpoint-N of stage 2 holds safetensors too: zero2hf reads DeepSpeed's files, digest either."""
    folder = checkpoint(made(TWO), "trainer2")
    assert (folder / "model.safetensors").is_file()
    assert convert("zero2hf", folder, tmp_path / "out", "--weights", "fp32-master").code == 0
    assert json.loads(convert("inspect", tmp_path / "out", "--json").out)["dtypes"] == {"F32": 39}
    assert convert("zero2hf", folder, tmp_path / "module").code == 0
    digests = [convert("digest", place).out.split()[0] for place in (folder, tmp_path / "module")]
    assert digests[0] == digests[1]


PEER = """
import sys
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as merge
from safetensors.torch import save_file
for folder, out in zip(sys.argv[1::2], sys.argv[2::2]):
    state = {name: tensor.clone().contiguous() for name, tensor in merge(folder).items()}
    save_file(state, out)
"""
MERGED = [kind for kind in TWO.kinds if kind[:5] in ("zero1", "zero2", "zero3")]


def test_zero_to_fp32_gives_the_same_tensors(made, zero, convert, tmp_path, monkeypatch):
    """DeepSpeed's own script, where it works: not for stage 0 and BF16_Optimizer. Buffers become float32 in it."""
    import torch
    from safetensors.torch import load_file

    argv = [word for kind in MERGED for word in (str(made(TWO) / kind), str(tmp_path / f"{kind}.safetensors"))]
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    (tmp_path / "peer.py").write_text(PEER)
    code, output = zero(*argv, script=tmp_path / "peer.py")
    assert code == 0, output[-2000:]
    for kind in MERGED:
        out = tmp_path / kind
        ran = convert("zero2hf", made(TWO) / kind, out, *flags(made(TWO), kind), "--weights", "fp32-master")
        assert ran.code == 0, ran.err
        ours, theirs = load_file(out / "model.safetensors"), load_file(tmp_path / f"{kind}.safetensors")
        if kind == "zero1-frozen":  # which zero_to_fp32 leaves out: stage 1 keeps them in the module only
            ours = {key: tensor for key, tensor in ours.items() if key in theirs}
        assert ours.keys() == theirs.keys(), kind
        for key, tensor in theirs.items():
            same = torch.equal(bits(tensor), bits(ours[key].to(tensor.dtype)))
            assert same, (kind, key)


@pytest.fixture
def swapped(made, tmp_path) -> Callable[..., Path]:
    """`swapped(kind)`: a checkpoint whose two partitions have each other's names, and know no other."""
    import shutil

    def make_one(kind: str, files: str = "*optim_states.pt", *, named: bool = False) -> Path:
        folder = shutil.copytree(made(TWO) / kind, tmp_path / f"swapped-{kind}")
        swap(*sorted(folder.glob(f"*/{files}")), named=named)
        return folder

    return make_one


@pytest.mark.parametrize("kind", ["zero1", "zero2", "bf16-optimizer"])
@pytest.mark.parametrize("weights", STATES)
def test_partitions_of_two_ranks_swapped(made, convert, tmp_path, swapped, kind, weights):
    """Moments are proved by the master weights beside them."""
    ran = convert("zero2hf", swapped(kind), tmp_path / "out", "--config", made(TWO) / "hf", "--weights", weights)
    refused(ran, 6, "are not the rounded FP32 master weights")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["zero1", "zero2", "bf16-optimizer"])
def test_a_universal_checkpoint_of_swapped_partitions(convert, tmp_path, swapped, kind):
    refused(convert("zero2universal", swapped(kind), tmp_path / "out"), 6, "are not the rounded FP32 master weights")


@pytest.mark.parametrize("kind", ["zero1", "zero2", "bf16-optimizer"])
def test_verify_looks_at_the_optimizer(made, convert, swapped, kind):
    """All files have the CRC-32 of their parts."""
    ran = convert("verify", made(TWO) / kind, "--config", made(TWO) / "hf")
    assert (ran.code, ran.err) == (0, "")
    folder = swapped(kind)
    ran = convert("verify", folder, "--config", made(TWO) / "hf")
    refused(ran, 6, "are not the rounded FP32 master weights")
    next(folder.glob("*/*zero_pp_rank_1_mp_rank_00_optim_states.pt")).unlink()
    ran = convert("verify", folder, "--config", made(TWO) / "hf")
    refused(ran, 3, "lacks the optimizer states of data parallel ranks 1 of 2")


@pytest.mark.parametrize("files", ["*optim_states.pt", "*model_states.pt"])
def test_files_of_stage_3_that_were_swapped(made, convert, tmp_path, swapped, files):
    """Nothing can be compared with them: their own names are all that tells."""
    folder = swapped("zero3", files, named=True)
    for argv in (["zero2hf", folder, tmp_path / "out", "--config", made(TWO) / "hf"],
                  ["zero2universal", folder, tmp_path / "out"]):  # fmt: skip
        refused(convert(*argv), 3, "zero_pp_rank_0_mp_rank_00", "was saved as", "zero_pp_rank_1_mp_rank_00", "mixed up")
    assert not (tmp_path / "out").exists()


def test_files_that_know_no_name(made, convert, tmp_path):
    """DeepSpeed's fast writer gives torch.save a stream."""
    import shutil

    from tests.golden.zero_worlds import nameless

    folder = shutil.copytree(made(TWO) / "zero3", tmp_path / "zero3")
    for path in folder.glob("*/*.pt"):
        nameless(path)
    assert convert("zero2hf", folder, tmp_path / "out", "--config", made(TWO) / "hf").code == 0
    assert differences(tmp_path / "out", made(TWO) / "zero3.truth.safetensors", "fp32") == []


def test_stage_0_with_its_groups_in_another_order(made, convert, tmp_path):
    """Nothing in the file tells; the master weights, compared with the module, do."""
    import shutil

    import torch

    folder = shutil.copytree(made(TWO) / "zero0", tmp_path / "zero0")
    path = next(folder.glob("*/mp_rank_00_model_states.pt"))
    state = torch.load(path, weights_only=False)
    inner = state["optimizer"]["optimizer_state_dict"]
    group, masters = inner["param_groups"][0], state["optimizer"]["fp32_groups"][0]
    order = sorted(range(len(masters)), reverse=True)
    state["optimizer"]["fp32_groups"][0] = [masters[index] for index in order]
    group["params"] = [group["params"][index] for index in order]
    torch.save(state, path)
    for weights in STATES:
        ran = convert("zero2hf", folder, tmp_path / "out", "--config", made(TWO) / "hf", "--weights", weights)
        refused(ran, 6, "are not the rounded FP32 master weights")


def test_stage_0_with_equal_parameters_in_several_groups(made, convert, tmp_path):
    """As with a learning rate for each layer. The norms round to the same numbers, and their master weights differ."""
    import shutil

    import torch

    folder = shutil.copytree(made(TWO) / "zero0", tmp_path / "zero0")
    path = next(folder.glob("*/mp_rank_00_model_states.pt"))
    state = torch.load(path, weights_only=False)
    inner, groups = state["optimizer"]["optimizer_state_dict"], state["optimizer"]["fp32_groups"]
    for tensor in state["module"].values():
        if tensor.ndim == 1:
            tensor.fill_(1.0)
    _, norms = groups  # of matrices, and of all else
    for number, master in enumerate(norms):
        master.data.fill_(1.0 + 1e-5 * number)
    group = inner["param_groups"][1]
    inner["param_groups"].insert(0, group | {"params": [group["params"].pop()]})
    groups.insert(0, [norms.pop()])
    torch.save(state, path)
    options = ("--config", made(TWO) / "hf")
    for weights in STATES:
        ran = convert("zero2hf", folder, tmp_path / "out", *options, "--weights", weights)
        refused(ran, 4, "are equal in its module", "nobody can tell whose state is whose")
    assert convert("zero2hf", folder, tmp_path / "out", *options, "--weights", "module").code == 0


def test_files_of_two_saves(made, convert, tmp_path):
    """A rank of another stage, and one that has made another number of steps."""
    import shutil

    import torch

    def optimizers(folder: Path) -> list[Path]:
        return sorted(folder.glob("*/*optim_states.pt"))

    mixed = shutil.copytree(made(TWO) / "zero3", tmp_path / "mixed")
    shutil.copy(optimizers(made(TWO) / "zero2")[1], optimizers(mixed)[1])
    refused(convert("zero2hf", mixed, tmp_path / "out", "--config", made(TWO) / "hf"), 3, "of different saves")
    older = shutil.copytree(made(TWO) / "zero3", tmp_path / "older")
    state = torch.load(optimizers(older)[1], weights_only=False)
    for moments in state["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        moments["step"] -= 1
    torch.save(state, optimizers(older)[1])
    refused(convert("zero2hf", older, tmp_path / "out", "--config", made(TWO) / "hf"), 3, "is of step", "one save")
    refused(convert("zero2universal", older, tmp_path / "out"), 3, "is of step")


@pytest.mark.parametrize("count", [10**9, 2**62])
def test_a_number_that_would_fill_the_memory(made, convert, tmp_path, count):
    import shutil

    import torch

    folder = shutil.copytree(made(TWO) / "zero2", tmp_path / "many")
    for path in folder.glob("*/*optim_states.pt"):
        state = torch.load(path, weights_only=False)
        state["optimizer_state_dict"]["partition_count"] = [count, count]
        torch.save(state, path)
    ran = convert("zero2hf", folder, tmp_path / "out", "--config", made(TWO) / "hf", "--weights", "fp32-master")
    refused(ran, 3, f"claims {count} data parallel ranks")


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_one_of_several_model_parallel_ranks(made, convert, tmp_path, kind):
    import shutil

    import torch

    folder = shutil.copytree(made(TWO) / kind, tmp_path / kind)
    for path in folder.glob("*/*model_states.pt"):
        state = torch.load(path, weights_only=False)
        state["mp_world_size"] = 2
        torch.save(state, path)
    refused(convert("zero2hf", folder, tmp_path / "out", "--config", made(TWO) / "hf"), 4, "2 model parallel ranks")
    refused(convert("zero2universal", folder, tmp_path / "out"), 4, "2 model parallel ranks")


NAMED = ("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names")
"""Entries of a model file with names of parameters."""


def inside(value: Any) -> Any:
    """Names as they are of a model in the attribute `net` of another module."""
    match value:
        case dict():
            return {f"net.{key}": inside(inner) for key, inner in value.items()}
        case list():
            return [inside(inner) for inner in value]
        case str():
            return f"net.{value}"
        case _:
            return value


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        (TWO, "zero0"),
        (TWO, "zero1"),
        (TWO, "zero2"),
        (TWO, "zero3"),
        (TIED, "zero2"),
        (TIED, "zero3"),
        (MUON_PAIR, "zero1-fp32-muon"),
    ],
    ids=name,
)
def test_a_module_around_the_model(made, convert, tmp_path, world, kind):
    """A LightningModule keeps the model in an attribute, whose name DeepSpeed has in every file that has names.

    Where it is: lightning 2.6.6, strategies/deepspeed.py, `save_checkpoint`.
    """
    import shutil

    import torch

    source, base = made(world) / kind, ("--config", made(world) / "hf")
    wrapped, two = (shutil.copytree(source, tmp_path / place) for place in ("wrapped", "two"))
    for folder in (wrapped, two):
        for path in folder.glob("*/*model_states.pt"):
            state = torch.load(path, weights_only=False)
            state |= {key: inside(state[key]) for key in NAMED}
            if folder == two:
                state["module"]["head.weight"] = torch.ones(3)
                state["buffer_names"].append("head.weight")
            torch.save(state, path)
    of_adam = world is not MUON_PAIR and kind != "zero0"
    commands = [["zero2hf"], ["zero2hf", "--weights", "fp32-master"]]
    commands += [["hf2fsdp", "--with-optimizer"]] * (kind != "zero0") + [["zero2hf", "--weights", "exp_avg"]] * of_adam
    for number, (command, *options) in enumerate(commands):
        outputs = []
        for folder in (source, wrapped):
            out = tmp_path / f"{number}-{folder.name}"
            ran = convert(command, folder, out, *options, *base)
            assert ran.code == 0, ran.err
            outputs.append([path.read_bytes() for kind in ("safetensors", "distcp") for path in out.rglob(f"*.{kind}")])
        assert outputs[0] == outputs[1] != []
        refused(convert(command, two, tmp_path / "no", *options, *base), 3, "tensors are missing")
    if of_adam:
        assert convert("zero2universal", wrapped, tmp_path / "universal").code == 0
        assert convert("zero2hf", tmp_path / "universal", tmp_path / "back", *base).code == 0
        back, masters = (tmp_path / place / "model.safetensors" for place in ("back", "1-wrapped"))
        assert back.read_bytes() == masters.read_bytes()


def test_two_names_of_one_parameter_that_hold_different_weights(made, convert, tmp_path):
    """What the file holds under a name counts, not what it says of its owner."""
    import shutil

    import torch
    from safetensors.torch import load_file

    folder = shutil.copytree(made(TWO) / "zero2", tmp_path / "zero2")
    path = next(folder.glob("*/mp_rank_00_model_states.pt"))
    state = torch.load(path, weights_only=False)
    state["shared_params"] = {"lm_head.weight": "model.embed_tokens.weight"}
    torch.save(state, path)
    assert convert("zero2hf", folder, tmp_path / "out", "--config", made(TWO) / "hf").code == 0
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(bits(converted["lm_head.weight"]), bits(state["module"]["lm_head.weight"]))


def test_a_config_with_biases_that_the_checkpoint_lacks(made, convert, tmp_path):
    from tests.faults.dcp_tools import with_config

    config = with_config(tmp_path / "base", made(TWO) / "hf", attention_bias=True)
    ran = convert("zero2hf", made(TWO) / "zero2", tmp_path / "out", "--config", config)
    refused(ran, 3, "says attention_bias = True", "16 of 16 biases are missing", "model.layers.0.self_attn.q_proj.bias")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weights", STATES)
def test_what_was_converted_equals_its_source(made, convert, tmp_path, weights):
    source, config = made(TWO) / "zero2", ["--config", made(TWO) / "hf", "--weights", weights]
    assert convert("zero2hf", source, tmp_path / "out", *config).code == 0
    assert convert("verify", tmp_path / "out", source, *config).code == 0
    assert convert("verify", tmp_path / "out", source, *config[:2]).code == 6


def test_masters_that_are_not_the_modules_are_refused(made, convert, tmp_path):
    """Round-robin gradients without their order, as DeepSpeed's own tools read them, would look like this."""
    import shutil

    import torch

    folder = shutil.copytree(made(TWO) / "zero2", tmp_path / "mixed")
    path = next(folder.glob("*/mp_rank_00_model_states.pt"))
    state = torch.load(path, weights_only=False)
    first, *_ = state["param_shapes"]
    a, b = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    order = [{a: b, b: a}.get(key, key) for key in first]
    state["param_shapes"][0] = type(first)((key, first[key]) for key in order)
    torch.save(state, path)
    common = ["--config", made(TWO) / "hf", "--weights", "fp32-master"]
    ran = convert("zero2hf", folder, tmp_path / "out", *common)
    refused(ran, 6, "are not the rounded FP32 master weights", "--weights module")
    assert not (tmp_path / "out").exists()
    assert convert("zero2hf", folder, tmp_path / "out", *common, "--replicas", "first").code == 0
