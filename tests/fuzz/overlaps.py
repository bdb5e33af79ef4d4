"""An OUT that is, holds, or is in what a command reads, by any path, with --force: nothing that is read is lost.

A command that ends well has written OUT; whatever it ends with, all files that it has read are there as they were.
"""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tests.fuzz.architectures import run
from tests.fuzz.mixtures import _hf

COMMANDS = ("hf2hf", "hf2megatron", "hf2fsdp", "fsdp2hf", "megatron2hf", "average", "linked weights")


def attack(seed: int, folder: Path) -> str:
    """One command whose OUT overlaps one of its inputs.

    Returns:
        `refused`, or `right`.

    Raises:
        AssertionError: a file that was read is gone or another; or a bug.
    """
    draw = random.Random(seed)
    kind = draw.choice(COMMANDS)
    inputs = _inputs(kind, folder)
    chosen = draw.choice([*inputs.values()])
    out = draw.choice([chosen, chosen, chosen.parent, chosen / "sub", chosen / "../x", folder / "new"])
    if draw.random() < 0.4:  # another path to the same place
        link = folder / "link"
        link.symlink_to(out.resolve() if out.exists() else out.parent.resolve())
        out = link if out.exists() else link / out.name
    if draw.random() < 0.3 and not out.exists() and out.parent.is_dir():
        shutil.copytree(_hf(1), out)
    before = {path: path.read_bytes() for place in inputs.values() for path in place.rglob("*") if path.is_file()}
    before = {path: content for path, content in before.items() if not _is_new(path, out, inputs)}
    config = ["--config", inputs["config"]] if "config" in inputs else []
    sources = [inputs[name] for name in ("source", "second") if name in inputs]
    command = "hf2hf" if kind == "linked weights" else kind
    code, output = run(command, *sources, out, *config, "--force", "-q")
    case = f"seed {seed}: {kind} {inputs} into {out}: exit {code}\n{output}"
    assert code in (0, 2, 3, 7), case
    lost = [path for path, content in before.items() if not path.is_file() or path.read_bytes() != content]
    assert not lost, f"{case}\n{lost[:3]} was read, and is gone"
    return "refused" if code else "right"


def _is_new(path: Path, out: Path, inputs: dict[str, Path]) -> bool:
    """Whether a file is of an OUT in an input that it is no part of: a model in the folder of its base."""
    below = out.resolve()
    return below in path.resolve().parents and below not in [place.resolve() for place in inputs.values()]


def _inputs(kind: str, folder: Path) -> dict[str, Path]:
    """What a command reads: a source, a config or a second source, each in a folder of its own in another one."""
    inputs = {"source": folder / "a/source"}
    if kind in ("fsdp2hf", "megatron2hf"):
        shutil.copytree(_converted("hf2fsdp" if kind == "fsdp2hf" else "hf2megatron"), inputs["source"])
        inputs["config"] = folder / "b/base"
        shutil.copytree(_hf(1), inputs["config"])
    elif kind == "linked weights":
        inputs["linked"] = folder / "b/far"
        shutil.copytree(_hf(1), inputs["linked"])
        inputs["source"].mkdir(parents=True)
        for path in inputs["linked"].iterdir():
            (inputs["source"] / path.name).symlink_to(path)
        (inputs["source"] / "config.json").unlink()
        shutil.copy(inputs["linked"] / "config.json", inputs["source"])
        (inputs["source"] / "model.safetensors.index.json").unlink()
        shutil.copy(inputs["linked"] / "model.safetensors.index.json", inputs["source"])
    else:
        shutil.copytree(_hf(1), inputs["source"])
        if kind == "average":
            inputs["second"] = folder / "b/second"
            shutil.copytree(_hf(2), inputs["second"])
    return inputs


@cache
def _converted(command: str) -> Path:
    """A checkpoint without a config of its own."""
    out = Path(mkdtemp(prefix="overlaps-")) / "run"
    code, output = run(command, _hf(1), out, "-q")
    assert code == 0, output
    for name in ("huggingface", "config.json"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return out
