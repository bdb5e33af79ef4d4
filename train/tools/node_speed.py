"""How fast each node computes, and exchanges with its neighbours: a training waits for the slowest one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, median_low
from typing import NamedTuple

import torch
import torch.distributed as dist

from converters.common.progress import size
from train.distributed import World

REPEATS = 15
EXCHANGED = 64 * 2**20
"""Bytes that each rank sends to a neighbour, and receives from it at the same time."""


class Figures(NamedTuple):
    """Seconds of the slowest rank of a node.

    Attributes:
        node: its name, as sbatch's --exclude takes it.
        matmul: a product of two matrices, while all other ranks compute it too.
        link: an exchange with the better one of its two neighbours; 0 where there are none.
    """

    node: str
    matmul: float
    link: float


def measure(world: World) -> list[Figures]:
    """Measure all nodes. Every rank has to come here."""
    names, taken = [""] * world.ranks, [(0.0, 0.0)] * world.ranks
    dist.all_gather_object(names, os.environ.get("SLURMD_NODENAME") or socket.gethostname(), group=world.numbers)
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    dist.all_gather_object(taken, (_matmul(world), _link(world, list(nodes.values()))), group=world.numbers)
    return [
        Figures(name, *(max(figures) for figures in zip(*(taken[rank] for rank in ranks), strict=True)))
        for name, ranks in nodes.items()
    ]


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """The pairs of neighbours in a ring of nodes, in rounds in which no node is in two of them."""
    ring = [(at, (at + 1) % count) for at in range(count if count > 2 else count - 1)]
    last = ring[len(ring) - count % 2 :]
    ring = ring[: len(ring) - len(last)]
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def compare(figures: Sequence[Figures], slower: float) -> tuple[str, dict[str, str]]:
    """The usual figures, in words; and of each slow node, in words, what takes it longer.

    Args:
        figures: of all nodes.
        slower: a node is slow that takes more than so many times what the median of all nodes takes.
    """
    matmul, link = (median_low(column) for column in ([one.matmul for one in figures], [one.link for one in figures]))
    usual = f"{len(figures)}, a matmul in {matmul * 1e3:.1f} ms"
    if link:
        usual += f", {size(EXCHANGED)} to and from a neighbour in {link * 1e3:.1f} ms"
    slow = dict[str, str]()
    for node, *taken in figures:
        told = [
            f"{what} {mine * 1e3:.1f} ms, the median is {middle * 1e3:.1f} ms"
            for what, mine, middle in zip(("matmul", "link"), taken, (matmul, link), strict=True)
            if mine > slower * middle
        ]
        if told:
            slow[node] = "; ".join(told)
    return usual, slow


def _matmul(world: World) -> float:
    """Seconds of a product of two matrices."""
    cuda = world.device.type == "cuda"
    rows, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    held = torch.randn(rows, rows, dtype=dtype, device=world.device)  # zeros and ones take less power
    world.wait()
    return _seconds(world, lambda: torch.mm(held, held))


def _link(world: World, nodes: Sequence[Sequence[int]]) -> float:
    """Seconds of an exchange with the same rank of the next node or of the one before, while all nodes do that."""
    if len({len(ranks) for ranks in nodes}) > 1:
        return 0.0
    held, room = (torch.ones(EXCHANGED // 4, device=world.device) for _ in range(2))
    at = next(number for number, ranks in enumerate(nodes) if world.rank in ranks)
    taken = []
    for pairs in rounds(len(nodes)):
        world.wait()
        for pair in pairs:
            if at in pair:
                peer = nodes[sum(pair) - at][nodes[at].index(world.rank)]
                taken.append(_seconds(world, partial(_exchange, held, room, peer)))
    return min(taken, default=0.0)


def _exchange(held: torch.Tensor, room: torch.Tensor, peer: int) -> None:
    operations = [dist.P2POp(dist.isend, held, peer), dist.P2POp(dist.irecv, room, peer)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()


def _seconds(world: World, work: Callable[[], object]) -> float:
    """What some work takes: the median, so that the first time does not count."""
    taken = []
    for _ in range(REPEATS):
        began = time.monotonic()
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        taken.append(time.monotonic() - began)
    return median(taken)
