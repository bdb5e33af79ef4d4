"""Checkpoints in S3 and on the Hub: read by ranges, with faults, and refused when they change."""

from __future__ import annotations

import pytest

import vitruvian
from tests.remote.bucket import Fault

RUNS = {
    "huggingface": [],
    "megatron": ["--tp", 2, "--pp", 2],
    "torch_dist": ["--format", "torch_dist"],
    "fsdp": ["--ranks", 2],
}


@pytest.fixture(scope="session")
def runs(model, tmp_path_factory):
    made = {"huggingface": model("llama", "bfloat16")}
    for name, options in RUNS.items():
        if options:
            made[name] = tmp_path_factory.mktemp(name) / "run"
            words = {str(one)[2:].replace("-", "_"): two for one, two in zip(options[::2], options[1::2], strict=True)}
            vitruvian.convert(made["huggingface"], made[name], to="fsdp" if name == "fsdp" else "megatron", **words)
    return made


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_in_a_bucket_is_what_it_is_in_a_folder(runs, bucket, tmp_path, name):
    bucket.put(runs[name], f"models/{name}")
    there = vitruvian.open(f"s3://models/{name}")
    assert there.format == vitruvian.open(runs[name]).format
    done = vitruvian.convert(f"s3://models/{name}", tmp_path / "out")
    assert done.digest == vitruvian.digest(runs["huggingface"]).digest
    bucket.faults = [Fault("GET /models/.", status, 2) for status in (503, 0, -1, 429)]
    assert vitruvian.digest(f"s3://models/{name}").digest == done.digest
    assert bucket.failed == 8
