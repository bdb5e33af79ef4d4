"""Universal checkpoints: real DeepSpeed loads ours at another world size and stage, and nothing of it is lost.

Its own ds_to_universal is silently wrong with round_robin_gradients, and with tensor parallelism when the client left
no metadata (everything is put together along dimension 0): these cases are among those here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.dcp_tools import refused
from tests.golden.test_zero import ALONE, FOUR, TIED, TWO, bits, differences
from tests.golden.zero_worlds import PARALLEL, checkpoint

pytestmark = pytest.mark.distributed
STATES = {"fp32-master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
YML = {
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "max_position_embeddings": 64,
    "pos_emb": "rotary", "norm": "rmsnorm", "activation": "swiglu", "no_weight_tying": True,
    "use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "make_vocab_size_divisible_by": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "kind", "ranks", "stage"),
    [
        (TWO, "zero1", 3, "1"),
        (TWO, "zero1-round-robin", 3, "2"),
        (FOUR, "zero2-round-robin", 2, "1"),
        (FOUR, "zero2-aligned", 1, "3"),
        (TWO, "zero3-sub-groups", 3, "1"),
        (TWO, "bf16-optimizer", 3, "bf16-optimizer"),
        (TWO, "trainer3", 1, "2"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_deepspeed_loads_it(made, zero, convert, tmp_path, world, kind, ranks, stage):
    """Every master and both moments, bit for bit."""
    ran = convert("zero2universal", checkpoint(made(world), kind), tmp_path / "out")
    assert ran.code == 0, ran.err
    truth = made(world) / f"{kind}.truth.safetensors"
    code, output = zero("load-universal", tmp_path / "out", made(world) / "hf", ranks, stage, truth)
    assert code == 0, output[-4000:]


def test_a_state_under_the_name_of_another(made, convert, tmp_path):
    """What is written says in itself which state it is, as torch.save(path) does."""
    assert convert("zero2universal", made(TWO) / "zero1", tmp_path / "out").code == 0
    (norm,) = tmp_path.glob("out/*/zero/model.norm.weight")
    shutil.copy(norm / "fp32.pt", norm / "exp_avg.pt")
    config = ("--config", made(TWO) / "hf")
    for command, *options in (("hf2fsdp", "--with-optimizer"), ("zero2universal",)):
        ran = convert(command, tmp_path / "out", tmp_path / "no", *options, *config)
        assert (ran.code, "exp_avg.pt was saved as 'fp32': files are mixed up" in ran.err) == (3, True), ran.err


@pytest.mark.parametrize("kind", ["zero1", "zero3"])
def test_and_back_to_hugging_face(made, convert, tmp_path, kind):
    assert convert("zero2universal", made(TWO) / kind, tmp_path / "universal").code == 0
    for weights, state in STATES.items():
        ran = convert(
            "zero2hf", tmp_path / "universal", tmp_path / state, "--config", made(TWO) / "hf", "--weights", weights
        )
        assert ran.code == 0, ran.err
        assert differences(tmp_path / state, made(TWO) / f"{kind}.truth.safetensors", state) == []


def theirs(zero: Any, source: Path, out: Path, *, injected: bool = True) -> Path:
    """The run with the universal checkpoint that DeepSpeed's own script makes of a tag.

    `injected`: the training has not said how the parts of tensor parallel ranks are joined.
    """
    argv = ["--input_folder", source, "--output_folder", out / "u", "--num_extract_workers", 1]
    argv += ["--num_merge_workers", 1, *(["--inject_missing_state"] if injected else [])]
    code, output = zero(*argv, script=Path(__file__).with_name("universal_world.py"))
    assert code == 0, output[-2000:]
    return out


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        *((TWO, kind) for kind in ("zero1", "zero2", "bf16-optimizer", "zero3", "zero2-buffers", "zero3-buffers")),
        *((TIED, kind) for kind in ("zero1", "zero2", "zero3")),
        (FOUR, "zero2-odd"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_deepspeed_makes_is_read(made, zero, convert, tmp_path, world, kind):
    """Its universal checkpoints of stage 3 hold flat tensors without a shape."""
    hub, truth = made(world) / "hf", made(world) / f"{kind}.truth.safetensors"
    run = theirs(zero, made(world) / kind / "global_step3", tmp_path / "theirs")
    argv = ["zero2hf", run, "--config", hub]
    if kind.endswith(("odd", "buffers")):
        argv.append("--verbatim")
    for weights, state in STATES.items():
        ran = convert(*argv, tmp_path / state, "--weights", weights)
        assert ran.code == 0, ran.err
        assert differences(tmp_path / state, truth, state) == []


@pytest.mark.parametrize("kind", ["zero1", "zero3"])
def test_what_deepspeed_makes_has_a_module_too(made, zero, convert, tmp_path, kind):
    """Except of stage 3. Its master weights are compared with it; and it is a source of universal checkpoints."""
    run = theirs(zero, made(TWO) / kind / "global_step3", tmp_path / "theirs")
    argv = ["zero2hf", run, "--config", made(TWO) / "hf"]
    ran = convert(*argv, tmp_path / "hf", "--weights", "fp32-master")
    assert (ran.code, "no parameter has a step.pt" in ran.err) == (0, kind == "zero3"), ran.err
    if kind != "zero3":  # whose model files hold no weights; of the others they are copied into it, and compared
        assert convert(*argv, tmp_path / "module").code == 0
        assert differences(tmp_path / "module", made(TWO) / f"{kind}.truth.safetensors", "module") == []
        folders = [tmp_path / "theirs/u/zero" / f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
        contents = [(folder / "fp32.pt").read_bytes() for folder in folders]
        for folder, content in zip(folders, reversed(contents), strict=True):
            (folder / "fp32.pt").write_bytes(content)
        ran = convert(*argv, tmp_path / "exchanged", "--weights", "fp32-master")
        refused(ran, 6, "are not the rounded FP32 master weights")
        for folder, content in zip(folders, contents, strict=True):
            (folder / "fp32.pt").write_bytes(content)
    ran = convert("zero2universal", tmp_path / "theirs", tmp_path / "ours", "--config", made(TWO) / "hf")
    assert ran.code == 0, ran.err
    assert convert("zero2hf", tmp_path / "ours", tmp_path / "moments", "--weights", "exp_avg").code == 0
    assert differences(tmp_path / "moments", made(TWO) / f"{kind}.truth.safetensors", "exp_avg") == []


def test_a_tied_head_of_deepspeed_is_verified_without_a_config(made, zero, convert, tmp_path):
    """`verify` said that the head was not trained, and looked at nothing; its model file says of what it is a name."""
    import torch

    run = theirs(zero, made(TIED) / "zero1" / "global_step3", tmp_path / "theirs")
    ran = convert("verify", run)
    assert (ran.code, "not looked at" in ran.err) == (0, False), ran.err
    shutil.copytree(run, tmp_path / "mixed")
    step = next((tmp_path / "mixed").rglob("*q_proj.weight/step.pt"))
    torch.save(torch.tensor(2.0), step)
    assert "have made different numbers of steps" in convert("verify", tmp_path / "mixed").err


def test_apex_of_stage_3_counts_in_the_groups(made, zero, convert, tmp_path):
    """Its state has no step, or that of a universal checkpoint with which the training began."""
    import torch

    argv = ["--config", made(TWO) / "hf", "--with-optimizer"]
    run = theirs(zero, made(TWO) / "zero3" / "global_step3", tmp_path / "theirs")
    assert convert("hf2fsdp", run, tmp_path / "same", *argv).code == 0
    path = next(run.glob("*/zero/optimizer_state.pt"))
    value = torch.load(path, weights_only=False)
    for group in value["param_groups"]:
        group["step"] = 3
    for stale in (torch.tensor(1.0), None):
        for state in value["optimizer_state_dict"]["state"].values():
            state.update({"step": stale}) if stale is not None else state.pop("step")
        torch.save(value, path)
        ran = convert("hf2fsdp", run, tmp_path / "out", *argv, "--force")
        assert ran.code == 0, ran.err
        assert convert("diff", tmp_path / "same", tmp_path / "out").code == 0


@pytest.mark.parametrize("kind", ["zero2", "zero3", "pp2-tp2"])
def test_every_file_is_parsed_twice_at_most(made, convert, tmp_path, monkeypatch, yml, kind):
    """Once to know what it is, once for all of master weights, moments and steps."""
    from collections import Counter

    from formats.torch_files import archive

    counted: Counter[str] = Counter()
    parse = archive.parse_archive

    def counting(read: Any, size: int, where: str) -> Any:
        counted[where] += 1
        return parse(read, size, where)

    monkeypatch.setattr(archive, "parse_archive", counting)
    source = made(PARALLEL if "tp2" in kind else TWO) / kind
    flags = ["--config", yml, "--vocab-size", 96, "--gqa-layout", "blocked"] if "tp2" in kind else []
    assert convert("zero2universal", source, tmp_path / "out", *flags).code == 0
    counts = {where: count for where, count in counted.items() if where.startswith(str(source))}
    assert set(map(Path, counts)) == set(source.glob("*/*.pt"))
    assert max(counts.values()) <= 2
    assert sum(count - 1 for count in counts.values()) <= 3  # of the first rank, its embedding and its first layer


@pytest.mark.parametrize("kind", ["zero1-frozen", "zero2-frozen", "zero3-frozen"])
@pytest.mark.parametrize("table", [True, False])
def test_frozen_parameters_are_not_in_it(made, convert, tmp_path, kind, table):
    """Nor would anything tell so in a model without a table, but for what we write."""
    assert convert("zero2universal", made(TWO) / kind, tmp_path / "universal").code == 0
    names = ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"]
    flags = ["--config", made(TWO) / "hf", *([] if table else ["--verbatim"])]
    ran = convert("zero2hf", tmp_path / "universal", tmp_path / "out", *flags)
    refused(ran, 3, "holds no parameters that were not trained: it lacks " + ", ".join(names) + "\n", "convert zero2hf")
    assert not (tmp_path / "out").exists()


def test_what_a_universal_checkpoint_is_compared_with(made, convert, tmp_path):
    """Master weights with master weights: the module of the same checkpoint is rounded."""
    source, universal = made(TWO) / "zero2", tmp_path / "universal"
    assert convert("zero2universal", source, universal).code == 0
    for argv in (["verify", universal, source], ["diff", universal, source], ["zero2hf", universal, tmp_path / "out"]):
        refused(convert(*argv), 3, "has no config.json", "--config BASE")
    config = ["--config", made(TWO) / "hf"]
    for command in ("verify", "diff"):
        assert convert(command, universal, source, *config, "--weights", "fp32-master").code == 0
        assert convert(command, universal, source, *config, "--weights", "exp_avg").code == 0
        assert convert(command, universal, source, *config).code == 6


@pytest.mark.parametrize("kind", ["zero2", "zero3", "bf16-optimizer", "zero2-frozen", "zero1-fp32"])
def test_what_it_says_without_a_config(made, convert, tmp_path, kind):
    """Every tensor under the name of the training, as the manifest has it: of masters and moments."""
    import torch
    from safetensors.torch import load_file

    universal = tmp_path / "universal"
    assert convert("zero2universal", made(TWO) / kind, universal).code == 0
    truth = load_file(made(TWO) / f"{kind}.truth.safetensors")
    trained = {key.removeprefix("exp_avg_sq.") for key in truth if key.startswith("exp_avg_sq.")}
    manifest = json.loads((universal / "global_step3/vitruvian.json").read_text())
    assert manifest["tensors"].keys() == trained
    assert manifest["optimizer"].keys() == {f"{state}.{key}" for state in ("exp_avg", "exp_avg_sq") for key in trained}
    ran = convert("verify", universal)
    assert (ran.code, f"{3 * len(trained)} tensors" in ran.out) == (0, True), ran.err + ran.out
    assert manifest["digest"] in ran.out
    said = convert("inspect", universal).out
    assert "a universal checkpoint of DeepSpeed, dp 2, global_step3" in said
    assert "exp_avg, exp_avg_sq, step 3" in said
    digest = convert("digest", universal)
    assert digest.out.split()[0] == manifest["digest"]
    assert "compare it with one of the same format" in digest.err
    if "frozen" not in kind:
        refused(
            convert("verify", universal, "--config", made(TWO) / "hf"), 2, "under its own name", "leave the config out"
        )
    shutil.copy(made(TWO) / "hf/config.json", universal)  # as that of a run which has one is carried
    for argv in ([universal], [universal / "global_step3"], [universal, "--verbatim"]):
        ran = convert("verify", *argv)
        assert (ran.code, f"{3 * len(trained)} tensors" in ran.out) == (0, True), ran.err + ran.out
    if "frozen" not in kind:
        refused(convert("verify", universal, "--set", "tied=true"), 2, "under its own name", "leave --set out")
    (universal / "config.json").unlink()
    assert convert("verify", universal / "global_step3").code == 0
    changed = universal / "global_step3/zero/model.norm.weight/exp_avg_sq.pt"
    content = torch.load(changed, weights_only=False)
    torch.save({**content, "param": content["param"] * 2}, changed)
    refused(convert("verify", universal), 6, "1 of ", "exp_avg_sq.model.norm.weight")
    for command in (["hf2fsdp", "--with-optimizer"], ["hf2megatron"], ["zero2universal"], ["hf2mds"]):
        ran = convert(command[0], universal, tmp_path / "out", *command[1:])
        refused(ran, 3, "has no config.json", "--config BASE")


def test_the_settings_of_the_optimizer_are_verified(made, convert, tmp_path):
    """No tensor holds a learning rate, nor the steps of a parameter; what tells them is in the manifest too."""
    import torch

    universal = tmp_path / "universal"
    assert convert("zero2universal", made(TWO) / "zero2", universal).code == 0
    assert convert("verify", universal).code == 0
    (tag,) = universal.glob("global_step*")
    groups, steps, model = "zero/optimizer_state.pt", "zero/model.norm.weight/step.pt", "mp_rank_00_model_states.pt"

    def changed(name: str, change: Any) -> None:
        content = (tag / name).read_bytes()
        value = torch.load(tag / name, weights_only=False)
        torch.save(change(value) or value, tag / name)
        refused(convert("verify", universal), 6, f"{name} of {universal} is not what vitruvian.json says", "copy it")
        (tag / name).write_bytes(content)

    changed(groups, lambda value: value["param_groups"][0].update(lr=1.0))
    changed(groups, lambda value: value["param_groups"][-1].update(betas=(0.5, 0.5)))
    changed(steps, lambda value: value + 0.0)  # the same value in other bytes: saved again
    changed(model, lambda value: value.update(lr_scheduler={}))
    (tag.parent / "latest_universal").write_text(f"{tag.name}\n")  # as a training that goes on writes it
    assert convert("verify", universal).code == 0


def test_options_that_a_plain_model_has_no_use_for(made, convert, tmp_path):
    for flags in (["--gqa-layout", "blocked"], ["--config", made(TWO) / "hf"], ["--set", "rope_theta=1"]):
        ran = convert("zero2universal", made(TWO) / "zero1", tmp_path / "out", *flags)
        refused(ran, 2, f"{flags[0]} has no effect on ")
    assert not (tmp_path / "out").exists()


def test_the_config_of_the_run_goes_along(made, convert, tmp_path):
    """Otherwise --config BASE would be compared with none."""
    run = shutil.copytree(made(TWO) / "zero2", tmp_path / "run")
    text = (made(TWO) / "hf/config.json").read_text()
    (run / "config.json").write_text(text)
    (run / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert convert("zero2universal", run, tmp_path / "universal").code == 0
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "universal" / name).read_bytes() == (run / name).read_bytes()
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(json.loads(text) | {"rms_norm_eps": 0.5}))
    ran = convert("zero2hf", tmp_path / "universal", tmp_path / "no", "--config", base)
    refused(ran, 5, "contradict each other (universal | base)", "0.5")


def test_stage_0_has_no_names(made, convert, tmp_path):
    refused(convert("zero2universal", made(ALONE) / "zero0", tmp_path / "out"), 4, "stage 0", "no names")


# --- GPT-NeoX: tensor parallel ranks are put together, and the loader cuts them again --------------------------------


def loaded(folder: Path, state: str, shape: tuple[int, ...], rank: int, ranks: int) -> Any:
    """What DeepSpeed's own loader gives a tensor parallel rank of a universal parameter."""
    import torch
    from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state

    parameter = torch.zeros(shape)
    master = torch.zeros(parameter.numel())
    address = SimpleNamespace(start=0, numel=parameter.numel())
    mapping = SimpleNamespace(lp_fragment_address=address, get_hp_fragment=lambda: master, optim_fragment={})
    parameter._hp_mapping = mapping
    load_hp_checkpoint_state(parameter, str(folder), rank, ranks)
    return (master if state == "fp32" else mapping.optim_fragment[state]).view(shape)


