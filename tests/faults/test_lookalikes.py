"""Checkpoints of trainers without a reader, which would pass for others: every command names the trainer and stops."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.dcp_tools import refused, save

REAL = Path(__file__).parents[1] / "golden/megatron_0192"
COMMANDS = (
    "fsdp2hf", "hf2fsdp", "hf2megatron", "hf2neox", "hf2hf", "megatron2hf", "neox2hf", "zero2hf", "zero2universal",
    "reshard", "average-norms",
)  # fmt: skip


def torch_dcp(at: Path) -> Path:
    """As `save_checkpoint` of 0.19.2 gives it to torch: the state dict with the names of modules."""
    import torch

    state = {"args": "…", "checkpoint_version": 3.0, "iteration": 3}
    state["model"] = {"decoder.final_layernorm.weight": torch.ones(8)}
    save(at / "iter_0000003", state)
    (at / "latest_checkpointed_iteration.txt").write_text("3")
    return at


def bridge(at: Path) -> Path:
    shutil.copytree(REAL / "dp_reshardable", at)
    config = "model:\n  _target_: megatron.bridge.models.llama.llama_provider.LlamaModelProvider\n  num_layers: 1\n"
    (at / "iter_0000003/run_config.yaml").write_text(config)
    return at


def nemo(at: Path) -> Path:
    shutil.copytree(REAL / "dp_reshardable/iter_0000003", at / "weights")
    (at / "context").mkdir()
    (at / "context/model.yaml").write_text("_target_: nemo.collections.llm.gpt.model.llama.LlamaModel\n")
    return at


KINDS: dict[str, tuple[Callable[[Path], Path], str, str, str]] = {
    "torch_dcp": (torch_dcp, "iter_0000003", "--ckpt-format torch_dcp", "torch_dist"),
    "bridge": (bridge, "iter_0000003", "Megatron-Bridge", "export_ckpt"),
    "nemo": (nemo, "weights", "NeMo 2", "llm.export_ckpt"),
}
"""How one is made, a folder in it that is named by itself, what it is called, and what the hint says."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_every_command_names_it(convert, tmp_path, kind):
    make, inner, what, hint = KINDS[kind]
    run, out = make(tmp_path / "run"), tmp_path / "out"
    for place in (run, run / inner):
        told = f"{place} is a checkpoint of"
        for words in (
            ["inspect", place],
            ["digest", place],
            ["diff", place, place],
            ["verify", REAL / "dp_reshardable", place],
        ):
            refused(convert(*words), 4, told, what, hint)
    for command in COMMANDS:
        refused(convert(command, run, out), 4, f"{run} is a checkpoint of", what, hint)
    assert not out.exists()


def test_what_only_has_such_a_file_is_not_taken_for_it(convert, tmp_path):
    """A run of Megatron-LM with somebody's yaml in it, or in a folder that is called `weights`."""
    run = shutil.copytree(REAL / "dp_reshardable", tmp_path / "run")
    (run / "iter_0000003/run_config.yaml").write_text("lr: 1\n")
    assert convert("inspect", run).code == 0
    other = shutil.copytree(run / "iter_0000003", tmp_path / "other/weights")
    assert convert("inspect", other).code == 0
