"""Files of GPT-NeoX as its users have them: every key is translated, told to have no effect, or refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import yaml

from formats.errors import RefusedError, UsageError
from tests.train.conftest import GOLDEN
from tests.train.neox_files import BARE, PHASE
from train.data.rows import open_rows
from train.data.tokens.documents import open_documents
from train.settings.config import Data
from train.settings.schedule import check_schedule, learning_rate


def test_a_phase_of_a_pre_training(read):
    config, notes = read(PHASE)
    assert (str(config.data.train[0]), config.data.packing, config.data.loss) == ("/d/U1_1", "packed", "all")
    assert {name: str(path) for name, path in config.data.validation.items()} == {
        "flores_text_document": "/d/flores_text_document"
    }
    assert (config.evaluate.every, config.evaluate.max_rows) == (500, 576)
    assert (config.schedule.style, config.schedule.warmup, config.init) == ("constant", 0, "auto")
    assert str(config.model.tokenizer) == "/t/model.model"
    (idle,) = [note for note in notes if note.startswith("no effect here: ")]
    for key in ("use_shared_fs", "init_method_std", "comms_logger", "data_types", "test_data_paths", "log_grad_norm"):
        assert key in idle
    assert "train_iters" not in idle
    assert "no pack_impl -> data.packing: packed" in notes
    assert "no loss_mask_pairs -> data.loss: all" in notes
    assert any(note.startswith("no finetune: init is auto") for note in notes)


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "CharLevelTokenizer"])
def test_a_vocab_file_of_another_type_is_no_tokenizer(read, kind):
    config, notes = read(PHASE.replace("SPMTokenizer", kind))
    assert config.model.tokenizer is None
    why = f"it is not read as a tokenizer of tokenizer_type {kind}; --model.tokenizer FILE gives one"
    assert f"vocab_file: no effect, {why}" in notes
    config, _ = read(PHASE.replace("SPMTokenizer", kind), "--model.tokenizer", "/t/other.model")
    assert str(config.model.tokenizer) == "/t/other.model"


def test_defaults_are_those_of_gpt_neox(read):
    config, notes = read(BARE)
    assert (config.data.packing, config.data.loss, config.model.dtype) == ("packed", "all", "fp32")
    assert (config.schedule.style, config.schedule.warmup, config.schedule.min_lr) == ("linear", 0.01, 0)
    assert (config.optim.weight_decay, config.optim.betas, config.optim.clip) == (0.1, (0.9, 0.999), 1.0)
    assert "no lr_decay_style -> schedule.style: linear" in notes
    assert "no warmup -> schedule.warmup: 0.01" in notes
    loaded, notes = read(BARE, "--schedule.style", "cosine", "--schedule.warmup", "5", "--data.packing", "bfd")
    assert (loaded.schedule.style, loaded.schedule.warmup, loaded.data.packing) == ("cosine", 5, "bfd")
    assert not [note for note in notes if "style" in note or "warmup" in note or "packing" in note]


def test_a_file_of_ours_stays_one(read):
    tree = {"model": {"path": "m"}, "data": {"train": ["d"], "seq_length": 8}, "batch": {}, "optim": {"lr": 1.0}}
    config, notes = read(yaml.safe_dump(tree | {"save": {"path": "s"}, "seed": 1, "num_workers": 2}))
    assert (config.schedule.style, config.data.loss) == ("cosine", "assistant")
    assert notes == ["no effect here: num_workers"]


def test_defaults_do_not_hide_what_a_base_says(read, tmp_path):
    (tmp_path / "base.yml").write_text(BARE + "pack_impl: k_bin_packed\nwarmup: 0.5\n")
    config, _ = read("base: base.yml\nmin_lr: 1.0e-5\nschedule: {style: cosine}\n")
    assert (config.data.packing, config.schedule.warmup, config.schedule.min_lr) == ("k_bin", 0.5, 1e-5)


COOL = "lr_decay_style: sqrt\ncd_start_iter: 339086\ncd_end_iter: 423858\nstart_cd_lr: 1.6e-4\ndecay_pp: 0.05\n"
COOL += "warmup: 0\niteration_offset: 339086\n"


def neox_rate(step, style, low, *, warmup=0.0, decayed=100, high=1.6e-4):
    """The rate of a step, as megatron/learning_rates.py computes it after the warm-up."""
    warm = warmup * decayed
    past, steps = step - warm, decayed - warm
    rate = {
        "linear": high * (steps - past) / steps,
        "cosine": low + (high - low) / 2 * (math.cos(math.pi * past / steps) + 1),
        "exponential": high * math.exp(-0.693 * past / steps),
        "constant": high,
    }[style]
    return max(rate, low)


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "constant"])
@pytest.mark.parametrize("lines", ["warmup: 0\n", "warmup: 0.1\n", "warmup: 0.1\nlr_decay_iters: 50\n"])
def test_rates_are_those_of_gpt_neox(read, style, lines):
    config, _ = read(BARE + f"lr_decay_style: {style}\nmin_lr: 9.0e-5\n" + lines)
    settings = yaml.safe_load(lines)
    decayed = settings.get("lr_decay_iters", 100)
    check_schedule(config, 100)
    first = math.ceil(settings["warmup"] * decayed)
    for step in range(first, decayed):
        expected = neox_rate(step, style, 9e-5, warmup=settings["warmup"], decayed=decayed)
        assert learning_rate(config, step, 100) == pytest.approx(expected, rel=1e-9), step


def test_a_cool_down(read):
    """F54: 1.6e-4 to 8e-6; min_lr stops it before, as in the users' fork."""
    config, _ = read(BARE + COOL)
    rates = [learning_rate(config, step, 84772) for step in (0, 42386, 84772)]
    assert rates == pytest.approx([1.6e-4, 1.6e-4 - (1.6e-4 - 8e-6) * 0.5**0.5, 8e-6])
    config, notes = read(BARE + COOL + "min_lr: 3.0e-5\n")
    assert "min_lr -> schedule.floor: 3e-05" in notes
    assert learning_rate(config, 84772, 84772) == 3e-5
    with pytest.raises(UsageError, match="lr_decay_style sqrt requires cd_end_iter, decay_pp"):
        read(BARE + "lr_decay_style: sqrt\ncd_start_iter: 1\nstart_cd_lr: 1.6e-4\n")
    with pytest.raises(UsageError, match=r"lr is 0.0002, start_cd_lr is 0\.00016"):
        read(BARE + COOL, "--optim.lr", "2e-4")
    config, _ = read(BARE + "lr_decay_style: constant\nmin_lr: 3.0e-4\n")
    with pytest.raises(UsageError, match=r"min_lr \(schedule\.floor\) 0\.0003 is above optimizer\.params\.lr"):
        check_schedule(config, 100)
    config, _ = read(BARE + COOL.replace("sqrt", "constant"))
    assert (config.schedule.start, config.schedule.min_lr) == (None, 0)


