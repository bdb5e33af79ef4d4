"""Measures the speed of each node's matmul and of its links to neighbours: a training waits for the slowest node."""

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
"""Number of bytes that each rank sends to a neighbour, and receives from that neighbour at the same time."""


class Figures(NamedTuple):
    """Times of a node, in seconds, each of the node's slowest rank.

    Attributes:
        node: name of the node, as sbatch's --exclude takes it.
        matmul: time of a product of two matrices, while all other ranks compute the same product.
        link: time of an exchange with the faster of the node's two neighbours; 0 where there are none.
    """

    node: str
    matmul: float
    link: float


def measure(world: World) -> list[Figures]:
    """Measure all nodes. Collective: all ranks call it."""
    names, measured = [""] * world.ranks, [(0.0, 0.0)] * world.ranks
    dist.all_gather_object(names, os.environ.get("SLURMD_NODENAME") or socket.gethostname(), group=world.numbers)
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    dist.all_gather_object(measured, (_matmul(world), _link(world, list(nodes.values()))), group=world.numbers)
    return [
        Figures(name, *(max(figures) for figures in zip(*(measured[rank] for rank in ranks), strict=True)))
        for name, ranks in nodes.items()
    ]


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """The pairs of neighbours in a ring of nodes, grouped into rounds in which each node is in at most one pair."""
    ring = [(at, (at + 1) % count) for at in range(count if count > 2 else count - 1)]
    last = ring[len(ring) - count % 2 :]
    ring = ring[: len(ring) - len(last)]
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def compare(figures: Sequence[Figures], slower: float) -> tuple[str, dict[str, str]]:
    """The median figures as text; and for each slow node, by its name, a text that names what takes longer.

    Args:
        figures: figures of all nodes.
        slower: a node is slow if it takes more than this many times the median of all nodes.
    """
    matmul, link = (
        median_low(column)
        for column in (
            [node_figures.matmul for node_figures in figures],
            [node_figures.link for node_figures in figures],
        )
    )
    usual = f"{len(figures)}, a matmul in {matmul * 1e3:.1f} ms"
    if link:
        usual += f", {size(EXCHANGED)} to and from a neighbour in {link * 1e3:.1f} ms"
    slow = dict[str, str]()
    for node, *figures_of_node in figures:
        reasons = [
            f"{what} {mine * 1e3:.1f} ms, the median is {middle * 1e3:.1f} ms"
            for what, mine, middle in zip(("matmul", "link"), figures_of_node, (matmul, link), strict=True)
            if mine > slower * middle
        ]
        if reasons:
            slow[node] = "; ".join(reasons)
    return usual, slow


def _matmul(world: World) -> float:
    """Time of a product of two matrices, in seconds."""
    cuda = world.device.type == "cuda"
    rows, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    matrix = torch.randn(
        rows, rows, dtype=dtype, device=world.device
    )  # zeros and ones draw less power, so clocks would differ
    world.wait()
    return _seconds(world, lambda: torch.mm(matrix, matrix))


def _link(world: World, nodes: Sequence[Sequence[int]]) -> float:
    """Time of an exchange with the same local rank of a neighbour node, while all nodes exchange, in seconds."""
    if len({len(ranks) for ranks in nodes}) > 1:
        return 0.0
    sent, received = (torch.ones(EXCHANGED // 4, device=world.device) for _ in range(2))
    at = next(number for number, ranks in enumerate(nodes) if world.rank in ranks)
    seconds = []
    for pairs in rounds(len(nodes)):
        world.wait()
        for pair in pairs:
            if at in pair:
                peer = nodes[sum(pair) - at][nodes[at].index(world.rank)]
                seconds.append(_seconds(world, partial(_exchange, sent, received, peer)))
    return min(seconds, default=0.0)


def _exchange(sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()


def _seconds(world: World, work: Callable[[], object]) -> float:
    """Median time of some work, in seconds; the median ignores the warm-up."""
    seconds = []
    for _ in range(REPEATS):
        began = time.monotonic()
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds.append(time.monotonic() - began)
    return median(seconds)
