"""What a user is told who names what is not there: another command, another program's files, a folder too high."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from converters.cli import cli, formats_of
from converters.commands.to import INTO, NAMES, UNWRITTEN, command_for
from train.cli import cli as train

OTHERS = {
    "dcp2hf": "fsdp2hf",
    "deepspeed-to-megatron": "hf2megatron",
    "gpt-neox_to_hf": "neox2hf",
    "mcore2mcore": "reshard",
    "fsdp2universal": "zero2universal",
}


def test_two_formats_are_a_command(convert):
    read, written = NAMES.keys() - {"gguf"}, NAMES.keys() - {*UNWRITTEN}
    pairs = [(source, target) for source in read for target in written if (source, target) != ("hf", "zero")]
    assert {command_for(*formats_of(f"{source}2{target}")) for source, target in pairs} <= cli.commands.keys()
    assert {name: command_for(*formats_of(name)) for name in OTHERS} == OTHERS
    assert {name for inside in INTO.values() for name in inside.values()} <= cli.commands.keys()
    ran = convert("zero2megatron", "a", "b")
    assert (ran.code, ran.err.splitlines()[-1]) == (2, "hint: convert hf2megatron SRC OUT, which reads any format")
    for name, hint in (
        ("hf2zero", "DeepSpeed starts from"),
        ("hf2deepspeed", "`convert zero2universal`"),
        ("hf2gguf", "llama.cpp"),
        ("fsdp2maxtext", "to_maxtext"),
    ):
        ran = convert(name, "a", "b")
        assert (ran.code, hint in ran.err.splitlines()[-1]) == (2, True), ran.err
    assert "No such command 'hf2paint'" in convert("hf2paint", "a", "b").err
    assert "Did you mean 'inspect'" in convert("inspekt", "a").err


@pytest.mark.parametrize("group", [cli, train], ids=["convert", "train"])
def test_no_line_of_help_is_cut_off(group):
    assert not [name for name, command in group.commands.items() if command.get_short_help_str(120).endswith("...")]


def test_a_checkpoint_further_down(model, convert, tmp_path):
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    (cache / "snapshots/0123abcd").symlink_to(model("llama"))
    for folder, place in ((cache, cache / "snapshots/0123abcd"), (cache / "snapshots", cache / "snapshots/0123abcd")):
        ran = convert("inspect", folder)
        assert (ran.code, ran.err.splitlines()[-1]) == (3, f"hint: name one: {place}")


def test_of_a_run_the_newest_checkpoint_is_named(model, convert, tmp_path):
    for name in ("checkpoint-9", "checkpoint-10"):
        (tmp_path / name).symlink_to(model("llama"))
    assert convert("digest", tmp_path).err.splitlines()[-1] == f"hint: name one: {tmp_path / 'checkpoint-10'}"


def test_a_name_of_the_hub_is_no_folder(convert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hint = "hf download org/name --local-dir FOLDER"
    assert hint in convert("hf2megatron", "org/name", "out").err
    assert hint in convert("inspect", "out", "--config", "org/name").err
    assert hint not in convert("inspect", tmp_path / "gone").err


def texts(tree: ast.AST) -> list[str]:
    """The texts of a module; what is put into one is a word."""
    strings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            strings.append("".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
    return strings


@pytest.mark.parametrize("room", ["formats", "converters", "train"])
def test_every_command_that_the_code_names_has_its_options(room):
    """Whether a hint or a help offers it."""
    groups, seen = {"convert": cli, "train": train}, 0
    for path in sorted((Path(__file__).parents[2] / room).rglob("*.py")):
        for text in texts(ast.parse(path.read_text())):
            for program, name, rest in re.findall(r"(?:^|`)(convert|train) ([a-z]\w+)((?: [^`\n]*)?)", text):
                command = groups[program].commands.get(name)
                if command is None or name in ("submit", "run"):  # a sentence; or one that takes any option
                    continue
                seen += 1
                every = [command, *getattr(command, "commands", {}).values()]
                known = {
                    word for each in every for option in each.params for word in (*option.opts, *option.secondary_opts)
                }
                typed = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.split(" #|, ", rest)[0])) - {"--help"}
                assert typed <= known, f"{path}: {program} {name}{rest}"
    assert seen


def test_every_extra_that_a_hint_installs_exists():
    """By the name under which a user of the wheel installs it."""
    root = Path(__file__).parents[2]
    section = (root / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = ", section, re.MULTILINE))
    installed = [
        extra
        for room in ("formats", "converters", "train", "vitruvian")
        for path in (root / room).rglob("*.py")
        for text in re.findall(r"'vitruvian\[([\w,]+)\]'", path.read_text())
        for extra in text.split(",")
    ]
    assert len(installed) > 10
    assert set(installed) <= extras


def test_force_is_not_offered_for_the_source_itself(model, convert, tmp_path):
    source = Path(shutil.copytree(model("llama"), tmp_path / "hf"))
    for out in (source, source / "inner", tmp_path / "hf" / ".." / "hf"):
        for more in ((), ("--force",)):
            ran = convert("hf2hf", source, out, *more)
            assert (ran.code, "are inside each other" in ran.err, "--force" in ran.err) == (7, True, False)


def test_the_folder_of_a_file_is_offered_only_if_it_is_a_checkpoint(model, convert, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    ran = convert("inspect", tmp_path / "model.gguf")
    assert (ran.code, "llama.cpp" in ran.err) == (4, True)
    (tmp_path / "notes.txt").write_text("")
    assert "hint" not in convert("inspect", tmp_path / "notes.txt").err
    ran = convert("inspect", model("llama") / "model.safetensors")
    assert ran.err.splitlines()[-1] == f"hint: name its folder: {model('llama')}"
    assert convert("inspect", model("llama")).code == 0


def test_files_beside_a_checkpoint_do_not_hide_it(model, convert, tmp_path):
    """Of a folder with many subfolders the first are looked into; its files are none."""
    for number in range(100):
        (tmp_path / f"{number:03}.log").touch()
    shutil.copytree(model(), tmp_path / "saved")
    ran = convert("inspect", tmp_path)
    assert (ran.code, f"name one: {tmp_path / 'saved'}" in ran.err) == (3, True), ran.err
