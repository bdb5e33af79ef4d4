"""What can be known of the images without building one: the definition, its variants, their locks, the scripts."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "containers"
DEFINITION = (IMAGES / "vitruvian.def").read_text()
VARIANTS = {path.stem: dict(line.split("=", 1) for line in path.read_text().splitlines())
            for path in sorted((IMAGES / "variants").glob("*.args"))}  # fmt: skip
LOCKS = {path.stem: path.read_text() for path in sorted((IMAGES / "locks").glob("*.txt"))}
SCRIPTS = sorted([*IMAGES.glob("*.sh"), *IMAGES.glob("locks/*.sh"), *Path(__file__).parent.glob("*.sh")])
REQUIREMENT = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?: ; [^\\]+?)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+$", re.MULTILINE
)
PIN = re.compile(r"^([a-z0-9-]+)==([\w.]+)(?: ; python_version >=.*)?$", re.MULTILINE)
TOML = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = TOML["project"]


def sections():
    """The body of each section by its name; what stands before the first is the header."""
    head, *rest = re.split(r"^%", DEFINITION, flags=re.MULTILINE)
    return {"header": head} | {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in rest}


def arguments(variant):
    """What the definition's `{{ NAME }}` become."""
    lines = sections()["arguments"].strip().splitlines()
    return dict(line.strip().split("=", 1) for line in lines) | VARIANTS[variant]


def pinned(name):
    return {match["name"]: match["version"] for match in REQUIREMENT.finditer(LOCKS[name])}


def test_the_definition_has_what_it_needs_and_nothing_that_proot_refuses():
    names = {name.split()[0] for name in sections()}
    assert names >= {"header", "arguments", "labels", "help", "files", "post", "environment", "runscript", "test"}
    assert {"apprun convert", "apprun train", "apprun doctor"} <= set(sections())
    assert not names & {"setup", "pre"}
    assert "post" in sections()  # `%post -c /bin/bash` would go on after an error
    for line in sections()["files"].strip().splitlines():
        source, place = line.split()
        assert (ROOT / source).exists()
        assert place == f"/opt/vitruvian/source/{source}"


def test_what_setuptools_packs_is_copied_into_the_image():
    copied = {line.split()[0] for line in sections()["files"].strip().splitlines()}
    assert {name.rstrip("*") for name in TOML["tool"]["setuptools"]["packages"]["find"]["include"]} <= copied
    assert {PROJECT["readme"], "LICENSE", "pyproject.toml"} <= copied
    assert "VERSION=unknown\n" in sections()["arguments"]  # build.sh says that of pyproject.toml


@pytest.mark.parametrize("variant", ["cpu", "cpu-arm64", "cuda", "rocm", "rocm-laif"])
def test_every_variant_is_defined_and_pinned(variant):
    assert set(VARIANTS) == {"cpu", "cpu-arm64", "cuda", "rocm", "rocm-laif"}
    used = set(re.findall(r"{{ (\w+) }}", DEFINITION))
    values = arguments(variant)
    assert set(values) == used  # one that is not used is an error of apptainer's
    assert values["VARIANT"] == variant
    assert values["LOCK"] in LOCKS
    assert ":latest" not in values["BASE"]
    if values["BOOTSTRAP"] == "docker":
        assert re.search(r":[^/@]+@sha256:[0-9a-f]{64}$", values["BASE"])
    else:
        assert re.search(r"-20\d{6}_\d{6}\.sif$", values["BASE"])  # these images have their date in their name


@pytest.mark.parametrize("name", ["cpu", "cpu-arm64", "cuda", "rocm"])
def test_every_line_of_a_lock_is_a_version_with_its_hashes(name):
    assert set(LOCKS) == {"cpu", "cpu-arm64", "cuda", "rocm"}
    assert not REQUIREMENT.sub("", LOCKS[name]).strip()
    assert len(pinned(name)) > 80


@pytest.mark.parametrize("name", ["cpu", "cpu-arm64", "cuda", "rocm"])
def test_a_lock_has_what_the_project_pins_and_requires(name):
    locked_versions = pinned(name)
    pins = {
        package: version
        for package, version in PIN.findall((ROOT / "constraints.txt").read_text())
        if package != "torch"
    }
    assert {package: locked_versions[package] for package in pins if package in locked_versions}.items() <= pins.items()
    extras = ("transformers", "lora", "zstd", "trackers", "data", "eval", "plot")
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    needs = [Requirement(line) for line in lines]
    here = {need.name for need in needs if need.marker is None or need.marker.evaluate({"python_version": "3.11"})}
    assert here - set(locked_versions) == ({"torch"} if name == "rocm" else set())


