"""Figures of an evaluation: exact over subsets of the samples, with intervals over the questions.

Questions are the independent draws, responses to one question are not: every interval is about the
mean over questions like those that were asked, however many responses each had.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from windage.estimators.errors import BadInput, within

LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and the limits of its interval at the level 95 %; without limits where there are none.

    Example:
        >>> Interval(0.5, 0.4, 0.6).mean
        0.5
    """

    mean: float
    low: float | None
    high: float | None


def pass_at(correct: int, samples: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a right one.

        1 - C(n - c, k) / C(n, k)

    Claims:
        Unbiased for the chance that k fresh samples hold a right one.

    Args:
        correct: c, right samples.
        samples: n of them.
        k: from 1 to n.

    References:
        Chen et al., 2021, arXiv:2107.03374.

    Example:
        >>> [pass_at(correct, 4, 2) for correct in (0, 1, 4)]
        [0.0, 0.5, 1.0]
    """
    within(1, samples, k=k)
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


@lru_cache(maxsize=1 << 16)
def majority_at(right: int, wrong: tuple[int, ...], samples: int, k: int) -> float:
    """Chance that the right answer wins the vote of k of the samples, drawn without replacement.

        sum over v >= 1, j of  C(m, v) W(v, j) / (1 + j) / C(n, k)

    with W(v, j) the ways to draw the other k - v samples such that no wrong answer has more than v
    votes and j of them have v: an answer that ties wins its part of the draws.

    Claims:
        With k = 1: the share of right samples.
        With k = n: 1, 0, or a part where the right answer ties.

    Args:
        right: m, samples with the right answer.
        wrong: samples with each wrong answer; the rest have no answer and do not vote.
        samples: n of them.
        k: votes, from 1 to n.

    Example:
        >>> majority_at(2, (2,), 5, 5), majority_at(2, (1, 1), 5, 1)
        (0.5, 0.4)
    """
    within(1, samples, k=k)
    ways: Counter[int] = Counter()
    for votes in range(1, min(right, k) + 1):
        rivals = [m for m in wrong if m >= votes]
        others = samples - right - sum(rivals)
        for (used, ties), count in _drawn(rivals, votes, k - votes).items():
            ways[ties] += math.comb(right, votes) * count * math.comb(others, k - votes - used)
    most = math.lcm(*(1 + ties for ties in ways)) if ways else 1
    total = sum(count * (most // (1 + ties)) for ties, count in ways.items())
    return total / (most * math.comb(samples, k))


def _drawn(rivals: Sequence[int], votes: int, left: int) -> Counter[tuple[int, int]]:
    """Ways to draw up to `votes` of each rival, by samples used and rivals that tie."""
    found: Counter[tuple[int, int]] = Counter({(0, 0): 1})
    for size in rivals:
        more: Counter[tuple[int, int]] = Counter()
        for (used, ties), count in found.items():
            for taken in range(min(votes, left - used) + 1):
                key = (used + taken, ties + (taken == votes))
                more[key] += count * math.comb(size, taken)
        found = more
    return found


def share(values: Sequence[float], samples: int) -> Interval:
    """The mean of shares, one a question, with an interval that stays between 0 and 1.

    Wilson's interval with Student's quantile for Q - 1 questions and the number N of independent
    trials that have the variance which the shares show:

        N = p (1 - p) Q / s^2,  at most Q n,  and Q where every share is 0 or every share is 1

    Unlike the mean plus or minus standard errors, which is as narrow as nothing where no question
    was answered, it covers near 0 and 1 too.

    Args:
        values: from 0 to 1.
        samples: n responses behind each.

    Raises:
        BadInput: no question.

    References:
        Korn and Graubard, 1998, Survey Methodology 24(2).
    """
    count = len(values)
    if not count:
        raise BadInput("there is no question; allowed: one or more")
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, None, None)
    spread = _variance(values, mean)
    trials = float(count)
    if 0 < mean < 1:
        most = float(count * samples)
        trials = most if spread == 0 else min(most, mean * (1 - mean) * count / spread)
    square = _quantile(count - 1) ** 2 / trials
    middle = (mean + square / 2) / (1 + square)
    half = math.sqrt(square * mean * (1 - mean) + square**2 / 4) / (1 + square)
    return Interval(mean, max(0.0, middle - half), min(1.0, middle + half))


def average(values: Sequence[float]) -> Interval:
    """The mean of numbers, one a question, plus or minus Student's standard errors."""
    count = len(values)
    if not count:
        raise BadInput("there is no question; allowed: one or more")
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, None, None)
    half = _quantile(count - 1) * math.sqrt(_variance(values, mean) / count)
    return Interval(mean, mean - half, mean + half)


def difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The mean of second minus first, question by question, each a share.

    Student's interval, its variance that of the differences and of one more question either way,
    as large as the largest difference seen (1 where none was): where few questions differ, or none,
    the rest of their kind is not taken for certain.

    Args:
        first, second: of the same questions in the same order.
    """
    values = [b - a for a, b in zip(first, second, strict=True)]
    found = average(values)
    if found.low is None:
        return found
    count = len(values)
    largest = max(map(abs, values)) or 1.0
    square = _variance(values, found.mean) * (count - 1) + largest**2
    half = _quantile(count - 1) * math.sqrt(square) / count
    return Interval(found.mean, max(-1.0, found.mean - half), min(1.0, found.mean + half))


def sign_test(better: int, worse: int) -> float:
    """Chance of so uneven a split of the questions that differ, or a more uneven one.

    Each of them is better or worse with even chance: with one response a question this is the
    exact form of McNemar's test.

    Example:
        >>> sign_test(5, 0), sign_test(3, 3), sign_test(0, 0)
        (0.0625, 1.0, 1.0)
    """
    count = better + worse
    tail = sum(math.comb(count, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**count)


def _variance(values: Sequence[float], mean: float) -> float:
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


@lru_cache(maxsize=64)
def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + LEVEL) / 2, freedom))
