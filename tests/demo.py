"""The first half of `make demo`: a tiny model through the formats and back, compared at every step."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def say(text: str) -> None:
    """Write a line at once, before the next command writes its own."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def command(*argv: str, **settings: str) -> str:
    """Run one command and show it as a user would type it.

    Returns:
        What it wrote on stdout, which is shown too.
    """
    say(f"\n$ {shlex.join(argv)}")
    program = str(Path(sys.executable).parent / argv[0])
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | settings
    output = ""
    with subprocess.Popen([program, *argv[1:]], stdout=subprocess.PIPE, text=True, env=env) as ran:
        try:
            for line in ran.stdout or ():
                sys.stdout.write(line)
                sys.stdout.flush()
                output += line
            code = ran.wait()
        finally:
            ran.terminate()
    if code:
        sys.exit(f"the demo failed: {argv[0]} exits with {code}")
    return output


@contextmanager
def somewhere() -> Iterator[None]:
    """Work in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="vitruvian-demo-") as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir("/")


def main() -> None:
    """Hugging Face to Megatron TP2 x PP2 to TP4 and back."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from tests.models import build, files

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    say("A tiny Llama, made and saved by transformers")
    build(Path("llama"), "llama", "bfloat16", hidden_size=256, intermediate_size=512, vocab_size=1000)
    command("convert", "inspect", "llama")
    command("convert", "hf2megatron", "llama", "megatron-tp2-pp2", "--tp", "2", "--pp", "2")
    command("convert", "reshard", "megatron-tp2-pp2", "megatron-tp4", "--tp", "4")
    command("convert", "megatron2hf", "megatron-tp4", "llama-again")
    for name in ("llama", "megatron-tp2-pp2", "megatron-tp4", "llama-again"):
        command("convert", "digest", name)
    command("convert", "diff", "megatron-tp2-pp2", "llama-again")
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(name)(ids).logits for name in ("llama", "llama-again")]
    say(f"\nfiles byte for byte the same: {files(Path('llama')) == files(Path('llama-again'))}")
    say(f"logits equal: {torch.equal(*logits)}")
    if not torch.equal(*logits) or files(Path("llama")) != files(Path("llama-again")):
        sys.exit("the demo failed")


if __name__ == "__main__":
    with somewhere():
        main()
