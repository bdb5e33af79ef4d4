"""Files in the Hub's cache have hashes for names: `convert verify` compares them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.faults.dcp_tools import refused
from tests.hub.conftest import finish, spawn
from tests.hub.store import git_hash

PULLED = """
import sys
from huggingface_hub import snapshot_download
print(snapshot_download(sys.argv[1], ignore_patterns=["vitruvian.json"]))
"""


def flipped(path: Path) -> bytes:
    """Change a byte in the middle of a file. Returns what it was."""
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    return content


def test_what_was_downloaded_is_what_the_hub_has(push, env, converted, convert, monkeypatch):
    """Weights by their SHA-256, other files by the SHA-1 of git."""
    assert push(converted, "acme/m").code == 0
    ran = finish(spawn(PULLED, "acme/m", env=env))
    assert ran.code == 0, ran.err
    pulled = Path(ran.out.splitlines()[-1])
    count = len([*pulled.iterdir()])
    weights = next(pulled.glob("*.safetensors"))
    ran = convert("verify", pulled)
    assert (ran.code, f"{count} files, each with the hash that the Hub has of it" in ran.out) == (0, True), ran.err
    monkeypatch.setenv("HF_HUB_CACHE", str(pulled.parents[2]))
    named = convert("verify", "acme/m")
    found = f"note: acme/m is taken from the Hub's cache, revision {pulled.name}"
    assert (named.code, named.out, found in named.err) == (0, ran.out, True), named.err
    assert [len(path.readlink().name) for path in (pulled / "config.json", weights)] == [40, 64]
    for path in (pulled / "config.json", weights):
        blob = path.resolve()
        content = flipped(blob)
        what = f"1 of {count} files of {pulled} are not what the Hub has, by the hashes in their names: {blob}"
        refused(convert("verify", pulled), 6, what, "download the model again")
        refused(convert("verify", "acme/m"), 6, what, "download the model again")
        ran = convert("verify", pulled, "--json")
        facts = json.loads(ran.out)
        assert (ran.code, facts["equal"], facts["changed"], facts["blobs"]) == (6, False, [str(blob)], count)
        blob.write_bytes(content)
    store = pulled.parent / "store"  # as huggingface_hub shares blobs between caches, by their Xet hash
    blob = weights.resolve()
    blob.rename(store)
    blob.symlink_to(store)
    assert convert("verify", pulled).code == 0
    flipped(store)
    refused(convert("verify", pulled), 6, "are not what the Hub has", blob.name)


@pytest.mark.parametrize("beside", ["a blob", "an optimizer"])
def test_weights_without_a_checksum_are_not_called_checked(model, convert, tmp_path, beside):
    """Beside files that have one."""
    folder, config = shutil.copytree(model("llama"), tmp_path / "models--a--b/snapshots/c"), b"{}"
    if beside == "a blob":
        (tmp_path / "models--a--b/blobs").mkdir()
        blob = tmp_path / "models--a--b/blobs" / git_hash(config)
        blob.write_bytes(config)
        (folder / "generation_config.json").unlink()
        (folder / "generation_config.json").symlink_to(f"../../blobs/{blob.name}")
    else:
        torch.save({"state": torch.ones(3)}, folder / "optimizer.pt")
    what = f"model.safetensors of {folder} has no checksum, and what was checked is without a fault"
    refused(convert("verify", folder), 3, what, f"convert verify {folder} SRC")
    ran = convert("verify", folder, "--json")
    assert (ran.code, json.loads(ran.out)["equal"], json.loads(ran.out)["unchecked"]) == (
        3,
        False,
        ["model.safetensors"],
    )