@pytest.fixture
def yml(tmp_path) -> Path:
    (tmp_path / "run.yml").write_text(json.dumps(YML))
    return tmp_path / "run.yml"


def truth_of(folder: Path, kind: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / f"{kind}.truth.safetensors")


@pytest.mark.parametrize("kind", ["tp2", "pp2-tp2"])
@pytest.mark.parametrize("state", STATES.values())
def test_the_loader_cuts_what_was_put_together(made, convert, tmp_path, yml, kind, state):
    """At the tensor parallel size of the training every rank gets its own part back, of norms the mean."""
    import torch

    flags = ["--config", yml, "--vocab-size", 96, "--gqa-layout", "blocked"]
    ran = convert("zero2universal", made(PARALLEL) / kind, tmp_path / "out", *flags)
    assert ran.code == 0, ran.err
    truth = truth_of(made(PARALLEL), kind)
    keys = [key for key in truth if key.partition(".")[2].startswith(f"{state}.")]
    assert len(keys) == {"tp2": 2, "pp2-tp2": 2}[kind] * 21
    for key in keys:
        mp, _, name = key.split(".", 2)
        folder = tmp_path / "out" / "global_step3" / "zero" / name
        rank, expected = int(mp) % 2, truth[key]
        part = loaded(folder, state, tuple(expected.shape), rank, 2)
        if "norm" in name:
            other = truth[f"{int(mp) ^ 1}.{state}.{name}"]
            assert torch.allclose(part, (expected + other) / 2, atol=1e-6), key
        else:
            assert torch.equal(bits(part), bits(expected)), key


