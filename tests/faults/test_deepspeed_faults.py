"""Damaged, incomplete and mixed-up folders of DeepSpeed and GPT-NeoX: refused with names, numbers and a hint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.dcp_tools import refused, with_config
from tests.golden.zero_worlds import nameless, swap

GOLDEN = Path(__file__).parents[1] / "golden" / "neox"


@pytest.fixture
def neox(tmp_path):
    """`neox(name)`: a copy of a real checkpoint, and the folder of its tag."""

    def copied(name: str) -> tuple[Path, Path]:
        run = shutil.copytree(GOLDEN / name, tmp_path / name)
        return run, run / (run / "latest").read_text().strip()

    return copied


@pytest.fixture
def check_refusal(convert, tmp_path):
    """`check_refusal(run, code, *parts)`: neox2hf refuses a run with that code and a message with those parts."""

    def check(run: Path, code: int, *parts: object, flags: tuple[str, ...] = ()) -> None:
        ran = convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101, "--gqa-layout", "blocked", *flags)
        refused(ran, code, *parts)
        assert "hint:" in ran.err
        assert not (tmp_path / "out").exists()

    return check


# --- ranks and files -------------------------------------------------------------------------------------------------


def test_a_model_parallel_rank_is_missing(neox, check_refusal):
    run, tag = neox("llama-mha-tp2")
    (tag / "mp_rank_01_model_states.pt").unlink()
    check_refusal(
        run, 3, "mp_rank_00_model_states.pt is one of 2 model parallel ranks, 1 are there", "ranks are missing"
    )


def test_the_first_rank_is_missing(neox, check_refusal):
    run, tag = neox("llama-mha-tp2")
    (tag / "mp_rank_00_model_states.pt").unlink()
    check_refusal(run, 3, "lacks mp_rank_00_model_states.pt", "copy the files of all ranks")


def test_a_stale_file_of_another_topology(neox, check_refusal):
    run, tag = neox("llama-mha-tp2")
    nameless(shutil.copy(tag / "mp_rank_01_model_states.pt", tag / "mp_rank_02_model_states.pt"))
    check_refusal(run, 3, "is one of 2 model parallel ranks, 3 are there", "another topology")


def test_a_layer_of_one_rank_is_missing(neox, check_refusal):
    run, tag = neox("llama-gqa-pp2-tp2")
    (tag / "layer_03-model_01-model_states.pt").unlink()
    check_refusal(run, 3, "lacks layer_03-model_01-model_states.pt", "copy the files")


def test_a_whole_layer_is_missing(neox, check_refusal):
    run, tag = neox("llama-gqa-pp2-tp2")
    for path in tag.glob("layer_03-*"):
        path.unlink()
    check_refusal(
        run, 3, "lacks layer_03-model_00-model_states.pt, layer_03-model_01-model_states.pt", "copy the files"
    )


@pytest.mark.parametrize("size", [0, 1, 1000, 50_000])
def test_a_file_that_is_cut_off(neox, check_refusal, size):
    run, tag = neox("llama-mha-tp2")
    path = tag / "mp_rank_01_model_states.pt"
    path.write_bytes(path.read_bytes()[:size])
    ran_parts = ("mp_rank_01_model_states.pt", "archive")
    check_refusal(run, 3, *ran_parts)


def test_a_data_parallel_rank_is_missing(neox, check_refusal):
    run, tag = neox("llama-tp2-dp2")
    (tag / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    masters = ("--weights", "fp32-master")
    check_refusal(run, 3, "lacks the optimizer states of data parallel ranks 1 of 2 for mp_rank_01", flags=masters)


def test_partitions_of_another_world(neox, check_refusal):
    """A third file: the other two say that they are of two."""
    run, tag = neox("llama-tp2-dp2")
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    nameless(shutil.copy(tag / name.format(1), tag / name.format(2)))
    check_refusal(run, 3, "belongs to 2 data parallel ranks, 3 are there", flags=("--weights", "fp32-master"))


def test_a_partition_twice(neox, convert, tmp_path):
    """That of an earlier save in FP16 beside one in BF16: which of them counts, no name says."""
    run, tag = neox("llama-tp2-dp2")
    first = tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    nameless(shutil.copy(first, tag / first.name.removeprefix("bf16_")))
    flags = ("--weights", "fp32-master", "--vocab-size", 101, "--gqa-layout", "blocked")
    ran = convert("neox2hf", run, tmp_path / "out", *flags)
    refused(ran, 3, "holds two partitions of rank 1", first.name, first.name.removeprefix("bf16_"))


def test_partitions_of_two_ranks_swapped(neox, check_refusal):
    """Of the same size, and without their names: only the comparison with the module can tell."""
    run, tag = neox("llama-tp2-dp2")
    swap(*(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)), named=False)
    check_refusal(run, 6, "are not the rounded FP32 master weights", flags=("--weights", "fp32-master"))


def test_optimizer_states_that_are_not_there(neox, check_refusal):
    run, _ = neox("llama-mha-tp2")
    check_refusal(
        run, 3, "holds no optimizer states of mp_rank_00", "--weights module", flags=("--weights", "fp32-master")
    )


def test_the_files_of_two_ranks_swapped(neox, check_refusal):
    """Without their names nothing but the seed in each file's random state tells."""
    run, tag = neox("llama-mha-tp2")
    swap(*(tag / f"mp_rank_{rank:02d}_model_states.pt" for rank in (0, 1)), named=False)
    check_refusal(run, 3, "mp_rank_00_model_states.pt was saved by tensor parallel rank 1")


