"""Exports while a training goes on: what is exported, skipped, or fails."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import vitruvian
from vitruvian.transformers import ExportCallback


def test_checkpoints_are_exported_in_order_and_failures_are_told(model, tmp_path, caplog):
    source = model("llama", "bfloat16")
    for step in (1, 2):
        vitruvian.convert(source, tmp_path / f"checkpoint-{step}", to="fsdp")
    exporter = vitruvian.exporter(tmp_path / "hub", waiting=3, dtype="fp32")
    with caplog.at_level(logging.WARNING, "vitruvian"):
        assert all(exporter.submit(tmp_path / f"checkpoint-{step}") for step in (1, 2, 3))
        one, two, three = exporter.close()
    assert one.digest == two.digest == vitruvian.digest(tmp_path / "hub" / "checkpoint-1").digest
    assert vitruvian.verify(tmp_path / "hub" / "checkpoint-2").equal
    assert three.error.endswith("checkpoint-3 does not exist")
    assert three.exit_code == vitruvian.SourceError.exit_code
    assert "checkpoint-3 was not exported" in caplog.text


def test_what_finds_the_queue_full_is_skipped(model, tmp_path):
    exporter = vitruvian.exporter(tmp_path / "hub", waiting=1)
    submitted = [exporter.submit(model("llama")) for _ in range(5)]
    assert submitted[:1] == [True]
    assert not all(submitted)
    with pytest.raises(vitruvian.VitruvianError, match="exports failed"):
        exporter.close(strict=True)
    assert sum(one.error.startswith("skipped") for one in exporter.results) == submitted.count(False)


def test_options_are_checked_at_the_start(tmp_path):
    with pytest.raises(vitruvian.UsageError, match="there is no option colour"):
        vitruvian.exporter(tmp_path, colour=1)


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_a_trainer_exports_what_it_saves(model, tmp_path):
    source = model("llama", "float32")
    trained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=4, save_steps=2, per_device_train_batch_size=1, report_to=[], use_cpu=True
    )
    callback = ExportCallback(tmp_path / "hub", waiting=4, strict=True)
    Trainer(trained, arguments, train_dataset=rows, callbacks=[callback]).train()
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hub" / "checkpoint-4")
    for name, tensor in trained.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor)
