"""Reading through the library beside safetensors and transformers: python -m tests.bench.library [--rounds N].

Each round runs every way once, in a process of its own, one after the other; a way's figure is the median of its
rounds. Everything is read once before, so that all find the files in the page cache.
`--device cuda` puts all there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

WAYS = {
    "safetensors.torch.load_file, copied": "sum(ours(t).nbytes for f in files for t in load_file(f, device).values())",
    "iterate, Hugging Face": "sum(t.nbytes for _, t in iterate(hf, device=device))",
    "iterate, Megatron TP4 PP2": "sum(t.nbytes for _, t in iterate(run, device=device))",
    "AutoModel.from_pretrained": "pretrained(hf)",
    "load into a model without values": "loaded(hf)",
    "load into a model without values, Megatron TP4 PP2": "loaded(run)",
}
"""Way: what is timed, and gives the bytes that it read."""
PROGRAM = """
import sys, time
from pathlib import Path
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from vitruvian.torch import iterate, load
torch.set_num_threads(2)
hf, run, device = sys.argv[1:4]

def ours(tensor):
    return tensor.clone() if device == "cpu" else tensor  # else it is a view of the file

files = sorted(map(str, Path(hf).glob("*.safetensors")))

def loaded(folder):
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(hf), dtype=torch.bfloat16)
    if device != "cpu":
        model.to_empty(device=device)
    load(model, folder)
    return sum(p.nbytes for p in model.parameters())

def pretrained(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=device)
    return sum(ours(p).nbytes for p in model.parameters())

began = time.monotonic()
count = {expression}
if device != "cpu":
    torch.cuda.synchronize()
print(count, time.monotonic() - began)
"""


def made(folder: Path, layers: int) -> tuple[Path, Path]:
    """A model of Llama's shape with random weights, and a run of Megatron of it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import vitruvian

    config = AutoConfig.for_model(
        "llama", hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=8,
        num_hidden_layers=layers, vocab_size=32000,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "hf")
    vitruvian.convert(folder / "hf", folder / "run", to="megatron", tp=4, pp=2)
    return folder / "hf", folder / "run"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        hf, run = made(Path(folder), options.layers)
        for number in range(options.rounds + 1):
            for name, expression in WAYS.items():
                code = PROGRAM.replace("{expression}", expression)
                argv = [sys.executable, "-c", code, str(hf), str(run), options.device]
                ran = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=True)
                count, seconds = ran.stdout.split()[-2:]
                rates[name] += [int(count) / float(seconds) / 1e9] if number else []
    first = median(next(iter(rates.values())))
    for name, samples in rates.items():
        rate, spread = median(samples), f"({min(samples):.2f} to {max(samples):.2f})"
        print(f"{name:50} {rate:5.2f} GB/s  {rate / first:5.2f} of the first  {spread}")


if __name__ == "__main__":
    main()
