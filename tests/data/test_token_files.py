"""Token files that contradict each other are refused by each command that opens them, also where it reads a part."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.data.test_templates import MODEL

HEADER = 34
COUNT, PACK, SHOW = ("count",), ("pack", "-n", "--seq-length", 64), ("show",)


@pytest.fixture
def prefix(train, tmp_path):
    """Two dialogues with a mask: one reply is left out."""
    turns = [{"role": "user", "content": "saule"}, {"role": "assistant", "content": "upe"}]
    records = [{"messages": turns}, {"messages": [turns[0], {**turns[1], "weight": 0}, *turns]}]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    ran = train("tokenize", "--input", source, "--tokenizer", MODEL, "--output-prefix", tmp_path / "P", "--workers", 1)
    assert ran.code == 0, ran.err
    path = tmp_path / "P_text_document"
    for argv in (COUNT, PACK, SHOW):
        assert train(argv[0], path, *argv[1:]).code == 0, argv
    return path


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def move_pointer(path):
    """The second text begins two bytes later than the first one ends."""
    raw = bytearray(path.read_bytes())
    raw[HEADER + 4 * 2 + 8] += 2
    path.write_bytes(raw)


def impossible(path):
    raw = np.fromfile(path, np.uint8)
    raw[3] = 9
    raw.tofile(path)


@pytest.mark.parametrize(
    ("suffix", "change", "message", "commands"),
    [
        ("bin", cut, "bytes, its index has", (COUNT, PACK, SHOW)),
        ("idx", move_pointer, "points to other places than its sizes tell", (COUNT, PACK, SHOW)),
        ("mask", cut, "bytes for", (COUNT, PACK, SHOW)),
        ("mask", impossible, "has the value 9 at byte 3: a mask has 0 to 3", (SHOW,)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_files_that_contradict_each_other(train, prefix, suffix, change, message, commands):
    change(prefix.with_name(f"{prefix.name}.{suffix}"))
    for argv in commands:
        ran = train(argv[0], prefix, *argv[1:])
        assert (ran.code, message in ran.err) == (3, True), (argv, ran.out, ran.err)
