"""Settings, the batch equation, the order of rows, and the learning rate."""

from __future__ import annotations

from itertools import pairwise

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from formats.errors import UsageError
from train.settings.batching import Order, Sizes, batch_sizes, make_order, passes
from train.settings.config import Batch, Config, Data, Steps
from train.settings.config_file import load_config
from train.settings.schedule import SHAPES, check_schedule, learning_rate
from train.start.run_folder import write_config

NEOX = """
"train_data_paths": ["/data/P_text_document"]
"seq_length": 8192
"finetune": true
"optimizer": {"type": "Adam", "params": {"lr": 8.0e-6, "betas": [0.9, 0.95], "eps": 1.0e-8}}
"clip_grad": 1.0
"gradient_clipping": 1.0
"train_micro_batch_size_per_gpu": 3
"train_batch_size": 192
"gradient_accumulation_steps": 1
"train_iters": 1337
"iteration_offset": 423858
"pack_impl": "k_bin_packed"
"checkpoint_factor": 100
"exit_interval": 8550
"keep_last_n_checkpoints": 100000
"save": "/ckpt"
"load": "/ckpt/start"
"loss_mask_pairs": [7, 7]
"loss-mask-alternating-individual": [8]
"override_lr_scheduler": true
"seed": 1
"""


def write(tmp_path, text):
    (tmp_path / "c.yml").write_text(text)
    return tmp_path / "c.yml"


def test_what_a_plan_decides_is_not_written_as_if_it_were_given(tmp_path):
    """`train eval RUN` reads it: a plan of k_bin would be refused there, because of a bfd that nobody asked for."""
    text = "model: {path: m}\ndata: {train: [P], seq_length: 8}\nbatch: {size: 1}\noptim: {lr: 1}\nsave: {path: r}"
    write_config(load_config(write(tmp_path, text))[0], tmp_path)
    data = load_config(tmp_path / "config.yml")[0].data
    assert (data.seq_length, data.packing, data.overlong) == (8, None, None)


def test_the_users_file_is_understood(tmp_path):
    """The keys of the users' own guide, as they stand there."""
    config, notes = load_config(write(tmp_path, NEOX), ["--schedule.style", "constant"])
    assert config.optim.lr == 8e-6
    assert (config.batch.micro, config.batch.size, config.batch.accumulation) == (3, 192, 1)
    assert (config.steps.train_iters, config.steps.iteration_offset, config.steps.exit_interval) == (1337, 423858, 8550)
    assert (config.data.packing, config.data.loss, config.init) == ("k_bin", "assistant", "finetune")
    assert config.optim.clip == 1.0
    assert "pack_impl -> data.packing: k_bin" in notes
    assert "optimizer -> optim" in notes
    assert "no effect here: override_lr_scheduler" in notes
    with pytest.raises(UsageError, match=r"batch\.size: 192 rows are fewer than 1536 ranks"):
        batch_sizes(config.batch, 1536)
    with pytest.raises(UsageError, match=r"x 192 ranks is 576, batch\.size is 192") as caught:
        batch_sizes(config.batch, 192)
    assert caught.value.hint.endswith("the number of ranks to 64")
    assert batch_sizes(config.batch, 64) == Sizes(3, 1, 64)
    with pytest.raises(UsageError, match=r"batch\.micro 4 x batch\.accumulation 1 x 8 ranks is 32, batch\.size is 8"):
        batch_sizes(Batch(micro=4, size=8), 8)


def test_a_file_stands_upon_its_base(tmp_path):
    (tmp_path / "common.yml").write_text(NEOX)
    (tmp_path / "long").mkdir()
    (tmp_path / "long/four.yml").write_text("base: ../common.yml\nsave: {path: /four}\nsteps: {train_iters: 5348}\n")
    (tmp_path / "long/hot.yml").write_text("base: four.yml\noptim: {lr: 2.0e-5}\npack_impl: packed\n")
    config, notes = load_config(tmp_path / "long/hot.yml", ["--seed", "7"])
    assert (str(config.save.path), config.save.every, config.steps.train_iters) == ("/four", 100, 5348)
    assert (config.optim.lr, config.optim.clip, config.seed, config.data.packing) == (2e-5, 1.0, 7, "packed")
    assert {"checkpoint_factor -> save.every: 100", "pack_impl -> data.packing: packed"} <= set(notes)
    assert not [note for note in notes if "train_iters" in note or "k_bin" in note]
    for base, message in (
        ("long/hot.yml", "is a file that has it as its base"),
        ("[a.yml]", "base is"),
        ("n.yml", "n.yml: No"),
    ):
        (tmp_path / "common.yml").write_text(f"base: {base}\n")
        with pytest.raises(UsageError, match=message):
            load_config(tmp_path / "long/hot.yml")


