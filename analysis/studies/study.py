"""The bias and the variance of estimators on a problem, as the document of `windage study`.

A study is a grid: each point of the sweep sets a problem, a behavior policy and a group size, and
every estimator has one row there.  Rows are exact where an engine is, and sampled, with a standard
error beside each figure, where none is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from windage.analysis.studies.best import beside_frontier
from windage.analysis.studies.bounds import figure_bounds
from windage.analysis.studies.decision import decided
from windage.analysis.studies.figures import NAMES, from_moments
from windage.analysis.studies.grid import Cell, Given, Settings, bare_site, by_site, cells, site_of
from windage.analysis.studies.sampled import (
    BEYOND,
    check_range,
    paired,
    resolution,
    sampled,
    too_long,
)
from windage.analysis.studies.spread import covariances
from windage.analysis.workers import side_by_side
from windage.estimators.catalogue import get
from windage.estimators.estimator import Estimator
from windage.toy.exact.mismatch import mismatch
from windage.toy.exact.moments import Undefined
from windage.toy.exact.plan import (
    BUDGET,
    OPTIONS,
    PATIENCE,
    Plan,
    Site,
    assumed,
    compute,
    consider,
    plan,
    undefined,
)
from windage.toy.objective import Objective, objective
from windage.toy.problem_file import Document
from windage.toy.sampling import Figures

SCHEMA = "windage/study/1"
# Seconds of work for which other processes, which import torch first, are worth starting.
MUCH = 4.0
BOUNDED = "; the law of the log-ratio is approximate, figures are within error_bound"

Row = dict[str, Any]
Advance = Callable[[int, int], None]


@runtime_checkable
class Store(Protocol):
    """Rows that are kept while a study runs, by their number in the document."""

    def read(self) -> dict[int, Row]:
        """Rows of an earlier call."""
        ...

    def add(self, number: int, row: Row) -> None:
        """Keep a row that was just computed."""
        ...


def run(
    settings: Settings,
    advance: Advance = lambda done, total: None,
    store: Store | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Compute every row.

    Args:
        settings: already checked by name and value.
        advance: told after each row how many of how many are done.
        store: told each row; the rows that it read from an earlier call are not computed again.
        processes: to share what takes longer than a few seconds.

    Returns:
        The document of design.md; where a sweep changes the problem, `problem` and `objective` are
        those of its first point, and each row carries its own `objective_value`.

    Raises:
        BadInput: a behavior policy that is not one in float64.

    Example:
        >>> document = run(Settings(problem=("bandit", {}), estimators=(("rloo", {}),)))
        >>> document["rows"][0]["engine"], round(document["rows"][0]["scale"], 12)
        ('prefix_tree', 1.0)
    """
    start = perf_counter()
    every = cells(settings)
    rows = {} if store is None else store.read()
    if rows:
        advance(len(rows), len(every))
    for number, made in _computed(settings, [c for c in every if c.number not in rows], processes):
        rows[number] = made
        if store is not None:
            store.add(number, made)
        advance(len(rows), len(every))
    first = bare_site(settings, every[0].problem)
    return {
        "schema": SCHEMA,
        "problem": {**about_problem(first), **dict(every[0].problem)},
        "behavior": _sampler(settings),
        "objective": about_objective(objective(first)),
        "sweep": {key: list(values) for key, values in settings.sweep.items()},
        "seed": settings.seed,
        **_compared(settings, paired([rows[c.number] for c in every], every), first.prompts),
        "seconds": perf_counter() - start,
    }


def _compared(settings: Settings, rows: list[Row], prompts: int) -> dict[str, Any]:
    """The rows with what decides between them, covariances and the frontier where asked for."""
    made = decided(rows, prompts=prompts, keys=list(settings.sweep), wanted=settings.error)
    about: dict[str, Any] = {"error": settings.error}
    if settings.covariance:
        about["covariance"] = covariances(settings, bind)
    if settings.frontier is None:
        return {**about, "rows": made}
    return {**about, **beside_frontier(settings, made, settings.frontier)}


