"""Moments of a batch from those of one response, where advantages are affine in the rewards.

An advantage alpha (r_i - c) + beta (sum of the siblings' r_j - c) + gamma needs the features 1,
r - c and (r - c)^2 of one response only, whatever the group size and the number of rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.estimators.member import Member
from windage.toy.exact.kept import kept, weighing
from windage.toy.exact.moments import Moments
from windage.toy.exact.penalties import shaped
from windage.toy.exact.prefix_tree import (
    Penalized,
    penalty_moments,
    reads_sign,
    response_moments,
    response_scale,
    tree_weights,
)
from windage.toy.exact.walk import Walk, dot
from windage.toy.problems import Problem

# A number c, and the first two moments of reward - c by prompt.
Law = tuple[float, Float[Tensor, " P"], Float[Tensor, " P"]]


def affine(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean and variance where the advantage is affine in the rewards and no map reads its sign."""
    scale, leaf = response_scale(estimator.aggregation, problem, group_size)
    key = "affine", weighing(estimator), None if leaf is None else estimator.aggregation
    law, x, q, extra = kept(problem, key, _by_reward, estimator, problem, leaf)
    in_group = "group", estimator.advantage, estimator.active_penalties, group_size
    group = kept(problem, in_group, group_law, estimator.advantage, group_size, law)
    found = batch_moments(group, scale, x, q)
    return found if extra is None else with_penalties(found, group, scale, x, extra)


def _by_reward(
    estimator: Estimator, problem: Problem, leaf: Tensor | None
) -> tuple[Law, Tensor, Tensor, Penalized | None]:
    """The rewards' law and one response's moments by powers of its reward."""
    walk = kept(problem, "walk", Walk, problem)
    weights = tree_weights(estimator, walk, 1.0, leaf)
    rewards = shaped(estimator, problem.rewards, problem.lengths)
    center = dot(walk.leaf_flow, rewards).mean()
    r = rewards - center
    powers = (None, r, r.square())
    x, q = response_moments(walk, weights, 1.0, powers, powers)
    first, second = (dot(walk.leaf_flow, f) for f in powers[1:])
    extra = penalty_moments(walk, weights, 1.0, powers[:2]) if weights.penalized else None
    return (float(center), first, second), x, q, extra


