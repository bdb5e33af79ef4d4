"""`train packs state` and `slice`: where data sets are cut, and what is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.data.pack_world import FACTS, FLAGS, GOLDEN, TOTALS, check_cuts, contents, make, slices_json, world
from train.data.tokens.indexed import idx_path, open_indexed
from train.data.tokens.sidecar import mask_path, read_facts


def test_state_file_of_the_users_script(train, tmp_path, monkeypatch):
    for name in ("en", "lv", "lt", "lt_long", "unused", "xx"):
        make(tmp_path / "final_data_merged" / name, [1, 2])
    (tmp_path / "final_data_merged/notes.txt").write_text("no data set")
    monkeypatch.chdir(tmp_path)
    ran = train("packs", "state", "final_data_merged")
    assert (ran.code, ran.out) == (0, "state.0.yaml: 6 data sets\n")
    assert train("packs", "state", "final_data_merged", "sliced/new/state.0.yaml").code == 0
    written = Path("state.0.yaml").read_text().replace(str(tmp_path) + "/", "")
    assert written == (GOLDEN / "6_packs/small/state.0.yaml").read_text()
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
    argv, prefixes = world(tmp_path, train, dtype=dtype)
    dry = train(*argv, "-n")
    assert dry.code == 0, dry.err
    assert not (tmp_path / "out").exists()
    ran = train(*argv)
    assert ran.code == 0, ran.err
    check_cuts(tmp_path / "out", prefixes)
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    record = json.loads((tmp_path / "out/packs.json").read_text())
    assert record["complete"]
    assert sorted([pack["name"] for pack in record["packs"]] + ["states"]) == folders
    assert {"warmup_0", "U1_1", "N_2", "U3_6", "U3_7_cd", "E_9"} <= set(folders)
    assert "N_2" in dry.out
    assert "no tokens and no file of ķīna" in dry.out
    before = contents(tmp_path / "out")
    repeated = train(*argv)
    assert "were there" in repeated.out
    assert contents(tmp_path / "out") == before


def test_the_plan_as_json_is_what_is_written(train, tmp_path):
    argv, _ = world(tmp_path, train)
    plan = json.loads(train(*argv, "-n", "--json").out)
    assert train(*argv).code == 0
    assert plan["pools"]["N"] == {"tokens": 3251, "packs": 3251}
    for pack in plan["packs"]:
        assert sum(entry["target"] for entry in pack["sets"].values()) == pack["tokens"]
        written = 0
        for entry in pack["sets"].values():
            if entry["files"]:
                indexed = open_indexed(tmp_path / "out" / pack["pack"] / entry["files"])
                assert (indexed.total, len(indexed)) == (entry["tokens"], entry["documents"][1] - entry["documents"][0])
                written += indexed.total
        assert written == pack["written_tokens"]
        assert pack["train_iters"] == -(-pack["tokens"] // 64)


def test_a_state_goes_on_where_a_slicing_ended(train, tmp_path):
    """Two slicings one after the other give a data set no document twice, and lose none between them."""
    argv, prefixes = world(tmp_path, train, {"lv": [500, 0, 100, 200, 50], "en": [400, 100, 100, 200, 0]})
    assert train(*argv).code == 0
    packs = len(json.loads((tmp_path / "out/packs.json").read_text())["packs"])
    state = tmp_path / f"out/state.{packs}.yaml"
    content = yaml.safe_load(state.read_text())
    assert list(content) == ["en", "lv"]
    assert all(len(entry["idxs"]) == packs + 1 and entry["idxs"][0] == 0 for entry in content.values())
    assert yaml.safe_load((tmp_path / f"out/states/lv/{state.name}").read_text()) == {"lv": content["lv"]}
    argv = [str(word).replace(str(tmp_path / "out"), str(tmp_path / "two")) for word in argv]
    argv[argv.index("--state_file") + 1] = str(state)
    assert train(*argv).code == 0
    for name, prefix in prefixes.items():
        check_cuts(tmp_path / "two", {name: prefix}, begin=content[name]["idxs"][-1])
    after = yaml.safe_load((tmp_path / f"two/state.{2 * packs}.yaml").read_text())
    assert after["lv"]["idxs"][: packs + 1] == content["lv"]["idxs"]


def test_a_data_set_without_tokens_is_not_even_opened(train, tmp_path):
    argv, prefixes = world(tmp_path, train, TOTALS | {"zz": [0, 0, 0, 0, 0]})
    idx_path(prefixes.pop("zz")).unlink()
    ran = train(*argv)
    assert ran.code == 0, ran.err
    check_cuts(tmp_path / "out", prefixes)
    (state,) = (tmp_path / "out").glob("state.*.yaml")
    after = yaml.safe_load(state.read_text())
    assert (after["zz"]["idxs"], len(after["lv"]["idxs"])) == ([0], int(state.suffixes[0][1:]) + 1)


def test_masks_and_facts_travel(train, tmp_path):
    argv, prefixes = world(tmp_path, train, mask=True, facts=FACTS)
    assert train(*argv).code == 0
    for pack in json.loads((tmp_path / "out/packs.json").read_text())["packs"]:
        for name, entry in pack["slices"].items():
            prefix = tmp_path / "out" / pack["name"] / entry["files"]
            source = open_indexed(prefixes[name])
            low = int(source.sizes[: entry["documents"][0]].sum())
            assert mask_path(prefix).read_bytes() == mask_path(prefixes[name]).read_bytes()[low : low + entry["tokens"]]
            facts = read_facts(prefix)
            assert facts is not None
            assert facts.encoding == FACTS.encoding
            assert facts.counts == {
                "documents": entry["documents"][1] - entry["documents"][0],
                "tokens": entry["tokens"],
            }


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
        entry = pack["slices"]["lv"]
        indexed = open_indexed(tmp_path / "out" / pack["name"] / entry["files"])
        low, high = entry["documents"]
        assert low == first
        assert np.array_equal(indexed.documents, marks[low : high + 1] - marks[low])
        assert np.array_equal(indexed.sizes, sizes[marks[low] : marks[high]])
        at, first = at + indexed.total, high
    assert at == sizes[: marks[first]].sum()


def test_a_merge_of_neox_is_cut_by_its_sequences(train, tmp_path):
    """Its index has no documents: each sequence is one."""
    argv, prefixes = world(tmp_path, train, marks=[0])
    ran = train(*argv)
    assert ran.code == 0, ran.err
    check_cuts(tmp_path / "out", prefixes)


@pytest.mark.parametrize(
    ("sizes", "totals"),
    [([5000], [1000, 0, 1000, 2000, 1000]), ([0, 0, 2000, 0, 0, 3000, 0], [999, 1, 1000, 2000, 1000])],
)
def test_long_and_empty_documents(train, tmp_path, sizes, totals):
    """A document of many packs lies in the first of them; the others get nothing of it, and say so."""
    make(tmp_path / "in/lv", sizes)
    slices_json(tmp_path / "slices.json", {"lv": totals})
    train("packs", "state", tmp_path / "in", tmp_path / "state.yaml")
    argv = ["packs", "slice", *FLAGS, "--out-dir", tmp_path / "out", "--slices-json", tmp_path / "slices.json",
             "--state-file", tmp_path / "state.yaml", "-q"]  # fmt: skip
    ran = train(*argv)
    assert ran.code == 0, ran.err
    assert "no file of lv: a long document of an earlier pack covers it" in ran.err
    check_cuts(tmp_path / "out", {"lv": tmp_path / "in/lv"})
    assert "were there" in train(*argv).out


def test_where_the_kernel_does_not_copy(train, tmp_path, monkeypatch):
    """Two file systems, an old kernel: the bytes are the same."""
    import errno

    argv, _ = world(tmp_path, train)
    assert train(*argv).code == 0
    before = contents(tmp_path / "out")

    def refuse(*_):
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert train(*argv, "--force").code == 0
    assert contents(tmp_path / "out") == before


def test_a_slice_that_is_not_whole_is_made_again(train, tmp_path):
    argv, _ = world(tmp_path, train, mask=True, facts=FACTS)
    assert train(*argv).code == 0
    before = contents(tmp_path / "out")
    bins = sorted((tmp_path / "out").rglob("*.bin"))
    bins[0].write_bytes(b"")
    bins[1].with_suffix(".idx").unlink()
    bins[2].with_suffix(".mask").unlink()
    bins[3].with_suffix(".json").write_text("{}")
    idx = bytearray(bins[4].with_suffix(".idx").read_bytes())
    idx[34] ^= 1
    bins[4].with_suffix(".idx").write_bytes(idx)
    bins[5].with_suffix(".partial").mkdir()  # killed behind the last rename
    assert train(*argv).code == 0
    assert contents(tmp_path / "out") == before
    assert not list((tmp_path / "out").rglob("*.partial"))
