"""A file of one save in the folder of another, of equal size: a half-finished copy. Each file by itself is sound."""

from __future__ import annotations

import json
import re
import shutil
from zlib import crc32

import pytest

pytest.importorskip("torch")

from formats.errors import SourceError
from formats.torch_files import saves
from tests.faults.dcp_tools import refused
from tests.train.test_deepspeed import zero
from train.run.checkpoint import Progress, Saver
from train.settings.config import Save

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASES = {
    "fsdp 2": ([], 2, "__1_0.distcp", "fsdp2hf"),
    "transformers 1": (["--engine", "transformers"], 1, "__0_0.distcp", "fsdp2hf"),
    "deepspeed 3": (zero(3), 2, "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero2hf"),
}
"""Engine, and ranks or stage: options, ranks, a file, and the command that reads its checkpoints."""


@pytest.mark.parametrize("case", CASES)
def test_a_mixture_is_refused_by_all_that_read_it(settings, run, convert, tmp_path, case):
    options, ranks, name, command = CASES[case]
    config = settings(save={"every": 1})
    stopped = run(config, "--steps.exit_interval", 2, *options, ranks=ranks)
    assert stopped.code == 75, stopped.out
    older, newest = stopped.save / "global_step101", stopped.save / "global_step102"
    written = {path.name for path in newest.iterdir() if path.is_file()}
    editable = {"tokenizer_config.json", "tokenizer.model", "chat_template.jinja", "generation_config.json"}
    assert saves.recorded(newest).keys() == written - editable - {saves.RECORD}
    assert {"config.json", ".start", ".progress"} <= saves.recorded(newest).keys()
    assert convert("verify", newest).code == 0
    assert convert(command, newest, tmp_path / "sound", "-n").code == 0
    config_text = (newest / "config.json").read_text()
    (newest / "config.json").write_text(config_text.replace("10000.0", "20000.0"))
    edited = convert(command, newest, tmp_path / "edited")
    assert (edited.code, "config.json is not of this step" in edited.err) == (3, True), edited.err
    (newest / "config.json").write_text(config_text)
    name = next(path.name for path in newest.glob(f"*{name}"))
    assert (older / name).stat().st_size == (newest / name).stat().st_size
    shutil.copy(older / name, newest / name)

    refused_run = run(config, *options, ranks=ranks)
    assert refused_run.code == 3, refused_run.out
    assert refused_run.out.count("error: ") == 1, refused_run.out
    assert f"{newest} is a mixture of different saves: {name} is not of this step: " in refused_run.out
    assert f"rsync -rc SOURCE/global_step102/ {newest}/" in refused_run.out
    for tried in ([command, newest, tmp_path / "out"], ["inspect", newest], ["digest", newest]):
        ran = convert(*tried)
        assert ran.code == 3, ran.err
        assert "different saves" in ran.err
        assert name in ran.err
    assert not (tmp_path / "out").exists()
    refused(convert("verify", newest), 6, "a mixture of different saves", newest / name)

    (newest / saves.RECORD).unlink()
    if command == "zero2hf":  # the files themselves have steps
        refused(convert(command, newest, tmp_path / "out"), 3, name, "is of step 1.0", "files of different saves")
        return
    resumed = run(config, "--steps.exit_interval", 3, *options, ranks=ranks)  # as of a version that left no record
    assert resumed.code == 75, resumed.out
    assert f"note       {newest} has no .files: nothing proves that its files are of one save" in resumed.out


SMALL = {"config.json": b"{}", "adapter_config.json": b"{}", ".start": b"{}"}
EDITABLE = {"tokenizer.json": b"{}", "chat_template.jinja": b"", "generation_config.json": b"{}"}


def test_small_files_belong_to_the_save(tmp_path):
    """One that changes what the weights compute is neither edited nor, where that would say something else, deleted."""
    progress = Progress(1, 0, 8, 1, "rows", 0, 8)
    (tmp_path / f"{progress.name}.partial").mkdir()
    Saver(Save(path=tmp_path), SMALL | EDITABLE, None)._publish(progress, {})
    folder = tmp_path / progress.name
    assert saves.recorded(folder).keys() == {*SMALL, ".progress"}
    for name in EDITABLE:
        (folder / name).write_bytes(b"edited")
    saves.require_one_save(folder)
    for name in (*SMALL, ".progress"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(b" " * len(content))
        with pytest.raises(SourceError, match=f"{re.escape(name)} is not of this step"):
            saves.require_one_save(folder)
        (folder / name).write_bytes(content)
    for name in saves.REQUIRED:
        (folder / name).rename(folder / "kept")
        with pytest.raises(SourceError, match=rf"{re.escape(name)} is not there, and .*\.files lists it"):
            saves.require_one_save(folder)
        (folder / "kept").rename(folder / name)
    saves.require_one_save(folder)


def test_evaluation_and_merged_adapters(settings, run, forks, data, tmp_path):
    """They read the pieces themselves, without the converter."""
    from train.run.export import read_adapters

    config = settings(save={"every": 1}, data={"validation": {"one": str(data)}})
    for save, lora in (("whole", []), ("lora", ["--lora.rank", 4])):
        stopped = run(config, "--steps.exit_interval", 2, *lora, save=save, ranks=2)
        assert stopped.code == 75, stopped.out
        shutil.copy(stopped.save / "global_step101/__0_0.distcp", stopped.save / "global_step102/__0_0.distcp")
    code, out = forks(["eval", str(tmp_path / "whole"), "--checkpoint", "102"], 2)
    assert code == 3, out
    assert "__0_0.distcp is not of this step" in out
    assert len(read_adapters(tmp_path / "lora/global_step101"))
    with pytest.raises(SourceError, match=r"__0_0\.distcp is not of this step"):
        read_adapters(tmp_path / "lora/global_step102")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"files": 1}', '{"files": {"a": 1}}', '{"files": {"a": {"size": "1", "crc32": "00000000"}}}',
     '{"files": {"a": {"size": 1, "crc32": "0"}}}', "[" * 100_000],
)  # fmt: skip
def test_a_record_that_is_none(tmp_path, text):
    (tmp_path / ".files").write_text(text)
    with pytest.raises(SourceError, match=r"\.files is no record of the files of a checkpoint"):
        saves.recorded(tmp_path)


def test_what_the_record_of_a_file_is_made_of(tmp_path):
    """Of archives the directories, of others every byte. It says nothing of further files, nor of missing ones."""
    import torch

    for name, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save({"a": torch.full((100_000,), value)}, tmp_path / name)
    (tmp_path / ".metadata").write_bytes(b"metadata")
    paths = sorted(tmp_path.iterdir())
    (tmp_path / ".files").write_bytes(saves.packed(saves.entries_of(paths)))
    assert json.loads((tmp_path / ".files").read_bytes())["files"][".metadata"] == {
        "size": 8,
        "crc32": f"{crc32(b'metadata'):08x}",
    }
    record = saves.recorded(tmp_path)
    assert saves.differing(record, paths) == []
    shutil.copy(tmp_path / "a.pt", tmp_path / "b.pt")
    (tmp_path / ".metadata").write_bytes(b"Metadata")
    (tmp_path / "c.pt").write_bytes(b"")
    assert saves.differing(record, sorted(tmp_path.iterdir())) == [".metadata", "b.pt"]
    (tmp_path / ".metadata").write_bytes(b"metadata")
    (tmp_path / "b.pt").unlink()
    saves.require_one_save(tmp_path)