@pytest.mark.parametrize(
    ("name", "first", "second", "weights"),
    [
        ("llama-mha-tp2", "mp_rank_00_model_states", "mp_rank_01_model_states", "module"),
        ("llama-gqa-pp2-tp2", "layer_03-model_00-model_states", "layer_03-model_01-model_states", "module"),
        ("llama-gqa-pp2-tp2", "layer_02-model_00-model_states", "layer_03-model_00-model_states", "module"),
        (
            "llama-tp2-dp2",
            "bf16_zero_pp_rank_0_mp_rank_01_optim_states",
            "bf16_zero_pp_rank_1_mp_rank_01_optim_states",
            "fp32-master",
        ),
    ],
)
def test_files_that_were_renamed(neox, check_refusal, name, first, second, weights):
    """torch.save left their names in them. Of whole layers nothing else would tell."""
    run, tag = neox(name)
    swap(tag / f"{first}.pt", tag / f"{second}.pt")
    check_refusal(run, 3, f"{first}.pt was saved as '{second}': files are mixed up", flags=("--weights", weights))


@pytest.mark.parametrize("layout", ["sequential", "pipeline"])
def test_our_own_files_know_their_names_too(model, convert, tmp_path, check_refusal, layout):
    assert convert("hf2neox", model("llama"), tmp_path / "run", "--tp", 2, "--layout", layout).code == 0
    files = sorted((tmp_path / "run").glob("*/layer_03*" if layout == "pipeline" else "*/mp_rank*"))
    swap(*files)
    check_refusal(tmp_path / "run", 3, f"{files[0]} was saved as '{files[1].stem}'")


def test_a_folder_may_have_any_name(neox, convert, tmp_path):
    """And so may a file that says the same rank otherwise: NeoX 1.0 wrote no underscore before `optim`."""
    run, tag = neox("llama-tp2-dp2")
    for path in tag.glob("*optim_states.pt"):
        path.rename(path.with_name(path.name.removeprefix("bf16_").replace("_optim", "optim")))
    tag.rename(run / "_global_step_6_backup")
    flags = ["--tag", "_global_step_6_backup", "--weights", "fp32-master", "--vocab-size", 101]
    assert convert("neox2hf", run, tmp_path / "out", *flags, "--gqa-layout", "blocked").code == 0


