"""HF to GPT-NeoX to another topology of GPT-NeoX to HF: every file comes back byte for byte."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.models import files

NAMES = ["llama", "llama-tied", "llama-mha", "mistral-tied", "gpt_neox", "gpt_neox-tied", "gpt2", "gpt2-untied"]
"""What GPT-NeoX has: with and without grouped queries, parallel and serial residual, positions, tied and untied."""
TOPOLOGIES = ["tp1", "tp2", "tp4", "tp1 pp1", "tp2 pp2", "tp1 pp4"]
"""With `pp` as a pipeline's files, without as a sequential checkpoint."""


def flags(topology: str) -> list[str]:
    """`tp2 pp2` as options."""
    options = [word for part in topology.split() for word in (f"--{part[:2]}", part[2:])]
    return [*options, "--layout", "pipeline" if "pp" in topology else "sequential"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in NAMES), ("llama-tied", "bfloat16"), ("gpt_neox", "bfloat16")]
)
def test_every_family_and_topology_comes_back(model, convert, tmp_path, name, dtype):
    source = model(name, dtype)
    digest = convert("digest", source).out.split()[0]
    for number, topology in enumerate(TOPOLOGIES):
        other = TOPOLOGIES[number - 1]
        first, second, back = (tmp_path / f"{number} {step}" for step in ("one", "two", "back"))
        assert convert("hf2neox", source, first, *flags(topology)).code == 0
        assert convert("digest", first).out.split()[0] == digest
        ran = convert("reshard", first, second, *flags(other), "--make-vocab-size-divisible-by", 8)
        assert ran.code == 0, ran.err
        assert convert("neox2hf", second, back).code == 0
        assert files(back) == files(source)


def test_the_vocabulary_is_padded_anew(model, convert, tmp_path):
    """211 tokens: to 256 on one rank, to 224 of 16 on two."""
    assert convert("hf2neox", model("llama"), tmp_path / "one").code == 0
    ran = convert("reshard", tmp_path / "one", tmp_path / "two", "--tp", 2, "--make-vocab-size-divisible-by", 16)
    assert ran.code == 0
    padded = [json.loads(convert("inspect", tmp_path / name, "--json").out)["padded_vocab"] for name in ("one", "two")]
    assert padded == [256, 224]


def test_a_run_of_neox_has_what_it_needs(model, convert, tmp_path):
    """The files that NeoX looks for, and a yml whose keys it knows."""
    import yaml

    assert convert("hf2neox", model("gpt_neox"), tmp_path / "run", "--tp", 2, "--iteration", 423858).code == 0
    assert (tmp_path / "run" / "latest").read_text() == "global_step423858"
    tag = tmp_path / "run" / "global_step423858"
    config = yaml.safe_load((tag / "configs" / "model.yml").read_text())
    assert config["layernorm_epsilon"] == 1e-5
    assert config["rotary_pct"] == 0.25
    assert (config["gpt_j_residual"], config["no_weight_tying"], config["model_parallel_size"]) == (True, True, 2)
    assert type(config["rotary_emb_base"]) is int
    assert (config["pipe_parallel_size"], config["make_vocab_size_divisible_by"]) == (0, 128)
    assert type(config["rotary_emb_base"]) is int
    assert convert("hf2neox", model("gpt_neox"), tmp_path / "stages", *flags("tp1 pp2")).code == 0
    (path,) = (tmp_path / "stages").glob("*/configs/*.yml")
    assert yaml.safe_load(path.read_text())["pipe_parallel_size"] == 2, "in NeoX it is 0 where nothing says it"


def test_torch_reads_what_we_write(model, convert, tmp_path):
    """What NeoX asks of a file with `finetune: true`: module and dp_world_size (deepspeed/runtime/engine.py:4668)."""
    import torch

    assert convert("hf2neox", model("gpt_neox"), tmp_path / "run", "--tp", 2).code == 0
    states = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("run/*/mp_rank_*"))]
    assert [state["dp_world_size"] for state in states] == [1, 1]
    biases = [state["module"]["sequential.2.attention.dense.bias"] for state in states]
    assert biases[0].any()
    assert not biases[1].any()  # of a sum over ranks the first one holds all


