"""Outputs in S3 and on the Hub: the same bytes, resumed, bounded on the disk, and never half a model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import vitruvian
from converters.delivery import receivers
from converters.delivery.deliver import groups_of
from formats.errors import Interrupted, OutputError
from tests.faults.dcp_tools import save
from tests.faults.test_fsdp_optim_faults import training
from tests.hub.server import Fault as HubFault
from tests.remote.bucket import Fault

CODE = "import sys; from converters.cli import main; main()"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty current folder, where the work is done."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def held(bucket, folder: Path, place: str) -> None:
    """A place in a bucket is a folder, byte for byte."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    name, _, below = place.partition("/")
    assert {key.removeprefix(f"{below}/") for key in bucket.names(name, below)} == names
    for file in names:
        assert bucket.get(f"{place}/{file}") == (folder / file).read_bytes(), file


@pytest.mark.parametrize(
    ("to", "options"),
    [("huggingface", {"shard_size": 100_000}), ("megatron", {"tp": 2, "pp": 2}), ("fsdp", {"ranks": 2})],
)
def test_a_bucket_gets_what_a_folder_gets(bucket, model, here, to, options):
    source = model("llama", "bfloat16")
    vitruvian.convert(source, here / "local", to=to, **options)
    done = vitruvian.convert(source, "s3://models/a/out", to=to, **options)
    assert done.verified
    assert done.digest == vitruvian.digest(here / "local").digest
    held(bucket, here / "local", "models/a/out")
    assert [path.name for path in here.iterdir()] == ["local"]
    order = [path for method, path, _ in bucket.log if method == "PUT"]
    assert order[-1].endswith("/vitruvian.json")
    assert vitruvian.verify("s3://models/a/out", source).equal


def test_a_bucket_gets_the_manifest_of_a_training(bucket, model, here, tmp_path):
    """Its archives are read where they were sent."""
    source, saved = training(model("llama", num_hidden_layers=1))
    trained = save(tmp_path / "trained", saved)
    options: Any = {"to": "fsdp", "ranks": 2, "config": source, "with_optimizer": True}
    vitruvian.convert(trained, here / "local", **options)
    vitruvian.convert(trained, "s3://models/a/out", **options)
    held(bucket, here / "local", "models/a/out")
    archives = json.loads((here / "local/vitruvian.json").read_text())["archives"]
    assert sorted(archives) == ["__0_0.distcp", "__1_0.distcp"]
    assert all(archives.values())
    assert vitruvian.verify("s3://models/a/out", config=source).equal


def test_the_disk_holds_two_groups_of_files(bucket, model, here, monkeypatch):
    most, send = [], receivers.InBucket.send

    def noted(self, name, path):
        most.append(sum(file.stat().st_size for file in here.rglob("*.safetensors")))
        return send(self, name, path)

    monkeypatch.setattr(receivers.InBucket, "send", noted)
    vitruvian.convert(model("llama", "bfloat16"), "s3://models/out", shard_size=30_000)
    files = [name for name in bucket.names("models", "out/model-") if name.endswith(".safetensors")]
    sizes = sorted(len(bucket.get(f"models/{name}")) for name in files)
    assert len(files) > 5
    assert max(most) <= sum(sizes[-2:]) < sum(sizes) / 2


