"""Denominators that count the tokens of a group or a batch, on chains.

    1 / N = integral of e^{-s N} ds,    1 / N^2 = integral of s e^{-s N} ds

With N the sum of the lengths, e^{-s N} is a factor e^{-s} a token, so that at each s responses are
independent again, under a kernel that shrinks; groups are combined by the counts of their classes
of reward, and the other prompts enter by the mass of their groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.aggregation import prompt_mean, token_mean
from windage.estimators.estimator import Estimator
from windage.toy.chains import Chain
from windage.toy.exact.classes import signs, small_table
from windage.toy.exact.coupled.quadrature import laplace, raised
from windage.toy.exact.kernels import many, sampled, steps
from windage.toy.exact.moments import Moments, Undefined
from windage.toy.exact.transfer import Ended, Steps

# True where the tokens of all prompts count, False where those of the own prompt do.
COUNTS = {token_mean: True, prompt_mean: False}
LEAST = 1e-300
# Points of the integral whose part is smaller than this are left out.
NEGLIGIBLE = 1e-22


@final
class Nodes:
    """Points of the integral that matter for some batches, and the sampler's law at each.

    Args:
        chain: the sampler.
        group_sizes: of the batches.
        own: whether only the own prompt's tokens count.
    """

    def __init__(self, chain: Chain, group_sizes: Sequence[int]) -> None:
        low, high = min(group_sizes), chain.prompts * max(group_sizes) * chain.horizon
        t, dt = laplace(float(low), float(high))
        mass = many([tilted(sampled(chain), t)], chain)[0].mass
        others = max(0, low - 1) * mass.sum(-1).clamp(min=LEAST).log().amax(-1)
        size = dt.log() + others
        keep = size > size.max() + math.log(NEGLIGIBLE)
        self.t, self.dt, self.mass = t[keep], dt[keep], mass[keep]


def tilted(one: Steps, t: Float[Tensor, " Q"]) -> Steps:
    """The same steps with a factor e^{-t} a token, for every t on a new first axis."""
    shrink = torch.exp(-t)[:, None, None, None]
    score = one.score.expand(len(t), *one.score.shape)
    passage = one.passage
    if passage is not None:
        passage = replace(passage, **{name: shrink * x for name, x in vars(passage).items()})
    return replace(one, kernel=shrink * one.kernel, score=score, passage=passage)


def runs(estimator: Estimator, chain: Chain, nodes: Nodes) -> list[Steps]:
    """The recursions that a shared denominator needs: mean and norm of each sign at every node."""
    even = chain.logits.new_ones(()).expand(chain.horizon)
    run = []
    for sign in signs(estimator):
        once, twice = (tilted(steps(estimator, chain, sign, k, even), nodes.t) for k in (1, 2))
        same = once.passage is None and torch.equal(once.kernel, twice.kernel)
        run += [once, once if same else twice]
    return run


@final
class Prompt:
    """Groups of one prompt at every node, by the counts of their classes of reward.

    Args:
        estimator: its advantage and admission are called.
        rewards: of the ends.
        plain: mass of the ends under the sampler.
        mass: the same at every node.
        ended: means and norms at every node, for each sign of the advantage.
        group_size: responses of a group.
    """

    def __init__(
        self,
        estimator: Estimator,
        rewards: Float[Tensor, " C"],
        plain: Float[Tensor, " C"],
        mass: Float[Tensor, "Q C"],
        ended: tuple[Float[Tensor, "K Q C D"], Float[Tensor, "K Q C"]],
        group_size: int,
    ) -> None:
        values = rewards[plain > 0].unique()
        members = (rewards == values.unsqueeze(1)).to(plain)
        table = small_table(
            estimator.advantage, estimator.admission, tuple(values.tolist()), group_size
        )
        self.counts, advantages = table.counts, table.advantages
        log_ways = table.log_ways
        log_mass = (mass @ members.T).clamp(min=LEAST).log()
        everyone = torch.ones_like(log_ways)
        keep = everyone if table.keep is None else table.keep
        base = (log_ways + self.counts @ (members @ plain).log()).exp()
        if float(base @ keep) <= 0:
            raise Undefined("every group is degenerate: no reward varies")
        chance = (log_ways + log_mass @ self.counts.T).exp()
        self.kept = chance * keep / (base @ keep)
        self.chance = chance
        self.share = self.counts * torch.exp(-log_mass).unsqueeze(1)
        self.advantages = advantages
        mean, norm = ended
        self.mean = torch.einsum("rc,kqcd->qkrd", members, mean).flatten(1, 2)
        self.norm = torch.einsum("rc,kqc->qkr", members, norm).flatten(1)
        self.mass = log_mass.exp().repeat(1, len(mean))
        self.signs = len(mean)

    def moments(
        self, first: Float[Tensor, " Q"], second: Float[Tensor, " Q"]
    ) -> tuple[Float[Tensor, " D"], Float[Tensor, ""]]:
        """Mean and mean square of the prompt's part, from the weights of the nodes."""
        share, advantages = self.share, self.advantages
        if self.signs > 1:
            share = torch.cat([share, share], -1)
            advantages = torch.cat([advantages.clamp(min=0), advantages.clamp(max=0)], -1)
        total = share * advantages
        mean = torch.einsum("q,qc,qcr,qrd->d", first, self.kept, total, self.mean)
        gram = self.mean @ self.mean.transpose(-1, -2)
        spread = self.norm - gram.diagonal(dim1=-2, dim2=-1) / self.mass
        own = torch.einsum("qc,qcr->qr", self.kept, total * advantages)
        pairs = torch.einsum("qc,qcr,qcs->qrs", self.kept, total, total)
        square = (own * spread).sum(-1) + (pairs * gram).sum((-1, -2))
        return mean, second @ square

    def drift(self, first: Float[Tensor, " Q"]) -> Float[Tensor, " D"]:
        """Mean with advantage 1 and nothing refused."""
        part = self.mean[:, : self.counts.shape[1]]
        return torch.einsum("q,qc,qcr,qrd->d", first, self.chance, self.share, part)