def test_layers_of_another_save_beside_a_whole_module(neox, check_refusal):
    run, tag = neox("neox-parallel-tp2")
    for path in (GOLDEN / "neox-pp2-tp2").glob("*/layer_*"):
        shutil.copy(path, tag)
    check_refusal(run, 3, "layers of a pipeline, and a whole module", "older")


def test_all_layers_are_missing(neox, check_refusal):
    run, tag = neox("llama-gqa-pp2-tp2")
    for path in tag.glob("layer_*"):
        path.unlink()
    check_refusal(run, 3, "lacks its layer_*-model_* files")


def test_a_rank_twice(neox, convert, tmp_path):
    run, tag = neox("llama-mha-tp2")
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_0_model_states.pt")
    refused(convert("neox2hf", run, tmp_path / "out"), 3, "holds two files of rank 0")
    assert not (tmp_path / "out").exists()


def test_a_rank_that_no_run_has(neox, convert, tmp_path):
    run, tag = neox("llama-mha-tp2")
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_9999999999_model_states.pt")
    refused(convert("neox2hf", run, tmp_path / "out"), 3, "a rank that no run has")
    assert not (tmp_path / "out").exists()


def test_a_pipe_is_not_waited_for(neox, convert, tmp_path):
    import os

    run, tag = neox("llama-mha-tp2")
    (tag / "mp_rank_01_model_states.pt").unlink()
    os.mkfifo(tag / "mp_rank_01_model_states.pt")
    refused(convert("neox2hf", run, tmp_path / "out"), 3, "is not a regular file")
    assert not (tmp_path / "out").exists()


def test_a_copy_that_did_not_drift_there(neox, check_refusal):
    """The norm of another model: too far away for a mean that nobody asked for."""
    import torch

    run, tag = neox("llama-mha-tp2")
    path = tag / "mp_rank_01_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"]["sequential.5.norm.scale"].mul_(-3)
    torch.save(state, path)
    check_refusal(run, 6, "too far for a norm that drifted", "--replicas mean")


def test_one_element_of_a_young_norm_may_be_far(neox, convert, tmp_path):
    """After the first step of Adam each bias is the rate, with a sign that may be noise."""
    import torch

    run, tag = neox("llama-mha-tp2")
    for rank, path in enumerate(sorted(tag.glob("mp_rank_*_model_states.pt"))):
        state = torch.load(path, weights_only=False)
        norm = state["module"]["sequential.5.norm.scale"]
        norm.fill_(1e-4)
        norm[3] *= -1 if rank else 1
        torch.save(state, path)
    ran = convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101)
    assert (ran.code, "their mean" in ran.err) == (0, True), ran.err


def test_a_norm_that_is_no_number(neox, check_refusal):
    import torch

    run, tag = neox("llama-mha-tp2")
    path = tag / "mp_rank_01_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"]["sequential.5.norm.scale"].fill_(float("nan"))
    torch.save(state, path)
    check_refusal(run, 6, "the copies of 5.norm.scale are up to inf apart")


# --- tags ------------------------------------------------------------------------------------------------------------


def test_latest_names_what_is_not_there(neox, check_refusal):
    run, _ = neox("llama-mha-tp2")
    (run / "latest").write_text("global_step423858")
    check_refusal(run, 3, "latest names global_step423858, which is not in", "present: global_step6")


def test_a_newer_save_that_never_finished(neox, convert, tmp_path):
    """The tag that is read decides, not the last one in the folder."""
    run, _ = neox("llama-mha-tp2")
    (run / "global_step8").mkdir()
    (run / "global_step8" / "mp_rank_00_model_states.pt").touch()
    flags = ["--vocab-size", 101, "-q"]
    assert convert("neox2hf", run, tmp_path / "latest", *flags).code == 0
    (run / "latest").unlink()
    assert convert("neox2hf", run, tmp_path / "named", *flags, "--tag", "global_step6").code == 0


