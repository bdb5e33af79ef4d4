"""`train packs merge`, `iters` and `append-eod`, against what the users' own tools wrote and counted."""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from tests.data.pack_world import GOLDEN, contents, make, slices_json
from train.data.packs import append, files
from train.data.packs.iters import as_awk
from train.data.tokens.encode import LAST_REPLY, REPLY
from train.data.tokens.indexed import bin_path, idx_path, open_indexed, write_index
from train.data.tokens.sidecar import Facts, content_of, mask_path, read_facts

FACTS = Facts("aa", 1000, {"user": 7}, None, None, {"documents": 1})


# --- merge -----------------------------------------------------------------------------------------------------------


def test_a_merge_of_neox(train, tmp_path):
    """The same tokens in the same order; the index differs where theirs forgets the documents."""
    ran = train("packs", "merge", GOLDEN / "2_merge/in", tmp_path / "out")
    assert ran.code == 0, ran.err
    theirs, ours = open_indexed(GOLDEN / "2_merge/merged_text_document"), open_indexed(tmp_path / "out/in")
    assert bin_path(ours.prefix).read_bytes() == bin_path(theirs.prefix).read_bytes()
    assert np.array_equal(ours.sizes, theirs.sizes)
    assert np.array_equal(ours.pointers, theirs.pointers)
    assert list(theirs.documents) == [0]
    assert list(ours.documents) == list(range(22))
    raw = idx_path(ours.prefix).read_bytes()
    assert (
        raw[:26] + raw[34 : 34 + 12 * 21]
        == idx_path(theirs.prefix).read_bytes()[:26] + idx_path(theirs.prefix).read_bytes()[34:-8]
    ), "everything but the number of documents and their list"


@pytest.mark.parametrize("pack", ["U1_1", "warmup_0"])
def test_packs_of_the_users_shell_script(train, tmp_path, pack):
    """merge_single_folder.sh on slices of the same data sets: two of them, and one."""
    folder = GOLDEN / "6_packs/merge_single_folder"
    theirs = open_indexed(folder / pack)
    parts = {"n10": "n10_slice1_0_100", "n9": "n9_slice1_0_100"} if pack == "U1_1" else {"N2": "N2_slice0_0_100"}
    for name, stem in parts.items():
        for end in ("bin", "idx"):
            (tmp_path / pack).mkdir(exist_ok=True)
            shutil.copy(GOLDEN / f"2_merge/in/{name}_text_document.{end}", tmp_path / pack / f"{stem}.{end}")
    assert train("packs", "merge", tmp_path / pack, tmp_path / "merged" / pack).code == 0
    ours = open_indexed(tmp_path / "merged" / pack / pack)
    assert bin_path(ours.prefix).read_bytes() == bin_path(theirs.prefix).read_bytes()
    assert np.array_equal(ours.sizes, theirs.sizes)
    lines = (folder / "iters_merged.txt").read_text().replace("DATA", str(tmp_path)).splitlines()
    counted = train("packs", "iters", tmp_path / "merged", "--batch-size", 2 * 576).out
    assert counted.splitlines() == [line for line in lines if f"/{pack}/" in line], "theirs takes uint16 for int32"


def test_the_log_tells_every_part(train, tmp_path):
    train("packs", "merge", GOLDEN / "2_merge/in", tmp_path / "out")
    log = (tmp_path / "out/in.merge.log").read_text()
    for name, documents, tokens in [("N2", 9, 167), ("n10", 5, 100), ("n9", 7, 129)]:
        path = GOLDEN / f"2_merge/in/{name}_text_document.bin"
        line = next(line.split() for line in log.splitlines() if f" {name}_text_document " in line)
        assert line == [f"{name}_text_document", str(documents), str(tokens), blake3(path.read_bytes()).hexdigest()]
    assert log.index("N2_text") < log.index("n10_text") < log.index("n9_text")
    assert "  all                21         396\n" in log
    assert "read back and equal" in log