@pytest.mark.parametrize("kind", ["tp2", "pp2-tp2"])
def test_masters_of_neox_names_come_back(made, convert, tmp_path, yml, kind):
    """TP x PP x ZeRO against the memory of the engine, put together by hand; zero_to_fp32 refuses such folders."""
    import torch
    from safetensors.torch import load_file

    flags = ["--config", yml, "--vocab-size", 96, "--gqa-layout", "blocked", "--weights", "fp32-master"]
    assert convert("neox2hf", made(PARALLEL) / kind, tmp_path / "out", *flags).code == 0
    ours, truth = load_file(tmp_path / "out" / "model.safetensors"), truth_of(made(PARALLEL), kind)
    prefix = "sequential." if kind == "tp2" else ""

    def ranks(name: str) -> list[Any]:
        """The tensor of the first and of the second tensor parallel rank."""
        by_rank = {int(key[0]): value for key, value in truth.items() if key[1:] == f".fp32.{prefix}{name}"}
        return [by_rank[rank] for rank in sorted(by_rank)]

    for layer in range(3):
        first, second = ranks(f"{layer + 2}.mlp.linear1.weight")
        up, gate = (torch.cat(halves) for halves in zip(first.chunk(2), second.chunk(2), strict=True))
        assert torch.equal(ours[f"model.layers.{layer}.mlp.up_proj.weight"], up)
        assert torch.equal(ours[f"model.layers.{layer}.mlp.gate_proj.weight"], gate)
        down = torch.cat(ranks(f"{layer + 2}.mlp.linear2.weight"), 1)
        assert torch.equal(ours[f"model.layers.{layer}.mlp.down_proj.weight"], down)
        parts = [part.split([16, 8, 8]) for part in ranks(f"{layer + 2}.attention.query_key_value.weight")]
        for index, key in enumerate("qkv"):
            whole = torch.cat([part[index] for part in parts])
            assert torch.equal(ours[f"model.layers.{layer}.self_attn.{key}_proj.weight"], whole)
        norms = ranks(f"{layer + 2}.input_layernorm.scale")
        mean = sum(norms) / 2
        assert torch.allclose(ours[f"model.layers.{layer}.input_layernorm.weight"], mean, atol=1e-6)
        assert not torch.equal(norms[0], norms[1])


