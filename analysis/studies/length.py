"""The study of length: estimators by the length of a response, the lag and the group size.

Three prompts of a chain that reasons until it stops are solved 20, 48 and 73 % of the time with 256
tokens or more and less often with fewer; a response is a quarter of the horizon on average.  The
sampler is some exact gradient steps behind; the step size is set so that one step moves the policy
by the same divergence a token at every length.  Estimators whose coefficients look at one
response's length are averages over groups, so that one exact variance serves every number of
responses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from windage.analysis.studies.bounds import figure_bounds
from windage.analysis.studies.figures import from_moments
from windage.analysis.studies.reading import POINT, UNBIASED, UNCORRECTED, Study
from windage.analysis.studies.study import SCHEMA, about_objective, about_problem, bind, filled
from windage.analysis.tables import text
from windage.estimators.catalogue import FIRST
from windage.estimators.estimator import Estimator
from windage.toy.behavior import with_behavior
from windage.toy.chains import Chain, reasoning
from windage.toy.exact.automata import refusal, sweep
from windage.toy.exact.moments import Moments
from windage.toy.exact.plan import Plan, undefined
from windage.toy.exact.transfer import mismatch
from windage.toy.objective import Objective, objective

LENGTHS = tuple(2**k for k in range(4, 16))
LONGEST = LENGTHS[-1]
LAGS = (0, 1, 2, 4, 8, 16, 32, 64)
GROUP_SIZES = (2, 8, 32)
GROUP_SIZE, LAG = 8, 8
BATCHES = (3072, 24576)
DIVERGENCE = 1e-6
FREQUENCIES = 128
TOKEN = "token_is"
PLAIN = (UNCORRECTED, TOKEN, UNBIASED, "centered")
CHOSEN = Plan(engine="transfer", reason="recursion over states, many estimators at once")


def served() -> list[Estimator]:
    """Entries whose moments the recursion over states gives at every length."""
    return [e for e in FIRST if left_out(e) is None]


def left_out(estimator: Estimator) -> str | None:
    """Why an entry has no rows, or None."""
    longest = reasoning(LONGEST)
    return undefined(estimator, longest, GROUP_SIZE) or refusal(estimator, longest)


def rate(chain: Chain, target: float = DIVERGENCE) -> float:
    """The step size at which one step of lag has the stated divergence a token.

    A divergence grows with the square of a small step, so that a few corrections suffice.
    """
    step = 1.0
    for _ in range(6):
        behind = with_behavior(chain, "stale", steps=1, rate=step)
        step *= math.sqrt(target / mismatch(behind)["kl"])
    return step


def trail(chain: Chain, lags: tuple[int, ...], step: float) -> Iterator[Chain]:
    """The chain sampled from the policy of each lag, from the least lag to the greatest."""
    behind, before = chain.on_policy(), 0
    for lag in lags:
        now = replace(chain, logits=behind.behavior_logp)
        behind = with_behavior(now, "stale", steps=lag - before, rate=step)
        before = lag
        yield replace(chain, behavior_logp=behind.behavior_logp)


def line(
    estimator: Estimator, chain: Chain, goal: Objective, group_size: int, moments: Moments
) -> dict[str, Any]:
    """An estimator's exact figures at one place, without the mean."""
    found = from_moments(moments, goal, chain.rewards)
    bounds = figure_bounds(moments, goal, found)
    made = filled(estimator, goal, group_size, CHOSEN, moments.mean, found, None, bounds)
    spread = made["variance_rescaled"]
    noise = None if spread is None else math.sqrt(max(0.0, spread)) / made["gradient_norm"]
    return {**made, "mean": None, "noise": noise}


