"""Estimates over a shared denominator: exact moments at a cost that does not know the group size.

The denominator is a sum of weights (self-normalized importance sampling), of tokens (token mean),
or of the tokens of the group again (a baseline weighted by length).  Advantages that are sums over
siblings take any rewards; others are counted where rewards take few values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.toy.exact.affine import affine_coefficients
from windage.toy.exact.classes import signs
from windage.toy.exact.coupled.baseline import by_length, over_lengths
from windage.toy.exact.coupled.counts import by_counts
from windage.toy.exact.coupled.shared import Nodes, Powers, Prompt, nodes_of, others
from windage.toy.exact.coupled.siblings import Sums, by_siblings
from windage.toy.exact.coupled.tilted import Contribution, Expansion, Tilt
from windage.toy.exact.moments import Moments
from windage.toy.exact.prefix_tree import reads_sign
from windage.toy.problems import Problem


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """A denominator that responses share, and what is left of the estimator without it.

    Args:
        estimator: its corrections are those of one response.
        powers: how often the sum of s divides.
        s: what each response adds to the sum.
        leaf: a factor of each response.
        scale: a factor of all.
    """

    estimator: Estimator
    powers: Powers
    s: Float[Tensor, "P K"]
    leaf: Float[Tensor, "P K"]
    scale: float


def affine_sums(estimator: Estimator, problem: Problem, group_size: int) -> Sums:
    """An advantage of the response alone, or affine in the rewards of its group, of one prompt."""
    r = problem.rewards[0]
    if estimator.advantage.traits.scope == "response":
        own = estimator.advantage(problem.rewards, torch.ones_like(problem.rewards).bool())
        if reads_sign(estimator):
            own = torch.cat([own.clamp(min=0), own.clamp(max=0)])
        return Sums(
            own=own,
            sibling=torch.zeros_like(own),
            fixed=own.new_ones(len(own)),
            sign=torch.arange(len(own)),
        )
    center = float(r.mean())
    alpha, beta, gamma = affine_coefficients(estimator.advantage, group_size, center)
    one, zero = torch.ones_like(r), torch.zeros_like(r)
    return Sums(
        own=torch.stack([alpha * (r - center), one]),
        sibling=torch.stack([zero, beta * (r - center)]),
        fixed=r.new_tensor([1.0, gamma]),
        sign=torch.zeros(2, dtype=torch.long),
    )


def is_sums(estimator: Estimator) -> bool:
    """Whether the advantage is a sum over siblings, so that rewards need no counting."""
    traits = estimator.advantage.traits
    if any(m.traits.refill for m in estimator.admission):
        return False
    if traits.scope == "response":
        return True
    return not reads_sign(estimator) and (traits.linear or over_lengths(estimator))


def expansion(prompts: list[Prompt], p: int, tilt: Tilt, nodes: Nodes) -> Expansion:
    """One prompt's part where its advantages look at its own group only."""
    prompt, estimator = prompts[p], prompts[p].estimator
    rest = others(prompts, p, nodes.others, conditioned=True)
    first, second = nodes.first * rest, nodes.second * rest
    number = len(signs(estimator))
    if not is_sums(estimator):
        kept, groups = prompt.kept(tilt), prompt.groups
        table = (prompt.members, groups.counts, groups.advantages)
        return by_counts(tilt, *table, kept * first, kept * second, number)
    find: Callable[[Estimator, Problem, int], Sums] = affine_sums
    sums = (by_length if over_lengths(estimator) else find)(
        estimator, prompt.problem, prompt.group_size
    )
    return by_siblings(tilt, sums, prompt.group_size, first, second, number)


Expand = Callable[[list[Prompt], int, Tilt, Nodes], Expansion]


def ratios(
    shared: Shared,
    problem: Problem,
    group_size: int,
    *,
    expand: Expand = expansion,
    classes_by_length: bool = False,
) -> Moments:
    """Mean, variance and drift of an estimator over a shared denominator.

    Args:
        shared: of `weights` or `tokens`.
        problem: all prompts.
        group_size: responses of a group.
        expand: one prompt's part, given the prompts and the nodes.
        classes_by_length: whether that counts groups by length as well as by reward.
    """
    estimator = shared.estimator
    prompts = [
        Prompt(
            estimator,
            problem.select(p),
            group_size,
            shared.s[p : p + 1],
            by_length=classes_by_length,
        )
        for p in range(problem.prompts)
    ]
    extra = int(over_lengths(estimator))
    powers = Powers(group=shared.powers.group + extra, batch=shared.powers.batch)
    means, drifts, variance = [], [], problem.logits.new_zeros(())
    for p, prompt in enumerate(prompts):
        one = Contribution(estimator, prompt.walk, shared.leaf[p])
        nodes = nodes_of(prompts, p, powers.merged(problem.prompts))
        tilt = Tilt(prompt.walk, prompt.s, nodes.own)
        drift = _drift(prompts, p, shared.powers.merged(problem.prompts))
        mean, square, plain = one.moments(tilt, expand(prompts, p, tilt, nodes), drift)
        means.append(mean)
        drifts.append(plain)
        variance = variance + square - mean @ mean
    return Moments(
        mean=shared.scale * torch.stack(means).unsqueeze(1),
        variance=shared.scale**2 * variance,
        drift=shared.scale * torch.stack(drifts).unsqueeze(1),
    ).shaped(problem.logits.shape)


def _drift(prompts: list[Prompt], p: int, powers: Powers) -> Float[Tensor, " K"]:
    """Function of the response whose mean with x is that of advantage 1, nothing refused."""
    prompt, nodes = prompts[p], nodes_of(prompts, p, powers)
    tilt = Tilt(prompt.walk, prompt.s, nodes.own)
    mass = tilt.mass(torch.ones_like(prompt.s).unsqueeze(0))[0]
    rest = others(prompts, p, nodes.others, conditioned=False)
    weights = nodes.first * rest * prompt.group_size * mass.pow(prompt.group_size - 1)
    return tilt.weighted(weights.unsqueeze(0))[0]
