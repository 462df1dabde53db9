"""Recipes ranked by what they learn per GPU-hour, with the reason, and what would change the order.

    gain = merit * updates per hour / GPUs

in exact gradient steps' worth of improvement a GPU-hour.  The order is called undecided where a
change of one stated input by a factor that users cannot exclude puts another recipe first; the
cheapest experiment that would decide it is planned from the gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any, final

from windage.analysis.choose.merit import LADDER, Measured, measure, model, served, spread_over
from windage.analysis.choose.pace import Pace, paces
from windage.analysis.choose.request import Request
from windage.estimators.catalogue import FIRST
from windage.estimators.estimator import Estimator
from windage.toy.exact.automata import refusal
from windage.toy.exact.plan import undefined

SCHEMA = "windage/choose/1"
CLOSE = 0.02
FOLLOWED = 6
POWER = 2.8
SEED_SPREAD, QUESTIONS = 0.01, 1000
Advance = Callable[[int, int], None]


@final
@dataclass(frozen=True, kw_only=True)
class Cell:
    """A recipe run in one way.

    Args:
        recipe, way: by name.
        direction: merit without noise.
        signal: share of |g|^2 that is its mean.
        steps: updates an hour.
        gain: merit * steps / GPUs.
        lag: mean, in updates.
    """

    recipe: str
    way: str
    direction: float
    signal: float
    steps: float
    gain: float
    lag: float

    @property
    def merit(self) -> float:
        return self.direction * self.signal


def refills(estimator: Estimator) -> bool:
    """Whether groups of equal rewards are drawn anew, which costs generation."""
    return any(member.traits.refill for member in estimator.admission)


def excluded(request: Request) -> dict[str, str]:
    """Recipes that these data cannot support, and why."""
    chain = model(request)
    out = {}
    for entry in FIRST:
        needs = replace(entry, admission=()).needs
        claims = {claim.property for claim in entry.claims if claim.holds}
        if "values" in needs and not request.critic:
            out[entry.name] = "it needs a critic"
        elif "behavior_logp" in needs and not request.logprobs:
            out[entry.name] = "it needs the sampler's log-probabilities, which are not recorded"
        elif entry.centering is not None and not (request.head and request.logprobs):
            out[entry.name] = "it needs the sampler's likeliest tokens, which are not recorded"
        elif "unbiased_off_policy" in claims and not request.covered:
            out[entry.name] = "its claim needs a sampler that can draw whatever the policy can"
        elif why := undefined(entry, chain, request.group_size) or refusal(entry, chain):
            out[entry.name] = f"not computed: {why}"
    return out


def ladder_for(found: Iterable[Pace]) -> tuple[int, ...]:
    """Steps of the ladder up to the greatest lag that occurs."""
    most = max(lag for each in found for lag in each.lags)
    above = [step for step in LADDER if step >= most]
    return tuple(step for step in LADDER if step <= (above[0] if above else LADDER[-1]))


def cells(request: Request, estimators: Sequence[Estimator]) -> list[Cell]:
    """Every recipe run in every way."""
    plain = paces(request)
    again = paces(request, refill=True) if any(map(refills, estimators)) else []
    ladder = ladder_for([*plain, *again])
    measured = measure(request, estimators, ladder)
    return [
        cell(request, estimator.name, measured[estimator.name], each, ladder)
        for estimator in estimators
        for each in (again if refills(estimator) else plain)
    ]


def cell(
    request: Request, recipe: str, measured: Measured, found: Pace, ladder: Sequence[int]
) -> Cell:
    """A recipe's merit at the lags of one way, joined with its pace."""
    direction, signal = measured.parts(spread_over(found.lags, ladder), request.prompts)
    steps = 3600 / found.step_seconds
    return Cell(
        recipe=recipe,
        way=found.name,
        direction=direction,
        signal=signal,
        steps=steps,
        gain=direction * signal * steps / request.gpus,
        lag=found.mean_lag,
    )


def best(found: Iterable[Cell]) -> list[Cell]:
    """The best way of every recipe, from the most gain to the least."""
    top: dict[str, Cell] = {}
    for each in found:
        if each.recipe not in top or each.gain > top[each.recipe].gain:
            top[each.recipe] = each
    return sorted(top.values(), key=lambda each: -each.gain)


CHANGES: tuple[tuple[str, Callable[[Request], Request]], ...] = (
    ("mismatch x 4", lambda r: replace(r, mismatch=min(1.0, 4 * r.mismatch))),
    ("mismatch / 4", lambda r: replace(r, mismatch=r.mismatch / 4)),
    ("drift x 10", lambda r: replace(r, drift=min(0.1, 10 * r.drift))),
    ("drift / 10", lambda r: replace(r, drift=r.drift / 10)),
    ("responses twice as long", lambda r: replace(r, response_tokens=2 * r.response_tokens)),
    ("responses half as long", lambda r: replace(r, response_tokens=r.response_tokens / 2)),
    ("twice as many prompts a batch", lambda r: replace(r, prompts=2 * r.prompts)),
)


