"""`init: moments`: a training that another framework began continues as in plain torch with its moments in place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from formats.errors import RefusedError, UnsupportedError, UsageError
from tests.train.conftest import GOLDEN, spawn
from tests.train.test_deepspeed import zero
from tests.train.test_freezing import by_hand
from train.settings.config_file import load_config
from train.settings.effects import check_effect
from train.start.start_moments import moments_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
NEOX = GOLDEN.parents[1] / "neox"
START = NEOX / "llama-gqa-tp2"
NEAR = 2e-6


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The dialogues of `data` in the 101 pieces of GPT-NeoX's checkpoints."""
    folder = tmp_path_factory.mktemp("small")
    lines = (GOLDEN / "sft.jsonl").read_text().replace("<<<|user|>>>", " ").replace("<<<|assistant|>>>", " ")
    (folder / "text.jsonl").write_text(lines)
    argv = [
        "tokenize",
        "--input",
        folder / "text.jsonl",
        "--vocab-file",
        NEOX / "spm101.model",
        "--workers",
        "1",
        "-q",
    ]
    ran = spawn([*map(str, argv), "--output-prefix", str(folder / "P")], 1)
    out, _ = ran.communicate(timeout=60)
    assert ran.returncode == 0, out
    return folder / "P_text_document"


@pytest.fixture
def config(settings, small):
    model = {"path": str(START), "gqa_layout": "blocked", "tokenizer": str(NEOX / "spm101.model")}
    steps = {"train_iters": 4, "iteration_offset": 6}
    return settings(
        model=model, data={"train": [str(small)], "loss": "all"}, steps=steps, init="moments", save={"every": 2}
    )


@pytest.fixture
def expected(convert, small, tmp_path):
    """Losses and norms of plain transformers and torch, with weights, moments and step placed by hand."""
    from transformers import AutoModelForCausalLM

    parts = {}
    for state in ("fp32-master", "exp_avg", "exp_avg_sq"):
        options = [
            "--weights",
            state,
            "--gqa-layout",
            "blocked",
            "--vocab-size",
            101,
            "--tokenizer",
            NEOX / "spm101.model",
        ]
        ran = convert("neox2hf", START, tmp_path / state, *options)
        assert ran.code == 0, ran.err
        parts[state] = AutoModelForCausalLM.from_pretrained(tmp_path / state, dtype=torch.float32)
    model, first, second = parts.values()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for tensor, mean, square in zip(model.parameters(), first.parameters(), second.parameters(), strict=True):
        optimizer.state[tensor] = {"step": torch.tensor(6.0), "exp_avg": mean.data, "exp_avg_sq": square.data}
    return by_hand(model, small, 4, optimizer, "all")


def require(ran, expected, near=NEAR):
    assert ran.code == 0, ran.out
    for name, values in zip(("loss", "grad_norm"), expected, strict=True):
        assert ran.series(name) == pytest.approx(values, abs=near), name


def test_moments_of_neox_are_taken_up(config, run, expected):
    stopped = run(config, "--steps.exit_interval", 2, ranks=2)
    assert stopped.code == 75, stopped.out
    assert "moments    of the start, after 6 steps; the weights are its master weights" in stopped.out
    assert not (stopped.save / ".moments").exists()
    assert stopped.out.count("1 rows of vocabulary padding in the source belong to no token") == 1
    assert "only the weights are converted" not in stopped.out  # as they are of the start alone
    two = run(config, ranks=2)  # from its own checkpoint
    require(two, expected)
    assert two.series("global_step") == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("engine", "near"), [(["--engine", "transformers"], NEAR), (zero(1), 2e-5)], ids=["hf", "zero"]
)
def test_other_engines_take_them_up_too(config, run, expected, engine, near):
    require(run(config, *engine, ranks=2), expected, near)


def test_moments_are_noted_and_what_has_none_is_refused(config, model, tmp_path):
    def load(*options):
        return load_config(config, ["--save.path", str(tmp_path / "save"), *map(str, options)])[0]

    assert "and the place in the data are not carried" in " ".join(moments_of(load(), "fsdp").notes)
    with pytest.raises(RefusedError, match="iteration_offset is 7") as refused:
        moments_of(load("--steps.iteration_offset", 7), "fsdp")
    assert refused.value.hint == "--steps.iteration_offset 6"
    with pytest.raises(UnsupportedError, match="no optimizer is read") as refused:
        moments_of(load("--model.path", model("llama", vocab_size=253)), "fsdp")
    assert refused.value.hint == "--init finetune takes the weights alone"
    for arguments, message in (
        (["--lora.rank", 2], "init moments continues a training of all weights, and lora starts another"),
        (["--model.init", "config"], "and model.init config starts another"),
    ):
        with pytest.raises(UsageError, match=message):
            check_effect(load(*arguments), 8)
