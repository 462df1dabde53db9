"""The built-in study: the whole catalogue over lag and length, exactly, in seconds.

Three prompts are solved 20, 50 and 80 % of the time at every length.  A response is a fixed number
of tokens and earns 1 if at least half of them are right.  The sampler is some exact gradient steps
behind; the step size is set so that one step moves the policy by the same divergence a token at
every length.  Lengths are equal within a study, so that a batch of N responses is the average of
N / RESPONSES independent batches for every entry, and one exact variance serves every N.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from windage.analysis.studies.reading import reading
from windage.analysis.studies.study import SCHEMA, about_objective, about_problem, bind, row
from windage.estimators.catalogue import FIRST
from windage.estimators.estimator import Estimator
from windage.toy.behavior import with_behavior
from windage.toy.exact.walk import Walk
from windage.toy.objective import Objective, objective
from windage.toy.problems import Problem, Tree, make

LENGTHS = (2, 4, 8, 12)
LAGS = (0, 1, 2, 4, 8, 16, 32)
SUCCESS = (0.2, 0.5, 0.8)
GROUP_SIZE = 8
RESPONSES = GROUP_SIZE * len(SUCCESS)
BATCHES = (384, 3072, 24576)
DIVERGENCE = 1e-3
AMPLITUDE = 0.6


def problem(length: int, success: Sequence[float] = SUCCESS) -> Problem:
    """Prompts of stated success at one length: logits vary from prefix to prefix, token 1 is right.

    Args:
        length: tokens of every response.
        success: chance of reward 1, a prompt, under the policy.

    Example:
        >>> round(float(objective(problem(4, (0.2,))).value), 6)
        0.2
    """
    tree = Tree(2, None, length)
    right = (2 * tree.paths[1].sum(-1) >= length).double()
    target = torch.tensor(success, dtype=torch.float64)
    shape = (len(success), tree.prefixes, tree.vocab)
    waves = AMPLITUDE * torch.sin(torch.arange(math.prod(shape)).double()).view(shape)

    def slanted(offset: Tensor) -> Problem:
        logits = waves.clone()
        logits[..., 1] += offset.unsqueeze(-1)
        return make(f"length {length}", tree, logits, right.expand(len(success), -1))

    low, high = target.new_full(target.shape, -8.0), target.new_full(target.shape, 8.0)
    for _ in range(30):
        middle = (low + high) / 2
        solved = (Walk(slanted(middle)).leaf_probability * right).sum(-1)
        low, high = (
            torch.where(solved < target, middle, low),
            torch.where(solved < target, high, middle),
        )
    return slanted((low + high) / 2)


def divergence(problem: Problem) -> Float[Tensor, ""]:
    """KL(policy | sampler) a token, in nats, averaged over prompts."""
    walk = Walk(problem)
    total = (walk.leaf_probability * walk.at_leaves(walk.path_ratio)).sum(-1)
    return total.mean() / problem.tree.horizon


def rate(problem: Problem, target: float = DIVERGENCE) -> float:
    """The step size at which one step of lag has the stated divergence a token.

    A divergence grows with the square of a small step, so that a few corrections suffice.
    """
    step = 1.0
    for _ in range(6):
        behind = with_behavior(problem, "stale", steps=1, rate=step)
        step *= math.sqrt(target / float(divergence(behind)))
    return step


def effective_share(problem: Problem) -> Float[Tensor, ""]:
    """Effective sample size of the trajectory ratio w, a response: mean of 1 / E[w^2]."""
    walk = Walk(problem)
    square = (walk.leaf_flow * (2 * walk.at_leaves(walk.path_ratio)).exp()).sum(-1)
    return (1 / square).mean()


def line(estimator: Estimator, problem: Problem, target: Objective, steps: int) -> dict[str, Any]:
    """An estimator's exact figures at one lag and length.

    The mean is left out: over the whole study it would fill 70 MB.
    """
    found = row(bind(estimator, problem), problem, target, GROUP_SIZE)
    spread = found["variance_rescaled"]
    noise = None if spread is None else math.sqrt(max(0.0, spread)) / found["gradient_norm"]
    place = {"horizon": problem.tree.horizon, "steps": steps}
    return {**found, "mean": None, **place, "noise": noise}


def site(problem: Problem, steps: int, step: float) -> dict[str, Any]:
    """What one lag and length are like, whatever the estimator."""
    return {
        "horizon": problem.tree.horizon,
        "steps": steps,
        "rate": step,
        "divergence": float(divergence(problem)),
        "effective_share": float(effective_share(problem)),
        "parameters": problem.logits.numel(),
    }


def run(advance: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """The document of `windage study` without arguments; problem and objective of the first length.

    Args:
        advance: told after each lag and length how many of how many rows are done.
    """
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    sites = []
    first = problem(LENGTHS[0])
    total = len(LENGTHS) * len(LAGS) * len(FIRST)
    for length in LENGTHS:
        fresh = problem(length)
        target, step = objective(fresh), rate(fresh)
        for steps in LAGS:
            behind = with_behavior(fresh, "stale", steps=steps, rate=step)
            sites.append(site(behind, steps, step))
            rows += [line(entry, behind, target, steps) for entry in FIRST]
            advance(len(rows), total)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "study": "staleness",
        "problem": {**about_problem(first), "name": "staleness", "success": list(SUCCESS)},
        "objective": about_objective(objective(first)),
        "behavior": {"kind": "stale", "divergence": DIVERGENCE},
        "sweep": {"horizon": list(LENGTHS), "steps": list(LAGS)},
        "responses": {"batch": RESPONSES, "shown": list(BATCHES)},
        "sites": sites,
        "rows": rows,
    }
    return {**document, "reading": reading(document), "seconds": time.perf_counter() - start}
