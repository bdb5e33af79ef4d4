"""`train packs state` and `slice`: where data sets are cut, what is written, and everything that is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.data.pack_world import GOLDEN, contents, make, slices_json
from train.data.facts import Facts, facts_path, mask_path, read_facts
from train.data.indexed import bin_path, idx_path, open_indexed

FLAGS = ("--tokens-per-iter", 64, "--warmup-iters", 2, "--cd_phase", 20, "--max_tokens_per_pack", 900)
TOTALS = {"lv": [700.4, 500, 1500.7, 900.25, 300], "en name": [300, 300, 900, 600.5, 99.5], "ķīna": [0, 0, 50, 0, 7]}
FACTS = Facts("aa", 1000, {"user": 7}, 3, None, {"documents": 1})


def world(folder: Path, train, totals=TOTALS, **changes) -> tuple[list[object], dict[str, Path]]:
    """Data sets, a state file and a slices json: the words of a slicing, and the prefixes of the data sets."""
    dice = np.random.default_rng(5)
    made = {
        name: make(folder / "in" / name, dice.integers(0, 40, 260), seed=i, **changes) for i, name in enumerate(totals)
    }
    slices_json(folder / "slices.json", totals)
    assert train("packs", "state", folder / "in", folder / "state.0.yaml").code == 0
    words = [*FLAGS, "--out_dir", folder / "out", "--slices_json", folder / "slices.json"]
    return ["packs", "slice", *words, "--state_file", folder / "state.0.yaml", "-q"], made


def check_cuts(out: Path, made: dict[str, Path], begin: int = 0) -> None:
    """Every slice against its source, by brute force: no gap, no overlap, and the crossing document belongs to it."""
    record = json.loads((out / "packs.json").read_text())
    for name, prefix in made.items():
        source = open_indexed(prefix)
        rows = zip(record["packs"], yaml.safe_load((out / f"states/{name}/tokens.yaml").read_text())[name], strict=True)
        document, wanted = begin, 0
        for k, (pack, target) in enumerate(rows):
            number = k if record["packs"][0]["name"] == "warmup_0" else k + 1
            wanted += target
            behind = document
            while source.sizes[begin:behind].sum() < wanted:
                behind += 1
            one = pack["slices"].get(name)
            assert (one is None) == (behind == document)
            if one is None:
                continue
            slice_ = open_indexed(out / pack["name"] / one["files"])
            assert one["documents"] == [document, behind]
            assert one["files"].startswith(f"{name}_slice{number}_{document}_")
            assert slice_.whole
            assert np.array_equal(slice_.sizes, source.sizes[document:behind])
            tokens = [source[i] for i in range(document, behind)]
            assert np.array_equal(slice_.tokens, np.concatenate(tokens))
            document = behind


def test_state_file_of_the_users_script(train, tmp_path, monkeypatch):
    for name in ("en", "lv", "lt", "lt_long", "unused", "xx"):
        make(tmp_path / "final_data_merged" / name, [1, 2])
    (tmp_path / "final_data_merged/notes.txt").write_text("no data set")
    monkeypatch.chdir(tmp_path)
    ran = train("packs", "state", "final_data_merged")
    assert (ran.code, ran.out) == (0, "state.0.yaml: 6 data sets\n")
    written = Path("state.0.yaml").read_text().replace(str(tmp_path) + "/", "")
    assert written == (GOLDEN / "phases/state.0.yaml").read_text()
    assert train("packs", "state", "final_data_merged").code == 7
    assert train("packs", "state", "final_data_merged", "--force").code == 0
    assert (
        train("packs", "state", "final_data_merged", "other.yaml", "-n").out.encode()
        == Path("state.0.yaml").read_bytes()
    )
    assert not Path("other.yaml").exists()
    idx_path(Path("final_data_merged/lt")).unlink()
    ran = train("packs", "state", "final_data_merged", "--force")
    assert ran.code == 3
    assert "1 of 6 .bin of final_data_merged have no .idx: lt" in ran.err


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_slices(train, tmp_path, dtype):
    words, made = world(tmp_path, train, dtype=dtype)
    dry = train(*words, "-n")
    assert dry.code == 0, dry.err
    assert not (tmp_path / "out").exists()
    ran = train(*words)
    assert ran.code == 0, ran.err
    check_cuts(tmp_path / "out", made)
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    record = json.loads((tmp_path / "out/packs.json").read_text())
    assert record["complete"]
    assert sorted([pack["name"] for pack in record["packs"]] + ["states"]) == folders
    assert {"warmup_0", "U1_1", "N_2", "U3_6", "U3_7_cd", "E_9"} <= set(folders)
    assert "N_2" in dry.out
    assert "no tokens and no file of ķīna" in dry.out
    before = contents(tmp_path / "out")
    again = train(*words)
    assert "were there" in again.out
    assert contents(tmp_path / "out") == before


def test_the_plan_as_json_is_what_is_written(train, tmp_path):
    words, _ = world(tmp_path, train)
    plan = json.loads(train(*words, "-n", "--json").out)
    assert train(*words).code == 0
    assert plan["pools"]["N"] == {"tokens": 3251, "packs": 3251}
    for pack in plan["packs"]:
        assert sum(entry["target"] for entry in pack["sets"].values()) == pack["tokens"]
        written = 0
        for entry in pack["sets"].values():
            if entry["files"]:
                found = open_indexed(tmp_path / "out" / pack["pack"] / entry["files"])
                assert (found.total, len(found)) == (entry["tokens"], entry["documents"][1] - entry["documents"][0])
                written += found.total
        assert written == pack["written_tokens"]
        assert pack["train_iters"] == -(-pack["tokens"] // 64)


def test_a_state_goes_on_where_a_slicing_ended(train, tmp_path):
    """Two slicings one after the other give a data set no document twice, and lose none between them."""
    words, made = world(tmp_path, train, {"lv": [500, 0, 100, 200, 50], "en": [400, 100, 100, 200, 0]})
    assert train(*words).code == 0
    packs = len(json.loads((tmp_path / "out/packs.json").read_text())["packs"])
    state = tmp_path / f"out/state.{packs}.yaml"
    content = yaml.safe_load(state.read_text())
    assert list(content) == ["en", "lv"]
    assert all(len(one["idxs"]) == packs + 1 and one["idxs"][0] == 0 for one in content.values())
    assert yaml.safe_load((tmp_path / f"out/states/lv/{state.name}").read_text()) == {"lv": content["lv"]}
    words = [str(word).replace(str(tmp_path / "out"), str(tmp_path / "two")) for word in words]
    words[words.index("--state_file") + 1] = str(state)
    assert train(*words).code == 0
    for name, prefix in made.items():
        check_cuts(tmp_path / "two", {name: prefix}, begin=content[name]["idxs"][-1])
    after = yaml.safe_load((tmp_path / f"two/state.{2 * packs}.yaml").read_text())
    assert after["lv"]["idxs"][: packs + 1] == content["lv"]["idxs"]


def test_masks_and_facts_travel(train, tmp_path):
    words, made = world(tmp_path, train, mask=True, facts=FACTS)
    assert train(*words).code == 0
    for pack in json.loads((tmp_path / "out/packs.json").read_text())["packs"]:
        for name, one in pack["slices"].items():
            prefix = tmp_path / "out" / pack["name"] / one["files"]
            source = open_indexed(made[name])
            low = int(source.sizes[: one["documents"][0]].sum())
            assert mask_path(prefix).read_bytes() == mask_path(made[name]).read_bytes()[low : low + one["tokens"]]
            facts = read_facts(prefix)
            assert facts is not None
            assert facts.encoding == FACTS.encoding
            assert facts.counts == {"documents": one["documents"][1] - one["documents"][0], "tokens": one["tokens"]}


def test_documents_of_several_sequences_are_not_torn(train, tmp_path):
    dice = np.random.default_rng(1)
    sizes = dice.integers(0, 12, 400)
    marks = np.unique(np.r_[0, dice.integers(0, 400, 120), 400])
    make(tmp_path / "in/lv", sizes, marks=marks)
    slices_json(tmp_path / "slices.json", {"lv": [500, 100, 400, 500, 20]})
    train("packs", "state", tmp_path / "in", tmp_path / "state.yaml")
    ran = train("packs", "slice", *FLAGS, "--out-dir", tmp_path / "out", "--slices-json", tmp_path / "slices.json",
                "--state-file", tmp_path / "state.yaml", "-q")  # fmt: skip
    assert ran.code == 0, ran.err
    record = json.loads((tmp_path / "out/packs.json").read_text())
    at, first = 0, 0
    for pack in record["packs"]:
        one = pack["slices"]["lv"]
        found = open_indexed(tmp_path / "out" / pack["name"] / one["files"])
        low, high = one["documents"]
        assert low == first
        assert np.array_equal(found.documents, marks[low : high + 1] - marks[low])
        assert np.array_equal(found.sizes, sizes[marks[low] : marks[high]])
        at, first = at + found.total, high
    assert at == sizes[: marks[first]].sum()


def test_a_merge_of_neox_is_cut_by_its_sequences(train, tmp_path):
    """Its index has no documents: each sequence is one."""
    words, made = world(tmp_path, train, marks=[0])
    ran = train(*words)
    assert ran.code == 0, ran.err
    check_cuts(tmp_path / "out", made)


@pytest.mark.parametrize(
    ("sizes", "totals"),
    [([5000], [1000, 0, 1000, 2000, 1000]), ([0, 0, 2000, 0, 0, 3000, 0], [999, 1, 1000, 2000, 1000])],
)
def test_long_and_empty_documents(train, tmp_path, sizes, totals):
    """A document of many packs lies in the first of them; the others get nothing of it, and say so."""
    make(tmp_path / "in/lv", sizes)
    slices_json(tmp_path / "slices.json", {"lv": totals})
    train("packs", "state", tmp_path / "in", tmp_path / "state.yaml")
    words = ["packs", "slice", *FLAGS, "--out-dir", tmp_path / "out", "--slices-json", tmp_path / "slices.json",
             "--state-file", tmp_path / "state.yaml", "-q"]  # fmt: skip
    ran = train(*words)
    assert ran.code == 0, ran.err
    assert "no file of lv: a long document of an earlier pack covers it" in ran.err
    check_cuts(tmp_path / "out", {"lv": tmp_path / "in/lv"})
    assert "were there" in train(*words).out


# --- refused ---------------------------------------------------------------------------------------------------------


def test_everything_that_lacks_is_listed_and_nothing_is_written(train, tmp_path):
    words, _ = world(tmp_path, train)
    slices_json(tmp_path / "slices.json", {**TOTALS, "lv": [9000, 0, 0, 9000, 0], "en name": [800, 0, 1000.6, 9000, 0]})
    ran = train(*words)
    assert ran.code == 5
    assert "2 data sets have fewer tokens" in ran.err
    assert "lv: 18,000 needed, " in ran.err
    assert "en name: 10,801 needed" in ran.err
    bin_path(tmp_path / "in/lv").unlink()
    slices_json(tmp_path / "slices.json", {**TOTALS, "zz": [5, 0, 0, 0, 0], "none": [0, 0, 0, 0, 0]})
    ran = train(*words)
    assert ran.code == 5
    assert "2 of 5 data sets cannot be sliced" in ran.err
    assert f"lv (3,901 tokens): {tmp_path}/in/lv.bin is not there" in ran.err
    assert "zz (5 tokens): is not in the state file" in ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "slices.json"),
        ('{"names": ["a"]}', "has no 'U1'"),
        ('{"names": ["a"], "U1": {"total": [1, 2]}}', "is 2 numbers, for 1 names"),
        ('{"names": ["a", "a"]}', "a are named twice"),
        ('{"names": ["../a"]}', "is no name of a file"),
        ('{"names": ["a"], "U1": {"total": [-1]}}', "-1, which is no number of tokens"),
        ('{"names": ["a"], "U1": {"total": [NaN]}}', "nan, which is no number of tokens"),
        ('{"names": ["a"], "U1": {"total": [true]}}', "True, which is no number of tokens"),
        ('{"names": [], "U1": {}}', "no list of data sets"),
        ("[]", "it needs"),
    ],
)
def test_slices_jsons_that_are_none(train, tmp_path, content, words):
    arguments, _ = world(tmp_path, train)
    (tmp_path / "slices.json").write_text(content)
    ran = train(*arguments)
    assert ran.code == 3
    assert words in ran.err


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
    assert "is no state file" in ran.err


def test_a_state_behind_the_end(train, tmp_path):
    arguments, _ = world(tmp_path, train)
    content = yaml.safe_load((tmp_path / "state.0.yaml").read_text())
    content["lv"]["idxs"] = [0, 261]
    (tmp_path / "state.0.yaml").write_text(yaml.dump(content))
    ran = train(*arguments)
    assert ran.code == 5
    assert "its state begins at document 261" in ran.err


def test_data_sets_that_cannot_be_one_pack(train, tmp_path):
    arguments, made = world(tmp_path, train)
    make(made["lv"], [40] * 200, dtype="<i4")
    ran = train(*arguments)
    assert ran.code == 5
    assert "int32" in ran.err
    assert "uint16" in ran.err
    make(made["lv"], [40] * 200, mask=True)
    ran = train(*arguments)
    assert ran.code == 5
    assert "1 of 3 token files have a loss mask" in ran.err
    for prefix, eod in zip(made.values(), (3, 3, 4), strict=True):
        make(prefix, [40] * 200, facts=Facts("aa", 1000, {}, eod))
        mask_path(prefix).unlink(missing_ok=True)
    ran = train(*arguments)
    assert ran.code == 5
    assert "were tokenized differently" in ran.err
    facts_path(made["ķīna"]).unlink()
    mask_path(made["lv"]).write_bytes(b"1")
    assert "has 1 bytes for 8,000 tokens" in train(*arguments).err
    assert not (tmp_path / "out").exists()


def test_other_packs_in_the_folder(train, tmp_path):
    words, made = world(tmp_path, train)
    assert train(*words).code == 0
    before = contents(tmp_path / "out")
    ran = train(*[100 if word == 900 else word for word in words])
    assert ran.code == 5, "the warm-up does not fit any more"
    ran = train(*[800 if word == 900 else word for word in words])
    assert ran.code == 7
    assert "packs made with other arguments: most" in ran.err
    slices_json(tmp_path / "slices.json", {**TOTALS, "lv": [700.4, 500, 1500.7, 900.25, 301]})
    assert "from another slices json" in train(*words).err
    slices_json(tmp_path / "slices.json", TOTALS)
    os.utime(bin_path(made["lv"]), (5, 5))
    ran = train(*words)
    assert ran.code == 7
    assert "other inputs: lv" in ran.err
    assert contents(tmp_path / "out") == before
    (tmp_path / "out/notes.txt").write_text("the user's own")
    assert train(*[800 if word == 900 else word for word in words], "--force").code == 0
    check_cuts(tmp_path / "out", made)
    record = json.loads((tmp_path / "out/packs.json").read_text())
    held = {path.with_suffix("").name for path in (tmp_path / "out").rglob("*.bin")}
    assert held == {one["files"] for pack in record["packs"] for one in pack["slices"].values()}
    assert (tmp_path / "out/notes.txt").exists()


def test_folders_of_another_program_stay(train, tmp_path):
    words, _ = world(tmp_path, train)
    (tmp_path / "out/N_2").mkdir(parents=True)
    for extra in ([], ["--force"]):
        ran = train(*words, *extra)
        assert ran.code == 7
        assert "packs.json does not" in ran.err


def test_a_record_that_names_other_folders_deletes_nothing(train, tmp_path):
    words, made = world(tmp_path, train)
    assert train(*words).code == 0
    record = json.loads((tmp_path / "out/packs.json").read_text())
    next(iter(record["packs"][0]["slices"].values()))["files"] = "../../in/lv"
    (tmp_path / "out/packs.json").write_text(json.dumps(record))
    assert train(*words, "--force").code == 7
    assert open_indexed(made["lv"])


def test_names_that_no_file_can_have(train, tmp_path):
    words, _ = world(tmp_path, train, {"x" * 240: TOTALS["lv"]})
    ran = train(*words)
    assert ran.code == 5
    assert "names that no file can have" in ran.err


def test_no_room(train, tmp_path, monkeypatch):
    import shutil

    words, _ = world(tmp_path, train)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    ran = train(*words)
    assert ran.code == 7
    assert "has 1 B free" in ran.err
    assert not list((tmp_path / "out").rglob("*.bin"))


def test_where_the_kernel_does_not_copy(train, tmp_path, monkeypatch):
    """Two file systems, an old kernel: the bytes are the same."""
    import errno

    words, _ = world(tmp_path, train)
    assert train(*words).code == 0
    before = contents(tmp_path / "out")

    def refuse(*_):
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert train(*words, "--force").code == 0
    assert contents(tmp_path / "out") == before


def test_a_slice_that_is_not_whole_is_made_again(train, tmp_path):
    words, _ = world(tmp_path, train, mask=True, facts=FACTS)
    assert train(*words).code == 0
    before = contents(tmp_path / "out")
    bins = sorted((tmp_path / "out").rglob("*.bin"))
    bins[0].write_bytes(b"")
    bins[1].with_suffix(".idx").unlink()
    bins[2].with_suffix(".mask").unlink()
    bins[3].with_suffix(".json").write_text("{}")
    idx = bytearray(bins[4].with_suffix(".idx").read_bytes())
    idx[34] ^= 1
    bins[4].with_suffix(".idx").write_bytes(idx)
    assert train(*words).code == 0
    assert contents(tmp_path / "out") == before
