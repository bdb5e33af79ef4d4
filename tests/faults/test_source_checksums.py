"""A flipped bit in a source: the CRC-32 that zip archives keep of their entries are compared while they are read."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.move import engine, source_checks
from converters.move.source_checks import SourceChecks, claim
from converters.plan.parts import Part
from converters.plan.plan import Job
from converters.prove.digest import MANIFEST
from formats.checkpoint import Settings
from formats.disk.safetensors import Fragment, Member, read_into
from formats.errors import DamagedError, Interrupted
from formats.layout.leaves import Leaf
from formats.registry import open_checkpoint
from formats.torch_files import crc32
from tests.faults.dcp_tools import refused, save, weights
from tests.faults.test_fsdp_optim_faults import training
from tests.optimizers import add_optimizer

GOLDEN = Path(__file__).parents[1] / "golden" / "neox"
PATH = Path("f")


# --- sums of pieces --------------------------------------------------------------------------------------------------


def checks_of(content: bytes, start: int, crc: int | None = None, sound: tuple[str, ...] = ()) -> SourceChecks:
    """Checks of one tensor, which is all of an entry but its first and last byte."""
    member = Member(start, len(content), zlib.crc32(content) if crc is None else crc)
    fragment = Fragment(PATH, start, "U8", (len(content),), (1,), member=member)
    part = Part(Leaf("x", 0, ()), fragment)
    return SourceChecks([Job("x", None, (len(content),), "U8", "U8", (part,), {}, ())], sound=sound)


def fragment_of(checks: SourceChecks) -> Fragment:
    return checks.jobs[0].sources[0].fragment


@given(st.binary(min_size=1, max_size=400), st.data(), st.integers(0, 2**16))
def test_any_pieces_in_any_order_however_often(content, data, seed):
    """Overlapping, doubled, with holes: what is missing is read at the end, and the sum is that of the whole."""
    checks, n = checks_of(content, 1000), len(content)
    ranges = data.draw(st.lists(st.tuples(st.integers(0, n), st.integers(0, n)), max_size=12))
    pieces = [(min(pair), max(pair)) for pair in ranges]
    random.Random(seed).shuffle(pieces)
    fragment = fragment_of(checks)
    for low, high in pieces:
        checks._count(fragment, fragment.member, low, memoryview(content)[low:high])
    read = []

    def rest(of: Fragment, at: int, buffer: memoryview) -> None:
        read.append((at, at + len(buffer)))
        buffer[:] = content[at : at + len(buffer)]

    verdict = checks.complete(rest, 1)
    assert (str(verdict), verdict.entries) == ("verified", 1)
    covered = {i for low, high in pieces for i in range(low, high)}
    reread = [i for low, high in read for i in range(low, high)]
    assert sorted(reread) == sorted(set(range(n)) - covered), "what passed is not read again"


@given(st.binary(min_size=1, max_size=200), st.integers(0, 10**6), st.integers(0, 200))
def test_any_bit_is_seen(content, bit, cut):
    damaged = bytearray(content)
    damaged[bit // 8 % len(content)] ^= 1 << bit % 8
    checks, cut = checks_of(content, 0), min(cut, len(content))
    fragment, view = fragment_of(checks), memoryview(damaged)

    def count() -> None:
        checks._count(fragment, fragment.member, cut, view[cut:])
        checks._count(fragment, fragment.member, 0, view[:cut])

    with pytest.raises(DamagedError, match=f"f is damaged: the {len(content)} bytes at byte 0 .x. have the CRC-32 "):
        count()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20))
def test_intervals(ranges):
    bounds, covered = [], set()
    for first, last in ranges:
        low, high = min(first, last), max(first, last)
        new = {i for start, stop in claim(bounds, low, high) for i in range(start, stop)}
        assert new == set(range(low, high)) - covered
        covered |= new
        assert bounds == sorted(bounds)
        assert {i for s, t in zip(bounds[::2], bounds[1::2], strict=True) for i in range(s, t)} == covered


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_sum_of_two_parts(first, second):
    added = crc32.part(memoryview(first), len(second)) ^ crc32.part(memoryview(second), 0)
    assert crc32.crc_from_sum(added, len(first) + len(second)) == zlib.crc32(first + second)


def test_sizes_beyond_4_gib():
    """Zeros, by squares: what 2^k of them do twice is what 2^(k+1) of them do."""
    for k in range(45):
        assert crc32.shift(crc32.shift(0x12345678, 1 << k), 1 << k) == crc32.shift(0x12345678, 2 << k)


# --- sources of all formats ------------------------------------------------------------------------------------------

Source = tuple[Path, list[object]]


def bare(folder: Path) -> Path:
    """Without our manifest, as another program leaves it."""
    for path in folder.rglob(MANIFEST):
        path.unlink()
    return folder


@pytest.fixture
def source(model, convert, tmp_path) -> Callable[[str], Source]:
    """`source(kind)`: a checkpoint without a manifest, and the command with its options that reads it."""

    def hf() -> Path:
        return shutil.copytree(model("llama", "bfloat16"), tmp_path / "hf", dirs_exist_ok=True)

    def made(*argv: object) -> Path:
        assert convert(argv[0], hf(), tmp_path / "src", *argv[1:]).code == 0
        return bare(tmp_path / "src")

    def dcp() -> Path:
        return save(tmp_path / "src", weights(model("llama", "bfloat16")))

    def zstd() -> Path:
        from torch.distributed.checkpoint._extension import ZStandard

        return save(tmp_path / "src", weights(model("llama", "bfloat16")), _extensions=[ZStandard()])

    def full() -> Path:
        (tmp_path / "src").mkdir()
        torch.save(weights(model("llama", "bfloat16")), tmp_path / "src" / "pytorch_model_fsdp.bin")
        return tmp_path / "src"

    def pickled() -> Path:
        folder = hf()
        torch.save(weights(folder), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        return folder

    def golden(name: str) -> Path:
        return shutil.copytree(GOLDEN / name, tmp_path / name)

    config = ["--config", model("llama", "bfloat16")]
    kinds: dict[str, tuple[Callable[[], Path], list[object]]] = {
        "dcp": (dcp, ["fsdp2hf", *config]),
        "zstd": (zstd, ["fsdp2hf", *config]),
        "full": (full, ["fsdp2hf", *config]),
        "bin": (pickled, ["hf2hf"]),
        "megatron": (lambda: made("hf2megatron", "--tp", 2, "--pp", 2), ["megatron2hf"]),
        "torch_dist": (lambda: made("hf2megatron", "--format", "torch_dist"), ["megatron2hf"]),
        "megatron-llm": (lambda: made("hf2megatron", "--format", "megatron-llm", "--tp", 2), ["megatron2hf"]),
        "neox": (lambda: golden("llama-gqa-pp2-tp2"), ["neox2hf", "--vocab-size", 101, "--gqa-layout", "blocked"]),
        "zero": (
            lambda: golden("llama-bf16-optimizer-tp2"),
            ["neox2hf", "--vocab-size", 101, "--gqa-layout", "blocked", "--weights", "fp32-master"],
        ),
    }

    def get(kind: str) -> Source:
        make, command = kinds[kind]
        return make(), command

    return get


KINDS = ("dcp", "zstd", "full", "bin", "megatron", "torch_dist", "megatron-llm", "neox", "zero")


def flip(path: Path, at: int) -> None:
    """Change one bit; the file's time stays what it was, as on a bad disk."""
    about = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def flip_weight(folder: Path, **settings: object) -> Path:
    """Change one bit in the middle of a weight."""
    fragments = [piece.fragment for piece in open_checkpoint(folder, Settings(**settings)).fragments()]
    largest = max(fragments, key=lambda piece: piece.nbytes)
    if largest.stream is not None:
        flip(largest.path, largest.stream.start + largest.stream.length // 2)
    else:
        flip(largest.path, largest.offset + largest.nbytes // 2)
    return largest.path


def settings_of(kind: str, model: Callable[..., Path]) -> dict[str, object]:
    """What a checkpoint of a kind is opened with, to find its weights."""
    if kind in ("neox", "zero"):
        return {"gqa_layout": "blocked", "weights": "fp32-master" if kind == "zero" else None}
    return {"config": model("llama", "bfloat16")} if kind in ("dcp", "zstd", "full") else {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_refused_and_a_sound_source_is_verified(source, convert, model, tmp_path, kind):
    folder, command = source(kind)
    ran = convert(command[0], folder, tmp_path / "out", *command[1:])
    assert ran.code == 0, ran.err
    assert "source checksums: verified\n" in ran.out
    path = flip_weight(folder, **settings_of(kind, model))
    again = convert(command[0], folder, tmp_path / "again", *command[1:])
    if kind == "zstd" and "stream at byte" in again.err:  # the compression noticed first
        refused(again, 3, path.name)
    else:
        refused(again, 3, f"{path} is damaged: the ", "have the CRC-32 ", ", the file says ", "convert verify")
    assert not list(tmp_path.glob("again*")), "neither an output nor anything to resume from"


@pytest.mark.parametrize("kind", ["dcp", "full", "megatron", "neox", "zero", "bin", "torch_dist"])
def test_a_flipped_bit_in_a_pickle(source, convert, model, tmp_path, kind):
    """`Storage` is in every pickle of torch, and one bit of a name of a class changes what it holds."""
    folder, command = source(kind)
    path = next(open_checkpoint(folder, Settings(**settings_of(kind, model))).fragments()).fragment.path
    flip(path, path.read_bytes().index(b"Storage") + 7 + 8)
    refused(convert(command[0], folder, tmp_path / "out", *command[1:]), 3, path.name)


@pytest.mark.parametrize(
    ("kind", "argv"),
    [
        ("megatron", ["digest"]),
        ("dcp", ["digest", "--config", "CONFIG"]),
        ("megatron", ["reshard", "OUT", "--tp", 4]),
        ("zero", ["zero2universal", "OUT", "--gqa-layout", "blocked"]),
        ("dcp", ["hf2fsdp", "OUT", "--config", "CONFIG"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_every_command_that_reads_weights(source, convert, model, tmp_path, kind, argv):
    folder, _ = source(kind)
    path = flip_weight(folder, **settings_of(kind, model))
    given = {"OUT": tmp_path / "out", "CONFIG": model("llama", "bfloat16")}
    refused(convert(argv[0], folder, *(given.get(str(word), word) for word in argv[1:])), 3, f"{path} is damaged")
    assert not list(tmp_path.glob("out*"))


def test_diff_and_verify_against_a_source(source, convert, tmp_path):
    folder, command = source("megatron")
    assert convert(command[0], folder, tmp_path / "out").code == 0
    assert convert("diff", tmp_path / "out", folder).code == 0
    path = flip_weight(folder)
    for argv in (["diff", tmp_path / "out", folder], ["verify", tmp_path / "out", folder]):
        refused(convert(*argv), 3, f"{path} is damaged")


def test_averaged_norms(convert, tmp_path):
    """They are written with a new checksum, which would hide the damage."""
    run = shutil.copytree(GOLDEN / "llama-bf16-optimizer-tp2", tmp_path / "run")
    opened = open_checkpoint(run, Settings(weights="fp32-master", gqa_layout="blocked"))
    norm = next(fragment.fragment for fragment in opened.fragments() if "norm" in fragment.key)
    flip(norm.path, norm.offset + norm.nbytes // 2)
    refused(convert("average-norms", run, tmp_path / "out"), 3, f"{norm.path} is damaged", "norm")
    assert not (tmp_path / "out").exists()


def test_what_is_copied_beside_averaged_norms(convert, tmp_path):
    """A moment, which no norm is read from, and which the output trains on from."""
    run = shutil.copytree(GOLDEN / "llama-bf16-optimizer-tp2", tmp_path / "run")
    opened = open_checkpoint(run, Settings(weights="exp_avg", gqa_layout="blocked"))
    moment = next(fragment.fragment for fragment in opened.fragments())
    flip(moment.path, moment.offset + moment.nbytes // 2)
    refused(convert("average-norms", run, tmp_path / "out"), 3, f"{run / 'global_step'}", str(moment.path), "damaged")
    assert not (tmp_path / "out").exists()


def test_an_optimizer_that_goes_along(model, convert, tmp_path):
    assert convert("hf2megatron", model("llama", "bfloat16"), tmp_path / "m", "--iteration", 3).code == 0
    bare(add_optimizer(tmp_path / "m", "distributed"))
    path = next((tmp_path / "m").rglob("distrib_optim.pt"))
    argv = ["reshard", tmp_path / "m"]
    assert convert(*argv, tmp_path / "out", "--with-optimizer", "--tp", 2).code == 0
    flip(path, path.stat().st_size // 2)
    refused(convert(*argv, tmp_path / "again", "--with-optimizer", "--tp", 2), 3, f"{path} is damaged", "exp_avg")


def test_what_the_checksums_do_not_say(model, convert, tmp_path):
    """Three files, which nothing ties to each other: in one line what `verified` means; not where a manifest does."""
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(tmp_path / "src", thread_count=3)
    dcp.save(weights(model("llama", "bfloat16")), storage_writer=writer, no_dist=True)
    ran = convert("fsdp2hf", tmp_path / "src", tmp_path / "out", "--config", model("llama", "bfloat16"))
    assert ran.code == 0, ran.err
    message = "source checksums: verified (each file by itself; nothing ties .distcp files to each other)\n"
    assert message in ran.out
    assert convert("hf2megatron", tmp_path / "out", tmp_path / "m", "--format", "torch_dist", "--tp", 2).code == 0
    ran = convert("megatron2hf", tmp_path / "m", tmp_path / "hf")
    assert "source checksums: verified\n" in ran.out


def test_what_the_checksums_do_not_say_of_an_optimizer(model, tmp_path):
    """Of a model in one file, and its optimizer in another."""
    import vitruvian

    source, saved = training(model("llama", num_hidden_layers=1))
    save(tmp_path / "c/pytorch_model_fsdp_0", {"model": saved["model"]})
    save(tmp_path / "c/optimizer_0", {"optimizer": saved["optim"]})
    assert len([*(tmp_path / "c").rglob("*.distcp")]) == 2
    said = "each file by itself; nothing ties .distcp files to each other"
    for target, options in {"deepspeed": {}, "fsdp": {"with_optimizer": True}}.items():
        written = vitruvian.convert(tmp_path / "c", tmp_path / target, to=target, config=source, **options)
        assert (written.mixed, written.source_checksums.word) == (said, "verified")


# --- what is said ----------------------------------------------------------------------------------------------------


def test_formats_without_checksums(model, convert, tmp_path):
    ran = convert("hf2fsdp", model("llama"), tmp_path / "a")
    assert "source checksums: none in this format\n" in ran.out
    checksums = json.loads(convert("hf2fsdp", model("llama"), tmp_path / "b", "--json").out)["source_checksums"]
    assert checksums["checked"] == "none in this format"


def test_checksums_that_were_not_written(model, convert, tmp_path):
    tensors = weights(model("llama", "bfloat16"))
    torch.serialization.set_crc32_options(False)
    try:
        save(tmp_path / "src", tensors)
    finally:
        torch.serialization.set_crc32_options(True)
    ran = convert("fsdp2hf", tmp_path / "src", tmp_path / "out", "--config", model("llama", "bfloat16"))
    assert "source checksums: none recorded\n" in ran.out
    ran = convert("fsdp2hf", tmp_path / "src", tmp_path / "o", "--config", model("llama", "bfloat16"), "--json")
    assert json.loads(ran.out)["source_checksums"] == {
        "checked": "none recorded",
        "entries": 0,
        "unrecorded": len(tensors),
        "without": 0,
    }


# --- runs that are killed, and parts ---------------------------------------------------------------------------------


def stop_after(number, monkeypatch):
    """Let a signal come when so many jobs are done. Returns their names, as they come to be done."""
    run_job, done = engine.run_job, []

    def stopped(job, *rest):
        if len(done) == number:
            raise Interrupted("stopped by a test")
        done.append(job.name)
        return run_job(job, *rest)

    monkeypatch.setattr(engine, "run_job", stopped)
    return done


def test_a_resumed_run_checks_what_the_first_one_read(source, convert, monkeypatch, tmp_path):
    """The first run reads the damaged tensor and is stopped before its entry is complete."""
    folder, command = source("zero")
    argv = [command[0], folder, tmp_path / "out", *command[1:], "-j", 1]
    flip_weight(folder, weights="fp32-master", gqa_layout="blocked")
    done = stop_after(3, monkeypatch)
    assert convert(*argv).code == 75
    monkeypatch.undo()
    journal = (tmp_path / "out.partial" / "journal.jsonl").read_text()
    assert all(json.dumps(name) in journal for name in done)
    refused(convert(*argv), 3, "is damaged")
    assert not list(tmp_path.glob("out*"))


def test_what_a_first_run_found_sound_is_not_read_again(source, convert, monkeypatch, tmp_path):
    monkeypatch.setattr(source_checks, "SMALL", 1)
    folder, command = source("dcp")
    argv = [command[0], folder, tmp_path / "out", *command[1:], "-j", 1]
    stop_after(9, monkeypatch)
    assert convert(*argv).code == 75
    monkeypatch.undo()
    monkeypatch.setattr(source_checks, "SMALL", 1)
    read, complete = [], SourceChecks.complete

    def counted(self, reader, *rest):
        def count(fragment, at, buffer):
            read.append(len(buffer))
            reader(fragment, at, buffer)

        return complete(self, count, *rest)

    monkeypatch.setattr(SourceChecks, "complete", counted)
    ran = convert(*argv)
    assert ran.code == 0, ran.err
    assert "source checksums: verified\n" in ran.out
    assert not read


def test_a_part_that_reads_damage_leaves_nothing_to_resume(source, convert, tmp_path):
    folder, command = source("megatron")
    argv = [command[0], folder, tmp_path / "out"]
    last = next(fragment.fragment for fragment in open_checkpoint(folder).fragments() if fragment.slot.layer == 3)
    flip(last.path, last.offset + 9)
    assert convert(*argv, "--part", "1/2").code == 0, "what it has read is sound"
    refused(convert(*argv, "--part", "2/2"), 3, f"{last.path} is damaged")
    for options in ([], ["--part", "1/2"], ["--part", "2/2"]):
        refused(convert(*argv, *options), 7, "a conversion whose source is damaged", "remove")
    refused(convert(*argv, "--force"), 3, f"{last.path} is damaged")
    assert not list(tmp_path.glob("out*"))


def test_read_back_blocks_are_those_of_the_file(tmp_path):
    """Blocks of the second reading, of an entry larger than one of them."""
    content = random.Random(0).randbytes(3 * crc32.STEP + 7)
    (tmp_path / "x").write_bytes(b"head" + content)
    checks = checks_of(content, 4)
    with (tmp_path / "x").open("rb") as file:
        verdict = checks.complete(
            lambda block, at, buffer: read_into(file.fileno(), buffer, block.offset + at, tmp_path / "x"), 2
        )
    assert verdict.entries == 1
