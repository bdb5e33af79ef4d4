"""What `gpu.py` compares with, one training a process: python -m tests.bench.gpu_peers {TRL,torchtitan} SIZE FOLDER."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu import END, LENGTH, ROWS, SIZES, SKIPPED, STEPS


def trl(folder: Path, _: str) -> tuple[list[float], list[int]]:
    """TRL's SFTTrainer, padding-free, with flash-attn where it is installed.

    Returns:
        When each step ended, and the trained labels of each row.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    ends: list[float] = []
    labels: list[int] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.monotonic())

    attention = "flash_attention_2" if find_spec("flash_attn") else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation=attention)
    settings = SFTConfig(
        str(folder / "trl"), per_device_train_batch_size=1, gradient_accumulation_steps=ROWS, max_steps=STEPS,
        bf16=True, gradient_checkpointing=True, packing=True, packing_strategy="bfd", max_length=LENGTH, report_to=[],
        save_strategy="no", optim="adamw_torch_fused", logging_steps=1000, disable_tqdm=True,
        use_liger_kernel=find_spec("liger_kernel") is not None,
        liger_kernel_config={"cross_entropy": False, "fused_linear_cross_entropy": False},  # as ours; it has its own
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": json.loads((folder / "documents.json").read_text())})
    trainer = SFTTrainer(model, args=settings, train_dataset=rows, callbacks=[Clock()])
    collate = trainer.data_collator

    def counted(examples: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = collate(examples)
        labels.append(int((batch["labels"] != -100).sum()))
        return batch

    trainer.data_collator = counted
    trainer.train()
    return ends, labels


class Batches:
    """Rows of documents one after the other, as torchtitan's own text data set makes them."""

    def __init__(self, documents: list[list[int]]) -> None:
        tokens = torch.tensor([token for document in documents for token in document])
        self.rows = tokens[: len(tokens) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for row in self.rows:
            yield {"input": row[None, :-1]}, row[None, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """There is none."""


class Ends:
    """What torchtitan asks a tokenizer for."""

    eos_id = END


def torchtitan(folder: Path, size: str) -> tuple[list[float], list[int]]:
    """torchtitan's Trainer, compiled, with torch's varlen kernel. Returns as `trl`."""
    from dataclasses import replace

    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    shape = SIZES[size]
    args = TransformerModelArgs(
        dim=shape["hidden_size"], n_layers=shape["num_hidden_layers"], n_heads=shape["num_attention_heads"],
        n_kv_heads=shape["num_key_value_heads"], vocab_size=shape["vocab_size"], multiple_of=256,
        ffn_dim_multiplier=1.5,  # of 8/3 of the hidden size, rounded up: 4 times
        attn_type="varlen", attn_mask_type="block_causal",
    )  # fmt: skip
    spec = replace(
        get_train_spec(),
        model_args={"this": args},
        build_tokenizer_fn=lambda *_: Ends(),
        build_dataloader_fn=lambda **_: Batches(json.loads((folder / "documents.json").read_text())),
        state_dict_adapter=None,
    )
    register_train_spec("of_the_bench", spec)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29519"}
    os.environ.update(alone)
    config = ConfigManager().parse_args([
        "--model.name", "of_the_bench", "--model.flavor", "this", "--job.dump_folder", str(folder / "titan"),
        "--training.local_batch_size", "1", "--training.global_batch_size", str(ROWS),
        "--training.seq_len", str(LENGTH), "--training.steps", str(STEPS), "--optimizer.lr", "1e-5",
        "--optimizer.implementation", "fused", "--activation_checkpoint.mode", "full", "--compile.enable",
        "--metrics.log_freq", "1000",
    ])  # fmt: skip
    ends: list[float] = []

    class Timed(Trainer):  # type: ignore[misc]
        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            torch.cuda.synchronize()
            ends.append(time.monotonic())

    Timed(config).train()
    return ends, [LENGTH] * (ROWS * STEPS)


PEERS: dict[str, Callable[[Path, str], tuple[list[float], list[int]]]] = {"TRL": trl, "torchtitan": torchtitan}


def main() -> None:
    """Train, and print figures as JSON, last."""
    name, size, folder = sys.argv[1:]
    ends, labels = PEERS[name](Path(folder), size)
    figures = {
        "tokens_per_second": sum(labels[SKIPPED * ROWS : STEPS * ROWS]) / (ends[-1] - ends[SKIPPED - 1]),
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
