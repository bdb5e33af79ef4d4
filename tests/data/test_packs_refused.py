"""Slicings that are refused: nothing is written, and every reason is told with its names and numbers."""

from __future__ import annotations

import json
import os

import pytest
import yaml

from formats.errors import SourceError
from tests.data.pack_world import TOTALS, check_cuts, contents, make, slices_json, world
from train.data.packs import inputs
from train.data.tokens.indexed import bin_path, open_indexed
from train.data.tokens.sidecar import Facts, facts_path, mask_path


def test_everything_that_lacks_is_listed_and_nothing_is_written(train, tmp_path):
    argv, _ = world(tmp_path, train)
    slices_json(tmp_path / "slices.json", {**TOTALS, "lv": [9000, 0, 0, 9000, 0], "en name": [800, 0, 1000.6, 9000, 0]})
    ran = train(*argv)
    assert ran.code == 5
    assert "2 data sets have fewer tokens" in ran.err
    assert "lv: 18,000 needed, " in ran.err
    assert "en name: 10,801 needed" in ran.err
    bin_path(tmp_path / "in/lv").unlink()
    slices_json(tmp_path / "slices.json", {**TOTALS, "zz": [5, 0, 0, 0, 0], "none": [0, 0, 0, 0, 0]})
    ran = train(*argv)
    assert ran.code == 5
    assert "2 of 5 data sets cannot be sliced" in ran.err
    assert f"lv (3,901 tokens): {tmp_path}/in/lv.bin is not there" in ran.err
    assert "zz (5 tokens): is not in the state file" in ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "slices.json"),
        ('{"names": ["a"]}', "has no 'U1'"),
        ('{"names": ["a"], "U1": {"total": [1, 2]}}', "is 2 numbers, for 1 names"),
        ('{"names": ["a", "a"]}', "a are named twice"),
        ('{"names": ["../a"]}', "is not a file name"),
        ('{"names": ["a"], "U1": {"total": [-1]}}', "-1, which is no number of tokens"),
        ('{"names": ["a"], "U1": {"total": [NaN]}}', "nan, which is no number of tokens"),
        ('{"names": ["a"], "U1": {"total": [true]}}', "True, which is no number of tokens"),
        ('{"names": [], "U1": {}}', "is not a list of data sets"),
        ('{"names": "ab", "U1": {"total": [1, 2]}}', "is not a list of data sets"),
        ('{"names": ["a\\u0000"]}', "is not a file name"),
        ("[]", "it needs"),
    ],
)
def test_slices_jsons_that_are_none(train, tmp_path, content, message):
    arguments, _ = world(tmp_path, train)
    (tmp_path / "slices.json").write_text(content)
    ran = train(*arguments)
    assert ran.code == 3
    assert message in ran.err


@pytest.mark.parametrize(
    "content",
    ["", "[]", "a: 5", "a: {datapath: x}", "a: {datapath: x, idxs: []}", "a: {datapath: x, idxs: [5, 3]}", "{",
     "a: {datapath: x, idxs: [-1]}", "no: {datapath: x, idxs: [0]}", "!!python/object/apply:os.system ['true']"],
)  # fmt: skip
def test_state_files_that_are_none(train, tmp_path, content):
    arguments, _ = world(tmp_path, train)
    (tmp_path / "state.0.yaml").write_text(content)
    ran = train(*arguments)
    assert ran.code == 3
    assert "is not a state file" in ran.err


def test_a_state_behind_the_end(train, tmp_path):
    arguments, _ = world(tmp_path, train)
    content = yaml.safe_load((tmp_path / "state.0.yaml").read_text())
    content["lv"]["idxs"] = [0, 261]
    (tmp_path / "state.0.yaml").write_text(yaml.dump(content))
    ran = train(*arguments)
    assert ran.code == 5
    assert "its state begins at document 261" in ran.err


def test_data_sets_that_cannot_be_one_pack(train, tmp_path):
    arguments, prefixes = world(tmp_path, train)
    make(prefixes["lv"], [40] * 200, dtype="<i4")
    ran = train(*arguments)
    assert ran.code == 5
    assert "int32" in ran.err
    assert "uint16" in ran.err
    make(prefixes["lv"], [40] * 200, mask=True)
    ran = train(*arguments)
    assert ran.code == 5
    assert "1 of 3 token files have a loss mask" in ran.err
    for prefix, eod in zip(prefixes.values(), (3, 3, 4), strict=True):
        make(prefix, [40] * 200, facts=Facts("aa", 1000, {}, eod))
        mask_path(prefix).unlink(missing_ok=True)
    ran = train(*arguments)
    assert ran.code == 5
    assert "were tokenized differently" in ran.err
    facts_path(prefixes["ķīna"]).unlink()
    mask_path(prefixes["lv"]).write_bytes(b"1")
    assert "has 1 bytes for 8,000 tokens" in train(*arguments).err
    assert not (tmp_path / "out").exists()


