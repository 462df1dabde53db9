"""What the coupled engine says of group deviations and of gates by sign over many rewards."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windage.estimators.admission import zero_variance
from windage.estimators.advantage import group_mean, group_std, leave_one_out
from windage.estimators.estimator import Estimator
from windage.toy.exact import penalties
from windage.toy.exact.coupled.by_reward import ByReward
from windage.toy.exact.coupled.gated import CUT, LIST, MODES, WORK, Gate, gated_spread, linear
from windage.toy.exact.coupled.spread import FAR, PITCH, TOLERANCE, Law, totals
from windage.toy.exact.coupled.sums import common
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.prefix_tree import reads_sign, response_scale
from windage.toy.exact.tuples import ways
from windage.toy.problems import Problem

# Numbers that a call of a stage is worth, whatever its size; passes over each number of a table
# without a gate and with one, there for waves by the root of the group size.
CALL, PASSES, TABLES = 2e4, 2.0, 4.0


def serves(estimator: Estimator) -> bool:
    """Whether the group's deviation, or the sign of a group advantage, couples the responses."""
    if estimator.aggregation.traits.scope != "response":
        return False
    function = estimator.advantage.function
    gated = function in (group_mean, leave_one_out) and reads_sign(estimator)
    return function is group_std or gated


def plain(estimator: Estimator) -> Estimator:
    """The estimator as it is: the tree's recursions must know all its corrections."""
    return estimator


def why_not(estimator: Estimator) -> str | None:
    """Why the engine is not valid, of an estimator that it serves and that is otherwise plain."""
    if penalties.active(estimator):
        return "penalties change the rewards or the coefficients"
    for member in estimator.admission:
        if member.traits.refill and member.function is not zero_variance:
            return f"{member.name} draws groups again by more than their variation"
    return None


def _law(estimator: Estimator, prompt: ByReward, group_size: int) -> Law:
    """Rewards about their mean, and how the deviation divides."""
    settings = dict(estimator.advantage.settings)
    return Law(
        rewards=prompt.rewards - prompt.mass @ prompt.rewards,
        mass=prompt.mass,
        group_size=group_size,
        ddof=settings.get("ddof", 0),
        eps=settings.get("eps", 0.0),
    )


def _coefficients(
    estimator: Estimator, prompt: ByReward, law: Law
) -> tuple[Tensor, Tensor, Tensor]:
    """Of means and of squared norms by sign and reward, and the sum over pairs."""
    g = law.group_size
    if estimator.advantage.function is group_std and not reads_sign(estimator):
        products = prompt.products()
        found = totals(law, products)
        pairs = found.pairs + found.same @ (products.same + products.diagonal)
        return found.mean.unsqueeze(0), found.norm.unsqueeze(0), pairs
    gate: Gate
    if estimator.advantage.function is group_std:
        gate = gated_spread(law)
    else:
        gate = linear(law, g / (g - 1) if estimator.advantage.function is leave_one_out else 1.0)
    return gate.mean, gate.norm, gate.pairs(prompt)


def _one_prompt(
    estimator: Estimator, problem: Problem, leaf: Tensor | None, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and drift of one prompt's sum over responses."""
    prompt = ByReward(estimator, problem, leaf)
    drift = group_size * prompt.drift
    law = _law(estimator, prompt, group_size)
    refill = any(m.traits.refill for m in estimator.admission)
    if len(law.rewards) < 2:
        if refill:
            raise Undefined("every group is degenerate: no reward varies")
        return torch.zeros_like(drift), drift.new_zeros(()), drift
    mean, norm, pairs = _coefficients(estimator, prompt, law)
    share = law.varying if refill else 1.0
    first, second = prompt.moments(mean, norm)
    first = group_size / share * first
    square = group_size / share * (second + (group_size - 1) * pairs)
    return first, square - first.square().sum(), drift


def run(estimator: Estimator, problem: Problem, group_size: int) -> Moments:
    """Mean, variance and drift; prompts add."""
    scale, leaf = response_scale(estimator.aggregation, problem, group_size)
    parts = [
        _one_prompt(
            estimator, problem.select(p), None if leaf is None else leaf[p : p + 1], group_size
        )
        for p in range(problem.prompts)
    ]
    means, variances, drifts = (torch.stack(part) for part in zip(*parts, strict=True))
    return Moments(mean=scale * means, variance=scale**2 * variances.sum(), drift=scale * drifts)


def cost(estimator: Estimator, problem: Problem, group_size: int) -> float:
    """About how many numbers the engine touches."""
    gated = reads_sign(estimator)
    size = float(problem.logits[0].numel())
    total = 0.0
    for kinds in problem.kinds:
        rewards = kinds[:, 0].unique()
        count = float(len(rewards))
        total += 10 * CALL + 12.0 * size
        if problem.tree.horizon > 1:
            total += (12.0 * count + count**2) * size * (3.0 if gated else 1.0)
        if count > 1:
            total += _tables(estimator, rewards, group_size, gated=gated)
    return total


def _tables(estimator: Estimator, rewards: Tensor, group_size: int, *, gated: bool) -> float:
    """Numbers in the tables over t, c and own rewards, were the rewards spread evenly."""
    count, g = len(rewards), group_size
    if estimator.advantage.function is not group_std:
        return _pairs(rewards, g, torch.ones(1), torch.tensor([float(count)]))
    span = float(rewards[-1] - rewards[0])
    mass = torch.full_like(rewards, 1 / count)
    settings = dict(estimator.advantage.settings)
    law = Law(rewards=rewards, mass=mass, group_size=g, ddof=settings["ddof"], eps=settings["eps"])
    t = law.nodes()[0]
    # where groups of normal rewards vary less than the tolerance, the sum over t ends
    deep = -math.log(TOLERANCE) * 2 / (g - 1)
    t = t[t <= g / 2 / float(rewards.var()) * math.exp(min(deep, 600.0))]
    reach, pitch, tail = (FAR * g / t).sqrt(), PITCH / t.sqrt(), (FAR / t).sqrt()
    nodes = torch.minimum((span + 2 * tail) / pitch, count * 2 * reach / pitch)
    width = (1 + count * 2 * reach / span).clamp(max=count)
    if not gated:
        return PASSES * float((nodes * width).sum()) + CALL * len(t)
    return _pairs(rewards, g, nodes, width) + 4 * CALL * len(t)


def _pairs(rewards: Tensor, group_size: int, nodes: Tensor, width: Tensor) -> float:
    """Numbers in the tables of thresholds: by lattice, by list or by waves, as `gated.chosen`."""
    unit, siblings = common(rewards), group_size - 2
    count = len(rewards)
    tables = float((nodes * width.square()).sum())
    if unit is not None:
        levels = siblings * float(rewards[-1] - rewards[0]) / unit + 1
        return TABLES * tables + TABLES * levels * float(nodes.sum())
    if (listed := ways(count, siblings)) <= LIST / (siblings + 1):
        return TABLES * (tables + listed * float(nodes.sum()))
    # the characteristic function of many rewards is about 1 / sqrt(count) away from 0
    modes = max(MODES, WORK / count**2)
    if (count ** (-siblings / 2)) * math.sqrt(math.factorial(min(siblings, 20))) > modes**1.5 * CUT:
        return 10 * listed
    return TABLES * math.sqrt(group_size) * tables