def test_no_latest(neox, check_refusal):
    run, _ = neox("llama-mha-tp2")
    (run / "latest").unlink()
    check_refusal(run, 3, "has no file latest", "--tag", "present: global_step6")


def test_a_tag_that_is_a_broken_link(neox, check_refusal):
    run, tag = neox("llama-mha-tp2")
    shutil.rmtree(tag)
    tag.symlink_to("../final_train_v2/global_step6")
    check_refusal(run, 3, "is a link to ../final_train_v2/global_step6, which is not there")


def circle(path: Path) -> Path:
    """A link to itself."""
    path.symlink_to(path.name)
    return path


def test_links_in_a_circle(neox, check_refusal):
    run, _ = neox("llama-mha-tp2")
    (run / "latest").unlink()
    circle(run / "latest")
    check_refusal(run, 3, "latest is a link to latest, which is not there", "--tag", "present: global_step6")
    (run / "latest").unlink()
    (run / "latest").write_text("global_step7")
    circle(run / "global_step7")
    check_refusal(run, 3, "global_step7 is a link to global_step7, which is not there")


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"])
def test_files_that_are_links_in_a_circle(neox, convert, tmp_path, name):
    run, tag = neox("llama-tp2-dp2")
    (tag / name).unlink()
    circle(tag / name)
    flags = ["--vocab-size", 101, "--gqa-layout", "blocked", "--weights", "fp32-master"]
    for ran in (convert("neox2hf", run, tmp_path / "out", *flags), convert("verify", run)):
        refused(ran, 3, f"{tag / name} is a link to {name}, which is not there")


def test_an_output_that_is_a_link_in_a_circle(neox, convert, tmp_path):
    run, _ = neox("llama-mha-tp2")
    for out in (circle(tmp_path / "out"), tmp_path / "out" / "inner"):
        refused(convert("neox2hf", run, out, "--vocab-size", 101), 7, f"the links in {out} lead in a circle")


@pytest.mark.parametrize("name", ["../llama-mha-tp2", "/etc", "..", "", "a\nb", "x" * 300])
def test_names_that_leave_the_folder(neox, check_refusal, name):
    run, _ = neox("llama-mha-tp2")
    check_refusal(run, 3, "--tag says", "which is not a folder name", flags=("--tag", name))


def test_a_tag_with_a_space(neox, convert, tmp_path):
    run, tag = neox("llama-mha-tp2")
    tag.rename(run / "step 7")
    for flags in ((), ("--tag", "step 7")):
        (run / "latest").write_text("step 7")
        ran = convert("neox2hf", run, tmp_path / f"out{len(flags)}", "--vocab-size", 101, *flags)
        assert ran.code == 0, ran.err


# --- settings --------------------------------------------------------------------------------------------------------


def yaml_of(text: str) -> dict[str, object]:
    import yaml

    return yaml.safe_load(text)