def _computed(
    settings: Settings, waiting: Sequence[Cell], processes: int
) -> Iterator[tuple[int, Row]]:
    """Rows by number: here, and from when much is left by several processes, a site at a time."""
    start, done = perf_counter(), 0
    places = by_site(waiting)
    for at, here in enumerate(places):
        left = (perf_counter() - start) * (len(waiting) - done) / max(done, 1)
        if min(processes, len(places) - at) > 1 and left > MUCH:
            yield from side_by_side(_apart, [(settings, p) for p in places[at:]], processes)
            return
        yield from in_turn(settings, here)
        done += len(here)


def _apart(batch: tuple[Settings, Sequence[Cell]]) -> Iterator[tuple[int, Row]]:
    """Rows of one site in a process of its own."""
    torch.set_num_threads(1)
    return in_turn(*batch)


def in_turn(settings: Settings, here: Sequence[Cell]) -> Iterator[tuple[int, Row]]:
    """The rows of cells with one problem and sampler, by number; equal ones are computed once."""
    site = site_of(settings, here[0])
    goal, apart = objective(site), mismatch(site)
    sizes = tuple(int(g) for g in settings.sweep.get("group_size", (settings.group_size,)))
    bound: dict[tuple[str, Given], Estimator] = {}
    known: dict[tuple[Any, ...], Row] = {}
    for cell in here:
        if cell.estimator not in bound:
            name, given = cell.estimator
            bound[cell.estimator] = bind(get(name, **dict(given)), site)
        key = cell.estimator, cell.group_size
        if key not in known:
            chosen = (settings.engine, settings.seed, settings.samples, sizes)
            known[key] = row(bound[cell.estimator], site, goal, cell.group_size, *chosen)
        yield cell.number, {**known[key], **apart, **cell.point}


def about_problem(problem: Site) -> dict[str, Any]:
    """The document's words for a problem; responses and parameters are totals over prompts."""
    return {
        "name": problem.name,
        "sha256": problem.sha256,
        "prompts": problem.prompts,
        "responses": problem.responses,
        "parameters": problem.logits.numel(),
    }


def about_objective(goal: Objective) -> dict[str, Any]:
    """J, its gradient in the order of the parameters, and the gradient's length."""
    return {
        "value": _finite(float(goal.value)),
        "gradient": _list(goal.gradient),
        "gradient_norm": _finite(float(goal.gradient.norm())),
    }


def _sampler(settings: Settings) -> dict[str, Any]:
    if settings.behavior is not None:
        return {"kind": settings.behavior[0], **settings.behavior[1]}
    file = isinstance(settings.problem, Document) and any(
        "behavior" in prompt for prompt in settings.problem.prompts
    )
    return {"kind": "file" if file else "policy"}


def bind(estimator: Estimator, problem: Site) -> Estimator:
    """Give a constant length that was not set the horizon: the problem's longest response.

    Example:
        >>> from windage.toy.problems import token_tree
        >>> bind(get("dr_grpo"), token_tree()).aggregation.describe()
        'constant_length(length=4)'
    """
    if dict(estimator.aggregation.settings).get("length", 0) is not None:
        return estimator
    longest = problem.longest
    return replace(estimator, aggregation=estimator.aggregation.change(length=longest))


def row(
    estimator: Estimator,
    problem: Site,
    goal: Objective,
    group_size: int,
    engine: str = "auto",
    seed: int = 0,
    samples: int | None = None,
    among: tuple[int, ...] = (),
) -> dict[str, Any]:
    """One estimator's row; figures that have no meaning are None, and `reason` says why.

    Args:
        estimator: with its constant length bound.
        problem: with its sampler.
        goal: the problem's objective.
        group_size: responses of a prompt.
        engine, seed, samples: as in `Settings`.
        among: group sizes that will be asked for.
    """
    chosen: Plan | None = None
    try:
        if why := undefined(estimator, problem, group_size):
            raise Undefined(why)
        chosen = _choose(estimator, problem, group_size, engine, samples)
        if chosen.engine == "sampling":
            found, words = sampled(estimator, problem, goal, group_size, seed, samples)
            chosen = replace(chosen, reason=chosen.reason + words)
            measured: Any = found.mean, found.figures.whole, found.errors
            extra = {"left_out": [_finite_all(part) for part in found.figures.left]}
        else:
            measured = _measure(estimator, problem, goal, group_size, chosen.engine, among)
            extra = {}
    except Undefined as problem_:
        return {
            **_head(estimator, group_size),
            "engine": chosen.engine if chosen else None if engine == "auto" else engine,
            "mean": None,
            **dict.fromkeys(NAMES),
            **_tail(goal),
            **resolution(dict.fromkeys(NAMES), None),
            "standard_error": None,
            "error_bound": None,
            "reason": str(problem_),
        }
    return {**filled(estimator, goal, group_size, chosen, *measured), **extra}


