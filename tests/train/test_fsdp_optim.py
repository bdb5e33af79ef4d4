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

    metadata = dcp.FileSystemReader(folder).read_metadata()
    entries = metadata.state_dict_metadata.items()
    tensors = {name: torch.empty(entry.size) for name, entry in entries if hasattr(entry, "size")}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *path, last = (part for part in metadata.planner_data[name] if part != "state")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = tensor
    save(out, tree)


def test_it_goes_on(settings, run, convert, tmp_path):
    config, states = settings("llama-tied", optim={"weight_decay": 0.1}), []

    def converted(source: Path, out: Path) -> Ran:
        ran = convert("hf2fsdp", source, out, "--with-optimizer", "--ranks", 3)
        assert ran.code == 0, ran.err
        states.append(remembered_states(out))
        return ran

    reference = run(config, save="whole", ranks=2)
    assert reference.code == 0, reference.out
    source = reference.save / "global_step104"
    ran = converted(source, tmp_path / "new/global_step104")
    assert "no rate, betas and weight decay" not in ran.err
    as_once(source, tmp_path / "old/global_step104")
    noted(tmp_path / "old/global_step104", source)
    ran = converted(tmp_path / "old/global_step104", tmp_path / "old-converted")
    assert "no rate, betas and weight decay" in ran.err
    assert states[0] == states[1] != {}
    noted(tmp_path / "new/global_step104", source)
    for place, ranks in (("new", 4), ("old", 1)):
        resumed = run(config, save=place, ranks=ranks)
        assert resumed.code == 0, resumed.out
        for name in ("loss", "grad_norm"):
            assert resumed.series(name) == pytest.approx(reference.series(name)[4:], abs=NEAR), name
