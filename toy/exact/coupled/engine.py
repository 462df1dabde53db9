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
    why_not: Callable[[Estimator, Problem], str | None]
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
        why_not=lambda estimator, problem: deviations.why_not(estimator),
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
    subject = _subject(estimator)
    if subject is None:
        return NOTHING, 0.0
    why = subject.why_not(estimator, problem) or recursion(subject.plain(estimator))
    return (why, 0.0) if why else (None, subject.cost(estimator, problem, group_size))


def _subject(estimator: Estimator) -> Subject | None:
    """The first that serves: a denominator comes before what stands under it."""
    return next((s for s in SUBJECTS if s.serves(estimator)), None)


def coupled(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean, variance and drift, of an estimator that `option` does not refuse."""
    subject = _subject(estimator)
    assert subject is not None
    return subject.run(estimator, problem, group_size)
