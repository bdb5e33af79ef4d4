"""Exports while a training goes on: what is exported, skipped, or fails."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import vitruvian
from tests.forked import in_a_fork
from vitruvian.transformers import ExportCallback


def test_checkpoints_are_exported_in_order_and_failures_are_told(model, tmp_path, caplog):
    source = model("llama", "bfloat16")
    for step in (1, 2):
        vitruvian.convert(source, tmp_path / f"checkpoint-{step}", to="fsdp")
    exporter = vitruvian.exporter(tmp_path / "hub", waiting=3, dtype="fp32")
    with caplog.at_level(logging.WARNING, "vitruvian"):
        assert all(exporter.submit(tmp_path / f"checkpoint-{step}") for step in (1, 2, 3))
        first, second, third = exporter.close()
    assert first.digest == second.digest == vitruvian.digest(tmp_path / "hub" / "checkpoint-1").digest
    assert vitruvian.verify(tmp_path / "hub" / "checkpoint-2").equal
    assert third.error.endswith("checkpoint-3 does not exist")
    assert third.exit_code == vitruvian.SourceError.exit_code
    assert "checkpoint-3 was not exported" in caplog.text


def test_what_finds_no_room_is_skipped(model, tmp_path):
    exporter = vitruvian.exporter(tmp_path / "hub", waiting=1)
    assert [exporter.submit(tmp_path / f"nothing-{number}") for number in range(4)] == [True, True, False, False]
    with pytest.raises(vitruvian.ExportError, match="4 of 4 exports failed"):
        exporter.close(strict=True)
    assert [result.src.name for result in exporter.results] == [f"nothing-{number}" for number in range(4)]
    assert [result.error.startswith("skipped") for result in exporter.results] == [False, False, True, True]
    with pytest.raises(vitruvian.UsageError, match="checkpoint = None is no path"):
        exporter.submit(None)
    with pytest.raises(vitruvian.UsageError, match="is closed"):
        exporter.submit(tmp_path)
    assert len(exporter.close()) == 4
    with (
        pytest.raises(vitruvian.ExportError, match="1 of 2 exports failed"),
        vitruvian.exporter(tmp_path / "hub", waiting=0) as alone,
    ):
        assert [alone.submit(model("llama")), alone.submit(model("llama"))] == [True, False]
    assert alone.results[0].error == ""


def test_a_forked_process_is_told_that_nothing_exports_in_it(tmp_path):
    """The launcher of a training makes the exporter, and forks its ranks."""
    exporter = vitruvian.exporter(tmp_path / "hub")

    def refusals() -> int:
        count = 0
        for ask in (lambda: exporter.submit(tmp_path), lambda: exporter.close(strict=True), lambda: exporter.results):
            with pytest.raises(vitruvian.UsageError, match="from which this one was forked: nothing exports here"):
                ask()
            count += 1
        return count

    def leaves_the_block() -> int:
        with suppress(KeyError), exporter:
            raise KeyError  # not another error in its place
        return 4

    assert (in_a_fork(refusals), in_a_fork(leaves_the_block)) == (3, 4)
    assert exporter.close(strict=True) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": 1}, "there is no option colour"),
        ({"dtype": "int4"}, "is not one of"),
        ({"push": "bad name!"}, "is not a valid name on the Hub"),
        ({"waiting": -1}, "waiting = -1"),
        ({"config": "./nowhere"}, "'./nowhere' is not a Hugging Face folder"),
    ],
)
def test_options_are_checked_at_the_start(tmp_path, options, message):
    with pytest.raises(vitruvian.UsageError, match=message):
        vitruvian.exporter(tmp_path, **options)
    with pytest.raises(vitruvian.UsageError, match=message):
        ExportCallback(tmp_path, **options)


def test_what_nobody_waited_for_is_exported_before_the_program_ends(model, tmp_path):
    code = "import sys, vitruvian; assert vitruvian.exporter(sys.argv[1]).submit(sys.argv[2])"
    argv = [sys.executable, "-c", code, str(tmp_path / "hub"), str(model("llama"))]
    subprocess.run(argv, timeout=120, check=True)
    assert vitruvian.verify(tmp_path / "hub" / model("llama").name).equal


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


NOTE = "all weights here are under 'ema'"


@pytest.fixture
def averaged(model, tmp_path):
    """A training that has saved nothing but averaged weights."""
    folder = tmp_path / "run" / "step-1"
    dcp.save({"ema": load_file(model("llama") / "model.safetensors")}, checkpoint_id=folder, no_dist=True)
    return folder


def test_an_export_has_the_notes_of_its_conversion(model, averaged, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "vitruvian"), vitruvian.exporter(tmp_path, config=model("llama")) as exporter:
        exporter.submit(averaged)
    assert NOTE in exporter.results[0].notes[0]
    assert NOTE in caplog.text


def test_a_watch_prints_the_notes_of_its_conversions(model, convert, averaged, tmp_path):
    argv = ("watch", averaged.parent, "--config", model("llama"), "--once", "--idle", "0")
    ran = convert(*argv, "--out", tmp_path / "out", "--quiet")
    assert ran.code == 0, ran.err
    assert NOTE in ran.err
    assert NOTE in (tmp_path / "out/.watch/log.jsonl").read_text()
    ran = convert(*argv, "--out", tmp_path / "other", "--json")
    assert NOTE in json.loads(ran.out)["notes"][0]


def test_what_is_read_into_memory_has_the_notes_of_a_conversion(model, averaged, caplog):
    with vitruvian.open(averaged, config=model("llama")).as_("fsdp") as view:
        assert NOTE in view.notes[0]
    loaded = vitruvian.torch.load(AutoModelForCausalLM.from_pretrained(model("llama")), averaged, config=model("llama"))
    assert NOTE in loaded.notes[0]
    with caplog.at_level(logging.WARNING, "vitruvian"):
        next(vitruvian.torch.iterate(averaged, config=model("llama")))
    assert NOTE in caplog.text
