"""The second half of `make demo`: from dialogues to a model that answers, to a Hub and back."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from tests.demo import ROOT, command, say, somewhere
from tests.hub.server import TOKEN, Hub
from tests.models import save
from train.data.tokens.shapes import MARKER

GOLDEN = ROOT / "tests/golden/data/1_sft"
DIALOGUES = 100
CONFIG = """\
model:    {path: start, dtype: fp32, activation_checkpointing: false}
data:     {train: [data_text_document], seq_length: 256}
batch:    {size: 8, micro: 4}
optim:    {lr: 3.0e-3}
schedule: {style: cosine, warmup: 5}
steps:    {train_iters: 60, iteration_offset: 1000}
save:     {path: run, every: 100, keep: 1}
log:      {every: 20}
"""


def dialogues() -> list[str]:
    """Lines of JSON, of one question and one answer each."""
    return (GOLDEN / "sft.jsonl").read_text().splitlines()[:DIALOGUES]


def turns(line: str) -> tuple[str, str]:
    """Question and answer of a dialogue."""
    parts = MARKER.split(json.loads(line)["text"])
    return parts[2], parts[6]


def start(vocabulary: Path, out: Path) -> None:
    """A model with random weights, and its tokenizer, made of a SentencePiece model."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    command(
        "convert", "tokenizer", str(vocabulary), str(out), "--control", "<|user|>", "--control", "<|assistant|>",
        "--eos", "<|endoftext|>", "--allow-mismatches", "1",
    )  # fmt: skip
    save(out, "llama", vocab_size=253, hidden_size=128, intermediate_size=256, num_hidden_layers=2)


def chain(hub: Hub) -> str:
    """Learn dialogues by heart, send the model to a Hub and pull it back, all in the current folder.

    Returns:
        What the pulled model answers to the first question.
    """
    first = dialogues()[0]
    say(f"\n{DIALOGUES} dialogues in data.jsonl, such as {first}, and a SentencePiece model")
    Path("data.jsonl").write_text("".join(line + "\n" for line in dialogues()))
    shutil.copy(GOLDEN / "model.model", "model.model")
    command("train", "tokenize", "--input", "data.jsonl", "--vocab-file", "model.model", "--append-eod",
            "--output-prefix", "data")  # fmt: skip
    command("train", "pack", "data_text_document", "--seq-length", "256", "-n")
    start(Path("model.model"), Path("start"))
    say("\nA tiny Llama with random weights, made by transformers, in start/")
    say(f"\n$ cat config.yml\n{CONFIG.rstrip()}")
    Path("config.yml").write_text(CONFIG)
    command("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "vitruvian", "train", "run", "config.yml")
    command("convert", "fsdp2hf", "run/global_step1060", "model", "--chat-template", "control")
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_UPDATE_CHECK": "1"}  # fmt: skip
    say(f"\nA Hub on this machine\n\n$ export {' '.join(f'{name}={value}' for name, value in settings.items())}")
    settings["HF_HUB_OFFLINE"] = "0"
    command("convert", "push", "model", "acme/dialogues", **settings)
    command("hf", "download", "acme/dialogues", "--local-dir", "pulled", "--quiet", **settings)
    return command("train", "chat", "pulled", "--ids", "--prompt", turns(first)[0])


def main() -> None:
    """Tokenize, train on two ranks, convert, push, pull, ask."""
    with Hub(Path("hub")) as hub:
        output = chain(hub)
    right = turns(dialogues()[0])[1]
    learned = f"  text    {right}<|assistant|>\n" in output
    say(f"\nthe answer is what the dialogue says: {learned}")
    if not learned:
        sys.exit("the demo failed")


if __name__ == "__main__":
    with somewhere():
        main()
