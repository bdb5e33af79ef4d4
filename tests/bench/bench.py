"""The benchmarks: python -m tests.bench.bench [--quick] [--json OUT] [--work DIR] [--only PART ...].

This process imports nothing heavy: Linux counts the memory of the process that starts another into the other's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
CONVERT = str(Path(sys.executable).with_name("convert"))
CP = ("cp", "-r")
CP_SYNC = ("sh", "-c", 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +')
KEEP_FREE = 20 * 10**9
READ = 'cp -r "$0" "$1" && shift && exec "$@"'
"""A copy, and what comes after it as one command: its CPU time is that of both."""
IN_MEMORY = Path("/dev/shm/vitruvian-bench")
FREE_IN_MEMORY = 4 * 10**9
CAT = ("sh", "-c", 'mkdir "$1" && cat "$0"/*.distcp > "$1/all"')
CAT_SYNC = (*CAT[:2], CAT[2] + ' && sync "$1/all"')
ACCELERATE = str(Path(sys.executable).with_name("accelerate"))
TO_TORCH = 'mkdir "$1" && exec "$2" -m torch.distributed.checkpoint.format_utils dcp_to_torch "$0" "$1/model.pt"'
STARTS = 15
HANGS = 1800
MOST_SPACE = 4 << 30
PARTS = ["start", "floor", "speed", "fsdp", "zero", "checksums", "ranks", "memory"]


@dataclass(frozen=True)
class Sample:
    """What one run took: seconds, seconds of CPU (user and system), bytes at its peak."""

    wall: float
    cpu: float
    rss: int


@dataclass(frozen=True)
class Contender:
    """A command; `{out}` in it is a path that does not exist yet."""

    name: str
    command: tuple[str, ...]


@dataclass
class Results:
    """Everything that was measured, for --json, and the targets: what, measured, wanted at most, unit.

    What is wanted at least counts as negative.
    """

    machine: dict[str, Any]
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    targets: list[tuple[str, float, float, str]] = field(default_factory=list)


class FailedError(Exception):
    """A command that is measured failed."""


# --- measuring -------------------------------------------------------------------------------------------------------


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None, address_space: int = 0, disk: Path | None = None
) -> Sample:
    """Run a command to its end; kill it when it hangs, or when the file system of `disk` gets full."""
    limited = ["prlimit", f"--as={address_space}", *command] if address_space else command
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        settings = environment() | dict(env or {})
        process = subprocess.Popen(limited, env=settings, stdout=subprocess.DEVNULL, stderr=errors)
        ended = threading.Event()
        threading.Thread(target=guard, args=(process.pid, disk, ended), daemon=True).start()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        ended.set()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            message = errors.read().decode(errors="replace")[-2000:]
            raise FailedError(f"exit code {process.returncode}: {' '.join(command)}\n{message}")
    return Sample(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def environment() -> dict[str, str]:
    """The caller's environment, with bytecode cached as it is for an installed package."""
    trusted = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "DS_ACCELERATOR": "cpu"}  # zero_to_fp32 unpickles
    cache = trusted | {"PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "vitruvian-bench-pycache")}
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | cache


def guard(pid: int, disk: Path | None, ended: threading.Event) -> None:
    """SIGTERM would not do: `convert` answers it between two tensors."""
    latest = time.monotonic() + HANGS
    while not ended.wait(0.5):
        if time.monotonic() > latest or (disk and shutil.disk_usage(disk).free < KEEP_FREE):
            os.kill(pid, 9)
            return


def interleave(
    contenders: Sequence[Contender], rounds: int, out: Path, free: int = KEEP_FREE
) -> dict[str, list[Sample]]:
    """Run A B C A B C ...; the first round does not count. Outputs are deleted, and the disk is idle, before each."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for i in range(rounds + 1):
        for contender in contenders:
            if shutil.disk_usage(out.parent).free < free:
                raise FailedError(f"less than {free / 1e9:.0f} GB are free in {out.parent}")
            sample = run([word.replace("{out}", str(out)) for word in contender.command])
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            if i:
                samples[contender.name].append(sample)
    return samples


# --- printing --------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{median(values):.{digits}f} [{min(values):.{digits}f}..{max(values):.{digits}f}]"


def ratios(samples: Sequence[Sample], base: Sequence[Sample], of: str = "wall") -> tuple[float, float]:
    """The ratio of the medians of the wall (or `cpu`) time, and the median of the ratios within each round."""
    ours, others = ([float(getattr(sample, of)) for sample in each] for each in (samples, base))
    return median(ours) / median(others), median([sample / other for sample, other in zip(ours, others, strict=True)])


def show(title: str, samples_of: Mapping[str, list[Sample]], bases: Sequence[str] = (), of: str = "wall") -> None:
    rows = [["", "wall s", "CPU s", "peak RSS MB", *(f"x {base}" for base in bases)]]
    for name, samples in samples_of.items():
        row = [name, spread([s.wall for s in samples]), spread([s.cpu for s in samples])]
        row.append(spread([s.rss / 1e6 for s in samples], 0))
        rows.append(row + ["{:.2f} ({:.2f})".format(*ratios(samples, samples_of[base], of)) for base in bases])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print(f"\n{title} (load {os.getloadavg()[0]:.1f})")
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    names = ("numpy", "blake3", "click", "torch", "accelerate", "deepspeed", "vitruvian")
    libraries = {name: version(name) for name in names if find_spec(name)}
    return {
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release(), "python": platform.python_version(), "load": round(os.getloadavg()[0], 1),
        **libraries,
    }  # fmt: skip


# --- the benchmarks --------------------------------------------------------------------------------------------------


def model(work: Path, name: str, *arguments: str) -> str:
    """A model folder; made once and kept."""
    out = work / "-".join((name, *(word.strip("-") for word in arguments)))
    if not out.exists():
        fresh = work / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        run([sys.executable, "-m", "tests.bench.make_model", name, str(fresh), *arguments], disk=work)
        fresh.rename(out)
    return str(out)


def speed(work: Path, rounds: int, results: Results) -> None:
    """Conversions against `cp -r` of the same bytes, and against the naive script."""
    bf16, fp32, megatron = model(work, "617M"), model(work, "617M", "--dtype", "fp32"), str(work / "617M-tp2-pp2")
    cut, naive = ("--tp", "2", "--pp", "2"), str(HERE / "naive.py")
    if not Path(megatron).exists():
        run([CONVERT, "hf2megatron", bf16, megatron, *cut, "-q"])
    run([sys.executable, naive, bf16, str(work / "naive"), *cut])
    run([sys.executable, naive, "--same", megatron, str(work / "naive")])
    shutil.rmtree(work / "naive")

    def case(title: str, verb: str, source: str, options: Sequence[str], copied: str, compare: bool) -> None:
        ours = (CONVERT, verb, source, "{out}", *options, "-q")
        contenders = [
            Contender("convert", ours),
            Contender("cp -r", (*CP, copied, "{out}")),
            Contender("convert --no-verify", (*ours, "--no-verify")),
            Contender("cp -r + sync", (*CP_SYNC, copied, "{out}")),
        ]
        if compare:
            contenders.append(Contender("naive.py", (sys.executable, naive, source, "{out}", *options)))
        samples = interleave(contenders, rounds, work / "out")
        results.samples[title] = samples
        show(title, samples, ["cp -r", "cp -r + sync"])
        if "cast" not in title:
            for name in ("convert", "convert --no-verify"):
                for base in ("cp -r", "cp -r + sync"):
                    value = ratios(samples[name], samples[base])[0]
                    results.targets.append((f"{title}, {name}: wall x {base}", value, 1.5, "x"))
        rss = max(sample.rss for name in ("convert", "convert --no-verify") for sample in samples[name])
        results.targets.append((f"{title}: peak RSS", rss / 1e6, 64, "MB"))

    case("hf2megatron TP2xPP2, bf16", "hf2megatron", bf16, cut, bf16, True)
    case("megatron2hf, bf16", "megatron2hf", megatron, (), megatron, False)
    case("reshard TP2xPP2 -> TP4, bf16", "reshard", megatron, ("--tp", "4"), megatron, False)
    for dtype, source in (("fp32", bf16), ("bf16", fp32)):  # compared with a copy of the larger side
        title = f"cast to {dtype}, hf2megatron TP2xPP2"
        case(title, "hf2megatron", source, (*cut, "--dtype", dtype), fp32, True)


def floor(work: Path, rounds: int, results: Results) -> None:
    """CPU-seconds in memory, against a copy and one hashing read, and two, of the same bytes: what has to be done."""
    del work
    shutil.rmtree(IN_MEMORY, ignore_errors=True)
    IN_MEMORY.mkdir()
    try:
        bf16, megatron, cut = model(IN_MEMORY, "1.1B"), str(IN_MEMORY / "megatron"), ("--tp", "2", "--pp", "2")
        against_floor("hf2megatron TP2xPP2", ("hf2megatron", bf16, "{out}", *cut), bf16, 1.3, rounds, results)
        run([CONVERT, "hf2megatron", bf16, megatron, *cut, "-q"])
        against_floor("megatron2hf", ("megatron2hf", megatron, "{out}"), megatron, 1.3, rounds, results)
        against_floor("reshard to TP4", ("reshard", megatron, "{out}", "--tp", "4"), megatron, 1.3, rounds, results)
        shutil.rmtree(megatron)
        ranks = str(IN_MEMORY / "fsdp")
        run([CONVERT, "hf2fsdp", bf16, ranks, "--ranks", "4", "-q"])
        against_floor("fsdp2hf, 4 ranks", ("fsdp2hf", ranks, "{out}", "--config", bf16), ranks, 1.3, rounds, results)
        shutil.rmtree(IN_MEMORY)
        IN_MEMORY.mkdir()
        bf16, fp32 = model(IN_MEMORY, "617M"), model(IN_MEMORY, "617M", "--dtype", "fp32")
        for dtype, source in (("fp32", bf16), ("bf16", fp32)):
            command = ("hf2megatron", source, "{out}", *cut, "--dtype", dtype)
            against_floor(f"cast to {dtype}, hf2megatron TP2xPP2", command, fp32, 1.6, rounds, results)
    finally:
        shutil.rmtree(IN_MEMORY, ignore_errors=True)


def against_floor(title: str, options: Sequence[str], copied: str, most: float, rounds: int, results: Results) -> None:
    """One conversion; a cast beside what its larger side takes."""
    ours, hashing = (CONVERT, *options, "-q"), (sys.executable, "-m", "tests.bench.hashing", copied)
    cases = {"convert": (*ours,), "convert --no-verify": (*ours, "--no-verify"), "convert -j 1": (*ours, "-j", "1")}
    floors = {"cp + 2 reads": (*hashing, "{out}"), "cp + 1 read": hashing}
    contenders = [Contender(name, command) for name, command in cases.items()]
    contenders += [Contender(name, ("sh", "-c", READ, copied, "{out}", *reads)) for name, reads in floors.items()]
    samples = results.samples[f"floor: {title}"] = interleave(contenders, rounds, IN_MEMORY / "out", FREE_IN_MEMORY)
    show(f"{title}, in memory; x of CPU s", samples, [*floors], "cpu")
    verified, unverified = (
        ratios(samples[name], samples[base], "cpu")[0] for name, base in zip(cases, floors, strict=False)
    )
    results.targets.append((f"{title}: CPU s x (cp + 2 hashing reads)", verified, most, "x"))
    results.targets.append((f"{title}, --no-verify: CPU s x (cp + 1)", unverified, most if most > 1.5 else 1.2, "x"))
    if most < 1.5:
        nbytes = sum(path.stat().st_size for path in Path(copied).rglob("*") if path.is_file())
        wall, alone = (median([sample.wall for sample in samples[name]]) for name in ("convert", "convert -j 1"))
        results.targets.append((f"{title}: speed", -nbytes / 1e9 / wall, -1.4, "GB/s"))
        cores = min(2, len(os.sched_getaffinity(0)))
        results.targets.append((f"{title}: efficiency on {cores} cores", -alone / cores / wall, -0.9, "x"))


def fsdp(work: Path, rounds: int, results: Results) -> None:
    """FSDP checkpoints of 4 ranks against `accelerate merge-weights`, torch, and `cat` of the same files."""
    config, out = model(work, "1.1B"), work / "out"
    folders = {dtype: work / f"1.1B-fsdp-4-{dtype}" for dtype in ("bf16", "fp32")}
    for dtype, folder in folders.items():
        if not folder.exists():
            run([CONVERT, "hf2fsdp", config, str(folder), "--ranks", "4", "--dtype", dtype, "-q"])
    run([CONVERT, "fsdp2hf", str(folders["bf16"]), str(out / "ours"), "--config", config, "-q"])
    run([ACCELERATE, "merge-weights", str(folders["bf16"]), str(out / "theirs")])
    run(["cmp", *(str(out / name / "model.safetensors") for name in ("ours", "theirs"))])
    shutil.rmtree(out)
    for dtype, folder in folders.items():
        merge(f"fsdp2hf, 4 ranks, {dtype}", str(folder), config, out, rounds, results)


def merge(title: str, source: str, config: str, out: Path, rounds: int, results: Results) -> None:
    """One FSDP checkpoint; of fp32 weights also the cast to bf16."""
    ours = (CONVERT, "fsdp2hf", source, "{out}", "--config", config, "-q")
    cast = (*ours, "--dtype", "bf16")
    contenders = [
        Contender("convert", ours),
        Contender("accelerate", (ACCELERATE, "merge-weights", source, "{out}")),
        Contender("convert --no-verify", (*ours, "--no-verify")),
        Contender("cat", (*CAT, source, "{out}")),
        Contender("dcp_to_torch", ("sh", "-c", TO_TORCH, source, "{out}", sys.executable)),
        Contender("cat + sync", (*CAT_SYNC, source, "{out}")),
    ]
    if "fp32" in title:
        contenders.insert(2, Contender("convert, to bf16", cast))
        contenders.insert(5, Contender("convert --no-verify, to bf16", (*cast, "--no-verify")))
    samples = results.samples[title] = interleave(contenders, rounds, out)
    show(title, samples, ["accelerate", "cat", "cat + sync"])
    for name in (name for name in samples if name.startswith("convert")):
        faster = 1 / ratios(samples[name], samples["accelerate"])[0]
        results.targets.append((f"{title}, {name}: times as fast as accelerate", -faster, -5, "x"))
        for base in ("cat", "cat + sync"):
            results.targets.append(
                (f"{title}, {name}: wall x {base}", ratios(samples[name], samples[base])[0], 1.3, "x")
            )
        results.targets.append((f"{title}, {name}: peak RSS", max(s.rss for s in samples[name]) / 1e6, 64, "MB"))


def zero(work: Path, rounds: int, results: Results) -> None:
    """DeepSpeed checkpoints of 2 ranks against `zero_to_fp32.py`, the script that DeepSpeed leaves beside them."""
    config, out = model(work, "617M"), work / "out"
    script = Path(find_spec("deepspeed").submodule_search_locations[0]) / "utils" / "zero_to_fp32.py"
    for stage in (2, 3):
        folder = work / f"617M-zero{stage}"
        if not folder.exists():
            fresh = work / "fresh"
            shutil.rmtree(fresh, ignore_errors=True)
            run([sys.executable, "-m", "tests.bench.make_zero", config, str(fresh), "--stage", str(stage)], disk=work)
            shutil.copy(script, fresh)
            fresh.rename(folder)
        ours = (CONVERT, "zero2hf", str(folder), "{out}", "--config", config, "--weights", "fp32-master", "-q")
        theirs = (sys.executable, str(folder / "zero_to_fp32.py"), str(folder), "{out}", "--safe_serialization")
        for name, command in (("ours", ours), ("theirs", theirs)):
            run([word.replace("{out}", str(out / name)) for word in command])
        run([sys.executable, "-m", "tests.bench.make_zero", "--same", str(out / "ours"), str(out / "theirs")])
        shutil.rmtree(out)
        contenders = [
            Contender("convert", ours),
            Contender("zero_to_fp32", theirs),
            Contender("convert --no-verify", (*ours, "--no-verify")),
            Contender("convert, to bf16", (*ours, "--dtype", "bf16")),
        ]
        title = f"zero2hf, stage {stage}, 2 ranks, FP32 master weights"
        samples = results.samples[title] = interleave(contenders, rounds, out)
        show(title, samples, ["zero_to_fp32"])
        for name in (name for name in samples if name.startswith("convert")):
            faster = 1 / ratios(samples[name], samples["zero_to_fp32"])[0]
            results.targets.append((f"{title}, {name}: times as fast as zero_to_fp32", -faster, -3, "x"))
            results.targets.append((f"{title}, {name}: peak RSS", max(s.rss for s in samples[name]) / 1e6, 64, "MB"))


def ranks(work: Path, rounds: int, results: Results) -> None:
    """An FSDP checkpoint of many ranks, without weights: what planning takes, and how much memory."""
    many, title = model(work, "8B", "--fsdp", "128"), "8B, 128 ranks (sparse)"
    command = (CONVERT, "fsdp2hf", many, "{out}", "-q")
    contenders = [
        Contender("inspect", (CONVERT, "inspect", many)),
        Contender("fsdp2hf -n", (*command, "-n")),
        Contender("fsdp2hf", command),
        Contender("fsdp2hf --no-verify, to fp32", (*command, "--dtype", "fp32", "--no-verify")),
    ]
    samples_of = results.samples[title] = interleave(contenders, rounds, work / "out")
    show(title, samples_of)
    for name, samples in samples_of.items():
        results.targets.append((f"{title}, {name}: peak RSS", max(s.rss for s in samples) / 1e6, 64, "MB"))


def checksums(work: Path, rounds: int, results: Results) -> None:
    """The CPU time of a conversion with and without the checksums of its source, which is torch's zip archives."""
    config = model(work, "617M")
    for title, there, back in (
        ("megatron2hf TP2xPP2, bf16", ("hf2megatron", "--tp", "2", "--pp", "2"), ("megatron2hf",)),
        ("fsdp2hf, 4 ranks, bf16", ("hf2fsdp", "--ranks", "4"), ("fsdp2hf", "--config", config)),
    ):
        source = work / f"617M-{there[0]}-source"
        if not source.exists():
            run([CONVERT, there[0], config, str(source), *there[1:], "-q"])
        contenders = []
        for how in ("with", "without"):
            command = (sys.executable, "-m", "tests.bench.unchecked", how, back[0], str(source), "{out}", *back[1:])
            contenders.append(Contender(f"{how} checksums", (*command, "-q")))
        samples_of = interleave(contenders, 4 * rounds, work / "out")
        results.samples[f"checksums: {title}"] = samples_of
        show(title, samples_of)
        for name, of in (("minima", min), ("medians", median)):
            ours, other = (of([sample.cpu for sample in samples]) for samples in samples_of.values())
            results.targets.append((f"{title}: CPU time x without checksums, {name}", ours / other, 1.05, "x"))


def memory(work: Path, quick: bool, results: Results) -> None:
    """Peak RSS, and the smallest address space, of a small and of a very large model."""
    small, large, out = model(work, "617M"), model(work, "30B", "--sparse"), work / "out"
    cut = ("--tp", "8", "--pp", "4", "-q", *(("--no-verify",) if quick else ()))
    limit = 0
    for name, command in (
        ("digest 617M", (CONVERT, "digest", small)),
        ("digest 30B", (CONVERT, "digest", large)),
        ("hf2megatron 617M TP8xPP4", (CONVERT, "hf2megatron", small, str(out), *cut)),
        ("hf2megatron 30B TP8xPP4", (CONVERT, "hf2megatron", large, str(out), *cut)),
    ):
        for env in ({}, {"OPENBLAS_NUM_THREADS": "1"}) if "digest 617M" in name else ({},):
            limit, sample = smallest(command, env, 64 << 20 if limit == 0 or env else limit, work)
            title = " ".join([f"{key}={value}" for key, value in env.items()] + [name])
            disk = sum(path.stat().st_blocks * 512 for path in out.rglob("*")) if out.exists() else 0
            line = f"{title}: peak RSS {sample.rss / 1e6:.1f} MB, {sample.wall:.1f} s, under {limit >> 20} MiB"
            print(f"  {line} of address space" + (f", {disk / 1e6:.0f} MB on disk" if disk else ""), flush=True)
            shutil.rmtree(out, ignore_errors=True)
            results.samples[f"memory: {title}"] = {"convert": [sample]}
            results.limits[title] = limit
            if env:
                limit = results.limits[name]
            else:
                results.targets.append((f"{title}: peak RSS", sample.rss / 1e6, 64, "MB"))


def smallest(command: Sequence[str], env: Mapping[str, str], start: int, work: Path) -> tuple[int, Sample]:
    """The smallest limit of the address space, in steps of 32 MiB, under which a command succeeds."""
    try:
        return start, run(command, env, start, work)
    except FailedError:
        if start >= MOST_SPACE:
            raise
    for path in (work / "out", work / "out.partial"):
        shutil.rmtree(path, ignore_errors=True)
    return smallest(command, env, start + (32 << 20), work)


def start(work: Path, results: Results) -> None:
    """How long a command takes that only reads headers."""
    hf, megatron = model(work, "70B", "--sparse"), model(work, "70B", "--megatron", "8", "4")
    contenders = [
        Contender("python -c pass", (sys.executable, "-c", "pass")),
        Contender("convert --help", (CONVERT, "--help")),
        Contender("inspect 70B Hugging Face", (CONVERT, "inspect", hf)),
        Contender("inspect 70B Megatron TP8xPP4", (CONVERT, "inspect", megatron)),
    ]
    samples = interleave(contenders, STARTS, work / "out")
    results.samples["start-up"] = samples
    show("start-up", samples)
    for contender in contenders[1:]:
        wall = median([sample.wall for sample in samples[contender.name]])
        results.targets.append((f"{contender.name}: wall", wall, 0.3, "s"))


def report(results: Results, out: Path | None) -> None:
    """Print which targets were reached, and write every sample."""
    print("\ntargets")
    for what, value, limit, unit in results.targets:
        bound = f"at {'least' if limit < 0 else 'most'} {abs(limit)} {unit}"
        print(f"  {'reached' if value <= limit else 'MISSED '}  {abs(value):6.2f} {unit:2} ({bound})  {what}")
    if out:
        out.write_text(json.dumps(asdict(results), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 5, and 30B is not read back")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every sample")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "vitruvian-bench")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for name in ("out", "out.partial", "naive"):
        shutil.rmtree(options.work / name, ignore_errors=True)
    results = Results(machine())
    print(", ".join(f"{name} {value}" for name, value in results.machine.items()))
    parts, rounds = options.only or PARTS, 3 if options.quick else 5
    if "start" in parts:
        start(options.work, results)
    for part in (floor, speed, fsdp, zero, checksums, ranks):
        if part.__name__ in parts:
            part(options.work, rounds, results)
    if "memory" in parts:
        print("\nmemory")
        memory(options.work, options.quick, results)
    report(results, options.json)


if __name__ == "__main__":
    try:
        main()
    except FailedError as error:
        sys.exit(str(error))
