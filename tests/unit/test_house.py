"""The shape of the house: which room may import which, and what must never be imported on the way."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK = {"formats": 0, "converters": 1, "train": 2}
HEAVY = ("torch", "transformers", "deepspeed", "megatron")
APART = {"meta_model.py"}
"""Programs that a conversion runs in a process of their own, if their framework is installed."""
PUBLISHING = ("tokenizers", "sentencepiece", "jinja2", "huggingface_hub")
"""What only a few rooms may import, and no conversion loads."""
SOURCES = sorted(path for package in RANK for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """First part of every module that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_run_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    for name in imported(path) & RANK.keys():
        assert RANK[name] <= RANK[package], f"{path} imports {name}: train -> converters -> formats"
    assert "tests" not in imported(path)
    assert path.parent.name in {"converters", "commands"} or "converters.commands" not in path.read_text()


@pytest.mark.parametrize("path", [path for path in SOURCES if "train" not in path.parts], ids=lambda path: path.name)
def test_no_framework_on_the_conversion_path(path):
    assert path.name in APART or not imported(path) & set(HEAVY)
    assert not any(f"import {Path(name).stem}" in path.read_text() for name in APART)
    if path.parent.name != "publish":
        assert not imported(path) & set(PUBLISHING)


def test_a_conversion_loads_no_framework(model, tmp_path):
    """Nor does anything that it imports: seen in the interpreter that did the work."""
    code = (
        "import sys\nfrom converters import cli\ntry:\n    cli.main()\nfinally:\n"
        f"    print('LOADED', [name for name in {HEAVY + PUBLISHING!r} if name in sys.modules])"
    )
    words = ["hf2megatron", str(model()), str(tmp_path / "out"), "--tp", "2"]
    ran = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert "LOADED []" in ran.stdout


def test_help_loads_nothing_that_help_does_not_need():
    code = "import sys\nfrom converters import cli\ntry:\n    cli.main()\nfinally:\n    print(*sorted(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    loaded = set(ran.stdout.split())
    assert "click" in loaded
    assert not loaded & {"numpy", "rich", "blake3", "formats.megatron.classic", "converters.move.engine"}


def test_every_package_is_installed():
    """The explicit list in pyproject.toml names every package."""
    listed = (ROOT / "pyproject.toml").read_text().partition("packages = [")[2].partition("]")[0]
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES if path.name == "__init__.py"}
    assert {name.strip(' "\n') for name in listed.split(",") if name.strip()} == packages | {"containers"}


def test_the_table_of_rooms_names_every_file():
    """Whoever opens the repository finds each room by its name. Folders that are one room stand for their files."""
    table = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", " ".join(table)))
    alone = [path for path in SOURCES if path.parent.name in (*RANK, "data") and path.name != "__init__.py"]
    assert {path.name for path in alone} - named == set()
