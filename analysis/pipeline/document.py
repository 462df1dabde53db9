"""The documents of `windage pipeline`: modes compared, settings swept, or a curve fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np

from windage.analysis.pipeline import published, summary
from windage.analysis.workers import processors
from windage.estimators.errors import BadInput
from windage.toy.pipeline.laws import Empirical, Equal, Exponential, Law, Lognormal, Observed
from windage.toy.pipeline.run import Run, simulate
from windage.toy.pipeline.settings import MODES, Pipeline

SCHEMA = "windage/pipeline/1"
Advance = Callable[[int, int], None]
Keys = Mapping[str, Any]
PICTURED = 8

# A small cluster: 128 responses at a time at 50 tokens a second, long tails, a step of the trainer
# almost as long as a batch takes to write.
DEFAULTS: dict[str, Any] = {
    "slots": 128,
    "batch": 512,
    "group_size": 8,
    "tokens_law": "lognormal",
    "tokens_mean": 4000.0,
    "tokens_sigma": 0.6,
    "token_seconds": 0.02,
    "prompt_tokens": 500.0,
    "read_seconds": 0.0001,
    "verifier_law": "exponential",
    "verifier_mean": 2.0,
    "verifier_sigma": 1.0,
    "scoring_seconds": 40.0,
    "update_law": "equal",
    "update_mean": 240.0,
    "update_sigma": 1.0,
    "sync_seconds": 5.0,
    "stretch": 2.0,
}
LAWS: dict[str, Callable[[float, float], Law]] = {
    "exponential": lambda mean, sigma: Exponential(mean),
    "lognormal": Lognormal,
    "equal": lambda mean, sigma: Equal(mean),
}
OF_LAWS = ("tokens", "verifier", "update")


def pipeline(keys: Keys, seen: Empirical | Observed | None = None) -> Pipeline:
    """Settings by their flat keys, the rest as in `DEFAULTS`."""
    chosen = {**DEFAULTS, **keys}
    laws: dict[str, Any] = {}
    for name in OF_LAWS:
        law, mean, sigma = (chosen.pop(f"{name}_{part}") for part in ("law", "mean", "sigma"))
        if mean == 0 and name != "tokens":
            law = "equal"
        laws[name] = LAWS[law](mean, sigma)
    if isinstance(seen, Empirical):
        laws["tokens"] = seen
    return Pipeline(**laws, **chosen, observed=seen if isinstance(seen, Observed) else None)


def run(
    keys: Keys,
    sweep: Mapping[str, Sequence[Any]],
    *,
    steps: int,
    seed: int,
    seen: Empirical | Observed | None = None,
    told: Mapping[str, Any] | None = None,
    with_published: bool = False,
    advance: Advance = lambda done, total: None,
) -> dict[str, Any]:
    """Simulate every point of a sweep; all modes where none is named.

    Args:
        keys: settings by flat key; see `DEFAULTS`.
        sweep: values by flat key; several make a grid.
        steps: commits a point.
        seed: the same for every point, so that all see the same responses.
        seen: observed lengths in place of the law of tokens, or lengths and times of responses.
        told: what was found where they were seen, for the document.
        with_published: add the published step times beside ours.
        advance: told how many points of how many are done.

    Raises:
        BadInput: settings that do not go together, where a mode was named.
    """
    begin = perf_counter()
    grid = dict(sweep)
    named = "mode" in keys or "mode" in grid
    if not named:
        grid["mode"] = list(MODES)
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    made = [_made({**keys, **point}, seen, refuse=named) for point in points]
    if all(isinstance(p, str) for p in made):
        raise BadInput(str(made[0]))
    rows: list[dict[str, Any]] = []
    pictures: list[dict[str, Any]] = []
    with ThreadPoolExecutor(processors()) as pool:
        runs = pool.map(partial(_one, steps=steps, seed=seed), made)
        for number, found in enumerate(runs):
            rows.append(_row(points[number], found, keys, steps))
            if len(points) <= PICTURED and isinstance(found, Run):
                pictures.append(_picture(number, found))
            advance(number + 1, len(points))
    _add_speedups(rows, list(grid))
    document = {
        "schema": SCHEMA,
        "modes": MODES,
        "sweep": grid,
        "settings": {**DEFAULTS, **keys},
        "observed": told,
        "rows": rows,
        "pictures": pictures,
        "occupancy_residual": max(
            (abs(r["occupancy_residual"]) for r in rows if r["occupancy_residual"] is not None),
        ),
        "published": published.run() if with_published else None,
        "reading": reading(rows, points),
        "steps": steps,
        "seed": seed,
    }
    return {**document, "seconds": perf_counter() - begin}


def _made(keys: Keys, seen: Empirical | Observed | None, *, refuse: bool) -> Pipeline | str:
    """A pipeline, or why there is none in this mode."""
    try:
        return pipeline(keys, seen)
    except BadInput as problem:
        if refuse:
            raise
        return str(problem)


def _one(made: Pipeline | str, *, steps: int, seed: int) -> Run | str:
    return made if isinstance(made, str) else simulate(made, steps, np.random.default_rng(seed))


def _row(point: Keys, found: Run | str, keys: Keys, steps: int) -> dict[str, Any]:
    mode = point.get("mode", keys.get("mode", "asynchronous"))
    if isinstance(found, str):
        empty = {"occupancy_residual": None, "throughput": None}
        return {"mode": mode, **point, **empty, "steps": steps, "reason": found}
    return {
        "mode": mode,
        **point,
        **summary.figures(found),
        "settings": summary.settings(found.pipeline),
        "steps": steps,
        "reason": None,
    }


def _picture(number: int, found: Run) -> dict[str, Any]:
    return {
        "row": number,
        "histogram": summary.histogram(found),
        "timeline": summary.timeline(found),
        "selection": summary.selection(found),
    }


def _add_speedups(rows: list[dict[str, Any]], swept: Sequence[str]) -> None:
    """Throughput over that of the synchronous row of the same point."""
    others = [key for key in swept if key != "mode"]
    base = {
        tuple(row.get(key) for key in others): row["throughput"]
        for row in rows
        if row["mode"] == "synchronous"
    }
    for row in rows:
        slow = base.get(tuple(row.get(key) for key in others))
        fast = row["throughput"]
        row["speedup"] = fast / slow if slow and fast else None


def reading(rows: Sequence[Mapping[str, Any]], points: Sequence[Keys]) -> list[str]:
    """What a comparison of modes says, in sentences whose words the figures choose."""
    by = {row["mode"]: row for row in rows if row["throughput"] is not None}
    if len(by) != len(rows) or "synchronous" not in by or len(rows) < 2:
        return []
    slow = by["synchronous"]
    fastest = max(rows, key=lambda row: row["throughput"])
    found = [
        f"Synchronous, slots hold a response {100 * slow['utilization']:.0f} % of the time and the "
        f"trainer works {100 * slow['trainer_utilization']:.0f} %: each waits for the other, and "
        "all for the slowest response."
    ]
    if fastest["mode"] != "synchronous":
        found.append(
            f"{fastest['mode']} is {fastest['speedup']:.2f} times as fast; a response is then "
            f"{fastest['lag_mean']:.2f} versions old in the mean, the oldest {fastest['lag_max']}."
        )
    if {"asynchronous", "in_flight"} <= set(by):
        still, moving = by["asynchronous"], by["in_flight"]
        found.append(
            f"Weights that arrive in flight leave the lag of a response at "
            f"{moving['lag_mean']:.2f} (its oldest version; asynchronous {still['lag_mean']:.2f}) "
            f"and bring that of a token from {still['token_lag_mean']:.2f} to "
            f"{moving['token_lag_mean']:.2f}."
        )
    return found
