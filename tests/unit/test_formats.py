"""The registry: every format under its name, and nothing of it loaded before it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from formats.checkpoint import Settings
from formats.registry import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_the_name_that_its_reader_gives_its_checkpoints(name):
    one = FORMATS[name]
    assert (one.name, one.reader.NAME) == (name, name)
    assert {*one.reader_options} <= {*Settings.__dataclass_fields__}
    assert all(name in one.reader.holders(family) for family in _families())


def _families():
    from formats.families import FAMILIES

    return FAMILIES.values()


def test_the_registry_loads_no_reader():
    code = "import sys, formats.registry\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    mine = {name for name in ran.stdout.split() if name.startswith("formats.") and name.count(".") > 1}
    assert {name.rpartition(".")[2] for name in mine} <= {"format", "neox"}
