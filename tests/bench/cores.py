"""How far one conversion uses the cores of a machine: python -m tests.bench.cores [--layers N] [--rounds N] ...

hf2megatron into 4 and into 16 files and megatron2hf, verified, with `-j` from 1 to all cores, in memory and on a disk,
and fsdp2hf of 4 files beside `accelerate merge-weights`: wall seconds, GB/s of what is read, and the efficiency, which
is the time of one core over that of n, divided by n. Medians of rounds that take turns; all is in the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

CONVERT = str(Path(sys.executable).with_name("convert"))
COMMANDS = {
    "hf2megatron TP2xPP2": ("hf", ["hf2megatron", "--tp", "2", "--pp", "2"]),
    "hf2megatron TP4xPP4": ("hf", ["hf2megatron", "--tp", "4", "--pp", "4"]),
    "megatron2hf": ("run", ["megatron2hf"]),
}
"""Name: the folder that is read, and the command with its options."""
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]


def made(folder: Path, layers: int) -> int:
    """Make a model of Llama's shape with random weights in bf16, the same as FSDP and Megatron; gives its bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=layers, vocab_size=32000,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    random = torch.empty(67_108_859, dtype=torch.bfloat16).uniform_(-0.03, 0.03)  # a prime: no two parts begin alike
    position = 0
    for tensor in model.parameters():
        left = tensor.data.view(-1)
        while len(left):
            count = min(len(left), len(random) - position)
            left[:count] = random[position : position + count]
            left, position = left[count:], (position + count) % len(random)
    model.save_pretrained(folder / "hf")
    for command, out, options in (
        ("hf2megatron", "run", ["--tp", "2", "--pp", "2"]),
        ("hf2fsdp", "fsdp", ["--ranks", "4"]),
    ):
        subprocess.run([CONVERT, command, folder / "hf", folder / out, *options, "-q"], check=True)
    return sum(tensor.nbytes for tensor in model.parameters())


def seconds(command: list[str], out: Path) -> float:
    """Run a command that writes a folder, and delete that."""
    began = time.monotonic()
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    took = time.monotonic() - began
    shutil.rmtree(out)
    return took


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="a multiple of four")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    steps = [jobs for jobs in (1, 2, 4, 8, 16, 32, 64) if jobs < cores] + [cores]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory(dir=options.disk) as disk:
        places = {"memory": Path(memory), "disk": Path(disk)}
        nbytes = made(places["memory"], options.layers)
        for name in ("hf", "run", "fsdp"):
            shutil.copytree(places["memory"] / name, places["disk"] / name)
        ways: dict[tuple[str, str], list[str]] = {}
        for place, folder in places.items():
            out = str(folder / "out")
            for jobs in steps if place == "memory" else (1, cores):
                for name, (source, (command, *extra)) in COMMANDS.items():
                    argv = [CONVERT, command, str(folder / source), out, *extra, "-j", str(jobs), "-q"]
                    ways[f"{name}, {place}", f"-j {jobs}"] = argv
            fsdp = str(folder / "fsdp")
            merge = [CONVERT, "fsdp2hf", fsdp, out, "--config", str(folder / "hf"), "-q"]
            ways[f"fsdp2hf, {place}", f"-j {cores}"] = merge
            ways[f"fsdp2hf, {place}", "accelerate"] = [*ACCELERATE, fsdp, out]
        taken: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, command in ways.items():
                taken[way].append(seconds(command, places[way[0].split(", ")[1]] / "out"))
    print(f"{nbytes / 1e9:.1f} GB, {cores} cores, {options.rounds} rounds")
    for (what, how), times in taken.items():
        took, alone = median(times), taken.get((what, "-j 1"))
        jobs = int(how[3:]) if how.startswith("-j") else 0
        scaling = f"  efficiency {median(alone) / took / jobs:.2f}" if alone and jobs > 1 else ""
        print(f"{what:27} {how:10} {took:6.2f} s  {nbytes / took / 1e9:5.2f} GB/s{scaling}")


if __name__ == "__main__":
    main()
