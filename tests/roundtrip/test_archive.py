"""A Megatron run in as few files as its format allows: `--archive`."""

from __future__ import annotations

import pytest

from tests.models import files

TOPOLOGY = ("--tp", 2, "--pp", 2, "--ep", 2)


@pytest.mark.parametrize("kind", ["torch_dist", "fsdp_dtensor"])
def test_a_run_of_any_number_of_shards_has_one_data_file(model, convert, tmp_path, kind):
    source, run, out = model("mixtral", "bfloat16"), tmp_path / "run", tmp_path / "out"
    assert convert("hf2megatron", source, run, *TOPOLOGY).code == 0
    assert len([*run.rglob("*.pt")]) == 8
    options = TOPOLOGY if kind == "torch_dist" else ("--tp", 2, "--ep", 2, "--format", kind)
    assert convert("reshard", run, out, "--archive", *options).code == 0
    assert [path.name for path in out.rglob("*.distcp")] == ["__0_0.distcp"]
    assert "tensor-model-parallel-size 2" in (out / "megatron_flags.txt").read_text()
    assert convert("verify", out, source).code == 0
    # and the shards that it was
    assert convert("reshard", out, tmp_path / "again", "--format", "torch", *TOPOLOGY).code == 0
    assert shards(tmp_path / "again").keys() == shards(run).keys()
    assert convert("diff", run, tmp_path / "again").code == 0
    # an archive stays one
    assert convert("reshard", out, tmp_path / "kept", "--archive", *options).code == 0
    assert {path.name for path in (tmp_path / "kept").rglob("*.distcp")} == {"__0_0.distcp"}


def shards(run):
    return {name: content for name, content in files(run).items() if name.endswith(".pt")}


@pytest.mark.parametrize("kind", ["torch", "megatron-llm"])
def test_a_format_with_a_file_for_each_rank_is_none(model, convert, tmp_path, kind):
    ran = convert("hf2megatron", model("llama"), tmp_path / "out", "--archive", "--format", kind, "--tp", 2)
    assert (ran.code, "--archive has no effect on the format" in ran.err) == (2, True)
    assert "torch_dist and fsdp_dtensor" in ran.err
