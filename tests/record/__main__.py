"""The output of every conversion, for a refactor that must not change one byte of it.

python -m tests.record OUT.json [--jobs 2] [--resume]     convert, and write exit codes, texts, sums of files
python -m tests.record --compare A.json B.json [--texts]        print what differs; exit code 1 if anything does

Of another checkout: cd THERE && .venv/bin/python HERE/tests/record/__main__.py OUT.json. What is converted is in
`cases.txt`, whose first lines say how to read it.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))  # the checkout that is recorded, which need not be the one of this file
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120", "TQDM_DISABLE": "1"}
NOISE = {r"\bin \d+(\.\d+)? m?s\b": "in T", r"\d+(\.\d+)? [kMG]?B/s": "RATE", r'("seconds": )[\d.e-]+': r"\1T"}
"""What two runs of the same code say differently."""
Step = tuple[str, str, list[str]]
"""The name of an output, the command that makes it, its words."""
Record = dict[str, dict[str, Any]]


def model(out: Path, name: str, dtype: str = "bfloat16", shard: str = "50GB", changes: str = "{}") -> None:
    """A tiny model of Hugging Face."""
    from tests.models import build

    build(out, name, dtype, shard, **json.loads(changes))


def copy(out: Path, source: str) -> None:
    """A folder of another step, or of tests/golden."""
    shutil.copytree(source, out)


def bare(out: Path, source: str) -> None:
    """Without the config and the manifest that travel along, as a training leaves it."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("huggingface", "vitruvian.json", "megatron_flags.txt"))


def optimizer(out: Path, source: str, how: str) -> None:
    """A classic run at iteration 3 with an optimizer."""
    from tests.optimizers import add_optimizer

    copy(out, source)
    add_optimizer(out, how)


def zero(out: Path, source: str, stage: str, ranks: str) -> None:
    """What DeepSpeed saves."""
    from tests.bench.make_zero import make

    make(Path(source), out, int(stage), int(ranks))


def memory(out: Path, source: str) -> None:
    """What FSDP saves of the names that transformers has in memory."""
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict()
    dcp.save({"model": state}, checkpoint_id=out, no_dist=True)
    (out / ".metadata").touch()


def edit(out: Path, source: str, file: str, change: str) -> None:
    """With other keys in a JSON file; null takes one out."""
    copy(out, source)
    config = json.loads((out / file).read_text()) | json.loads(change)
    (out / file).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def cut(out: Path, source: str, pattern: str, size: str) -> None:
    """With a file that ends early; at 0 it is missing."""
    copy(out, source)
    path = min(out.rglob(pattern))
    os.truncate(path, int(size)) if int(size) else path.unlink()


def text(out: Path, content: str) -> None:
    """A file."""
    out.write_text(content.replace(r"\n", "\n"))


MAKERS = {maker.__name__: maker for maker in (model, copy, bare, optimizer, zero, memory, edit, cut, text)}
"""Commands of `cases.txt` that make a source."""
LOOKS = {"inspect", "plan", "explain", "formats", "digest", "verify", "diff", "--help"}
"""Commands of `convert` that write nothing."""


def units() -> dict[str, list[Step]]:
    """The steps of each group, which run in one folder."""
    from tests import models

    by_unit: dict[str, list[Step]] = {}
    blocks = Path(__file__).with_name("cases.txt").read_text().partition("\n\n")[2]
    for block in blocks.replace("\\\n", " ").split("\n\n"):
        heads = [line[2:] for line in block.splitlines() if line.startswith("* ")]
        lines = [line.partition(" = ") for line in block.splitlines() if " = " in line and line[0] not in "*#"]
        for head in heads:
            kind, *lists = head.split(" | ")
            every = [
                [name for word in shlex.split(choices) for name in getattr(models, word, [word])] for choices in lists
            ]
            for values in itertools.product(*every):
                named = [(name, rest.format(*values) if values else rest) for name, _, rest in lines]
                commands = [(name, shlex.split(rest)) for name, rest in named]
                steps = [(name, first, rest) for name, (first, *rest) in commands]
                by_unit.setdefault(" ".join((kind, *values)), []).extend(steps)
    return by_unit


