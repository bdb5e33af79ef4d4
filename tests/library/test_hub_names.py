"""ORG/NAME and hf:// where a folder is asked for: local folders, mirrors of a site, the cache of the Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir

import vitruvian

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("name", ["s3", "https", "hf"])
def test_a_folder_may_be_called_like_a_scheme(model, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    vitruvian.convert(model("llama"), name, to="huggingface")
    assert vitruvian.verify(name, model("llama")).equal
    assert (tmp_path / name / "model.safetensors").is_file()


@pytest.fixture
def cache(model, tmp_path, monkeypatch) -> Path:
    """The Hub's cache with acme/tiny in it, its files links to blobs, as huggingface_hub lays it out."""
    home = tmp_path / "home"
    monkeypatch.setenv("HF_HOME", str(home))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "VITRUVIAN_MIRRORS"):
        monkeypatch.delenv(name, raising=False)
    place = home / "hub" / "models--acme--tiny"
    (place / "blobs").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    for name in ("v2", "refs/pr/1", "pr/1", "feature/x"):
        (place / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "refs" / name).write_text(COMMIT)
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model("llama", "bfloat16").iterdir())):
        shutil.copy(path, place / "blobs" / f"{number:040d}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040d}")
    assert {repo.repo_id for repo in scan_cache_dir(home / "hub").repos} == {"acme/tiny"}  # it is what the Hub's is
    return snapshot


@pytest.mark.parametrize("name", ["acme/tiny", "hf://acme/tiny", "acme/tiny@v2", f"hf://acme/tiny@{COMMIT}"])
def test_a_model_in_the_cache_is_found_by_its_name(cache, model, convert, name):
    assert vitruvian.digest(name).digest == vitruvian.digest(model("llama", "bfloat16")).digest
    notes = json.loads(convert("inspect", name, "--json").out)["notes"]
    assert f"acme/tiny is taken from the Hub's cache, revision {COMMIT}" in notes


@pytest.mark.parametrize("revision", ["refs/pr/1", "refs%2Fpr%2F1", "pr%2f1", "feature%2Fx"])
def test_a_revision_with_a_slash(cache, revision):
    for name in (f"acme/tiny@{revision}", f"hf://acme/tiny@{revision}"):
        assert vitruvian.open(name).family == "llama"


def test_a_revision_beside_a_folder_of_the_name(cache, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model("gpt2"), tmp_path / "acme/tiny")
    assert [vitruvian.open(name).family for name in ("acme/tiny", "acme/tiny@main")] == ["gpt2", "llama"]


@pytest.mark.parametrize("name", ["acme/tiny", "hf://acme/tiny", "acme/tiny@01234567"])
def test_a_revision_that_the_cache_does_not_hold(cache, convert, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (cache.parents[1] / "refs/main").unlink()
    ran = convert("inspect", name)
    assert ran.code == 3
    assert f"it holds {COMMIT}" in ran.err
    assert f"hint: name one: acme/tiny@{COMMIT}" in ran.err


def test_a_config_by_its_name(cache, model, convert, tmp_path):
    source = tmp_path / "fsdp"
    assert convert("hf2fsdp", model("llama", "bfloat16"), source).code == 0
    (source / "config.json").unlink()
    assert convert("fsdp2hf", source, tmp_path / "out").code == 3
    ran = convert("fsdp2hf", source, tmp_path / "out", "--config", "acme/tiny")
    assert ran.code == 0, ran.err
    assert f"note: --config acme/tiny is taken from the Hub's cache, revision {COMMIT}" in ran.err
    assert vitruvian.verify(tmp_path / "out", "acme/tiny").equal


def test_a_mirror_goes_before_the_cache_and_a_folder_before_both(cache, model, convert, tmp_path, monkeypatch):
    mirror = tmp_path / "mirror"
    shutil.copytree(model("qwen2-tied"), mirror / "acme" / "tiny")
    monkeypatch.setenv("VITRUVIAN_MIRRORS", f"{tmp_path / 'nothing'}:{mirror}")
    ran = convert("inspect", "acme/tiny")
    assert f"acme/tiny is taken from the mirror {mirror / 'acme' / 'tiny'}" in ran.out
    assert vitruvian.open("acme/tiny").family == "qwen2"
    assert vitruvian.open(f"acme/tiny@{COMMIT}").family == "llama"  # a mirror says nothing of revisions
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model("gpt2"), tmp_path / "acme" / "tiny")
    assert vitruvian.open("acme/tiny").family == "gpt2"
    assert "taken from" not in convert("inspect", "acme/tiny").out


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("hf://acme/other", 3, "acme/other is not a folder here, and not in"),
        ("hf://acme/tiny@v3", 3, "holds no revision v3"),
        ("hf://acme", 3, "hf://acme is not a valid name on the Hub"),
        ("hf://acme/tiny@../../x", 3, "is no"),
        ("hf://acme/tiny@..%2F..%2Fx", 3, "is not a valid name on the Hub"),
        ("acme/other", 3, "acme/other does not exist"),
    ],
)
def test_what_is_nowhere(cache, convert, name, code, message):
    ran = convert("inspect", name)
    assert ran.code == code
    assert message in ran.err
    assert "hint:" in ran.err
