"""`convert watch --push`: a model goes into a branch of its name; what could not be sent is sent by the next look."""

from __future__ import annotations

import shutil

from tests.hub.conftest import CONVERT, finish, spawn
from tests.hub.server import Fault


def test_what_was_converted_and_not_sent_is_sent_later(hub, env, converted, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(converted, run / "checkpoint-10")
    (run / "checkpoint-10" / "trainer_state.json").write_text("{}")
    hub.faults += [Fault("POST .*/commit/", status=403)]
    argv = ["watch", run, "--out", out, "--push", "acme/m", "--once"]
    first = finish(spawn(CONVERT, *argv, env=env))
    assert (first.code, first.out) == (75, "")
    assert "note: checkpoint-10: " in first.err
    inode = (out / "checkpoint-10").stat().st_ino
    second = finish(spawn(CONVERT, *argv, env=env))
    assert (second.code, second.out.count("/acme/m/commit/")) == (75, 1), second
    assert (out / "checkpoint-10").stat().st_ino == inode
    assert "config.json" in hub.store.content("acme/m", "checkpoint-10")
    assert finish(spawn(CONVERT, *argv, "--idle", "0", env=env)).code == 0