def test_other_packs_in_the_folder(train, tmp_path):
    argv, prefixes = world(tmp_path, train)
    assert train(*argv).code == 0
    before = contents(tmp_path / "out")
    ran = train(*[100 if word == 900 else word for word in argv])
    assert ran.code == 5, "the warm-up does not fit any more"
    ran = train(*[800 if word == 900 else word for word in argv])
    assert ran.code == 7
    assert "packs made with --max-tokens-per-pack 900, not 800" in ran.err
    slices_json(tmp_path / "slices.json", {**TOTALS, "lv": [700.4, 500, 1500.7, 900.25, 301]})
    assert "from another slices json" in train(*argv).err
    slices_json(tmp_path / "slices.json", TOTALS)
    os.utime(bin_path(prefixes["lv"]), (5, 5))
    ran = train(*argv)
    assert ran.code == 7
    assert "other inputs: lv" in ran.err
    assert contents(tmp_path / "out") == before
    (tmp_path / "out/notes.txt").write_text("the user's own")
    assert train(*[800 if word == 900 else word for word in argv], "--force").code == 0
    check_cuts(tmp_path / "out", prefixes)
    record = json.loads((tmp_path / "out/packs.json").read_text())
    files = {path.with_suffix("").name for path in (tmp_path / "out").rglob("*.bin")}
    assert files == {entry["files"] for pack in record["packs"] for entry in pack["slices"].values()}
    assert (tmp_path / "out/notes.txt").exists()


@pytest.mark.parametrize("end", [".mask", ".bin"])
def test_inputs_that_were_changed_since(train, tmp_path, end):
    """A mask that was made anew, and tokens of the same lengths, size and time."""
    argv, prefixes = world(tmp_path, train, mask=True)
    assert train(*argv).code == 0
    path = prefixes["lv"].with_suffix(end)
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    ran = train(*argv)
    assert ran.code == 7
    assert "other inputs: lv" in ran.err
    assert train(*argv, "--force").code == 0
    check_cuts(tmp_path / "out", prefixes)


def test_folders_of_another_program_stay(train, tmp_path):
    argv, _ = world(tmp_path, train)
    (tmp_path / "out/N_2").mkdir(parents=True)
    for extra in ([], ["--force"]):
        ran = train(*argv, *extra)
        assert ran.code == 7
        assert "packs.json does not" in ran.err


def test_a_record_that_names_other_folders_deletes_nothing(train, tmp_path):
    argv, prefixes = world(tmp_path, train)
    assert train(*argv).code == 0
    record = json.loads((tmp_path / "out/packs.json").read_text())
    next(iter(record["packs"][0]["slices"].values()))["files"] = "../../in/lv"
    (tmp_path / "out/packs.json").write_text(json.dumps(record))
    assert train(*argv, "--force").code == 7
    assert open_indexed(prefixes["lv"])


def test_names_that_no_file_can_have(train, tmp_path):
    argv, _ = world(tmp_path, train, {"x" * 240: TOTALS["lv"]})
    ran = train(*argv)
    assert ran.code == 5
    assert "names that are too long for a file" in ran.err


def test_no_room(train, tmp_path, monkeypatch):
    import shutil

    argv, _ = world(tmp_path, train)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    ran = train(*argv)
    assert ran.code == 7
    assert "has 1 B free" in ran.err
    assert not list((tmp_path / "out").rglob("*.bin"))


@pytest.mark.parametrize(
    "text", ["[" * 50_000, "- " * 50_000, "a: " + "{b: " * 50_000, "x: " + "a" * (17 << 20), "? " * 50_000]
)
def test_states_of_any_depth(tmp_path, text):
    (tmp_path / "state.yaml").write_text(text)
    with pytest.raises(
        SourceError, match=r"is nested deeper than 100|has more than 16,777,216 bytes|is not a state file"
    ):
        inputs.read_state(tmp_path / "state.yaml")


def test_states_without_a_path(tmp_path):
    for path in ('""', ".", "/"):
        (tmp_path / "state.yaml").write_text(f"lv: {{datapath: {path}, idxs: [0]}}")
        with pytest.raises(SourceError, match="lv needs a datapath"):
            inputs.read_state(tmp_path / "state.yaml")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"names": ' + "[" * 100_000])
def test_slices_of_any_depth(tmp_path, content):
    (tmp_path / "slices.json").write_text(content)
    with pytest.raises(SourceError, match=r"slices\.json is not a slices json: it is nested too deep"):
        inputs.read_slices(tmp_path / "slices.json")


@pytest.mark.parametrize(("total", "code"), [(1e300, 3), (10**400, 3), (2**53 + 2, 3), (2**53, 2)])
def test_totals_that_nobody_has(train, tmp_path, total, code):
    argv, _ = world(tmp_path, train, {"lv": [1000, 0, 0, 1000, total]})
    ran = train(*argv)
    assert ran.code == code, ran.err
    assert not (tmp_path / "out").exists()