def changed(tag: Path, **settings: object) -> Path:
    """The run's own yml with some settings changed; None takes a key out."""
    path = next((tag / "configs").glob("*.yml"))
    merged = yaml_of(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
    return path


def test_no_yml(neox, check_refusal):
    run, tag = neox("llama-mha-tp2")
    shutil.rmtree(tag / "configs")
    check_refusal(run, 3, "holds no yml", "--config")
    check_refusal(run, 3, "elsewhere.yml is not there", "--config", flags=("--config", "elsewhere.yml"))


def test_a_yml_that_contradicts_the_one_saved_with_the_weights(neox, convert, check_refusal, tmp_path):
    run, tag = neox("llama-mha-tp2")
    other = tmp_path / "other.yml"
    flags = ("--config", other, "--vocab-size", 101)
    shutil.copy(changed(tag), other)
    assert convert("neox2hf", run, tmp_path / "same", *flags).code == 0
    shutil.copy(changed(tag, rotary_emb_base=777), other)
    changed(tag, rotary_emb_base=10000)
    both = f"{other} and the yml saved with the weights contradict each other"
    check_refusal(run, 5, both, "rope_theta: 777.0 | 10000.0", flags=flags)
    assert convert("neox2hf", run, tmp_path / "out", *flags, "--set", "rope_theta=777").code == 0
    changed(tag, num_attention_heads=None)  # without which it is no model
    ran = convert("neox2hf", run, tmp_path / "partly", *flags)
    assert (ran.code, f"note: {other} was not compared with the yml saved with the weights: {tag}" in ran.err) == (
        0,
        True,
    )
    (tag / "configs" / "second.yml").write_text("rotary_emb_base: 5\n")  # the two cannot be read together
    ran = convert("neox2hf", run, tmp_path / "named", *flags)
    assert (ran.code, f"note: {other} was not compared with the yml saved with the weights: {tag}" in ran.err) == (
        0,
        True,
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_mup", True),
        ("use_qk_layernorm", True),
        ("moe_num_experts", 8),
        ("pos_emb", "alibi"),
        ("activation", "mish"),
        ("my_softmax_scale", 2.0),
    ],
)
def test_a_yml_that_leaves_out_what_the_saved_one_is_refused_for(neox, convert, tmp_path, key, value):
    run, tag = neox("llama-mha-tp2")
    other = shutil.copy(changed(tag), tmp_path)
    path = changed(tag, **{key: value})
    ran = convert("neox2hf", run, tmp_path / "out", "--config", other, "--vocab-size", 101)
    refused(ran, 4, f"error: {path} (saved with the weights): ", key, str(value))


def test_a_key_of_the_saved_yml_that_is_accepted(neox, convert, tmp_path):
    run, tag = neox("llama-mha-tp2")
    flags = ("--config", shutil.copy(changed(tag), tmp_path), "--vocab-size", 101, "--accept", "my_key")
    changed(tag, my_key=1)
    ran = convert("neox2hf", run, tmp_path / "out", *flags)
    assert (ran.code, ran.err.count("unknown keys are taken for settings of the run: my_key\n")) == (0, 1), ran.err
    refused(convert("average-norms", run, tmp_path / "norms"), 4, "my_key")
    assert convert("average-norms", run, tmp_path / "norms", "--accept", "my_key").code == 0
    changed(tag, rotary_emb_base=777)
    assert convert("neox2hf", run, tmp_path / "more", *flags).code == 5


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"])
def test_the_yml_of_another_model(neox, check_refusal, name):
    run, tag = neox("llama-mha-tp2")
    changed(tag, **{name: 8})
    check_refusal(run, 3, f"says {name} = 8", "another model")


@pytest.mark.parametrize(
    ("option", "bias"),
    [
        ("use_bias_in_attn_linear", "2.attention.dense.bias"),
        ("use_bias_in_mlp", "2.mlp.linear1.bias"),
    ],
)
def test_a_yml_without_biases_that_the_weights_have(neox, check_refusal, option, bias):
    run, tag = neox("gpt2-tied-tp2")
    changed(tag, **{option: False})
    check_refusal(run, 3, f"says {option} = False", f"holds such biases: {bias}", "another model")


def test_a_longest_text_that_is_decided(neox, convert, tmp_path):
    run, tag = neox("llama-mha-tp2")
    changed(tag, max_position_embeddings=2048)
    ran = convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101, "--set", "max_positions=2048")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 2048


YARN = {"yarn": True, "yarn_original_max_position_embeddings": 8, "yarn_factor": 2}


