"""What more seeds cost: training steps of tabular problems with 1 and with 64 seeds.

    python benchmarks/tabular.py

Prints processor milliseconds a step, the least of several runs, and how many times longer 64 seeds
take than one; writes benchmarks/results/tabular.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from windage.estimators.catalogue import get
from windage.toy.ascent import Ascent, Sampler
from windage.toy.problems import Problem, bandit, difficulties, token_tree, trajectories
from windage.toy.sums import generators
from windage.toy.tabular import Table, along_means, along_samples

RESULT = Path(__file__).parent / "results" / "tabular.json"
PROBLEMS: tuple[Callable[[], Problem], ...] = (bandit, trajectories, token_tree, difficulties)
STEPS, RUNS, MANY = 100, 5, 64


def milliseconds(walk: Callable[..., object], problem: Problem, seeds: int) -> float:
    """Processor time of one step."""
    table, found = Table.repeated(problem, seeds), []
    for _ in range(RUNS):
        before = time.process_time()
        states = walk(
            table,
            get("rloo"),
            Ascent(optimizer="sgd", rate=0.1),
            Sampler(lag=4),
            generators(range(seeds)),
            steps=STEPS,
        )
        list(states)  # type: ignore[call-overload]
        found.append(time.process_time() - before)
    return 1e3 * min(found) / STEPS


def main() -> None:
    """Measure, print and write every row."""
    torch.set_num_threads(1)
    rows = []
    for make in PROBLEMS:
        problem = make().on_policy()
        for walk in (along_means, along_samples):
            one, many = (milliseconds(walk, problem, seeds) for seeds in (1, MANY))
            row = {
                "problem": problem.name,
                "walk": walk.__name__,
                "one_seed_ms": round(one, 3),
                "many_seeds_ms": round(many, 3),
                "seeds": MANY,
                "times": round(many / one, 2),
            }
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()))
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
