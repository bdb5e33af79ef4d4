"""A training goes on from a checkpoint of its own that `convert hf2fsdp --with-optimizer` has cut again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from converters.common.manifest import remembered_states
from tests.conftest import Ran
from tests.faults.dcp_tools import save

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
NEAR = 2e-6


def noted(folder: Path, source: Path) -> None:
    """Give a checkpoint what only this trainer has beside it, and make it the newest."""
    for name in (".progress", "config.json"):
        shutil.copy(source / name, folder / name)
    (folder.parent / "latest").write_text(folder.name)


def as_once(folder: Path, out: Path) -> None:
    """The checkpoint as this trainer wrote it before it took torch's names: no settings, and no `state` in between."""
    import torch
    import torch.distributed.checkpoint as dcp

    found = dcp.FileSystemReader(folder).read_metadata()
    tensors = {name: torch.empty(one.size) for name, one in found.state_dict_metadata.items() if hasattr(one, "size")}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    held: dict[str, Any] = {}
    for name, one in tensors.items():
        *path, last = (part for part in found.planner_data[name] if part != "state")
        place = held
        for part in path:
            place = place.setdefault(part, {})
        place[last] = one
    save(out, held)


def test_it_goes_on(settings, run, convert, tmp_path):
    config, states = settings("llama-tied", optim={"weight_decay": 0.1}), []

    def converted(source: Path, out: Path) -> Ran:
        ran = convert("hf2fsdp", source, out, "--with-optimizer", "--ranks", 3)
        assert ran.code == 0, ran.err
        states.append(remembered_states(out))
        return ran

    whole = run(config, save="whole", ranks=2)
    assert whole.code == 0, whole.out
    source = whole.save / "global_step104"
    ran = converted(source, tmp_path / "new/global_step104")
    assert "no rate, betas and weight decay" not in ran.err
    as_once(source, tmp_path / "old/global_step104")
    noted(tmp_path / "old/global_step104", source)
    ran = converted(tmp_path / "old/global_step104", tmp_path / "old-converted")
    assert "no rate, betas and weight decay" in ran.err
    assert states[0] == states[1] != {}
    noted(tmp_path / "new/global_step104", source)
    for place, ranks in (("new", 4), ("old", 1)):
        again = run(config, save=place, ranks=ranks)
        assert again.code == 0, again.out
        for name in ("loss", "grad_norm"):
            assert again.series(name) == pytest.approx(whole.series(name)[4:], abs=NEAR), name