@pytest.mark.parametrize(
    ("settings", "code", "part"),
    [
        ({"no_weight_tying": False}, 3, "final_linear"),
        ({"norm": "layernorm"}, 4, "no class with"),
        ({"activation": "geglu"}, 4, "no class with"),
        ({"rotary_pct": 0.5}, 4, "no class with"),
        ({"gpt_j_residual": True, "use_bias_in_mlp": True}, 4, "no class with"),
        ({"gpt_j_residual": True, "use_bias_in_mlp": False}, 4, "leaves the attention out of every layer"),
        ({"pos_emb": "alibi"}, 4, "pos_emb"),
        ({"pos_emb": None}, 4, "no class with norm rmsnorm, activation 'swiglu', learned positions"),
        ({"pos_emb": ["rotary"]}, 4, "pos_emb"),
        ({"use_qk_layernorm": True}, 4, "use_qk_layernorm"),
        ({"num_kv_heads": 2}, 3, "query_key_value"),
        ({"gpt_j_residual": "false"}, 3, "neither true nor false"),
        ({"no_weight_tying": "false"}, 3, "neither true nor false"),
        ({"norm": ["rmsnorm"]}, 4, "norm = "),
        ({"rotary_pct": 2}, 4, "no class with"),
        ({"attention_config": {"a": 1}}, 4, "attention of the kind"),
        (
            {"yarn": True, "yarn_original_max_position_embeddings": 8, "yarn_factor": 2, "yarn_beta_fast": "x"},
            3,
            "beta",
        ),
        ({"attention_config": [[["sparse_fixed"], 2]]}, 4, "sparse_fixed"),
        ({"max_position_embeddings": None}, 3, "max_positions"),
        ({"rms_norm_epsilon": "small"}, 3, "norm_epsilon"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(neox, convert, tmp_path, settings, code, part):
    run, tag = neox("llama-mha-tp2")
    changed(tag, **settings)
    ran = convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101, "--gqa-layout", "blocked")
    refused(ran, code, part)
    assert not (tmp_path / "out").exists()


def test_numbers_without_a_point(neox, convert, tmp_path):
    """PyYAML takes 3e-06 for a text."""
    run, tag = neox("llama-mha-tp2")
    changed(tag, rms_norm_epsilon="3e-06")
    assert convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101).code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == 3e-06


@pytest.mark.parametrize("name", ["model.yml", "more.json"])
def test_several_yml_are_merged(neox, convert, tmp_path, name):
    """NeoX takes files *.json too."""
    run, tag = neox("llama-mha-tp2")
    import yaml

    path = next((tag / "configs").glob("*.yml"))
    settings = yaml.safe_load(path.read_text())
    rest = {key: settings.pop(key) for key in ("num_layers", "norm", "rms_norm_epsilon")}
    path.write_text(yaml.safe_dump(settings))
    lines = (f'  # a comment\n  "{key.replace("_", "-")}": {json.dumps(value)},\n' for key, value in rest.items())
    (tag / "configs" / name).write_text("{\n" + "".join(lines) + "}\n")
    assert convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101).code == 0


def test_two_yml_that_contradict_each_other(neox, check_refusal):
    run, tag = neox("llama-mha-tp2")
    for name in ("z.yml", "z.json"):
        (tag / "configs" / name).write_text('{"num-layers": 7}\n')
        check_refusal(run, 3, "num_layers", "another file")
        (tag / "configs" / name).unlink()


@pytest.mark.parametrize(
    ("lines", "key", "first", "second"),
    [
        (["num_layers: 2", "rotary_pct: 1.0", "num_layers: 2"], "num_layers", 1, 3),
        (["{", '  "rms-norm-epsilon": 3.0e-06,', '  "rms_norm_epsilon": 1.0e-05,', "}"], "rms_norm_epsilon", 2, 3),
        (["{num_layers: 2, num_layers: 3}"], "num_layers", 1, 1),
    ],
    ids=["twice the same", "flow style, and spelt differently", "in one line"],
)
def test_a_key_that_stands_twice(neox, check_refusal, tmp_path, lines, key, first, second):
    """PyYAML keeps the last one without a word."""
    run, _ = neox("llama-mha-tp2")
    path = tmp_path / "run.yml"
    path.write_text("\n".join(lines) + "\n")
    check_refusal(run, 3, f"{path} says '{key}' twice, in lines {first} and {second}", flags=("--config", path))


