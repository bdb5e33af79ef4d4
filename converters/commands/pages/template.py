"""How facts become a page: one file that loads nothing, with the style and the script that all pages share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def filled(template: str, facts: Mapping[str, Any]) -> str:
    """A page of facts; names from files are data in it, and never markup.

    Args:
        template: the page's own markup and script, a file of this folder.
        facts: what the script shows.
    """
    room = files("converters.commands.pages")
    page = room.joinpath(template).read_text()
    for place, part in (("/*STYLE*/", "page.css"), ("/*SCRIPT*/", "page.js")):
        page = page.replace(place, room.joinpath(part).read_text().rstrip("\n"))
    data = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    return page.replace("/*FACTS*/", data)


def starred(key: str) -> str:
    """A key with a star for each number in it: those of its layer and its expert."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", key)
