"""Fixtures: an S3 server and a Hub on loopback, both with faults, and what they were asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from converters.remote import path, retries
from tests.hub.server import TOKEN, Hub
from tests.remote.bucket import Server


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """No long pauses, and stores that nobody has seen yet."""
    monkeypatch.setattr(retries, "FIRST", 0.002)
    monkeypatch.setattr(path, "MOUNTS", {})


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture
def bucket(server, monkeypatch) -> Server:
    """The server with one empty bucket, and the variables that lead to it."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    server.reset("models")
    return server


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A Hub that this process talks to."""
    from huggingface_hub import constants

    with Hub(tmp_path / "hub") as running:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        for name, value in {
            "HF_HUB_OFFLINE": False, "ENDPOINT": running.endpoint, "HF_HUB_DISABLE_XET": True,
            "HUGGINGFACE_CO_URL_TEMPLATE": running.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running
    assert not running.server.broken, running.server.broken