@pytest.mark.parametrize(("pp", "tp"), [(0, 2), (2, 2), (2, 1), (0, 1)])
def test_deepspeed_loads_what_we_write_for_neox(made, zero, convert, tmp_path, yml, pp, tp):
    """Its PipelineModule and its plain engine, strictly, at another topology than that of the training (TP2)."""
    import torch
    from safetensors.torch import load_file

    flags = ["--config", yml, "--vocab-size", 96, "--gqa-layout", "blocked", "--make-vocab-size-divisible-by", 1]
    kind = ["--layout", "pipeline", "--pp", pp] if pp else ["--layout", "sequential"]
    run = tmp_path / "run"
    assert convert("reshard", made(PARALLEL) / "tp2", run, *flags, *kind, "--tp", tp).code == 0
    code, output = zero("load-neox", run, tmp_path / "held", pp, tp)
    assert code == 0, output[-4000:]
    parameters = load_file(tmp_path / "held")
    truth = truth_of(made(PARALLEL), "tp2")
    assert len({key.split(".", 1)[1].removeprefix("sequential.") for key in parameters}) == 21
    for key, tensor in parameters.items():
        rank, name = int(key.partition(".")[0]), key.partition(".")[2].removeprefix("sequential.")
        parts = [truth[f"{shard}.module.sequential.{name}"] for shard in range(2)]
        if "norm" in name:
            expected = ((parts[0].float() + parts[1].float()) / 2).bfloat16()
        elif tp == 2:
            expected = parts[rank % 2]
        elif "linear1" in name or "query_key_value" in name:
            sizes = [len(parts[0]) // 2] * 2 if "linear1" in name else [16, 8, 8]
            expected = torch.cat([torch.cat(same) for same in zip(*(part.split(sizes) for part in parts), strict=True)])
        else:
            expected = torch.cat(parts, 1 if "dense" in name or "linear2" in name else 0)
        assert torch.equal(bits(tensor), bits(expected)), key


def test_norms_that_drifted_are_told_and_refused_on_demand(made, convert, tmp_path, yml):
    flags = ["--config", yml, "--vocab-size", 96, "--gqa-layout", "blocked"]
    ran = convert("neox2hf", made(PARALLEL) / "tp2", tmp_path / "out", *flags)
    assert ran.code == 0
    assert "the copies of 7 tensors differed, their mean in float32 was taken" in ran.err
    record = json.loads(convert("neox2hf", made(PARALLEL) / "tp2", tmp_path / "json", *flags, "--json").out)
    assert len(record["averaged"]) == 7
    ran = convert("neox2hf", made(PARALLEL) / "tp2", tmp_path / "no", *flags, "--replicas", "verify")
    refused(ran, 6, "differs between its copies", "tp rank 1", "--replicas mean")


SUMS = [f"sequential.{layer}.{name}.bias" for layer in (2, 3) for name in ("attention.dense", "mlp.linear2")]
"""The parameters of neox-parallel-tp2 that are sums over ranks."""


def test_a_tied_gpt_2_of_two_stages_has_the_names_of_its_training(convert, tmp_path):
    """The module that two stages have holds the positions too."""
    import torch

    run = Path(__file__).parent / "neox" / "gpt2-pp2-tp2"
    ran = convert("zero2universal", run, tmp_path / "out", "--vocab-size", 101)
    assert ran.code == 0, ran.err
    files = [torch.load(file, weights_only=False) for file in run.glob("*/*optim_states.pt")]
    groups = [group for file in files for group in file["optimizer_state_dict"]["param_slice_mappings"]]
    names = {name for group in groups for name in group}
    assert "tied_modules.embed.position_embeddings.weight" in names
    assert {path.name for path in (tmp_path / "out/global_step6/zero").iterdir() if path.is_dir()} == names


def biases(optimizer: dict[str, Any], state: str) -> dict[str, Any]:
    """What a rank's optimizer has of each of them, as torch reads it."""
    by_name = {}
    for number, group in enumerate(optimizer["param_slice_mappings"]):
        masters, states = optimizer["single_partition_of_fp32_groups"], optimizer["base_optimizer_state"]["state"]
        flat = (masters[number] if state == "fp32" else states[number][state]).data
        by_name |= {name: flat[at.start : at.start + at.numel] for name, at in group.items() if name in SUMS}
    return by_name


@pytest.fixture
def unlike(tmp_path) -> Path:
    """A run with a parallel residual whose second rank has twice the biases: NeoX gives both the same gradients."""
    import torch

    run = shutil.copytree(Path(__file__).parent / "neox" / "neox-parallel-tp2", tmp_path / "unlike")
    model, optimizer = next(run.glob("*/mp_rank_01_*")), next(run.glob("*/*mp_rank_01_optim_states.pt"))
    module, states = (torch.load(path, weights_only=False) for path in (model, optimizer))
    twice = [module["module"][name] for name in SUMS]
    twice += [tensor for state in STATES.values() for tensor in biases(states["optimizer_state_dict"], state).values()]
    for tensor in twice:
        assert tensor.any()
        tensor.mul_(2)
    torch.save(module, model)
    torch.save(states, optimizer)
    return run


@pytest.mark.parametrize("state", STATES.values())
def test_sums_over_ranks_are_kept_apart(convert, tmp_path, unlike, state):
    """A parallel residual adds the biases of all ranks up (transformer.py:1089). Each rank gets its own again; at any
    other size the loader of DeepSpeed stops, for it would give a sum to each rank."""
    import torch

    ran = convert("zero2universal", unlike, tmp_path / "out", "--vocab-size", 101)
    assert ran.code == 0, ran.err
    note = "4 parameters are sums over tensor parallel ranks, such as sequential.2.attention.dense.bias"
    assert note in ran.err
    assert "at model_parallel_size 2 alone" in ran.err
    files = [torch.load(file, weights_only=False) for file in sorted(unlike.glob("*/*optim_states.pt"))]
    ranks = [biases(file["optimizer_state_dict"], state) for file in files]
    for name in SUMS:
        folder = tmp_path / "out" / "global_step6" / "zero" / name
        assert not ranks[0][name].equal(ranks[1][name])
        for rank, tensors in enumerate(ranks):
            assert bits(loaded(folder, state, (32,), rank, 2)).equal(bits(tensors[name])), name
        for others in (1, 4):
            with pytest.raises(AssertionError, match="full param numel 64 != tensor slice numel 32"):
                loaded(folder, state, (32,), 0, others)


def test_a_bias_that_is_not_its_master_weight(convert, tmp_path, unlike):
    """On the second rank, whose summand no sum hides."""
    import torch

    path = next(unlike.glob("*/mp_rank_01_model_states.pt"))
    state = torch.load(path, weights_only=False)
    state["module"]["sequential.2.attention.dense.bias"][5] += 1
    torch.save(state, path)
    ran = convert("zero2universal", unlike, tmp_path / "out", "--vocab-size", 101)
    refused(
        ran, 6, "1 of 32 elements of 2.attention.dense.bias of tp rank 1", "are not the rounded FP32 master weights"
    )
