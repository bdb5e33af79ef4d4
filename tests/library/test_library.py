"""Conversions and proofs as functions: what the commands do, with typed results and errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vitruvian
from tests.models import files

ROOT = Path(__file__).parents[2]
VERSION = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
PACKAGES = ("vitruvian", "formats", "converters", "train")


def test_a_conversion_is_that_of_the_command(model, convert, tmp_path):
    source, reports = model("llama", "bfloat16"), []
    done = vitruvian.convert(
        source, tmp_path / "one", to="megatron", tp=2, pp=2, progress=lambda *what: reports.append(what)
    )
    assert convert("hf2megatron", source, tmp_path / "two", "--tp", "2", "--pp", "2").code == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert (done.out, done.verified, done.averaged) == (tmp_path / "one", True, {})
    assert done.digest == json.loads(convert("digest", source, "--json").out)["digest"]
    assert {what for what, _, _ in reports} == {"converting", "verifying"}
    assert all(0 < count <= total for _, count, total in reports)
    assert json.loads(json.dumps(done.to_dict()))["tensors"] == done.tensors


@pytest.mark.parametrize(("to", "command"), [("huggingface", "hf2hf"), ("fsdp", "hf2fsdp"), ("neox", "hf2neox")])
def test_every_target(model, convert, tmp_path, to, command):
    source = model("gpt_neox", "bfloat16")
    vitruvian.convert(source, tmp_path / "one", to=to)
    assert convert(command, source, tmp_path / "two").code == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_a_reshard_keeps_what_the_source_has(model, convert, tmp_path):
    source = tmp_path / "run"
    vitruvian.convert(
        model("llama", "bfloat16"),
        source,
        to="megatron",
        tp=2,
        norm="local",
        make_vocab_size_divisible_by=8,
        iteration=7,
    )
    vitruvian.convert(source, tmp_path / "one", to="megatron", tp=4)
    assert convert("reshard", source, tmp_path / "two", "--tp", "4").code == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert (tmp_path / "one" / "iter_0000007").is_dir()


def test_parts_and_the_call_that_finishes(model, tmp_path):
    source = model("llama", "bfloat16")
    for number in (1, 2):
        part = vitruvian.convert_part(source, tmp_path / "out", (number, 2), to="fsdp", ranks=2)
        assert part.part == f"{number}/2"
        assert part.tensors
    assert not (tmp_path / "out").exists()
    done = vitruvian.convert(source, tmp_path / "out", to="fsdp", ranks=2)
    assert done.digest == vitruvian.digest(source).digest
    for part in ((3, 2), "1/2"):
        with pytest.raises(vitruvian.UsageError, match="none such as"):
            vitruvian.convert_part(source, tmp_path / "other", part)


def test_plans_say_what_would_be_done(model):
    plan = vitruvian.plan(model("llama", "bfloat16"), to="megatron", tp=2, dtype="fp16")
    assert list(plan.files) == [f"release/mp_rank_0{rank}/model_optim_rng.pt" for rank in range(2)]
    assert sum(plan.changes.values()) == len(plan.plan.jobs)
    assert plan.to_dict()["target"]["bytes"] == sum(plan.files.values())
    assert vitruvian.plan(model("llama", "bfloat16")).changes == {}
    assert vitruvian.plan(model("llama", "bfloat16"), dtype="bfloat16", tp=None).changes == {}  # None is not said
    assert re.fullmatch(r"Plan\(39 tensors of huggingface, into 2 files of \d+\.\d kB\)", repr(plan)), repr(plan)


def test_proofs(model, tmp_path):
    source, other = model("llama", "bfloat16"), model("llama", "float32")
    vitruvian.convert(source, tmp_path / "run", to="megatron", tp=2)
    assert vitruvian.verify(tmp_path / "run").equal
    verified = vitruvian.verify(tmp_path / "run", source)
    assert verified.digest == verified.against == vitruvian.digest(source).digest
    assert vitruvian.diff(tmp_path / "run", source).equal
    difference = vitruvian.diff(source, other)
    assert {tensor.what for tensor in difference.tensors} == {"BF16 | F32"}
    with pytest.raises(vitruvian.VerificationError, match="tensors of") as error:
        vitruvian.verify(other, source)
    assert error.value.exit_code == 6
    with pytest.raises(vitruvian.SourceError, match=r"holds no vitruvian\.json"):
        vitruvian.verify(source)


def test_errors_say_what_the_command_says(model, tmp_path):
    with pytest.raises(vitruvian.OutputError) as error:
        vitruvian.convert(model("llama"), model("llama"))
    assert error.value.exit_code == 7
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("years of work")
    with pytest.raises(vitruvian.OutputError) as error:
        vitruvian.convert(model("llama"), tmp_path / "taken")
    assert error.value.hint
    for message, options in (
        ("dtype = 'int4' is not one of", {"dtype": "int4"}),
        ("there is no option colour", {"colour": 1}),
        ("--tp has no effect on the target huggingface", {"tp": 2}),
        ("there is no target gguf", {"to": "gguf"}),
        (r"there is no target \['x'\]", {"to": ["x"]}),
        ("config = '' is not a path", {"config": ""}),
        ("threads = 1000 is not a whole number of 1 to 256", {"threads": 1000}),
    ):
        with pytest.raises(vitruvian.UsageError, match=message):
            vitruvian.convert(model("llama"), tmp_path / "out", **options)
    for message, call in (
        ("src = '' is no path", lambda: vitruvian.digest("")),
        ("out = '' is no path", lambda: vitruvian.convert(model("llama"), "")),
        ("part = None is none such as", lambda: vitruvian.convert_part(model("llama"), tmp_path / "out", None)),
    ):
        with pytest.raises(vitruvian.UsageError, match=message):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_every_public_name_is_there():
    assert all(getattr(vitruvian, name) is not None for name in vitruvian.__all__)
    assert set(vitruvian.__all__) <= set(dir(vitruvian))
    assert vitruvian.__version__ == VERSION
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vitruvian.nothing


def test_the_plain_path_loads_no_framework_and_no_network(model, tmp_path):
    code = (
        "import sys, vitruvian\nassert 'numpy' not in sys.modules\n"
        "vitruvian.convert(sys.argv[1], sys.argv[2], to='megatron', tp=2)\n"
        "assert sum(tensor.size for _, tensor in vitruvian.open(sys.argv[2]).tensors())\n"
        "heavy = ('torch', 'transformers', 'huggingface_hub', 'httpx', 'requests', 'ssl', 'socket', 'obstore')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    argv = [sys.executable, "-c", code, str(model("llama")), str(tmp_path / "out")]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize("trap", ["train.py", "formats/__init__.py", "converters.py", "convert.py"])
@pytest.mark.parametrize(
    "argv",
    [
        ["-m", "vitruvian", "convert", "formats", "--json"],
        ["-m", "vitruvian", "train", "--help"],
        ["-c", "import vitruvian; print(vitruvian.open)"],
    ],
    ids=lambda argv: " ".join(argv[:3]),
)
def test_files_of_the_user_with_our_names_are_not_taken_for_ours(tmp_path, trap, argv):
    (tmp_path / trap).parent.mkdir(exist_ok=True)
    (tmp_path / trap).write_text("raise SystemExit('the trap was run')\n")
    ran = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


def test_a_foreign_package_that_was_imported_before_is_named(tmp_path):
    (tmp_path / "formats.py").write_text("WHOSE = 'the user'\n")
    code = "import formats, vitruvian\nvitruvian.open('.')"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert ran.returncode == 1
    assert f"another one is imported already: {tmp_path / 'formats.py'}" in ran.stderr


def test_the_program(tmp_path):
    for argv, code, message in (
        (["--version"], 0, f"vitruvian {VERSION}"),
        (["--help"], 0, "vitruvian convert COMMAND"),
        (["convert", "--help"], 0, "fsdp2hf"),
        (["train", "--help"], 0, "pack"),
        (["paint"], 2, "there is no command paint"),
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "vitruvian", *argv],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
        )
        assert (ran.returncode, message in ran.stdout + ran.stderr) == (code, True), ran


@pytest.mark.parametrize(
    ("program", "shell", "typed", "completion"),
    [
        ("convert", "bash", "convert hf2mega", "plain,hf2megatron"),
        ("convert", "zsh", "convert hf2megatron --make-v", "--make-vocab-size-divisible-by"),
        ("train", "fish", "train pa", "plain,pack"),
    ],
)
def test_shells_complete_what_is_typed(program, shell, typed, completion):
    path = str(Path(sys.executable).with_name(program))
    line = {"COMP_WORDS": typed, "COMP_CWORD": typed.split()[-1] if shell == "fish" else str(typed.count(" "))}
    env = {**os.environ, f"_{program.upper()}_COMPLETE": f"{shell}_complete", **line}
    ran = subprocess.run([path], capture_output=True, text=True, timeout=60, check=True, env=env)
    assert completion in ran.stdout
    env[f"_{program.upper()}_COMPLETE"] = f"{shell}_source"
    assert "complet" in subprocess.run([path], capture_output=True, text=True, timeout=60, check=True, env=env).stdout


def test_each_package_says_that_it_has_types():
    """What a checker sees of them is in `typed_use.py`, which `make type` reads."""
    packed = (ROOT / "pyproject.toml").read_text().partition("package-data]")[2]
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
        assert f'"{package}" = ["py.typed"]' in packed


def test_paths_may_be_text(model, tmp_path):
    vitruvian.convert(str(model("llama")), str(tmp_path / "out"))
    assert vitruvian.open(str(tmp_path / "out")).path == Path(tmp_path / "out")


@pytest.mark.parametrize("threads", [1, 3])
def test_the_current_folder_may_change_meanwhile(model, tmp_path, monkeypatch, threads):
    """As hydra does: a relative OUT is where the call began, and one of its name in the other folder stays."""
    other = tmp_path / "other"
    vitruvian.convert(model("llama-tied", "bfloat16"), other / "run", to="megatron")
    before = files(other)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model("llama", "bfloat16"))
    done = vitruvian.convert(
        "model", "run", to="megatron", threads=threads, force=True, progress=lambda *_: os.chdir(other)
    )
    assert done.out == tmp_path / "run"
    assert vitruvian.verify(tmp_path / "run").digest == vitruvian.digest(model("llama", "bfloat16")).digest
    assert files(other) == before


def test_the_current_folder_may_be_gone(model, tmp_path, monkeypatch):
    """Whole paths need none, and nothing else can be meant."""
    source = model("llama", "bfloat16")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = vitruvian.convert(source, tmp_path / "run", to="megatron", tp=2)
    assert vitruvian.verify(tmp_path / "run", source).digest == done.digest
    assert vitruvian.plan(source, to="fsdp").nbytes > 0
    assert len([*vitruvian.open(tmp_path / "run").tensors()]) == len(vitruvian.open(source)["huggingface"])
    with vitruvian.exporter(tmp_path / "hub") as exporter:
        exporter.submit(source)
    assert exporter.results[0].digest == done.digest
    for call in (lambda: vitruvian.convert(source, "out"), lambda: vitruvian.exporter("hub")):
        with pytest.raises(vitruvian.UsageError, match="the current folder no longer exists"):
            call()


def test_a_command_whose_current_folder_is_gone(model, tmp_path, monkeypatch, convert):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert convert("plan", model(), "--to", "megatron").code == 0
    assert convert("hf2megatron", model(), tmp_path / "run").code == 0
    ran = convert("hf2megatron", model(), "run")
    assert (ran.code, "run: the current folder no longer exists" in ran.err) == (7, True), ran.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("p\0q", "is no(t a)? path"),
        ("p\ud800", "is no(t a)? path"),
        (300 * "n", "File name too long"),
        ("a/" * 3000, "File name too long"),
    ],
)
def test_names_that_no_folder_has(model, name, message):
    for call in (
        lambda: vitruvian.convert(model(), name, to="megatron"),
        lambda: vitruvian.open(name),
        lambda: vitruvian.digest(name),
        lambda: vitruvian.exporter(name),
        lambda: vitruvian.open(model(), config=name),
    ):
        with pytest.raises(vitruvian.UsageError, match=message):
            call()


@pytest.mark.parametrize("text", ['{"model_type": "lla', "[1]", '{"model_type": "llama"}'])
def test_a_config_that_changes_after_it_was_opened(model, tmp_path, text):
    folder = shutil.copytree(model("llama"), tmp_path / "hf")
    checkpoint = vitruvian.open(folder)
    (folder / "config.json").write_text(text)
    with pytest.raises(
        vitruvian.SourceError, match=r"config\.json (is not valid JSON|holds no JSON|has changed since)"
    ):
        dict(checkpoint.tensors())
