"""A conversion in four processes, on any nodes, then the one that finishes: `parts_on_nodes.py SRC OUT`."""

import sys
from concurrent.futures import ProcessPoolExecutor

import vitruvian

SRC, OUT = sys.argv[1:]


def part(number: int) -> int:
    """One of four."""
    return vitruvian.convert_part(SRC, OUT, (number, 4), to="fsdp", ranks=4).tensors


if __name__ == "__main__":
    with ProcessPoolExecutor(4) as pool:
        print("tensors of each part:", list(pool.map(part, range(1, 5))))
    print(vitruvian.convert(SRC, OUT, to="fsdp", ranks=4).digest)
