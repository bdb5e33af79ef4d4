"""A refused run leaves no thread of a process group: one that is alive while Python ends may abort the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

PROGRAM = """
from pathlib import Path
from formats.errors import SourceError
from train.distributed import world

def threads():
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]

def refuse():
    raise SourceError("refused")

try:
    with world(1, 1) as ranks:
        ranks.from_first(refuse)
except SourceError as error:  # its traceback refers to all that was there
    print([name for name in threads() if name.startswith(("pt_", "gloo"))], bool(error.__traceback__))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the names of threads are read from Linux' /proc")
def test_no_thread_of_a_group_outlives_a_refusal():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "[] True\n"), ran.stderr
