"""Advantages that are sums over siblings, under a shared denominator.

    A_i = sum over m of own_m(i) H_m,     H_m = fixed_m + sum over j != i of sibling_m(j)

covers advantages that are affine in the rewards (own alpha r and 1, siblings 0 and beta r) and the
numerator of a baseline weighted by length (own r and -1, siblings T and T r).  With the normalized
tilted law of a response and n siblings left, h = E[sibling], C its covariance,

    E[H](n) = fixed + n h,        E[H H'](n) = E[H](n) E[H](n)' + n C

a pair of responses i, j gives, with Y_m = E[own_m x] and Z_mk = E[own_m sibling_k x],

    sum over m, k of  Z_mk . Z_km + 2 Z_mk . Y_k E[H_m](G - 2) + Y_m . Y_k E[H_m H_k](G - 2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from windage.toy.exact.coupled.tilted import Expansion, Tilt

LEAST = 1e-300


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """An advantage that is a sum over siblings.

    Args:
        own: functions of the response itself.
        sibling: functions of each of the others.
        fixed: what is added to the sums over the others.
        sign: for which sign of the advantage each is, 0 or 1.
    """

    own: Float[Tensor, "M K"]
    sibling: Float[Tensor, "M K"]
    fixed: Float[Tensor, " M"]
    sign: Int[Tensor, " M"]


@final
class Siblings:
    """The sums over siblings under a tilted law, at every node.

    Args:
        tilt: measure of one response.
        sums: the advantage.
    """

    def __init__(self, tilt: Tilt, sums: Sums) -> None:
        m = len(sums.own)
        squares = (sums.sibling.unsqueeze(1) * sums.sibling).flatten(0, 1)
        one = torch.ones_like(sums.own[:1])
        found = tilt.mass(torch.cat([one, sums.sibling, squares]))
        self.fixed = sums.fixed.unsqueeze(1)
        self.mass = found[0]
        self.h = found[1 : m + 1] / self.mass.clamp(min=LEAST)
        second = found[m + 1 :].view(m, m, -1) / self.mass.clamp(min=LEAST)
        self.covariance = second - self.h.unsqueeze(1) * self.h

    def mean(self, n: int) -> Float[Tensor, "M Q"]:
        """E[H] over n siblings."""
        return self.fixed + n * self.h

    def product(self, n: int) -> Float[Tensor, "M M Q"]:
        """E[H H'] over n siblings."""
        mean = self.mean(n)
        return mean.unsqueeze(1) * mean + n * self.covariance


def by_siblings(
    tilt: Tilt,
    sums: Sums,
    group_size: int,
    first: Float[Tensor, " Q"],
    second: Float[Tensor, " Q"],
    signs: int,
) -> Expansion:
    """Mean and mean square of a group whose advantages are sums over siblings.

    Args:
        tilt: measure of one response.
        sums: the advantage.
        group_size: responses of a group.
        first, second: weights of the nodes, for the mean and the mean square, times what the other
            prompts contribute there.
        signs: of the advantage, for which contributions differ.
    """
    siblings, g, m = Siblings(tilt, sums), group_size, len(sums.own)
    one = g * siblings.mass.pow(g - 1)
    two = second * g * (g - 1) * siblings.mass.clamp(min=LEAST).pow(g - 2) if g > 1 else 0 * second
    mean = sums.own * tilt.weighted(first * one * siblings.mean(g - 1))
    products = (second * one * siblings.product(g - 1)).flatten(0, 1)
    square = tilt.weighted(products).unflatten(0, (m, m))
    square = (sums.own.unsqueeze(1) * sums.own * square).sum(1)
    features = [*sums.own, *(sums.own.unsqueeze(1) * sums.sibling).flatten(0, 1)]
    kernel = two.new_zeros((m + m * m, m + m * m, len(two)))
    kernel[:m, :m] = two * siblings.product(g - 2)
    for a in range(m):
        for b in range(m):
            kernel[m + a * m + b, m + b * m + a] = two
            kernel[m + a * m + b, b] += 2 * two * siblings.mean(g - 2)[a]
    sign = torch.cat([sums.sign, sums.sign.repeat_interleave(m)])
    used = torch.stack([bool(f.any()) * torch.ones(()) for f in features]).nonzero().squeeze(1)
    return Expansion(
        features=torch.stack(features)[used],
        sign=sign[used],
        kernel=kernel[used][:, used],
        mean=_by_sign(mean, sums.sign, signs),
        square=_by_sign(square, sums.sign, signs),
    )


def _by_sign(
    values: Float[Tensor, "M K"], sign: Int[Tensor, " M"], signs: int
) -> Float[Tensor, "S K"]:
    """Sums of the rows of each sign."""
    return values.new_zeros((signs, values.shape[1])).index_add(0, sign, values)
