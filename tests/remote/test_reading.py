"""Checkpoints in S3 and on the Hub: read by ranges, with faults, and refused when they change."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import numpy as np
import pytest

import vitruvian
from converters.remote import retries
from tests.hub.server import Fault as HubFault
from tests.hub.server import Handler
from tests.remote.bucket import Fault

RUNS = {
    "huggingface": {},
    "megatron": {"tp": 2, "pp": 2},
    "torch_dist": {"format": "torch_dist"},
    "fsdp": {"ranks": 2},
}


@pytest.fixture(scope="session")
def runs(model, tmp_path_factory):
    folders = {"huggingface": model("llama", "bfloat16")}
    for name, options in RUNS.items():
        if options:
            folders[name] = tmp_path_factory.mktemp(name) / "run"
            vitruvian.convert(
                folders["huggingface"], folders[name], to="fsdp" if name == "fsdp" else "megatron", **options
            )
    return folders


def publish(hub, folder, name="acme/tiny"):
    """Put a folder on the Hub, weights as LFS objects. Returns the commit."""
    store, tree = hub.store, {}
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        content = path.read_bytes()
        key = str(path.relative_to(folder))
        if path.suffix in (".safetensors", ".pt", ".distcp"):
            oid = hashlib.sha256(content).hexdigest()
            (store.folder / "in").write_bytes(content)
            assert store.keep(oid, [store.folder / "in"])
            tree[key] = store.pointer(oid, len(content))
        else:
            tree[key] = store.put(content)
    if name not in store.repos:
        store.create(name, private=True)
    return store.repos[name].commit("main", "a model", tree)


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


@pytest.mark.parametrize("name", ["huggingface", "megatron", "fsdp"])
def test_a_checkpoint_on_the_hub_is_what_it_is_in_a_folder(runs, hub, convert, tmp_path, name):
    commit = publish(hub, runs[name])
    hub.storage = 1
    ran = convert("to", "huggingface", "hf://acme/tiny", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert f"acme/tiny is read from the Hub, revision {commit}" in ran.err
    assert vitruvian.digest(tmp_path / "out").digest == vitruvian.digest(runs["huggingface"]).digest
    hub.faults = [
        HubFault("GET /cdn", half=True, times=2), HubFault("/cdn|/resolve", status=503, times=3),
        HubFault("GET /api", status=429), HubFault("/resolve", drop_after=0, times=2),
    ]  # fmt: skip
    assert vitruvian.digest("acme/tiny").digest == vitruvian.digest(runs["huggingface"]).digest
    assert not any(fault.times for fault in hub.faults)


def test_a_signed_address_that_expires_is_asked_for_anew(runs, hub):
    publish(hub, runs["megatron"])
    hub.storage = 1
    there = vitruvian.open("acme/tiny")
    signed = hub.storage
    hub.expired = 10_000
    hub.storage = 10_000
    assert len(dict(there.tensors("huggingface"))) > 10
    assert hub.storage > 10_000 > signed


def test_looking_takes_kilobytes(bucket, model, tmp_path):
    """A model of some 8 MB in 3 files: its headers alone are read. A config is read without its weights."""
    folder = model("llama", "bfloat16", hidden_size=256, intermediate_size=1024, num_hidden_layers=3)
    vitruvian.convert(folder, tmp_path / "cut", shard_size=3_000_000)
    files = [*(tmp_path / "cut").glob("*.safetensors")]
    size = sum(path.stat().st_size for path in files)
    assert len(files) >= 3
    assert size > 6_000_000
    bucket.put(tmp_path / "cut", "models/cut")
    opened = vitruvian.open("s3://models/cut")
    assert opened.record["parameters"] == vitruvian.open(folder).record["parameters"]
    assert bucket.read("GET .*safetensors$") <= len(files) * (16 << 10)
    before = bucket.read("GET .*safetensors$")
    assert sum(tensor.nbytes for _, tensor in opened.tensors("huggingface")) > 6_000_000
    assert bucket.read("GET .*safetensors$") - before < 1.5 * size
    fsdp = tmp_path / "fsdp"
    vitruvian.convert(folder, fsdp, to="fsdp")
    (fsdp / "config.json").unlink()
    bucket.log.clear()
    vitruvian.convert(fsdp, tmp_path / "back", config="s3://models/cut")
    assert not bucket.read("GET .*safetensors$")


def test_looking_at_70_billion_parameters_takes_kilobytes(hub, convert, tmp_path, monkeypatch):
    """141 GB in 29 files on the Hub, whose weights are holes: what its answers hold, of every kind, is counted."""
    from tests.bench.make_model import make

    sent, own_send, own_file = Counter(), Handler.send, Handler.send_file

    def counted(self, status, value):
        sent["small"] += len(value if isinstance(value, str) else json.dumps(value))
        own_send(self, status, value)

    def counted_file(self, status, headers, path, first, size):
        sent[path.parent.name] += size if self.command == "GET" else 0
        own_file(self, status, headers, path, first, size)

    monkeypatch.setattr(Handler, "send", counted)
    monkeypatch.setattr(Handler, "send_file", counted_file)
    folder, tree, nbytes = make("70B", tmp_path / "large", sparse=True), {}, 0
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            oid, nbytes = hashlib.sha256(path.name.encode()).hexdigest(), nbytes + path.stat().st_size
            tree[path.name] = hub.store.pointer(oid, path.stat().st_size)
            path.rename(hub.store.lfs(oid))
        else:
            tree[path.name] = hub.store.put(path.read_bytes())
    hub.store.create("acme/large", private=False).commit("main", "a model", tree)
    hub.storage = 1
    ran = convert("inspect", "acme/large", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["parameters"] == 70_553_706_496
    assert nbytes > 141 * 10**9
    assert sum(sent.values()) < 640 << 10, sent
    view = vitruvian.open("acme/large")["huggingface"]
    before = sum(sent.values())
    assert view["model.layers.79.mlp.up_proj.weight"][5:7].shape == (2, 8192)
    assert sum(sent.values()) - before < 128 << 10, sent


def test_one_tensor_takes_its_own_bytes(bucket, tmp_path, model):
    folder = model("llama", "bfloat16", hidden_size=256, intermediate_size=1024, num_hidden_layers=3)
    bucket.put(folder, "models/one")
    view = vitruvian.open("s3://models/one")["huggingface"]
    bucket.log.clear()
    tensor = view["model.layers.1.mlp.down_proj.weight"].numpy()
    own = vitruvian.open(folder)["huggingface"]["model.layers.1.mlp.down_proj.weight"].numpy()
    assert np.array_equal(tensor, own)
    assert bucket.read("GET .*safetensors$") <= tensor.nbytes + (16 << 10)


def test_a_pull_request_is_a_revision(hub, runs):
    publish(hub, runs["huggingface"])
    repo = hub.store.repos["acme/tiny"]
    repo.refs["refs/pr/1"] = repo.refs["main"]
    repo.commit("main", "emptied", {})
    for name in ("acme/tiny@refs/pr/1", "hf://acme/tiny@refs%2Fpr%2F1"):
        assert vitruvian.digest(name).digest == vitruvian.digest(runs["huggingface"]).digest


def test_what_changes_meanwhile_is_refused(runs, bucket, hub):
    bucket.put(runs["huggingface"], "models/run")
    there = vitruvian.open("s3://models/run")
    content = (runs["huggingface"] / "model.safetensors").read_bytes()
    bucket.put_one("models/run/model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        vitruvian.SourceError, match=r"s3://models/run/model.safetensors has changed since it was opened"
    ):
        dict(there.tensors())
    publish(hub, runs["huggingface"])
    there = vitruvian.open("hf://acme/tiny")
    hub.store.repos["acme/tiny"].commit("main", "emptied", {})
    assert len(dict(there.tensors())) > 10  # the commit is what it was, whatever main is now


def test_what_is_refused_says_why(runs, bucket, hub, convert, monkeypatch, tmp_path):
    ran = convert("inspect", "s3://models/nothing")
    assert ran.code == 3
    assert "s3://models/nothing does not exist" in ran.err
    bucket.put(runs["huggingface"], "models/run")
    bucket.faults = [Fault("GET .*config.json", 403, 99)]
    ran = convert("inspect", "s3://models/run")
    assert ran.code == 2
    assert "s3://models/run/config.json may not be used: 403 Forbidden Injected" in ran.err
    assert "AWS_ACCESS_KEY_ID" in ran.err
    monkeypatch.setattr(retries, "TRIES", 3)
    bucket.faults = [Fault("GET .*config.json", 500, 99)]
    ran = convert("inspect", "s3://models/run")
    assert ran.code == 8
    assert "cannot be reached, 3 times: 500" in ran.err
    assert convert("inspect", "hf://acme/none").code == 3
    publish(hub, runs["huggingface"])
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    ran = convert("inspect", "acme/tiny")
    assert ran.code == 2
    assert "does not give hf://acme/tiny to this token (401)" in ran.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = convert("inspect", "hf://acme/tiny")
    assert ran.code == 3
    assert "HF_HUB_OFFLINE is set" in ran.err
    assert convert("inspect", "https://127.0.0.1:1/x").code == 8
