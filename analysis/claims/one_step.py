"""One step over a few arms, each standing for a whole trajectory: what the TOPR rows look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from windage.analysis.claims.measures import alone, corrected
from windage.analysis.claims.problems import count, six
from windage.estimators.batch import Batch
from windage.estimators.catalogue import get
from windage.estimators.correction import clip, tapered, trajectory
from windage.estimators.estimator import Estimator, coefficients
from windage.toy.exact.walk import pull_back
from windage.toy.learning import Update, expected_update

NAIVE, TOPR = get("naive"), get("topr")
POSITIVES, TIS = get("positives_only"), get("tis_both_signs")
IS = alone("trajectory_is")
UNBOUNDED = get("topr", a_pos=0.0, b_pos=torch.inf, a_neg=0.0, b_neg=torch.inf)
PPO = corrected("trajectory_ppo", trajectory, clip)
FLOOR = get("topr", a_neg=0.1)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Arms:
    """A sampler's log-probabilities and the reward of each arm, `[A]`, or a row a replicate."""

    sampler: Tensor
    rewards: Tensor

    @property
    def mass(self) -> Tensor:
        """The sampler's probabilities."""
        return self.sampler.exp()

    def update(self, estimator: Estimator) -> Update:
        """Mean update of an estimator by the logits."""
        return expected_update(estimator, self.sampler, self.rewards)

    def gradient(self, estimator: Estimator, logits: Tensor) -> Tensor:
        """The mean update at given logits."""
        return self.update(estimator)(logits, 0)

    def reward(self, logits: Tensor) -> Tensor:
        """Expected reward of the policy."""
        return (logits.softmax(-1) * self.rewards).sum(-1)

    def value(self, estimator: Estimator, logits: Tensor) -> Tensor:
        """The objective whose gradient is a tapered entry's mean update.

        sum of mu A rho(pi / mu), rho with the limits of the entry's taper
        """
        (correction,) = estimator.corrections
        arms = self.rewards.unsqueeze(-2)
        advantages = estimator.advantage(arms, torch.ones_like(arms, dtype=torch.bool)).squeeze(-2)
        ratio = logits.log_softmax(-1) - self.sampler
        rho = tapered(ratio, advantages, **dict(correction.map.settings))
        return (self.mass * advantages * rho).sum(-1)

    def among(self, chosen: Tensor) -> Tensor:
        """The sampler's distribution weighted by |reward| on some of the arms."""
        weight = self.mass * self.rewards.abs() * chosen
        return weight / weight.sum(-1, keepdim=True)

    def rewarded(self, rewards: Tensor) -> Arms:
        """The same arms with other rewards."""
        return replace(self, rewards=rewards)


_SIX = six()
SIX = Arms(sampler=_SIX.behavior_logp[0, 0], rewards=_SIX.rewards[0])
GOOD = SIX.rewards > 0
BEST = SIX.among(GOOD)
Z6 = SIX.sampler + 0.4 * torch.cos(1 + 2 * count(6))


def kl(a: Tensor, b: Tensor) -> Tensor:
    """Divergence of b from a, both probabilities; arms without mass under a count nothing."""
    return torch.where(a > 0, a * (a / torch.where(a > 0, b, 1.0)).log(), 0.0).sum(-1)


def entropy(p: Tensor) -> Tensor:
    """Entropy in nats."""
    return -torch.xlogy(p, p).sum(-1)


def depth(logits: Tensor) -> float:
    """The lowest logit, measured from the highest."""
    return float((logits - logits.max()).min())


def lowered(logits: Tensor, arm: int, value: float) -> Tensor:
    """Logits with that of one arm replaced."""
    out = logits.clone()
    out[arm] = value
    return out


def two_classes(good: Tensor, start: Tensor) -> tuple[Arms, Tensor]:
    """A right and a wrong arm, a row a setting: the sampler's and the start's mass of the right."""
    arms = Arms(
        sampler=torch.stack([good, 1 - good], -1).log(),
        rewards=torch.tensor([1.0, -1.0], dtype=torch.float64),
    )
    return arms, torch.stack([start, 1 - start], -1).log()


def sampled_update(
    estimator: Estimator, logits: Tensor, sampler: Tensor, drawn: Tensor, rewards: Tensor
) -> Tensor:
    """Update of one batch of drawn arms, `[N]` with their rewards, by the logits."""
    logp = logits.log_softmax(-1)
    batch = Batch(
        rewards=rewards.unsqueeze(0),
        mask=torch.ones((1, len(drawn), 1), dtype=torch.bool),
        logp=logp[drawn].view(1, -1, 1),
        behavior_logp=sampler[drawn].view(1, -1, 1),
    )
    own = coefficients(estimator, batch).own.flatten()
    visits = torch.zeros_like(logits).index_add(0, drawn, own)
    return pull_back(visits.unsqueeze(0), logp.exp().unsqueeze(0))[0]
