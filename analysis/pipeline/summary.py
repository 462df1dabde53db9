"""What is told of a run: one row of figures, histograms of lag, a timeline, who was selected."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windage.toy.pipeline import engine
from windage.toy.pipeline.laws import describe
from windage.toy.pipeline.run import Run
from windage.toy.pipeline.settings import Pipeline

Row = dict[str, Any]
QUANTILES = (0.5, 0.95, 0.99)
SHOWN_SLOTS, SHOWN_STEPS = 24, 4
PARTS = 5


def settings(pipeline: Pipeline) -> Row:
    """The settings as a row holds them; limits that are off are None."""
    found: Row = {}
    for name, value in vars(pipeline).items():
        if pipeline.observed is not None and name in ("tokens", "token_seconds", "verifier"):
            found[name] = str(pipeline.observed)
        elif name in ("tokens", "verifier", "update"):
            found[name] = describe(value)
        elif name == "observed":
            continue
        else:
            found[name] = None if value == float("inf") else value
    return found


def weighted_quantiles(
    values: NDArray[Any], weights: NDArray[Any], shares: tuple[float, ...]
) -> list[int]:
    """The least values at or below which lie these shares of the weight.

    Example:
        >>> weighted_quantiles(np.array([3, 1, 2]), np.array([1.0, 1.0, 2.0]), (0.25, 0.5, 0.99))
        [1, 2, 3]
    """
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    places = np.searchsorted(reached, np.array(shares) * reached[-1] * (1 - 1e-12))
    return [int(v) for v in values[order][places]]


def lags(run: Run) -> Row:
    """Mean, quantiles and largest of the lag, per response and per token."""
    found: Row = {}
    ages, tokens = run.token_lag
    for name, values, weights in (
        ("lag", run.lag, np.ones(len(run.lag))),
        ("token_lag", ages, tokens),
    ):
        if not weights.sum() > 0:
            found |= dict.fromkeys(
                [f"{name}_mean", *(f"{name}_p{100 * q:.0f}" for q in QUANTILES), f"{name}_max"]
            )
            continue
        quantiles = weighted_quantiles(values, weights, QUANTILES)
        found[f"{name}_mean"] = float(np.average(values, weights=weights))
        found |= {f"{name}_p{100 * q:.0f}": v for q, v in zip(QUANTILES, quantiles, strict=True)}
        found[f"{name}_max"] = int(values.max())
    return found


def figures(run: Run) -> Row:
    """The figures of a row; times in seconds, shares of 1."""
    kept, size = run.admitted, len(run.fate)
    tokens = run.responses["tokens"]
    cut = kept & (run.responses["finish"] > run.responses["ended"])
    return {
        "throughput": run.throughput,
        "tokens_per_second": float(tokens[kept].sum()) / run.seconds,
        "step_seconds": run.step_time,
        "utilization": run.utilization,
        "trainer_utilization": run.trainer_utilization,
        **lags(run),
        "queue_mean": float(run.steps["queued"].mean()),
        "queue_max": int(run.steps["queued"].max()),
        "occupancy_lag": run.occupancy_lag,
        "occupancy_residual": run.occupancy_residual,
        "dropped": float((run.fate < engine.INSIDE).sum() / size),
        **{f"dropped_{name}": count / size for name, count in run.dropped().items()},
        "timed_out": float(cut.sum() / max(1, kept.sum())),
        "length_generated": float(run.length.mean()),
        "length_admitted": float(tokens[kept].mean()),
        "difficulty_generated": float(run.difficulty.mean()),
        "difficulty_admitted": float(run.difficulty[kept].mean()),
        "reward_generated": float(run.right.mean()),
        "reward_admitted": float(run.responses["reward"][kept].mean()),
        "responses": size,
        "seconds_simulated": run.seconds,
    }


def histogram(run: Run) -> dict[str, list[float]]:
    """Shares of responses and of tokens by lag, from 0 on."""
    ages, tokens = run.token_lag
    length = int(run.lag.max()) + 1
    by_response = np.bincount(run.lag, minlength=length) / len(run.lag)
    by_token = np.bincount(ages, tokens, minlength=length) / max(tokens.sum(), 1e-300)
    return {"responses": by_response.tolist(), "tokens": by_token.tolist()}


def lanes(born: NDArray[Any], ended: NDArray[Any], slots: int) -> NDArray[np.int64]:
    """A slot for each response: the one that has been free for longest.

    Example:
        >>> lanes(np.array([0.0, 0.0, 1.0, 2.0]), np.array([2.0, 1.0, 3.0, 3.0]), 2).tolist()
        [0, 1, 1, 0]
    """
    free = np.full(slots, -np.inf)
    found = np.empty(len(born), dtype=np.int64)
    for i, (start, end) in enumerate(zip(born, ended, strict=True)):
        lane = int(np.argmin(free))
        assert free[lane] <= start * (1 + 1e-12) + 1e-12, "more responses than slots"
        found[i], free[lane] = lane, end
    return found


def timeline(run: Run) -> Row:
    """Bars of some slots and of the trainer during a few steps in the middle of a run."""
    r, steps = run.responses, run.steps
    first = max(0, min(len(steps) // 2, len(steps) - SHOWN_STEPS - 1))
    last = min(first + SHOWN_STEPS, len(steps) - 1)
    begin, end = float(steps["commit"][first]), float(steps["commit"][last])
    lane = lanes(r["born"], r["ended"], run.pipeline.slots)
    picked = (lane < SHOWN_SLOTS) & (r["born"] < end) & (r["ended"] > begin)
    bars = [
        {
            "slot": int(lane[i]),
            "begin": max(0.0, float(r["born"][i]) - begin),
            "end": float(min(r["ended"][i], end)) - begin,
            "lag": int(run.fate[i] - r["weights"][i]) if run.fate[i] >= 0 else None,
            "dropped": bool(run.fate[i] < engine.INSIDE),
        }
        for i in np.flatnonzero(picked)
    ]
    trained = [
        {"begin": max(0.0, float(s["taken"]) - begin), "end": min(float(s["commit"]), end) - begin}
        for s in steps
        if s["commit"] > begin and s["taken"] < end
    ]
    return {"seconds": end - begin, "bars": bars, "steps": trained}


def selection(run: Run) -> list[Row]:
    """Shares of the generated and of the admitted by difficulty, length and reward.

    Difficulties and lengths fall into fifths of what was generated; lengths and rewards are those
    that a response has if nobody cuts it.
    """
    edges = np.unique(np.quantile(run.length, np.linspace(0, 1, PARTS + 1)[1:-1]))
    hard = np.minimum((run.difficulty * PARTS).astype(int), PARTS - 1)
    long = np.searchsorted(edges, run.length)
    cell = (hard * PARTS + long) * 2 + run.right
    count = [
        np.bincount(c, minlength=2 * PARTS * PARTS) / max(1, len(c))
        for c in (cell, cell[run.admitted])
    ]
    bounds = [0.0, *edges.tolist(), None]
    return [
        {
            "difficulty": [d / PARTS, (d + 1) / PARTS],
            "length": [bounds[k], bounds[k + 1]],
            "reward": reward,
            "generated": float(count[0][(d * PARTS + k) * 2 + reward]),
            "admitted": float(count[1][(d * PARTS + k) * 2 + reward]),
        }
        for d in range(PARTS)
        for k in range(len(edges) + 1)
        for reward in (0, 1)
    ]