def test_notes_say_what_has_an_effect(tmp_path):
    text = NEOX + '"zero_optimization": {"stage": 1}\n"fp16": {"enabled": true}\n'
    config, notes = load_config(write(tmp_path, text), ["--data.packing", "bfd", "--optim.lr=1e-5"])
    assert (config.engine, config.parallel.zero_stage) == ("fsdp", 1)
    assert "pack_impl -> data.packing: k_bin; but --data.packing bfd" in notes
    assert "optimizer -> optim; but --optim.lr 1e-05" in notes
    assert any(
        note.startswith("zero_optimization.stage -> parallel.zero_stage: 1, with --engine deepspeed") for note in notes
    )
    assert any(note.startswith("fp16: no effect, nothing is trained in float16") for note in notes)
    with pytest.raises(UsageError, match=r"parallel\.zero_stage says 2, zero_optimization\.stage says 1"):
        load_config(write(tmp_path, "parallel: {zero_stage: 2}\n" + text))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"clip_grad": 1.0',
            '"clip_grad": 0.5',
            "clip_grad says 0.5, gradient_clipping says 1.0: both mean optim.clip",
        ),
        ('"Adam"', '"Lion"', "the optimizer Lion is not known"),
        ('"save": "/ckpt"', '"saev": "/ckpt"', "saev is no setting"),
        ('"seq_length": 8192', '"seq_length": -1', "data.seq_length is -1"),
        ('"seed": 1', '"schedule": {"warmup": -1}', "schedule.warmup is -1: Input should be greater"),
        ('"train_iters": 1337', '"train_iters": 1.5', "steps.train_iters is 1.5"),
    ],
)
def test_mistakes_are_named(tmp_path, old, new, message):
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        load_config(write(tmp_path, NEOX.replace(old, new)))


def test_words_override_the_file(tmp_path):
    path = write(tmp_path, NEOX)
    config, _ = load_config(path, ["--optim.lr", "1e-5", "--model.compile=true", "--data.train", "[/a, /b]"])
    assert config.optim.lr == 1e-5
    assert config.model.compile
    assert [str(prefix) for prefix in config.data.train] == ["/a", "/b"]
    with pytest.raises(UsageError, match=r"optim\.learning_rate is no setting") as raised:
        load_config(path, ["--optim.learning_rate", "1"])
    assert raised.value.hint.startswith("there are optim.lr, optim.betas, ")
    for options in (["optim.lr", "1"], ["--optim.lr"], ["--seed.x", "1"]):
        with pytest.raises(UsageError):
            load_config(path, options)


@given(micro=st.integers(1, 8), accumulation=st.integers(1, 8), ranks=st.integers(1, 16))
def test_two_of_three_give_the_third(micro, accumulation, ranks):
    size = micro * accumulation * ranks
    expected = Sizes(micro, accumulation, ranks)
    assert batch_sizes(Batch(micro=micro, size=size), ranks) == expected
    assert batch_sizes(Batch(accumulation=accumulation, size=size), ranks) == expected
    assert batch_sizes(Batch(micro=micro, accumulation=accumulation), ranks) == expected
    assert batch_sizes(Batch(micro=micro, accumulation=accumulation, size=size), ranks) == expected
    assert batch_sizes(Batch(size=accumulation * ranks), ranks) == Sizes(1, accumulation, ranks)
    assert batch_sizes(Batch(accumulation=accumulation), ranks) == Sizes(1, accumulation, ranks)
    assert batch_sizes(Batch(micro=micro), ranks) == Sizes(micro, 1, ranks)


