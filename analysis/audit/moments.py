"""Claims about means: bias, scale, drift and shift, by exact moments on generated problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import final

import torch
from torch import Tensor

from windage.analysis.audit.objectives import defined, other_gradient
from windage.analysis.audit.rows import Finding, worst
from windage.analysis.claims.measures import edited, moments, relative, valued
from windage.analysis.claims.problems import tree
from windage.estimators.advantage import constant
from windage.estimators.batch import Batch
from windage.estimators.claims import Claim
from windage.estimators.estimator import Estimator
from windage.toy.exact.moments import Moments
from windage.toy.exact.tuples import every_multiset
from windage.toy.exact.walk import Walk, pull_back
from windage.toy.objective import objective
from windage.toy.problems import Problem, Tree, make

SHIFT = 3.75
VALUED_MEANS = ("scale_on_policy", "mean", "objective")


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A problem and a group size, with the name that rows print."""

    name: str
    problem: Problem
    group_size: int

    @cached_property
    def gradient(self) -> Tensor:
        """Of the expected reward."""
        return objective(self.problem).gradient

    @cached_property
    def variants(self) -> tuple[Problem, Problem, Problem]:
        """On-policy, off-policy, and off-policy with a shift of the rewards."""
        shifted = replace(self.problem, rewards=self.problem.rewards + SHIFT)
        return self.problem.on_policy(), self.problem, shifted


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """Exact moments of an estimator on a case: on-policy, off-policy, off-policy with a shift."""

    case: Case
    gradient: Tensor
    on: Moments
    off: Moments
    shifted: Moments


def _random(
    generator: torch.Generator, shape: Tree, prompts: int, levels: int | None, far: float
) -> Problem:
    """A random tree whose sampler covers the policy and is `far` off; rewards real or of levels."""

    def normal(scale: float) -> Tensor:
        size = (prompts, shape.prefixes, shape.vocab)
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    logits = normal(0.8)
    size = (prompts, shape.leaves)
    rewards = torch.randn(size, generator=generator, dtype=torch.float64)
    if levels is not None:
        rewards = (torch.rand(size, generator=generator, dtype=torch.float64) < 0.4).double()
        rewards[:, 0], rewards[:, 1] = 0.0, 1.0
        rewards = rewards if levels == 1 else 2 * rewards - 1
    return make("generated", shape, logits, rewards, behavior=logits + normal(far))


@lru_cache(maxsize=16)
def generated(seed: int) -> tuple[Case, ...]:
    """Random problems: one and two prompts, with and without a stop, three kinds of reward."""
    generator = torch.Generator().manual_seed(seed)
    kinds = (
        ("one prompt, stop token, real rewards", Tree(3, 2, 2), 1, None, 0.6, 2),
        ("one prompt, stop token first, binary rewards", Tree(3, 0, 3), 1, 1, 0.6, 3),
        ("one prompt, fixed length, rewards of ±1", Tree(2, None, 3), 1, -1, 0.6, 4),
        ("one prompt, stop token, a sampler far off", Tree(3, 2, 2), 1, None, 2.5, 3),
        ("two prompts, stop token, rewards of ±1", Tree(2, 1, 3), 2, -1, 0.6, 2),
        ("two prompts, stop token, binary rewards", Tree(3, 2, 2), 2, 1, 0.6, 4),
        ("two prompts, stop token, real rewards", Tree(2, 1, 3), 2, None, 0.6, 3),
    )
    return tuple(
        Case(
            name=f"generated (seed {seed}): {words}, G = {size}",
            problem=_random(generator, shape, prompts, levels, far),
            group_size=size,
        )
        for words, shape, prompts, levels, far, size in kinds
    )


@cache
def witnesses() -> tuple[Case, ...]:
    """Named problems on which what is claimed not to hold must show it."""
    plain = tree()
    signed = replace(plain, rewards=2 * plain.rewards - 1)
    real = replace(plain, rewards=torch.sin(2 + 3 * torch.arange(plain.tree.leaves)).double()[None])
    return (
        Case(name="TREE, G = 3", problem=plain, group_size=3),
        Case(name="TREE with rewards 2R - 1, G = 2", problem=signed, group_size=2),
        Case(name="TREE with real rewards, G = 3", problem=real, group_size=3),
    )


def sized(estimator: Estimator, length: float) -> Estimator:
    """The estimator with its aggregation's constant length filled in, where it has none."""
    settings = dict(estimator.aggregation.settings)
    if "length" not in settings or settings["length"] is not None:
        return estimator
    return replace(estimator, aggregation=estimator.aggregation.change(length=length))


def facts(estimator: Estimator, case: Case) -> Facts | None:
    """Moments of an estimator on a case; None where it needs a critic and there are two prompts."""
    problem = case.problem
    ready = sized(estimator, problem.tree.horizon)
    if ready.advantage.traits.rewards == "nonnegative":
        problem = replace(problem, rewards=problem.rewards - problem.rewards.min().clamp(max=0))
        case = replace(case, problem=problem)

    def run(variant: Problem) -> Moments:
        if "values" in ready.needs:
            critic = torch.sin(1 + 2 * torch.arange(problem.tree.prefixes, dtype=torch.float64))
            edit = valued(variant, critic)
        elif "components" in ready.needs:
            edit = parted
        else:
            return moments(ready, variant, case.group_size)
        draws = every_multiset(variant, case.group_size)
        return edited(ready, variant, edit, draws=draws)

    if "values" in ready.needs and problem.prompts > 1:
        return None
    on, off, shifted = map(run, case.variants)
    return Facts(case=case, gradient=case.gradient, on=on, off=off, shifted=shifted)


