"""A training that is not kind to those who watch it: `python -m tests.faults.watch_storm --checkpoints 200 --seed 1`.

Checkpoints of Megatron appear in two halves, are given up half written and written again, deleted, renamed and renamed
back, while watchers are killed with kill -9, with or without the process that converts for them, and started again.
What must hold is seen from outside: every complete checkpoint that stayed is one model of its weights, put in its place
once; nothing half written ever becomes one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load_file, save_file

import vitruvian
from formats.megatron.folders import TRACKER, name_of
from tests.models import build

ROOT = Path(__file__).parents[2]


class Watchers:
    """Watches of one run, each in a process group of its own; one that is killed is replaced."""

    def __init__(self, options: list[str], count: int, log: Path) -> None:
        self.options, self.log = options, log
        self.running = [self.start() for _ in range(count)]

    def start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "vitruvian", "convert", "watch", *self.options]
        with self.log.open("ab") as log:
            return subprocess.Popen(argv, start_new_session=True, stdout=log, stderr=log, cwd=ROOT)

    def kill(self, dice: random.Random) -> None:
        """One of them, alone or with the conversion that it waits for."""
        index = dice.randrange(len(self.running))
        (os.killpg if dice.random() < 0.5 else os.kill)(self.running[index].pid, signal.SIGKILL)
        self.running[index].wait(10)
        self.running[index] = self.start()

    def stop(self) -> list[int]:
        for process in self.running:
            process.terminate()
        return [process.wait(60) for process in self.running]

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def __enter__(self) -> Watchers:
        return self


class Places(threading.Thread):
    """Looks at OUT all the time: which folders have stood under each name."""

    def __init__(self, out: Path) -> None:
        super().__init__(daemon=True)
        self.out, self.seen, self.ended = out, dict[str, set[int]](), threading.Event()

    def __enter__(self) -> Places:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            for entry in os.scandir(self.out):
                if not entry.name.endswith(".partial"):
                    self.seen.setdefault(entry.name, set()).add(entry.inode())


def write(source: Path, folder: Path, dice: random.Random) -> None:
    """Write a checkpoint as ranks do: each file in pieces."""
    for path in sorted(source.rglob("*.pt")):
        place = folder / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        cut = dice.randrange(len(content))
        with place.open("wb") as file:
            file.write(content[:cut])
            file.flush()
            time.sleep(dice.random() * 0.2)
            file.write(content[cut:])


def prototypes(place: Path) -> tuple[Path, dict[Path, str]]:
    """A base, and folders of checkpoints of Megatron with other weights each; their digests."""
    base, digests = build(place / "base", "llama", "bfloat16"), {}
    for number in range(3):
        model = place / f"model-{number}"
        shutil.copytree(base, model)
        weights = load_file(model / "model.safetensors")
        save_file(
            {key: weight + number for key, weight in weights.items()}, model / "model.safetensors", {"format": "pt"}
        )
        done = vitruvian.convert(model, place / f"run-{number}", to="megatron", tp=2)
        digests[done.out / "release"] = done.digest  # whose files are of no iteration
    return base, digests


def storm(place: Path, count: int, seed: int, pause: float) -> dict[str, int]:
    """Let a training of so many checkpoints happen, and see what came of them. Returns how often what happened."""
    dice, happened = random.Random(seed), Counter[str]()
    base, digest_of = prototypes(place)
    run, out = place / "run", place / "out"
    run.mkdir()
    out.mkdir()
    options = [str(run), "--out", str(out), "--config", str(base), "--every", "0.01"]
    with Watchers(options, 2, place / "log") as watchers, Places(out) as places:
        digests = training(run, digest_of, count, dice, happened, lambda: watchers.kill(dice), pause)
        half = run / name_of(count + 1)  # and one is being written at the end
        write(next(iter(digest_of)), half, dice)
        complete = {name for name in digests if (run / name).exists()}
        until = time.monotonic() + 60 + 4 * count
        while not complete <= (states := converted(out)).keys():
            assert time.monotonic() < until, complete - states.keys()
            assert all(process.poll() is None for process in watchers.running), watchers.log.read_text()[-2000:]
            time.sleep(0.2)
        assert watchers.stop() == [75, 75]
    models = {path.name for path in out.iterdir() if path.suffix != ".partial"} - {".watch"}
    assert models == states.keys(), models ^ states.keys()
    assert half.name not in models
    assert models <= digests.keys()
    for name in models:
        assert states[name] == [digests[name]], f"{name}: {states[name]}, and {digests[name]} was saved"
        assert len(places.seen[name]) == 1, f"{name} was put in its place {len(places.seen[name])} times"
        assert vitruvian.verify(out / name).digest == digests[name]
    return {"complete": len(digests), "stayed": len(complete), "converted": len(models), **happened}


def training(
    run: Path, sources: dict[Path, str], count: int, dice: random.Random, happened: Counter[str],
    kill: Callable[[], None], pause: float,
) -> dict[str, str]:  # fmt: skip
    """Save checkpoints, and disturb who watches. The digest of each that was complete, by its name."""
    digests: dict[str, str] = {}
    away: list[str] = []
    for step in range(1, count + 1):
        name = name_of(step)
        if dice.random() < 0.15:  # the training dies while it saves, and saves again when it is resumed
            write(dice.choice([*sources]), run / name, dice)
            next((run / name).rglob("*.pt")).unlink()
            happened["given up"] += 1
            if dice.random() < 0.5:
                shutil.rmtree(run / name)
                happened["never again"] += 1
                continue
        source = dice.choice([*sources])
        write(source, run / name, dice)
        digests[name] = sources[source]
        (run / TRACKER).write_text(str(step))
        present = [checkpoint for checkpoint in digests if (run / checkpoint).exists()]
        what = dice.random()
        if what < 0.15:
            shutil.rmtree(run / dice.choice(present))
            happened["deleted"] += 1
        elif what < 0.3:
            away.append(dice.choice(present))
            (run / away[-1]).rename(run / f"backup_{away[-1]}")
            happened["renamed"] += 1
        elif away and what < 0.5:
            back = away.pop()
            (run / f"backup_{back}").rename(run / back)
            happened["renamed back"] += 1
        if dice.random() < 0.3:
            kill()
            happened["killed"] += 1
        time.sleep(dice.random() * pause)
    return digests


def converted(out: Path) -> dict[str, list[str]]:
    """The digests with which the log says that each checkpoint was converted."""
    digests: dict[str, list[str]] = {}
    log = out / ".watch" / "log.jsonl"
    for line in log.read_text().splitlines(keepends=True) if log.exists() else []:
        if line.endswith("\n") and (record := json.loads(line))["state"] == "converted":
            digests.setdefault(record["checkpoint"], []).append(record["digest"])
    return digests


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        print(storm(Path(place), args.checkpoints, args.seed, 1.0), f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
