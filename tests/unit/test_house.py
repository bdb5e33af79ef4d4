"""The shape of the house: which room may import which, and what must never be imported on the way."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK = {"formats": 0, "converters": 1, "train": 2}
HEAVY = ("torch", "transformers", "deepspeed", "megatron")
APART = {"meta_model.py", "tensor_origins.py"}
"""Programs that a conversion runs in a process of their own, if their framework is installed."""
PUBLISHING = ("tokenizers", "sentencepiece", "jinja2", "huggingface_hub", "obstore")
"""What only a few rooms may import, and no conversion loads."""
NETWORK = ("httpx", "httpx2", "requests", "converters.remote", "converters.delivery")
"""What no conversion between folders loads."""
HANDED = {
    "torch_tensor.py",
    "into_model.py",
    "trainer_callback.py",
    "axolotl_plugin.py",
    "serving.py",
    "vllm_loader.py",
    "sglang_loader.py",
}
"""What the library hands to torch, transformers and servers: nothing on the way of a conversion imports it."""
DRAFTED = {ROOT / "converters/draft" / name for name in ("computed.py", "judge.py", "probes.py")}
"""What asks transformers of a family without a table: a command of its own, which converts nothing of the user's."""
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
    in_commands = path.parent.name == "converters" or "commands" in path.parts
    assert in_commands or "converters.commands" not in path.read_text()


@pytest.mark.parametrize("path", [path for path in SOURCES if "train" not in path.parts], ids=lambda path: path.name)
def test_no_framework_on_the_conversion_path(path):
    text = path.read_text()
    if path not in DRAFTED:
        assert path.name in APART | HANDED or not imported(path) & set(HEAVY)
        assert not any(f"import {Path(name).stem}" in text for name in APART)
    assert "converters.draft" not in text or path.parent.name == "draft" or path.name == "family.py"
    if path.parent.name not in {"assets", "hub", "remote", "delivery"}:
        assert not imported(path) & set(PUBLISHING)


def test_a_conversion_loads_no_framework(model, tmp_path):
    """Nor does anything that it imports: seen in the interpreter that did the work."""
    code = (
        "import sys\nfrom converters import cli\ntry:\n    cli.main()\nfinally:\n"
        f"    print('LOADED', [name for name in {HEAVY + PUBLISHING + NETWORK!r} if name in sys.modules])"
    )
    argv = ["hf2megatron", str(model()), str(tmp_path / "out"), "--tp", "2"]
    ran = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
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


def test_inspect_of_shards_loads_no_plan(model, convert, tmp_path):
    run = tmp_path / "run"
    assert convert("hf2megatron", model(), run, "--tp", "2", "-q").code == 0
    code = "import sys\nfrom converters import cli\ntry:\n    cli.main()\nfinally:\n    print(*sorted(sys.modules))"
    words = [sys.executable, "-c", code, "inspect", str(run)]
    loaded = set(subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True).stdout.split())
    assert "formats.megatron.classic" in loaded
    assert not loaded & {"numpy", "converters.plan.plan", "converters.plan.output", "concurrent.futures"}


def room(module: str, inside: str) -> str:
    """The child of a package that a module is in, or the module itself."""
    return module.removeprefix(f"{inside}.").partition(".")[0]


@cache
def imports() -> set[tuple[str, str]]:
    """All pairs of our modules, the first of which imports the second, wherever in its file."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
    }
    pairs = set()
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                inner = (f"{node.module}.{alias.name}" for alias in node.names)
                pairs |= {(name, module if module in modules else node.module) for module in inner}
            if isinstance(node, ast.Import):
                pairs |= {(name, alias.name) for alias in node.names}
    return {(name, other) for name, other in pairs if other in modules and other != name}


def circle(above: dict[str, set[str]]) -> list[str]:
    """The rooms of a circle, none where there is no circle."""
    try:
        graphlib.TopologicalSorter(above).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


PACKAGES = sorted(".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES if path.name == "__init__.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_between_rooms(package):
    """Each folder can be read from its lowest room up: what two rooms need of each other is a third one."""
    arrows = [
        (room(name, package), room(other, package))
        for name, other in imports()
        if name.startswith(f"{package}.") and other.startswith(f"{package}.")
    ]
    above = {source: {to for start, to in arrows if start == source and to != source} for source, _ in arrows}
    assert circle(above) == []


def test_a_circle_is_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_the_rooms_of_formats_are_few():
    assert len({room(name, "formats") for pair in imports() for name in pair if name.startswith("formats.")}) <= 15


def test_every_package_is_installed():
    """Each folder of Python files is a package, and setuptools looks for packages where they are."""
    for path in SOURCES:
        assert (path.parent / "__init__.py").is_file(), path
    listed = (ROOT / "pyproject.toml").read_text().partition("packages.find]")[2]
    assert all(f'"{package}*"' in listed for package in RANK)


def test_the_table_of_rooms_names_every_folder():
    """Whoever opens the repository finds each room by its name; the table says what the room's first line says."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = dict(re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", text, re.MULTILINE))
    rooms = {package.replace(".", "/") for package in PACKAGES if package not in RANK}
    first = {name: (ROOT / name / "__init__.py").read_text()[3:].splitlines()[0].removesuffix('"""') for name in rooms}
    assert named == first


def test_no_file_holds_both_sides_of_a_merge():
    """A docstring or a page with markers is valid Python and valid Markdown."""
    sources = (path for room in (*RANK, "tests", "containers") for path in (ROOT / room).rglob("*.*"))
    for path in (*sources, *ROOT.glob("*.*")):
        if path.suffix in {".py", ".md", ".toml", ".sh", ".txt", ".yml"} and path.is_file():
            assert not re.search(r"^(<{7}|>{7}) ", path.read_text(errors="replace"), re.MULTILINE), path
