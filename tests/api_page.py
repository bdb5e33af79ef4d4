"""`python -m tests.api_page` writes vitruvian/API.md from the docstrings; a test compares."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import vitruvian
import vitruvian.torch
import vitruvian.transformers
from converters.library import options, proving
from converters.library.frameworks import into_model
from converters.plan.output import Output
from formats.model.spec import ModelSpec

PAGE = Path(__file__).parents[1] / "vitruvian" / "API.md"
HEAD = """\
# The library

Made from the docstrings (`python -m tests.api_page`). Every keyword is the flag of a command by its name.

    import vitruvian

    checkpoint = vitruvian.open("run/")                                  # any format, headers only
    checkpoint.format, checkpoint.topology, checkpoint.spec
    for name, tensor in checkpoint.tensors("huggingface"): ...           # one at a time, the bytes of a conversion
    checkpoint["huggingface"]["lm_head.weight"][:8]                      # eight rows, nothing else is read
    checkpoint.as_("megatron", tp=(3, 8), pp=(0, 4))                     # what that rank would load
    vitruvian.convert("run/", "model", to="huggingface", dtype="bf16")   # as the command, with a typed result
"""
OPTIONS = {
    "Reading": options.Reading,
    "Layout": options.Layout,
    "Effort": options.Effort,
    "Planning (those of Reading and Layout, and)": options.Planning,
    "Conversion (those of Planning and Effort, and)": options.Conversion,
    "View (those of `as_`)": options.View,
    "Loading": into_model.Loading,
    "Iterating": into_model.Iterating,
    "Proving": proving.Proving,
}
SPEC = """\
## Settings

`checkpoint.spec` has an attribute for each setting of the model, in every format the same; `None` is what its family
does not have. What each means is in [settings.py](../formats/model/settings.py). Of a model that no table describes
it has `family`, `shapes`, `tied` and `vocab` alone.
"""


SPECIAL = ("__getitem__",)
"""Methods that are public though their names begin with underscores, where they have a docstring."""


def text_of(thing: Any, indent: str = "") -> str:
    """A docstring, as Markdown: its sections are lists."""
    lines = []
    for line in (inspect.getdoc(thing) or "").splitlines():
        section = re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", line)
        entry = re.match(r"    (\w+): (.*)", line)
        if section:
            lines.append(f"**{section[1]}**\n")
        elif entry:
            lines.append(f"* `{entry[1]}`: {entry[2]}")
        else:
            lines.append(f"  {line.strip()}" if line.startswith("        ") else line.strip())
    return "\n".join(indent + line if line else "" for line in lines)


def signature(name: str, thing: Any) -> str:
    """A call, as it is written in the source."""
    called = str(inspect.signature(thing))
    return name + re.sub(r"Unpack\[(\w+)\]", r"\1", re.sub(r"'(\w*)'(?=,)", r'"\1"', called).replace("'", ""))


def entries(module: ModuleType) -> list[str]:
    """The public names of a module, the functions first."""
    sections = []
    names = sorted(module.__all__, key=lambda name: (inspect.isclass(getattr(module, name)), name.lower()))
    for name in names:
        thing = getattr(module, name)
        if inspect.isclass(thing) and issubclass(thing, Exception):
            continue
        title = f"{module.__name__}.{name}"
        called = "" if inspect.isclass(thing) else f"    {signature(name, thing)}\n\n"
        sections.append(f"### {title}\n\n{called}{text_of(thing)}\n")
        if inspect.isclass(thing) and thing.__module__.startswith("converters"):
            public = [(key, each) for key, each in vars(thing).items() if not key.startswith("_") or key in SPECIAL]
            for key, value in public:
                if value.__doc__ and (callable(value) or isinstance(value, property | cached_property)):
                    called = signature(key, value) if callable(value) else key
                    sections.append(f"* **`.{called}`**: {(inspect.getdoc(value) or '').splitlines()[0]}\n")
    return sections


def page() -> str:
    """The whole page."""
    errors = [getattr(vitruvian, name) for name in vitruvian.__all__ if name.endswith(("Error", "Interrupted"))]
    parts = [HEAD, "## Functions and classes\n", *entries(vitruvian)]
    parts += ["## With torch\n", *entries(vitruvian.torch), "## With transformers\n", *entries(vitruvian.transformers)]
    names = ", ".join(f"`{setting.name}`" for setting in fields(ModelSpec))
    parts += [SPEC, f"{names}\n", "## Options\n", text_of(Output) + "\n"]
    for title, kind in OPTIONS.items():
        own = [f"`{key}`" for key in kind.__annotations__]
        parts.append(f"### {title}\n\n{text_of(kind)}\n\n{', '.join(own)}\n")
    parts += [
        "## Errors\n",
        *(f"* `{error.__name__}`, exit code {error.exit_code}: {inspect.getdoc(error)}" for error in errors),
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
