"""The arithmetic of phases: the users' own chain and names, and sums that are equal whatever the numbers are."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from itertools import groupby
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import RefusedError
from tests.data.pack_world import GOLDEN
from train.data.packs import phases
from train.data.packs.inputs import POOLS
from train.data.packs.phases import ORDER, Schedule

CHAIN = [
    ("warmup_0", 9_437_184_000, 2000, 2000),
    ("U1_1", 140_562_814_497, 29790, 31790),
    *((f"N_{k}", 165_150_720_000, 35000, 31790 + 35000 * (k - 1)) for k in range(2, 10)),
    ("N_10", 28_794_239_374, 6103, 317893),
    ("U3_11", 99_999_996_418, 21193, 339086),
    ("U3_12_cd", 165_150_720_000, 35000, 374086),
    ("U3_13_cd", 165_150_720_000, 35000, 409086),
    ("U3_14_cd", 69_698_558_573, 14772, 423858),
    ("E_15", 165_150_720_000, 35000, 458858),
    ("E_16", 34_849_279_431, 7386, 466244),
]
"""Pack, tokens, train_iters, end step of the users' 30B run, whose checkpoints are called global_step339086 (where the
cool-down began) and global_step423858 (the last one)."""
PHASES = ("U1", "U2", "N", "U3", "Ext")
SMALL = {case["case"]: case for case in json.loads((GOLDEN / "6_packs/small/cases.json").read_text())}
REAL = json.loads((GOLDEN / "6_packs/real_size.json").read_text())


def pools_of(totals: dict[str, list[float]]) -> dict[str, phases.Pool]:
    parts = {name: zip(*(totals[phase] for phase in of), strict=True) for name, of in POOLS.items()}
    return {name: phases.pool([sum(map(Fraction, row)) for row in rows]) for name, rows in parts.items()}


def schedule_of(flags: dict[str, int]) -> Schedule:
    return Schedule(flags["tpi"], flags["wu"], flags["cd"], flags["mx"])


@pytest.fixture(scope="module")
def real() -> tuple[list[str], dict[str, phases.Pool]]:
    head, *rows = [line.split("\t") for line in (GOLDEN / "6_packs/totals.tsv").read_text().splitlines()]
    totals = {phase: [float(row[i]) for row in rows] for i, phase in enumerate(head) if i}
    return [row[0] for row in rows], pools_of(totals)


def test_the_chain_of_the_real_run(real):
    schedule = schedule_of(REAL["flags"])
    packs = phases.packs(real[1], schedule)
    ends = phases.ends(packs, schedule)
    chain = [(pack.name, pack.tokens, pack.steps(schedule), end) for pack, end in zip(packs, ends, strict=True)]
    assert chain == CHAIN
    assert [pack.phase for pack in packs] == REAL["phases"]
    assert [pack.tokens for pack in packs] == [floor(total + 0.5) for total in REAL["pack_totals"]]
    phases.sums(packs, real[1])


def test_the_names_of_the_real_run(real):
    """All 1717, by the hash of what data_packs_make.py computed; and no target is a token away from what it wants."""
    packs = phases.packs(real[1], schedule_of(REAL["flags"]))
    named = {name: [pack.named[i] for pack in packs] for i, name in enumerate(real[0])}
    assert hashlib.sha256(json.dumps(named).encode()).hexdigest() == REAL["int_tokens_sha256_of_all"]
    assert named["arxiv1"][:2] == [933600, 13905583], "as document 002 has them"
    for name, expected in REAL["tokens_of_some_names"].items():
        targets = [pack.targets[real[0].index(name)] for pack in packs]
        assert all(abs(target - want) < 2 for target, want in zip(targets, expected, strict=True))
        assert abs(sum(targets) - sum(expected)) < 2


def world_of(case: str) -> tuple[list[str], dict[str, phases.Pool], Schedule]:
    """Names, pools and schedule of a run of the users' tool."""
    content = json.loads((GOLDEN / "6_packs/small" / SMALL[case]["slices_json"]).read_text())
    totals = {phase: content[phase]["total"] for phase in PHASES}
    return content["names"], pools_of(totals), schedule_of(SMALL[case]["flags"])


def yamls_of(case: str, kind: str) -> dict[str, list[object]]:
    """Data set, and what tokens.yaml or slices.yaml has of it."""
    written = [content for path, content in SMALL[case]["files"].items() if path.endswith(f"/{kind}.yaml")]
    return {name: row for content in written for name, row in content.items()}


