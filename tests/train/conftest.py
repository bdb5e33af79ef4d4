"""A tiny model, tokenized dialogues, and trainings in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.demo import command
from tests.demo_train import start
from train.settings.config_file import load_config

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/data/1_sft"
PROGRAM = "from train.cli import main; main()"


class Trained(NamedTuple):
    """What a training left."""

    code: int
    out: str
    save: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Its log."""
        return [json.loads(line) for line in (self.save / "log.jsonl").read_text().splitlines()]

    def series(self, name: str) -> list[float]:
        """One number of each step."""
        return [line[name] for line in self.lines]


def environment() -> dict[str, str]:
    """The variables of a training."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def spawn(argv: list[str], ranks: int) -> subprocess.Popen[str]:
    """Start `train` on some ranks, as users do."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    program = ["-m", "train"] if ranks > 1 else ["-c", PROGRAM]
    command = [sys.executable, *(launcher if ranks > 1 else []), *program, *argv]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


class Fork:
    """A rank that runs, or has ended."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any], pid: int, out: Path) -> None:
        self.ask, self.pid, self.out = ask, pid, out
        self.code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        if self.code is None:
            self.code = self.ask({"pid": self.pid})
        return self.code

    def wait(self, seconds: float) -> int | None:
        """Likewise, when it has ended or so much time has passed."""
        limit = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        return self.code

    def send(self, number: int) -> None:
        """Signal it."""
        os.kill(self.pid, number)


class Forks:
    """`forks(words, ranks)`: run `train`, or a script, to its end as forks of a process that has imported it."""

    def __init__(self, mother: subprocess.Popen[str], folder: Path) -> None:
        self.mother, self.folder = mother, folder

    @staticmethod
    def place() -> dict[str, str]:
        """The variables of a training, which runs in the folder that this process is in."""
        return environment() | {"PWD": str(Path.cwd())}

    def ask(self, what: dict[str, Any]) -> Any:
        """What the mother answers."""
        assert self.mother.stdin is not None
        assert self.mother.stdout is not None
        self.mother.stdin.write(json.dumps(what) + "\n")
        self.mother.stdin.flush()
        return json.loads(self.mother.stdout.readline())

    def __call__(self, argv: list[str], ranks: int, script: Path | None = None) -> tuple[int, str]:
        """Exit code and output."""
        out = self.folder / "out"
        request = {"argv": argv, "env": self.place(), "out": str(out), "script": script and str(script)}
        return self.ask({**request, "ranks": ranks, "seconds": 240}), out.read_text()

    def start(self, argv: list[str]) -> Fork:
        """Start `train` on one rank."""
        out = self.folder / "started"
        request = {"argv": argv, "env": self.place(), "out": str(out), "script": None}
        return Fork(self.ask, self.ask(request), out)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """The process that has imported torch and transformers, and what it is asked for."""
    with forking(tmp_path_factory.mktemp("forks")) as server:
        yield server


@contextmanager
def forking(folder: Path, *modules: str, path: Path = ROOT) -> Iterator[Forks]:
    """Start the process that imports modules, or what a training needs; `path` is looked through for them."""
    command = [sys.executable, str(Path(__file__).with_name("forks.py")), *modules]
    untouched = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # else whoever asks for a GPU in it takes it from its forks
    env = environment() | untouched | {"PYTHONPATH": f"{ROOT}:{path}"}
    mother = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    yield Forks(mother, folder)
    mother.communicate(timeout=60)  # which closes what it reads


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of 200 dialogues."""
    folder = tmp_path_factory.mktemp("data")
    argv = ["tokenize", "--input", GOLDEN / "sft.jsonl", "--vocab-file", GOLDEN / "model.model", "--append-eod"]
    ran = spawn([*map(str, argv), "--output-prefix", str(folder / "P"), "--workers", "1", "-q"], 1)
    out, _ = ran.communicate(timeout=60)
    assert ran.returncode == 0, out
    return folder / "P_text_document"


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with random weights, the users' tokenizer and the control template."""
    folder = tmp_path_factory.mktemp("talker") / "model"
    start(GOLDEN / "model.model", folder)
    command("convert", "assets", str(folder), "--chat-template", "control")
    return folder


def tree_of(path: Path, data: Path, save: Path) -> dict[str, Any]:
    """Settings for a training of 8 steps of 8 rows."""
    return {
        "model": {"path": str(path), "dtype": "fp32"},
        "data": {"train": [str(data)], "seq_length": 64},
        "batch": {"size": 8, "micro": 2},
        "optim": {"lr": 1e-3},
        "steps": {"train_iters": 8, "iteration_offset": 100},
        "save": {"path": str(save), "every": 4},
    }


@pytest.fixture
def settings(model: Callable[..., Path], data: Path, tmp_path: Path) -> Callable[..., Path]:
    """`settings(name, **sections)`: a file with those of `tree_of`, and others."""

    def write(family: str = "llama", **sections: Any) -> Path:
        tree = tree_of(model(family, vocab_size=253), data, tmp_path / "save")
        for name, section in sections.items():
            tree[name] = tree.get(name, {}) | section if isinstance(section, dict) else section
        path = tmp_path / "config.yml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


@pytest.fixture
def run(tmp_path: Path, forks: Forks) -> Callable[..., Trained]:
    """`run(config, words, ranks=2)`: train to the end, or whatever end it finds."""

    def train(config: Path, *options: object, ranks: int = 1, save: str = "save") -> Trained:
        place = tmp_path / save
        return Trained(*forks(["run", str(config), "--save.path", str(place), *map(str, options)], ranks), place)

    return train


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The only rank of a training, in this process."""
    from train.distributed import environment, world

    for name, value in environment({}).items():
        monkeypatch.setenv(name, value)
    with world(1, 1) as ranks:
        yield ranks


@pytest.fixture
def read(tmp_path):
    """`read(text, *words)`: the settings of a file with this text, and the notes on it."""

    def load(text, *options):
        (tmp_path / "c.yml").write_text(text)
        return load_config(tmp_path / "c.yml", options)

    return load