def filled(
    estimator: Estimator,
    goal: Objective,
    group_size: int,
    chosen: Plan,
    mean: Tensor,
    figures: Figures,
    errors: Mapping[str, float] | None = None,
    bounds: Figures | None = None,
) -> dict[str, Any]:
    """The row of figures that were measured; those beyond float64 are None, and it says so."""
    endless = [k for k, v in figures.items() if v is not None and not math.isfinite(v)]
    return {
        **_head(estimator, group_size),
        "engine": chosen.engine,
        "mean": _list(mean),
        **_finite_all(figures),
        **_tail(goal),
        **resolution(figures, errors),
        "standard_error": errors,
        "error_bound": bounds,
        "why": chosen.reason + (BOUNDED if bounds else ""),
        **({"reason": f"beyond the range of float64: {', '.join(endless)}"} if endless else {}),
    }


def _head(estimator: Estimator, group_size: int) -> dict[str, Any]:
    return {
        "estimator": estimator.name,
        "settings": {key: _word(value) for key, value in estimator.settings.items()},
        "group_size": group_size,
    }


def _tail(goal: Objective) -> dict[str, Any]:
    return {
        "unsupported_mass": float(goal.unsupported_mass),
        "objective_value": _finite(float(goal.value)),
        "gradient_norm": _finite(float(goal.gradient.norm())),
    }


def _choose(
    estimator: Estimator, problem: Site, group_size: int, engine: str, samples: int | None
) -> Plan:
    """The engine asked for, or the planner's.

    Raises:
        Undefined: the engine asked for is not valid here, or would take too long.
    """
    chosen = Plan(engine=engine, reason="asked for" + assumed(estimator, problem))
    if engine == "auto":
        chosen = plan(estimator, problem, group_size)
    elif engine in OPTIONS:
        option = consider(engine, estimator, problem, group_size, budget=PATIENCE * BUDGET)
        if option.refusal is not None:
            raise Undefined(f"engine {engine} is not valid: {option.refusal}")
    elif engine != "sampling":
        raise Undefined(f"engine {engine} does not serve {estimator.name}")
    if chosen.engine == "sampling" and samples is None and (why := too_long(problem, group_size)):
        raise Undefined(f"{chosen.reason}; {why}")
    return chosen


def _measure(
    estimator: Estimator,
    problem: Site,
    goal: Objective,
    group_size: int,
    engine: str,
    among: tuple[int, ...],
) -> tuple[Tensor, Figures, None, Figures | None]:
    """Mean, figures, no standard errors, and bounds (None: exact).

    Raises:
        Undefined: the estimator has no meaning here, or its mean exceeds float64.
    """
    try:
        moments = compute(estimator, problem, group_size, engine, among)
        check_range(moments.mean, goal)
        figures = from_moments(moments, goal, problem.rewards)
        return moments.mean, figures, None, figure_bounds(moments, goal, figures)
    except OverflowError:
        raise Undefined(BEYOND) from None


def _finite_all(figures: Figures) -> Figures:
    return {name: _finite(value) for name, value in figures.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _word(value: Any) -> Any:
    """A setting as JSON holds it: infinity by its name."""
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _list(tensor: Tensor) -> list[float] | None:
    """Numbers in the order of the parameters, or None where one is beyond float64."""
    flat = tensor.flatten()
    return flat.tolist() if bool(torch.isfinite(flat).all()) else None
