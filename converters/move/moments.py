"""What moments cannot be: NaN or infinite, and Adam's second, a mean of squares, negative.

A training that is resumed with such moments writes NaN into its weights at the next step. What is only read, for a
digest or a comparison, may be anything.
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
"""What no element of a state is less than."""
RULES = {
    FIRST: "the first moments of Adam and Lion are finite",
    SECOND: "Adam's second moments are finite and not negative",
    MOMENTUM: "Muon's momentum is finite",
}


class Moments:
    """The elements of one job's tensor that no optimizer computes.

    Attributes:
        state: which of the moments is moved; empty where it is none, or need not be possible.
        count: how many such elements there were.
        first: the first of them.
    """

    def __init__(self, job: Job, accepted: tuple[str, ...]) -> None:
        state = job.state.partition(".")[0]
        judged = state in LEAST and state not in accepted and job.dtype in FLOATS
        self.state = state if job.targets and judged else ""
        self.job, self.count, self.first = job, 0, 0.0

    def see(self, values: Array) -> None:
        """Count those in a tile."""
        for start in range(0, len(values) if self.state else 0, PIECE):
            piece = casts.to_float(values[start : start + PIECE], self.job.dtype)
            if -np.inf < piece.min() >= LEAST[self.state] and piece.max() < np.inf:  # nothing holds of a NaN
                continue
            wrong = piece[~(np.isfinite(piece) & (piece >= LEAST[self.state]))]
            self.first = self.first if self.count else float(wrong[0])
            self.count += len(wrong)

    def judge(self) -> None:
        """Refuse the tensor.

        Raises:
            RefusedError: there were such elements.
        """
        if self.count:
            raise RefusedError(
                f"{self.job.label} in {self.job.sources[0].fragment.path} holds {self.first:g}, and {self.count} of "
                f"{prod(self.job.shape)} elements are such: {RULES[self.state]}",
                "the training has diverged, or the two moments are exchanged: take an earlier checkpoint; "
                f"--accept {self.state} takes them as they are",
            )