def test_each_lock_has_the_torch_of_its_driver():
    assert pinned("cpu")["torch"].endswith("+cpu")
    # The last one that the package index has for ARM64 without CUDA.
    assert pinned("cpu-arm64")["torch"] == "2.10.0"
    for name in ("cpu", "cpu-arm64"):
        assert not [package for package in pinned(name) if package.startswith(("nvidia", "triton", "cuda"))]
    # Leonardo's driver is of CUDA 12; one of CUDA 13 needs 580 or newer.
    assert pinned("cuda")["torch"] == "2.10.0"
    assert pinned("cuda")["nvidia-cuda-runtime-cu12"].startswith("12.")
    assert not [package for package in pinned("cuda") if package.endswith("cu13")]
    # LUMI's is served by the torch of the base image alone.
    assert not [package for package in pinned("rocm") if package.startswith(("torch", "triton", "nvidia", "pytorch"))]


def test_the_build_asks_nothing_of_root_and_touches_nothing_of_the_host():
    code = "\n".join(line for line in (IMAGES / "post.sh").read_text().splitlines() if not line.startswith("#"))
    assert not re.search(r"\b(chown|chgrp|useradd|groupadd|sudo|su|setcap|apt|apt-get|mknod)\b", code)
    assert not re.search(r"(^|[\s\"'=])(/tmp|/var/tmp|/root|/home|\$HOME|~)", code)
    assert not re.search(r"pip install(?!.*(--require-hashes|--no-index))", code)


@pytest.mark.parametrize("script", SCRIPTS, ids=[str(path.relative_to(ROOT)) for path in SCRIPTS])
def test_shellcheck_has_nothing_to_say(script):
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed")
    ran = subprocess.run([program, script], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout


@pytest.fixture
def build(tmp_path):
    """`build(programs, words)`: build.sh where only these programs are installed; they write what they are given."""

    def run(programs, *options):
        for name in programs:
            (tmp_path / name).write_text('#!/bin/sh\necho "$(basename "$0")" "$@"\n')
            (tmp_path / name).chmod(0o755)
        for name in ("bash", "dirname", "basename", "sed", "git"):
            (tmp_path / name).symlink_to(shutil.which(name))
        command = [IMAGES / "build.sh", *options]
        env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
        return subprocess.run(command, check=False, env=env, cwd="/", capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize(("programs", "stdout"), [
    (["apptainer", "singularity"], "apptainer build --fakeroot --build-arg-file containers/variants/rocm-laif.args "),
    (["singularity", "proot"], "singularity build --build-arg-file containers/variants/rocm-laif.args "),
    (["singularity"], "singularity build --fakeroot "),
])  # fmt: skip
def test_build_takes_the_runtime_that_is_there(build, programs, stdout):
    ran = build(programs, "rocm-laif", "--build-arg", "BASE=newer.sif")
    assert ran.stdout.startswith(stdout), ran.stderr
    assert ran.stdout.endswith("--build-arg BASE=newer.sif vitruvian-rocm-laif.sif containers/vitruvian.def\n")


@pytest.mark.parametrize(("programs", "options", "message"), [
    (["apptainer"], ["gpu"], "no variant gpu: cpu, cpu-arm64, cuda, rocm or rocm-laif"),
    (["apptainer"], [], "no variant named: cpu, cpu-arm64, cuda, rocm or rocm-laif"),
    ([], ["cpu"], "neither apptainer nor singularity is installed"),
])  # fmt: skip
def test_build_says_what_it_lacks(build, programs, options, message):
    ran = build(programs, *options)
    assert (ran.returncode, ran.stderr) == (2, f"build.sh: {message}\n")


def test_an_image_that_is_not_what_its_lock_says_is_refused(tmp_path):
    spec = importlib.util.spec_from_file_location("sbom", IMAGES / "sbom.py")
    sbom = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sbom)
    packages = sbom.installed()
    lock = tmp_path / "lock.txt"
    lock.write_text(f"numpy=={packages['numpy'].version} \\\n    --hash=sha256:00\n")
    assert sbom.faults(lock, packages) == []
    lock.write_text("numpy==1.0 \\\n    --hash=sha256:00\nno-such-package==2.0 \\\n    --hash=sha256:00\n")
    assert sbom.faults(lock, packages) == [
        f"numpy is {packages['numpy'].version}, the lock says 1.0", "no-such-package is missing, the lock says 2.0",
    ]  # fmt: skip
    lock.write_text("")
    old = packages | {"torch": packages["numpy"]}  # as a base image that brings another torch
    required = [line for line in packages["vitruvian"].requires if line.startswith("torch") and "transformers" in line]
    assert sbom.faults(lock, old) == [f"vitruvian requires {required[0]}, and there is {packages['numpy'].version}"]
