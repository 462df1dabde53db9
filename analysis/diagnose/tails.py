"""The tail of importance weights: how many moments their distribution has.

The largest weights follow a generalized Pareto law with shape k: below 1/2 their variance is
finite, below 1 their mean.  A stream keeps only the tail, which arviz-stats would cut out of all
weights at once; the fit is the same, and a test holds it to arviz-stats.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np
from jaxtyping import Float

FEWEST = 20
PRIOR, TOWARDS = 10, 0.5


def tail_length(count: int) -> int:
    """How many of the largest weights make the tail: the lesser of a fifth and 3 sqrt(n)."""
    return int(min(0.2 * count, 3 * math.sqrt(count)))


def threshold(count: int) -> float:
    """The shape up to which so many weights give a mean that can be trusted.

        min(1 - 1 / log10(n), 0.7)

    References:
        Vehtari et al., 2024, arXiv:1507.02646.

    Example:
        >>> threshold(1_000), threshold(10**6)
        (0.6666666666666667, 0.7)
    """
    return min(1 - 1 / math.log10(max(count, 11)), 0.7)


def shape(excess: Float[np.ndarray, " n"]) -> float:
    """Shape of a generalized Pareto law, by the posterior mean of Zhang and Stephens.

        k shrunk by a prior of 10 observations at 1/2

    Args:
        excess: over the cut, ascending and above 0.

    References:
        Zhang and Stephens, 2009, Technometrics 51(3).
    """
    n = len(excess)
    points = 30 + int(math.sqrt(n))
    quartile = excess[int(n / 4 + 0.5) - 1]
    b = 1 / excess[-1] + (1 - np.sqrt(points / (np.arange(1, points + 1) - 0.5))) / (3 * quartile)
    k = np.log1p(-b[:, None] * excess).mean(1)
    likelihood = n * (np.log(-b / k) - k - 1)
    weights = np.exp(likelihood - likelihood.max())
    b_mean = float((b * weights).sum() / weights.sum())
    found = float(np.log1p(-b_mean * excess).mean())
    return (n * found + PRIOR * TOWARDS) / (n + PRIOR)


@final
class Tail:
    """The largest log-weights of a stream.

    Args:
        most: of them to keep; the tail of (most / 3)^2 weights at least.
    """

    def __init__(self, most: int = 1 << 15) -> None:
        self.most, self.count = most, 0
        self.held = np.zeros(0)

    def add(self, logs: Float[np.ndarray, " N"]) -> None:
        """Look at some more."""
        self.count += len(logs)
        self.held = np.concatenate([self.held, logs])
        if len(self.held) > 2 * self.most:
            self._cut()

    def _cut(self) -> None:
        if len(self.held) > self.most + 1:
            cut = len(self.held) - self.most - 1
            self.held = np.partition(self.held, cut)[cut:]

    def shape(self) -> float | None:
        """Shape k of the tail; None where there are too few weights, or they do not differ."""
        size = min(tail_length(self.count), self.most)
        if size < FEWEST / 4 or self.count < FEWEST:
            return None
        self._cut()
        order = np.sort(self.held)[-(size + 1) :]
        order = np.exp(np.maximum(order - order[-1], -700.0))
        excess = order[1:] - order[0]
        excess = excess[excess > 0]
        if len(excess) < FEWEST / 4 or excess[int(len(excess) / 4 + 0.5) - 1] <= 0:
            return None
        found = shape(excess)
        return found if math.isfinite(found) else None