def test_one_pack_of_a_slicing(train, tmp_path):
    """The words of document 002: DIR/XX and merged/XX make merged/XX/XX.bin, .idx and .merge.log."""
    for name in ("a_slice0_0_10", "b_slice0_0_10"):
        make(tmp_path / "sliced/warmup_0" / name, [3, 4], mask=True, facts=FACTS)
    ran = train("packs", "merge", tmp_path / "sliced/warmup_0", tmp_path / "sliced/merged/warmup_0")
    assert ran.code == 0, ran.err
    names = sorted(path.name for path in (tmp_path / "sliced/merged/warmup_0").iterdir())
    assert names == [f"warmup_0.{end}" for end in ("bin", "idx", "json", "mask", "merge.log")]
    prefix = tmp_path / "sliced/merged/warmup_0/warmup_0"
    parts = [tmp_path / f"sliced/warmup_0/{name}_slice0_0_10" for name in "ab"]
    assert mask_path(prefix).read_bytes() == b"".join(mask_path(part).read_bytes() for part in parts)
    sums = [blake3(kind(part).read_bytes()).hexdigest() for kind in (bin_path, mask_path) for part in parts]
    counts, content = {"documents": 4, "tokens": 14}, content_of(sums)
    assert read_facts(prefix) == Facts("aa", 1000, {"user": 7}, None, None, counts, content=content)
    assert train("packs", "iters", prefix.parent).out == f"{prefix.parent}/: {14 / 8192 / 576:.6g}\n"