def test_an_output_that_exists_is_not_overwritten(bucket, model, here, convert):
    source = model("llama", "bfloat16")
    vitruvian.convert(source, "s3://models/out", shard_size=100_000)
    before = bucket.names("models", "out")
    for _ in range(2):
        ran = convert("to", "huggingface", source, "s3://models/out")
        assert ran.code == 7, ran.err
        assert "s3://models/out exists" in ran.err
        assert not [*here.iterdir()]
    assert bucket.names("models", "out") == before
    ran = convert("to", "huggingface", source, "s3://models/out", "--force")
    assert ran.code == 0, ran.err
    assert "s3://models/out: " in ran.out
    assert len(bucket.names("models", "out/model")) == 1
    ran = convert("to", "huggingface", "s3://models/out", "s3://models/out/again", "--force")
    assert ran.code == 7
    assert "are inside each other" in ran.err
    bucket.put_one("models/out/thesis.tex", b"x")
    ran = convert("to", "huggingface", source, "s3://models/out", "--force")
    assert ran.code == 7
    assert "holds what no checkpoint has: thesis.tex" in ran.err
    vitruvian.convert(source, "s3://models/out/deep/sft")
    before = bucket.names("models", "out")
    ran = convert("to", "huggingface", source, "s3://models/out", "--force")
    assert ran.code == 7
    assert "s3://models/out holds another checkpoint: deep/sft\n" in ran.err
    assert bucket.names("models", "out") == before


def test_a_name_that_is_too_long_for_the_folder_of_the_work(bucket, model, here):
    """A key of a bucket may be longer than a name of a file system."""
    with pytest.raises(OutputError, match=r"^OUT is written as s3-models-n+… .* first, which is 8 bytes"):
        vitruvian.convert(model("llama", "bfloat16"), f"s3://models/{243 * 'n'}/o")
    assert not [*here.iterdir()]


