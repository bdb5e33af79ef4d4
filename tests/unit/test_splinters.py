"""What stood in the way of somebody's first hour, and stands there no more."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
import time
import traceback

import click
import pytest

import converters.cli
import train.cli
import vitruvian
from converters.commands.to import NAMES
from converters.common.cli_help import MANY, TITLES
from converters.common.progress import Progress, clock
from formats.errors import ranges
from formats.registry import FORMATS
from tests.models import files
from tests.unit.test_pages import parse

GROUPS = {"convert": converters.cli.cli, "train": train.cli.cli}
EVERY = [
    (program, f"{name} {inner}".strip(), command)
    for program, group in GROUPS.items()
    for name, first in group.commands.items()
    for inner, command in (first.commands.items() if isinstance(first, click.Group) else [("", first)])
]


@pytest.mark.parametrize(
    ("program", "name", "command"), EVERY, ids=lambda value: value if isinstance(value, str) else ""
)
def test_help_fits_and_shows_what_to_type(program, name, command):
    text = command.get_help(click.Context(command, info_name=f"{program} {name}", terminal_width=80))
    assert max(map(len, text.splitlines())) <= 80, max(text.splitlines(), key=len)
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    assert "INTEGER" not in text  # an option says N
    titles = [title for title in TITLES if f"\n{title}:\n" in text]
    assert len(titles) >= 2 if len(options) > MANY else titles == []
    assert all(text.count(f"  {option.opts[-1]}") or text.count(option.opts[0]) for option in options)
    typed = re.sub(r"\\\n", " ", text[text.index("Examples:") :]).splitlines()[1:]
    assert typed
    for line in typed:
        assert line.strip().startswith(f"{program} {name}")
        parse(GROUPS[program], shlex.split(line)[1:])


@pytest.mark.parametrize("program", [*GROUPS, "train packs", "convert family"])
def test_lists_of_commands_fit_too(program):
    first, _, inner = program.partition(" ")
    group = GROUPS[first].commands[inner] if inner else GROUPS[first]
    text = group.get_help(click.Context(group, info_name=program, terminal_width=80))
    assert max(map(len, text.splitlines())) <= 80
    assert "INTEGER" not in text


def test_formats_fit_a_terminal(convert):
    lines = convert("formats").out.splitlines()
    assert max(map(len, lines)) <= 80
    marked = {line.split()[0]: re.search(r"- \((\d+)\)", line) for line in lines if "- (" in line}
    notes = {line.split("(")[1].split(")")[0] for line in lines if line.startswith("  (")}
    assert {match[1] for match in marked.values() if match} == notes
    assert "gemma2" in marked


def test_one_verb_is_every_pair(model, convert, tmp_path):
    source = model("llama")
    assert convert("to", "megatron", source, tmp_path / "to", "--tp", 2, "--pp", 2).code == 0
    assert convert("hf2megatron", source, tmp_path / "pair", "--tp", 2, "--pp", 2).code == 0
    assert files(tmp_path / "to") == files(tmp_path / "pair")
    for target, from_, message in (
        ("mcore", "to", "next: --load"),  # reshard
        ("fsdp", "to", "next: dcp.load"),
        ("gpt-neox", "to", "next: GPT-NeoX"),
        ("hf", "to", "next: AutoModelForCausalLM"),
        ("transformers", "hf", "next: AutoModelForCausalLM"),  # hf2hf
    ):
        ran = convert("to", target, tmp_path / from_, tmp_path / target.replace("transformers", "again"))
        assert (ran.code, message in ran.out) == (0, True), ran.err
        if target == "hf":
            assert files(tmp_path / "hf") == files(source)
    ran = convert("to", "hf", tmp_path / "to", tmp_path / "no", "--tp", 2)
    assert (ran.code, "No such option '--tp'" in ran.err, "megatron2hf --help" in ran.err) == (2, True, True), ran.err
    assert "one of hf, megatron" in convert("to", "paint", source, tmp_path / "no").err


def test_the_verb_knows_every_format():
    """What commands call a format is the first word of the command that makes a folder of it."""
    called = {form.name: form.to_folder.removesuffix("2hf") for form in FORMATS.values()}
    assert set(called.values()) - {""} <= NAMES.keys()
    assert [name for name, word in called.items() if not word] == ["huggingface"]


def test_inspect_without_a_config_says_what_the_files_tell(model, convert, tmp_path):
    for name in ("checkpoint-9", "checkpoint-10"):
        convert("hf2fsdp", model("llama"), tmp_path / name / "pytorch_model_fsdp_0", "--ranks", 2)
        for path in (tmp_path / name / "pytorch_model_fsdp_0").glob("*.json"):
            path.unlink()
    ran = convert("inspect", tmp_path / "checkpoint-9")
    assert ran.code == 0, ran.err
    for message in ("fsdp, ranks 2", "39 tensors, 39 F32", "model 39", "has no config.json: add --config BASE"):
        assert message in ran.out
    facts = json.loads(convert("inspect", tmp_path / "checkpoint-9", "--json").out)
    with_config = json.loads(convert("inspect", tmp_path / "checkpoint-9", "--config", model("llama"), "--json").out)
    assert (facts["bytes"], facts["tensors"]) == (with_config["bytes"], 39)
    parent = json.loads(convert("inspect", tmp_path, "--json").out)["checkpoints"]
    assert [checkpoint["path"].rpartition("/")[2] for checkpoint in parent] == ["checkpoint-10", "checkpoint-9"]


def test_diff_sums_up(model, convert, tmp_path):
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(model("llama"), tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    for layer in (1, 2, 3):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    ran = convert("diff", model("llama"), other)
    assert " ".join(ran.out.split()) == "model.layers.1-3.mlp.up_proj.weight values 3 elements differ by up to 1"
    assert ran.err.splitlines()[-1] == "hint: --tensors lists each tensor"
    each = convert("diff", model("llama"), other, "--tensors").out.splitlines()
    assert [line.split()[0] for line in each] == [f"model.layers.{n}.mlp.up_proj.weight" for n in (1, 2, 3)]
    convert("hf2hf", model("llama"), tmp_path / "half", "--dtype", "bf16")
    assert convert("diff", model("llama"), tmp_path / "half").out.startswith("all 39 tensors: F32 | BF16")
    convert("hf2hf", model("llama", num_hidden_layers=2), tmp_path / "short")
    ran = convert("diff", tmp_path / "short", model("llama"))
    assert re.search(r"model\.layers\.2-3\.mlp\.up_proj\.weight +only in the second", ran.out)
    assert (ranges([0, 1, 2, 5, 7, 8]), ranges([])) == ("0-2,5,7-8", "")


def test_a_resumed_conversion_says_from_where(model, convert, tmp_path):
    assert convert("hf2megatron", model("llama"), tmp_path / "out", "--part", "1/2").code == 0
    ran = convert("hf2megatron", model("llama"), tmp_path / "out")
    assert re.search(r"^resuming: \d+\.\d kB of 601\.9 kB done$", ran.err, re.MULTILINE), ran.err
    assert "resuming" not in convert("hf2megatron", model("llama"), tmp_path / "fresh").err


def test_the_time_left_covers_what_follows(monkeypatch):
    progress = Progress("converting", 100, quiet=True, after=100)
    progress.began = time.monotonic() - 10
    progress.done = 50
    assert progress.left(progress.began + 10) == "0:30"  # 50 to convert and 100 to read back, at 5 a second
    assert (clock(0), clock(61), clock(3723)) == ("0:00", "1:01", "1:02:03")


def test_errors_are_json_where_json_was_asked_for(model, convert, tmp_path):
    for argv, code in (
        (["inspect", tmp_path / "gone", "--json"], 3),
        (["hf2megatron", model("llama"), tmp_path / "out", "--tp", 3, "--json"], 5),
        (["hf2hf", model("llama"), "--json"], 2),
    ):
        ran = convert(*argv)
        report = json.loads(ran.err)
        assert (ran.code, report["exit_code"], ran.out) == (code, code, "")
        assert report.keys() == {"error", "hint", "exit_code"}
    keys = json.dumps([json.loads(convert("plan", model("llama"), "--to", "megatron", "--json").out)["target"]])
    assert not re.findall(r'"\w+ \w+":', keys)
    assert "held_by" in json.loads(convert("formats", "--json").out)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks have notes from Python 3.11 on")
def test_a_traceback_in_a_notebook_has_the_hint(tmp_path):
    with pytest.raises(vitruvian.SourceError) as raised:
        vitruvian.open(tmp_path / "gone")
    text = "".join(traceback.format_exception(raised.value))
    assert text.rstrip().endswith("--local-dir FOLDER")
    assert "\nhint: a model of the Hub" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("plain", "coloured"), [(None, True), ("1", False)])
def test_colour_is_for_terminals(convert, monkeypatch, plain, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in convert("paint").err
    if plain:
        monkeypatch.setenv("NO_COLOR", plain)
    terminal = Terminal()
    monkeypatch.setattr(sys, "argv", ["convert", "paint"])
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(SystemExit):
        converters.cli.main()
    assert ("\x1b[31m" in terminal.getvalue()) is coloured


def test_the_line_of_a_training(tmp_path):
    from types import SimpleNamespace

    from train.run.log import Log, Step

    log = object.__new__(Log)
    log.folder, log.every, log.peak, log.ranks, log.seconds, log.trackers = tmp_path, 20, None, 1, 0.0, []
    log.spike, log.losses = None, []
    lines: list[str] = []
    step = Step(2.3141, 0.6999, 3923, 7693, 1, 462_000_000, 2.4e-6, False, False, False)
    log.line(SimpleNamespace(step=60, offset=0, tokens=1), 1000, step, 1.0, lines.append)
    speed = "7,693 tokens/s (51 % in the loss)"
    assert lines == [f"step 60/1000 · loss 2.314 · lr 2.4e-06 · grad-norm 0.7 · {speed} · 462.0 MB · 15:40 left"]
    log.line(SimpleNamespace(step=1000, offset=1000, tokens=1), 1000, step, 1.0, lines.append)
    assert lines[-1].startswith("step 1000/1000 (global 2000) · loss ")
    assert lines[-1].endswith(" · 0:00 left")


def test_verify_says_that_a_cast_differs(model, convert, tmp_path):
    convert("hf2hf", model("llama"), tmp_path / "half", "--dtype", "bf16")
    ran = convert("verify", tmp_path / "half", model("llama"))
    assert ran.code == 6
    assert f"half is BF16 and {model('llama')} F32: what was cast differs; `convert verify" in ran.err


def test_a_tokenizer_that_the_training_saved_is_not_replaced_in_silence(model, convert, tmp_path):
    """HF Trainer saves it beside the weights; `--config BASE` is the config and the tokenizer of BASE."""
    source = shutil.copytree(model("llama"), tmp_path / "trained")
    (source / "chat_template.jinja").write_text("{{ messages }} of the training")
    convert("hf2fsdp", source, tmp_path / "run" / "checkpoint-5" / "pytorch_model_fsdp_0")
    shutil.copyfile(source / "chat_template.jinja", tmp_path / "run/checkpoint-5/chat_template.jinja")
    ran = convert("fsdp2hf", tmp_path / "run/checkpoint-5", tmp_path / "out", "--config", model("llama"))
    assert ran.code == 0
    assert "chat_template.jinja of " in ran.err
    assert f"convert assets OUT --from {tmp_path / 'run/checkpoint-5'}" in ran.err
