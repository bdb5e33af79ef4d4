"""The converter on ARM64, emulated by qemu: the bytes of every output are those of this machine.

A Debian of arm64 is unpacked, and none of its scripts run; packages are the wheels of the image `cpu-arm64`, by the
hashes of its lock. Only the conversions are tried: neither torch nor the image.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.models import files

pytestmark = [pytest.mark.hpc, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
QEMU = "qemu-aarch64-static"
DEBIAN = "python3-minimal,libpython3-stdlib,libstdc++6,zlib1g"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
PATH = (
    ("hf2megatron", "base", "run", "--tp", "2", "--pp", "2"),
    ("reshard", "run", "run4", "--tp", "4"),
    ("megatron2hf", "run4", "model"),
    ("hf2neox", "base", "neox", "--tp", "2", "--dtype", "fp32"),
    ("hf2fsdp", "neox", "fsdp", "--ranks", "3", "--dtype", "bf16"),
    ("fsdp2hf", "fsdp", "again", "--config", "base"),
)
"""The demo's path, and the other formats and casts."""


def locked() -> str:
    """What a conversion needs of the lock of `cpu-arm64`, with hashes."""
    blocks = re.split(r"^(?=\S)", (ROOT / "containers/locks/cpu-arm64.txt").read_text(), flags=re.MULTILINE)
    block_of = {canonicalize_name(block.partition("==")[0]): block for block in blocks if block}
    place = {"extra": "", "python_version": "3.11", "python_full_version": "3.11.2", "platform_machine": "aarch64"}
    wanted_names, todo = set[str](), ["vitruvian"]
    while todo:
        needs = [Requirement(line) for line in requires(todo.pop()) or ()]
        names = {canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate(place)}
        todo += names - wanted_names
        wanted_names |= names
    return "".join(block_of[name] for name in sorted(wanted_names))


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A folder with a Debian of arm64, and one with the packages."""
    for name in (QEMU, "mmdebstrap"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed: apt-get install qemu-user-static mmdebstrap")
    root, wheels = tmp_path_factory.mktemp("arm64") / "root", tmp_path_factory.mktemp("wheels")
    options = ["--quiet", "--variant=extract", "--architectures=arm64", f"--include={DEBIAN}"]
    unpacked = subprocess.run(
        ["mmdebstrap", *options, "bookworm", root], capture_output=True, text=True, timeout=300, check=False
    )
    if unpacked.returncode:
        pytest.skip(f"the archive has no arm64 here: {unpacked.stderr[-300:]}")
    (root.parent / "lock").write_text(locked())
    tags = [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", wheels, *tags,
         "--only-binary=:all:", "--python-version", "3.11", "--no-deps", "--require-hashes",
         "--requirement", root.parent / "lock"],
        timeout=600, check=True,
    )  # fmt: skip
    return root, wheels


def test_the_bytes_are_those_of_this_machine(machine, model, tmp_path):
    root, wheels = machine
    emulated = [QEMU, "-L", root, root / "usr/bin/python3.11"]
    paths = {"here": ([sys.executable], [ROOT]), "arm64": (emulated, [ROOT, wheels])}
    for name, (python, path) in paths.items():
        (tmp_path / name).mkdir()
        shutil.copytree(model("llama", "bfloat16"), tmp_path / name / "base")
        env = os.environ | {"PYTHONPATH": ":".join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
        architecture = subprocess.run(
            [*python, "-c", "import platform; print(platform.machine())"], env=env, capture_output=True, text=True,
            timeout=60, check=True,
        ).stdout  # fmt: skip
        assert (architecture == "aarch64\n") == (name == "arm64")
        for argv in PATH:
            ran = subprocess.run(
                [*python, "-m", "vitruvian", "convert", *argv], cwd=tmp_path / name, env=env, capture_output=True,
                text=True, timeout=400, check=False,
            )  # fmt: skip
            assert ran.returncode == 0, ran.stderr
    for argv in PATH:
        assert files(tmp_path / "arm64" / argv[2]) == files(tmp_path / "here" / argv[2]), argv
