"""The main job on a tiny model: `make demo`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def convert(*words: str) -> None:
    """Run one command and show it as a user would type it."""
    sys.stdout.write(f"\n$ convert {' '.join(words)}\n")
    sys.stdout.flush()
    subprocess.run([str(Path(sys.executable).parent / "convert"), *words], check=True)


def main() -> None:
    """Hugging Face to Megatron TP2 x PP2 to TP4 and back, compared at every step."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from tests.models import build, files

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="vitruvian-demo-"))
    os.chdir(folder)
    try:
        sys.stdout.write("A tiny Llama, made and saved by transformers\n")
        build(Path("llama"), "llama", "bfloat16", hidden_size=256, intermediate_size=512, vocab_size=1000)
        convert("inspect", "llama")
        convert("hf2megatron", "llama", "megatron-tp2-pp2", "--tp", "2", "--pp", "2")
        convert("reshard", "megatron-tp2-pp2", "megatron-tp4", "--tp", "4")
        convert("megatron2hf", "megatron-tp4", "llama-again")
        for name in ("llama", "megatron-tp2-pp2", "megatron-tp4", "llama-again"):
            convert("digest", name)
        convert("diff", "megatron-tp2-pp2", "llama-again")
        ids = torch.arange(1, 33)[None]
        with torch.no_grad():
            logits = [AutoModelForCausalLM.from_pretrained(name)(ids).logits for name in ("llama", "llama-again")]
        sys.stdout.write(f"\nfiles byte for byte the same: {files(Path('llama')) == files(Path('llama-again'))}\n")
        sys.stdout.write(f"logits equal: {torch.equal(*logits)}\n")
        if not torch.equal(*logits) or files(Path("llama")) != files(Path("llama-again")):
            sys.exit("the demo failed")
    finally:
        os.chdir("/")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
