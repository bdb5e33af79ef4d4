"""Files made to harm: nothing in them runs, hangs, exhausts memory or passes for a checkpoint.

Every refusal is one sentence that names the file, with the documented exit code. What could hang or eat memory runs in
a process of its own, with both limited.
"""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import resource
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from converters.convert import run
from converters.move.journal import sealed
from converters.plan.request import Request
from converters.plan.targets import plan_megatron
from formats.megatron import classic as megatron
from formats.registry import open_checkpoint
from formats.torch_files.archive import read_torch
from formats.torch_files.pickle_values import dumps
from tests.conftest import Ran
from tests.models import files

pytestmark = pytest.mark.timeout(120)
REPOSITORY = Path(__file__).parents[2]
SECONDS, WAITING, MEMORY = 8, 80, 3 << 30
PLACEHOLDER = "@@ hostile @@"
RANK0 = Path("release/mp_rank_00/model_optim_rng.pt")


@pytest.fixture(scope="module")
def hf(model: Callable[..., Path]) -> Path:
    """A sound Hugging Face folder."""
    return model("llama", "float32", num_hidden_layers=1)


@pytest.fixture(scope="module")
def sound(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound Megatron folder of one rank."""
    out = tmp_path_factory.mktemp("sound") / "m"
    request = Request(out, quiet=True)
    run(plan_megatron(open_checkpoint(hf), request, megatron.Options(), None), request)
    return out


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """An in-process run that wants gigabytes gets a MemoryError instead of this machine's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def limit() -> None:
    """Of a process: its CPU-seconds, which do not grow with what runs beside it, and its memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def apart(*argv: object) -> Ran:
    """`convert` in a process of its own, with limited time and memory."""
    program = [sys.executable, "-c", "from converters.cli import main; main()", *map(str, argv)]
    try:
        done = subprocess.run(
            program, cwd=REPOSITORY, capture_output=True, text=True, timeout=WAITING, preexec_fn=limit, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"convert {argv[0]} hangs")
    return Ran(done.returncode, done.stdout, done.stderr)


def sane(ran: Ran) -> str:
    """Why a result is not one that a command may give, empty when it is."""
    err = ran.err[:300]
    if "bug:" in ran.err or "Traceback" in ran.err:
        return f"bug: {ran.err[-400:]}"
    if "MemoryError" in ran.err or "memory is short" in ran.err:
        return f"out of memory: {err}"
    if ran.code not in (0, 2, 3, 4, 5, 6, 7):
        return f"exit code {ran.code}: {err}"
    return f"an error of {len(ran.err)} characters: {err}" if len(ran.err) > 4000 else ""


def refused(ran: Ran, file: Path | str, *codes: int) -> None:
    """The command refused, with one of these exit codes, and named the file."""
    assert not sane(ran), sane(ran)
    assert ran.code in (codes or (3,)), f"exit code {ran.code}: {ran.err}{ran.out[:200]}"
    assert str(file) in ran.err


def try_all(convert: Callable[..., Ran], *argv: object) -> Ran:
    """Run in this process; a bug comes back as text, so that a loop can collect them."""
    try:
        return convert(*argv)
    except AssertionError as error:
        return Ran(1, "", str(error))


# --- making hostile archives -----------------------------------------------------------------------------------------


def rewrite(old: Path, new: Path, data_pkl: bytes) -> None:
    """The archive with another pickle and the same storages."""
    new.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(new, "w") as target:
        for member in source.infolist():
            target.writestr(member.filename, data_pkl if member.filename == "archive/data.pkl" else source.read(member))


def opcodes(value: Any) -> bytes:
    """A value as pickle opcodes, to stand anywhere in another pickle."""
    return pickle.dumps(value, 2)[2:-1]


def infected(sound: Path, root: Path, code: bytes, where: str = "args x", drop: str = "") -> Path:
    """A copy of a run folder whose pickle has these opcodes somewhere.

    `where` is `args NAME`, `model KEY`, `top KEY`, `args key`, `model key` or `top`, the object itself.
    """
    shutil.copytree(sound, root)
    value = read_torch(sound / RANK0).value
    part, _, name = where.partition(" ")
    holder = {"args": vars(value["args"]), "model": value["model"], "top": value}[part]
    if drop:
        del vars(value["args"])[drop]
    if where == "top":
        value = PLACEHOLDER
    elif name == "key":
        holder[PLACEHOLDER] = 1
    else:
        holder[name] = PLACEHOLDER
    written = dumps(value)
    assert written.count(opcodes_of_text(PLACEHOLDER)) == 1
    rewrite(sound / RANK0, root / RANK0, written.replace(opcodes_of_text(PLACEHOLDER), code))
    return root


def opcodes_of_text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def stack_global(module: str, name: str) -> bytes:
    return opcodes_of_text(module) + opcodes_of_text(name) + b"\x93"


def call(callee: bytes, *args: bytes) -> bytes:
    return callee + b"(" + b"".join(args) + b"tR"


# --- pickles that would run code -------------------------------------------------------------------------------------

COMMAND = b"touch MARKER"
SHELL = opcodes_of_text(COMMAND.decode())
PYTHON = opcodes_of_text("__import__('os').system('touch MARKER')")
NAMESPACE = glob("argparse", "Namespace") + b")\x81"
RUNNING: dict[str, bytes] = {
    "REDUCE os.system": call(glob("os", "system"), SHELL),
    "REDUCE posix.system": call(glob("posix", "system"), SHELL),
    "REDUCE eval": call(glob("builtins", "eval"), PYTHON),
    "REDUCE exec of Python 2": call(glob("__builtin__", "eval"), PYTHON),
    "REDUCE getattr chain": call(call(glob("builtins", "getattr"), call(glob("builtins", "__import__"),
                                 opcodes_of_text("os")), opcodes_of_text("system")), SHELL),
    "REDUCE torch.load": call(glob("torch", "load"), SHELL),
    "REDUCE _load_from_bytes": call(glob("torch.storage", "_load_from_bytes"), SHELL),
    "REDUCE runpy": call(glob("runpy", "run_path"), SHELL),
    "STACK_GLOBAL": call(stack_global("os", "system"), SHELL),
    "STACK_GLOBAL dotted": call(stack_global("torch", "os.system"), SHELL),
    "NEWOBJ": glob("subprocess", "Popen") + b"(" + SHELL + b"t\x81",
    "NEWOBJ_EX": glob("subprocess", "Popen") + b"(" + SHELL + b"t}" + opcodes_of_text("shell") + b"\x88s\x92",
    "NEWOBJ_EX with cls": glob("subprocess", "Popen") + b")}" + opcodes_of_text("cls") + SHELL + b"s\x92",
    "BUILD __setstate__": glob("torch.nn", "Module") + b")\x81}" + opcodes_of_text("__setstate__")
                          + glob("os", "system") + b"sb" + SHELL + b"b",
    "BUILD Namespace.__setstate__": NAMESPACE + b"}" + opcodes_of_text("__setstate__") + glob("os", "system") + b"sb"
                                    + SHELL + b"b",
    "BUILD dunder keys": NAMESPACE + b"}(" + b"".join(opcodes_of_text(name) + glob("os", "system") for name in
                         ("__class__", "__reduce__", "__init__", "__del__", "__dict__", "__repr__")) + b"ub",
    "BUILD slots": NAMESPACE + b"N}" + opcodes_of_text("__class__") + glob("os", "system") + b"s\x86b",
    "BUILD ordered dict": glob("collections", "OrderedDict") + b")R}" + opcodes_of_text("__reduce__")
                          + glob("os", "system") + b"sb",
    "BUILD a dtype that ends its line": glob("torch", "float32") + b"}" + opcodes_of_text("name")
        + opcodes_of_text("float32\n0cos\nsystem\n(X\x0c\0\0\0touch MARKERtR0cargparse\nNamespace") + b"sb",
    "INST": b"(" + SHELL + b"ios\nsystem\n",
    "OBJ": b"(" + glob("os", "system") + SHELL + b"o",
    "EXT1": b"\x82\x01", "EXT2": b"\x83\x01\x00", "EXT4": b"\x84\x01\x00\x00\x00",
    "PERSID": b"Pos.system\n",
    "BINPERSID": b"(" + opcodes_of_text("storage") + call(glob("os", "system"), SHELL) + SHELL + SHELL + b"K\x01tQ",
    "BINPERSID nested": b"(" + opcodes_of_text("module") + b"(" + call(glob("os", "system"), SHELL) + b"tQtQ",
    "an enum's name that ends its line": call(stack_global("signal", "Signals\n0cos\nsystem\n(X\x0c\0\0\0touch MARKERtR"
                                              "0csignal\nSignals"), b"K\x0f"),
    "an enum's module that ends its line": call(stack_global("megatron.core.enums", "x\ncos\nsystem"), SHELL),
    "signal.raise_signal": call(glob("signal", "raise_signal"), b"K\x09"),
    "signal.alarm": call(glob("signal", "alarm"), b"K\x01"),
    "megatron.core.enums.enum.sys.exit": call(stack_global("megatron.core.enums", "enum.sys.exit"), b"K\x01"),
    "a namespace in a namespace": NAMESPACE + b"}" + opcodes_of_text("x") + call(glob("os", "system"), SHELL) + b"sb",
    "a list": b"](" + call(glob("os", "system"), SHELL) + b"e",
    "a key": b"}" + call(glob("os", "system"), SHELL) + b"K\x01s",
    "parameter": call(glob("torch._utils", "_rebuild_parameter"), call(glob("os", "system"), SHELL), b"\x88", b"N"),
    "set": call(glob("builtins", "set"), b"](" + call(glob("os", "system"), SHELL) + b"e"),
    "encode": call(glob("_codecs", "encode"), call(glob("os", "system"), SHELL), SHELL),
}  # fmt: skip
HARMLESS = {
    ("torch._utils", "_rebuild_tensor_v2"), ("torch", "FloatStorage"), ("torch", "float32"), ("signal", "Signals"),
    ("collections", "OrderedDict"), ("argparse", "Namespace"),
}  # fmt: skip


def globals_of(path: Path) -> set[tuple[str, str]]:
    with zipfile.ZipFile(path) as archive:
        data = archive.read("archive/data.pkl")
    names = set()
    for code, argument, _ in pickletools.genops(data):
        assert code.name not in ("INST", "OBJ", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX", "PERSID")
        if code.name == "GLOBAL":
            names.add(tuple(str(argument).split(" ", 1)))
    return names


@pytest.mark.parametrize("where", ["args x", "args seq_length", "model x._extra_state"])
@pytest.mark.parametrize("name", RUNNING)
def test_code_in_a_pickle_never_runs_and_never_travels(sound, convert, tmp_path, monkeypatch, name, where):
    root = infected(sound, tmp_path / "m", RUNNING[name], where)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    seen = convert("inspect", root)
    done = convert("reshard", root, tmp_path / "out", "--tp", 2)
    assert list((tmp_path / "cwd").iterdir()) == [], "it ran"
    for ran in (seen, done):
        if ran.code:
            refused(ran, root, 3, 4)
    for path in (tmp_path / "out").rglob("*.pt"):
        assert globals_of(path) <= HARMLESS
        assert b"MARKER" not in path.read_bytes()


@pytest.mark.parametrize("name", RUNNING)
def test_code_as_the_whole_object_is_refused(sound, convert, tmp_path, monkeypatch, name):
    root = infected(sound, tmp_path / "m", RUNNING[name], "top")
    monkeypatch.chdir(tmp_path)
    refused(convert("inspect", root), root / RANK0)
    assert not (tmp_path / "MARKER").exists()


def test_the_attacks_would_work_on_pickle_itself(tmp_path, monkeypatch):
    """So that the two tests above prove something."""
    monkeypatch.chdir(tmp_path)
    working = []
    for name in ("REDUCE os.system", "REDUCE eval", "STACK_GLOBAL", "INST", "OBJ", "REDUCE getattr chain", "a list"):
        with suppress(Exception):
            pickle.loads(b"\x80\x04" + RUNNING[name] + b".")
        if (tmp_path / "MARKER").exists():
            working.append(name)
            (tmp_path / "MARKER").unlink()
    assert len(working) == 7


# --- pickles that would exhaust --------------------------------------------------------------------------------------


def laughs(empty: bytes, fill: Callable[[bytes], bytes], levels: int = 30) -> bytes:
    """Each level holds the one before ten times, through the memo."""
    code = opcodes_of_text("ha") + b"q\x00"
    for level in range(levels):
        code += b"0" + empty + fill(b"h" + bytes([level])) + b"q" + bytes([level + 1])
    return code


BOMBS = {
    "lists": laughs(b"](", lambda inner: inner * 10 + b"e"),
    "tuples": laughs(b"(", lambda inner: inner * 10 + b"t"),
    "dicts": laughs(b"}(", lambda inner: b"".join(b"K" + bytes([i]) + inner for i in range(10)) + b"u"),
    "ordered dicts": laughs(glob("collections", "OrderedDict") + b")R(",
                            lambda inner: b"".join(b"K" + bytes([i]) + inner for i in range(10)) + b"u"),
    "a list in itself": b"]q\x00(h\x00h\x00h\x00e",
    "a dict in itself": b"}q\x00(" + b"".join(opcodes_of_text(str(i)) + b"h\x00" for i in range(10)) + b"u",
    "a tuple in its list": b"]q\x00h\x00\x85a",
    "deep lists": b"]" * 50_000 + b"a" * 49_999,
    "deep tuples": b")" + b"\x85" * 50_000,
    "deep dicts": b"}" + b"K\x01}" * 20_000 + b"s" * 20_000,
}  # fmt: skip
PLACES = ["args x", "args num_layers", "args seq_length", "args window_size", "args swiglu", "args rank",
          "args make_vocab_size_divisible_by", "args pipeline_model_parallel_layout", "model x", "model x._extra_state",
          "model decoder.final_layernorm.weight", "top iteration", "top checkpoint_version", "top model", "top args",
          "top rng_state", "top"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_go_off_nowhere(sound, tmp_path, name):
    """All places of one bomb in one process, which must come to its end."""
    roots = [infected(sound, tmp_path / str(i), BOMBS[name], place) for i, place in enumerate(PLACES)]
    program = """
import sys
from converters import cli
for root in sys.argv[1:]:
    sys.argv = ["convert", "reshard", root, root + ".out", "-q"]
    print("BEGIN", root, file=sys.stderr, flush=True)
    try:
        cli.main()
    except SystemExit as done:
        print("END", done.code, file=sys.stderr, flush=True)
    else:
        print("END 0", file=sys.stderr, flush=True)
"""
    with (tmp_path / "err").open("w+") as err:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-c", program, *map(str, roots)],
                cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=err, timeout=WAITING, preexec_fn=limit, check=False,
            )  # fmt: skip
        err.seek(0)
        parts = err.read(1 << 20).split("BEGIN ")[1:]
    problems = {}
    for place, root, part in zip(PLACES, roots, [*parts, *[""] * len(roots)], strict=False):
        output, _, code = part.partition("\nEND ")
        wrong = sane(Ran(int(code or -1), "", output)) if code.strip() else f"hangs or dies: {output[-300:]}"
        if wrong:
            problems[place] = wrong
        elif code.strip() != "0" and str(root) not in output.partition("\n")[2]:
            problems[place] = f"names no file: {output[:200]}"
    assert not problems, "\n".join(f"{place}: {problem}" for place, problem in problems.items())


HASHED = laughs(b"(", lambda inner: inner * 10 + b"t", 20)
STORAGE = b"(" + opcodes_of_text("storage") + glob("torch", "FloatStorage") + b"%sX\x03\0\0\0cpuK\x04tQ"
SOUND_STORAGE = STORAGE % opcodes_of_text("0")
HALF_MB = opcodes_of_text("x" * 500_000) + b"q\x00"
EXHAUSTING = {
    "a key that takes ages to hash": b"}" + HASHED + b"K\x01s",
    "an element that takes ages to hash": b"\x8f(" + HASHED + b"\x90",
    "a set of them": call(glob("builtins", "set"), b"](" + HASHED + b"e"),
    "a persistent id": HASHED + b"Q",
    "a key in a persistent id": STORAGE % HASHED,
    "a shape": call(glob("torch._utils", "_rebuild_tensor_v2"), SOUND_STORAGE, b"K\x00", BOMBS["lists"],
                    BOMBS["tuples"], b"\x89", b"}"),
    "copies of bytes": HALF_MB + b"0](" + call(glob("_codecs", "encode"), b"h\x00", b"h\x00") * 20_000 + b"e",
    "copies of a tuple": b"](" + b"K\x01" * 100_000 + b"eq\x000](" + call(glob("torch", "Size"), b"h\x00") * 20_000
                         + b"e",
    "copies of a dict": b"}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(50_000)) + b"uq\x000]("
                        + call(glob("collections", "OrderedDict"), b"h\x00") * 20_000 + b"e",
    "copies of a state": b"}(" + b"".join(opcodes_of_text(str(i)) + b"N" for i in range(50_000)) + b"uq\x000]("
                         + (NAMESPACE + b"h\x00b") * 20_000 + b"e",
    "a memo index": b"Nr\xff\xff\xff\x7f", "a memo index in text": b"Np2000000000\n",
    "a memo index past all memory": b"Np99999999999999999999\n", "a negative memo index": b"Np-1\n",
    "an int of many digits": b"I" + b"9" * 200_000 + b"\n", "a long of many digits": b"L" + b"9" * 200_000 + b"L\n",
    "a length of 2 GiB": b"X\xff\xff\xff\x7f", "a length of 8 EiB": b"\x8d" + b"\xff" * 7 + b"\x7f",
    "a negative length": b"T\xff\xff\xff\xff", "a long of 2 GiB": b"\x8b\xff\xff\xff\x7f",
    "bytes of 8 EiB": b"\x8e" + b"\xff" * 7 + b"\x7f", "a byte array of 8 EiB": b"\x96" + b"\xff" * 7 + b"\x7f",
    "a frame of 8 EiB": b"\x95" + b"\xff" * 7 + b"\x7fN", "dup of dup": b"]" + b"2\x86" * 30 + b"0N",
}  # fmt: skip


@pytest.mark.parametrize("name", EXHAUSTING)
def test_nothing_exhausts_time_or_memory(sound, tmp_path, name):
    root = infected(sound, tmp_path / "m", EXHAUSTING[name], "args x")
    ran = apart("inspect", root)
    assert not sane(ran), sane(ran)
    if ran.code:
        refused(ran, root / RANK0)


def test_a_pickle_cut_off_anywhere_is_refused(sound, convert, tmp_path):
    root = tmp_path / "m"
    shutil.copytree(sound, root)
    data = zipfile.ZipFile(sound / RANK0).read("archive/data.pkl")
    for end in [*range(12), *range(12, len(data), max(1, len(data) // 60)), len(data) - 1]:
        rewrite(sound / RANK0, root / RANK0, data[:end])
        refused(convert("inspect", root), root / RANK0)


def test_damaged_bytes_in_a_pickle_are_refused_or_harmless(sound, convert, tmp_path):
    root, problems = tmp_path / "m", []
    shutil.copytree(sound, root)
    data = zipfile.ZipFile(sound / RANK0).read("archive/data.pkl")
    for i in range(120):
        at, value = (i * 7919) % len(data), (i * 151 + 3) % 256
        rewrite(sound / RANK0, root / RANK0, data[:at] + bytes([value]) + data[at + 1 :])
        ran = try_all(convert, "reshard", root, tmp_path / "out", "--dry-run")
        if sane(ran):
            problems.append(f"byte {at} = {value}: {sane(ran)}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("junk", [b"", b".", b"N", b"\x80", b"\x80\xff.", b"}}}}.", b"0.", b"1.", b"t.", b"R.", b"b.",
                                  b"s.", b"h\x00.", b"(((.", b"\xff" * 100, b"\x00" * 100, b"N." * 50, b"}.", b"].",
                                  b"\x80\x04\x95\x01\0\0\0\0\0\0\0.", b"cos\n", b"cos\nsystem\n."],
                         ids=repr)  # fmt: skip
def test_junk_instead_of_a_pickle_is_refused(sound, convert, tmp_path, junk):
    root = tmp_path / "m"
    shutil.copytree(sound, root)
    rewrite(sound / RANK0, root / RANK0, junk)
    refused(convert("inspect", root), root / RANK0)


# --- hostile args and states -----------------------------------------------------------------------------------------

SETTINGS = [
    *(name for names in (
        "num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size "
        "max_position_embeddings layernorm_epsilon norm_epsilon rotary_base group_query_attention "
        "untie_embeddings_and_output_weights window_size vocab_size add_qkv_bias qk_layernorm use_rope_scaling "
        "rope_scaling_factor rotary_seq_len_interpolation_factor swiglu normalization position_embedding_type "
        "add_bias_linear rotary_percent num_experts tensor_model_parallel_size pipeline_model_parallel_size "
        "virtual_pipeline_model_parallel_size expert_model_parallel_size decoder_first_pipeline_num_layers "
        "decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split pipeline_model_parallel_layout "
        "make_vocab_size_divisible_by seq_length iteration params_dtype rank world_size padded_vocab_size "
        "transformer_impl consumed_train_samples self args cls", ) for name in names.split()),
]  # fmt: skip
VALUES: dict[str, bytes] = {
    "none": b"N", "true": b"\x88", "text": opcodes_of_text("eight"), "digits": opcodes_of_text("8"),
    "surrogate": opcodes_of_text("\ud800"), "minus one": b"J\xff\xff\xff\xff", "zero": b"K\x00",
    "2**70": opcodes(2**70), "10**5000": opcodes(10**5000), "nan": opcodes(float("nan")), "inf": opcodes(float("inf")),
    "1e300": opcodes(1e300), "half": opcodes(0.5), "empty list": b"]", "nested": opcodes([[1, [2]], {"a": []}]),
    "dict": opcodes({"a": 1}), "pair of text": opcodes(("a", "b")), "tuple": opcodes((1,)), "bytes": b"C\x01x",
    "opaque": call(glob("numpy", "int64"), b"K\x08"), "class": glob("numpy", "int64"), "dtype": glob("torch", "int8"),
    "tensor": call(glob("torch._utils", "_rebuild_tensor_v2"), SOUND_STORAGE, b"K\x00", b"K\x04\x85", b"K\x01\x85",
                   b"\x89", b"}"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("drop", ["", "kv_channels"])
@pytest.mark.parametrize("value", VALUES)
def test_args_of_any_type_are_read_or_refused(sound, convert, tmp_path, value, drop):
    problems = []
    for i, name in enumerate(SETTINGS):
        if (name, value) == ("num_layers", "2**70") or (name == drop) or (drop and "heads" not in name):
            continue
        root = infected(sound, tmp_path / str(i), VALUES[value], f"args {name}", drop)
        shutil.rmtree(root / "huggingface")
        ran = try_all(convert, "reshard", root, tmp_path / "out", "--dry-run", "--vocab-size", 211)
        if sane(ran):
            problems.append(f"{name}: {sane(ran)}")
        elif ran.code in (3, 4) and str(root) not in ran.err:
            problems.append(f"{name}: names no file: {ran.err}")
        shutil.rmtree(root)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("value", ["text", "10**5000", "2**70", "minus one", "nan", "inf", "nested", "none", "bytes",
                                   "opaque", "tensor", "surrogate", "true"])  # fmt: skip
@pytest.mark.parametrize("where", ["top iteration", "top checkpoint_version", "top model", "top args", "top model1",
                                   "model decoder.final_layernorm.weight", "model x", "top key", "args key",
                                   "model key"])  # fmt: skip
def test_states_of_any_type_are_read_or_refused(sound, convert, tmp_path, where, value):
    code = VALUES[value]
    if where.endswith("key") and value in ("nested",):
        code = opcodes(((1, 2), 3))
    root = infected(sound, tmp_path / "m", code, where)
    (root / "release").rename(root / "iter_0000000")
    (root / "latest_checkpointed_iteration.txt").write_text("0")
    ran = try_all(convert, "reshard", root, tmp_path / "out", "--quiet")
    assert not sane(ran), sane(ran)
    if ran.code:
        assert str(root) in ran.err
    else:
        assert convert("inspect", tmp_path / "out").code == 0


@pytest.mark.parametrize("layers", [10**9, 2**62, 2**70])
def test_a_number_of_layers_that_no_model_has_is_refused_at_once(sound, tmp_path, layers):
    root = infected(sound, tmp_path / "m", opcodes(layers), "args num_layers")
    shutil.rmtree(root / "huggingface")
    refused(apart("inspect", root), root)


@pytest.mark.parametrize("layout", ["t*999999999999", "t*" + "9" * 5000, "((((t)*9999)*9999)*9999)*9999", "(" * 5000,
                                    "E|t*0|" * 1000, "Et|L\x00", "E" * 10**6])  # fmt: skip
def test_a_pipeline_layout_that_explodes_is_refused(sound, tmp_path, layout):
    root = infected(sound, tmp_path / "m", opcodes_of_text(layout), "args pipeline_model_parallel_layout")
    ran = apart("inspect", root)
    assert not sane(ran), sane(ran)
    assert ran.code in (3, 4, 5)


@pytest.mark.parametrize(
    "folder", ["mp_rank_99999999_999999999", "mp_rank_0", "mp_rank_00_000_000", "mp_rank_\u0660\u0660"], ids=ascii
)
def test_a_rank_that_no_run_has_is_refused_at_once(sound, tmp_path, folder):
    root = infected(sound, tmp_path / "m", b"N", "args tensor_model_parallel_size", "pipeline_model_parallel_size")
    (root / RANK0).parent.rename(root / "release" / folder)
    refused(apart("inspect", root), root, 3, 4)


@pytest.mark.parametrize("second", ["mp_rank_000", "mp_rank_00_000"])
def test_two_folders_of_one_rank_are_refused(sound, convert, tmp_path, second):
    shutil.copytree(sound, tmp_path / "m")
    shutil.copytree((tmp_path / "m" / RANK0).parent, tmp_path / "m/release" / second)
    refused(convert("inspect", tmp_path / "m"), tmp_path / "m")


def tensor(storage: bytes = SOUND_STORAGE, offset: bytes = b"K\x00", shape: bytes = b"K@\x85",
           strides: bytes = b"K\x01\x85", *rest: bytes) -> bytes:  # fmt: skip
    return call(glob("torch._utils", "_rebuild_tensor_v2"), storage, offset, shape, strides, *(rest or (b"\x89", b"}")))


TENSORS: dict[str, bytes] = {
    "negative offset": tensor(offset=opcodes(-1)), "negative shape": tensor(shape=opcodes((-64,))),
    "negative strides": tensor(strides=opcodes((-1,))), "huge offset": tensor(offset=opcodes(2**62)),
    "offset past 64 bits": tensor(offset=opcodes(2**70)), "huge shape": tensor(shape=opcodes((2**40,))),
    "shape past 64 bits": tensor(shape=opcodes((2**70,))), "huge strides": tensor(strides=opcodes((2**40,))),
    "shape of 5000 digits": tensor(shape=opcodes((10**5000,))),
    "offset of 5000 digits": tensor(offset=opcodes(10**5000)),
    "strides of 5000 digits": tensor(strides=opcodes((10**5000,))), "shape of floats": tensor(shape=opcodes((64.0,))),
    "shape of bools": tensor(shape=opcodes((True,))), "shape of text": tensor(shape=opcodes("64")),
    "no shape": tensor(shape=b"N"), "two strides": tensor(strides=opcodes((1, 1))),
    "no storage": tensor(storage=b"N"), "a missing storage": tensor(storage=STORAGE % opcodes_of_text("999")),
    "a storage outside": tensor(storage=STORAGE % opcodes_of_text("../version")),
    "a storage of no name": tensor(storage=STORAGE % opcodes_of_text("")),
    "a storage numbered by an int": tensor(storage=STORAGE % b"K\x00"),
    "a storage of text": tensor(storage=SOUND_STORAGE.replace(glob("torch", "FloatStorage"), opcodes_of_text("F32x"))),
    "a storage of a type without torch name":
        tensor(storage=SOUND_STORAGE.replace(glob("torch", "FloatStorage"), opcodes_of_text("F8_E8M0"))),
    "a complex storage": tensor(storage=SOUND_STORAGE.replace(b"FloatStorage", b"ComplexFloatStorage")),
    "a negative storage": tensor(storage=SOUND_STORAGE.replace(b"K\x04", opcodes(-4))),
    "many dimensions": tensor(shape=opcodes((1,) * 200_000), strides=opcodes((1,) * 200_000)),
    "huge dimensions": tensor(shape=opcodes((2**62,) * 100_000), strides=opcodes((0,) * 100_000)),
    "too few arguments": call(glob("torch._utils", "_rebuild_tensor_v2"), SOUND_STORAGE),
    "version 3 without dtype": call(glob("torch._utils", "_rebuild_tensor_v3"), SOUND_STORAGE, b"K\x00", b"K@\x85",
                                    b"K\x01\x85", b"\x89", b"}", b"N"),
    "a tensor changed afterwards": tensor() + b"}" + opcodes_of_text("dtype") + opcodes_of_text("X") + b"sb",
    "a tensor whose shape is changed afterwards": tensor() + b"}" + opcodes_of_text("shape") + opcodes("64") + b"sb",
    "a dtype changed afterwards": call(
        glob("torch._utils", "_rebuild_tensor_v3"), SOUND_STORAGE, b"K\x00", b"K@\x85", b"K\x01\x85", b"\x89", b"}",
        glob("torch", "float32") + b"}" + opcodes_of_text("name") + opcodes_of_text("X") + b"sb"),
    "a list": b"]", "text": opcodes_of_text("x"), "a namespace": NAMESPACE,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_cannot_be_are_refused(sound, tmp_path, name):
    root = infected(sound, tmp_path / "m", TENSORS[name], "model decoder.final_layernorm.weight")
    refused(apart("reshard", root, tmp_path / "out"), root / RANK0, 3, 4)
    assert not (tmp_path / "out").exists()


def test_the_same_key_in_two_spellings_is_refused(sound, convert, tmp_path):
    """`model` holds both `decoder.final_layernorm.weight` and `decoder` / `final_layernorm.weight`."""
    state = b"}" + opcodes_of_text("final_layernorm.weight") + tensor(storage=STORAGE % opcodes_of_text("1")) + b"s"
    root = infected(sound, tmp_path / "m", state, "model decoder")
    refused(convert("inspect", root), root / RANK0)


def test_a_tensor_in_args_does_not_become_another_one(sound, convert, tmp_path):
    import argparse

    import torch

    root = infected(sound, tmp_path / "m", VALUES["tensor"], "args calibration")
    refused(convert("reshard", root, tmp_path / "out", "--tp", 2), root, 4)
    assert convert("reshard", root, tmp_path / "out", "--tp", 2, "--accept", "calibration").code == 0
    for path in (tmp_path / "out").rglob("*.pt"):
        with torch.serialization.safe_globals([argparse.Namespace]):
            stored = torch.load(path, weights_only=True)
        assert not hasattr(stored["args"], "calibration")


def test_names_that_no_terminal_can_print_are_no_bug(sound, tmp_path):
    for i, (where, text) in enumerate([("model key", "\ud800._extra_state"), ("model key", "\ud800"),
                                       ("args key", "\ud800"), ("top key", "\ud800")]):  # fmt: skip
        root = infected(sound, tmp_path / str(i), opcodes_of_text(text), where)
        for argv in (
            ("plan", root, "--to", "megatron"),
            ("inspect", root, "--tensors"),
            ("reshard", root, f"{root}o"),
        ):
            ran = apart(*argv)
            assert not sane(ran), f"{where} {argv[0]}: {sane(ran)}"


def test_error_messages_carry_no_terminal_commands(sound, convert, tmp_path):
    root = infected(sound, tmp_path / "m", opcodes_of_text("\x1b]0;owned\x07\x1b[2J"), "model key")
    ran = convert("inspect", root)
    refused(ran, root, 3, 4)
    assert "\x1b" not in ran.err


# --- zip archives ----------------------------------------------------------------------------------------------------


def central(raw: bytes | bytearray) -> dict[str, int]:
    """Offset of each entry of the central directory, by the end of its name."""
    end = raw.rfind(b"PK\x05\x06")
    count, _, position = struct.unpack_from("<HII", raw, end + 10)
    offsets = {}
    for _ in range(count):
        names, extra, comment = struct.unpack_from("<HHH", raw, position + 28)
        offsets[raw[position + 46 : position + 46 + names].decode().removeprefix("archive/")] = position
        position += 46 + names + extra + comment
    return offsets


def patched(raw: bytes, name: str, at: int, form: str, *values: int) -> bytes:
    """The archive with other numbers in the central entry of a member."""
    changed = bytearray(raw)
    struct.pack_into(form, changed, central(raw)[name] + at, *values)
    return bytes(changed)


def with_zip64(raw: bytes, name: str, size: int, packed: int, start: int) -> bytes:
    """The archive with a zip64 field in the central entry of a member."""
    position = central(raw)[name]
    changed = bytearray(raw)
    struct.pack_into("<II", changed, position + 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", changed, position + 30, 28)
    struct.pack_into("<I", changed, position + 42, 0xFFFFFFFF)
    names = struct.unpack_from("<H", raw, position + 28)[0]
    changed[position + 46 + names : position + 46 + names] = struct.pack("<HHQQQ", 1, 24, size, packed, start)
    end = changed.rfind(b"PK\x05\x06")
    struct.pack_into("<I", changed, end + 12, struct.unpack_from("<I", changed, end + 12)[0] + 28)
    return bytes(changed)


def with_end64(raw: bytes, count: int, size: int, start: int) -> bytes:
    end = raw.rfind(b"PK\x05\x06")
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    return (
        raw[:end] + record + locator + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 65535, 65535, *[2**32 - 1] * 2, 0)
    )


def rezipped(raw: bytes, change: Callable[[zipfile.ZipFile, str, bytes], None], path: Path) -> bytes:
    """The archive written anew, each member by `change`."""
    path.write_bytes(raw)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_suffix(".new"), "w") as new:
        for member in old.infolist():
            change(new, member.filename, old.read(member))
    return path.with_suffix(".new").read_bytes()


def doubled(new: zipfile.ZipFile, name: str, content: bytes) -> None:
    new.writestr(name, content)
    if name.endswith("data/0"):
        new.writestr(name, content)


def without(*parts: str) -> Callable[[zipfile.ZipFile, str, bytes], None]:
    return lambda new, name, content: None if name.endswith(parts) else new.writestr(name, content)


def plus(extra: str) -> Callable[[zipfile.ZipFile, str, bytes], None]:
    def change(new: zipfile.ZipFile, name: str, content: bytes) -> None:
        new.writestr(name, content)
        if name.endswith("data.pkl"):
            new.writestr(extra, content)

    return change


def header_of(raw: bytes, name: str) -> int:
    return struct.unpack_from("<I", raw, central(raw)[name] + 42)[0]


def end_field(raw: bytes, at: int, form: str, value: int) -> bytes:
    changed = bytearray(raw)
    struct.pack_into(form, changed, raw.rfind(b"PK\x05\x06") + at, value)
    return bytes(changed)


ZIPS: dict[str, tuple[tuple[int, ...], Callable[[bytes, Path], bytes]]] = {
    "compressed": ((4,), lambda raw, path: rezipped(
        raw, lambda new, name, content: new.writestr(name, content, zipfile.ZIP_DEFLATED), path)),
    "a bomb": ((4,), lambda raw, path: rezipped(raw, lambda new, name, content: new.writestr(
        name, bytes(300 << 20) if name.endswith("data.pkl") else content, zipfile.ZIP_DEFLATED), path)),
    "one compressed storage": ((4,), lambda raw, path: rezipped(raw, lambda new, name, content: new.writestr(
        name, content, zipfile.ZIP_LZMA if name.endswith("data/3") else zipfile.ZIP_STORED), path)),
    "doubled storage": ((3,), lambda raw, path: rezipped(raw, doubled, path)),
    "no pickle": ((3,), lambda raw, path: rezipped(raw, without("data.pkl"), path)),
    "no storage": ((3,), lambda raw, path: rezipped(raw, without("data/0"), path)),
    "two pickles": ((3,), lambda raw, path: rezipped(raw, plus("other/data.pkl"), path)),
    "encrypted": ((4,), lambda raw, path: patched(raw, "data/0", 8, "<H", 1)),
    "unknown method": ((4,), lambda raw, path: patched(raw, "data/0", 10, "<H", 99)),
    "another version": ((3, 4), lambda raw, path: patched(raw, "data/0", 6, "<H", 255)),
    "overlapping": ((3,), lambda raw, path: patched(raw, "data/1", 42, "<I", header_of(raw, "data/0"))),
    "inside another": ((3,), lambda raw, path: patched(raw, "data/1", 42, "<I", header_of(raw, "data/0") + 64)),
    "swapped storages": ((3,), lambda raw, path: patched(
        patched(raw, "data/1", 42, "<I", header_of(raw, "data/4")), "data/4", 42, "<I", header_of(raw, "data/1"))),
    "header past the end": ((3,), lambda raw, path: patched(raw, "data/0", 42, "<I", 0x7FFFFFFF)),
    "pickle of 4 GB": ((3,), lambda raw, path: patched(raw, "data.pkl", 20, "<II", *[0xFFFFFFF0] * 2)),
    "storage of 4 GB": ((3,), lambda raw, path: patched(raw, "data/0", 20, "<II", *[0xFFFFFFF0] * 2)),
    "storage of no size": ((3,), lambda raw, path: patched(raw, "data/0", 20, "<II", 0, 0)),
    "last member of 4 GB": ((3,), lambda raw, path: patched(raw, "version", 20, "<II", *[0xFFFFFFF0] * 2)),
    "last member into the directory": ((3,), lambda raw, path: patched(raw, "version", 20, "<II", 40, 40)),
    "byte order of 4 GB": ((3,), lambda raw, path: patched(raw, "byteorder", 20, "<II", *[0xFFFFFFF0] * 2)),
    "two sizes": ((3,), lambda raw, path: patched(raw, "data/0", 20, "<I", 1)),
    "name that is no text": ((3,), lambda raw, path: patched(
        patched(raw, "data/0", 8, "<H", 0x800), "data/0", 46, "<4B", *[0xFF] * 4)),
    "zip64 size of 8 EiB": ((3,), lambda raw, path: with_zip64(raw, "data/0", 2**63 - 1, 2**63 - 1, 0)),
    "zip64 size of 16 EiB": ((3,), lambda raw, path: with_zip64(raw, "data/0", 2**64 - 1, 2**64 - 1, 0)),
    "zip64 pickle of 8 EiB": ((3,), lambda raw, path: with_zip64(raw, "data.pkl", 2**63 - 1, 2**63 - 1, 0)),
    "zip64 offset of 8 EiB": ((3,), lambda raw, path: with_zip64(raw, "data/0", 4, 4, 2**63 - 1)),
    "zip64 offset of 16 EiB": ((3,), lambda raw, path: with_zip64(raw, "data/0", 4, 4, 2**64 - 1)),
    "zip64 byte order of 8 EiB": ((3,), lambda raw, path: with_zip64(
        raw, "byteorder", 2**63 - 1, 2**63 - 1, header_of(raw, "byteorder"))),
    "zip64 last member of 8 EiB": ((3,), lambda raw, path: with_zip64(
        raw, "version", 2**63 - 1, 2**63 - 1, header_of(raw, "version"))),
    "zip64 end with absurd count": ((3,), lambda raw, path: with_end64(raw, 2**63, 2**63, 0)),
    "zip64 end with absurd size": ((3,), lambda raw, path: with_end64(raw, 3, 2**64 - 1, 2**64 - 1)),
    "zip64 end with absurd start": ((3,), lambda raw, path: with_end64(raw, 3, 100, 2**64 - 1)),
    "directory of 4 GB": ((3,), lambda raw, path: end_field(raw, 12, "<I", 0xFFFFFFF0)),
    "directory past the end": ((3,), lambda raw, path: end_field(raw, 16, "<I", 0xFFFFFFF0)),
    "directory too short": ((3,), lambda raw, path: end_field(raw, 12, "<I", 20)),
    "directory of nothing": ((3,), lambda raw, path: end_field(end_field(raw, 12, "<I", 0), 16, "<I", len(raw) - 22)),
    "empty archive": ((3,), lambda raw, path: b"PK\x05\x06" + bytes(18)),
    "empty file": ((3,), lambda raw, path: b""), "zeros": ((3,), lambda raw, path: bytes(100_000)),
    "text": ((3,), lambda raw, path: b"<html>not found</html>"),
    "git lfs pointer": ((3,), lambda raw, path: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
    "local header without signature": ((3,), lambda raw, path: raw.replace(b"PK\x03\x04", b"PKxx", 1)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ZIPS)
def test_hostile_archives_are_refused(sound, convert, tmp_path, name):
    codes, make = ZIPS[name]
    shutil.copytree(sound, tmp_path / "m")
    path = tmp_path / "m" / RANK0
    path.write_bytes(make((sound / RANK0).read_bytes(), tmp_path / "x.zip"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(convert("inspect", tmp_path / "m"), path, *codes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "it took 300 MB"


@pytest.mark.parametrize("extra", ["../../../evil", "/tmp/evil", "archive/../../evil", "archive/data/../../evil"])
def test_names_that_climb_write_nothing(sound, convert, tmp_path, extra):
    shutil.copytree(sound, tmp_path / "in/m")
    path = tmp_path / "in/m" / RANK0
    path.write_bytes(rezipped((sound / RANK0).read_bytes(), plus(extra), tmp_path / "x.zip"))
    before = {path for path in tmp_path.rglob("*") if "out" not in path.parts}
    ran = convert("reshard", tmp_path / "in/m", tmp_path / "out")
    assert ran.code in (0, 3)
    assert {path for path in tmp_path.rglob("*") if "out" not in path.parts} == before
    if ran.code == 0:
        assert convert("digest", tmp_path / "out").out.split()[0] == convert("digest", sound).out.split()[0]


def test_an_archive_cut_off_anywhere_is_refused(sound, convert, tmp_path):
    shutil.copytree(sound, tmp_path / "m")
    path, raw = tmp_path / "m" / RANK0, (sound / RANK0).read_bytes()
    for end in [*range(0, len(raw), len(raw) // 50), *range(len(raw) - 120, len(raw), 7), len(raw) - 1]:
        path.write_bytes(raw[:end])
        refused(convert("inspect", tmp_path / "m"), path)


def test_damaged_directories_are_refused_or_harmless(sound, convert, tmp_path):
    """Every seventh byte of the directory, set to 0xff."""
    shutil.copytree(sound, tmp_path / "m")
    path, raw, problems = tmp_path / "m" / RANK0, (sound / RANK0).read_bytes(), []
    for at in range(min(central(raw).values()), len(raw), 7):
        path.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
        ran = try_all(convert, "digest", tmp_path / "m")
        if sane(ran) or (ran.code and str(path) not in ran.err):
            problems.append(f"byte {at}: {sane(ran) or ran.err}")
    assert not problems, "\n".join(problems)


# --- safetensors -----------------------------------------------------------------------------------------------------


def packed(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def two(first: tuple[int, int], second: tuple[int, int]) -> dict[str, Any]:
    return {
        name: {"dtype": "U8", "shape": [span[1] - span[0]], "data_offsets": list(span)}
        for name, span in (("x", first), ("y", second))
    }


D8 = bytes(8)
SAFETENSORS: dict[str, bytes] = {
    "empty file": b"", "seven bytes": bytes(7), "eight bytes": bytes(8), "header of length 0": packed(b"", D8),
    "header of length 1": packed(b"{", D8), "header past the end": packed(one(), D8, 1000),
    "header of 2**64 - 1": packed(one(), D8, 2**64 - 1), "header of 100 MB and one": packed(one(), D8, 100_000_001),
    "header into the data": packed(one(), D8, len(json.dumps(one())) + 4),
    "header cut short": packed(one(), D8, len(json.dumps(one())) - 1),
    "no JSON": packed(b"{hello}"), "a list": packed([]), "a space first": packed(b" {}"), "text": packed(b'"x"'),
    "two objects": packed(b"{}{}"), "not UTF-8": packed(b'{"\xff":1}'), "UTF-16": packed('{"x":1}'.encode("utf-16-le")),
    "UTF-16, sound": packed(json.dumps(one()).encode("utf-16-le"), D8),
    "a comma too many": packed(b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},}', D8),
    "NaN": packed(b'{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', D8),
    "doubled names": packed(json.dumps(one()).encode()[:-1] + b"," + json.dumps(one()).encode()[1:], D8),
    "doubled keys": packed(b'{"x":{"dtype":"U8","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', D8),
    "deep": packed(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", D8),
    "deep objects": packed(b'{"x":' * 50_000 + b"1" + b"}" * 50_000, D8),
    "an int of 5000 digits": packed(b'{"x":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', D8),
    "unknown dtype": packed(one(dtype="F31"), D8), "lower case dtype": packed(one(dtype="f32"), D8),
    "dtype as number": packed(one(dtype=32), D8), "no dtype": packed({"x": {"shape": [2], "data_offsets": [0, 8]}}, D8),
    "another key": packed(one(device="cpu"), D8), "float offsets": packed(one(data_offsets=[0.0, 8.0]), D8),
    "bool offsets": packed(one(data_offsets=[False, 8]), D8), "text offsets": packed(one(data_offsets=["0", "8"]), D8),
    "negative offsets": packed(one(data_offsets=[-8, 0]), D8), "three offsets": packed(one(data_offsets=[0, 4, 8]), D8),
    "no offsets": packed(one(data_offsets=[]), D8), "offsets backwards": packed(one(data_offsets=[8, 0]), D8),
    "float shape": packed(one(shape=[2.0]), D8), "bool shape": packed(one(shape=[True, 2]), D8),
    "negative shape": packed(one(shape=[-2]), D8), "two negatives": packed(one(shape=[-1, -2]), D8),
    "shape as number": packed(one(shape=2), D8), "shape as text": packed(one(shape="2"), D8),
    "nested shape": packed(one(shape=[[2]]), D8),
    "shape product past 64 bits": packed(one(shape=[2**32, 2**32, 2]), D8),
    "shape that wraps": packed(one(shape=[2**63, 2**62]), b""), "too few bytes": packed(one(shape=[1]), D8),
    "too many bytes": packed(one(shape=[3]), D8), "data cut off": packed(one(), bytes(7)),
    "rest behind": packed(one(), bytes(9)), "rest without tensors": packed({}, D8),
    "overlapping": packed(two((0, 5), (4, 8)), D8), "the same bytes twice": packed(two((0, 8), (0, 8)), D8),
    "a hole": packed(two((0, 3), (4, 8)), D8), "a hole in front": packed(two((1, 4), (4, 8)), D8),
    "an entry that is a list": packed({"x": []}), "an entry that is null": packed({"x": None}),
    "metadata as list": packed({"__metadata__": []}), "metadata as text": packed({"__metadata__": "pt"}),
    "metadata of numbers": packed({"__metadata__": {"format": 1}}),
    "metadata of objects": packed({"__metadata__": {"format": {}}}),
    "metadata twice": packed(b'{"__metadata__":{},"__metadata__":{}}'),
    "a pickle": pickle.dumps({"x": 1}),
    "git lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "lone surrogate": packed(b'{"\\ud800":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', D8),
}  # fmt: skip


@pytest.fixture
def folder(hf: Path, tmp_path: Path) -> Path:
    """A copy of the Hugging Face folder."""
    return Path(shutil.copytree(hf, tmp_path / "hf"))


@pytest.mark.parametrize("name", SAFETENSORS)
def test_hostile_safetensors_are_refused(folder, convert, name):
    (folder / "model.safetensors").write_bytes(SAFETENSORS[name])
    refused(convert("inspect", folder), folder / "model.safetensors")
    from formats.disk.safetensors import read_safetensors
    from formats.errors import SourceError

    with pytest.raises(SourceError):  # by itself, whatever the model of the folder is
        read_safetensors(folder / "model.safetensors")


LENIENT = ("a space first", "doubled names", "another key")
"""Sound for the official library 0.8; the format's description forbids them."""


@pytest.mark.parametrize("name", [name for name in SAFETENSORS if name not in LENIENT])
def test_the_official_library_refuses_them_too(tmp_path, name):
    """So that none of the cases above is a sound file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    with pytest.raises((SafetensorError, ValueError, KeyError, UnicodeError)):
        load(SAFETENSORS[name])


@pytest.mark.parametrize("shape", [[1] * 200_000, [2**62] * 60_000, [0] + [2**62] * 60_000], ids=["ones", "huge", "0"])
def test_absurdly_many_dimensions_are_refused_at_once(folder, shape):
    count = 0 if 0 in shape else 1
    header = {"x": {"dtype": "U8", "shape": shape, "data_offsets": [0, count]}}
    (folder / "model.safetensors").write_bytes(packed(header, bytes(count)))
    refused(apart("inspect", folder), folder)


def test_safetensors_cut_off_anywhere_are_refused(folder, convert):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    for end in [*range(10), *range(10, len(raw), len(raw) // 40), len(raw) - 1]:
        path.write_bytes(raw[:end])
        refused(convert("inspect", folder), path)


# --- index, config, tracker, assets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "../hf/model.safetensors", "/etc/passwd", "..", ".", "", "a/b", "nul\0", "\ud800", "x" * 300, "absent.safetensors",
    "folder", "loop", "config.json", "model.safetensors/", "~", "new\nline",
], ids=ascii)  # fmt: skip
def test_an_index_that_names_anything_but_a_shard_is_refused(folder, convert, name):
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    weight_map = {"model.norm.weight": name, "lm_head.weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    refused(convert("inspect", folder), folder)


INDEXES: dict[str, str] = {
    "weight_map as list": '{"weight_map": ["model.safetensors"]}', "weight_map as text": '{"weight_map": "x"}',
    "weight_map null": '{"weight_map": null}', "weight_map empty": '{"weight_map": {}}', "no weight_map": "{}",
    "a list": "[]", "no JSON": "{", "empty": "", "a number": "1", "not UTF-8": "\udcff",
    "shard as number": '{"weight_map": {"lm_head.weight": 1}}',
    "shard null": '{"weight_map": {"lm_head.weight": null}}',
    "shard as list": '{"weight_map": {"lm_head.weight": ["model.safetensors"]}}', "deep": "[" * 100_000,
    "a key too many": '{"weight_map": {"ghost": "model.safetensors"}}',
    "a number of 5000 digits": '{"weight_map": {"x": ' + "9" * 5000 + "}}",
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_a_hostile_index_is_refused(folder, convert, name):
    path = folder / "model.safetensors.index.json"
    path.write_bytes(INDEXES[name].encode(errors="surrogateescape"))
    refused(convert("inspect", folder), folder)


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(model, convert, tmp_path):
    folder = Path(shutil.copytree(model("llama", "float32", shard="100KB"), tmp_path / "hf"))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = sorted(set(index["weight_map"].values()))
    key = next(key for key, name in index["weight_map"].items() if name == names[0])
    index["weight_map"][key] = names[1]
    path.write_text(json.dumps(index))
    ran = convert("inspect", folder)
    refused(ran, folder / names[0])
    assert key in ran.err
    assert names[1] in ran.err


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_link_to_itself_is_refused(folder, convert, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name)
    if name.endswith("index.json"):
        assert convert("inspect", folder).code in (0, 3)
    else:
        refused(convert("inspect", folder), folder)


CONFIGS: dict[str, tuple[tuple[int, ...], bytes]] = {
    "empty": ((3,), b""), "no JSON": ((3,), b"{"), "a list": ((3,), b"[]"), "text": ((3,), b'"x"'),
    "not UTF-8": ((3,), b'{"\xff": 1}'), "deep": ((3,), b'{"x":' + b"[" * 100_000), "null": ((3,), b"null"),
    "deep and sound": ((3,), b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no model type": ((3, 4), b"{}"), "zeros": ((3,), bytes(1000)),
    "an int of 5000 digits": ((3,), b'{"hidden_size": ' + b"9" * 5000 + b"}"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_config_is_refused(folder, convert, name):
    codes, content = CONFIGS[name]
    (folder / "config.json").write_bytes(content)
    refused(convert("inspect", folder), folder / "config.json", *codes)


def test_a_config_of_many_gigabytes_is_not_read(folder, convert):
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    refused(convert("inspect", folder), folder / "config.json")


CONFIG_KEYS = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
               "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
               "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "model_type", "hidden_act",
               "attention_bias", "quantization_config", "sliding_window", "architectures", "dtype", "torch_dtype",
               "eos_token_id"]  # fmt: skip
CONFIG_VALUES: dict[str, Any] = {
    "null": None, "text": "eight", "empty text": "", "true": True, "minus one": -1, "zero": 0, "half": 0.5,
    "10**4000": 10**4000, "2**62": 2**62, "NaN": float("nan"), "Infinity": float("inf"), "list": [1, [2]],
    "list of objects": [{}], "object": {"a": {}}, "rope without factor": {"rope_type": "linear"},
    "rope with text": {"rope_type": "llama3", "factor": "x", "rope_theta": "y"}, "empty object": {}, "numbers": [3, 4],
    "rope of lists": {"rope_type": ["linear"], "factor": [1]}, "surrogate": "\ud800",
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("value", CONFIG_VALUES)
def test_a_config_with_any_types_is_read_or_refused(model, convert, tmp_path, value, family):
    folder = Path(shutil.copytree(model(family, "float32", num_hidden_layers=1), tmp_path / "hf"))
    config, problems = json.loads((folder / "config.json").read_text()), []
    for key in CONFIG_KEYS:
        if key == "num_hidden_layers" and value == "2**62":
            continue
        (folder / "config.json").write_text(json.dumps(config | {key: CONFIG_VALUES[value]}))
        ran = try_all(convert, "hf2megatron", folder, tmp_path / "out", "--dry-run")
        if sane(ran):
            problems.append(f"{key}: {sane(ran)}")
        elif ran.code in (3, 4) and str(folder) not in ran.err:
            problems.append(f"{key}: names no file: {ran.err}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
                                 "num_hidden_layers", "intermediate_size", "model_type"])  # fmt: skip
def test_a_config_without_a_key_names_it(folder, convert, key):
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    refused(convert("inspect", folder), folder, 3, 4)


@pytest.mark.parametrize("layers", [10**9, 2**62])
def test_a_config_with_layers_that_no_model_has_is_refused_at_once(folder, layers):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    refused(apart("inspect", folder), folder)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E8M0", "U16", "C64", "BOOL", "F64", "I64", "U64"])
def test_weights_of_any_dtype_are_converted_or_refused(folder, convert, tmp_path, dtype):
    from formats.disk.safetensors import DTYPES, Entry, read_safetensors, safetensors_header

    tensors, _ = read_safetensors(folder / "model.safetensors")
    entries = [Entry(name, dtype, fragment.shape) for name, fragment in tensors.items()]
    header, _ = safetensors_header(entries, {})
    numel = sum(fragment.nbytes for fragment in tensors.values()) // 4
    (folder / "model.safetensors").write_bytes(header + bytes(numel * DTYPES[dtype]))
    ran = convert("hf2megatron", folder, tmp_path / "m")
    assert ran.code in (0, 4, 5)
    if ran.code == 0:
        assert convert("megatron2hf", tmp_path / "m", tmp_path / "back").code == 0
        assert convert("diff", folder, tmp_path / "back").code == 0


TRACKERS: dict[str, bytes] = {
    "empty": b"", "spaces": b"  \n", "junk": b"hello", "climbing": b"../../x", "absolute": b"/etc", "negative": b"-1",
    "float": b"1.5", "not UTF-8": b"\xff\xfe\x00", "UTF-16": "release".encode("utf-16"), "absent": b"7",
    "5000 digits": b"9" * 5000, "300 digits": b"9" * 300, "zero bytes": bytes(20), "two words": b"release 1",
    "hex": b"0x10", "superscript": "²".encode(), "escape": b"\x1b[2J", "underscore": b"1_0", "long": b"x" * 10**6,
}  # fmt: skip


@pytest.mark.parametrize("name", TRACKERS)
def test_a_hostile_tracker_is_refused(sound, convert, tmp_path, name):
    shutil.copytree(sound, tmp_path / "m")
    path = tmp_path / "m/latest_checkpointed_iteration.txt"
    path.write_bytes(TRACKERS[name])
    refused(convert("inspect", tmp_path / "m"), path)


HOSTILE_ASSETS: dict[str, str] = {
    "tokenizer_config.json": '{"added_tokens_decoder": []}', "tokenizer_config.json ": '{"added_tokens_decoder": null}',
    "tokenizer_config.json  ": '{"added_tokens_decoder": {"' + "9" * 5000 + '": {}}}',
    "generation_config.json": '{"eos_token_id": [[1], {}, "' + "9" * 5000 + '", null]}',
    "generation_config.json ": "[" * 100_000, "generation_config.json  ": "",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_ASSETS)
def test_a_hostile_tokenizer_or_generation_config_travels_as_it_is(folder, convert, tmp_path, name):
    (folder / name.strip()).write_text(HOSTILE_ASSETS[name])
    assert convert("inspect", folder).code == 0
    assert convert("hf2megatron", folder, tmp_path / "m").code == 0
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(folder)


@pytest.mark.parametrize("metadata", ["null", "[]", '"x"', "1", '{"total_size": null}', '{"total_size": [1]}'])
def test_a_remembered_index_with_odd_metadata_is_no_bug(model, convert, tmp_path, metadata):
    source = Path(shutil.copytree(model("llama", "float32", shard="100KB"), tmp_path / "hf"))
    path = source / "model.safetensors.index.json"
    weight_map = json.dumps(json.loads(path.read_text())["weight_map"])
    path.write_text(f'{{"metadata": {metadata}, "weight_map": {weight_map}}}')
    assert convert("hf2megatron", source, tmp_path / "m").code == 0
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "back").code == 0
    assert convert("diff", source, tmp_path / "back").code == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", "vitruvian.json", "model.safetensors.index.json",
                                  "nul\0", "\ud800", "x" * 300, "-rf", ".hidden"], ids=ascii)  # fmt: skip
def test_a_remembered_index_cannot_overwrite_other_files(sound, convert, tmp_path, name):
    root = Path(shutil.copytree(sound, tmp_path / "m"))
    path = root / "huggingface/model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(index["weight_map"], name)}))
    ran = convert("megatron2hf", root, tmp_path / "back")
    assert not sane(ran), sane(ran)
    if ran.code == 0:
        assert convert("diff", root, tmp_path / "back").code == 0
        assert files(tmp_path / "back")["tokenizer.model"] == files(root)["huggingface/tokenizer.model"]
    else:
        assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("content", ["[]", "{}", "1", '{"tensors": []}', '{"tensors": {"x": 1}}', "{", "\ud800",
                                     '{"tensors": {"x": {"blake3": null}}}'], ids=ascii)  # fmt: skip
def test_a_hostile_manifest_is_refused(sound, convert, tmp_path, content):
    shutil.copytree(sound, tmp_path / "m")
    (tmp_path / "m/release/vitruvian.json").write_bytes(content.encode(errors="surrogatepass"))
    refused(convert("verify", tmp_path / "m"), tmp_path / "m", 3, 6)


@pytest.mark.parametrize("states", [[], {"x": 1}, {"x": {"blake3": 5}}], ids=str)
def test_hostile_states_in_a_manifest_are_refused(sound, convert, tmp_path, states):
    path = Path(shutil.copytree(sound, tmp_path / "m")) / "release/vitruvian.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"optimizer": states}))
    refused(convert("verify", tmp_path / "m"), tmp_path / "m", 3)


@pytest.mark.parametrize(
    "line", ["5", "[1]", "[1, 2]", '{"a": 1}', '["embedding", 5]', "null", "\0", '["x", "y", "z"]']
)
def test_a_hostile_journal_is_no_bug(hf, convert, tmp_path, line):
    """A folder of an interrupted conversion, with a line in its journal that nobody wrote."""
    real = os.fdatasync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("converters.convert.finish_files", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        assert convert("hf2megatron", hf, tmp_path / "m").code == 7
    assert os.fdatasync is real
    journal = tmp_path / "m.partial/journal.jsonl"
    first, *_ = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(first + sealed(line))
    ran = try_all(convert, "hf2megatron", hf, tmp_path / "m")
    assert not sane(ran), sane(ran)
    if ran.code == 0:
        assert convert("diff", hf, tmp_path / "m").code == 0


def test_an_error_has_the_beginning_of_a_long_name(hf, convert, tmp_path):
    """A file may name its tensors as it likes."""
    folder = Path(shutil.copytree(hf, tmp_path / "hf"))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "x" * 3000: tensors["model.norm.weight"]}, folder / "model.safetensors", {"format": "pt"})
    ran = convert("digest", folder)
    refused(ran, folder, 3)
    assert "x" * 80 + "… (3000 characters)" in ran.err
    assert len(ran.err) < 1000


@pytest.mark.parametrize("command", [("digest",), ("inspect",), ("hf2hf", "{hf}"), ("digest", "{hf}", "--config")])
def test_an_error_has_the_beginning_of_a_long_path(hf, convert, command):
    ran = convert(*(word.format(hf=hf) for word in command), "b/" * 3000)
    assert ran.code in (3, 7), ran
    assert "error: " + "b/" * 40 + "… (" in ran.err
    assert "characters)" in ran.err
    assert len(ran.err) < 1000


def test_a_tensor_that_several_files_could_have_is_missing_in_their_folder(model, convert, tmp_path):
    folder = tmp_path / "hf"
    assert convert("hf2hf", model("llama"), folder, "--shard-size", "100KB").code == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = index["weight_map"].pop("model.norm.weight")
    tensors = load_file(folder / name)
    save_file({key: tensor for key, tensor in tensors.items() if key != "model.norm.weight"}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    ran = convert("digest", folder)
    assert ran.code == 3
    assert f"{folder}: 1 tensor is missing: model.norm.weight [64] in {folder}\n" in ran.err


def test_checksums_of_the_sound_folder_are_right(sound):
    """The folder that all these files are made from is itself sound."""
    with zipfile.ZipFile(sound / RANK0) as archive:
        assert archive.testzip() is None
        assert zlib.crc32(archive.read("archive/data/0")) == archive.getinfo("archive/data/0").CRC
