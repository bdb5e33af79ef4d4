"""Plans of the largest open models: python -m tests.bench.large [--work DIR] [--only CASE ...] [--json OUT]

Each case makes a checkpoint of true metadata and sizes, of holes (`make_large.py`), and plans what is done with it, in
a process of its own: CPU seconds, the largest memory, jobs and blocks. Nothing of the weights is read. The table at the
end shows whether time and memory are linear in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

CONVERT = str(Path(sys.executable).with_name("convert"))
KEEP_FREE = 3 * 10**9


class Case(NamedTuple):
    """A checkpoint, and what is asked of it: `inspect`, `digest`, or the target of a plan with its options."""

    name: str
    model: str
    kind: str
    task: str
    options: Mapping[str, int] = {}
    layers: int = 0


FSDP = "405 B, FSDP on 1,024 ranks"
CASES = (
    Case("linear: 11 layers, digest", "llama-405b", "fsdp", "digest", layers=11),
    Case("linear: 33 layers, digest", "llama-405b", "fsdp", "digest", layers=33),
    Case(f"{FSDP}: plan of digest", "llama-405b", "fsdp", "digest"),
    Case(f"{FSDP}: to Hugging Face", "llama-405b", "fsdp", "huggingface"),
    Case(f"{FSDP}, with optimizer: inspect", "llama-405b", "fsdp-optim", "inspect"),
    Case("405 B, ZeRO-3 on 1,024 ranks: to universal", "llama-405b", "zero3", "deepspeed"),
    Case("405 B, Hugging Face: to TP8 x PP18", "llama-405b", "hf", "megatron", {"tp": 8, "pp": 18}),
    Case(
        "671 B, Hugging Face: to TP4 x PP8 x EP32", "deepseek-v3", "hf", "megatron",
        {"tp": 4, "pp": 8, "ep": 32, "last_stage_layers": 5},
    ),
)  # fmt: skip
PLAN = """
import gc, json, sys
from pathlib import Path
gc.set_threshold(100_000)  # as `convert` has it
source, to, options = sys.argv[1:]
if to == "digest":
    from converters.plan.targets import plan_reading
    from formats.registry import open_checkpoint
    plan = plan_reading(open_checkpoint(Path(source)))
else:
    from converters.library.conversion import plan as planned
    plan = planned(source, to=to, **json.loads(options)).plan
print(json.dumps({"jobs": len(plan.jobs), "blocks": plan.blocks}))
"""
"""Not `convert -n`, which would say that no disk has the room."""


def measure(case: Case, work: Path) -> dict[str, object]:
    """Make a checkpoint unless it is there, and plan."""
    source = work / "-".join(map(str, (case.model, case.kind, case.layers)))
    if not source.exists():
        if shutil.disk_usage(work).free < KEEP_FREE:
            sys.exit(f"less than {KEEP_FREE / 1e9:.0f} GB are free in {work}")
        size = ["--layers", str(case.layers)] if case.layers else []
        command = [sys.executable, "-m", "tests.bench.make_large", case.model, case.kind, str(source), *size]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    argv = [sys.executable, "-c", PLAN, str(source), case.task, json.dumps(case.options)]
    if case.task == "inspect":
        argv = [CONVERT, "inspect", str(source), "--json"]
    with tempfile.TemporaryFile() as out:
        pid = os.posix_spawn(
            argv[0], argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)]
        )  # this process stays small: Linux counts the memory of a parent into the peak of its child
        _, status, usage = os.wait4(pid, 0)
        out.seek(0)
        report = json.loads(out.read() or b"{}")
    if status:
        sys.exit(f"{case.name}: failed")
    return {
        "case": case.name, "cpu": round(usage.ru_utime + usage.ru_stime, 2), "mb": usage.ru_maxrss * 1024 // 10**6,
        "jobs": report.get("jobs"), "blocks": report.get("blocks") or report.get("tensors"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "vitruvian-bench-large")
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of cases")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), min(1024, hard)))  # any number of ranks
    results = []
    for case in CASES:
        if all(word in case.name for word in options.only):
            results.append(measure(case, options.work))
            row = results[-1]
            per = f"{row['cpu'] / row['blocks'] * 1e6:.1f} µs" if row["blocks"] else ""  # type: ignore[operator]
            print(
                f"{row['case']:46} {row['cpu']:8} s {row['mb']:6} MB  {row['jobs']} jobs, {row['blocks']} blocks {per}"
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
