"""Moments by counting classes of responses (E2).

Responses fall into classes of equal reward (and equal length, where a denominator counts the group's
tokens).  Given the counts n of the classes in a group, the advantage of each class and the
denominator are known, and the contributions of the members are independent draws from their class:

    E|g|^2 = sum over n of P(n) [ B' (M M') B + sum over c of n_c A_c^2 (S_c - |M_c|^2) ]
    B_c = n_c A_c,   M_c = E[x | c],   S_c = E[|x|^2 | c]

with M and S kept for each sign of the advantage where a map reads it.  Admissions that refill
condition P(n) on the groups kept.  A denominator over the whole batch is averaged over the law of
the other prompts' tokens, a convolution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.estimators.member import Member
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.prefix_tree import Walk, response_moments, response_scale, tree_weights
from windage.toy.exact.tuples import compositions, multinomial, spread, unit, ways
from windage.toy.problems import Problem

FEW = 16


def levels(values: Float[Tensor, " M"]) -> Float[Tensor, " R"]:
    """The distinct values, in ascending order, without a sort where they are few.

    Example:
        >>> levels(torch.tensor([1.0, 0.0, 1.0]))
        tensor([0., 1.])
    """
    found = []
    low = values.min()
    for _ in range(FEW):
        found.append(low)
        above = torch.where(values > low, values, torch.inf)
        low = above.min()
        if low == torch.inf:
            return torch.stack(found)
    return values.unique()


def class_values(
    problem: Problem, walk: Walk, *, by_length: bool
) -> tuple[Float[Tensor, "R 2"], Float[Tensor, "R M"]]:
    """Reward and length of each class of one prompt's drawn responses, and who belongs to it."""
    drawn = walk.leaf_flow[0] > 0
    rewards, lengths = problem.rewards[0], problem.lengths[0].double()
    pairs, members = [], []
    sizes = levels(lengths[drawn]) if by_length else lengths[:1]
    for reward in levels(rewards[drawn]):
        here = (rewards == reward) & drawn
        for size in sizes:
            mine = here & (lengths == size) if by_length else here
            if not by_length or bool(mine.any()):
                pairs.append(torch.stack([reward, size]))
                members.append(mine)
    return torch.stack(pairs), torch.stack(members).double()


@final
class Groups:
    """The groups of one prompt by the counts of its classes: probability, advantages, tokens."""

    def __init__(self, estimator: Estimator, problem: Problem, group_size: int) -> None:
        self.group_size = group_size
        self.walk = Walk(problem)
        coupled = estimator.aggregation.traits.scope in ("group", "batch")
        self.values, self.members = class_values(problem, self.walk, by_length=coupled)
        self.mass = self.members @ self.walk.leaf_flow[0]
        self.counts = compositions(len(self.mass), group_size)
        self.chance = multinomial(self.counts, self.mass)
        who = spread(self.counts, group_size)
        rewards = self.values[who, 0].unsqueeze(1)
        present = torch.ones_like(rewards, dtype=torch.bool)
        fields = {"rewards": rewards, "outcomes": rewards, "present": present}
        advantage = estimator.advantage
        found = advantage(*(fields[n] for n in advantage.traits.needs)).squeeze(1)
        shape = (len(who), len(self.mass))
        self.advantages = found.new_zeros(shape).scatter(1, who, found)
        keep = torch.ones(len(who), dtype=torch.bool)
        for member in estimator.admission:
            if member.traits.refill:
                keep &= member(*(fields[n] for n in member.traits.needs)).any(-1).any(-1)
        accepted = self.chance * keep
        total = accepted.sum()
        if total <= 0:
            raise Undefined("every group is degenerate: no reward varies")
        self.probability = accepted / total
        self.tokens = (self.counts * self.values[:, 1].long()).sum(1)


def _others(laws: list[Tensor], skip: int) -> Tensor:
    """Law of the tokens of all prompts but one."""
    law = torch.ones(1, dtype=torch.float64)
    for q, other in enumerate(laws):
        if q != skip:
            flipped = other.flip(0)[None, None]
            pad = len(other) - 1
            law = torch.nn.functional.conv1d(law[None, None], flipped, padding=pad)[0, 0]
    return law


