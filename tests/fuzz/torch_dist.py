"""A file of a torch_dist run is lost, cut off, altered or left over: the output is that of the sound run, or none.

The runs are one of stock Megatron-LM 0.19.2, which has its arguments in the DCP, and one that is written here for two
tensor ranks, with `common.pt`. Both are converted to Hugging Face, and resharded with their optimizer.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from converters.prove.digest import MANIFEST
from tests.in_process import convert

REAL = Path(__file__).parents[1] / "golden/megatron_0192/dp_reshardable"
VOCAB = ("--vocab-size", 28)
COMMANDS = {
    "megatron2hf": ("megatron2hf",),
    "weights": ("reshard", "--format", "torch_dist"),
    "optimizer": ("reshard", "--format", "torch_dist", "--tp", 2, "--with-optimizer"),
}
Damage = Callable[[Path, random.Random], str]


def lost(path: Path, draw: random.Random) -> str:
    """The file is not there."""
    path.unlink()
    return "lost"


def cut(path: Path, draw: random.Random) -> str:
    """It ends early."""
    raw = path.read_bytes()
    left = draw.choice([0, len(raw) - 1, draw.randrange(len(raw))])
    path.write_bytes(raw[:left])
    return f"cut off after {left} of {len(raw)} bytes"


def flipped(path: Path, draw: random.Random) -> str:
    """A bit of it is another."""
    raw = bytearray(path.read_bytes())
    at, bit = draw.randrange(len(raw)), draw.randrange(8)
    raw[at] ^= 1 << bit
    path.write_bytes(raw)
    return f"bit {bit} of byte {at} of {len(raw)} flipped"


def zeroed(path: Path, draw: random.Random) -> str:
    """A part of it was never written: sparse pages of a crashed node."""
    raw = bytearray(path.read_bytes())
    at = draw.randrange(len(raw))
    size = min(draw.choice([64, 512, 4096]), len(raw) - at)
    raw[at : at + size] = bytes(size)
    path.write_bytes(raw)
    return f"{size} bytes from byte {at} of {len(raw)} on are zero"


def left_over(path: Path, draw: random.Random) -> str:
    """The arguments of another save are beside it."""
    other = _source("ours") / "iter_0000003/common.pt"
    shutil.copy(other, path.parent / "common.pt")
    return "beside another common.pt"


DAMAGES: tuple[Damage, ...] = (lost, cut, flipped, zeroed, left_over)


def attack(seed: int, folder: Path) -> str:
    """Damage one file of a run, and convert it.

    Returns:
        What came of it: `refused`, or `right` where nothing that matters was hit.

    Raises:
        AssertionError: the output is another than that of the sound run; or a bug.
    """
    draw = random.Random(seed)
    kind, command, damage = draw.choice(["stock", "ours"]), draw.choice([*COMMANDS]), draw.choice(DAMAGES)
    src, out = folder / "src", folder / "out"
    shutil.copytree(_source(kind), src)
    path = draw.choice(sorted(path for path in src.rglob("*") if path.is_file()))
    case = f"seed {seed}: {path.relative_to(src)} of {kind}: {damage(path, draw)}; {command}"
    code, output = _convert(COMMANDS[command], draw.choice([src, src / "iter_0000003"]), out)
    case = f"{case}: exit {code}\n{output}"
    assert code not in (1, None), case
    assert "Traceback" not in output, case
    assert (code == 0) == out.exists(), case
    if code:
        assert "error: " in output, case
        return "refused"
    expected, actual = _files(_expected(kind, command)), _files(out)
    wrong = sorted(name for name in {*expected, *actual} if expected.get(name) != actual.get(name))
    assert not wrong, f"{case}\n{wrong} are not those of the sound run"
    return "right"


def _convert(command: tuple[object, ...], src: Path, out: Path) -> tuple[int | None, str]:
    """Run a command on a run: its exit code, and what it said."""
    return convert(command[0], src, out, *command[1:], *VOCAB, "-q")


def _files(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, which names the source, by its path."""
    names = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if path.name != MANIFEST}


@cache
def _scratch() -> Path:
    return Path(mkdtemp(prefix="torch-dist-"))


@cache
def _source(kind: str) -> Path:
    """A sound run."""
    if kind == "stock":
        return REAL
    folder = _scratch() / kind
    code, output = _convert(COMMANDS["optimizer"], REAL, folder)
    assert code == 0, output
    for path in folder.rglob(MANIFEST):  # as a training leaves it
        path.unlink()
    return folder


@cache
def _expected(kind: str, command: str) -> Path:
    """What a sound run becomes."""
    out = _scratch() / f"{kind}-{command}"
    code, output = _convert(COMMANDS[command], _source(kind), out)
    assert code == 0, output
    return out