def test_documents_of_all_kinds(train, tmp_path):
    """Sequences that are documents, documents of several sequences, none at all, and the forgotten ones of NeoX."""
    make(tmp_path / "XX/a", [3, 0, 4])
    make(tmp_path / "XX/b", [2, 2, 2, 2], marks=[0, 1, 1, 4])
    make(tmp_path / "XX/c", [])
    make(tmp_path / "XX/d", [5, 5], marks=[0])
    make(tmp_path / "XX/e", [1], marks=[])
    ran = train("packs", "merge", tmp_path / "XX", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "2 indexes do not list all documents, each sequence is taken as one: d, e" in ran.err
    merged = open_indexed(tmp_path / "out/XX")
    assert list(merged.sizes) == [3, 0, 4, 2, 2, 2, 2, 5, 5, 1]
    assert list(merged.documents) == [0, 1, 2, 3, 4, 4, 7, 8, 9, 10]
    assert "9 documents" in ran.out


def test_long_columns_are_joined_a_piece_at_a_time():
    dice = np.random.default_rng(3)
    parts = [(dice.integers(0, 9, n).astype("<i8"), int(plus)) for n, plus in [(5, 0), (0, 7), (1, -2), (40, 100)]]
    expected = np.concatenate([part + plus for part, plus in parts])
    joined = files.Joined(parts, "<i8")
    for low in range(len(expected) + 2):
        for high in range(len(expected) + 2):
            assert np.array_equal(joined[low:high], expected[low:high])


@pytest.mark.parametrize("extra", [[], ["--no-verify"], ["-j", 4]])
def test_however_it_is_merged(train, tmp_path, extra, monkeypatch):
    monkeypatch.setattr(files, "BUFFER", 100)
    parts = [make(tmp_path / f"XX/p{i:02}", [7] * i, seed=i) for i in range(30)]
    assert train("packs", "merge", tmp_path / "XX", tmp_path / "out", *extra).code == 0
    assert bin_path(tmp_path / "out/XX").read_bytes() == b"".join(bin_path(part).read_bytes() for part in parts)


def test_a_disk_that_changes_bytes(train, tmp_path, monkeypatch):
    for name in "ab":
        make(tmp_path / "XX" / name, [500] * 3)
    write = os.pwrite

    def broken(handle, data, at):
        return write(handle, bytes(data)[:-1] + b"\xff" if at else data, at)

    monkeypatch.setattr(os, "pwrite", broken)
    ran = train("packs", "merge", tmp_path / "XX", tmp_path / "out")
    assert ran.code == 6
    assert f"1 of 2 parts do not read back from {tmp_path}/out/XX.partial/XX.bin" in ran.err
    assert list((tmp_path / "out").iterdir()) == []


def test_merges_that_are_refused(train, tmp_path):
    folder, out = tmp_path / "XX", tmp_path / "out"
    assert train("packs", "merge", folder, out).code == 3
    folder.mkdir()
    assert "has no .bin and .idx" in train("packs", "merge", folder, out).err
    make(folder / "a", [3])
    make(folder / "b", [3], dtype="<i4")
    ran = train("packs", "merge", folder, out)
    assert (ran.code, "type uint16" in ran.err, "of int32" in ran.err) == (5, True, True)
    make(folder / "b", [3], mask=True)
    assert train("packs", "merge", folder, out).code == 5
    mask_path(folder / "b").write_bytes(b"12")
    make(folder / "a", [3], mask=True)
    assert "has 2 bytes for 3 tokens" in train("packs", "merge", folder, out).err
    idx_path(folder / "b").unlink()
    ran = train("packs", "merge", folder, out)
    assert (ran.code, "1 files of" in ran.err, "b.bin" in ran.err) == (3, True, True)
    make(folder / "b", [3], mask=True)
    with bin_path(folder / "b").open("ab") as file:
        file.write(b"x")
    assert train("packs", "merge", folder, out).code == 3
    assert not out.exists()


def test_role_bins_are_in_no_data_pack(train, tmp_path):
    """Their roles would be appended to their tokens, or be lost."""
    for name in ("a-text", "a-role"):
        make(tmp_path / "XX" / name, [3, 5])
    merged = train("packs", "merge", tmp_path / "XX", tmp_path / "out")
    assert (merged.code, "role bins" in merged.err) == (5, True)
    assert not (tmp_path / "out").exists()
    for name in ("a-text", "a-role"):
        appended = train("packs", "append-eod", tmp_path / f"XX/{name}.bin", 3, "append")
        assert (appended.code, "role bins" in appended.err) == (5, True)
        state = tmp_path / f"{name}.yaml"
        assert train("packs", "state", tmp_path / "XX", state, "--force").code == 0
        words = ["--tokens-per-iter", 1, "--warmup-iters", 0, "--cd_phase", 0, "--max_tokens_per_pack", 9]
        words += ["--slices_json", slices_json(tmp_path / "s.json", {name: [4, 0, 0, 0, 0]}), "--state_file", state]
        sliced = train("packs", "slice", *words, "--out_dir", tmp_path / "sliced")
        assert (sliced.code, "role bins" in sliced.err) == (5, True)
    assert sorted(path.name for path in (tmp_path / "XX").iterdir()) == [
        f"a-{kind}.{end}" for kind in ("role", "text") for end in ("bin", "idx")
    ]
    counted = json.loads(train("packs", "iters", tmp_path / "XX", "--json").out)
    assert [row["tokens"] for row in counted] == [8]


def test_an_output_that_is_there(train, tmp_path):
    folder, out = tmp_path / "XX", tmp_path / "out"
    make(folder / "a", [3], mask=True)
    assert train("packs", "merge", folder, out, "-n").code == 0
    assert not out.exists()
    assert train("packs", "merge", folder, out).code == 0
    before = contents(out)
    ran = train("packs", "merge", folder, out)
    assert ran.code == 7
    assert contents(out) == before
    make(folder / "a", [4])
    mask_path(folder / "a").unlink()
    assert train("packs", "merge", folder, out, "--force").code == 0
    assert sorted(path.name for path in out.iterdir()) == ["XX.bin", "XX.idx", "XX.merge.log"], "no old mask"
    assert open_indexed(out / "XX").total == 4
    assert train("packs", "merge", folder, folder).code == 7


def test_the_folder_of_other_work_is_not_deleted(train, tmp_path):
    """Of the user, and of role bins of the same name, killed or running."""
    make(tmp_path / "XX/a", [3, 4])
    for name, content in (("notes.txt", "mine"), ("done.json", "{}")):
        staging = tmp_path / "out/XX.partial"
        staging.mkdir(parents=True)
        (staging / "lock").touch()
        (staging / name).write_text(content)
        ran = train("packs", "merge", tmp_path / "XX", tmp_path / "out")
        assert (ran.code, f"{staging} is needed for the work and holds something else" in ran.err) == (7, True)
        assert (staging / name).read_text() == content
        shutil.rmtree(staging)


def test_two_processes_do_not_write_the_same_files(train, tmp_path):
    make(tmp_path / "XX/a", [3, 4])
    with files.fresh(tmp_path / "out/XX") as staged:
        bin_path(staged).write_bytes(b"of the first")
        for _ in range(2):
            ran = train("packs", "merge", tmp_path / "XX", tmp_path / "out")
            assert (ran.code, "another process is writing" in ran.err) == (7, True)
        assert bin_path(staged).read_bytes() == b"of the first"


def test_copies_are_not_merged_with_what_they_were_made_of(train, tmp_path):
    prefix = make(tmp_path / "XX/a", [3])
    assert train("packs", "append-eod", prefix, 5000, "append").code == 0
    ran = train("packs", "merge", tmp_path / "XX", tmp_path / "out")
    assert ran.code == 5
    assert "are copies of others: eod_a" in ran.err
    for end in ("bin", "idx"):
        (tmp_path / f"XX/a.{end}").unlink()
    assert train("packs", "merge", tmp_path / "XX", tmp_path / "out").code == 0


def test_a_folder_named_by_a_dot_and_facts_of_some(train, tmp_path, monkeypatch):
    make(tmp_path / "XX/a", [3], facts=FACTS)
    make(tmp_path / "XX/b", [3])
    monkeypatch.chdir(tmp_path / "XX")
    ran = train("packs", "merge", ".", "../out")
    assert ran.code == 0
    assert "1 of 2 parts have a sidecar that says how they were tokenized, the result has none" in ran.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["XX.bin", "XX.idx", "XX.merge.log"]


def test_a_pack_that_is_not_yet_whole(train, tmp_path):
    """A slicing notes which slices a pack has: none is left out silently."""
    folder, out = tmp_path / "N_2", tmp_path / "out"
    for name in "abc":
        make(folder / f"{name}_slice2_0_3", [3])
    slices = {name: {"files": f"{name}_slice2_0_3"} for name in "abz"}
    (tmp_path / "packs.json").write_text(json.dumps({"packs": [{"name": "N_2", "slices": slices}]}))
    ran = train("packs", "merge", folder, out)
    assert ran.code == 3
    assert "lacks 1 of 3 slices: z_slice2_0_3" in ran.err
    make(folder / "z_slice2_0_3", [3])
    ran = train("packs", "merge", folder, out)
    assert ran.code == 0
    assert "1 files are not slices of this pack and are merged too: c_slice2_0_3" in ran.err
    (folder / "d.partial").mkdir()
    assert train("packs", "merge", folder, out, "--force").code == 3


# --- iters -----------------------------------------------------------------------------------------------------------


def sparse(prefix: Path, tokens: int, dtype: str = "<i4") -> None:
    """Token files whose tokens are a hole."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with bin_path(prefix).open("wb") as file:
        file.truncate(tokens * np.dtype(dtype).itemsize)
    full, rest = divmod(tokens, 1 << 30)
    write_index(idx_path(prefix), np.dtype(dtype), np.array([1 << 30] * full + [rest], np.int32))


def test_iterations_as_the_users_script_counts_them(train, tmp_path):
    """Its own lines for files of these sizes, but for the copy, which it counts too (59578.6)."""
    step = 8192 * 576
    sparse(tmp_path / "big/b/b", 35000 * step)
    sparse(tmp_path / "big/c/c", 29789 * step + 5_500_000 // 4)
    sparse(tmp_path / "big/c/eod_c", 29789 * step + 5_500_000 // 4)
    sparse(tmp_path / "big/d/sub/d", 250_000_000)
    sparse(tmp_path / "big/e/e", step, "<u2")
    (tmp_path / "big/f").mkdir()
    (tmp_path / "big/notes.txt").touch()
    ran = train("packs", "iters", tmp_path / "big")
    lines = (GOLDEN / "6_packs/merge_single_folder/iters_sizes.txt").read_text().splitlines()[1:]  # a is no int32
    lines[1] = lines[1].replace("59578.6", "29789.3")
    assert ran.out.replace(str(tmp_path), "DATA").splitlines() == lines
    assert f"note: {tmp_path}/big/c/eod_c is a copy of what was counted, it alone makes 29789.3" in ran.err
    half = json.loads(train("packs", "iters", tmp_path / "big", "--seq-length", 4096, "--json").out)
    assert [(row["tokens"], row["iterations"], row["train_iters"]) for row in half[:2]] == [
        (35000 * step, 70000.0, 70000),
        (29789 * step + 1_375_000, 59578 + 2 * 1_375_000 / step, 59579),
    ]
    with bin_path(tmp_path / "big/b/b").open("ab") as file:
        file.write(b"1234")
    assert train("packs", "iters", tmp_path / "big").code == 3
    assert train("packs", "iters", tmp_path / "nothing").code == 3


@pytest.mark.parametrize(
    ("number", "text"), [(0.0, "0"), (2.42657e-05, "2.42657e-05"), (1e6, "1000000"), (1234567.5, "1.23457e+06")]
)
def test_numbers_as_awk_prints_them(number, text):
    assert as_awk(number) == text


def test_neither_states_nor_merged_packs_are_counted(train, tmp_path):
    """What document 002 makes: packs, the states beside them, and `merged` in the same folder."""
    out = tmp_path / "out"
    for pack in ("U1_1", "N_2"):
        for name in "ab":
            make(out / pack / f"{name}_slice", [30, 40])
        train("packs", "merge", out / pack, out / "merged" / pack)
    (out / "states/a").mkdir(parents=True)
    (out / "states/a/state.0.yaml").touch()
    alone = [f"{out}/{pack}/: {140 / 100:.6g}" for pack in ("N_2", "U1_1")]
    size = ["--seq-length", 10, "--batch-size", 10]
    ran = train("packs", "iters", out, *size)
    assert ran.out.splitlines() == alone
    assert f"{out}/merged/U1_1/U1_1 is a copy of what was counted" in ran.err
    assert train("packs", "iters", out / "merged", *size).out.count(": 1.4\n") == 2, "merged packs alone are packs"
    for pack in ("U1_1", "N_2"):
        train("packs", "merge", out / pack, out)
    (out / "N_2.merge.log").unlink()
    assert train("packs", "iters", out, *size).out.splitlines() == alone
    make(out / "other/U1_1", [9])
    assert train("packs", "iters", out, *size).out.splitlines() == [*alone, f"{out}/other/: 0.09"]


# --- append-eod ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 50, 1 << 20])
@pytest.mark.parametrize("mode", ["append", "replace"])
@pytest.mark.parametrize("name", ["noeod", "merged", "v65500"])
def test_bytes_of_the_users_tool(train, tmp_path, monkeypatch, name, mode, chunk):
    monkeypatch.setattr(append, "CHUNK", chunk)
    for end in ("bin", "idx"):
        shutil.copy(GOLDEN / f"3_eod/{name}_text_document.{end}", tmp_path)
    force = ["--doubled"] if mode == "append" and name != "noeod" else []
    path = tmp_path / f"{name}_text_document.bin"
    if force:
        ran = train("packs", "append-eod", path, 3, mode)
        assert ran.code == 5
        assert "already end in 3" in ran.err
        assert len(list(tmp_path.iterdir())) == 2
    ran = train("packs", "append-eod", path, 3, mode, *force)
    assert ran.code == 0, ran.err
    ours = {file.name: file.read_bytes() for file in tmp_path.glob("eod_*")}
    theirs = {file.name: file.read_bytes() for file in (GOLDEN / "3_eod" / mode).glob(f"eod_{name}*")}
    assert ours == theirs


@pytest.mark.parametrize("chunk", [1, 2, 5, 17, 1000])
@pytest.mark.parametrize("marked", [False, True])
def test_append_to_anything(train, tmp_path, monkeypatch, chunk, marked):
    """Empty documents, long ones, documents of several sequences: by brute force."""
    dice = np.random.default_rng(chunk)
    sizes = np.r_[0, 0, dice.integers(0, 9, 60), 70, 0, 0, 0]
    marks = np.unique(np.r_[0, dice.integers(0, len(sizes), 20), len(sizes)]) if marked else np.arange(len(sizes) + 1)
    prefix = make(tmp_path / "x", sizes, marks=marks, mask=True, facts=FACTS)
    monkeypatch.setattr(append, "CHUNK", chunk)
    ran = train("packs", "append-eod", prefix, 999, "append", "--doubled")
    assert ran.code == 0, ran.err
    source, appended = open_indexed(prefix), open_indexed(tmp_path / "eod_x")
    mask = np.fromfile(mask_path(prefix), "u1")
    lows = np.r_[0, np.cumsum(sizes)]
    tokens = [np.r_[source.tokens[lows[a] : lows[b]], 999] for a, b in pairwise(marks)]
    masks = [np.r_[mask[lows[a] : lows[b]], REPLY | LAST_REPLY] for a, b in pairwise(marks)]
    assert np.array_equal(appended.tokens, np.concatenate(tokens))
    assert np.array_equal(np.fromfile(mask_path(appended.prefix), "u1"), np.concatenate(masks))
    assert np.array_equal(appended.documents, marks)
    assert np.array_equal(appended.sizes, sizes + np.isin(np.arange(len(sizes)), marks[1:] - 1))
    facts = read_facts(appended.prefix)
    assert facts is not None
    assert (facts.eod, facts.counts) == (999, {"documents": len(marks) - 1, "tokens": appended.total})


def test_replace_trains_the_last_token(train, tmp_path):
    prefix = make(tmp_path / "x", [3, 1], mask=True)
    before = np.fromfile(mask_path(prefix), "u1")
    assert train("packs", "append-eod", bin_path(prefix), 5, "replace").code == 0
    replaced = open_indexed(tmp_path / "eod_x")
    assert list(replaced.tokens[[2, 3]]) == [5, 5]
    assert list(np.fromfile(mask_path(replaced.prefix), "u1")) == [*before[:2], 3, 3]


def test_ends_that_are_refused(train, tmp_path):
    prefix = make(tmp_path / "x", [3, 0, 2])
    for number, code in [(-1, 5), (65536, 5), (70000, 5), (65535, 0)]:
        ran = train("packs", "append-eod", prefix, "--", number, "append")
        assert ran.code == code, ran.err
    assert train("packs", "append-eod", prefix, 5, "append").code == 7
    ran = train("packs", "append-eod", prefix, 5, "replace", "--force")
    assert ran.code == 5
    assert "1 of the documents 0 to 2" in ran.err
    assert open_indexed(tmp_path / "eod_x").tokens[-1] == 65535, "the older one stays"
    assert train("packs", "append-eod", prefix, 5, "other").code == 2
    assert train("packs", "append-eod", tmp_path / "none.bin", 5, "append").code == 3
    make(tmp_path / "y", [3], facts=FACTS)
    ran = train("packs", "append-eod", tmp_path / "y.bin", 1000, "append")
    assert ran.code == 5
    assert "they run from 0 to 999" in ran.err
    make(tmp_path / "z", [3, 3], marks=[0, 1, 1, 2])
    assert "documents without a sequence" in train("packs", "append-eod", tmp_path / "z", 5, "append").err


def test_files_without_tokens(train, tmp_path):
    prefix = make(tmp_path / "x", [])
    assert train("packs", "append-eod", prefix, 5, "append").code == 0
    assert idx_path(tmp_path / "eod_x").read_bytes() == idx_path(prefix).read_bytes()
    assert train("packs", "iters", tmp_path).out == f"{tmp_path}/: 0\n"


def test_dry_runs_write_nothing(train, tmp_path):
    prefix = make(tmp_path / "x", [3, 4])
    ran = train("packs", "append-eod", prefix, 5, "append", "-n", "--json")
    assert json.loads(ran.out) == {"out": f"{tmp_path}/eod_x", "documents": 2, "tokens": 9, "bytes": 18 + 34 + 24 + 24}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