def test_warm_up_is_a_share_of_the_steps(read):
    config, _ = read(BARE + "warmup: 0.05\nlr_decay_iters: 50\n")
    assert config.schedule.warmup == 3
    config, notes = read(BARE + "warmup: 1\nlr_decay_style: constant\n")
    assert "warmup -> schedule.warmup: all" in notes
    assert [learning_rate(config, step, 100) for step in (0, 49, 99)] == pytest.approx([1.6e-6, 8e-5, 1.6e-4])
    with pytest.raises(UsageError, match="warmup is 2000: a share of the steps, 1 is all of them"):
        read(BARE + "warmup: 2000\n")
    assert read(BARE + "warmup: 2000\n", "--schedule.warmup", "20")[0].schedule.warmup == 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sav: 1\nwormup: 2\nlr_decay_styl: linear\n", "sav, wormup, lr_decay_styl are no settings"),
        ("hidden_dropout: 0.1\n", "hidden_dropout is 0.1: nothing is dropped out here"),
        ("attention_dropout: 0.1\n", "attention_dropout is 0.1"),
        ("loss_mask_individual: [5]\n", "loss_mask_individual is [5]: only padding"),
        ("batch_iteration_offset: 3\n", "batch_iteration_offset is 3"),
        ("loss_mask_pairs: [7, 9]\n", "loss_mask_pairs [7, 9] with loss_mask_alternating_individual None"),
        ("loss_mask_alternating_individual: [8]\n", "loss_mask_pairs None with"),
        ("data_path: /d/P\n", "data_path is '/d/P': train_data_paths and valid_data_paths name"),
        ("valid_data_paths: [/a/P, /b/P]\n", "two of valid_data_paths have one name"),
        ("valid_data_paths: [/a/P]\neval_iters: 0\n", "eval_iters is 0"),
        ("warmup: true\n", "warmup is True, which is no number"),
        ("warmup: much\n", "warmup is 'much', which is no number"),
        ("schedule: {warmup: 3}\nwarmup: 0.5\n", "both mean schedule.warmup"),
    ],
)
def test_what_means_something_else_is_refused(read, text, message):
    with pytest.raises(UsageError) as caught:
        read(BARE + text)
    assert message in str(caught.value)


