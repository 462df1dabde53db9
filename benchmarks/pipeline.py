"""Rollouts a second of the compiled pipeline, a sweep of 1,000 configurations, 1,000 fitted curves.

    python benchmarks/pipeline.py [rates] [sweep] [coverage]

Prints what is named, or all; writes it into benchmarks/results/pipeline.json.  Rates are of
processor time on one core, so that other work on the machine counts less; the sweep is timed by the
clock, as `windage pipeline --sweep` runs it, figures of every row included.  Coverage: the share of
1,000 synthetic curves whose 95 % interval of a parameter holds the truth, with the score without
compute fitted (free) or known.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from windage.analysis.pipeline import coverage, document
from windage.toy.pipeline.laws import Exponential
from windage.toy.pipeline.run import simulate
from windage.toy.pipeline.settings import MODES, Pipeline

RESULTS = Path(__file__).parent / "results"
ROLLOUTS, REPEATS = 1_000_000, 3
SWEEP = {
    "slots": [16, 32, 48, 64, 96, 128, 160, 192, 224, 256],
    "update_mean": [10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0, 160.0, 200.0, 240.0],
    "capacity": [0.0, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0],
}
STEPS = 100
CURVES, CHUNK = 1000, 25


def rate(pipeline: Pipeline) -> float:
    """Rollouts started a second of processor time, the best of a few."""
    steps = ROLLOUTS // pipeline.batch
    best = 0.0
    simulate(pipeline, 2, np.random.default_rng(0))
    for _ in range(REPEATS):
        before = time.process_time()
        run = simulate(pipeline, steps, np.random.default_rng(0))
        best = max(best, len(run.fate) / (time.process_time() - before))
    return best


def rates() -> dict[str, Any]:
    """Rollouts a second, mode by mode and with everything on."""
    groups = {"group_size": 8, "verifier": Exponential(0.1)}
    found = {mode: rate(Pipeline(mode=mode)) for mode in MODES}
    found["asynchronous, groups of 8, verdicts, maximum lag 4"] = rate(
        Pipeline(max_lag=4, **groups)  # type: ignore[arg-type]
    )
    for name, rollouts in found.items():
        print(f"{name:55} {rollouts / 1e6:5.2f} million rollouts/s")
    return {"rollouts_per_second": found}


def sweep() -> dict[str, Any]:
    """A sweep of 1,000 configurations by the clock."""
    keys: dict[str, Any] = {"mode": "asynchronous", "batch": 128, "group_size": 8}
    before = time.perf_counter()
    found = document.run(keys, SWEEP, steps=STEPS, seed=0)
    seconds = time.perf_counter() - before
    rollouts = sum(row["responses"] for row in found["rows"])
    print(f"{len(found['rows']):,} configurations, {rollouts:,} rollouts: {seconds:.1f} s")
    return {
        "sweep": {
            "configurations": len(found["rows"]),
            "rollouts": rollouts,
            "seconds": seconds,
            "processors": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
        },
        "occupancy_residual": found["occupancy_residual"],
    }


def covering() -> dict[str, Any]:
    """Share of curves whose intervals hold the truth."""
    chunks = [range(at, at + CHUNK) for at in range(0, CURVES, CHUNK)]
    shares: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, base in (("free", None), ("known", coverage.BASE)):
            parts = list(pool.map(partial(coverage.covered, base=base), chunks))
            hits = {key: sum(part[key] for part in parts) for key in coverage.TRUTH}
            shares[f"base {name}"] = {key: count / CURVES for key, count in hits.items()}
            print(f"base {name:6}", shares[f"base {name}"])
    return {"coverage": {"curves": CURVES, "level": 0.95, "shares": shares}}


def main() -> None:
    """Measure, print, write."""
    sections = {"rates": rates, "sweep": sweep, "coverage": covering}
    asked = sys.argv[1:] or list(sections)
    if unknown := set(asked) - set(sections):
        sys.exit(f"{sorted(unknown)}: allowed: {', '.join(sections)}")
    path = RESULTS / "pipeline.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in asked:
        results |= sections[name]()
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
