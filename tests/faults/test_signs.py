"""Checkpoints of programs without a reader: every command names the program, says what to do, and stops."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from formats.detect import signs
from formats.errors import UnsupportedError
from formats.registry import open_checkpoint
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
    shutil.copytree(REAL / "fsdp_dtensor", at)
    (at / "iter_0000003/run_config.yaml").write_text("checkpoint:\n  async_save: false\n  ckpt_format: fsdp_dtensor\n")
    return at


KINDS: dict[str, tuple[Callable[[Path], Path], str, str, str]] = {
    "torch_dcp": (torch_dcp, "iter_0000003", "--ckpt-format torch_dcp", "torch_dist"),
    "bridge": (bridge, "iter_0000003", "Megatron-Bridge with ckpt_format: fsdp_dtensor", "torch_dist"),
}
"""How one is made, a folder in it that is named by itself, what it is called, and what the hint says."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_every_command_names_it(convert, tmp_path, kind):
    make, inner, what, hint = KINDS[kind]
    run, out = make(tmp_path / "run"), tmp_path / "out"
    for place in (run, run / inner):
        message = f"{place} is a checkpoint of"
        for argv in (
            ["inspect", place],
            ["digest", place],
            ["diff", place, place],
            ["verify", REAL / "dp_reshardable", place],
        ):
            refused(convert(*argv), 4, message, what, hint)
    for command in COMMANDS:
        refused(convert(command, run, out), 4, f"{run} is a checkpoint of", what, hint)
    assert not out.exists()


def mlx(at: Path) -> Path:
    """As mlx-lm 0.32.2 saves a quantized model: beside its own key it writes one that transformers has."""
    at.mkdir()
    how = '{"group_size": 64, "bits": 4, "mode": "affine"}'
    (at / "config.json").write_text(f'{{"model_type": "llama", "quantization": {how}, "quantization_config": {how}}}')
    (at / "model.safetensors").write_bytes(b"")
    return at


def test_what_would_pass_for_another(convert, tmp_path):
    refused(convert("inspect", mlx(tmp_path / "run")), 4, "MLX")
    refused(convert("hf2hf", tmp_path / "run", tmp_path / "out"), 4, "MLX")


OTHERS = {
    "PEFT": "adapter_config.json adapter_model.safetensors",
    "LitGPT": "lit_model.pth model_config.yaml",
    "part of a checkpoint of nanotron": "checkpoint_metadata.json model/ model_config.json",
    "Meta": "consolidated.00.pth params.json",
    "NeMo 1": "nemo.nemo",
    "NeMo 1, unpacked": "model_config.yaml model_weights.ckpt",
    "llama.cpp": "q4.gguf",
    "ColossalAI": "modeling/ optimizer/ lr_scheduler running_states.json",
    "T5X": "checkpoint state.param_states.decoder.decoder_norm.scale.v/",
    "part of a checkpoint of Orbax": "_CHECKPOINT_METADATA items/ commit_success.txt",
    "Flax": "config.json flax_model.msgpack",
    "TensorFlow": "config.json tf_model.h5",
    "PaddlePaddle": "config.json model_state.pdparams",
    "OLMo 1": "config.yaml model.pt optim.pt train.pt",
    "TensorRT-LLM": "config.json rank0.engine",
    "MLC": "mlc-chat-config.json params_shard_0.bin",
    "ONNX": "config.json model.onnx model.onnx_data",
    "OpenVINO": "openvino_model.bin openvino_model.xml",
    "diffusers": "model_index.json unet/",
    "part of a model in Mistral": "consolidated.00.safetensors params.json",
}
"""What a program is called, and what is in a folder of it."""


def test_what_passes_for_nothing(convert, tmp_path):
    """Each folder is told by its own sign, also from the folder above; and every sign has a folder here."""
    kinds = {}
    for number, (what, names) in enumerate(OTHERS.items()):
        folder = tmp_path / str(number) / "step"
        folder.mkdir(parents=True)
        for name in names.split():
            (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("")
        for place in (folder, folder.parent):
            with pytest.raises(UnsupportedError, match=re.escape(f"{folder} is a")) as error:
                open_checkpoint(place)
            assert what in str(error.value)
            assert error.value.hint
            assert "{" not in error.value.hint
        kinds[what] = next(sign.what for sign in signs.OTHERS if sign.told_by(folder))
    assert sorted(kinds.values()) == sorted(sign.what for sign in signs.OTHERS)
    refused(convert("inspect", tmp_path / "6/step/q4.gguf"), 4, "llama.cpp")


def test_what_only_has_such_a_file_is_not_taken_for_it(convert, tmp_path):
    """A run of Megatron-LM with somebody's yaml in it, or in a folder that is called `weights`."""
    run = shutil.copytree(REAL / "dp_reshardable", tmp_path / "run")
    (run / "iter_0000003/run_config.yaml").write_text("lr: 1\n")
    assert convert("inspect", run).code == 0
    other = shutil.copytree(run / "iter_0000003", tmp_path / "other/weights")
    assert convert("inspect", other).code == 0