@given(
    rows=st.integers(1, 40), seed=st.integers(0, 9), steps=st.integers(1, 12), micro=st.integers(1, 3),
    accumulation=st.integers(1, 3), ranks=st.integers(1, 4),
)  # fmt: skip
def test_every_row_once_an_epoch_on_any_ranks(rows, seed, steps, micro, accumulation, ranks):
    sizes = Sizes(micro, accumulation, ranks)
    order = Order(rows, seed, steps * sizes.size)
    taken = [
        row
        for step in range(steps)
        for part in range(accumulation)
        for rank in range(ranks)
        for row in order.batch(step, sizes, rank)[part]
    ]
    for epoch in range(len(taken) // rows):
        assert sorted(taken[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    other = Sizes(sizes.size, 1, 1)
    assert taken == [row for step in range(steps) for row in order.batch(step, other, 0)[0]]


DATA = Data(train=["P"], seq_length=8)


def test_steps_are_said_once():
    with pytest.raises(UsageError) as caught:
        make_order([0, 10], 1, DATA, Steps(epochs=1.0, train_iters=2), 4)
    assert "--steps.epochs null" in caught.value.hint
    assert passes(10, Steps(train_iters=3), 4) == passes(10, Steps(epochs=2.0), 4) == ""
    assert passes(10, Steps(train_iters=5), 4) == "steps.train_iters 5 are 2 passes over 10 rows, 3 are one"


def test_epochs_end_with_empty_places():
    order, total = make_order([0, 10], 1, DATA, Steps(epochs=1.0), 4)
    assert total == 3
    last = order.batch(2, Sizes(2, 1, 2), 0) + order.batch(2, Sizes(2, 1, 2), 1)
    assert [len(rows) for rows in last] == [2, 0]


@pytest.mark.parametrize(
    ("style", "at_start", "half", "end"),
    [
        ("constant", 1.6e-4, 1.6e-4, 1.6e-4),
        ("linear", 1.6e-4, 8.4e-5, 8e-6),
        ("cosine", 1.6e-4, 8.4e-5, 8e-6),
        ("exponential", 1.6e-4, (1.6e-4 * 8e-6) ** 0.5, 8e-6),
        ("sqrt", 1.6e-4, 1.6e-4 - (1.6e-4 - 8e-6) * 0.5**0.5, 8e-6),
    ],
)
def test_learning_rates_of_a_cool_down(tmp_path, style, at_start, half, end):
    """The users' cool-down: global steps 339086 to 423858, from 1.6e-4 to 8e-6."""
    settings = {
        "model": {"path": "m"}, "data": {"train": ["d"], "seq_length": 8}, "batch": {}, "save": {"path": "s"},
        "optim": {"lr": 1.6e-4}, "steps": {"iteration_offset": 339086},
        "schedule": {"style": style, "min_lr": 8e-6, "start": 339086, "end": 423858},
    }  # fmt: skip
    config, _ = load_config(write(tmp_path, yaml.safe_dump(settings)))
    rates = [learning_rate(config, step, 84772) for step in (0, 42386, 84772)]
    assert rates == pytest.approx([at_start, half, end], rel=1e-6)


def test_warm_up_counts_steps_of_this_run(tmp_path):
    text = NEOX + '"lr_decay_style": "constant"\n"warmup": 0.01\n'
    config, _ = load_config(write(tmp_path, text))
    assert learning_rate(config, 0, 1000) == pytest.approx(8e-7)
    assert learning_rate(config, 9, 1000) == pytest.approx(8e-6)
    assert learning_rate(config, 500, 1000) == 8e-6


@given(
    style=st.sampled_from(sorted(SHAPES)), total=st.integers(1, 60), offset=st.integers(0, 9), floor=st.floats(0, 1),
    warmup=st.one_of(st.just("all"), st.integers(0, 20), st.floats(0, 0.99)), start=st.none() | st.integers(0, 40),
    length=st.none() | st.integers(1, 40),
)  # fmt: skip
def test_a_rate_climbs_stays_and_falls(style, total, offset, floor, warmup, start, length):
    """What holds of every schedule, whatever its shape; the ends of its parts are counted here by hand."""
    settings = {
        "model": {"path": "m"}, "data": {"train": ["d"], "seq_length": 8}, "batch": {}, "save": {"path": "s"},
        "optim": {"lr": 1.0}, "steps": {"iteration_offset": offset},
    }  # fmt: skip
    steps = total if warmup == "all" else warmup if warmup >= 1 else warmup * total
    climb = next(step for step in range(80) if step >= steps)
    begin = offset + climb if start is None else start
    end = offset + total if length is None else begin + length
    schedule = {"style": style, "min_lr": 0.25, "floor": floor, "start": start, "end": None if length is None else end}
    config = Config(**settings, schedule=schedule | {"warmup": warmup})
    if steps > total:
        with pytest.raises(UsageError, match="would never be reached"):
            check_schedule(config, total)
        return
    check_schedule(config, total)
    rates = [learning_rate(config, step, total) for step in range(total)]
    assert rates[:climb] == pytest.approx([(step + 1) / climb for step in range(total)[:climb]])
    last = 1.0 if style == "constant" else max(0.25, floor)
    for step, rate in enumerate(rates[climb:], offset + climb):
        if step <= begin:
            assert rate == 1.0
        elif step >= end:
            assert rate == pytest.approx(last)
        else:
            assert (0.25 < rate < 1.0 and rate >= last) or rate == last == 1.0
    assert all(before >= after for before, after in pairwise(rates[climb:]))