def run(unit: tuple[str, list[Step], Path]) -> Record:
    """Convert, in a folder that is gone afterwards."""
    from tests.in_process import convert

    kind, steps, place = unit
    warnings.simplefilter("ignore")
    folder, record, code, output = place / hashlib.sha256(kind.encode()).hexdigest()[:8], Record(), None, ""
    folder.mkdir()
    for name, command, argv in steps:
        given = [re.sub(r"@(golden/)?", lambda at: f"{'tests/golden' if at[1] else folder}/", word) for word in argv]
        before = {*folder.iterdir()}
        if any(word[0] == "@" and "/" not in word and not (folder / word[1:]).exists() for word in argv):
            continue  # it was refused, which is recorded
        if command in MAKERS:
            code, output = 0, ""
            try:
                MAKERS[command](folder / name, *given)
            except Exception:  # noqa: BLE001 -- a case that cannot be made is seen in the record, and the others are run
                code, output = None, traceback.format_exc(limit=-2)
        else:
            outs = [] if command in LOOKS or "--help" in argv else [str(folder / name)]
            code, output = convert(command, *given[:1], *outs, *given[1:])
        paths = [path for new in sorted({*folder.iterdir()} - before) for path in (new, *sorted(new.rglob("*")))]
        files = {str(path.relative_to(folder)): checksum(path, folder) for path in paths if path.is_file()}
        for pattern, instead in {re.escape(str(folder)): "", re.escape(str(Path.cwd())): "CHECKOUT", **NOISE}.items():
            output = re.sub(pattern, instead, output)
        line = " ".join((f"$ convert {command}", *argv))
        record[f"{kind}: {name}"] = {"exit": code, "text": f"{line}\n{output}", "files": files}
    shutil.rmtree(folder)
    return record


def checksum(path: Path, folder: Path) -> str:
    """Of the bytes of a file, wherever its folder is."""
    return hashlib.sha256(path.read_bytes().replace(str(folder).encode(), b"")).hexdigest()


def compare(first: Record, second: Record, texts: bool) -> int:
    """Print what differs, and say whether anything does."""
    differences = [
        f"{name}: only in the {'first' if name in first else 'second'}" for name in sorted(first.keys() ^ second.keys())
    ]
    for name in sorted(first.keys() & second.keys()):
        a, b = first[name], second[name]
        if a["exit"] != b["exit"]:
            differences.append(f"{name}: exit {a['exit']} | {b['exit']}\n{a['text']}---\n{b['text']}")
        files = a["files"].keys() | b["files"].keys()
        differences += [f"{name}: {file}" for file in sorted(files) if a["files"].get(file) != b["files"].get(file)]
        if texts and a["text"] != b["text"] and a["exit"] == b["exit"]:
            differences.append(f"{name}: text\n{a['text']}---\n{b['text']}")
    print("\n".join([*differences, f"{len(differences)} differences in {len(first.keys() | second.keys())} cases"]))
    return 1 if differences else 0


def main() -> int:
    """Record, or compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.record", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT.json")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="groups of cases, such as 'llama*'")
    parser.add_argument("--resume", action="store_true", help="go on with what OUT.json already has")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A.json", "B.json"))
    parser.add_argument("--texts", action="store_true", help="with --compare: what was said, too")
    options = parser.parse_args()
    if options.compare:
        first, second = (json.loads(path.read_text()) for path in options.compare)
        return compare(first, second, options.texts)
    if options.out is None:
        parser.error("name the file to write, or --compare two")
    sys.modules["__main__"].__package__ = None  # or click calls the program `python -m tests.record.convert`
    record: Record = json.loads(options.out.read_text()) if options.resume else {}
    done = {name.rpartition(": ")[0] for name in record}
    memory_disk = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="record-", dir=memory_disk) as place:
        warm = [("hf", "model", ["llama"]), ("m", "hf2megatron", ["@hf"]), ("memory", "memory", ["@hf"])]
        run(("imports what the forks need", warm, Path(place)))
        chosen = {name: steps for name, steps in units().items() if fnmatch.fnmatch(name, options.only)}
        groups = [(name, steps, Path(place)) for name, steps in chosen.items() if name not in done]
        with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:  # none knows another
            for number, part in enumerate(pool.imap_unordered(run, groups, chunksize=1), 1):
                record |= part
                if number % 10 == 0 or number == len(groups):
                    partial = options.out.with_name(f"{options.out.name}.new")
                    partial.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
                    partial.replace(options.out)
                print(f"\r{number} of {len(groups)} groups, {len(record)} cases", end="", file=sys.stderr, flush=True)
    print(f"\n{sum(len(case['files']) for case in record.values())} files", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