def test_two_merged_maps_are_no_key_that_stands_twice(neox, convert, tmp_path):
    run, tag = neox("llama-mha-tp2")
    text = next((tag / "configs").glob("*.yml")).read_text().strip()
    anchors = "wandb: &base {steps_per_print: 1}\ncomet_others: &more {num_layers: 7}\n"
    inner = "".join(f"{key}: {json.dumps(value)}\n" for key, value in yaml_of(text).items())
    (tmp_path / "run.yml").write_text(f"{anchors}<<: *base\n<<: *more\n{inner}")
    assert convert("neox2hf", run, tmp_path / "out", "--config", tmp_path / "run.yml", "--vocab-size", 101).code == 0


@pytest.mark.parametrize(
    ("name", "key", "wrong", "right"),
    [
        ("llama-mha-tp2", "model_parallel_size", 8, 2),
        ("llama-gqa-pp2-tp2", "model_parallel_size", 1, 2),
        ("llama-gqa-pp2-tp2", "pipe_parallel_size", 4, 2),
    ],
)
def test_the_yml_of_another_topology(neox, convert, check_refusal, tmp_path, name, key, wrong, right):
    """Of the same model: the files count if they say their own number, and else it is not clear that all are there."""
    import torch

    run, tag = neox(name)
    path = changed(tag, **{key: wrong})
    flags = ["--vocab-size", 101, "--gqa-layout", "blocked"]
    ran = convert("neox2hf", run, tmp_path / "told", *flags)
    assert ran.code == 0
    assert f"note: {path} says {key} = {wrong}, the files are of {right}, as they say themselves" in ran.err
    for file in tag.glob("mp_rank_*_model_states.pt"):
        state = torch.load(file, weights_only=False)
        del state["mp_world_size"]
        torch.save(state, file)
    check_refusal(run, 3, f"{path} says {key} = {wrong}, the files are of {right}", "ranks are missing")


@pytest.mark.parametrize("stages", [0, 1])
def test_no_pipeline_is_said_in_two_ways(neox, convert, tmp_path, stages):
    run, tag = neox("llama-mha-tp2")
    changed(tag, pipe_parallel_size=stages)
    ran = convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101)
    assert ran.code == 0
    assert "pipe_parallel_size" not in ran.err


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "- 1\n- 2\n",
        "\tx: 1",
        "&a [*a]",
        "a: !!python/object/apply:os.system ['true']",
        "\x00",
        "x: " + "[" * 5000,
    ],
)
def test_yml_that_is_none(neox, convert, tmp_path, text):
    run, _ = neox("llama-mha-tp2")
    (tmp_path / "bad.yml").write_text(text)
    ran = convert("neox2hf", run, tmp_path / "out", "--config", tmp_path / "bad.yml", "--vocab-size", 101)
    refused(ran, 3, "bad.yml")
    assert not (tmp_path / "out").exists()


def test_an_explosion_of_aliases(neox, convert, tmp_path):
    run, _ = neox("llama-mha-tp2")
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    (tmp_path / "bad.yml").write_text("\n".join([*lines, "attention_config: *a11"]))
    ran = convert("neox2hf", run, tmp_path / "out", "--config", tmp_path / "bad.yml", "--vocab-size", 101)
    assert ran.code in (3, 4)


def test_a_vocabulary_that_is_too_small(neox, check_refusal):
    """100 would have been padded to 100 on two ranks, not to 102."""
    run, _ = neox("llama-mha-tp2")
    check_refusal(
        run, 5, "would have been padded to 100 rows", "rows of tokens would be lost", flags=("--vocab-size", "100")
    )


