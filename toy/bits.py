"""Independent bits: long responses whose probability of being right is known exactly.

A response is a row of bits, bit i one with probability sigmoid(theta[i]); it is right if the number
of its ones lies in a window.  Responses are drawn once from fair coins, and every step learns from
a few of them, drawn with replacement.  A leading axis S holds seeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.batch import Batch
from windage.estimators.estimator import Estimator, coefficients
from windage.toy.learning import Update


@final
@dataclass(frozen=True, kw_only=True)
class Window:
    """Right are the responses of `bits` bits with `low` to `high` ones."""

    low: int
    high: int
    bits: int = 40

    def chance(self, theta: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch"]:
        """Probability of a right response: the law of the number of ones, bit by bit.

        Example:
            >>> Window(low=24, high=28).chance(torch.zeros(40)).item() # doctest: +ELLIPSIS
            0.130...
        """
        law = torch.zeros((*theta.shape[:-1], self.bits + 1), dtype=theta.dtype)
        law[..., 0] = 1
        for bit in range(self.bits):
            one = theta[..., bit, None].sigmoid()
            law = law * (1 - one) + one * law.roll(1, -1)
        return law[..., self.low : self.high + 1].sum(-1)

    def rewards(self, ones: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """+1 for a number of ones inside the window, -1 outside."""
        right = (ones >= self.low) & (ones <= self.high)
        return torch.where(right, 1.0, -1.0).double()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Flips:
    """Responses drawn once from fair coins, and which of them each step learns from.

    Args:
        bits: 0 or 1.
        rewards: of each response.
        picked: their numbers, a row a step.
    """

    bits: Float[Tensor, "S N B"]
    rewards: Float[Tensor, "S N"]
    picked: Int[Tensor, "S steps M"]


def flip(
    window: Window,
    count: int,
    minibatch: int,
    steps: int,
    generators: Iterable[np.random.Generator],
) -> Flips:
    """Draw the responses and then the minibatches of every step, seed by seed."""
    bits, picked = [], []
    for rng in generators:
        bits.append(rng.random((count, window.bits)) < 0.5)
        picked.append(rng.integers(0, count, (steps, minibatch)))
    drawn = torch.from_numpy(np.stack(bits))
    return Flips(
        bits=drawn.double(),
        rewards=window.rewards(drawn.sum(-1)),
        picked=torch.from_numpy(np.stack(picked)),
    )


def flipped_update(flips: Flips, estimator: Estimator) -> Update:
    """Update of an estimator on the step's minibatch, by theta `[*batch S B]`.

    A response is one of a prompt's group, with a token a bit; a bit's score is bit - sigmoid.
    """
    seeds = torch.arange(len(flips.bits)).unsqueeze(1)

    def update(theta: Tensor, step: int) -> Tensor:
        index = flips.picked[:, step]
        bits = flips.bits[seeds, index]
        one = theta.unsqueeze(-2)
        logp = -torch.nn.functional.softplus(torch.where(bits > 0, -one, one)).unsqueeze(-3)
        rewards = flips.rewards[seeds, index].unsqueeze(-2)
        batch = Batch(
            rewards=rewards.expand(logp.shape[:-1]),
            mask=torch.ones_like(logp, dtype=torch.bool),
            logp=logp,
            behavior_logp=torch.full_like(logp, -float(np.log(2))),
        )
        own = coefficients(estimator, batch).own.squeeze(-3)
        return (own * (bits - one.sigmoid())).sum(-2)

    return update