def by_response(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean and variance where the advantage looks at its own response only."""
    scale, leaf = response_scale(estimator.aggregation, problem, group_size)
    key = estimator.advantage, weighing(estimator), None if leaf is None else estimator.aggregation
    mean, drift, norm = kept(problem, key, _one_response, estimator, problem, leaf)
    g = float(group_size)
    variance = scale**2 * g * (norm - dot(mean, mean)).sum()
    return Moments(mean=scale * g * mean, variance=variance, drift=scale * g * drift)


def _one_response(
    estimator: Estimator, problem: Problem, leaf: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, drift and mean square of what one response contributes."""
    walk = kept(problem, "walk", Walk, problem)
    rewards = shaped(estimator, problem.rewards, problem.lengths)
    advantages = estimator.advantage(rewards, torch.ones_like(rewards).bool())
    split = [(1.0, advantages)]
    if reads_sign(estimator):
        split = [(1.0, advantages.clamp(min=0)), (-1.0, advantages.clamp(max=0))]
    means, drift, norm = [], None, walk.behavior.new_zeros(problem.prompts)
    for sign, mine in split:
        weights = tree_weights(estimator, walk, sign, leaf)
        wanted = (mine,) if drift is not None else (mine, None)
        found, (square,) = response_moments(walk, weights, sign, wanted, (mine.square(),))
        means.append(found[0])
        norm = norm + square
        if weights.penalized:
            extra = penalty_moments(walk, weights, sign, (mine, None))
            norm = norm + 2 * extra.cross[0]
            if drift is None:
                means.append(extra.mean[1])
                norm = norm + extra.square[1]
        drift = found[1] if drift is None else drift
    assert drift is not None
    return torch.stack(means).sum(0) if len(means) > 1 else means[0], drift, norm


def affine_coefficients(advantage: Member, group_size: int, center: float) -> tuple[float, ...]:
    """Read alpha, beta, gamma of A_i = alpha (r_i - c) + beta sum of others' (r_j - c) + gamma."""
    rewards = torch.zeros((3, 1, group_size), dtype=torch.float64)
    rewards[1, 0, 0] = 1.0
    rewards[2] = center
    present = torch.ones_like(rewards, dtype=torch.bool)
    base, probe, middle = advantage(rewards, present).squeeze(1).tolist()
    beta = probe[1] - base[1] if group_size > 1 else 0.0
    return probe[0] - base[0], beta, middle[0]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class GroupLaw:
    """What an advantage that is affine in the rewards makes of one response and of two in a group.

    With x a response's contribution, x_k = E[(r - c)^k x] and q_k = E[(r - c)^k |x|^2],

        E[A_i x_i]           = sum over k of mean[k] x_k
        E[A_i^2 |x_i|^2]     = sum over k of own[k] q_k
        E[A_i A_j x_i . x_j] = pair[0] x_1.x_1 + pair[1] x_2.x_0 + pair[2] x_1.x_0 + pair[3] x_0.x_0
        E[A_i x_i . y_j]     = cross[0] x_1.y_0 + cross[1] x_0.y_1 + cross[2] x_0.y_0

    with y something else that a response contributes.

    Args:
        mean, own, pair, cross: of each prompt; a group of one has no pairs, and the last two are 0.
        group_size: responses of a group.
    """

    mean: Float[Tensor, "2 P"]
    own: Float[Tensor, "3 P"]
    pair: Float[Tensor, "4 P"]
    cross: Float[Tensor, "3 P"]
    group_size: int


def group_law(
    advantage: Member, group_size: int, law: tuple[float, Float[Tensor, " P"], Float[Tensor, " P"]]
) -> GroupLaw:
    """The coefficients of an affine advantage; arguments as in `affine_moments`."""
    center, first, second = law
    alpha, beta, gamma = affine_coefficients(advantage, group_size, center)
    one = torch.ones_like(first)

    def siblings(count: float) -> tuple[Tensor, Tensor]:
        """First two moments of beta * (sum of `count` siblings' rewards) + gamma."""
        mean = beta * count * first + gamma
        spread = beta**2 * count * (second - first.square())
        return mean, mean.square() + spread

    u1, u2 = siblings(group_size - 1.0)
    pair, cross = torch.zeros((7, len(first)), dtype=first.dtype).split((4, 3))
    if group_size > 1:
        v1, v2 = siblings(group_size - 2.0)
        plain = (alpha**2 + beta**2) * one, 2 * alpha * beta * one
        pair = torch.stack([*plain, 2 * (alpha + beta) * v1, v2])
        cross = torch.stack([alpha * one, beta * one, v1])
    return GroupLaw(
        mean=torch.stack([u1, alpha * one]),
        own=torch.stack([u2, 2 * alpha * u1, alpha**2 * one]),
        pair=pair,
        cross=cross,
        group_size=group_size,
    )


def affine_moments(
    advantage: Member,
    group_size: int,
    scale: float,
    law: tuple[float, Float[Tensor, " P"], Float[Tensor, " P"]],
    x: Float[Tensor, "3 P N V"],
    q: Float[Tensor, "3 P"],
) -> Moments:
    """Moments of a batch from those of one response with the features 1, r - c and (r - c)^2.

    Args:
        advantage: affine in the rewards of the group.
        group_size: responses of a group.
        scale: coefficient of every response.
        law: the number c, and the first two moments of r - c under the sampler.
        x: E[f x] of one response for each feature f.
        q: E[f |x|^2], likewise.
    """
    return batch_moments(group_law(advantage, group_size, law), scale, x, q)


def batch_moments(
    group: GroupLaw, scale: float, x: Float[Tensor, "3 P N V"], q: Float[Tensor, "3 P"]
) -> Moments:
    """`affine_moments` where the advantage's coefficients are known."""
    g = float(group.group_size)
    flat = x.flatten(2)
    gram = torch.bmm(flat.transpose(0, 1), flat.permute(1, 2, 0)).permute(1, 2, 0)
    dots = torch.stack([gram[1, 1], gram[2, 0], gram[1, 0], gram[0, 0]])
    mean = group.mean[1, :, None, None] * x[1] + group.mean[0, :, None, None] * x[0]
    square = g * (group.own * q).sum(0) + g * (g - 1) * (group.pair * dots).sum(0)
    variance = scale**2 * (square - g**2 * dot(mean, mean)).sum()
    return Moments(mean=scale * g * mean, variance=variance, drift=scale * g * x[0])


def with_penalties(
    plain: Moments, group: GroupLaw, scale: float, x: Float[Tensor, "3 P N V"], extra: Penalized
) -> Moments:
    """Moments of a batch whose responses contribute A x + y, from those without y.

    Args:
        plain: of the batch, by `affine_moments`.
        group: the advantage's coefficients.
        scale: coefficient of every response.
        x: as in `affine_moments`.
        extra: of y, with the features 1 and r - c.
    """
    g = float(group.group_size)
    y = extra.mean
    own = 2 * (group.mean * extra.cross).sum(0) + extra.square[0]
    dots = torch.stack([dot(x[1], y[0]), dot(x[0], y[1]), dot(x[0], y[0])])
    pairs = 2 * (group.cross * dots).sum(0) + dot(y[0], y[0])
    mean = plain.mean + scale * g * y[0]
    gap = dot(mean, mean) - dot(plain.mean, plain.mean)
    more = scale**2 * (g * own + g * (g - 1) * pairs) - gap
    return Moments(mean=mean, variance=plain.variance + more.sum(), drift=plain.drift)
