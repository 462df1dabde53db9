"""Whether the planner picks the fastest engine: every valid engine timed on a grid of problems.

    python benchmarks/planner.py

Prints, for each problem, group size and entry, the planner's choice, the fastest engine and how
many times longer the choice takes; writes benchmarks/results/planner.json.  Times are of the
processor, so that other work on the machine counts less.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from windage.estimators.catalogue import CATALOGUE
from windage.toy.behavior import with_behavior
from windage.toy.exact.moments import Undefined
from windage.toy.exact.plan import exact, options, plan
from windage.toy.problems import Problem, Tree, make

RESULTS = Path(__file__).parent / "results"
NAMES = ("reinforce", "rloo", "suffix_is", "grpo", "dapo", "cispo", "topr", "centered_tis")
TREES = (Tree(2, None, 1), Tree(8, None, 1), Tree(3, 2, 3), Tree(2, None, 6), Tree(64, None, 1))
LONGEST = 2e7


def drawn(tree: Tree, prompts: int, kinds: int) -> Problem:
    """Normal logits, noise on the sampler's, and rewards of so many kinds."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(
        (prompts, tree.prefixes, tree.vocab), generator=generator, dtype=torch.float64
    )
    rewards = torch.randint(kinds, (prompts, tree.leaves), generator=generator).double()
    return with_behavior(make("drawn", tree, logits, rewards), "noise", sigma=0.3)


def least(call: Callable[[], Any]) -> float:
    """Least processor time of a call."""
    call()
    times = []
    start = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - start < 0.1 and len(times) < 50):
        before = time.process_time()
        call()
        times.append(time.process_time() - before)
    return min(times)


def row(problem: Problem, name: str, group_size: int) -> dict[str, Any] | None:
    """Times of every engine that serves an entry, and the planner's choice among them."""
    estimator = CATALOGUE[name]
    times = {}
    for option in options(estimator, problem, group_size):
        if option.refusal is None and option.cost < LONGEST:
            try:
                times[option.engine] = least(
                    lambda e=option.engine: exact(estimator, replace(problem), group_size, e)
                )
            except Undefined:
                return None
    chosen = plan(estimator, problem, group_size).engine
    if chosen not in times:
        return None
    fastest = min(times, key=lambda e: times[e])
    return {
        "responses": problem.tree.leaves,
        "prompts": problem.prompts,
        "kinds": len(problem.rewards.unique()),
        "group_size": group_size,
        "estimator": name,
        "chosen": chosen,
        "fastest": fastest,
        "times_longer": times[chosen] / times[fastest],
        "milliseconds": {engine: 1e3 * t for engine, t in times.items()},
    }


def main() -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    rows = []
    for tree in TREES:
        for prompts, kinds, group_size in ((1, 2, 2), (1, 2, 8), (1, 6, 4), (2, 2, 3)):
            problem = drawn(tree, prompts, kinds)
            for name in NAMES:
                if (found := row(problem, name, group_size)) is not None:
                    rows.append(found)
                    print(" ".join(f"{k}={v}" for k, v in found.items() if k != "milliseconds"))
    worst = max(rows, key=lambda r: r["times_longer"])
    right = sum(r["times_longer"] < 1.1 for r in rows)
    print(f"{right} of {len(rows)} within 10 % of the fastest; worst: {worst}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "planner.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
