"""The scripts of every site as there: partitions and limits, no internet, its storage with a quota, in the image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hpc.conftest import Lab
from tests.models import files
from tests.train.conftest import ROOT

pytestmark = [pytest.mark.hpc, pytest.mark.timeout(600)]
PARTITIONS = {
    "alps": "normal", "jupiter": "booster", "juwels": "batch", "leonardo": "lrd_all_serial", "lumi": "small",
    "marenostrum5": "gpp", "snellius": "rome",
}  # fmt: skip
"""Where a small conversion goes."""
OF_A_JOB = 4
"""What a job leaves besides: slurm/, its script, its log, and job_log.txt."""
CORES = ("--sbatch", "cpus-per-task=16")
"""Of 64 that a node has here; sites ask for up to 72."""
CONVERSION = ("hf2megatron", "base", "run", "--tp", 2)
PROBE = "import os, socket; print(os.environ.get('HF_HUB_OFFLINE')); socket.create_connection(('1.1.1.1', 80), 20)"


@pytest.fixture
def storage() -> Iterator[Callable[[str], Path]]:
    """`storage(site)`: a folder on a small file system in the place of the site's; and all else that it binds."""
    created: list[Path] = []
    mounted: list[Path] = []

    def make(site: str) -> Path:
        binds = re.search("^SITE_BIND='(.*)'$", (ROOT / f"containers/sites/{site}.sh").read_text(), re.MULTILINE)
        assert binds is not None
        places = [Path(name) for name in binds[1].split(",")]
        for place in (place for place in places if not place.exists()):
            place.mkdir()
            created.append(place)
        assert places[0] in created, "a file system of this machine is left alone"
        ran = subprocess.run(["mount", "-t", "tmpfs", "none", places[0]], capture_output=True, text=True, check=False)
        if ran.returncode:
            pytest.skip(f"no file system can be mounted here: {ran.stderr.strip()}")
        mounted.append(places[0])
        work = places[0] / "a project"
        work.mkdir()
        return work

    yield make
    os.chdir("/")
    for place in mounted:
        subprocess.run(["umount", "--lazy", place], check=True)  # a job of a test that failed may be in it
    for place in created:
        place.rmdir()


def allow(work: Path, nbytes: int, count: int) -> None:
    """Set the quota of a storage: room for so many further bytes and files."""
    usage = os.statvfs(work)
    size = usage.f_frsize * (usage.f_blocks - usage.f_bfree) + nbytes
    inodes = usage.f_files - usage.f_ffree + count
    subprocess.run(["mount", "-o", f"remount,size={size},nr_inodes={inodes}", work.parent], check=True)


def test_a_conversion_at_each_site(queue: Lab, sif, model, convert, storage, monkeypatch, tmp_path):
    """All at once: refused where the quota is one file short, or over the limit of time; then run."""
    for name, value in queue.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")  # of jobs: what runs without the image is not found
    jobs, works = {}, {"local": tmp_path}
    for site in ("local", *PARTITIONS):
        if site != "local":
            works[site] = storage(site)
        monkeypatch.chdir(works[site])
        shutil.copytree(model(), "base")
        argv = ["submit", "--site", site, *CORES, *(["--image", sif] if site != "local" else [])]
        if site != "local":
            needs = json.loads(convert(*CONVERSION, "-n", "--json").out)["target"]["needs"]
            allow(works[site], needs["bytes"] + 2**20, needs["files"] - 1)
            ran = convert(*argv, *CONVERSION)
            assert (ran.code, "files and folders" in ran.err) == (7, True), ran.err
            allow(works[site], needs["bytes"] + 2**20, needs["files"] + OF_A_JOB)
        ran = convert(*argv, "--time", "6-00:00:00", *CONVERSION)
        assert (ran.code, "are more than a partition of" in ran.err) == (5, True), (site, ran)
        ran = convert(*argv, "--account", "P", *CONVERSION)
        assert ran.code == 0, ran.err
        jobs[site] = ran.out.split()[-1]
    for site, job in jobs.items():
        facts, work = queue.wait(job), works[site]
        assert facts["JobState"] == "COMPLETED", (site, [path.read_text() for path in work.glob("slurm/*.out")])
        assert facts["Partition"] == PARTITIONS.get(site, "debug")
        assert facts["Account"].lower() == "p"
        assert files(work / "run") == files(tmp_path / "run"), site
        if site != "local":
            assert os.statvfs(work).f_ffree == 2, "OUT.partial and its journal are gone, all else was needed"


def test_a_job_has_no_internet(queue: Lab, sif, storage, tmp_path):
    """And is told so where the site's nodes have none."""
    start, sites = f"{ROOT}/containers/run --image {sif} --site", ("jupiter", "lumi")
    runs = [
        f'{start} {site} python3 -c "{PROBE}" 2>&1 | grep -E "^(1|None|OSError)"' for site in sites if storage(site)
    ]
    (tmp_path / "job").write_text("\n".join(["#!/bin/bash", "unset HF_HUB_OFFLINE", *runs]))
    queue.call("sbatch", "--wait", "--partition", "booster", "--output", tmp_path / "log", tmp_path / "job")
    unreachable = "OSError: [Errno 101] Network is unreachable"
    assert (tmp_path / "log").read_text().splitlines() == ["1", unreachable, "None", unreachable]


def test_what_a_site_refuses_is_said(queue: Lab, model, convert, monkeypatch, tmp_path):
    """An account that nobody has, and memory where it comes with cores; nothing is noted as submitted."""
    for name, value in queue.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model(), "base")
    for options, message in (
        (("--site", "lumi", "--account", "nobody"), "Invalid account"),
        (("--site", "local", "--sbatch", "qos=gp_ehpc"), "--mem is not allowed"),
    ):
        ran = convert("submit", *options, *CONVERSION)
        assert (ran.code, message in ran.err) == (2, True), ran.err
    assert not (tmp_path / "slurm/job_log.txt").exists()
