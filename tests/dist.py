"""`make dist`: wheel and sdist, checked; the wheel installed alone on each Python from 3.10 to 3.13 that is here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tests/golden/megatron_llm/llama2/hf"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
INSIDE = ("vitruvian/py.typed", "formats/py.typed", "converters/py.typed", "train/py.typed", "containers/run",
          "converters/commands/pages/plan.html", "converters/assets/templates/chatml.jinja")  # fmt: skip
"""What is no module, and has to be in the wheel."""


def run(*arguments: object, cwd: str | None = None) -> str:
    """Run a command; its failure is ours."""
    argv = list(map(str, arguments))
    sys.stdout.write(f"$ {' '.join(argv)}\n")
    sys.stdout.flush()
    ran = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=cwd)
    if ran.returncode:
        sys.exit(f"{ran.stdout}{ran.stderr}\n{argv[0]} exits with {ran.returncode}")
    return ran.stdout


def found(version: str) -> Path | None:
    """An interpreter of a version on this machine."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    named = shutil.which(f"python{version}")
    for python in [*([Path(named)] if named else []), *pyenv]:
        if subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode == 0:
            return python
    return None


def build() -> Path:
    """Build both, the wheel from the sdist, and check what they say.

    Returns:
        The wheel.
    """
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", dist, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    lacking = [name for name in INSIDE if name not in names]
    foreign = [name for name in names if name.startswith(("tests/", "docs/", "examples/"))]
    if lacking or foreign:
        sys.exit(f"{wheel.name} lacks {lacking}, and has {foreign[:5]}")
    return wheel


def tried(wheel: Path, python: Path) -> None:
    """Install the wheel and nothing else, and convert a model there and back in a folder that is not ours."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", f"{folder}/venv")
        bin_ = Path(folder) / "venv/bin"
        run(bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        run(bin_ / "python", "-m", "pip", "check", "--disable-pip-version-check")
        for argv in (
            ["vitruvian", "--version"], ["convert", "formats"], ["train", "--help"],
            ["convert", "to", "megatron", MODEL, "run", "--tp", "2"],
            ["vitruvian", "convert", "to", "hf", "run", "back"],
            ["convert", "verify", "back", MODEL], ["convert", "plan", MODEL, "--to", "fsdp", "--html", "plan.html"],
        ):  # fmt: skip
            run(bin_ / str(argv[0]), *argv[1:], cwd=folder)


def typed(wheel: Path, python: Path) -> None:
    """What mypy and pyright say of a program that uses the installed wheel is what its comments expect."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", f"{folder}/venv")
        bin_ = Path(folder) / "venv/bin"
        run(bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--constraint", ROOT / "constraints.txt", wheel, "mypy", "pyright")  # fmt: skip
        shutil.copy(ROOT / "tests/library/typed_use.py", folder)
        run(bin_ / "mypy", "--strict", "typed_use.py", cwd=folder)
        run(bin_ / "pyright", "--pythonpath", bin_ / "python", "typed_use.py", cwd=folder)


def main() -> None:
    """Build, check, install."""
    wheel = build()
    pythons = {version: path for version in PYTHONS if (path := found(version))}
    for version, python in pythons.items():
        tried(wheel, python)
        sys.stdout.write(f"{wheel.name} is sound on Python {version}\n")
    if not pythons:
        sys.exit("there is no Python from 3.10 to 3.13")
    typed(wheel, pythons[max(pythons, key=PYTHONS.index)])
    sys.stdout.write(f"{wheel.name} has types for mypy and pyright\n")


if __name__ == "__main__":
    main()
