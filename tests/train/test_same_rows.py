"""What marks the trained tokens of a run's data has to be the same when it resumes: sidecars, masks and roles."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.data.pack_world import GOLDEN, make
from train.data.packing import pack_plan
from train.data.rows import open_rows
from train.data.tokens.indexed import bin_path, idx_path, write_index
from train.data.tokens.sidecar import Facts, facts_path, mask_path
from train.settings.config import Data

FACTS = Facts("aa", 1000, {"user": 7, "assistant": 8}, 3, None, {"documents": 4, "tokens": 120})


def rows(prefix):
    return open_rows(Data(train=[prefix], seq_length=64), [prefix], 1)


def edit(path, **changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"control": {"user": 8, "assistant": 7}}, {"eod": None}, {"counts": {"documents": 4}}, {"content": "ab"},
        {"plain": True}, {"tokenizer": "bb"}, {"names": "cc"},
    ],
)  # fmt: skip
def test_all_that_a_sidecar_says_is_bound(tmp_path, changed):
    prefix = make(tmp_path / "P", [30] * 4, facts=FACTS)
    before = rows(prefix)
    edit(facts_path(prefix))  # as another program formats it
    assert rows(prefix).sidecars == before.sidecars
    edit(facts_path(prefix), names=None, content=None, plain=False)  # or an older version wrote it
    assert rows(prefix).sidecars == before.sidecars
    edit(facts_path(prefix), **changed)
    assert rows(prefix).digest == before.digest
    assert rows(prefix).sidecars != before.sidecars


def test_the_roles_of_role_bins_are_bound(tmp_path):
    prefix, role = make(tmp_path / "P-text", [30] * 4), tmp_path / "P-role"
    write_index(idx_path(role), np.dtype("<u2"), np.array([30] * 4, np.int32))
    roles = np.repeat(np.array([1, 2], "<u2"), 60)
    roles.tofile(bin_path(role))
    before, trained = rows(prefix).sidecars, rows(prefix).flat([0]).trained
    roles[::-1].tofile(bin_path(role))
    assert rows(prefix).flat([0]).trained != trained
    assert rows(prefix).sidecars != before


def test_a_mask_that_changed_between_its_samples_is_noticed(train, tmp_path, monkeypatch):
    """Two records with the same text exchange which of them is trained: all sizes and counts stay."""
    monkeypatch.setattr(pack_plan, "SAMPLED", 2)
    turns = [{"role": "user", "content": "Jautājums"}, {"role": "assistant", "content": "Atbilde ir gara."}]
    without = [turns[0], turns[1] | {"weight": 0}, *turns]
    whole = [*turns, *turns]
    made = []
    for name, middle in (("A", [whole, without]), ("B", [without, whole])):
        records = [whole] * 500 + middle + [whole] * 500
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in records))
        argv = [
            "--input",
            tmp_path / f"{name}.jsonl",
            "--vocab-file",
            GOLDEN / "1_sft/model.model",
            "--workers",
            1,
            "-q",
        ]
        ran = train("tokenize", *argv, "--output-prefix", tmp_path / name)
        assert ran.code == 0, ran.err
        made.append(tmp_path / f"{name}_text_document")
    first, second = made
    assert bin_path(first).read_bytes() == bin_path(second).read_bytes()
    assert mask_path(first).read_bytes() != mask_path(second).read_bytes()
    assert rows(first).digest == rows(second).digest
    assert rows(first).sidecars != rows(second).sidecars


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_run_resumes_with_the_sidecar_that_it_began_with(settings, run, tmp_path, data):
    prefix, held = tmp_path / "own", tmp_path / "held"
    for kind in (bin_path, idx_path, facts_path):
        kind(prefix).write_bytes(kind(data).read_bytes())
        kind(held).write_bytes(kind(data).read_bytes())
    config = settings(data={"train": [str(prefix)], "validation": {"held": str(held)}})
    whole = run(config, save="whole")
    assert whole.code == 0, whole.out
    stopped = run(config, "--steps.exit_interval", 4)
    assert stopped.code == 75, stopped.out
    said = facts_path(prefix).read_text()
    control = json.loads(said)["control"]
    exchanged = control | {"user": control["assistant"], "assistant": control["user"]}
    edit(facts_path(prefix), control=exchanged)
    refused = run(config)
    assert refused.code == 5, refused.out
    assert "the sidecars (PREFIX.json)" in refused.out
    facts_path(prefix).write_text(said)
    saved = stopped.save / "global_step104"
    progress = json.loads((saved / ".progress").read_text())
    del progress["sidecars"]  # as an older version wrote it
    (saved / ".progress").write_text(json.dumps(progress))
    (saved / ".files").unlink()
    once = run(config, "--steps.exit_interval", 1)
    assert "global_step104 does not record the sidecars (PREFIX.json)" in once.out
    assert "data.validation has other rows" not in once.out
    edit(facts_path(held), control=exchanged)
    done = run(config)
    assert done.code == 0, done.out
    assert "global_step105 does not record" not in done.out
    assert "data.validation has other rows or masks than at global_step105" in done.out
    assert done.series("loss") == whole.series("loss")
    assert json.loads((done.save / "global_step108/.progress").read_text())["sidecars"]
