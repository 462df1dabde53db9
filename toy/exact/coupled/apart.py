"""A baseline weighted by length that leaves the response itself out.

    A_i = r_i - b_i,      b_i = sum over j != i of T_j r_j / sum over j != i of T_j

The baseline does not depend on the response, so that mean and squares need one tilt.  In a pair
(i, j) the two denominators share the other G - 2 responses, S'' their tokens and B'' their paid
tokens, and each holds one of the pair: with two tilts t and u

    E[b_i b_j | i, j] = sum over t, u of e^(-t T_j - u T_i)
                        E[(T_j r_j + B'') (T_i r_i + B'') e^(-(t + u) S'')]
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.baselines import length_weighted_apart
from windage.estimators.estimator import Estimator
from windage.toy.exact.coupled.quadrature import laplace, raised
from windage.toy.exact.coupled.shared import Prompt
from windage.toy.exact.coupled.siblings import Siblings, Sums
from windage.toy.exact.coupled.tilted import Contribution, Tilt
from windage.toy.exact.moments import Moments
from windage.toy.exact.prefix_tree import response_scale
from windage.toy.problems import Problem


def leaves_itself_out(estimator: Estimator) -> bool:
    """Whether the advantage has the tokens of the siblings in its denominator."""
    return estimator.advantage.function is length_weighted_apart


def apart(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean and variance with the length-weighted mean of the siblings as baseline."""
    scale, leaf = response_scale(estimator.aggregation, problem, group_size)
    leaf = torch.ones_like(problem.rewards) if leaf is None else leaf
    parts = []
    for p in range(problem.prompts):
        part = problem.select(p)
        prompt = Prompt(estimator, part, group_size, part.lengths.double())
        parts.append(_one_prompt(prompt, Contribution(estimator, prompt.walk, leaf[p])))
    means, squares, drifts = zip(*parts, strict=True)
    mean = torch.stack(means)
    return Moments(
        mean=scale * mean.unsqueeze(1),
        variance=scale**2 * (sum(squares) - mean.square().sum()),
        drift=scale * torch.stack(drifts).unsqueeze(1),
    ).shaped(problem.logits.shape)


def _one_prompt(prompt: Prompt, one: Contribution) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, mean square and drift of one prompt's sum over responses."""
    g, rewards = prompt.group_size, prompt.problem.rewards[0]
    r = rewards - rewards.mean()
    t, weights = laplace((g - 1) * prompt.low, (g - 1) * prompt.high)
    tilt, paid = Tilt(prompt.walk, prompt.s, t), _paid(prompt, r)
    siblings = Siblings(tilt, paid)
    all_but_one = siblings.mass.pow(g - 1)
    baseline = (weights * all_but_one * siblings.mean(g - 1)[0]).sum()
    square = (raised(t, weights, 2) * all_but_one * siblings.product(g - 1)[0, 0]).sum()
    norm = one.norm(0, r.square() - 2 * r * baseline + square)
    rest = weights * siblings.mass.pow(g - 2)
    held, others = tilt.weighted(torch.stack([rest, rest * siblings.mean(g - 2)[0]]))
    against = r * (held * paid.sibling[0] + others)
    x0, x1, xb = one.mean(0, torch.stack([torch.ones_like(r), r, against]))
    pairs = x1 @ x1 - 2 * xb @ x0 + _baselines(prompt, one, tilt, weights, paid)
    return g * (x1 - baseline * x0), g * norm + g * (g - 1) * pairs, g * x0


def _paid(prompt: Prompt, r: Tensor) -> Sums:
    """The numerator of the baseline: tokens times reward, summed over siblings."""
    return Sums(
        own=torch.ones_like(r).unsqueeze(0),
        sibling=(prompt.s * r).unsqueeze(0),
        fixed=r.new_zeros(1),
        sign=torch.zeros(1, dtype=torch.long),
    )


def _baselines(
    prompt: Prompt, one: Contribution, tilt: Tilt, weights: Float[Tensor, " Q"], paid: Sums
) -> Float[Tensor, ""]:
    """E[x_i . x_j b_i b_j] of two responses, by pairs of tilts."""
    n, t = prompt.group_size - 2, tilt.nodes
    both = Siblings(Tilt(prompt.walk, prompt.s, (t.unsqueeze(1) + t).flatten()), paid)
    weight = torch.outer(weights, weights) * both.mass.pow(n).view(len(t), len(t))
    mean, square = (m.view(len(t), len(t)) for m in (both.mean(n)[0], both.product(n)[0, 0]))
    rows, table = tilt.basis(len(t))
    features = torch.stack([torch.ones_like(paid.sibling[0]), paid.sibling[0]])
    x = one.mean(0, (features.unsqueeze(1) * rows).flatten(0, 1))
    gram = (x @ x.T).view(2, len(rows), 2, len(rows))
    cross = table.T @ (weight * mean) @ table
    return (
        (gram[0, :, 0] * (table.T @ (weight * square) @ table)).sum()
        + 2 * (gram[0, :, 1] * cross).sum()
        + (gram[1, :, 1] * (table.T @ weight @ table)).sum()
    )