def _scales(
    aggregation: Member, tokens: Int[Tensor, " M"], law: Tensor, prompts: int, group_size: int
) -> tuple[Tensor, Tensor]:
    """First two moments of the coefficient for each group, over the other prompts' tokens.

    The aggregation is called on lengths that carry the totals in one response of each; it may look
    at nothing else.
    """
    own, index = tokens.unique(return_inverse=True)
    rest = torch.nonzero(law).squeeze(1)
    lengths = torch.zeros((len(own), len(rest), prompts, group_size), dtype=torch.long)
    lengths[:, :, 0, 0] = own.unsqueeze(1)
    if prompts > 1:
        lengths[:, :, 1, 0] = rest
    table = aggregation(lengths, torch.ones_like(lengths, dtype=torch.bool))[:, :, 0, 0]
    return (table @ law[rest])[index], (table.square() @ law[rest])[index]


def _one_prompt(
    estimator: Estimator,
    group: Groups,
    scale: Float[Tensor, "1 M"],
    first: Float[Tensor, " C"],
    second: Float[Tensor, " C"],
) -> tuple[Tensor, Tensor]:
    """Mean and mean square of one prompt's part, given the denominators' moments by group."""
    reads = any(c.map.traits.reads == "sign" for c in estimator.corrections)
    members = group.members.unsqueeze(1)
    means, totals = [], []
    own = torch.zeros((), dtype=torch.float64)
    for sign in (1.0, -1.0) if reads else (1.0,):
        weights = tree_weights(estimator, group.walk, sign)
        x, q = response_moments(
            group.walk, weights, sign, members * scale, members * scale.square()
        )
        m = x[:, 0].flatten(1) / group.mass.unsqueeze(1)
        means.append(m)
        mine = (group.advantages * sign > 0) if reads else torch.ones_like(group.counts)
        totals.append(group.counts * group.advantages * mine)
        spreads = q[:, 0] / group.mass - m.square().sum(1)
        chosen = (group.counts * group.advantages.square() * mine) @ spreads
        own = own + (group.probability * second * chosen).sum()
    m, b = torch.cat(means), torch.cat(totals, 1)
    between = torch.einsum("ma,ab,mb->m", b, m @ m.T, b)
    square = own + (group.probability * second * between).sum()
    return ((group.probability * first) @ b) @ m, square


def _mean_and_variance(
    estimator: Estimator, problem: Problem, group_size: int
) -> tuple[Tensor, Tensor]:
    groups = [Groups(estimator, problem.select(p), group_size) for p in range(problem.prompts)]
    coupled = estimator.aggregation.traits.scope in ("group", "batch")
    if coupled:
        laws = [torch.bincount(g.tokens, g.probability) for g in groups]
        scale = torch.ones_like(problem.rewards)
    else:
        scale = response_scale(estimator.aggregation, problem.lengths, group_size)
    means = []
    variance = torch.zeros((), dtype=torch.float64)
    for p, group in enumerate(groups):
        first = second = torch.ones_like(group.probability)
        if coupled:
            law = _others(laws, p)
            first, second = _scales(
                estimator.aggregation, group.tokens, law, problem.prompts, group_size
            )
        mean, square = _one_prompt(estimator, group, scale[p : p + 1], first, second)
        means.append(mean.view_as(problem.logits[0]))
        variance = variance + square - mean.square().sum()
    return torch.stack(means), variance


def classes(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean and variance from counts of classes, prompt by prompt."""
    mean, variance = _mean_and_variance(estimator, problem, group_size)
    equal = replace(problem, rewards=torch.ones_like(problem.rewards))
    drift, _ = _mean_and_variance(unit(estimator), equal, group_size)
    return Moments(mean=mean, variance=variance, drift=drift)


def count_classes(estimator: Estimator, problem: Problem, group_size: int) -> float:
    """Compositions that `classes` would list, over all prompts."""
    coupled = estimator.aggregation.traits.scope in ("group", "batch")
    sizes = len(problem.lengths[0].unique()) if coupled else 1
    total = 0.0
    for rewards in problem.rewards:
        total += ways(len(levels(rewards)) * sizes, group_size)
    return total