def test_the_config_of_another_model(model, neox, convert, tmp_path):
    run, _ = neox("llama-mha-tp2")
    ran = convert("neox2hf", run, tmp_path / "out", "--config", model("llama"))
    assert ran.code in (3, 5), ran.err
    assert not (tmp_path / "out.partial").exists()


def test_a_config_with_biases(model, neox, convert, tmp_path):
    run, _ = neox("llama-mha-tp2")
    assert convert("neox2hf", run, tmp_path / "plain", "--vocab-size", 101).code == 0
    config = with_config(tmp_path / "base", tmp_path / "plain", attention_bias=True)
    ran = convert("neox2hf", run, tmp_path / "out", "--config", config)
    refused(ran, 5, "biases")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["blocked", "grouped"])
def test_a_layout_that_has_no_effect(model, neox, convert, tmp_path, layout):
    """Of a model whose heads share no keys, and of files that say their own."""
    run, _ = neox("llama-mha-tp2")
    ran = convert("neox2hf", run, tmp_path / "mha", "--vocab-size", 101, "--gqa-layout", layout)
    assert ran.code == 0
    assert f"note: --gqa-layout {layout} has no effect: no heads share keys" in ran.err
    convert("hf2neox", model("llama"), tmp_path / "ours")
    ran = convert("neox2hf", tmp_path / "ours", tmp_path / "gqa", "--gqa-layout", layout)
    assert ran.code == 0
    assert ("has no effect: the files say that they are blocked" in ran.err) == (layout == "grouped")


def test_choices_that_a_family_does_not_leave(neox, convert, tmp_path):
    run, _ = neox("llama-mha-tp2")
    ran = convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101, "--set", "parallel_residual=true")
    refused(ran, 4, "parallel_residual is fixed for")
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_that_is_too_large(neox, check_refusal):
    run, _ = neox("llama-mha-tp2")
    check_refusal(run, 3, "holds 102 rows of embeddings, the vocabulary has 103", flags=("--vocab-size", "103"))


# --- writing ---------------------------------------------------------------------------------------------------------


def test_topologies_that_do_not_divide(model, convert, tmp_path):
    hf = model("llama")
    refused(convert("hf2neox", hf, tmp_path / "a", "--tp", 3), 5, "do not divide over tp = 3")
    refused(convert("hf2neox", hf, tmp_path / "b", "--pp", 5), 5, "4 layers do not fill 5 pipeline stages")
    refused(convert("hf2neox", hf, tmp_path / "c", "--pp", 2, "--layout", "sequential"), 2, "sequential has no stages")


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3"])
def test_models_that_neox_lacks(model, convert, tmp_path, name):
    refused(convert("hf2neox", model(name), tmp_path / "out"), 4, "GPT-NeoX has")


def test_a_neox_model_of_a_parallel_residual_has_no_megatron_layout(model, convert, tmp_path):
    refused(convert("hf2megatron", model("gpt_neox"), tmp_path / "out"), 5, "read the same residual")


def test_a_key_that_no_gpt_neox_has(neox, check_refusal, convert, tmp_path):
    """A misspelt `rotary_emb_base` would be 10000, and a fork may compute what this table has no key for."""
    run, tag = neox("llama-mha-tp2")
    yml = next((tag / "configs").glob("*.yml"))
    yml.write_text(json.dumps(yaml_of(yml.read_text()) | {"rotary-emb-bsae": 500000, "qk_clip": 0.0}))
    check_refusal(run, 4, "no GPT-NeoX that is known here has rotary_emb_bsae = 500000", "--accept rotary_emb_bsae")
    ran = convert("neox2hf", run, tmp_path / "out", "--vocab-size", 101, "--accept", "rotary_emb_bsae")
    assert ran.code == 0, ran.err
    assert "unknown keys are taken for settings of the run: rotary_emb_bsae" in ran.out + ran.err
