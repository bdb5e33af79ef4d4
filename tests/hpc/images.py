"""The CPU image, built by a real Apptainer once a session.

An image that is there already is taken by its name: `VITRUVIAN_SIF=vitruvian-cpu.sif pytest tests/hpc/test_image.py`.
Building one takes minutes. It needs root for the base, which is made here of Debian packages: the registries of images
are not reached everywhere. The rest of the build is what a user gets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "containers"
BUILDER = "builder"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
SHARED = Path("/var/tmp")
"""Where the builder, another user, may read and write."""


def prefix() -> list[str]:
    """The words before a command of the ordinary user who builds and runs images."""
    return ["runuser", "-u", BUILDER, "--"] if os.geteuid() == 0 else []


def call(*argv: object, folder: str | Path = "/", **settings: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix(), *map(str, argv)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    return subprocess.run(command, env=env, cwd=folder, check=False, capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A folder of the ordinary user, gone afterwards."""
    if shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed: tests/hpc/install_apptainer.sh")
    ran = call("mktemp", "-d", SHARED / "vitruvian-image-XXXXXX")
    if ran.returncode:
        pytest.skip(f"no user {BUILDER} who could build with apptainer: {ran.stderr.strip()}")
    yield Path(ran.stdout.strip())
    shutil.rmtree(ran.stdout.strip())


@pytest.fixture(scope="session")
def sif(place: Path) -> Path:
    """The CPU image."""
    if "VITRUVIAN_SIF" in os.environ:
        return Path(os.environ["VITRUVIAN_SIF"]).resolve()
    if os.geteuid() or shutil.which("mmdebstrap") is None:
        pytest.skip("a base image is made by root with mmdebstrap: or name an image with VITRUVIAN_SIF")
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    folders = [name for name in wheels.split() if Path(name).is_dir()]
    base = place / "base.sqsh"
    ran = subprocess.run([HERE / "make_base.sh", base, *folders], check=False, capture_output=True, text=True,
                          timeout=600)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    # What pip is told on this machine: where wheels lie, and whom to trust.
    pip = f"--find-links {wheels}" if wheels else "--extra-index-url https://download.pytorch.org/whl/cpu"
    binds = [word for name in (CERTIFICATES, *folders) for word in ("--bind", f"{name}:{name}:ro")]
    out = place / "vitruvian-cpu.sif"
    built = call(
        IMAGES / "build.sh", "cpu", *binds, "--build-arg", "BOOTSTRAP=localimage", "--build-arg", f"BASE={base}",
        "--build-arg", f"PIP_ARGS={pip}", "--mksquashfs-args", "-comp zstd -Xcompression-level 3",
        OUT=str(out), APPTAINER_TMPDIR=str(place), APPTAINER_CACHEDIR=str(place / "cache"),
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return out
