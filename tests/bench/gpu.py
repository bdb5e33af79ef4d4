"""Tokens a second, MFU and memory on one GPU, beside TRL and torchtitan: python -m tests.bench.gpu [--rounds N] ...

All train a Llama of random weights in bf16, stepped in float32, on the same documents packed to 8192 tokens, with
activation checkpointing and fused AdamW, interleaved, each in a process of its own. The documents of a row do not see
each other; labels that are trained are what counts. TRL (`packing_strategy="bfd"`, padding-free) and torchtitan (its
dataset puts documents one after the other) pack themselves: rows differ, their sizes do not. torchtitan is compiled, as
its own settings are; `train run, compiled` is with `model.compile` and without `parallel.reshard`. What is not
installed is left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, ROWS, STEPS, SKIPPED = 8192, 4, 20, 8
END = 1
"""The token that ends a document, and is nowhere else."""
IN_MEMORY = Path("/dev/shm")
SHAPE = {"vocab_size": 32000, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": LENGTH}
SIZES = {
    "0.4B": SHAPE | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 20},
    "1.6B": SHAPE | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24},
}
COMPILED = "train run, compiled"
CONTENDERS = {"train run": "train", COMPILED: "train", "TRL": "trl", "torchtitan": "torchtitan"}
"""Contender: the package without which it is left out."""


def make_model(folder: Path, size: str) -> None:
    """Save a model and a tokenizer, which both want and neither uses."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **SIZES[size]), dtype=torch.bfloat16
        )
    model.to_empty(device="cpu")
    for tensor in model.parameters():
        torch.nn.init.ones_(tensor) if tensor.dim() == 1 else torch.nn.init.uniform_(tensor, -0.03, 0.03)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": END}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(folder)


def make_documents() -> list[list[int]]:
    """Documents as long as dialogues are, enough for all steps."""
    random = np.random.default_rng(0)
    count = LENGTH * ROWS * (STEPS + 4)
    documents: list[list[int]] = []
    while count > 0:
        size = int(np.clip(random.lognormal(5.8, 0.8), 16, LENGTH))
        documents.append([*random.integers(END + 1, SHAPE["vocab_size"], size - 1).tolist(), END])
        count -= size
    return documents


def write_documents(folder: Path, documents: list[list[int]]) -> None:
    """Write token files, which are ours, and JSON."""
    from train.data.tokens.indexed import bin_path, idx_path, write_index

    bin_path(folder / "P").write_bytes(np.concatenate(documents).astype(np.uint16).tobytes())
    write_index(idx_path(folder / "P"), np.dtype(np.uint16), np.array([len(document) for document in documents]))
    (folder / "documents.json").write_text(json.dumps(documents))


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def ours(folder: Path, micro: int, model: dict[str, Any], reshard: bool) -> dict[str, float]:
    """Train with `train run`, and read its log."""
    save = folder / f"save{time.monotonic_ns()}"
    settings = {
        "model": {"path": str(folder / "model"), **model},
        "data": {"train": [str(folder / "P")], "seq_length": LENGTH, "loss": "all"},
        "batch": {"size": ROWS, "micro": micro}, "parallel": {"reshard": reshard},
        "optim": {"lr": 1e-5}, "steps": {"train_iters": STEPS},
        "save": {"path": str(save), "every": 1000},
    }  # fmt: skip
    (folder / "config.yml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "train", "run", str(folder / "config.yml")]
    log, limit = save / "log.jsonl", time.monotonic() + 300
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and time.monotonic() < limit and _lines(log) < STEPS:
            time.sleep(0.1)
        process.kill()  # what it saves at its end is not measured
    if _lines(log) < STEPS:
        raise RuntimeError(
            f"{' '.join(command)} ended after {_lines(log)} of {STEPS} steps, exit code {process.returncode}"
        )
    lines = [json.loads(line) for line in log.read_text().splitlines()][SKIPPED:]
    shutil.rmtree(save)
    seconds = sum(line["seconds"] for line in lines)
    return {
        "tokens_per_second": sum(line["trained_tokens"] for line in lines) / seconds,
        "gigabytes": lines[-1]["memory"] / 1e9, "mfu": float(np.mean([line.get("mfu", 0) for line in lines])),
    }  # fmt: skip


def another(name: str, folder: Path, size: str, micro: int) -> dict[str, float]:
    """Train with TRL or torchtitan, in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.gpu_peers", name, size, str(micro), str(folder)]
    ran = subprocess.run(command, timeout=400, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Print the figures of each run."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--micro", type=int, choices=[1, 2, 4], default=1, help="rows of a micro-batch")
    parser.add_argument("--attention", default="auto", help="of train run")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here: is it a CUDA build?")
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    absent = [name for name in options.only if not find_spec(CONTENDERS[name])]
    if absent:
        print("not installed:", ", ".join(absent))
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as name:
            folder = Path(name)
            make_model(folder / "model", size)
            write_documents(folder, make_documents())
            for _ in range(options.rounds):
                for contender in options.only:
                    if contender in absent:
                        continue
                    if CONTENDERS[contender] == "train":
                        settings = {"attention": options.attention, "compile": contender == COMPILED}
                        figures = ours(folder, options.micro, settings, reshard=contender != COMPILED)
                    else:
                        figures = another(contender, folder, size, options.micro)
                    print(f"{size} {contender}, micro {options.micro}:", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
