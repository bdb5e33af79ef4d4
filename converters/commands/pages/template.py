"""Make a page from data: one HTML file that loads nothing, with the style and the script that all pages share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def render(template: str, facts: Mapping[str, Any]) -> str:
    """The HTML of a page; names from files are data in it, never markup.

    Args:
        template: the file in this folder with the page's own markup and script.
        facts: the data that the script shows.
    """
    room = files("converters.commands.pages")
    page = room.joinpath(template).read_text()
    for place, part in (("/*STYLE*/", "page.css"), ("/*SCRIPT*/", "page.js")):
        page = page.replace(place, room.joinpath(part).read_text().rstrip("\n"))
    data = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    return page.replace("/*FACTS*/", data)


def with_stars(key: str) -> str:
    """A key with a star in place of each number, those of its layer and its expert."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", key)
