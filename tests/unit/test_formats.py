"""The registry: every format under its name, and nothing of it loaded before it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from converters.assets.files import config_text
from formats.checkpoint import Settings
from formats.families import FAMILIES
from formats.registry import FORMATS, open_checkpoint


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_what_its_modules_say(name):
    form = FORMATS[name]
    assert name == form.reader.NAME
    assert {*form.reader_options} <= {*Settings.__dataclass_fields__}
    assert all(name in form.reader.holders(family) for family in FAMILIES.values())


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "phi3", "gpt_oss", "olmo2"])
def test_the_parsed_config_stays_as_it_was_read(model, name):
    """It is parsed once: who reads it must not change it for the others."""
    source = open_checkpoint(model(name))
    config_text(source, "bf16")
    assert source.config == json.loads((source.root / "config.json").read_text())


def test_the_registry_loads_no_reader():
    code = "import sys, formats.registry\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    mine = {name for name in ran.stdout.split() if name.startswith("formats.") and name.count(".") > 1}
    assert {name.rpartition(".")[2] for name in mine} <= {"format", "neox"}


def test_what_a_folder_is_is_told_before_other_readers_are_loaded(model):
    """Nor are the families that its config does not name: an `inspect` takes as long as what it loads."""
    code = "import sys, pathlib\nfrom formats.registry import *\nopen_checkpoint(pathlib.Path(sys.argv[1]))\n"
    argv = [sys.executable, "-c", code + "print(*sys.modules)", str(model())]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(ran.stdout.split())
    readers = {form.reads for form in FORMATS.values()} & loaded
    assert readers == {"formats.huggingface.folder"}
    assert {name for name in FAMILIES if f"formats.families.{name}" in loaded} == {"llama", "llama4_text"}
    assert "numpy" not in loaded
