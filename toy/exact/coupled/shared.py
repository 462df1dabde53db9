"""Denominators that responses share, one tilt at a time: over a group, over a batch, or both.

A prompt's part of the estimate is divided by S^a of its own group and by S^b of the batch, S the
sum over responses of some s.  Parameters of different prompts are apart, so that the other prompts
enter by E[e^(-u S)] of their groups only, a number at each node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.toy.exact.classes import Groups, class_values
from windage.toy.exact.coupled.quadrature import laplace, raised
from windage.toy.exact.coupled.tilted import Tilt
from windage.toy.exact.walk import Walk
from windage.toy.problems import Problem

LEAST = 1e-290


@final
@dataclass(frozen=True, kw_only=True)
class Powers:
    """How often S divides: the sum over the own group, and that over the batch.

    Example:
        >>> Powers(group=1, batch=1).merged(1)
        Powers(group=2, batch=0)
    """

    group: int = 0
    batch: int = 0

    def merged(self, prompts: int) -> Powers:
        """The same where the batch is one group."""
        return Powers(group=self.group + self.batch) if prompts == 1 else self


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Nodes:
    """Where a prompt's part is evaluated.

    Args:
        own: tilt of the prompt's own responses.
        others: tilt of the other prompts' responses.
        first, second: weights for the mean and the mean square.
    """

    own: Float[Tensor, " Q"]
    others: Float[Tensor, " Q"]
    first: Float[Tensor, " Q"]
    second: Float[Tensor, " Q"]


@final
class Prompt:
    """One prompt under the sampler, and what its responses add to a denominator.

    Args:
        estimator: its advantage and admission are called on groups.
        problem: of one prompt.
        group_size: responses of a group.
        s: what each response adds, above 0.
        by_length: whether groups are counted by length as well as by reward.
    """

    def __init__(
        self,
        estimator: Estimator,
        problem: Problem,
        group_size: int,
        s: Float[Tensor, "1 K"],
        *,
        by_length: bool = False,
    ) -> None:
        self.estimator, self.problem, self.group_size = estimator, problem, group_size
        self.by_length = by_length
        self._known: dict[bool, tuple[Tensor, Tensor]] = {}
        self.walk = Walk(problem)
        drawn = self.walk.leaf_flow[0] > 0
        self.s = torch.where(drawn, s[0], s[0, drawn].max())
        self.low, self.high = float(self.s.min()), float(self.s.max())

    @cached_property
    def groups(self) -> Groups:
        """Groups by the counts of their classes."""
        return Groups(self.estimator, self.values, self._classes[2], self.group_size)

    @property
    def values(self) -> Float[Tensor, "R 2"]:
        """Reward and length of each class."""
        return self._classes[0]

    @property
    def members(self) -> Float[Tensor, "R K"]:
        """1 for the responses of each class."""
        return self._classes[1].squeeze(1)

    @cached_property
    def _classes(self) -> tuple[Tensor, Tensor, Tensor]:
        return class_values(self.problem, self.walk, by_length=self.by_length)

    def chance(self, tilt: Tilt) -> Float[Tensor, "C Q"]:
        """Probability of each row of counts times E[e^(-t S)] of its groups."""
        shrunk = tilt.masses(self.members).log() - self.groups.mass.log().unsqueeze(1)
        return self.groups.chance.unsqueeze(1) * (self.groups.counts @ shrunk).exp()

    def kept(self, tilt: Tilt) -> Float[Tensor, "C Q"]:
        """The same for the groups that admission keeps, given that it does."""
        ratio = self.groups.probability / self.groups.chance.clamp(min=LEAST)
        return self.chance(tilt) * ratio.unsqueeze(1)

    def laplace(self, u: Float[Tensor, " Q"], *, conditioned: bool) -> Float[Tensor, " Q"]:
        """E[e^(-u S)] of a group of this prompt, of one that admission keeps if `conditioned`."""
        known = self._known.get(conditioned)
        if known is None or not torch.equal(known[0], u):
            known = self._known[conditioned] = u, self._laplace(u, conditioned)
        return known[1]

    def _laplace(self, u: Tensor, conditioned: bool) -> Tensor:
        tilt = Tilt(self.walk, self.s, u)
        if conditioned and any(m.traits.refill for m in self.estimator.admission):
            return self.kept(tilt).sum(0)
        return tilt.mass(torch.ones_like(self.s).unsqueeze(0))[0].pow(self.group_size)


def nodes_of(prompts: list[Prompt], p: int, powers: Powers) -> Nodes:
    """Nodes at which 1 / (S of the group ^ a * S of the batch ^ b) is a sum, for one prompt."""
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    g = prompts[p].group_size
    group = batch = (zero, one, one)
    if powers.group:
        group = _powers(g * prompts[p].low, g * prompts[p].high, powers.group)
    if powers.batch:
        low, high = sum(q.low for q in prompts), sum(q.high for q in prompts)
        batch = _powers(g * low, g * high, powers.batch)
    t, u = torch.meshgrid(group[0], batch[0], indexing="ij")
    return Nodes(
        own=(t + u).flatten(),
        others=u.flatten(),
        first=torch.outer(group[1], batch[1]).flatten(),
        second=torch.outer(group[2], batch[2]).flatten(),
    )


def _powers(low: float, high: float, power: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes, and weights of S^-power and of its square."""
    t, weights = laplace(low, high)
    return t, raised(t, weights, power), raised(t, weights, 2 * power)


def others(
    prompts: list[Prompt], p: int, u: Float[Tensor, " Q"], *, conditioned: bool
) -> Float[Tensor, " Q"]:
    """E[e^(-u S)] of all prompts but one together."""
    distinct, place = u.unique(return_inverse=True)
    found = torch.ones_like(distinct)
    for prompt in prompts[:p] + prompts[p + 1 :]:
        found = found * prompt.laplace(distinct, conditioned=conditioned)
    return found[place]
