"""Tokens a second, MFU and memory on one GPU, beside TRL on the same documents: `make test-gpu`.

Both train a Llama of 0.4 billion parameters in bf16, stepped in float32, on documents packed to 8192 tokens, with
activation checkpointing, fused AdamW and liger's kernels where it is installed, interleaved, each in a process of its
own. TRL packs the documents itself (`packing_strategy="bfd"`, padding-free): rows differ, their sizes and the pairs of
tokens in their documents do not, by a percent. What counts are labels that are trained. With flash-attn both have the
same attention; without it TRL has sdpa and we torch's varlen kernel. Without TRL only our own figures are printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, ROWS, STEPS, ROUNDS, SKIPPED = 8192, 4, 12, 2, 4
MODEL = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": LENGTH,
}  # fmt: skip


def make_model(folder: Path) -> None:
    """Save a model and a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODEL), dtype=torch.bfloat16)
    made.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))  # TRL wants one, and never uses it
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>").save_pretrained(folder)


def make_data(folder: Path) -> list[list[int]]:
    """Write token files of documents as long as dialogues are, and give them."""
    from train.data.tokens.indexed import bin_path, idx_path, write_index

    random = np.random.default_rng(0)
    count = LENGTH * ROWS * (STEPS + 4)
    documents: list[list[int]] = []
    while count > 0:
        size = int(np.clip(random.lognormal(5.8, 0.8), 16, LENGTH))
        documents.append(random.integers(0, 32000, size).tolist())
        count -= size
    bin_path(folder / "P").write_bytes(np.concatenate(documents).astype(np.uint16).tobytes())
    write_index(idx_path(folder / "P"), np.dtype(np.uint16), np.array([len(one) for one in documents]))
    return documents


def ours(folder: Path) -> dict[str, float]:
    """Train with `train run` and read its log."""
    save = folder / f"save{time.monotonic_ns()}"
    words = {
        "model": {"path": str(folder / "model")},
        "data": {"train": [str(folder / "P")], "seq_length": LENGTH, "loss": "all"},
        "batch": {"size": ROWS, "micro": 1}, "optim": {"lr": 1e-5}, "steps": {"train_iters": STEPS},
        "save": {"path": str(save), "every": 1000},
    }  # fmt: skip
    (folder / "config.yml").write_text(json.dumps(words))
    subprocess.run([sys.executable, "-m", "train", "run", str(folder / "config.yml")], check=True, timeout=300)
    lines = [json.loads(line) for line in (save / "log.jsonl").read_text().splitlines()][SKIPPED:]
    seconds = sum(line["seconds"] for line in lines)
    return {
        "tokens_per_second": sum(line["trained_tokens"] for line in lines) / seconds,
        "mfu": float(np.mean([line.get("mfu", 0) for line in lines])),
        "gigabytes": lines[-1]["memory"] / 1e9,
    }


def trl(folder: Path, documents: list[list[int]]) -> dict[str, float]:
    """Train with TRL's SFTTrainer, padding-free."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    marks: list[float] = []
    labels: list[int] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            marks.append(time.monotonic())

    torch.cuda.reset_peak_memory_stats()
    attention = "flash_attention_2" if find_spec("flash_attn") else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation=attention)
    settings = SFTConfig(
        str(folder / "trl"), per_device_train_batch_size=1, gradient_accumulation_steps=ROWS, max_steps=STEPS,
        bf16=True, gradient_checkpointing=True, packing=True, packing_strategy="bfd", max_length=LENGTH, report_to=[],
        save_strategy="no", optim="adamw_torch_fused", logging_steps=1000, disable_tqdm=True,
        use_liger_kernel=find_spec("liger_kernel") is not None,
        liger_kernel_config={"cross_entropy": False, "fused_linear_cross_entropy": False},  # as ours; it has its own
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": documents})
    trainer = SFTTrainer(model, args=settings, train_dataset=rows, callbacks=[Clock()])
    collate = trainer.data_collator

    def counted(held: list[Any]) -> dict[str, Any]:
        batch = collate(held)
        labels.append(int((batch["labels"] != -100).sum()))
        return batch

    trainer.data_collator = counted
    trainer.train()
    seconds = marks[-1] - marks[SKIPPED - 1]
    return {
        "tokens_per_second": sum(labels[SKIPPED * ROWS : STEPS * ROWS]) / seconds,
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
    }


def main() -> None:
    """Print the figures."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here: is it a CUDA build?")
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        documents = make_data(folder)
        for _ in range(ROUNDS):
            print("train run:", json.dumps(ours(folder)), flush=True)
            if find_spec("trl"):
                with get_context("spawn").Pool(1) as alone:  # what a round leaves on the GPU is not the next one's
                    found = alone.apply_async(trl, (folder, documents)).get(600)
                print("TRL:", json.dumps(found), flush=True)
            else:
                print("TRL is not installed: nothing to compare with")


if __name__ == "__main__":
    main()
