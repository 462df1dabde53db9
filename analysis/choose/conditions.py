"""The conditions under which document 002 changes its starting point, computed for a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from windage.analysis.choose.choice import Cell, cells, refills
from windage.analysis.choose.request import Request
from windage.estimators.estimator import Estimator

ENOUGH = 0.95
Gains = tuple[float, float]


@final
@dataclass(frozen=True, kw_only=True)
class Condition:
    """A statement of the document, and the two gains that decide it.

    Args:
        says: the statement.
        compares: what the first gain is of, and what the second.
        of: the two gains, from the request, the recipe that is first, and all recipes.
        agrees: whether the first gain bears the statement out beside the second.
    """

    says: str
    compares: tuple[str, str]
    of: Callable[[Request, Estimator, Mapping[str, Estimator]], Gains]
    agrees: Callable[[float, float], bool]


def top(request: Request, estimator: Estimator, start: str = "") -> float:
    """Best gain of a recipe over the ways whose names start so."""
    found = cells(request, [estimator])
    return max(each.gain for each in found if each.way.startswith(start))


def simple(request: Request, first: Estimator, _: Mapping[str, Estimator]) -> Gains:
    """In step against the best way, where lengths, weights and samplers agree."""
    even = replace(request, spread=0.0, mismatch=0.0, sync_seconds=0.0)
    return top(even, first, "synchronous"), top(even, first)


def late(request: Request, first: Estimator, _: Mapping[str, Estimator]) -> Gains:
    """A small bound on the lag against a large one, where policies move fast."""
    fast = replace(request, drift=min(0.1, 100 * request.drift))
    ends = f"asynchronous, capacity {1}", f"asynchronous, capacity {8}"
    return top(fast, first, ends[0]), top(fast, first, ends[1])


def small_groups(request: Request, first: Estimator, _: Mapping[str, Estimator]) -> Gains:
    """Half the group size with twice the prompts, where responses are long."""
    long = replace(request, response_tokens=min(65_536, 4 * request.response_tokens))
    half = replace(long, group_size=max(2, long.group_size // 2), prompts=2 * long.prompts)
    return top(half, first), top(long, first)


def refilled(request: Request, first: Estimator, recipes: Mapping[str, Estimator]) -> Gains:
    """Groups that vary, drawn anew, against all groups, where few answers are right."""
    rare = replace(request, pass_rate=0.05)
    entry = next((e for e in recipes.values() if refills(e)), first)
    return top(rare, entry), top(rare, replace(entry, admission=()))


CONDITIONS = (
    Condition(
        says="With little synchronization cost or mismatch a simpler pipeline may be sufficient.",
        compares=("synchronous", "the best way"),
        of=simple,
        agrees=lambda first, second: first >= ENOUGH * second,
    ),
    Condition(
        says="With substantial policy lag refresh weights more often or queue less.",
        compares=("capacity 1", "capacity 8"),
        of=late,
        agrees=lambda first, second: first > second,
    ),
    Condition(
        says="With long or costly rollouts compare smaller groups.",
        compares=("half the group size", "the group size"),
        of=small_groups,
        agrees=lambda first, second: first > second,
    ),
    Condition(
        says="With many zero-advantage groups dynamic sampling can improve the batch, at a cost.",
        compares=("groups drawn anew", "all groups"),
        of=refilled,
        agrees=lambda first, second: first > second,
    ),
)


def judge(
    condition: Condition,
    request: Request,
    order: Cell,
    recipes: Mapping[str, Estimator],
    advance: Callable[[], None],
) -> dict[str, Any]:
    """The two gains, and whether they agree with the statement."""
    first, second = condition.of(request, recipes[order.recipe], recipes)
    advance()
    return {
        "says": condition.says,
        "first": condition.compares[0],
        "second": condition.compares[1],
        "ratio": first / second if second > 0 else None,
        "agrees": condition.agrees(first, second),
    }