def shared(
    estimator: Estimator,
    chain: Chain,
    group_size: int,
    nodes: Nodes,
    plain: Float[Tensor, "P C"],
    ended: Sequence[Ended],
) -> Moments:
    """Moments of a batch whose denominator counts tokens.

    Args:
        estimator: its aggregation tells whose tokens count, and is called for the constant.
        chain: the rewards.
        group_size: responses of a group.
        nodes: points of the integral.
        plain: mass of the ends under the sampler.
        ended: of `runs`.

    Raises:
        Undefined: every group is degenerate, and admission draws those anew.
    """
    mean = torch.stack([e.mean for e in ended[::2]]).flatten(-2)
    norm = torch.stack([e.norm for e in ended[1::2]])
    prompts = range(chain.prompts)
    parts = [
        Prompt(
            estimator,
            chain.rewards[p],
            plain[p],
            nodes.mass[:, p],
            (mean[:, :, p], norm[:, :, p]),
            group_size,
        )
        for p in prompts
    ]
    whole = COUNTS[estimator.aggregation.function]
    ones = torch.ones((chain.prompts, group_size), dtype=torch.long)
    coefficient = estimator.aggregation(ones, ones > 0)[0, 0]
    constant = coefficient * group_size * (chain.prompts if whole else 1)
    means, drifts, variance = [], [], mean.new_zeros(())
    for p, part in enumerate(parts):
        kept = free = torch.ones_like(nodes.t)
        for q in prompts if whole else ():
            if q != p:
                kept, free = kept * parts[q].kept.sum(-1), free * parts[q].chance.sum(-1)
        found, square = part.moments(kept * nodes.dt, kept * raised(nodes.t, nodes.dt, 2))
        means.append(found)
        drifts.append(part.drift(free * nodes.dt))
        variance = variance + square - found @ found
    return Moments(
        mean=constant * torch.stack(means).view_as(chain.logits),
        variance=constant**2 * variance,
        drift=constant * torch.stack(drifts).view_as(chain.logits),
    )
