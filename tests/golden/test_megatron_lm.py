"""Files that real Megatron-LM wrote: its own argument parser, models and `save_checkpoint` (megatron_lm/README.md).

`expected.safetensors` is the model that they were filled with, in Hugging Face names; Megatron-LM's forward pass gave
its logits before it saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.disk.safetensors import read_safetensors
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused
from tests.models import files

HERE = Path(__file__).parent / "megatron_lm"
FOLDERS = {name: sorted(path for path in (HERE / name).iterdir()) for name in ("mcore", "legacy")}
ALL = [folder for folders in FOLDERS.values() for folder in folders]


def tensors(path: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a safetensors file."""
    content = path.read_bytes()
    return {name: content[f.offset : f.offset + f.nbytes] for name, f in read_safetensors(path)[0].items()}


def test_there_are_files():
    assert [len(folders) for folders in FOLDERS.values()] == [3, 4]


@pytest.mark.parametrize("folder", ALL, ids=lambda path: path.name)
def test_it_becomes_the_model_that_it_was_filled_with(convert, tmp_path, folder):
    """From `args` alone: only the true vocabulary has to be named. Settings are those of the model's config."""
    assert convert("megatron2hf", folder, tmp_path / "hf", "--vocab-size", 211).code == 0
    assert tensors(tmp_path / "hf/model.safetensors") == tensors(folder / "expected.safetensors")
    (tmp_path / "true").mkdir()
    (tmp_path / "true/config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "true/model.safetensors").write_bytes((folder / "expected.safetensors").read_bytes())
    assert open_checkpoint(tmp_path / "hf").spec == open_checkpoint(tmp_path / "true").spec
    assert convert("diff", tmp_path / "hf", tmp_path / "true").code == 0


@pytest.mark.parametrize("folder", ALL, ids=lambda path: path.name)
def test_reshard_keeps_run_settings_and_iteration(convert, tmp_path, folder):
    """What has nothing to do with model or topology stays in args, objects that could run code do not."""
    assert convert("reshard", folder, tmp_path / "m", "--tp", 2, "--pp", 1, "--vocab-size", 211).code == 0
    before, after = (open_checkpoint(path) for path in (folder, tmp_path / "m"))
    assert after.home.name == before.home.name
    for name in ("lr", "train_iters", "seq_length", "micro_batch_size", "tokenizer_type", "weight_decay"):
        assert after.details.args[name] == before.details.args[name]
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "hf", "--vocab-size", 211).code == 0
    assert tensors(tmp_path / "hf/model.safetensors") == tensors(folder / "expected.safetensors")


def test_the_base_model_completes_a_run(model, convert, tmp_path):
    """A real run carries no tokenizer: --config brings it, and the shards and spelling of its files."""
    folder = HERE / "mcore/tp2pp2_bf16"
    assert convert("megatron2hf", folder, tmp_path / "first", "--vocab-size", 211).code == 0
    (tmp_path / "first/tokenizer.model").write_bytes(b"tokenizer")
    (tmp_path / "first/chat_template.jinja").write_text("template")
    assert convert("megatron2hf", folder, tmp_path / "second", "--config", tmp_path / "first").code == 0
    assert files(tmp_path / "second") == files(tmp_path / "first")


def test_a_config_that_does_not_belong_is_refused(convert, tmp_path):
    folder = HERE / "mcore/tp2pp2_bf16"
    convert("megatron2hf", folder, tmp_path / "hf", "--vocab-size", 211)
    config = tmp_path / "hf/config.json"
    config.write_text(config.read_text().replace("50000.0", "10000.0"))
    ran = convert("megatron2hf", folder, tmp_path / "out", "--config", tmp_path / "hf")
    assert ran.code == 5
    assert "rope_theta: 50000.0 | 10000.0" in ran.err
    assert (
        convert("megatron2hf", folder, tmp_path / "out", "--config", tmp_path / "hf", "--set", "rope_theta=50000").code
        == 0
    )
    assert open_checkpoint(tmp_path / "out").spec.rope_theta == 50000.0


@pytest.mark.parametrize("vocab", [208, 10])
def test_a_vocabulary_that_its_padding_excludes(convert, tmp_path, vocab):
    """Its args pad to multiples of 8, and 216 rows are there; some tool may have padded otherwise, which is said."""
    import json

    folder = HERE / "mcore/pp2vpp2_bf16"
    padded = f"a vocabulary of {vocab} would have been padded to {-(-vocab // 8) * 8} rows", "holds 216: rows of tokens"
    refused(convert("megatron2hf", folder, tmp_path / "out", "--vocab-size", vocab), 5, *padded, f"--set vocab={vocab}")
    assert convert("megatron2hf", folder, tmp_path / "hf", "--vocab-size", 209).code == 0
    config = tmp_path / "hf/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": vocab}))
    refused(convert("megatron2hf", folder, tmp_path / "out", "--config", tmp_path / "hf"), 5, *padded)
    assert convert("megatron2hf", folder, tmp_path / "out", "--set", f"vocab={vocab}").code == 0
    assert open_checkpoint(tmp_path / "out").spec.vocab == vocab
