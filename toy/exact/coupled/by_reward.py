"""What one response of a prompt contributes, by its reward: moments and inner products.

With X_k = E[x 1{reward k}] for each sign of the advantage, an engine needs

    sum over k of f_k X_k,    sum over k of f_k E[|x|^2 1{k}],    sums over k, l of B_kl X_k . X_l

The first two are one recursion over the tree each.  On a tree of one step the inner products are a
diagonal plus a few products, X_k . X_l = 1{k=l} D_k + sum over a, b of F_ak C_ab F'_bl, and cost
little; on deeper trees F holds the X_k themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.advantage import ROUNDING
from windage.estimators.estimator import Estimator
from windage.toy.exact.classes import signs
from windage.toy.exact.prefix_tree import Weights, flow, response_moments, tree_weights
from windage.toy.exact.walk import Walk
from windage.toy.problems import Problem

CELLS = 4_000_000


def merged(rewards: Float[Tensor, " M"], drawn: Float[Tensor, " M"]) -> Float[Tensor, " R"]:
    """The rewards that occur, ascending, those that differ by rounding alone as one.

    Args:
        rewards: of each response.
        drawn: probability of each response; those of 0 do not count.

    Example:
        >>> merged(torch.tensor([0.3, 1.0, 0.1 + 0.2, 5.0]), torch.tensor([0.4, 0.2, 0.4, 0.0]))
        tensor([0.3000, 1.0000])
    """
    values = rewards[drawn > 0].unique()
    rounding = ROUNDING * torch.finfo(values.dtype).eps * values.abs().max()
    fresh = values.diff(prepend=values[:1] - 1 - 2 * rounding) > rounding
    return values[fresh]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Products:
    """Inner products X_k . X_l of the contributions for two signs.

    1{k=l} diagonal[k] + left[:, k]' core right[:, l]
    """

    diagonal: Float[Tensor, " R"]
    left: Float[Tensor, "A R"]
    core: Float[Tensor, "A A"]
    right: Float[Tensor, "A R"]

    @cached_property
    def same(self) -> Float[Tensor, " R"]:
        """The products part of X_k . X_k."""
        return ((self.core @ self.right) * self.left).sum(0)

    def rows(self, of: slice) -> Float[Tensor, "r R"]:
        """X_k . X_l for some k and every l."""
        dense = self.left[:, of].T @ (self.core @ self.right)
        here = torch.arange(*of.indices(len(self.diagonal)))
        dense[torch.arange(len(here)), here] += self.diagonal[of]
        return dense


@final
class ByReward:
    """The responses of one prompt by reward.

    Args:
        estimator: read for corrections and centering.
        problem: of one prompt.
        leaf: a factor of each response, the aggregation's; None is 1.
    """

    def __init__(
        self, estimator: Estimator, problem: Problem, leaf: Float[Tensor, "1 M"] | None
    ) -> None:
        self.walk = Walk(problem)
        drawn = self.walk.leaf_flow[0]
        self.rewards = merged(problem.rewards[0], drawn)
        between = (self.rewards[1:] + self.rewards[:-1]) / 2
        self.place: Int[Tensor, " M"] = torch.searchsorted(between, problem.rewards[0])
        self.mass = self.rewards.new_zeros(len(self.rewards)).index_add(0, self.place, drawn)
        self.signs = signs(estimator)
        self.weights: list[Weights] = [
            tree_weights(estimator, self.walk, sign, leaf) for sign in self.signs
        ]

    def _moments(self, sign: int, mean: list[Tensor], norm: list[Tensor]) -> tuple[Tensor, Tensor]:
        walk, chosen = self.walk, self.signs[sign]
        return response_moments(walk, self.weights[sign], chosen, mean, norm)

    def moments(
        self, mean: Float[Tensor, "S R"], norm: Float[Tensor, "S R"]
    ) -> tuple[Float[Tensor, "N V"], Float[Tensor, ""]]:
        """Sums over signs and rewards of mean X and of norm E[|x|^2 1{k}]."""
        total, square = torch.zeros_like(self.walk.probability[0]), norm.new_zeros(())
        for sign in range(len(self.signs)):
            features = [f[self.place].unsqueeze(0) for f in (mean[sign], norm[sign])]
            found, squares = self._moments(sign, features[:1], features[1:])
            total, square = total + found[0, 0], square + squares[0, 0]
        return total, square

    @cached_property
    def drift(self) -> Float[Tensor, "N V"]:
        """E[x] under a positive advantage."""
        ones = torch.ones_like(self.place, dtype=self.mass.dtype).unsqueeze(0)
        return self._moments(0, [ones], [])[0][0, 0]

    @cached_property
    def _vectors(self) -> list[Float[Tensor, "R NV"]]:
        """X_k for each sign, one recursion a reward."""
        found = []
        for sign in range(len(self.signs)):
            rows = [self._moments(sign, list(piece), [])[0].flatten(1) for piece in self._pieces()]
            found.append(torch.cat(rows))
        return found

    def _pieces(self) -> Iterator[Tensor]:
        numbers = torch.arange(len(self.rewards))
        for some in numbers.split(max(1, CELLS // max(1, len(self.place)))):
            yield (self.place == some.unsqueeze(1)).to(self.mass.dtype).unsqueeze(1)

    def _visits(self, sign: int) -> tuple[Tensor, Tensor, Tensor]:
        """On a tree of one step: own coefficient of each arm, its flow, and the head's."""
        weights = self.weights[sign]
        reached = flow(self.walk, weights, self.signs[sign], [None], (1, 0))[0][0].view(-1)
        own = reached if weights.node is None else reached * weights.node.view(-1)
        head = weights.centered
        return own, reached, torch.zeros_like(own) if head is None else head.view(-1)

    def _sums(self, values: Tensor) -> Tensor:
        """Sums over the responses of each reward."""
        shape = (*values.shape[:-1], len(self.mass))
        return values.new_zeros(shape).index_add(-1, self.place, values)

    def products(self, first: int = 0, second: int = 0) -> Products:
        """Inner products for two signs, by their place in `signs`."""
        if self.walk.tree.horizon > 1:
            return self._from_vectors(first, second)
        pi = self.walk.probability.view(-1)
        own, reached, head = self._visits(first)
        other, reached_other, head_other = self._visits(second)

        # x = V - pi sum(V), V = own f - head (reached . f), F = (own, pi own, reached, head own)
        def factors(own: Tensor, reached: Tensor, against: Tensor) -> Tensor:
            return self._sums(torch.stack([own, pi * own, reached, against * own]))

        a, b = head.sum(), head_other.sum()
        whole, whole_other = pi @ head, pi @ head_other
        square = pi @ pi
        core = pi.new_zeros((4, 4))
        core[0, 0], core[0, 1], core[1, 0] = square, -1, -1
        core[0, 2], core[2, 0] = whole_other - square * b, whole - square * a
        core[1, 2], core[2, 1] = b, a
        core[2, 2] = head @ head_other - a * whole_other - b * whole + square * a * b
        core[3, 2], core[2, 3] = -1, -1
        return Products(
            diagonal=self._sums(own * other),
            left=factors(own, reached, head_other),
            core=core,
            right=factors(other, reached_other, head),
        )

    def _from_vectors(self, first: int, second: int) -> Products:
        x, y = self._vectors[first], self._vectors[second]
        if first == second and x.shape[0] < x.shape[1]:
            values, basis = torch.linalg.eigh(x @ x.T)
            x = y = basis * values.clamp(min=0).sqrt()
        return Products(
            diagonal=torch.zeros_like(self.mass),
            left=x.T,
            core=torch.eye(x.shape[1], dtype=x.dtype),
            right=y.T,
        )
