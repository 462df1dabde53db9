"""The covariance of one batch estimate, a block of V x V numbers for each prefix.

A path meets each prefix once, so a response puts one token's vector there: with token coefficients
c_k(y) of vectors z_k(v) (the weighted score; what a penalty adds),

    E[f x x'] at prefix h = sum over v and k, l of d(h) mu(v|h) E[f c_k c_l | h, v] z_k(v) z_l(v)'

and batches combine responses as they do for the trace, with outer products in the place of inner
ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.toy.exact.affine import group_law
from windage.toy.exact.classes import Prompt, by_prompt, denominators, signs
from windage.toy.exact.moments import Undefined
from windage.toy.exact.penalties import shaped
from windage.toy.exact.plan import consider, exact, undefined
from windage.toy.exact.prefix_tree import (
    Feature,
    Weights,
    flow,
    penalty_moments,
    reads_sign,
    response_moments,
    response_scale,
    tree_weights,
)
from windage.toy.exact.walk import Walk, dot, pull_back
from windage.toy.problems import Problem

BUDGET = 5e6
Blocks = Float[Tensor, "P N V V"]


def covariance_blocks(
    estimator: Estimator, problem: Problem, group_size: int, *, most: float = BUDGET
) -> Blocks:
    """Covariance of the parameters of each prefix, under one batch estimate.

    Args:
        estimator: of those that recursions over the tree or classes serve.
        problem: a tree of prefixes.
        group_size: responses of a prompt.
        most: numbers that the blocks may hold.

    Raises:
        Undefined: no such engine serves the estimator, or the blocks hold too many numbers.

    Example:
        >>> from windage.estimators.catalogue import get
        >>> from windage.toy.problems import bandit
        >>> covariance_blocks(get("rloo"), bandit(3), 4).shape
        torch.Size([1, 1, 3, 3])
    """
    if why := undefined(estimator, problem, group_size):
        raise Undefined(why)
    cells = problem.logits.numel() * problem.tree.vocab
    if cells > most:
        raise Undefined(f"covariance blocks hold {cells:.1e} numbers; allowed: {most:.0e}")
    refusals = []
    for engine in ("prefix_tree", "classes"):
        why = consider(engine, estimator, problem, group_size).refusal
        if why is None and engine == "classes":
            return _by_classes(estimator, problem, group_size)
        if why is None:
            alone = estimator.advantage.traits.scope == "response"
            return (_by_response if alone else _affine)(estimator, problem, group_size)
        refusals.append(f"{engine}: {why}")
    raise Undefined(f"no covariance blocks ({'; '.join(refusals)})")


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The vectors that a token puts at its prefix: its weighted score, and what a penalty adds."""

    weighted: Float[Tensor, "P N V V"]
    added: Float[Tensor, "P N V V"] | None


def scores(walk: Walk, weights: Weights) -> Scores:
    """The vectors of every token at every prefix.

    w (e_v - pi) - sum over u of k_u (e_u - pi),   k what centering subtracts
    """
    p = walk.probability
    plain = torch.eye(p.shape[-1], dtype=p.dtype) - p.unsqueeze(-2)
    found = plain if weights.node is None else weights.node.unsqueeze(-1) * plain
    if weights.centered is not None:
        found = found - pull_back(weights.centered, p).unsqueeze(-2)
    added = None if weights.added is None else weights.added.unsqueeze(-1) * plain
    return Scores(weighted=found, added=added)


def _outer(visits: Tensor, a: Tensor, b: Tensor) -> Blocks:
    """Sum over tokens of visits times the outer product of their vectors, made symmetric."""
    found = (visits.unsqueeze(-1) * a).mT @ b
    return found if a is b else (found + found.mT) / 2