def test_a_killed_delivery_resumes_and_shows_nothing(bucket, model, here):
    """Killed at several moments: no config, index or manifest is there before the end, and the bytes are the same."""
    source = model("llama", "bfloat16", num_hidden_layers=4)
    vitruvian.convert(source, here / "local", shard_size=60_000)
    files = len([*(here / "local").glob("*.safetensors")])
    assert files > 5
    argv = ["to", "huggingface", source, "s3://models/out", "--shard-size", "60kB", "--quiet"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    arrived = set[int]()
    for after in (1, files // 2):
        process = subprocess.Popen([sys.executable, "-c", CODE, *map(str, argv)], cwd=here, env=env)
        until = time.monotonic() + 60
        while len(bucket.names("models", "out/")) < after and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        names = bucket.names("models", "out/")
        arrived.add(len(names))
        assert len(names) >= after
        if len(names) < files:
            assert all("safetensors" in name and "index" not in name for name in names)
    sent = sum("PUT" in method for method, path, _ in bucket.log if "model-" in path)
    subprocess.run([sys.executable, "-c", CODE, *map(str, argv)], cwd=here, env=env, check=True, timeout=100)
    held(bucket, here / "local", "models/out")
    sent_again = sum("PUT" in method for method, path, _ in bucket.log if "model-" in path) - sent
    assert sent_again <= files - files // 2 + 2
    assert [path.name for path in here.iterdir()] == ["local"]


def test_what_was_sent_of_a_source_that_was_changed_is_sent_again(bucket, model, here, tmp_path, monkeypatch, convert):
    """Changed in place, with size and time kept, where no sample is."""
    source, send, sent = tmp_path / "src", receivers.InBucket.send, list[str]()
    shutil.copytree(model("llama", "bfloat16"), source)
    monkeypatch.setattr("converters.move.journal.samples_of", lambda paths: ["unchanged"] * len(paths))
    argv = ["to", "huggingface", source, "s3://models/out", "--shard-size", "60kB"]

    def interrupted(self: Any, name: str, path: Path) -> Any:
        sent.append(name)
        if len(sent) > 3:
            raise Interrupted("stopped by a test")
        return send(self, name, path)

    with monkeypatch.context() as patch:
        patch.setattr(receivers.InBucket, "send", interrupted)
        assert convert(*argv).code == 75
    weights, before = source / "model.safetensors", (source / "model.safetensors").stat()
    save_file({key: value + 1 for key, value in load_file(weights).items()}, weights, {"format": "pt"})
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    ran = convert(*argv)
    assert (ran.code, "note: what was sent is sent again" in ran.err) == (0, True), ran.err
    vitruvian.convert(source, here / "local", shard_size=60_000)
    held(bucket, here / "local", "models/out")


@pytest.mark.parametrize("out", ["s3://models/out", "hf://acme/new"])
def test_one_that_was_killed_while_it_cleaned_up_is_run_again(bucket, hub, model, here, monkeypatch, out):
    """OUT is complete and the staging folder half deleted: the same command ends well, and leaves nothing."""
    source, removed, rmtree = model("llama", "bfloat16"), [], shutil.rmtree

    def killed(path: Path, *rest: object, **named: object) -> None:
        if path.name == "out":
            removed.append(path)
            raise KeyboardInterrupt
        rmtree(path, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            vitruvian.convert(source, out)
    assert removed
    assert [path.suffix for path in here.iterdir()] == [".partial"]
    assert vitruvian.convert(source, out).verified
    assert not [*here.iterdir()]
    with pytest.raises(vitruvian.OutputError, match="exists"):
        vitruvian.convert(source, out)


def test_the_hub_gets_what_a_folder_gets(hub, model, here):
    source = model("llama", "bfloat16")
    vitruvian.convert(source, here / "local", shard_size=100_000)
    hub.faults = [
        HubFault("POST .*commit", status=503), HubFault("PUT /lfs", status=503), HubFault("GET .*/resolve/", half=True)
    ]  # fmt: skip
    hub.storage = 1
    done = vitruvian.convert(source, "hf://acme/new", shard_size=100_000)
    assert done.verified
    content = hub.store.content("acme/new")
    del content[".gitattributes"]
    assert content == {path.name: path.read_bytes() for path in (here / "local").iterdir()}
    assert hub.store.repos["acme/new"].private
    assert [*hub.store.repos["acme/new"].refs] == ["main"]
    assert len(hub.store.repos["acme/new"].commits) == 2 + len([*(here / "local").glob("*.safetensors")])
    with pytest.raises(vitruvian.OutputError, match="hf://acme/new exists"):
        vitruvian.convert(source, "hf://acme/new")
    vitruvian.convert(source, "hf://acme/new", force=True)
    assert "model.safetensors" in hub.store.content("acme/new")
    assert not [name for name in hub.store.content("acme/new") if "-of-" in name]
    assert vitruvian.convert("hf://acme/new", "hf://acme/run@megatron", to="megatron", tp=2).digest == done.digest
    assert "latest_checkpointed_iteration.txt" in hub.store.content("acme/run", "megatron")
    assert [*hub.store.content("acme/run")] == [".gitattributes"]


def test_what_arrives_otherwise_is_not_published(bucket, model, here, monkeypatch):
    """A store that alters a byte: verification refuses, and no reader finds a model."""
    send = receivers.InBucket.send

    def altered(self, name, path):
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        return send(self, name, path)

    monkeypatch.setattr(receivers.InBucket, "send", altered)
    with pytest.raises(vitruvian.VerificationError, match="do not read back as written"):
        vitruvian.convert(model("llama", "bfloat16"), "s3://models/out")
    assert bucket.names("models", "out") == []
    assert not [*here.iterdir()]


def test_files_that_share_a_tensor_are_sent_together(model, here):
    from converters.library.conversion import _planned

    plan, request = _planned(model("llama", "bfloat16"), here / "out", "megatron", {"tp": 2, "pp": 2}, None)
    groups = groups_of(plan, plan.target)
    assert sorted(len(group.files) for group in groups) in ([2, 2], [4])
    assert sum(len(group.jobs) for group in groups) == len(plan.jobs)
    assert request.out == here / "out"


def test_a_dozen_faults_change_nothing(bucket, model, here):
    source = model("llama", "bfloat16")
    bucket.put(source, "models/source")
    bucket.faults = [Fault(".", status, 3, chance=0.2) for status in (500, 503, 429, 0, -1)]
    done = vitruvian.convert("s3://models/source", "s3://models/out", shard_size=60_000)
    assert bucket.failed >= 12
    assert done.digest == vitruvian.digest(source).digest
