"""How the tests of `train fetch` run it, and data for it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import Ran

ROOT = Path(__file__).parents[2]
MAIN = "from train.cli import main; main()"
MANY = """
import contextlib, io, json, sys
from train import cli
for words in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["train", "fetch", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
"""Several commands in one process: loading the library takes longer than any of them."""


def environment(home: Path, **changes: str) -> dict[str, str]:
    """Variables for a process of its own, whatever this one is set to."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return variables | {
        "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    } | changes  # fmt: skip


def there(env: Mapping[str, str], *commands: Sequence[object]) -> list[Ran]:
    """Run commands, one after the other, in one process of its own."""
    argvs = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", MANY, argvs], check=False, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    results = [Ran(*json.loads(line)) for line in done.stdout.splitlines()]
    for result in results:
        assert "Traceback" not in result.err, result.err
        assert "bug:" not in result.err, result.err
    return results


def start(env: Mapping[str, str], *argv: object) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    command = [sys.executable, "-c", MAIN, "fetch", *map(str, argv)]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(path: Path) -> list[Any]:
    """What a file of JSON lines holds."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """A file of JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return path


def parquet(records: Sequence[Mapping[str, Any]], group: int = 100) -> bytes:
    """A Parquet file of several row groups."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    file = io.BytesIO()
    write_table(pa.Table.from_pylist(list(records)), file, row_group_size=group)
    return file.getvalue()


def recipe(path: Path, text: str) -> Path:
    """A recipe in a file."""
    path.write_text(text, encoding="utf-8")
    return path
