"""The arithmetic of phases and packs: exact, and without files.

A pre-training runs through the phases of `ORDER`. Its tokens come from four pools: U1 (the warm-up is its beginning), N
(which includes U2), U3 (the cool-down is its end) and E. Facts: tilde-nlp/llm-gpt-neox at 374a5c6, data_packs_make.py,
which computes in floats. Here the tokens of a pool are rounded once, to the nearest integer of their exact sum; the
tokens of its data sets are rounded down, and the largest remainders get the remaining tokens. From there on all numbers
are integers, and all sums are equal by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import floor

from formats.errors import RefusedError, UsageError

ORDER = {"warmup": "U1", "U1": "U1", "N": "N", "U3": "U3", "U3_cd": "U3", "E": "E"}
"""Phase: the pool that its tokens come from."""
FOLDERS = {"U3_cd": "U3_{}_cd"}
"""Phase: the name of its packs, where that is not PHASE_NUMBER."""

MANY = 10_000
"""Maximum number of packs of a phase."""


@dataclass(frozen=True)
class Schedule:
    """How the pools are cut into packs.

    Attributes:
        tokens_per_iter: number of tokens of a training step.
        warmup_iters: number of steps of the warm-up.
        cool_down: percentage of the tokens of U1, N and U3 together that the cool-down takes.
        most: maximum number of tokens of a pack.
    """

    tokens_per_iter: int
    warmup_iters: int
    cool_down: int
    most: int


@dataclass(frozen=True)
class Pool:
    """The tokens that some phases share.

    Attributes:
        requested: number of tokens of each data set, as in the slices json.
        total: number of tokens of all data sets, rounded.
        totals: number of tokens of each data set, rounded; their sum is `total`.
    """

    requested: tuple[Fraction, ...]
    total: int
    totals: tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """A planned pack.

    Attributes:
        number: its position in the training; the warm-up is 0.
        phase: one of `ORDER`.
        tokens: target number of tokens.
        targets: target number of tokens of each data set; their sum is `tokens`.
        named: the number of tokens that stands in the file name of each data set: the exact target, truncated.
    """

    number: int
    phase: str
    tokens: int
    targets: tuple[int, ...] = ()
    named: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name of the pack's folder."""
        return FOLDERS.get(self.phase, self.phase + "_{}").format(self.number)

    def steps(self, schedule: Schedule) -> int:
        """Number of steps to train on the pack, `train_iters`; the last step may be incomplete."""
        return -(-self.tokens // schedule.tokens_per_iter)


def largest_remainders(shares: Sequence[Fraction], total: int) -> tuple[int, ...]:
    """Non-negative integers near the shares, which add up to a total; the shares add up to about that total.

    Each share is rounded down, to zero if it is negative. Missing units go to the largest remainders, ties in order;
    excess units are taken from the smallest remainders.
    """
    rounded = [max(0, floor(share)) for share in shares]
    missing = total - sum(rounded)
    order = sorted(range(len(shares)), key=lambda i: rounded[i] - shares[i])
    for i in order[: max(0, missing)]:
        rounded[i] += 1
    while missing < 0:
        i = min((i for i in order if rounded[i]), key=lambda i: shares[i] - rounded[i])
        rounded[i] -= 1
        missing += 1
    return tuple(rounded)


def pool(requested: Sequence[Fraction]) -> Pool:
    """A pool whose numbers of tokens are rounded from the requested ones."""
    total = floor(sum(requested, Fraction(0)) + Fraction(1, 2))
    return Pool(tuple(requested), total, largest_remainders(requested, total))


def packs(pools: dict[str, Pool], schedule: Schedule) -> tuple[Pack, ...]:
    """The packs of a training, in its order.

    Args:
        pools: the pools of `ORDER`, by name, with the same data sets in the same order.
        schedule: how the pools are cut.

    Raises:
        RefusedError: the warm-up or the cool-down does not fit its pool or a pack, or the pools have no tokens.
    """
    pack_list: list[Pack] = []
    for phase, tokens in _phases(pools, schedule).items():
        number = 0 if phase == "warmup" else 1 + sum(pack.phase != "warmup" for pack in pack_list)
        pack_list += [Pack(number + i, phase, part) for i, part in enumerate(cut(tokens, schedule.most))]
    return tuple(_with_targets(pack_list, pools))


def _phases(pools: dict[str, Pool], schedule: Schedule) -> dict[str, int]:
    """Number of tokens of each phase."""
    train = sum(pools[name].total for name in ("U1", "N", "U3"))
    warmup = schedule.tokens_per_iter * schedule.warmup_iters
    down = train * schedule.cool_down // 100 + 1 if schedule.cool_down and train else 0
    first, last = pools["U1"].total, pools["U3"].total
    if not any(source_pool.total for source_pool in pools.values()):
        raise RefusedError("the slices json asks for no tokens at all")
    steps = f"{schedule.warmup_iters:,} steps of {schedule.tokens_per_iter:,} tokens"
    if warmup > schedule.most:
        raise RefusedError(
            f"the warm-up takes {warmup:,} tokens ({steps}) and is one pack, which holds {schedule.most:,} at most",
            f"--max-tokens-per-pack {warmup}, or fewer --warmup-iters",
        )
    if warmup and warmup >= first:
        raise RefusedError(
            f"the warm-up takes {warmup:,} tokens ({steps}) from U1, which has {first:,}", "fewer --warmup-iters"
        )
    if down > last:
        raise RefusedError(
            f"the cool-down takes {down:,} tokens ({schedule.cool_down} % of {train:,}) from U3, which has {last:,}",
            f"--cd-phase {max(0, (last * 100 - 1) // train)} is the most that U3 is enough for",
        )
    return {
        "warmup": warmup, "U1": first - warmup, "N": pools["N"].total,
        "U3": last - down, "U3_cd": down, "E": pools["E"].total,
    }  # fmt: skip


def cut(tokens: int, most: int) -> list[int]:
    """The sizes of a phase's packs: full packs, then one with the rest, if there is any.

    Raises:
        UsageError: the phase has too many packs.
    """
    full, rest = divmod(tokens, most)
    if full > MANY:
        raise UsageError(
            f"{tokens:,} tokens are {full:,} packs of {most:,} tokens: more than {MANY:,} of a phase",
            "a larger --max-tokens-per-pack",
        )
    return [most] * full + ([rest] if rest else [])


def _with_targets(pack_list: Sequence[Pack], pools: dict[str, Pool]) -> list[Pack]:
    """The packs, with the number of tokens that each takes of each data set."""
    taken_of = {name: (0, (0,) * len(source_pool.totals)) for name, source_pool in pools.items()}
    last = {pack.phase: pack.number for pack in pack_list}
    done = []
    for pack in pack_list:
        source = ORDER[pack.phase]
        source_pool, (before, given_before) = pools[source], taken_of[source]
        targets = take(source_pool, before + pack.tokens, given_before, pack.tokens)
        taken_of[source] = before + pack.tokens, tuple(map(sum, zip(given_before, targets, strict=True)))
        whole = pack.phase not in ("warmup", "U3_cd") and last[pack.phase] == pack.number
        named = names_of(source_pool, pack.tokens, whole)
        done.append(Pack(pack.number, pack.phase, pack.tokens, targets, named))
    return done


def take(source_pool: Pool, upto: int, given_before: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The tokens that a pack takes of each data set, so that each set has given its share of the first `upto` tokens.

    Shares count from the beginning of the pool, so the rounding of one pack is corrected in the next, and the last pack
    takes everything that is left.
    """
    shares = [
        Fraction(total * upto, source_pool.total) - share_before
        for total, share_before in zip(source_pool.totals, given_before, strict=True)
    ]
    return largest_remainders(shares, tokens)


def names_of(source_pool: Pool, tokens: int, last: bool) -> tuple[int, ...]:
    """The numbers of tokens in file names: computed from the unrounded pool and pack, each truncated.

    Only the last pack of a phase has a fraction of a token, which is that of the pool.
    """
    exact = sum(source_pool.requested, Fraction(0))
    size = tokens + (exact - source_pool.total if last else 0)
    return tuple(floor(size * share / exact) for share in source_pool.requested)


def ends(pack_list: Sequence[Pack], schedule: Schedule) -> list[int]:
    """The training step at which each pack is used up."""
    return list(accumulate(pack.steps(schedule) for pack in pack_list))


def sums(pack_list: Sequence[Pack], pools: dict[str, Pool]) -> dict[str, int]:
    """The number of tokens of all packs of each pool, recounted by packs and by data sets.

    Raises:
        RuntimeError: the numbers differ from those of the pool.
    """
    counted = {}
    for name, source_pool in pools.items():
        own = [pack for pack in pack_list if ORDER[pack.phase] == name]
        sets = tuple(sum(pack.targets[i] for pack in own) for i in range(len(source_pool.totals)))
        counted[name] = sum(pack.tokens for pack in own)
        if (
            counted[name] != source_pool.total
            or sets != source_pool.totals
            or any(sum(p.targets) != p.tokens for p in own)
        ):
            raise RuntimeError(f"the packs of {name} have {counted[name]} tokens, {sum(sets)} by data sets")
    return counted
