"""Every command on the pages of `docs/` is run, or at least parsed, and what is shown is what it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from converters.commands import submit
from converters.common.slurm import clock, seconds_of
from tests import pages
from tests.unit.test_docs import GROUPS

RUN = [path for path in pages.PAGES if re.search(r"^```(?:console|python)$", path.read_text(), re.MULTILINE)]
NAMES = {path: str(path.relative_to(pages.ROOT / "docs")) for path in pages.PAGES}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints as the trainers leave them, tiny."""
    here = Path.cwd()
    folder = tmp_path_factory.mktemp("made")
    pages.prepare(folder)
    pages.os.chdir(here)
    return folder


@pytest.mark.parametrize("path", RUN, ids=NAMES.get)
@pytest.mark.slow
def test_a_page_shows_what_its_commands_print(path, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _, command, expected, printed in pages.played(path.read_text(), made, tmp_path):
        assert pages.same(expected, printed), f"$ {command}\n{printed}\n\npython -m tests.pages {path}"


@pytest.mark.parametrize("path", pages.PAGES, ids=NAMES.get)
def test_what_is_not_run_can_be_typed(path):
    for block in pages.blocks(path.read_text()):
        assert block.kind in ("console", "bash", "python"), f"{path}: a block of {block.kind}"
        for line in re.sub(r"\\\n", " ", block.text).splitlines() if block.kind == "bash" else ():
            argv = shlex.split(line, comments=True)
            if argv and argv[0] in GROUPS:
                parse(GROUPS[argv[0]], argv[1:])
            elif argv and argv[0].startswith("containers/"):
                assert (pages.ROOT / argv[0]).is_file(), f"{path}: {argv[0]}"


def parse(group: click.Group, argv: list[str]) -> None:
    """Parse a command and, where it takes one, the command in it."""
    name, command, rest = group.resolve_command(click.Context(group), argv)
    assert command is not None
    inside = command.make_context(name, rest).params.get("words") or ()
    if inside and name == "submit":
        parse(group, [word for word in inside if word != "-n"])


def test_a_change_is_seen():
    assert pages.same("digest " + "a" * 64, "digest " + "b" * 64)
    assert pages.same("first\n…\nlast", "first\n2\n3\nlast")
    assert pages.same("in 0.1 s, all", "in 12.5 s, all")
    assert not pages.same("39 tensors", "40 tensors")
    assert not pages.same("first\n…", "second\nthird")
    assert not pages.same("", "error: no")
    with pytest.raises(click.UsageError):
        parse(GROUPS["convert"], ["hf2hf", "a", "b", "--tp", "2"])


SHARES = {
    "alps": 1,
    "jupiter": 1,
    "juwels": 1,
    "leonardo": 0,
    "lumi": 16 / 128,
    "marenostrum5": 2 / 112,
    "snellius": 1 / 8,
}
"""Site: the part of a node that is billed for a small conversion."""


@pytest.mark.parametrize("site", SHARES)
def test_what_a_site_bills_is_by_the_model_of_submit(site):
    """Time and node hours of each row: bytes at the rate, and the start."""
    text = (pages.ROOT / f"docs/sites/{site}.md").read_text()
    rows = re.findall(r"^\| \d+ B \| (\d+) GB \| ([\d:]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 3
    for size, time, hours in rows:
        seconds = submit.START + int(size) * 1e9 / submit.RATE
        assert clock(seconds) == f"0{time}:00"
        billed = SHARES[site] * seconds_of(clock(seconds)) / 3600
        assert abs(float(hours) - billed) <= 0.02 * billed, (site, size)
