"""What a release is made of: metadata, workflows, templates, images. Nothing here publishes anything."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

if importlib.util.find_spec("tomllib"):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL = "https://example.invalid/org/name"


def addresses() -> Any:
    spec = importlib.util.spec_from_file_location("addresses", ROOT / ".github/addresses.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_long_description_of_a_release_has_absolute_links(tmp_path, monkeypatch):
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["addresses.py", URL, "v0.1.0"])
    addresses().main()
    links = re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text())
    assert links
    assert all(link.startswith(f"{URL}/") for link in links)
    assert f"{URL}/raw/v0.1.0/docs/pictures/qkv.svg" in links
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls == {"Homepage": URL, "Issues": f"{URL}/issues", "Changelog": f"{URL}/blob/main/CHANGELOG.md"}


def test_metadata_say_which_pythons_and_nothing_that_is_made_up():
    named = [
        classifier.rpartition(" ")[2] for classifier in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", classifier)
    ]
    assert named == PYTHONS
    assert PROJECT["authors"] == [{"name": "The maintainers of Vitruvian"}]
    assert "urls" not in PROJECT
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["authors"] == PROJECT["authors"]
    assert (citation["license"], citation["cff-version"]) == (PROJECT["license"], "1.2.0")


def test_the_version_stands_in_one_place():
    version = PROJECT["version"]
    rooms = [ROOT / room for room in ("vitruvian", "formats", "converters", "train", "containers", ".github", "docs")]
    texts = [
        path for room in rooms for path in room.rglob("*.*") if path.suffix in {".py", ".yml", ".def", ".sh", ".cff"}
    ]
    repeating = [
        path
        for path in [*texts, ROOT / "CITATION.cff"]
        if re.search(rf'["= ]{re.escape(version)}"?$', path.read_text(), re.M)
    ]
    assert repeating == []
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_the_makefile_has(path):
    flow = yaml.safe_load(path.read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert flow["permissions"] == {"contents": "read"}
    ran = [step["run"] for job in flow["jobs"].values() for step in job["steps"] if "run" in step]
    for line in ran:
        for typed in re.findall(r"^make ([a-z -]+)", line, re.MULTILINE):
            assert set(typed.split()) <= targets, line
        for file in re.findall(r"python (\.github/\S+)", line):
            assert (ROOT / file).is_file()
    assert all("timeout-minutes" in job for job in flow["jobs"].values())
    used = [step["uses"] for job in flow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(?:v\d+|release/v\d+)", action) for action in used)


FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_for_github_are_of_their_schemas(schema):
    """In a flow mapping of YAML a comma ends a text: what is after it was a key of its own."""
    argv = ["-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, SCHEMAS[schema])]
    ran = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_only_a_tag_publishes():
    flows = {path.stem: yaml.safe_load(path.read_text()) for path in WORKFLOWS}
    publishing = {
        name for name, flow in flows.items() for job in flow["jobs"].values()
        for step in job["steps"] if "publish" in step.get("uses", "")
    }  # fmt: skip
    assert publishing == {"release"}
    assert flows["release"][True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert flows["release"]["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert flows["ci"]["jobs"]["test"]["strategy"]["matrix"]["python"] == PYTHONS
    assert "secrets." not in "".join(path.read_text() for path in WORKFLOWS)


def test_issue_forms_ask_for_what_is_needed():
    assert {path.stem for path in FORMS} == {"wrong-result", "refused", "model"}
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert form["description"]
        assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_both_container_files_are_of_one_recipe():
    docker = (ROOT / "containers/Dockerfile").read_text()
    recipe = (ROOT / "containers/vitruvian.def").read_text()
    assert re.findall(r"^FROM (.*)$", docker, re.MULTILINE) == re.findall(r"^    BASE=(.*)$", recipe, re.MULTILINE)
    copied = re.search(r"%files\n(.*?)\n\n", recipe, re.DOTALL)
    assert copied
    expected = {line.split()[0] for line in copied[1].splitlines()}
    assert {word for line in re.findall(r"^COPY (.*) \S+$", docker, re.MULTILINE) for word in line.split()} == expected
    pip = re.findall(r"^    PIP_ARGS=(.*)$", recipe, re.MULTILINE)[0]
    assert f"post.sh cpu {pip}\n" in docker


def test_a_skip_for_want_of_a_required_program_is_a_failure(monkeypatch):
    from types import SimpleNamespace

    from tests import conftest

    monkeypatch.setattr(conftest, "REQUIRED", ["apptainer"])
    for reason, outcome in {"Skipped: apptainer is not installed": "failed", "Skipped: wants root": "skipped"}.items():
        report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("file", 1, reason))
        hook = conftest.pytest_runtest_makereport()
        next(hook)
        with pytest.raises(StopIteration) as ended:
            hook.send(report)
        assert ended.value.value.outcome == outcome
