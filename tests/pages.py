"""The pages of `docs/` are run: each ```console block is typed in a folder with tiny checkpoints, and compared.

`python -m tests.pages` writes what the commands print into the pages. A line `…` stands for lines that are left out.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = "…"
VARIES = {r"\b\d+\.\d+ s\b": "0.1 s", r"\b[0-9a-f]{64}\b": "DIGEST"}
"""What is another time, or on another processor, another: seconds, and digests of random weights."""
PROGRAMS = {"convert": "converters.cli", "train": "train.cli"}
SHELL = ("ls", "cat", "head", "tail", "rm", "mv", "cp", "truncate", "printf")
"""What else a block may run."""


class Block(NamedTuple):
    """A fenced block of a page, and where it stands."""

    kind: str
    text: str
    start: int
    end: int


def blocks(page: str) -> Iterator[Block]:
    for match in BLOCK.finditer(page):
        yield Block(match[1], match[2], *match.span(2))


def head_of(page: str) -> Mapping[str, object]:
    """What stands between the first two `---` of a page."""
    match = re.match(r"---\n(.*?)^---\n", page, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(match[1]) if match else {}


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block (its lines joined), and what it is said to print."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        count = 1
        while lines[count - 1].endswith("\\"):
            count += 1
        yield "\n".join(lines[:count]), "\n".join(lines[count:])


def run(command: str) -> str:
    """What a command prints, on stdout and stderr; an exit code other than 0 is said at the end."""
    argv = shlex.split(re.sub(r"\\\n", " ", command), comments=True)
    if argv[0] == "vitruvian":
        argv = argv[1:]
    if argv[0] in SHELL:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.rstrip("\n")
    printed, code = io.StringIO(), 0
    cli = import_module(PROGRAMS[argv[0]])
    with redirect_stdout(printed), redirect_stderr(printed), patch.object(sys, "argv", argv):
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        finally:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return printed.getvalue().rstrip("\n") + (f"\n(exit code {code})" if code else "")


def same(expected: str, printed: str) -> bool:
    """Whether a page shows what was printed, but what varies and the lines left out."""
    for pattern, put in VARIES.items():
        expected, printed = re.sub(pattern, put, expected), re.sub(pattern, put, printed)
    lines = (r"(?:.*\n)*" if line == LEFT_OUT else re.escape(line) + r"\n" for line in expected.strip().splitlines())
    return re.fullmatch("".join(lines), printed.strip() + "\n" if printed.strip() else "") is not None


# --- the folder in which they run ------------------------------------------------------------------------------------


def base(out: Path) -> None:
    """A tiny Llama with a tokenizer: stands for the model that a training begins with."""
    from tests.demo_train import GOLDEN
    from tests.models import save

    typed("convert", "tokenizer", GOLDEN / "model.model", out, "--control", "<|user|>", "--control", "<|assistant|>",
          "--eos", "<|endoftext|>", "--allow-mismatches", "1")  # fmt: skip
    save(out, "llama", "bfloat16", vocab_size=253)


def typed(*argv: object) -> None:
    """A command that makes a part of the folder."""
    printed = run(shlex.join(map(str, argv)))
    assert "exit code" not in printed, printed


def fsdp(out: Path) -> None:
    """As accelerate leaves it: checkpoint-5000/pytorch_model_fsdp_0, without a config."""
    typed("convert", "hf2fsdp", "base", out / "pytorch_model_fsdp_0", "--ranks", 4)
    for path in (out / "pytorch_model_fsdp_0").iterdir():
        if path.name != ".metadata" and path.suffix != ".distcp":
            path.unlink()


def bare_dcp(out: Path) -> None:
    """As torchtitan leaves it."""
    fsdp(out.parent / "made")
    (out.parent / "made/pytorch_model_fsdp_0").rename(out)
    (out.parent / "made").rmdir()


def verl(out: Path) -> None:
    """As verl leaves it, on one rank."""
    import torch
    from safetensors.torch import load_file

    out.mkdir(parents=True)
    torch.save(load_file("base/model.safetensors"), out / "model_world_size_1_rank_0.pt")


def zero(out: Path) -> None:
    """ZeRO-2 on two ranks, as DeepSpeed lays it out, with the settings of an AdamW."""
    import torch

    from tests.bench.make_zero import make

    make(Path("base"), out, 2, 2)
    adam = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
    for path in out.glob("global_step1/*optim_states.pt"):
        stored = torch.load(path, weights_only=False)
        for group in stored["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group.update(adam)
        torch.save(stored, path)


def megatron(out: Path) -> None:
    """A run of two tensor and two pipeline ranks, at iteration 5000."""
    typed("convert", "hf2megatron", "base", out, "--tp", 2, "--pp", 2, "--iteration", 5000)
    shutil.rmtree(out / "huggingface")
    for path in out.rglob("vitruvian.json"):
        path.unlink()


def neox(out: Path) -> None:
    """A run of two tensor parallel ranks."""
    typed("convert", "hf2neox", "base", out, "--tp", 2, "--iteration", 5000)
    shutil.rmtree(out / "huggingface")
    for path in out.rglob("vitruvian.json"):
        path.unlink()


def vocabulary(out: Path) -> None:
    from tests.demo_train import GOLDEN

    shutil.copy(GOLDEN / "model.model", out)


def dialogues(out: Path) -> None:
    from tests.demo_train import dialogues

    out.write_text("".join(line + "\n" for line in dialogues()))


WORLD: Mapping[str, Callable[[Path], None]] = {
    "base": base, "checkpoint-5000": fsdp, "step-5000": bare_dcp, "global_step_50/actor": verl, "zero-run": zero,
    "megatron-run": megatron, "neox-run": neox, "model.model": vocabulary, "data.jsonl": dialogues,
}  # fmt: skip
"""What a page may name in its `needs`: how it is made."""


def prepare(folder: Path) -> None:
    """Make everything that pages need."""
    os.chdir(folder)
    for name, make in WORLD.items():
        make(Path(name))


def played(page: str, made: Path, folder: Path) -> Iterator[tuple[Block, str, str, str]]:
    """Run a page's blocks, in its order: the block, a command, what the page shows, and what was printed."""
    for name in head_of(page).get("needs", ()):
        source, place = made / name, folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)
    os.chdir(folder)
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.kind == "console":
            for command, expected in commands(block.text):
                yield block, command, expected, run(command)
        elif block.kind == "python":
            exec(compile(block.text, "a page", "exec"), names)  # our own pages


def rewritten(page: str, made: Path, folder: Path) -> str:
    """A page with what its commands print."""
    outputs: dict[Block, str] = {}
    for block, command, expected, printed in played(page, made, folder):
        now = expected if same(expected, printed) or re.search(rf"^{LEFT_OUT}$", expected, re.MULTILINE) else printed
        outputs[block] = outputs.get(block, "") + f"$ {command}\n" + (f"{now.strip()}\n" if now.strip() else "")
    for block in sorted(outputs, key=lambda block: -block.start):
        page = page[: block.start] + outputs[block] + page[block.end :]
    return page


def main() -> None:
    """Write what the commands print into the pages that are named, or into all."""
    paths = [Path(word).resolve() for word in sys.argv[1:]] or PAGES
    with tempfile.TemporaryDirectory() as made:
        prepare(Path(made))
        for path in paths:
            with tempfile.TemporaryDirectory() as folder:
                path.write_text(rewritten(path.read_text(), Path(made), Path(folder)))
        os.chdir("/")


if __name__ == "__main__":
    main()
