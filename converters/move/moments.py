"""Refuse impossible moments: NaN or infinity, and negative second moments of Adam, which are means of squares.

A training that is resumed with such moments writes NaN into its weights at the next step. Moments that are only read,
for a digest or a comparison, are not judged.
"""

from __future__ import annotations

from math import prod

import numpy as np

from converters.move import casts
from converters.move.casts import PIECE, Array
from converters.plan.plan import Job
from formats.disk.safetensors import FLOATS
from formats.errors import RefusedError
from formats.model.accepted import FIRST, MOMENTUM, SECOND

LEAST = {FIRST: -np.inf, SECOND: 0.0, MOMENTUM: -np.inf}
"""Optimizer state: the least value that its elements can have."""
RULES = {
    FIRST: "the first moments of Adam and Lion are finite",
    SECOND: "Adam's second moments are finite and not negative",
    MOMENTUM: "Muon's momentum is finite",
}


class Moments:
    """The elements of one job's tensor that no optimizer computes.

    Attributes:
        state: the optimizer state that is judged, also where it is written in place of weights; empty where the tensor
            is no moment, or is not judged.
        count: how many such elements there were.
        first: the first of them.
    """

    def __init__(self, job: Job, accepted: tuple[str, ...]) -> None:
        state = job.state.partition(".")[0] or job.moment
        judged = state in LEAST and state not in accepted and job.dtype in FLOATS
        self.state = state if job.targets and judged else ""
        self.job, self.count, self.first = job, 0, 0.0

    def see(self, values: Array) -> None:
        """Count the impossible elements of a tile."""
        for start in range(0, len(values) if self.state else 0, PIECE):
            piece = casts.to_float(values[start : start + PIECE], self.job.dtype)
            if -np.inf < piece.min() >= LEAST[self.state] and piece.max() < np.inf:  # false with a NaN
                continue
            wrong = piece[~(np.isfinite(piece) & (piece >= LEAST[self.state]))]
            self.first = self.first if self.count else float(wrong[0])
            self.count += len(wrong)

    def judge(self) -> None:
        """Refuse the tensor if a tile had an impossible element.

        Raises:
            RefusedError: there was such an element.
        """
        if self.count:
            raise RefusedError(
                f"{self.job.label} in {self.job.sources[0].fragment.path} holds {self.first:g}, and {self.count} of "
                f"{prod(self.job.shape)} elements are such: {RULES[self.state]}",
                "the training has diverged, or the two moments are exchanged: take an earlier checkpoint; "
                f"--accept {self.state} takes them as they are",
            )
