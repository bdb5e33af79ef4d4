"""Room is asked for before anything is written: bytes and files, of a file system and of Lustre's quotas."""

from __future__ import annotations

import json
import subprocess

import pytest

from converters.common import disk_space, stripes
from tests.models import files

LFS = """#!/bin/sh
[ "$1" = project ] && {{ echo "{project} P $3"; exit; }}
case $3 in -u) echo "{user}" ;; -g) echo "{group}" ;; -p) echo "$5
  {shared}" ;; esac
"""
"""Prints as lfs of Lustre 2.15 does; a path that is long stands on a line of its own."""


@pytest.fixture
def lustre(tmp_path, monkeypatch):
    def answer(**quotas: str) -> list[disk_space.FreeSpace]:
        none = "/l 8 0 0 - 2 0 0 -"
        script = tmp_path / "lfs"
        script.write_text(LFS.format(**{"project": "0", "user": none, "group": none, "shared": none, **quotas}))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(disk_space, "mounted", lambda _: "lustre")
        return [*disk_space.free_spaces(tmp_path)][1:]

    return answer


def test_quotas_of_lustre_count(lustre, tmp_path):
    mine, group = lustre(group="/l 1000 0 3000 - 5* 10 10 6d")
    assert (mine.nbytes, mine.files) == (disk_space.NONE, disk_space.NONE)
    assert (group.nbytes, group.files) == (2000 * 1024, 5)
    with pytest.raises(disk_space.OutputError, match=r"needs 2.0 MB, the quota of group .* has 2.0 MB free"):
        disk_space.require_space(tmp_path, 2000 * 1024 + 1, 1, tmp_path / "out")
    with pytest.raises(disk_space.OutputError, match=r"needs 6 files and folders, the quota of group .* has 5 free"):
        disk_space.require_space(tmp_path, 1, 6, tmp_path / "out")
    *_, project = lustre(project="41", shared="1000* 0 900 - 5 0 7 -")
    assert (project.nbytes, project.files, project.of.split(" on ")[0]) == (0, 2, "the quota of project 41")
    assert lustre(user="", group="no such group", shared="x") == []


@pytest.mark.parametrize("options", [[], ["--no-stripes"]])
def test_an_output_on_lustre_is_striped_before_its_files_are_made(convert, model, tmp_path, monkeypatch, options):
    """`lfs` of a site is called once, with the new folder, in which nothing is yet; the layout is inherited."""
    script, log = tmp_path / "lfs", tmp_path / "said"
    empty = '[ -z "$(ls -A "$last")" ]'
    script.write_text(
        f'#!/bin/sh\n[ "$1" = setstripe ] || exit 1\nfor last; do :; done\n{empty} && echo "$@" >> {log}\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for module in (disk_space, stripes):
        monkeypatch.setattr(module, "mounted", lambda _: "lustre")
    assert convert("hf2megatron", model(), tmp_path / "out", "--tp", 2, *options).code == 0
    called = log.read_text().splitlines() if log.exists() else []
    assert called == ([] if options else [f"setstripe {' '.join(stripes.LAYOUT)} {tmp_path / 'out.partial' / 'out'}"])


def test_the_type_of_a_file_system_is_that_of_the_innermost_mount(tmp_path):
    where = disk_space.mounted(tmp_path)
    assert where
    assert disk_space._plain(r"/a\040b") == "/a b"


@pytest.mark.parametrize(("limit", "message"), [("size=64k", "needs"), ("nr_inodes=9", "files and folders")])
def test_a_small_file_system_is_seen_before_anything_is_written(convert, model, tmp_path, limit, message):
    """As a quota is at a site: bytes or files are too few."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", limit, "tmpfs", place], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        for more in (["-n"], []):
            ran = convert("hf2megatron", model(), place / "out", "--tp", 2, *more)
            assert (ran.code, f"{place} has " in ran.err, message in ran.err) == (7, True, True), ran.err
        ran = convert("submit", "hf2megatron", model(), place / "out", "--tp", 2, "-n")
        assert (ran.code, message in ran.err) == (7, True), ran.err
        assert not [*place.iterdir()]
    finally:
        subprocess.run(["umount", place], check=True)


def test_what_is_said_is_what_is_made(convert, model, tmp_path):
    ran = convert("hf2megatron", model(), tmp_path / "out", "--tp", 2, "-n")
    line = ran.out.partition("room   ")[2].splitlines()[0]
    assert convert("hf2megatron", model(), tmp_path / "out", "--tp", 2).code == 0
    count = len([*(tmp_path / "out").rglob("*")]) + 1
    assert line.split()[-4:] == [str(count + 2), "files", "and", "folders"]  # and OUT.partial with its journal
    assert files(tmp_path / "out")


@pytest.mark.parametrize(
    ("limits", "left"), [(("1000KB", "70"), (900 * 1024, 65)), (("0KB", "0"), (disk_space.NONE, disk_space.NONE))]
)
def test_quotas_of_a_project_at_jsc_count(tmp_path, monkeypatch, limits, left):
    """Of the project whose folder it is, whatever others there are; what is printed otherwise counts for nothing."""
    place = tmp_path / "run"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(disk_space, "mounted", lambda _: "gpfs")
    entry = {"data-usage": "100KB", "data-hard-limit": limits[0], "inode-usage": 5, "inode-hard-limit": limits[1]}
    script = tmp_path / "jutil"

    def prints(text: str) -> list[disk_space.FreeSpace]:
        script.write_text(f"#!/bin/sh\n[ \"$3 $4\" = '-p {tmp_path.parts[3]}' ] && cat <<'END'\n{text}\nEND\n")
        script.chmod(0o755)
        return [*disk_space.free_spaces(place)][1:]

    other = {**entry, "project-dir": "/elsewhere"}
    (quota,) = prints(json.dumps([other, {**entry, "project-dir": str(tmp_path)}]))
    assert (quota.nbytes, quota.files) == left
    assert prints("no such project") == []
    assert prints("[{}]") == []