def test_the_flags_of_neox_own_script_are_understood(model, convert, tmp_path):
    source = model("llama", "float32")
    assert convert("hf2neox", source, tmp_path / "run", "--tp", 2, "--iteration", 7).code == 0
    tag = tmp_path / "run" / "global_step7"
    old = ["--input_dir", tag, "--output_dir", tmp_path / "out", "--config_file", tag / "configs" / "model.yml"]
    ran = convert("neox2hf", *old, "--architecture", "mistral", "--vocab-size", 211)
    assert (ran.code, "holds a llama" in ran.err) == (2, True)
    ran = convert("neox2hf", *old, "--architecture", "llama", "--precision", "bf16", "--vocab-size", 211)
    assert ran.code == 0, ran.err
    assert convert("neox2hf", tmp_path / "run", tmp_path / "ours", "--dtype", "bf16").code == 0
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "ours" / weights).read_bytes()
    assert convert("neox2hf", tag).code == 2
    assert convert("neox2hf", tag, tmp_path / "x", "--output_dir", tmp_path / "y").code == 2
    assert convert("neox2hf", tag, tmp_path / "x", "--precision", "fp16", "--dtype", "bf16").code == 2


def test_a_window_is_counted_in_either_way(model, convert, tmp_path):
    """hf2neox writes one less and neox2hf one more; a yml that has the number of the config counts, and it is told."""
    import yaml

    source = model("mistral", head_dim=8)
    note = "sliding_window = 8 counts the token itself, sliding_window_width = 7 of GPT-NeoX those before it"
    ran = convert("hf2neox", source, tmp_path / "run")
    assert f"note: {note}" in ran.err
    assert ran.code == 0
    (path,) = (tmp_path / "run").glob("*/configs/*.yml")
    settings = yaml.safe_load(path.read_text())
    assert settings["sliding_window_width"] == 7
    ran = convert("neox2hf", tmp_path / "run", tmp_path / "back")
    assert f"note: {note}" in ran.err
    assert files(tmp_path / "back") == files(source)
    (path.parents[1] / "vitruvian.json").unlink()  # a training run has none
    path.write_text(yaml.safe_dump(settings | {"sliding_window_width": 8}))
    ran = convert("neox2hf", tmp_path / "run", tmp_path / "wider")
    assert ran.code == 0, ran.err
    assert "note: sliding_window = 9" in ran.err
    assert json.loads((tmp_path / "wider" / "config.json").read_text())["sliding_window"] == 9
    path.write_text(yaml.safe_dump(settings | {"sliding_window_width": 9}))
    ran = convert("neox2hf", tmp_path / "run", tmp_path / "other")
    assert ran.code == 5
    assert "sliding_window: 10 | 8" in ran.err


def test_dropout_that_the_output_does_not_name_is_told(model, convert, tmp_path):
    source = model("gpt_neox", hidden_dropout=0.1)
    note = "note: hidden_dropout = 0.1 of the source is not among the settings of the output"
    assert note in convert("hf2neox", source, tmp_path / "run").err
    (path,) = (tmp_path / "run").glob("*/configs/*.yml")
    path.write_text(path.read_text() + "hidden_dropout: 0.1\n")
    assert note not in convert("neox2hf", tmp_path / "run", tmp_path / "back").err, "its config.json is in the run"
    assert note not in convert("reshard", tmp_path / "run", tmp_path / "again", "--tp", 2).err
    shutil.rmtree(tmp_path / "run" / "huggingface")
    assert note in convert("neox2hf", tmp_path / "run", tmp_path / "alone").err


def test_dropout_of_the_config_beside_the_weights_counts(model, convert, tmp_path):
    """A training with dropout, and the config of its base, which goes into the output."""
    base, run = model("llama"), tmp_path / "run"
    assert convert("hf2fsdp", base, run).code == 0
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    note = "note: attention_dropout = {} of the source is not among the settings of the output"
    ran = convert("fsdp2hf", run, tmp_path / "out", "--config", base)
    assert ran.code == 0, ran.err
    assert note.format(0.1) in ran.err
    assert json.loads((tmp_path / "out/config.json").read_text())["attention_dropout"] == 0
    assert "attention_dropout" not in convert("fsdp2hf", run, tmp_path / "own").err
    (run / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.0}))
    other = shutil.copytree(base, tmp_path / "base")
    (other / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    assert note.format(0) in convert("fsdp2hf", run, tmp_path / "third", "--config", other).err
