"""What the texts say can be typed: commands, options and settings exist, links and the files they name too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import converters.cli
import train.cli
from formats.model import accepted
from train.settings.config import keys

ROOT = Path(__file__).parents[2]
ROOMS = ("vitruvian", "formats", "converters", "train", "containers", "examples", "docs")
TEXTS = sorted([*ROOT.glob("*.md"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.md"))])
GROUPS = {"convert": converters.cli.cli, "train": train.cli.cli}
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
OF_OTHERS = {
    "--ckpt-format", "--no-load-optim", "--no-load-rng", "--use-checkpoint-args", "--overlap-grad-reduce",
    "--override-opt_param-scheduler",
    "--pipeline-model-parallel-layout", "--rope-scaling-factor", "--mtp-num-layers",
    "--rotary-seq-len-interpolation-factor",
    "--no-bias-gelu-fusion", "--norm-epsilon", "--transformer-impl", "--tensor-model-parallel-size",
    "--use-distributed-optimizer", "--no-use-layer-wise-param-layout", "--muon-tp-mode", "--muon-coefficient-type",
    "--muon-scale-mode", "--muon-extra-scale-factor",  # Megatron
    "--signals-to-handle", "--exclusive", "--kill-on-bad-exit", "--rocm", "--nv",  # torchrun, Slurm, Apptainer
    "--dataset",  # ControlLLM
    "--deepspeed", "--finetune", "--load", "--universal-checkpoint", "--vocab-file",  # Megatron-DeepSpeed
    "--override-lr-scheduler",  # BigScience's
}  # fmt: skip


def indented(text: str) -> str:
    """A text whose fenced blocks are indented ones, without a prompt."""
    return re.sub(
        r"^```\w*\n(.*?)^```$",
        lambda match: re.sub(r"^(?:\$ )?", "    ", match[1], flags=re.M),
        text,
        flags=re.M | re.S,
    )


def code(text: str) -> Iterator[str]:
    """Lines of code, and code within a sentence."""
    text = indented(text)
    for block in re.sub(r"\\\n\s*", "", text).split("\n\n"):
        lines = block.splitlines()
        yield from (line.strip() for line in lines if line.startswith("    "))
        yield from re.findall("`([^`]+)`", " ".join(line.strip() for line in lines if not line.startswith("    ")))


def typed(text: str) -> Iterator[tuple[click.Group, str, str]]:
    """Each command in a text: its program, its name, and what stands behind."""
    for block in code(text):
        for program, name, rest in re.findall(r"(?<![\w/.-])(convert|train) +([a-z][\w-]*)((?: .*)?)", block):
            yield GROUPS[program], name, re.split(r" #| -- ", rest)[0]


def commands(group: click.Group, name: str, rest: str) -> list[click.Command]:
    """A command, and those in it: `submit` takes another one, `packs` has its own."""
    first = group.commands[name]
    inside = (first if isinstance(first, click.Group) else group).commands
    return [first, *(inside[word] for word in rest.split() if word in inside)]


def flags(*known: click.Command) -> set[str]:
    return {name for command in known for option in command.params for name in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_text_says_can_be_typed(path):
    packs = train.cli.cli.commands["packs"]
    assert isinstance(packs, click.Group)
    every = flags(*(command for group in (*GROUPS.values(), packs) for command in group.commands.values()))
    text = path.read_text()
    for group, name, rest in typed(text):
        assert name in group.commands, f"{path}: {name} is not a command"
        given = {flag for flag in FLAG.findall(rest) if flag != "--help"}
        dotted = {flag for flag in given if "." in flag}
        assert given - dotted <= flags(*commands(group, name, rest)), f"{path}: {name} {rest}"
        assert {flag[2:].replace("-", "_") for flag in dotted} <= keys().keys(), f"{path}: {name} {rest}"
    alone = {flag for block in code(text) if block.startswith("--") for flag in FLAG.findall(block)}
    assert alone - every - OF_OTHERS == set(), path


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_the_files_that_a_text_names(path):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text()):
        linked = path.parent / target if target else path
        assert linked.exists(), f"{path}: {target}"
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
        }
    for block in code(path.read_text()):
        for named in re.findall(rf"^(?:{'|'.join(ROOMS)}|tests)/[\w./-]+$", block):
            assert (ROOT / named).exists(), f"{path}: {named}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_a_text_names(path):
    for file, name in re.findall(r"`(tests/[\w./-]+\.py)::(\w+)`", path.read_text()):
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{path}: {file}"


def test_each_step_of_the_users_is_in_the_table():
    """With a test, and why not where something cannot be run."""
    lines = [line for line in (ROOT / "docs/reference/steps.md").read_text().splitlines() if line.startswith("| F")]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert sorted(int(row[0].strip()[1:]) for row in rows) == list(range(1, 101))
    for number, _, here, tests in rows:
        assert re.search(r"`tests/[\w./-]+\.py::\w+`", tests), number
        assert here.strip(), number


def test_every_deviation_that_can_be_accepted_is_listed():
    text = (ROOT / "converters/README.md").read_text()
    rows = "".join(f"| `{name}` | {what} |\n" for name, what in accepted.KNOWN.items())
    assert f"|---|---|\n{rows}\n" in text