def outer(
    a: Float[Tensor, "*batch V"], b: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch V V"]:
    """The outer product of two vectors, made symmetric.

    Example:
        >>> outer(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
        tensor([[0., 1.],
                [1., 0.]])
    """
    found = a.unsqueeze(-1) * b.unsqueeze(-2)
    return found if a is b else (found + found.mT) / 2


def _of_one(
    walk: Walk, weights: Weights, sign: float, square: Feature, cross: Feature, extra: Tensor | None
) -> Blocks:
    """E[square x x' + cross (x y' + y x') + extra y y'], y what penalties add, of one response.

    Args:
        walk: the sampler's measure.
        weights: of `tree_weights`.
        sign: of the advantage, for maps that read it.
        square, cross, extra: functions of the response; without `extra` its part is left out.
    """
    z = scores(walk, weights)

    def at(feature: Feature, powers: tuple[int, int], order: int = 0) -> Tensor:
        return flow(walk, weights, sign, [feature], powers, order)[order][0]

    total = _outer(at(square, (2, 0)), z.weighted, z.weighted)
    if weights.earned is not None:
        total = total + 2 * _outer(at(cross, (2, 0), 1), z.weighted, z.weighted)
        if extra is not None:
            total = total + _outer(at(extra, (2, 0), 2), z.weighted, z.weighted)
    if z.added is not None:
        total = total + 2 * _outer(at(cross, (1, 1)), z.weighted, z.added)
        if extra is not None:
            total = total + _outer(at(extra, (0, 2)), z.added, z.added)
            if weights.earned is not None:
                total = total + 2 * _outer(at(extra, (1, 1), 1), z.weighted, z.added)
    return total


def _by_response(estimator: Estimator, problem: Problem, group_size: int) -> Blocks:
    """Responses are independent: the covariance of one, a response of the batch."""
    walk = Walk(problem)
    scale, leaf = response_scale(estimator.aggregation, problem, group_size)
    rewards = shaped(estimator, problem.rewards, problem.lengths)
    one = torch.ones_like(rewards)
    advantages = estimator.advantage(rewards, one.bool())
    square: Tensor = walk.probability.new_zeros(())
    for sign in signs(estimator):
        mine = advantages
        if reads_sign(estimator):
            mine = advantages.clamp(min=0) if sign > 0 else advantages.clamp(max=0)
        weights = tree_weights(estimator, walk, sign, leaf)
        extra = one if weights.penalized and sign > 0 else None
        square = square + _of_one(walk, weights, sign, mine.square(), mine, extra)
    mean = exact(estimator, problem, group_size, "prefix_tree").mean / (scale * group_size)
    return scale**2 * group_size * (square - outer(mean, mean))


def _affine(estimator: Estimator, problem: Problem, group_size: int) -> Blocks:
    """One response and two of a group, by powers of the reward."""
    walk = Walk(problem)
    scale, leaf = response_scale(estimator.aggregation, problem, group_size)
    weights = tree_weights(estimator, walk, 1.0, leaf)
    rewards = shaped(estimator, problem.rewards, problem.lengths)
    center = dot(walk.leaf_flow, rewards).mean()
    r = rewards - center
    powers = (None, r, r.square())
    x, _ = response_moments(walk, weights, 1.0, powers, ())
    first, second = (dot(walk.leaf_flow, f) for f in powers[1:])
    law = group_law(estimator.advantage, group_size, (float(center), first, second))
    polynomial = torch.stack([torch.ones_like(r), r, r.square()])
    own = (law.own.unsqueeze(-1) * polynomial).sum(0)
    cross = (law.mean.unsqueeze(-1) * polynomial[:2]).sum(0)
    one = polynomial[0] if weights.penalized else None
    square = group_size * _of_one(walk, weights, 1.0, own, cross, one)

    def combined(coefficients: Tensor, blocks: tuple[Tensor, ...]) -> Tensor:
        return (coefficients[:, :, None, None, None] * torch.stack(blocks)).sum(0)

    mean = law.mean[1, :, None, None] * x[1] + law.mean[0, :, None, None] * x[0]
    dots = outer(x[1], x[1]), outer(x[2], x[0]), outer(x[1], x[0]), outer(x[0], x[0])
    pairs = combined(law.pair, dots)
    if weights.penalized:
        y = penalty_moments(walk, weights, 1.0, powers[:2]).mean
        mixed = outer(x[1], y[0]), outer(x[0], y[1]), outer(x[0], y[0])
        pairs = pairs + 2 * combined(law.cross, mixed) + outer(y[0], y[0])
        mean = mean + y[0]
    total = square + group_size * (group_size - 1) * pairs - group_size**2 * outer(mean, mean)
    return scale**2 * total


def _by_classes(estimator: Estimator, problem: Problem, group_size: int) -> Blocks:
    """Counts of classes, prompt by prompt: one prompt's part does not vary with another's."""
    scale, prompts = by_prompt(estimator, problem, group_size)
    groups = [prompt.part.group for prompt in prompts]
    blocks = []
    for p, prompt in enumerate(prompts):
        first, second = denominators(estimator, groups, p)
        blocks.append(_of_prompt(estimator, prompt, first, second))
    return scale**2 * torch.cat(blocks)


def _of_prompt(estimator: Estimator, prompt: Prompt, first: Tensor, second: Tensor) -> Blocks:
    """Covariance of a prompt's part.

        sum over c of d_c E[x x' 1{c}] + sum over c, e of q_ce M_c M_e' - mean mean'

    Args:
        estimator: read for its weights.
        prompt: its classes.
        first, second: moments of what divides each group.
    """
    part, walk = prompt.part, prompt.walk
    total, advantages = part.columns
    chance = part.group.probability
    heavy = (chance * second).unsqueeze(1)
    rows = len(prompt.members)
    d = (heavy * total * advantages).sum(0).view(-1, rows)
    q = total.T @ (heavy * total) - torch.diag(d.flatten() / part.group.mass.repeat(len(d)))
    cross = (heavy * total).sum(0).view(-1, rows)
    members = torch.stack(prompt.members).squeeze(1)
    found: Tensor = walk.probability.new_zeros(())
    for k, sign in enumerate(signs(estimator)):
        weights = tree_weights(estimator, walk, sign, prompt.leaf)
        extra = (d[-1] @ members).unsqueeze(0) if weights.penalized and k == 0 else None
        square, mixed = ((row @ members).unsqueeze(0) for row in (d[k], cross[k]))
        found = found + _of_one(walk, weights, sign, square, mixed, extra)
        if weights.penalized:
            y = torch.diag(cross[k] / part.group.mass)
            at, last = slice(k * rows, (k + 1) * rows), slice(part.signs * rows, None)
            q[at, last] -= y
            q[last, at] -= y
    blocks = part.mean.view(len(part.mean), *walk.probability.shape[1:])
    mean = torch.einsum("k,knv->nv", (chance * first) @ total, blocks)
    means = torch.einsum("kl,knv,lnw->nvw", q, blocks, blocks)
    return found + (means - outer(mean, mean)).unsqueeze(0)
