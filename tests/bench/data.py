"""The benchmarks of data: python -m tests.bench.data [--quick] [--json OUT] [--work DIR] [--only tokenize memory pack].

What tokenization is measured against is SentencePiece alone: the same spans, in memory already, on as many processes.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.bench.bench import Contender, FailedError, Results, Sample, environment, machine, ratios, report, run, show

TRAIN = str(Path(sys.executable).with_name("train"))
PEERS = (sys.executable, "-m", "tests.bench.text_peers")
MEGABYTES = 400
PARTS = ["tokenize", "memory", "pack"]


def text(work: Path) -> Path:
    """Dialogues and a tokenizer; made once and kept."""
    out = work / f"text-{MEGABYTES}"
    if not out.exists():
        shutil.rmtree(work / "fresh", ignore_errors=True)
        make = (sys.executable, "-m", "tests.bench.make_text", str(work / "fresh"))
        run([*make, "--megabytes", str(MEGABYTES)])
        (work / "fresh").rename(out)
    return out


def ours(folder: Path, out: Path, source: str = "chat.jsonl") -> tuple[str, ...]:
    options = ("--input", str(folder / source), "--vocab-file", str(folder / "spm.model"), "--append-eod", "-q")
    return (TRAIN, "tokenize", *options, "--output-prefix", str(out / "P"))


def tokenize(work: Path, rounds: int, results: Results) -> None:
    """Whole runs of ours and of a pipeline as GPT-NeoX has, and the time that SentencePiece needs within them."""
    folder, out = text(work), work / "out"
    title = f"tokenize {MEGABYTES} MB"
    contenders = [
        Contender("train tokenize", ours(folder, out)),
        Contender("imap pipeline", (*PEERS, "imap", str(folder), str(out / "imap"))),
    ]
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    alone: list[Sample] = []
    for number in range(rounds + 1):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        taken = [run(contender.command) for contender in contenders]
        if not filecmp.cmp(out / "imap", out / "P_text_document.bin", shallow=False):
            raise FailedError("the two pipelines wrote different tokens")
        bound = run([*PEERS, "bound", str(folder), str(out / "seconds")])
        if number:
            for contender, sample in zip(contenders, taken, strict=True):
                samples[contender.name].append(sample)
            alone.append(Sample(float((out / "seconds").read_text()), bound.cpu, bound.rss))
    samples["SentencePiece alone"] = alone
    results.samples[title] = samples
    show(title, samples, ["SentencePiece alone"])
    share = 1 / ratios(samples["train tokenize"], alone)[0]
    faster = 1 / ratios(samples["train tokenize"], samples["imap pipeline"])[0]
    results.targets.append((f"{title}: share of SentencePiece's own speed", -100 * share, -95, "%"))
    results.targets.append((f"{title}: times as fast as an imap pipeline", -faster, -1, "x"))


def memory(work: Path, rounds: int, results: Results) -> None:
    """The largest process, for ten thousand and for a million short documents."""
    folder, out = text(work), work / "out"
    line = '{"text": "<<<|user|>>>saule %d<<<|user|>>><<<|assistant|>>>upe<<<|assistant|>>>"}\n'
    peaks = {}
    for number in (10_000, 1_000_000):
        source = folder / f"short-{number}.jsonl"
        if not source.exists():
            with source.open("w") as file:
                file.writelines(line % place for place in range(number))
        samples: list[Sample] = []
        for _ in range(rounds):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            samples.append(run(ours(folder, out, source.name)))
        title = f"tokenize {number} short documents"
        results.samples[title] = {"train tokenize": samples}
        show(title, results.samples[title])
        peaks[number] = median([sample.rss for sample in samples])
    grown = peaks[1_000_000] / peaks[10_000]
    results.targets.append(("tokenize: memory for a million documents over ten thousand", grown, 1.1, "x"))


def pack(_: Path, rounds: int, results: Results) -> None:
    """Packing and counting, in one process."""
    command = [sys.executable, "-m", "tests.bench.packing", str(rounds)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise FailedError(ran.stderr[-2000:])
    figures = json.loads(ran.stdout)
    for kind, packers in figures.items():
        results.samples[f"pack {kind}"] = {
            name: [Sample(cpu, cpu, 0) for cpu in measured["cpu"]] for name, measured in packers.items()
        }
        for name, measured in packers.items():
            fill = f", fill {measured['fill'][0]:.5f}" if measured["fill"] else ""
            print(f"  {kind:12} {name:13} {1000 * median(measured['cpu']):8.1f} ms{fill}", flush=True)
    seconds = median(figures["million"]["ours"]["cpu"])
    results.targets.append(("packing of a million documents", seconds, 0.1, "s"))
    results.targets.append(("count of 20 million documents", median(figures["count"]["ours"]["cpu"]), 1, "s"))
    for kind in ("chat", "translation", "bimodal"):
        if "TRL, loop" not in figures[kind]:
            print("  TRL is not installed: pip install --no-deps trl==1.16.0")
            break
        mine, trl = (figures[kind][name] for name in ("ours", "TRL, loop"))
        faster = median(trl["cpu"]) / median(mine["cpu"])
        results.targets.append((f"packing, {kind}: times as fast as TRL's loop", -faster, -60, "x"))
        results.targets.append((f"packing, {kind}: fill of TRL's", -mine["fill"][0] / trl["fill"][0], -1, "x"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 5")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every sample")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "vitruvian-bench")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    results = Results(machine())
    print(", ".join(f"{name} {value}" for name, value in results.machine.items()))
    for part in (tokenize, memory, pack):
        if part.__name__ in (options.only or PARTS):
            part(options.work, 3 if options.quick else 5, results)
    report(results, options.json)


if __name__ == "__main__":
    try:
        main()
    except FailedError as error:
        sys.exit(str(error))
