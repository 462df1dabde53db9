"""Moments of one response under the tilts e^(-t s), and of a group that shares a denominator.

With 1/S a sum of e^(-t S), S the sum of s over responses, a group at node t is a group of
independent responses under the measure mu e^(-t s).  For polynomials in the responses

    E g     = sum over t of E[f(t, y) x],         E|g|^2 = sum over t of E[q(t, y) |x|^2]
              + sum over t and pairs a, b of kernel[a, b, t] X_a(t) . X_b(t)

with x what a response contributes and X_a(t) = E[feature_a e^(-t s) x].  The first two sums are
functions of the response, so that one recursion over the tree serves all nodes; only the last needs
vectors by node, or by value of s where s takes few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.estimators.estimator import Estimator
from windage.toy.exact.classes import signs
from windage.toy.exact.prefix_tree import Weights, response_moments, tree_weights
from windage.toy.exact.walk import Walk

CELLS = 2_000_000
# Nodes whose pairs count for less than this part of the largest are left out.
NEGLIGIBLE = 1e-28
FEWER = 4
# A class whose tilted share of the responses is smaller has this share.
LEAST = 1e-140


@final
class Tilt:
    """e^(-t s) of every response of a prompt at every node.

    Args:
        walk: of one prompt.
        s: what a response adds to the denominator.
        nodes: values of t.
    """

    def __init__(self, walk: Walk, s: Float[Tensor, " K"], nodes: Float[Tensor, " Q"]) -> None:
        self.flow = walk.leaf_flow[0]
        self.nodes = nodes
        self.values, self.place = s.unique(return_inverse=True)
        self.table = torch.exp(-nodes.unsqueeze(1) * self.values)

    def mass(self, features: Float[Tensor, "F K"]) -> Float[Tensor, "F Q"]:
        """E[f e^(-t s)] of one response."""
        by_value = features.new_zeros((len(features), len(self.values)))
        return by_value.index_add(1, self.place, features * self.flow) @ self.table.T

    def masses(self, members: Float[Tensor, "R K"]) -> Float[Tensor, "R Q"]:
        """The same for classes of responses, above 0 so that it may be divided by."""
        found = self.mass(members)
        return torch.maximum(found, LEAST * found.sum(0))

    def weighted(self, coefficients: Float[Tensor, "F Q"]) -> Float[Tensor, "F K"]:
        """Sum over nodes of coefficient times e^(-t s), for every response."""
        return (coefficients @ self.table)[:, self.place]

    def few(self, used: int) -> bool:
        """Whether s takes few values beside the nodes used."""
        return len(self.values) * FEWER <= max(used, FEWER)

    def by_value(self) -> Float[Tensor, "L K"]:
        """1 for the responses of each value of s."""
        return torch.eye(len(self.values), dtype=self.table.dtype)[:, self.place]

    def basis(self, used: int) -> tuple[Float[Tensor, "B K"], Float[Tensor, "Q B"]]:
        """Functions of the response of which the tilts are combinations, and how.

        The values of s where they are few beside the nodes `used`, else the tilts themselves.
        """
        if self.few(used):
            return self.by_value(), self.table
        return self.table[:, self.place], torch.eye(len(self.nodes), dtype=self.table.dtype)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Expansion:
    """Mean and mean square of one prompt's part, in moments of one response.

    Args:
        features: functions of the response.
        sign: for which sign of the advantage each feature's x is, 0 or 1.
        kernel: coefficient of each pair of features at each node.
        mean: f by sign, summed over the nodes.
        square: q by sign, likewise.
    """

    features: Float[Tensor, "F K"]
    sign: Int[Tensor, " F"]
    kernel: Float[Tensor, "F F Q"]
    mean: Float[Tensor, "S K"]
    square: Float[Tensor, "S K"]


@final
class Contribution:
    """What one response of a prompt contributes, for each sign of the advantage.

    Args:
        estimator: read for corrections and centering.
        walk: of one prompt.
        leaf: a factor of each response.
    """

    def __init__(self, estimator: Estimator, walk: Walk, leaf: Float[Tensor, " K"]) -> None:
        self.walk, self.leaf = walk, leaf.abs()
        self.chosen = signs(estimator)
        self.weights: list[Weights] = [
            tree_weights(estimator, walk, sign, leaf.unsqueeze(0)) for sign in self.chosen
        ]

    def mean(self, sign: int, features: Float[Tensor, "F K"]) -> Float[Tensor, "F D"]:
        """E[f x] for every feature f."""
        out = features.new_empty((1, len(features), *self.walk.probability.shape[1:]))
        response_moments(self.walk, self.weights[sign], self.chosen[sign], [features], [], out=out)
        return out[0].flatten(1)

    def norm(self, sign: int, feature: Float[Tensor, " K"]) -> Float[Tensor, ""]:
        """E[f |x|^2]."""
        weights, row = self.weights[sign], feature.unsqueeze(0)
        _, found = response_moments(self.walk, weights, self.chosen[sign], [], [row])
        return found[0, 0]

    def moments(
        self, tilt: Tilt, terms: Expansion, drift: Float[Tensor, " K"]
    ) -> tuple[Float[Tensor, " D"], Float[Tensor, ""], Float[Tensor, " D"]]:
        """Mean, mean square and drift of the prompt's part."""
        mean, drifts = self.mean(0, torch.stack([terms.mean[0], drift]))
        square = self._pairs(tilt, terms) + self.norm(0, terms.square[0])
        for sign in range(1, len(self.chosen)):
            mean = mean + self.mean(sign, terms.mean[sign : sign + 1])[0]
            square = square + self.norm(sign, terms.square[sign])
        return mean, square, drifts

    def _pairs(self, tilt: Tilt, terms: Expansion) -> Float[Tensor, ""]:
        """Sum over nodes of kernel[a, b] X_a . X_b."""
        if len(terms.features) == 0:
            return tilt.table.new_zeros(())
        reach = tilt.mass(terms.features.abs() * self.leaf)
        size = torch.einsum("abq,aq,bq->q", terms.kernel.abs(), reach, reach)
        used = (~(size <= NEGLIGIBLE * size.max())).nonzero().squeeze(1)
        kernel, table = terms.kernel[..., used], tilt.table[used]
        if tilt.few(len(used)):
            x = self.vectors(terms, tilt.by_value())
            gram = x.flatten(0, 1) @ x.flatten(0, 1).T
            weight = torch.einsum("abq,ql,qm->albm", kernel, table, table)
            return (weight.flatten() * gram.flatten()).sum()
        total = kernel.new_zeros(())
        for piece in self._pieces(len(used), len(terms.features)):
            x = self.vectors(terms, table[piece][:, tilt.place]).transpose(0, 1)
            gram = x @ x.transpose(1, 2)
            total = total + (gram * kernel[..., piece].permute(2, 0, 1)).sum()
        return total

    def _pieces(self, nodes: int, features: int) -> Iterator[slice]:
        width = features * max(self.walk.probability[0].numel(), self.walk.tree.leaves)
        step = max(1, CELLS // width)
        return (slice(start, start + step) for start in range(0, nodes, step))

    def vectors(self, terms: Expansion, basis: Float[Tensor, "B K"]) -> Float[Tensor, "F B D"]:
        """E[feature basis x] for every feature and row of the basis."""
        size = self.walk.probability[0].numel()
        out = basis.new_empty((len(terms.features), len(basis), size))
        for sign in range(len(self.chosen)):
            mine = (terms.sign == sign).nonzero().squeeze(1)
            leaves = terms.features[mine].unsqueeze(1) * basis
            if len(mine):
                out[mine] = self.mean(sign, leaves.flatten(0, 1)).view(len(mine), -1, size)
        return out
