"""What the pages are made of besides themselves: texts of the repository, and the commands' own help.

A page whose head says `source: PATH` is that file, its links led to the pages of the files that they name; one that
says `commands: convert` is the help of every command of that program.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HEAD = re.compile(r"---\n(.*?)^---\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]*)(#[^)\s]*)?\)")


def sources() -> dict[Path, Path]:
    """Each file of the repository that is a page, and its place in `docs/`."""
    found = {}
    for page in DOCS.rglob("*.md"):
        head = HEAD.match(page.read_text())
        source = (yaml.safe_load(head[1]) or {}).get("source") if head else None
        if source:
            found[(ROOT / source).resolve()] = page
    return found


def led(text: str, of: Path, page: Path) -> str:
    """A text with its links as they are from its page; what is no page is named without a link."""
    pages = sources()

    def link(found: re.Match[str]) -> str:
        image, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        place = (of.parent / target).resolve()
        to = pages.get(place) or (place if place.is_relative_to(DOCS) and place.is_file() else None)
        if to is None and place.exists():
            return words
        return f"{image}[{words}]({os.path.relpath(to or place, page.parent)}{anchor})"

    return LINK.sub(link, text)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    place = Path(page.file.abs_src_path)
    if source := page.meta.get("source"):
        path = ROOT / source
        return led(path.read_text(), path, place)
    if program := page.meta.get("commands"):
        return "\n".join(reference(program))
    return led(markdown, place, place)


def reference(program: str) -> list[str]:
    """The help of every command of `convert` or `train`."""
    group = import_module({"convert": "converters.cli", "train": "train.cli"}[program]).cli
    lines = [f"# The commands of `{program}`\n", f"{group.help}\n"]
    for title, commands in group.sections.items():
        lines.append(f"## {title}\n")
        for command in (group.commands[name] for name in commands):
            inside = command.commands.values() if isinstance(command, click.Group) else [command]
            for inner in inside:
                name = command.name if inner is command else f"{command.name} {inner.name}"
                context = click.Context(inner, info_name=f"{program} {name}", terminal_width=80)
                lines.append(f"### {program} {name}\n\n```text\n{inner.get_help(context)}\n```\n")
    return lines