@pytest.mark.parametrize("case", [name for name, case in SMALL.items() if case["files"]])
def test_packs_and_names_of_the_users_tool(case):
    names, pools, schedule = world_of(case)
    packs, tokens = phases.packs(pools, schedule), yamls_of(case, "tokens")
    for row in yamls_of(case, "slices").values():
        numbers = [i for i in range(len(row)) if any(counts[i] for counts in tokens.values())]
        assert [pack.phase for pack in packs] == [row[i] for i in numbers], "but for theirs without tokens"
        if len(numbers) == len(row):
            assert [pack.number for pack in packs] == numbers
    for name, row in tokens.items():
        assert [pack.named[names.index(name)] for pack in packs] == [int(row[i]) for i in numbers]


@pytest.mark.parametrize(
    ("case", "numbers"),
    [
        ("fail_short_u1", ["10,240 tokens (10 steps of 1,024 tokens) from U1, which has 6,000"]),
        ("fail_short_u3", ["108,002 tokens (20 % of 540,006) from U3, which has 60,000", "--cd-phase 11"]),
        ("fail_warmup_over_pack", ["102,400 tokens", "65,536 at most", "--max-tokens-per-pack 102400"]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(case, numbers):
    _, pools, schedule = world_of(case)
    with pytest.raises(RefusedError) as error:
        phases.packs(pools, schedule)
    assert error.value.exit_code == 5
    for number in numbers:
        assert number in f"{error.value} {error.value.hint}"


def test_the_hint_about_the_cool_down_holds():
    pools = {name: phases.pool([Fraction(total)]) for name, total in [("U1", 500), ("N", 371), ("U3", 129), ("E", 0)]}
    with pytest.raises(RefusedError) as error:
        phases.packs(pools, Schedule(1, 10, 13, 100))
    most = int(error.value.hint.split()[1])
    assert most == 12
    assert phases.packs(pools, Schedule(1, 10, most, 100))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, phases.Pool], Schedule]:
    count = draw(st.integers(1, 6))
    values = st.one_of(st.just(0.0), st.integers(0, 5).map(float), st.floats(0, 30), st.floats(0, 1e5))
    pools = {name: phases.pool([Fraction(draw(values)) for _ in range(count)]) for name in POOLS}
    total = sum(pool.total for pool in pools.values())
    most = draw(st.integers(1 + total // 40, 10 + total))
    return pools, Schedule(draw(st.integers(1, 100)), draw(st.integers(0, 20)), draw(st.integers(0, 40)), most)


@settings(max_examples=600, deadline=None)
@given(worlds())
def test_all_sums_are_equal(world):
    pools, schedule = world
    try:
        packs = phases.packs(pools, schedule)
    except RefusedError:
        warmup = schedule.tokens_per_iter * schedule.warmup_iters
        train = sum(pools[name].total for name in ("U1", "N", "U3"))
        down = train * schedule.cool_down // 100 + 1
        short = warmup > schedule.most or warmup >= pools["U1"].total or down > pools["U3"].total
        assert short or not any(pool.total for pool in pools.values())
        return
    phases.sums(packs, pools)
    assert [pack.phase for pack in packs] == sorted((pack.phase for pack in packs), key=list(ORDER).index)
    assert [pack.number for pack in packs if pack.phase != "warmup"] == list(range(1, len(packs) + 1))[
        : sum(pack.phase != "warmup" for pack in packs)
    ]
    for phase, own in groupby(packs, key=lambda pack: pack.phase):
        *full, rest = own
        assert all(pack.tokens == schedule.most for pack in full)
        assert 0 < rest.tokens <= schedule.most
        assert phase != "warmup" or not full
    assert all(min(pack.targets) >= 0 for pack in packs)
    for pool in pools.values():
        assert abs(pool.total - sum(pool.requested)) <= Fraction(1, 2)
        assert all(abs(total - share) < 1 for total, share in zip(pool.totals, pool.requested, strict=True))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8).filter(any), st.data())
def test_rounding_never_accumulates(totals, data):
    """However many packs: no data set is ever two tokens ahead of its share."""
    pool = phases.pool([Fraction(total) for total in totals])
    most = data.draw(st.integers(1 + pool.total // 50, 1 + pool.total))
    pools = {"U1": pool, **{name: phases.pool([Fraction(0)] * len(totals)) for name in ("N", "U3", "E")}}
    packs = phases.packs(pools, Schedule(1, 0, 0, most))
    assert len(packs) == ceil(pool.total / most)
    given_, upto = [0] * len(totals), 0
    for pack in packs:
        upto += pack.tokens
        given_ = [had + target for had, target in zip(given_, pack.targets, strict=True)]
        shares = [Fraction(total * upto, pool.total) for total in totals]
        assert all(had - share < 2 for had, share in zip(given_, shares, strict=True))
    assert tuple(given_) == pool.totals