def parted(batch: Batch, index: Tensor) -> Batch:
    """Two components of each reward that add up to it, apart by a number of the response's own."""
    tilt = torch.sin(1 + 2 * index.double())
    components = torch.stack([batch.rewards / 2 + tilt, batch.rewards / 2 - tilt], -1)
    return replace(batch, components=components)


def _bias(mean: Tensor, found: Facts) -> float:
    return relative(mean - found.gradient, found.gradient)


def _parallel(found: Facts) -> float:
    """Bias after the best positive factor; infinite where the factor is not positive."""
    along = float((found.on.mean * found.gradient).sum() / found.gradient.square().sum())
    return _bias(found.on.mean / along, found) if along > 0 else math.inf


MEASURES: Mapping[str, Callable[[Facts], float]] = {
    "unbiased_on_policy": lambda found: _bias(found.on.mean, found),
    "parallel_on_policy": _parallel,
    "unbiased_off_policy": lambda found: _bias(found.off.mean, found),
    "zero_drift_on_policy": lambda found: float(found.on.drift.norm()),
    "zero_drift": lambda found: float(found.off.drift.norm()),
    "shift_invariant": lambda found: relative(found.shifted.mean - found.off.mean, found.gradient),
}


def factor(value: str, group_size: int, length: float) -> float:
    """A declared multiple, at a group size and a constant length.

    Example:
        >>> factor("(G - 1) / (G L)", 4, 3.0)
        0.25
    """
    g, size = group_size, length
    return {
        "1": 1.0,
        "(G - 1) / G": (g - 1) / g,
        "1 / L": 1 / size,
        "(G - 1) / (G L)": (g - 1) / (g * size),
    }[value]


def identity(problem: Problem, value: str, baseline: Tensor) -> Tensor:
    """Mean of (R - b) times the score, with prefix, token and rest from the policies named.

        sum over y, t of  d(y[<t]) a(y[t]) q(y[>t]) (R(y) - b) grad log pi(y[t])

    Args:
        problem: with full support.
        value: such as "prefix mu, token pi, rest mu".
        baseline: one a prompt.
    """
    prefixes, tokens = problem.tree.paths
    real = prefixes >= 0
    place = torch.where(real, prefixes.clamp(min=0) * problem.tree.vocab + tokens.clamp(min=0), 0)
    tables = {"pi": problem.logp, "mu": problem.behavior_logp}
    before, token, after = (
        torch.where(real, tables[words.split()[1]].flatten(1)[:, place], 0.0)
        for words in value.split(", ")
    )
    earlier = before.cumsum(-1) - before
    later = after.sum(-1, keepdim=True) - after.cumsum(-1)
    mass = (earlier + token + later).exp() * real
    paid = (problem.rewards - baseline.unsqueeze(-1)).unsqueeze(-1) * mass
    visits = torch.zeros_like(problem.logits).flatten(1)
    visits.scatter_add_(1, place.flatten().expand(problem.prompts, -1), paid.flatten(1))
    table = visits.view_as(problem.logits)
    return pull_back(table, problem.logp.exp()) / problem.prompts


def _expected(estimator: Estimator, claim: Claim, found: Facts, multiple: str) -> Tensor:
    case, problem = found.case, found.case.problem
    if claim.property == "objective":
        assert claim.value is not None
        return other_gradient(claim.value, problem, case.group_size, estimator.settings)
    length = float(dict(estimator.aggregation.settings).get("length") or problem.tree.horizon)
    times = factor(multiple, case.group_size, length)
    if claim.property == "scale_on_policy":
        return times * found.gradient
    if estimator.advantage.function is constant:
        settings = dict(estimator.advantage.settings)
        baseline = torch.full((problem.prompts,), float(settings["baseline"]), dtype=torch.float64)
    else:
        baseline = (Walk(problem).leaf_flow * problem.rewards).sum(-1)
    assert claim.value is not None
    return times * identity(problem, claim.value, baseline)


def boolean(claim: Claim, known: list[Facts]) -> Finding:
    """The largest departure from a property; for a claim that it does not hold, on a witness."""
    measure = MEASURES[claim.property]
    named = {case.name for case in witnesses()}
    chosen = [
        found
        for found in known
        if (claim.holds or found.case.name in named)
        and (claim.property != "parallel_on_policy" or found.case.problem.prompts == 1)
    ]
    return worst([Finding(size=measure(found), witness=found.case.name) for found in chosen])


def valued_mean(estimator: Estimator, claim: Claim, known: list[Facts]) -> Finding:
    """The largest departure of a mean from the multiple or the identity that is declared."""
    own = {c.property: c.value for c in estimator.claims}
    multiple = claim.value if claim.property == "scale_on_policy" else own.get("scale_on_policy")
    sizes = []
    for found in known:
        if claim.property == "objective" and not defined(claim.value, found.case.problem):
            continue
        expected = _expected(estimator, claim, found, multiple or "1")
        mean = found.off.mean if claim.property == "mean" else found.on.mean
        size = relative(mean - expected, found.gradient)
        sizes.append(Finding(size=size, witness=found.case.name))
    return worst(sizes)