def sensitivity(
    request: Request, estimators: Sequence[Estimator], advance: Callable[[], None]
) -> Iterator[tuple[str, list[Cell]]]:
    """The order under each change of one input."""
    for name, change in CHANGES:
        try:
            changed = change(request)
        except ValueError:
            continue
        yield name, best(cells(changed, estimators))
        advance()


def experiment(request: Request, rivals: Sequence[Cell]) -> dict[str, Any]:
    """The cheapest runs that would tell the first from the last of the rivals.

    Seeds k and the share f of the budget's updates are chosen so that the difference of scores,
    gain * f * (1 - ratio of gains), is 2.8 standard errors (5 % two-sided, power 80 %); the cost
    goes with k f, which is least at f = 1 unless two seeds are more than enough.
    """
    gap = 1 - min(each.gain for each in rivals) / max(each.gain for each in rivals)
    noise = 2 * (SEED_SPREAD**2 + 0.25 / QUESTIONS)
    needed = math.inf if gap == 0 else noise * (POWER / (request.gain * gap)) ** 2
    seeds, share = (2, math.sqrt(needed / 2)) if needed <= 2 else (needed, 1.0)
    feasible = math.isfinite(needed) and needed <= 1000
    hours = len(rivals) * seeds * share * request.budget if feasible else None
    return {
        "arms": [f"{each.recipe}, {each.way}" for each in rivals],
        "seeds": math.ceil(seeds) if feasible else None,
        "updates": [round(share * request.budget * each.steps / request.gpus) for each in rivals],
        "gpu_hours": hours,
        "difference": request.gain * gap,
    }


def rival(order: Sequence[Cell], changed: Iterable[Sequence[Cell]]) -> list[str]:
    """Recipes that are as good as the first, or first under some change."""
    close = [each.recipe for each in order if each.gain >= (1 - CLOSE) * order[0].gain]
    firsts = [other[0].recipe for other in changed]
    return list(dict.fromkeys([*close, *firsts]))


def choose(request: Request, advance: Advance = lambda done, total: None) -> dict[str, Any]:
    """The document of `windage choose`."""
    from windage.analysis.choose.conditions import CONDITIONS, judge

    start = perf_counter()
    total = 1 + len(CHANGES) + len(CONDITIONS)
    done = 0

    def one_more() -> None:
        nonlocal done
        done += 1
        advance(done, total)

    out_of = excluded(request)
    estimators = [e for e in served(request) if e.name not in out_of]
    found = cells(request, estimators)
    order = best(found)
    one_more()
    by_name = {e.name: e for e in estimators}
    followed = [by_name[each.recipe] for each in order[:FOLLOWED]]
    changed = dict(sensitivity(request, followed, one_more))
    names = rival(order, changed.values())
    rivals = [each for each in order if each.recipe in names]
    decided = len(rivals) == 1
    return {
        "schema": SCHEMA,
        "request": asdict(request),
        "gpus": request.gpus,
        "rows": [about(each, order) for each in found],
        "ranking": [
            {**about(each, order), "rank": i, "why": why(each)} for i, each in enumerate(order, 1)
        ],
        "excluded": [{"recipe": name, "reason": reason} for name, reason in out_of.items()],
        "verdict": order[0].recipe if decided else "undecided",
        "rivals": [each.recipe for each in rivals],
        "sensitivity": [
            {"change": name, "first": other[0].recipe, "way": other[0].way}
            for name, other in changed.items()
        ],
        "experiment": None if decided else experiment(request, rivals[:3]),
        "conditions": [judge(c, request, order[0], by_name, one_more) for c in CONDITIONS],
        "seconds": perf_counter() - start,
    }


def about(each: Cell, order: Sequence[Cell]) -> dict[str, Any]:
    """A row: merit, pace and gain, and the gain as a share of the best."""
    return {
        "recipe": each.recipe,
        "way": each.way,
        "merit": each.merit,
        "direction": each.direction,
        "signal": each.signal,
        "mean_squared_error": 1 - each.merit,
        "mean_lag": each.lag,
        "updates_per_hour": each.steps,
        "gain": each.gain,
        "relative_gain": each.gain / order[0].gain if order[0].gain > 0 else None,
    }


def why(each: Cell) -> str:
    """What its place comes from.

    Example:
        >>> why(Cell(recipe="rloo", way="", direction=0.99, signal=0.1, steps=30, gain=1, lag=2))
        'bias costs 1 % of a step, noise leaves 10 % of the rest; 30 updates an hour at lag 2.0'
    """
    if each.merit == 0:
        return "its mean points the wrong way, or its variance is beyond float64"
    lost = f"{1 - each.direction:.0%}".replace("%", " %")
    left = f"{each.signal:.2g}" if each.signal < 0.01 else f"{each.signal:.0%}".replace("%", " %")
    return (
        f"bias costs {lost} of a step, noise leaves {left} of the rest; "
        f"{each.steps:.3g} updates an hour at lag {each.lag:.1f}"
    )
