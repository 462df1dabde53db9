"""What a user would do instead of an exact engine: draw groups, differentiate, average.

Both baselines are given the groups, the sampler's log-probabilities and the advantages, which
favors them.  The weight of a response is the entry's own map, called on detached log-ratios, so
that one loss serves every entry whose weight is elementwise: -mean(weight * advantage * logp).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.toy.problems import Problem

CHUNKS = (256, 1024, 4096, 16384)
MOST_NUMBERS = 2e8


def seconds(call: Callable[[], Any], *, budget: float) -> tuple[float, float]:
    """Least and median time of a call in a steady state."""
    call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - start < budget:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    times.sort()
    return times[0], times[len(times) // 2]


@dataclass(frozen=True)
class Groups:
    """Responses of one prompt in groups: places in the table of logits by token, and what is known.

    Every response has the length of the horizon.
    """

    places: Tensor
    behavior: Tensor
    advantages: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """In the order of `loss`."""
        return self.places, self.behavior, self.advantages


def draw(estimator: Estimator, problem: Problem, count: int, group_size: int, seed: int) -> Groups:
    """Groups from the sampler; those that admission refuses are drawn again."""
    generator = torch.Generator().manual_seed(seed)
    prefixes, tokens = problem.tree.paths
    places = prefixes * problem.tree.vocab + tokens
    behavior = problem.behavior_logp.flatten()[places].sum(-1)
    chance = behavior.exp()
    found: list[Tensor] = []
    while sum(map(len, found)) < count:
        chosen = torch.multinomial(chance, count * group_size, True, generator=generator)
        chosen = chosen.view(count, group_size)
        rewards = problem.rewards[0][chosen].unsqueeze(1)
        keep = torch.ones(count, dtype=torch.bool)
        for member in estimator.admission:
            if member.traits.refill:
                keep &= member(rewards, torch.ones_like(rewards, dtype=torch.bool)).any((-2, -1))
        found.append(chosen[keep])
    chosen = torch.cat(found)[:count]
    rewards = problem.rewards[0][chosen].unsqueeze(1)
    fields = {"rewards": rewards, "present": torch.ones_like(rewards, dtype=torch.bool)}
    advantages = estimator.advantage(*(fields[n] for n in estimator.advantage.traits.needs))
    return Groups(places[chosen], behavior[chosen], advantages.squeeze(1))


def loss(
    estimator: Estimator, logits: Tensor, places: Tensor, behavior: Tensor, advantages: Tensor
) -> Tensor:
    """The loss of one group."""
    logp = logits.log_softmax(-1).flatten()[places].sum(-1)
    for correction in estimator.corrections:
        if not correction.idle:
            advantages = advantages * correction.map(logp.detach() - behavior, advantages)
    return -(advantages * logp).mean()


def by_loop(estimator: Estimator, problem: Problem, group_size: int, budget: float) -> float:
    """Groups a second of a Python loop with `backward()` for each group."""
    logits = problem.logits[0].clone().requires_grad_()
    found = draw(estimator, problem, 500, group_size, seed=1)
    rows = list(zip(*found.rows, strict=True))

    def call() -> None:
        for row in rows:
            loss(estimator, logits, *row).backward()
        logits.grad = None

    return len(rows) / seconds(call, budget=budget)[0]


def gradients(estimator: Estimator, problem: Problem, groups: Groups) -> Tensor:
    """Estimates of each group by `torch.func.vmap` of the gradient."""

    def one(logits: Tensor, *row: Tensor) -> Tensor:
        return torch.func.grad(lambda z: loss(estimator, z, *row))(logits)

    mapped = torch.func.vmap(one, in_dims=(None, 0, 0, 0))
    return -mapped(problem.logits[0], *groups.rows)


def by_vmap(
    estimator: Estimator, problem: Problem, group_size: int, budget: float
) -> tuple[float, int]:
    """Groups a second of `vmap(grad)` at its best chunk, and that chunk."""
    best, chunk = 0.0, 0
    for size in CHUNKS:
        if chunk and size * problem.logits[0].numel() * group_size > MOST_NUMBERS:
            break
        groups = draw(estimator, problem, size, group_size, seed=2)
        call = lambda g=groups: gradients(estimator, problem, g).sum(0)  # noqa: E731
        least, _ = seconds(call, budget=budget / 4)
        if size / least > best:
            best, chunk = size / least, size
    return best, chunk


def spread(
    estimator: Estimator, problem: Problem, group_size: int, mean: Tensor, direction: Tensor
) -> float:
    """Variance of the estimates along a direction, after a check of their mean.

    Raises:
        AssertionError: the baseline estimates something else than the engine.
    """
    most = max(500, min(20_000, int(MOST_NUMBERS / mean.numel() / group_size)))
    drawn = gradients(estimator, problem, draw(estimator, problem, most, group_size, seed=3))
    flat = drawn.flatten(1)
    error = (flat.mean(0) - mean.flatten()).norm() / flat.std(0).norm() * math.sqrt(len(flat))
    assert error < 5, f"{estimator.name}: loss and engine differ by {error:.1f} standard errors"
    return float((flat @ direction.flatten()).var())