def at_length(
    horizon: int, lags: tuple[int, ...] = LAGS, group_sizes: tuple[int, ...] = GROUP_SIZES
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What each lag is like at one length, and the rows of every estimator there.

    Example:
        >>> sites, rows = at_length(16, lags=(0, 8), group_sizes=(2,))
        >>> [round(1e6 * site["kl"]) for site in sites], len(rows) == 2 * len(served())
        ([0, 63], True)
    """
    fresh = reasoning(horizon)
    goal, step = objective(fresh), rate(fresh)
    chains = list(trail(fresh, lags, step))
    sites = [
        {"horizon": horizon, "steps": lag, "rate": step, **mismatch(chain)}
        for lag, chain in zip(lags, chains, strict=True)
    ]
    estimators = [bind(e, fresh) for e in served()]
    places = [
        (estimator, chain, lag)
        for lag, chain in zip(lags, chains, strict=True)
        for estimator in estimators
    ]
    pairs = [(estimator, chain) for estimator, chain, _ in places]
    found = sweep(pairs, group_sizes, FREQUENCIES)
    rows = []
    for i, size in enumerate(group_sizes):
        for (estimator, chain, lag), moments in zip(places, found, strict=True):
            made = line(estimator, chain, goal, size, moments[i])
            rows.append({**made, "horizon": horizon, "steps": lag})
    return sites, rows


def run(advance: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """The document of `windage study --study length`; problem and objective of the first length.

    Args:
        advance: told after each length how many of how many rows are done.
    """
    start = time.perf_counter()
    sites, rows = [], []
    first = reasoning(LENGTHS[0])
    goal = objective(first)
    for horizon in LENGTHS:
        more, made = at_length(horizon, LAGS, GROUP_SIZES)
        sites += more
        rows += made
        advance(len(rows), len(made) * len(LENGTHS))
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "study": "length",
        "problem": {**about_problem(first), "name": "length"},
        "objective": about_objective(goal),
        "behavior": {"kind": "stale", "divergence": DIVERGENCE},
        "sweep": {
            "horizon": list(LENGTHS),
            "steps": list(LAGS),
            "group_size": list(GROUP_SIZES),
        },
        "responses": {"shown": list(BATCHES)},
        "left_out": {e.name: why for e in FIRST if (why := left_out(e)) is not None},
        "sites": sites,
        "rows": rows,
    }
    return {**document, "reading": reading(document), "seconds": time.perf_counter() - start}


def of_size(document: Mapping[str, Any], group_size: int = GROUP_SIZE) -> dict[str, Any]:
    """The part of one group size, as a document by length and lag; plain entries come first."""
    rows = [r for r in document["rows"] if r["group_size"] == group_size]
    rows.sort(key=lambda r: PLAIN.index(r["estimator"]) if r["estimator"] in PLAIN else len(PLAIN))
    batch = group_size * document["problem"]["prompts"]
    return {**document, "responses": {**document["responses"], "batch": batch}, "rows": rows}


def reading(document: Mapping[str, Any]) -> list[str]:
    """Three sentences: length and bias and noise, length and the choice, where borders lie."""
    study = Study(of_size(document))
    responses = study.shown[-1]
    return [
        growth(document, study, responses),
        reversal(study, responses),
        border(document, study, responses),
    ]


def growth(document: Mapping[str, Any], study: Study, responses: int) -> str:
    """Bias and noise from the least length to the greatest."""
    ends = short, long = study.lengths[0], study.lengths[-1]
    shrink = math.sqrt(study.batch / responses)

    def both(name: str, key: str, factor: float = 1.0) -> str:
        return " to ".join(text(study.at(n, LAG)[name][key] * factor) for n in ends)

    kl = [s["kl"] for s in document["sites"] if s["steps"] == LAG]
    return (
        f"From {short} to {long} tokens at lag {LAG} (KL {text(min(kl))} to {text(max(kl))} nats a "
        f"token) the bias of no correction ({UNCORRECTED}) goes from "
        f"{both(UNCORRECTED, 'relative_bias_rescaled')} times the gradient, that of {TOKEN} from "
        f"{both(TOKEN, 'relative_bias_rescaled')}; {UNBIASED} has none, but with {responses} "
        f"responses an update its noise goes from {both(UNBIASED, 'noise', shrink)}, that of "
        f"{TOKEN} from {both(TOKEN, 'noise', shrink)}."
    )


def succession(study: Study, lag: int, responses: int) -> list[tuple[str, int, int]]:
    """Who makes most progress, and from which length to which."""
    found: list[tuple[str, int, int]] = []
    for length in study.lengths:
        name = study.leader(length, lag, responses)
        first = length
        if found and found[-1][0] == name:
            first = found.pop()[1]
        found.append((name, first, length))
    return found


def reversal(study: Study, responses: int) -> str:
    """How the best choice changes with length, at the lag where two choices reverse most."""

    def made(name: str, length: int, lag: int) -> float:
        return study.progress(name, length, lag, responses) or 0.0

    found = []
    for lag in study.lags:
        led = succession(study, lag, responses)
        for (a, _, x), (b, _, y) in combinations(led, 2):
            least = min(made(a, x, lag) - made(b, x, lag), made(b, y, lag) - made(a, y, lag))
            found.append((least, lag, a, b, x, y))
    least, lag, a, b, x, y = max(found, default=(0.0, 0, "", "", 0, 0))
    if least <= POINT:
        return "Length does not reverse the choice: one estimator is within a point of the best."
    led = succession(study, lag, responses)
    parts = [f"{led[0][0]} up to {led[0][2]} tokens"]
    parts += [f"{name} from {first} to {last}" for name, first, last in led[1:-1]]
    parts += [f"{led[-1][0]} from {led[-1][1]} on"]
    shares = [text(made(name, n, lag), percent=True) for n in (x, y) for name in (a, b)]
    return (
        f"The ranking reverses with length: at lag {lag} with {responses} responses an update most "
        f"progress is made by {', '.join(parts)}; {a} beats {b} with {x} tokens ({shares[0]} of "
        f"the exact gradient's against {shares[1]}) and loses to it with {y} ({shares[2]} against "
        f"{shares[3]})."
    )


def nats(document: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    """KL(policy | sampler) of a whole response at each length and lag."""
    return {(s["horizon"], s["steps"]): s["kl"] * s["tokens"] for s in document["sites"]}


def border(document: Mapping[str, Any], study: Study, responses: int) -> str:
    """Up to which divergence of a whole response no correction and the whole ratio lead."""
    far = nats(document)
    led = {place: study.leader(*place, responses) for place in far}

    def most(name: str) -> float:
        return max((value for place, value in far.items() if led[place] == name), default=0.0)

    near = [place for place, value in far.items() if value <= most(UNCORRECTED)]
    plain = sum(led[place] == UNCORRECTED for place in near)
    return (
        f"The borders follow the divergence of a whole response, length times KL a token: with "
        f"{responses} responses an update {UNCORRECTED} leads nowhere beyond "
        f"{text(most(UNCORRECTED))} nats a response and in {plain} of {len(near)} places up to "
        f"that, {UNBIASED} nowhere beyond {text(most(UNBIASED))}; the grid goes to "
        f"{text(max(far.values()))}."
    )