def test_files_have_weights(read):
    """GPT-NeoX takes as many rows of each file if none are given (neox_arguments/arguments.py)."""
    both = BARE.replace("[/d/P]", "[/d/P, /d/Q]")
    config, notes = read(both)
    assert config.data.weights == [1, 1]
    assert any("no train_data_weights, each file has the same share" in note for note in notes)
    assert read(both + "train_data_weights: [1.0, 2.0]\n")[0].data.weights == [1, 2]
    assert read(BARE)[0].data.weights == []


@pytest.mark.parametrize("value", ["true", "false"])
def test_what_follows_an_end_of_document_is_no_label(read, value):
    _, notes = read(BARE + f"eod_mask_loss: {value}\n")
    assert any(
        note.startswith("eod_mask_loss: no effect, the token after the end of a document is never a label")
        for note in notes
    )
    rows = open_rows(Data(train=["P"], seq_length=512, loss="all"), [GOLDEN / "sft_text_document"], 1)
    flat = rows.flat(range(len(rows)))
    ends = np.flatnonzero(flat.input_ids == 3)
    assert not len(ends), "an end of document is a label, never an input"
    assert (flat.labels == 3).sum() == len(flat.cu_seqlens) - 1 == 200


def test_overflow_cuts_what_is_too_long(read):
    assert read(BARE + "pack_impl: pack_until_overflow\n")[0].data.overlong == "truncate"
    assert read(BARE + "pack_impl: pack_until_overflow\nallow_chopped: false\n")[0].data.overlong == "drop"


MASKS = "loss_mask_pairs: [7, 7]\nloss_mask_alternating_individual: [8]\nloss_mask_individual: [0]\n"


def test_masks_that_a_launcher_asks_for_and_no_file_describes_are_refused(read, monkeypatch):
    """F17: `export SFT_ENABLED=1` masked instructions once; a file without masks would train them all."""
    monkeypatch.setenv("SFT_ENABLED", "1")
    with pytest.raises(UsageError, match="SFT_ENABLED is 1, which masks instructions, but no loss_mask") as caught:
        read(BARE)
    assert "--data.loss assistant" in caught.value.hint
    for loss in ("assistant", "all"):
        assert read(BARE, "--data.loss", loss)[0].data.loss == loss
    assert read(BARE + MASKS)[0].data.loss == "assistant"
    monkeypatch.setenv("SFT_ENABLED", "0")
    assert read(BARE)[0].data.loss == "all"


def test_files_of_the_users_own_tool_are_masked(read):
    """`preprocess_sft.py` leaves a .bin and an .idx only: the ids of the masks are those of the control tokens."""
    config, _ = read(BARE + MASKS)
    assert (config.data.loss, config.data.control_tokens) == ("assistant", {"user": 7, "assistant": 8})
    prefix = GOLDEN / "sft_text_document"
    rows = open_rows(config.data, [prefix], 1)
    expected = open_documents(prefix, None, {"user": 7, "assistant": 8})
    trained = sum(rows.flat([number]).trained for number in range(len(rows)))
    masked = open_rows(config.data.model_copy(update={"packing": "bfd", "seq_length": 512}), [prefix], 1)
    total = sum(masked.flat([number]).trained for number in range(len(masked)))
    labels = [np.array(expected.trained(number, number + 1)) for number in range(len(expected.indexed))]
    assert total == sum(int(mask.sum()) for mask in labels) < expected.indexed.total
    assert 0 < trained <= total
    with pytest.raises(RefusedError) as caught:
        open_rows(Data(train=[prefix], seq_length=64), [prefix], 1)
    assert "--data.control_tokens '{user: 7, assistant: 8}'" in caught.value.hint
    other = config.data.model_copy(update={"control_tokens": {"user": 8, "assistant": 7}})
    assert open_rows(other, [prefix], 1).digest != rows.digest
    wrong = config.data.model_copy(update={"control_tokens": {"user": 7, "assistant": 252}})
    with pytest.raises(RefusedError, match="is 252, the given control token of the assistant"):
        open_rows(wrong, [prefix], 1)
