"""The coupled engine (E3): which subject serves an estimator, at what cost, and its moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from windage.estimators.estimator import Estimator
from windage.toy.exact.coupled import denominators, deviations
from windage.toy.exact.moments import Moments
from windage.toy.problems import Problem


@final
@dataclass(frozen=True, kw_only=True)
class Subject:
    """One way in which responses are coupled, and what to do about it.

    Args:
        serves: whether an estimator has it.
        plain: the estimator without it; the tree's recursions must know the rest.
        why_not: why an estimator that has it is not served here, or None.
        cost: about how many numbers are touched.
        run: the moments.
    """

    serves: Callable[[Estimator], bool]
    plain: Callable[[Estimator], Estimator]
    why_not: Callable[[Estimator], str | None]
    cost: Callable[[Estimator, Problem, int], float]
    run: Callable[[Estimator, Problem, int], Moments]


SUBJECTS = (
    Subject(
        serves=denominators.serves,
        plain=denominators.plain,
        why_not=denominators.why_not,
        cost=denominators.cost,
        run=denominators.run,
    ),
    Subject(
        serves=deviations.serves,
        plain=deviations.plain,
        why_not=deviations.why_not,
        cost=deviations.cost,
        run=deviations.run,
    ),
)
NOTHING = "no ratio couples the responses"


def option(
    estimator: Estimator,
    problem: Problem,
    group_size: int,
    recursion: Callable[[Estimator], str | None],
) -> tuple[str | None, float]:
    """Why the engine cannot, or None, and its cost; `recursion` says what trees do not know."""
    why, least = NOTHING, float("inf")
    for subject in filter(lambda s: s.serves(estimator), SUBJECTS):
        found = subject.why_not(estimator) or recursion(subject.plain(estimator))
        if found is None:
            least = min(least, subject.cost(estimator, problem, group_size))
        elif why == NOTHING:
            why = found
    return (why, 0.0) if least == float("inf") else (None, least)


def coupled(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean, variance and drift by the cheapest subject that serves the estimator."""
    valid = [s for s in SUBJECTS if s.serves(estimator) and s.why_not(estimator) is None]
    best = min(valid, key=lambda s: s.cost(estimator, problem, group_size))
    return best.run(estimator, problem, group_size)
